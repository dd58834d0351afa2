"""The report of a six-node graph counted by hand, and its forms."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fullgraph.shards import read_manifest
from partition_tools.builder import build
from partition_tools.graph import Graph, Splits
from partition_tools.report import Report, imbalance, report, show, to_csv, to_json
from tests.builds import assignment, change, two_triangles


def masks(train: list[int], val: list[int], test: list[int]) -> Splits:
    return Splits(
        **{name: np.isin(np.arange(6), nodes)[None] for name, nodes in (("train", train), ("val", val), ("test", test))}
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two triangles, cut at their bridge and cut badly."""
    base = tmp_path_factory.mktemp("builds")
    graph = two_triangles(y=np.array([0, 1, 0, 1, 0, 1]), splits=masks([0, 1, 3], [2], [4]))
    build(graph, assignment([0, 0, 0, 1, 1, 1], 2), base / "good")
    build(graph, assignment([0, 1, 0, 1, 0, 1], 2), base / "bad")
    return {"good": base / "good", "bad": base / "bad"}


def test_the_golden_report(folders: dict[str, Path]) -> None:
    (found,) = json.loads(to_json([report(folders["good"])], width=8))
    manifest = read_manifest(folders["good"])
    graph_id = found.pop("graph_id")
    assert len(graph_id) == 16
    assert found == {
        "folder": str(folders["good"]),
        "name": "two triangles",
        "method": "by hand",
        "seed": 7,
        "parts": 2,
        "nodes": 6,
        "edges": 14,
        "cut_edges": 2,
        "cut_pairs": 1,
        "halo_rows": 2,
        "max_halo_rows": 1,
        "max_rows_sent": 1,
        "cover_rows": 2,
        "max_cover_rows": 1,
        "replication": 8 / 6,
        "node_imbalance": 1.0,
        "edge_imbalance": 1.0,
        "train_imbalance": 4 / 3,
        "rows": [[0, 1], [1, 0]],
        "per_part": [
            {"part": 0, "nodes": 3, "edges": 7, "halo_rows": 1, "rows_sent": 1, "neighbours": 1}
            | {"train": 2, "val": 1, "test": 0, "bytes": manifest.files[0].bytes},
            {"part": 1, "nodes": 3, "edges": 7, "halo_rows": 1, "rows_sent": 1, "neighbours": 1}
            | {"train": 1, "val": 0, "test": 1, "bytes": manifest.files[1].bytes},
        ],
        "width": 8,
        "bytes_per_layer": 64,
        "max_bytes_per_layer": 32,
    }


def test_the_other_partition_is_worse_and_the_graph_the_same(folders: dict[str, Path]) -> None:
    """Even and odd nodes: 0-1, 1-2, 2-3, 3-4 and 4-5 are cut."""
    good, bad = report(folders["good"]), report(folders["bad"])
    assert (bad.cut_edges, bad.cut_pairs, bad.halo_rows, bad.max_rows_sent) == (10, 5, 6, 3)
    assert good.graph_id == bad.graph_id
    assert good.bytes_per_layer(256) == 2 * 256 * 4


def test_a_directed_graph_with_an_empty_part_and_no_splits(tmp_path: Path) -> None:
    """0 -> 2 twice, 1 -> 2, 3 -> 3; part 1 is empty."""
    graph = Graph(name="g", num_nodes=4, src=np.array([0, 0, 1, 3]), dst=np.array([2, 2, 2, 3]))
    build(graph, assignment([0, 0, 2, 2], 3), tmp_path / "s")
    found = report(tmp_path / "s")
    assert (found.cut_edges, found.cut_pairs, found.halo_rows) == (3, 2, 2)
    assert found.rows == [[0, 0, 2], [0, 0, 0], [0, 0, 0]]
    assert [part.nodes for part in found.per_part] == [2, 0, 2]
    assert (found.node_imbalance, found.edge_imbalance, found.train_imbalance) == (1.5, 3.0, 1.0)
    assert (found.max_rows_sent, found.max_halo_rows) == (2, 2)


def test_imbalance_is_largest_over_mean() -> None:
    assert imbalance(np.array([4, 1, 1])) == 2.0
    assert imbalance(np.array([5])) == 1.0
    assert imbalance(np.array([0, 0])) == 1.0


def test_features_are_not_read(folders: dict[str, Path], tmp_path: Path) -> None:
    """A report does not need them, so their loss does not show."""
    build(two_triangles(x=np.ones((6, 3))), assignment([0, 0, 0, 1, 1, 1], 2), tmp_path / "s")
    change(tmp_path / "s", 0, lambda file: file.__delitem__("features"))
    assert report(tmp_path / "s").cut_edges == 2


def test_a_damaged_build_is_an_error(tmp_path: Path) -> None:
    build(two_triangles(), assignment([0, 0, 0, 1, 1, 1], 2), tmp_path / "s")
    (tmp_path / "s" / "part-00001-of-00002.h5").unlink()
    with pytest.raises(ValueError, match=r"part-00001-of-00002.h5: the manifest lists this file"):
        report(tmp_path / "s")


def test_csv_has_one_line_a_folder(folders: dict[str, Path]) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv([report(folders["good"]), report(folders["bad"])], width=8))))
    assert [row["cut_edges"] for row in rows] == ["2", "10"]
    assert [row["bytes_per_layer"] for row in rows] == ["64", "192"]
    assert "per_part" not in rows[0]


def text_of(reports: list[Report], **options: Any) -> str:
    console = Console(file=io.StringIO(), width=80)
    show(reports, console, **options)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_shows_both_and_defines_its_words(folders: dict[str, Path]) -> None:
    text = text_of([report(folders["good"]), report(folders["bad"])], width=1000)
    line = next(line for line in text.splitlines() if line.split()[:2] == ["cut", "edges"])
    assert line.split() == ["cut", "edges", "2", "10"]
    assert "width 1000" in text
    for word in ("edges:", "cut pairs:", "halo rows:", "imbalance:", "replication:", "peers:"):
        assert word in " ".join(text.split())
    assert "…" not in text
    assert "different graphs" not in text


def test_different_graphs_are_said_to_be(folders: dict[str, Path], tmp_path: Path) -> None:
    graph = two_triangles()
    build(
        two_triangles(src=graph.dst.copy()[::-1].copy(), dst=graph.src[::-1].copy()),
        assignment([0, 0, 0, 1, 1, 1], 2),
        tmp_path / "s",
    )
    assert "different graphs" in text_of([report(folders["good"]), report(tmp_path / "s")])


def test_no_torch_is_loaded(folders: dict[str, Path]) -> None:
    code = (
        "import sys; from partition_tools.__main__ import main; "
        f"code = main(['report', {str(folders['good'])!r}, '--json']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[0]["cut_edges"] == 2
