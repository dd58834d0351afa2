"""Edges larger than memory: read in pieces, laid on disk, and built into the same shards as if they were in memory."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import partition_tools.mapped as mapped_module
from partition_tools import streaming
from partition_tools.assign import AssignOptions, assign
from partition_tools.builder import build
from partition_tools.graph import Graph
from partition_tools.mapped import Growing, extent, scratch
from partition_tools.sources import edge_list, load, save_h5, save_npz
from tests.builds import rich_graph
from tests.graphs import random_graph
from tests.test_streaming import limited

METHODS = ("contiguous", "random", "fennel", "metis", "bfs", "supernode:6")


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Even few edges stay on disk, and are gone through a few at a time; or none do."""
    for module in ("archive", "hdf5_graph"):
        monkeypatch.setattr(f"partition_tools.sources.{module}.STORED_FROM", 1)
    monkeypatch.setattr(edge_list, "_PIECE", 64)
    monkeypatch.setattr(streaming, "_BUCKET", 20)

    def change(yes: bool) -> None:
        for module in ("layout", "edge_list"):
            monkeypatch.setattr(f"partition_tools.sources.{module}.too_large", lambda size: yes)
        for module in ("graph", "mapped"):
            monkeypatch.setattr(f"partition_tools.{module}.EDGE_BLOCK", 7 if yes else 1 << 22)

    return change


def shards(graph: Graph, folder: Path, method: str = "contiguous") -> dict[str, bytes]:
    build(graph, assign(graph, AssignOptions(parts=3, method=method)), folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def npz(folder: Path) -> tuple[str, dict[str, Any]]:
    save_npz(folder / "g.npz", rich_graph())
    return str(folder / "g.npz"), {}


def h5(folder: Path) -> tuple[str, dict[str, Any]]:
    save_h5(folder / "g.h5", rich_graph())
    return str(folder / "g.h5"), {}


def edges() -> np.ndarray[Any, np.dtype[np.int64]]:
    graph = random_graph("g", nodes=40, edges=150, loops=5)
    return np.stack([graph.src, graph.dst])


def npy(folder: Path) -> tuple[str, dict[str, Any]]:
    np.save(folder / "g.npy", edges())
    return str(folder / "g.npy"), {"num_nodes": 41, "features": "degree"}


def npy_rows(folder: Path) -> tuple[str, dict[str, Any]]:
    np.save(folder / "g.npy", np.ascontiguousarray(edges().T + 1, ">i4"))
    return str(folder / "g.npy"), {"index_base": 1, "drop_loops": True}


def csv(folder: Path) -> tuple[str, dict[str, Any]]:
    text = "# from somewhere\nsource,target,weight\n"
    text += "".join(f"{u},{v},{(u + 2 * v) % 5 + 0.5}\n" + "# a comment\n" * int(u == 3) for u, v in edges().T)
    (folder / "g.csv").write_text(text)
    return str(folder / "g.csv"), {"weights": True}


def packed(folder: Path) -> tuple[str, dict[str, Any]]:
    text = "".join(f"{1000 * u + 7}\t{1000 * v + 7}\r\n" for u, v in edges().T)
    (folder / "g.txt.gz").write_bytes(gzip.compress(text.encode()))
    return str(folder / "g.txt.gz"), {"undirected": True, "duplicates": "first"}


def by_row(folder: Path) -> tuple[str, dict[str, Any]]:
    (folder / "g.el").write_text("".join(f"{u + 1} {v + 1}\n" for u, v in edges().T))
    return str(folder / "g.el"), {"num_nodes": 40, "index_base": 1}


def names(folder: Path) -> tuple[str, dict[str, Any]]:
    (folder / "g.csv").write_text("".join(f"n{u},n{v}\n" for u, v in edges().T))
    return str(folder / "g.csv"), {}


@pytest.mark.parametrize("write", [npz, h5, npy, npy_rows, csv, packed, by_row, names])
def test_a_build_from_edges_on_disk_is_the_same(
    write: Callable[[Path], tuple[str, dict[str, Any]]], tmp_path: Path, on_disk: Callable[[bool], None]
) -> None:
    path, options = write(tmp_path)
    on_disk(False)
    whole = load(path, **options)
    assert not whole.edges_on_disk
    expected = shards(whole, tmp_path / "whole")
    on_disk(True)
    pieces = load(path, **options)
    in_memory = write is names or "undirected" in options
    assert pieces.edges_on_disk != in_memory
    assert shards(pieces, tmp_path / "pieces") == expected


@pytest.mark.parametrize("method", METHODS)
def test_every_method_assigns_edges_on_disk_alike(method: str, tmp_path: Path, on_disk: Callable[[bool], None]) -> None:
    np.save(tmp_path / "g.npy", edges())
    parts = []
    for yes in (False, True):
        on_disk(yes)
        graph = load(str(tmp_path / "g.npy"))
        assert graph.edges_on_disk == yes
        parts.append(assign(graph, AssignOptions(parts=3, method=method)).part)
    assert np.array_equal(*parts)


def test_a_wrong_line_far_down_is_named(tmp_path: Path, on_disk: Callable[[bool], None]) -> None:
    lines = ["# head", *(f"{u},{v}" for u, v in edges().T)]
    lines[100] = "5,six"
    (tmp_path / "g.csv").write_text("\n".join(lines))
    on_disk(True)
    with pytest.raises(ValueError, match=r"g.csv, line 101: 'six' is not a whole number"):
        load(str(tmp_path / "g.csv"))
    lines[100] = "5,6,7"
    (tmp_path / "g.csv").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"g.csv, line 101: 3 columns, but the first row has 2"):
        load(str(tmp_path / "g.csv"))
    lines[100] = "5,41"
    (tmp_path / "g.csv").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"g.csv, line 101: edge 5 -> 41: 40 nodes \(--num-nodes\).* 1 such edge"):
        load(str(tmp_path / "g.csv"), num_nodes=40)


