"""Who imports whom: one direction, and no torch where no model is trained."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FULLGRAPH, PARTITION_TOOLS = ROOT / "fullgraph", ROOT / "partition_tools"

# A module of fullgraph imports only modules named before it.
NUMPY_LAYERS = (
    "wording",
    "records",
    "host",
    "files",
    "hdf5",
    "shards",
    "merge",
    "cut",
    "config",
    "checks",
    "cost",
    "footprint",
    "step",
)
TORCH_LAYERS = (
    *(
        "buffers",
        "world",
        "dropout",
        "gather",
        "learned",
        "kernels",
        "selftest",
        "attention",
        "reach",
        "plan",
        "recompute",
        "induced",
        "codec",
        "history",
        "exchange",
        "policy",
        "propagate",
        "convolve",
        "view",
        "models",
    ),
    *(
        "loading",
        "metrics",
        "finite",
        "runlog",
        "profile",
        "signals",
        "stopping",
        "checkpoint",
        "trainer",
        "memory",
        "course",
        "resume",
        "describe",
        "loop",
    ),
    *("recipes", "compare", "compare_page"),
    *("inference", "probe", "doctor", "launch", "demo", "__main__"),
)
LAYERS = (*NUMPY_LAYERS, *TORCH_LAYERS)


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    """Dotted names of what a file imports: ``fullgraph.shards.Shard`` for ``from fullgraph.shards import Shard``."""
    tree = ast.parse(path.read_text(), str(path))
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name} has a relative import; imports here are absolute"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def of_fullgraph(path: Path) -> set[str]:
    """Modules of fullgraph that a file imports; "" for the package itself."""
    parts = [name.split(".") for name in imports(path)]
    return {names[1] if len(names) > 1 else "" for names in parts if names[0] == "fullgraph"}


def files(package: Path) -> list[Path]:
    found = sorted(package.rglob("*.py"))
    assert found
    return found


def test_every_module_has_its_layer() -> None:
    modules = {path.stem for path in files(FULLGRAPH)} - {"__init__"}
    assert modules <= set(LAYERS), "a new module needs its place in LAYERS"


@pytest.mark.parametrize("path", files(FULLGRAPH), ids=lambda path: path.stem)
def test_imports_go_in_one_direction(path: Path) -> None:
    if path.stem == "__init__":  # lazy; the test in a new process says that it is
        return
    before = set(LAYERS[: LAYERS.index(path.stem)])
    assert of_fullgraph(path) <= before, f"{path.stem} may import only {sorted(before)}"


def test_partition_tools_takes_only_the_numpy_half_of_fullgraph() -> None:
    taken = {str(path.relative_to(ROOT)): of_fullgraph(path) - set(NUMPY_LAYERS) for path in files(PARTITION_TOOLS)}
    assert {path: names for path, names in taken.items() if names} == {}


def test_few_commands_take_partition_tools_and_only_when_they_are_given() -> None:
    for path in files(FULLGRAPH):
        names = imports(path, top_level=path.stem in ("demo", "doctor", "compare"))
        assert not [name for name in names if name.split(".")[0] == "partition_tools"], path


@pytest.mark.parametrize(
    "path",
    [
        *files(PARTITION_TOOLS),
        *(FULLGRAPH / f"{name}.py" for name in NUMPY_LAYERS if (FULLGRAPH / f"{name}.py").exists()),
    ],
    ids=lambda path: f"{path.parent.name}.{path.stem}",
)
def test_numpy_modules_name_no_torch(path: Path) -> None:
    if path == PARTITION_TOOLS / "sources" / "tensors.py":  # reads .pt files, and names torch where it does so only
        assert {name for name in imports(path) if name.startswith("torch")} == {"torch"}
        return
    assert not [name for name in imports(path) if name.split(".")[0] == "torch"]


def test_collectives_stand_in_the_world_alone() -> None:
    launcher = ("torch.distributed.elastic.", "torch.distributed.launcher.", "torch.distributed.TCPStore")
    for path in files(FULLGRAPH):
        names = [name for name in imports(path) if name.startswith("torch.distributed")]
        assert path.stem == "world" or all(name.startswith(launcher) for name in names), path


def in_new_process(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def test_importing_the_offline_half_loads_no_torch() -> None:
    names = ["fullgraph", *(f"fullgraph.{n}" for n in NUMPY_LAYERS if (FULLGRAPH / f"{n}.py").exists())]
    for path in files(PARTITION_TOOLS):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    assert "partition_tools.__main__" in names
    loaded = in_new_process(
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = [m for m in ('torch', 'matplotlib', 'sklearn') if m in sys.modules]\n"
        "    if heavy: print(name, 'loads', *heavy); break\n"
    )
    assert loaded == ""


def test_names_of_the_package_are_found_when_asked_for() -> None:
    found = in_new_process(
        "import sys, fullgraph\n"
        "fullgraph.Shard, fullgraph.Manifest, fullgraph.read_shard, fullgraph.read_manifest, fullgraph.TrainConfig\n"
        "assert 'torch' not in sys.modules\n"
        "for name in fullgraph.__all__: getattr(fullgraph, name)\n"
        "assert 'torch' in sys.modules\n"
        "try: fullgraph.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    assert found == "module 'fullgraph' has no attribute 'nothing'"
