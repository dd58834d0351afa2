"""Raw folders of OGB's node property data sets."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from partition_tools.sources import load

EDGES = np.array([[0, 1], [1, 2], [3, 0]])


def put(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(",".join(map(str, np.atleast_1d(row))) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode()))


def folder(root: Path, **change: Any) -> Path:
    given = {
        "raw/edge": EDGES,
        "raw/num-node-list": [4],
        "raw/num-edge-list": [3],
        "raw/node-feat": [[0.5, 1], [2, 0.1], [0, 0], [1, 1]],
        "raw/node-label": [0, 1, 1, 0],
        "raw/node_year": [2000, 2001, 2002, 2003],
        "split/time/train": [0, 3],
        "split/time/valid": [1],
        "split/time/test": [2],
        **{name.replace("__", "/").replace("_", "-"): value for name, value in change.items()},
    }
    for name, rows in given.items():
        if rows is not None:
            put(root / f"{name}.csv.gz", rows)
    return root


def pairs(graph: Any) -> list[tuple[int, int]]:
    return list(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))


@pytest.mark.parametrize("spec", ["ogbn_arxiv", "ogbn_arxiv/raw"])
def test_a_folder_is_a_graph(tmp_path: Path, spec: str) -> None:
    folder(tmp_path / "ogbn_arxiv")
    g = load(tmp_path / spec)
    assert (g.name, g.num_nodes, g.task) == ("ogbn_arxiv", 4, "single-label")
    assert pairs(g) == [(0, 1), (1, 2), (3, 0)]
    assert isinstance(g.x, np.ndarray)
    assert g.x.dtype == np.float32
    np.testing.assert_array_equal(g.x, np.float32([[0.5, 1], [2, 0.1], [0, 0], [1, 1]]))
    assert g.y is not None
    assert g.y.tolist() == [0, 1, 1, 0]
    assert g.splits is not None
    assert [np.flatnonzero(m[0]).tolist() for m in (g.splits.train, g.splits.val, g.splits.test)] == [[0, 3], [1], [2]]
    assert any("--undirected" in change for change in g.changes)


def test_pairs_that_stand_once_get_both_directions_with_their_features(tmp_path: Path) -> None:
    features = [[1, 2], [3, 4], [5, 6]]
    g = load(
        folder(tmp_path / "ogbn_proteins", raw__edge_feat=features, raw__node_feat=None, raw__node_label=[[0, 1]] * 4)
    )
    assert pairs(g) == [(0, 1), (1, 0), (1, 2), (2, 1), (3, 0), (0, 3)]
    assert g.edge_x is not None
    assert g.edge_x.dtype == np.int64
    assert g.edge_x.tolist() == [row for row in features for _ in range(2)]
    assert (g.x, g.task) == (None, "multi-label")
    assert any("3 rows became 6 entries" in change for change in g.changes)


def test_several_splits_and_none(tmp_path: Path) -> None:
    root = folder(tmp_path / "mine")
    for part, nodes in (("train", [1]), ("valid", [2]), ("test", [])):
        put(root / f"split/random/{part}.csv.gz", nodes)
    g = load(root)
    assert g.splits is not None
    assert g.splits.train.tolist() == [[False, True, False, False], [True, False, False, True]]
    assert any("random, time" in change for change in g.changes)
    bare = folder(tmp_path / "bare", split__time__train=None, split__time__valid=None, split__time__test=None)
    assert load(bare).splits is None


def test_the_binary_form(tmp_path: Path) -> None:
    root = tmp_path / "ogbn_products"
    (root / "raw").mkdir(parents=True)
    x: NDArray[np.float16] = np.ones((4, 2), np.float16)
    np.savez(
        root / "raw/data.npz",
        edge_index=EDGES.T, num_nodes_list=[4], num_edges_list=[3], node_feat=x, edge_feat=np.ones((3, 1)), node_year=x,
    )  # fmt: skip
    np.savez(root / "raw/node-label.npz", node_label=np.array([[0.0], [np.nan], [2], [1]]))
    (root / "split/time").mkdir(parents=True)
    parts = {"train": torch.tensor([0]), "valid": torch.tensor([2]), "test": torch.tensor([3])}
    torch.save(parts, root / "split/time/split_dict.pt")
    g = load(root)
    assert pairs(g) == [(0, 1), (1, 2), (3, 0)]
    assert isinstance(g.x, np.ndarray)
    assert g.x.dtype == np.float16
    assert g.edge_x is not None
    assert g.edge_x.shape == (3, 1)
    assert g.y is not None
    assert g.y.tolist() == [0, -1, 2, 1]
    assert g.splits is not None
    assert g.splits.test.tolist() == [[False, False, False, True]]
    assert any("node_year of raw/data.npz" in change for change in g.changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"raw__edge": [[0, 1], [1, 4]]}, "edge 1 is 1 -> 4, but there are 4 nodes"),
        ({"raw__edge": [[0, 1], [1, "x"]]}, r"edge\.csv\.gz, line 2: 'x' is not a whole number"),
        ({"raw__edge": [[0, 1, 2]]}, "edges have shape .3, 1.; expected two ends a row"),
        ({"raw__num_node_list": [4, 5]}, "2 graphs; this reads one large graph"),
        ({"raw__num_node_list": [5]}, "4 rows of features for 5 nodes"),
        ({"raw__num_node_list": None}, "num-node-list.csv.gz is missing"),
        ({"raw__node_label": [0, 1, 1]}, "3 rows of labels for 4 nodes"),
        ({"raw__edge_feat": [[1], [2]]}, r"edge features has shape \[2, 1\]; expected \[E, K\] for E = 3"),
        ({"split__time__valid": None}, r"valid\.csv\.gz: missing"),
        ({"split__time__valid": [9]}, "names node 9 at place 0; there are 4 nodes"),
    ],
)
def test_a_folder_that_does_not_fit_together_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder(tmp_path / "ogbn_arxiv", **change))


def test_a_graph_of_several_kinds_of_nodes_is_refused_by_name(tmp_path: Path) -> None:
    put(tmp_path / "ogbn_mag/raw/num-node-dict.csv.gz", [["author", "paper"], [1, 2]])
    with pytest.raises(ValueError, match="an OGB graph of several kinds"):
        load(tmp_path / "ogbn_mag")
