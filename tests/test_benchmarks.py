"""The benchmarks run and tell what they must; what they measure is their own affair."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import graphs
from benchmarks.bench_network import most_bytes
from benchmarks.bench_policies import Pieces
from benchmarks.report import deliver
from partition_tools.sources.demo import parse

ROOT = Path(__file__).resolve().parents[1]


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--json", "--quick", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "nodes", "entries", "features", "classes", "train"),
    [
        ("arxiv-like", 169_343, 2.33e6, 128, 40, 0.54),
        ("arxiv-like/10", 16_934, 0.233e6, 128, 40, 0.54),
        ("reddit-like/3", 16_667, 1.667e6, 602, 41, 0.66),
        ("products-like", 2_449_029, 124e6, 100, 47, 0.08),
    ],
)
def test_graphs_have_the_sizes_that_are_told(
    name: str, nodes: int, entries: float, features: int, classes: int, train: float
) -> None:
    _, recipe = parse(graphs.spec(name))
    assert (recipe.nodes, recipe.features, recipe.classes, recipe.train) == (nodes, features, classes, train)
    assert recipe.nodes * recipe.degree == pytest.approx(entries, rel=5e-3)


def test_other_graphs_stand_for_themselves() -> None:
    assert graphs.spec("folder/graph.npz") == "folder/graph.npz"


def test_the_busiest_link_is_counted_in_both_directions() -> None:
    told = [{"sent_bytes": [0, 5, 1], "parameter_bytes": 30}, {"sent_bytes": [2, 0, 2]}, {"sent_bytes": [0, 4, 0]}]
    assert most_bytes(told) == 9 + 2 * 2 / 3 * 30


def test_lines_are_one_object_each(capsys: pytest.CaptureFixture[str]) -> None:
    record: dict[str, Any] = {"machine": {}, "results": [{"a": 1}, {"a": 2}]}
    deliver("nothing", "text", record, as_json=True, save=False, lines=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == record["results"]


def test_a_piece_is_done_once_for_what_it_is_made_from(tmp_path: Path) -> None:
    done = []

    def take(most: int | None, config: dict[str, Any], wanted: bool = True) -> tuple[Any, list[str]]:
        pieces = Pieces(tmp_path, most)
        return pieces.piece("a b", config, lambda: done.append(1) or len(done), wanted=wanted), pieces.missing

    assert take(None, {"x": 1}, wanted=False) == (None, [])
    assert take(0, {"x": 1}) == (None, ["a b"])
    assert take(1, {"x": 1}) == (1, [])
    assert take(0, {"x": 1}, wanted=False) == (1, [])
    assert take(1, {"x": 2}) == (2, [])


def test_kernels() -> None:
    found = json.loads(run("bench_kernels", "--widths", "16"))["results"]
    assert {f["kernel"] for f in found} == {"SpMM", "SDDMM"}
    assert all(f["seconds"] > 0 for f in found if f["form"].startswith("embedding_bag") and f["dtype"] == "float32")


@pytest.mark.skipif(importlib.util.find_spec("torch_geometric") is None, reason="needs torch-geometric")
def test_epoch() -> None:
    lines = [json.loads(line) for line in run("bench_epoch", "--models", "sage").splitlines()]
    keys = {"system", "graph", "model", "ranks", "threads", "allocator", "seconds", "peak_memory_bytes", "ratio"}
    assert all(keys <= set(line) for line in lines)
    system = [(line["system"], line["ranks"]) for line in lines if line["allocator"] == "system"]
    expected = [(name, ranks) for ranks in (1, 2) for name in ("ours", "ours, same work")]
    assert system == [*expected, ("pyg-edge_index", 1), ("pyg-csr", 1)]
    first = lines[0]
    assert first["ratio"] == 1
    assert first["bound_seconds"] > 0


@pytest.mark.slow
def test_scale() -> None:
    found = json.loads(run("bench_scale", "--ranks", "1", "2"))["results"]
    assert [f["ranks"] for f in found] == [1, 2, 1, 2]
    assert all(f["start_seconds"] > 0 and f["peak_memory_bytes"] >= f["most_memory_bytes"] for f in found)


@pytest.mark.slow
def test_policies() -> None:
    (found,) = json.loads(run("bench_policies"))["results"]
    assert [line["name"] for line in found["accuracy"]["recipes"]] == ["exact", "pipelined"]
    assert set(found["seconds"]) in (set(), {"exact", "pipelined", "no rows"})


@pytest.mark.slow
def test_network_leaves_no_namespace() -> None:
    def ours() -> set[str]:
        return {path.name for path in Path("/run/netns").glob("fg*")}

    before, out = ours(), run("bench_network", "--ranks", "2")
    assert ours() <= before
    if out:
        results = json.loads(out)["results"]
        assert len(results) == 9
        by_plan = {f["system"]: f["bytes"] for f in results}
        assert by_plan["cover"] <= by_plan["halo"]


def test_gpu_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run("bench_gpu") == ""
