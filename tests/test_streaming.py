"""Graphs larger than memory: rows that stay in their file, and builds of processes that may not hold them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import partition_tools.stored as stored_module
from fullgraph.files import checksum
from partition_tools.builder import build
from partition_tools.sources import load, save_h5, save_npz
from partition_tools.sources.archive import npy_rows
from partition_tools.stored import StoredRows, row_blocks, scan
from partition_tools.verify import verify
from tests.builds import assignment, rich_graph

LIMITED = """
import json, resource, sys
from pathlib import Path
from partition_tools.__main__ import main
lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit, field, room, *arguments = sys.argv[1:]
held = int(lines[field].split()[0]) * 1024
resource.setrlimit(getattr(resource, limit), (held + int(room),) * 2)
sys.exit(main(arguments))
"""


def limited(limit: str, room: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """partition-tools in a process that may take ``room`` bytes more than it has when it starts."""
    field = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}[limit]
    command = [sys.executable, "-c", LIMITED, limit, field, str(room), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[1])


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small arrays stay in their files."""
    for module in ("archive", "hdf5_graph"):
        monkeypatch.setattr(f"partition_tools.sources.{module}.STORED_FROM", 1)
    monkeypatch.setattr(stored_module, "BLOCK_BYTES", 200)


@pytest.mark.parametrize("dtype", ["f4", ">f8", "i2", "?", "f2"])
def test_rows_in_a_file_are_those_of_the_array(dtype: str, tmp_path: Path, few_bytes: None) -> None:
    values = np.random.default_rng(0).integers(0, 3, (50, 7)).astype(dtype)
    np.save(tmp_path / "x.npy", values)
    rows = npy_rows(str(tmp_path / "x.npy"))
    assert isinstance(rows, StoredRows)
    expected = values.astype(np.uint8) if dtype == "?" else values
    assert rows.shape == (50, 7)
    assert rows.dtype == expected.dtype.newbyteorder("=")
    assert np.array_equal(np.asarray(rows), expected)
    assert np.array_equal(np.concatenate([block for _, block in row_blocks(rows, 100)]), expected)
    assert rows[40:99].shape == (10, 7)


def test_one_pass_tells_what_many_do() -> None:
    x = np.zeros((300, 5), np.float32)
    x[7, 2], x[8, 0], x[250, 4], x[251, 1] = np.nan, -0.0, np.inf, 3
    found = scan(x)
    assert (found.not_finite, found.first, found.nonzero, found.stored) == (2, (7, 2), 3, 4)


@pytest.mark.parametrize("ending", ["npz", "h5"])
def test_a_build_from_rows_in_a_file_is_the_same(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, graph = tmp_path / f"rich.{ending}", rich_graph()
    (save_npz if ending == "npz" else save_h5)(path, graph)
    part = assignment(np.arange(30) % 3, 3)
    whole = build(load(path), part, tmp_path / "a")
    for module in ("archive", "hdf5_graph"):
        monkeypatch.setattr(f"partition_tools.sources.{module}.STORED_FROM", 1)
    left = load(path)
    assert isinstance(left.x, StoredRows)
    assert build(left, part, tmp_path / "b") == whole
    assert verify(tmp_path / "b") == []


def test_a_damaged_file_is_found_before_its_rows_are_used(tmp_path: Path, few_bytes: None) -> None:
    x = np.random.default_rng(1).standard_normal((30, 6))
    for path, save in ((tmp_path / "g.npz", save_npz), (tmp_path / "g.h5", save_h5)):
        save(path, rich_graph(x=x))
        content = bytearray(path.read_bytes())
        at = content.index(x[17].tobytes())
        content[at] ^= 1
        path.write_bytes(content)
        with pytest.raises(ValueError, match="differs from its checksum"):
            load(path)


def test_a_file_cut_short_during_the_build(tmp_path: Path, few_bytes: None) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.ones((40, 3)))
    rows = npy_rows(str(path))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"x.npy: has become shorter while it was read"):
        rows[30:40]


N, WIDTH = 200_000, 256


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph of 200,000 nodes whose features take 205 MB."""
    folder, rng = tmp_path_factory.mktemp("wide"), np.random.default_rng(0)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (N, WIDTH))
    for start in range(0, N, 10_000):
        x[start : start + 10_000] = rng.standard_normal((10_000, WIDTH), np.float32)
    x.flush()
    src = rng.integers(0, N, 400_000)
    np.savez(folder / "graph.npz", edge_index=np.stack([src, (src + rng.integers(1, 50, src.size)) % N]), num_nodes=N)
    return folder


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_features_larger_than_memory(limit: str, wide: Path, tmp_path: Path) -> None:
    out, room = tmp_path / "shards", 150 << 20
    assert room < 4 * N * WIDTH
    arguments = ("build", str(wide / "graph.npz"), "--features", str(wide / "x.npy"), "--parts", "4")
    done = limited(limit, room, *arguments, "--method", "contiguous", "--out", str(out))
    assert done.returncode == 0, done.stderr
    x = np.load(wide / "x.npy", mmap_mode="r")
    for q in range(4):
        with h5py.File(out / f"part-{q:05d}-of-00004.h5") as file:
            assert np.array_equal(file["features/x"][:100], x[file["owned/global_id"][:100]])
            assert np.array_equal(file["features/x"][-100:], x[file["owned/global_id"][-100:]])
    manifest = json.loads((out / "manifest.json").read_text())
    assert all(checksum(out / file["path"]) == file["xxh3"] for file in manifest["files"])