def test_leading_zeros_far_down_make_names(tmp_path: Path, on_disk: Callable[[bool], None]) -> None:
    (tmp_path / "g.csv").write_text("".join(f"{i},{i + 1}\n" for i in range(90)) + "007,1\n")
    on_disk(True)
    graph = load(str(tmp_path / "g.csv"))
    assert "007" in graph.node_ids.tolist() if graph.node_ids is not None else False
    assert any("some begin with 0" in change for change in graph.changes)


def test_scratch_files_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held, growing = scratch((100, 2), np.int64), Growing(np.int32)
    growing.add(np.arange(5))
    held[3] = 7
    assert list(tmp_path.iterdir()) == []
    assert extent(growing.array()) == (0, 4)
    monkeypatch.setattr(mapped_module.shutil, "disk_usage", lambda path: type("", (), {"free": 10})())
    with pytest.raises(ValueError, match=r"of edges are to be laid there .*TMPDIR"):
        scratch((100, 2), np.int64)


def test_options_that_need_all_edges_say_so(
    tmp_path: Path, on_disk: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "g.npy", edges())
    on_disk(True)
    monkeypatch.setattr("partition_tools.prepare.available_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"--undirected sorts all edges in memory, .* apply it before"):
        load(str(tmp_path / "g.npy"), undirected=True)


EDGES = 16_000_000


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 million edges, 256 MB as int64, among 50,000 nodes."""
    path, rng = tmp_path_factory.mktemp("long") / "edges.npy", np.random.default_rng(0)
    there = np.lib.format.open_memmap(path, "w+", np.int64, (2, EDGES))
    for start in range(0, EDGES, 1 << 20):
        there[:, start : start + (1 << 20)] = rng.integers(0, 50_000, (2, min(1 << 20, EDGES - start)))
    there.flush()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("method", ["random", "fennel"])
def test_edges_larger_than_memory(method: str, long: Path, tmp_path: Path) -> None:
    room = 400 << 20  # for blocks of edges, and the largest shard
    arguments = ("build", str(long), "--features", "degree", "--parts", "16", "--method", method)
    done = limited("RLIMIT_DATA", room, *arguments, "--out", str(tmp_path / "shards"))
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert sum(file["edges"] for file in manifest["files"]) == EDGES
