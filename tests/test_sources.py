from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from partition_tools.graph import Graph, Splits
from partition_tools.sources import READERS, formats, load, save_npz
from partition_tools.sources.demo import RECIPES
from partition_tools.summary import Summary, summarise
from tests.data import SHARED, needs_data

EDGES = np.array([[0, 1, 2, 3], [1, 2, 3, 0]])


def npz(folder: Path, name: str = "g.npz", **arrays: Any) -> str:
    path = folder / name
    np.savez(path, **arrays)
    return str(path)


def pairs(graph: Graph) -> list[tuple[int, int]]:
    return list(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))


def dense(x: Any) -> NDArray[Any]:
    return np.asarray(x.toarray() if sp.issparse(x) else x)


# -------------------------------------------------------------------------------------------- the door


def test_every_format_is_listed_once_with_one_line() -> None:
    names = [name for name, _ in formats()]
    assert len(set(names)) == len(names) == len(READERS)
    assert all(text and "\n" not in text for _, text in formats())


def test_a_missing_file_and_an_unknown_one_say_what_was_tried(tmp_path: Path) -> None:
    unknown = tmp_path / "notes.odt"
    unknown.write_text("hello")
    for spec, problem in ((str(tmp_path / "none.npz"), "no such file"), (str(unknown), "no known format")):
        with pytest.raises(ValueError, match=problem) as caught:
            load(spec)
        assert spec in str(caught.value)
        assert all(name in str(caught.value) for name, _ in formats())


def test_a_file_that_may_not_be_read_is_a_value_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "g.graph"
    path.write_text("1 0\n\n")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"g\.graph: cannot be read: Permission denied"):
        load(str(path))


def test_reading_loads_no_torch() -> None:
    code = "import sys; from partition_tools import prepare, sources, summary; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -------------------------------------------------------------------------------------- the real files

REAL = [
    # file, nodes, entries, pairs, loops, isolated, features, classes, splits
    ("planetoid/ind.cora", 2708, 10556, 5278, 0, 0, 1433, 7, 1),
    ("gnn-benchmark/amazon_electronics_computers.npz", 13752, 287209, 245861, 0, 281, 767, 10, 0),
    ("gnn-benchmark/amazon_electronics_photo.npz", 7650, 143663, 119081, 1, 115, 745, 8, 0),
    ("gnn-benchmark/ms_academic_cs.npz", 18333, 163788, 81894, 0, 0, 6805, 15, 0),
    ("gnn-benchmark/dblp.npz", 17716, 105734, 52867, 0, 0, 1639, 4, 0),
    ("gnn-benchmark/cora_ml.npz", 2995, 8416, 8158, 0, 0, 2879, 7, 0),
    ("heterophilous/minesweeper.npz", 10000, 78804, 39402, 0, 0, 7, 2, 10),
    ("heterophilous/chameleon_filtered.npz", 890, 17708, 8854, 0, 0, 2325, 5, 10),
    ("graphs/karate.graph", 34, 156, 78, 0, 0, 0, 0, 0),
    ("graphs/jazz.graph", 198, 5484, 2742, 0, 0, 0, 0, 0),
    ("graphs/PGPgiantcompo.graph", 10680, 48632, 24316, 0, 0, 0, 0, 0),
    ("graphs/4elt.graph", 15606, 91756, 45878, 0, 0, 0, 0, 0),
    ("graphs/delaunay_n15.graph", 32768, 196548, 98274, 0, 0, 0, 0, 0),
    ("graphs/example_weighted.graph", 132, 656, 328, 0, 5, 0, 0, 0),
    *((f"graphs/tiny_0{i}.graph", 7, 22, 11, 0, 0, 0, 0, 0) for i in (1, 2, 3, 4)),
]


@needs_data
@pytest.mark.parametrize("row", REAL, ids=[row[0] for row in REAL])
def test_counts_of_the_real_files(row: tuple[Any, ...]) -> None:
    s: Summary = summarise(load(str(SHARED / row[0])))
    counted = (s.num_nodes, s.num_edges, s.undirected_pairs, s.loops, s.isolated)
    assert (*counted, s.num_features, s.num_classes, s.num_splits) == row[1:]
    assert s.duplicates == 0


@needs_data
def test_each_real_file_is_claimed_by_its_own_reader_first() -> None:
    own = {
        "planetoid": "planetoid",
        "graphs": "metis",
        "gnn-benchmark": "gnn-benchmark",
        "heterophilous": "heterophilous",
    }
    for file, *_ in REAL:
        first = next(reader for reader in READERS if reader.matches(str(SHARED / file)))
        assert first.name == own[file.split("/")[0]]


@needs_data
@pytest.mark.filterwarnings("ignore:Please import `csr_matrix`")
def test_cora_equals_what_the_pickles_hold() -> None:
    raw = {}
    for part in ("allx", "tx", "ally", "ty", "graph"):
        with open(SHARED / f"planetoid/ind.cora.{part}", "rb") as stream:
            raw[part] = pickle.load(stream, encoding="latin1")
    index = np.loadtxt(SHARED / "planetoid/ind.cora.test.index", dtype=np.int64)
    x = np.vstack([raw["allx"].toarray(), raw["tx"].toarray()])
    y = np.concatenate([raw["ally"], raw["ty"]]).argmax(1)
    x[index], y[index] = x[np.sort(index)], y[np.sort(index)]
    edges = {(u, v) for u, row in raw["graph"].items() for v in row}

    g = load(str(SHARED / "planetoid/ind.cora"))
    assert isinstance(g.x, sp.csr_array)
    assert g.x.dtype == np.float32
    np.testing.assert_array_equal(g.x.toarray(), x)
    assert g.y is not None
    np.testing.assert_array_equal(g.y, y)
    assert pairs(g) == sorted(edges | {(v, u) for u, v in edges})
    assert g.splits is not None
    np.testing.assert_array_equal(np.flatnonzero(g.splits.train[0]), np.arange(140))
    np.testing.assert_array_equal(np.flatnonzero(g.splits.val[0]), np.arange(140, 640))
    np.testing.assert_array_equal(np.flatnonzero(g.splits.test[0]), np.sort(index))
    assert summarise(g).components == 78


@needs_data
@pytest.mark.parametrize(
    "spec", ["planetoid", "planetoid/ind.cora.", "planetoid/ind.cora.graph", "planetoid/ind.cora.x"]
)
def test_a_planetoid_set_is_found_by_folder_and_by_any_of_its_files(spec: str) -> None:
    assert load(f"{SHARED}/{spec}").name == "cora"


@needs_data
def test_a_gnn_benchmark_file_is_kept_as_given() -> None:
    file = SHARED / "gnn-benchmark/cora_ml.npz"
    g = load(str(file))
    with np.load(file) as raw:
        adjacency = sp.csr_array((raw["adj_data"], raw["adj_indices"], raw["adj_indptr"]), shape=raw["adj_shape"])
        x = sp.csr_array((raw["attr_data"], raw["attr_indices"], raw["attr_indptr"]), shape=raw["attr_shape"])
        np.testing.assert_array_equal(g.y, raw["labels"])
    rows, columns = adjacency.nonzero()
    assert sorted(pairs(g)) == sorted(zip(rows.tolist(), columns.tolist(), strict=True))
    assert g.edge_weight is None
    assert (sp.csr_array(g.x) != x).nnz == 0
    assert g.changes == ()


@needs_data
def test_a_heterophilous_file_gets_both_directions_and_says_so() -> None:
    file = SHARED / "heterophilous/chameleon_filtered.npz"
    g = load(str(file))
    with np.load(file) as raw:
        listed = {tuple(edge) for edge in raw["edges"].tolist()}
        assert g.splits is not None
        np.testing.assert_array_equal(g.splits.val, raw["val_masks"])
        np.testing.assert_array_equal(g.x, raw["node_features"])
    assert pairs(g) == sorted(listed | {(v, u) for u, v in listed})
    assert any("both directions" in change for change in g.changes)


# --------------------------------------------------------------------------------------- the plain npz


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    n, e = draw(st.integers(1, 9)), draw(st.integers(0, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x: Any = None
    kind = draw(st.sampled_from(["none", "float32", "int16", "csr"]))
    if kind == "csr":
        x = sp.random_array((n, 4), density=0.4, format="csr", rng=rng, dtype=np.float64)
    elif kind != "none":
        x = rng.integers(-9, 9, (n, 3)).astype(kind)
    labels = {
        "none": None,
        "single": rng.integers(-1, 4, n),
        "multi": rng.integers(0, 2, (n, draw(st.integers(1, 3)))).astype(np.uint8),
        "target": np.where(rng.random(n) < 0.2, np.nan, rng.integers(0, 3, n)).astype(np.float32),
        "targets": rng.integers(0, 2, (n, 2)).astype(np.float64),
    }
    k = draw(st.integers(0, 3))
    masks = rng.integers(0, 2, (3, k, n)).astype(np.bool_)
    return Graph(
        name="g",
        num_nodes=n,
        src=rng.integers(0, n, e),
        dst=rng.integers(0, n, e),
        x=x,
        y=labels[draw(st.sampled_from(sorted(labels)))],
        splits=Splits(train=masks[0], val=masks[1], test=masks[2]) if k and (k != n or n == 1) else None,
        edge_weight=draw(st.sampled_from([None, rng.random(e), rng.random(e).astype(np.float32)])),
        node_weight=draw(st.sampled_from([None, rng.integers(0, 9, (n, 2))])),
        node_ids=draw(st.sampled_from([None, np.array([f"ä{i}" for i in range(n)]), np.arange(n) + 2**60])),
    )


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, graph: Graph) -> None:
    path = tmp_path_factory.mktemp("npz") / "g.npz"
    save_npz(path, graph)
    loaded = load(str(path))
    assert (loaded.name, loaded.num_nodes, loaded.task) == ("g", graph.num_nodes, graph.task)
    for field in ("src", "dst", "y", "edge_weight", "node_weight", "node_ids"):
        before, after = getattr(graph, field), getattr(loaded, field)
        assert (before is None) == (after is None), field
        if before is not None:
            assert after.dtype == before.dtype, field
            np.testing.assert_array_equal(after, before)
    assert sp.issparse(loaded.x) == sp.issparse(graph.x)
    if graph.x is not None and loaded.x is not None:
        assert loaded.x.dtype == graph.x.dtype
        np.testing.assert_array_equal(dense(loaded.x), dense(graph.x))
    assert (loaded.splits is None) == (graph.splits is None)
    if graph.splits is not None and loaded.splits is not None:
        for part in ("train", "val", "test"):
            np.testing.assert_array_equal(getattr(loaded.splits, part), getattr(graph.splits, part))


def test_save_refuses_what_could_not_be_read_back(tmp_path: Path) -> None:
    mask = np.ones((2, 2), np.bool_)
    g = Graph(name="g", num_nodes=2, src=EDGES[0, :1], dst=EDGES[1, :1], splits=Splits(train=mask, val=mask, test=mask))
    with pytest.raises(ValueError, match="told apart"):
        save_npz(tmp_path / "g.npz", g)
    with pytest.raises(ValueError, match=r"must end in \.npz"):
        save_npz(tmp_path / "g.dat", g)


def test_edges_are_kept_as_given(tmp_path: Path) -> None:
    edges = np.array([[3, 0, 0, 2, 2], [3, 1, 1, 0, 1]], np.uint8)  # a loop, a duplicate, one direction only
    g = load(npz(tmp_path, edge_index=edges, x=np.zeros((5, 2))))
    assert pairs(g) == [(3, 3), (0, 1), (0, 1), (2, 0), (2, 1)]
    assert g.num_nodes == 5
    assert g.src.dtype == np.int64


@pytest.mark.parametrize("order", ["<", ">"])
def test_byte_order_and_memory_order_do_not_matter(tmp_path: Path, order: str) -> None:
    x = np.arange(8.0).reshape(4, 2)
    g = load(npz(tmp_path, edge_index=EDGES.astype(f"{order}i4"), x=np.asfortranarray(x.astype(f"{order}f8"))))
    assert pairs(g) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert isinstance(g.x, np.ndarray)
    assert g.x.dtype == np.float64
    assert g.x.dtype.isnative
    assert g.x.flags.c_contiguous
    np.testing.assert_array_equal(g.x, x)


@pytest.mark.parametrize(
    ("extra", "nodes"),
    [
        ({}, 4),
        ({"num_nodes": 9}, 9),
        ({"y": np.zeros(6, np.int64)}, 6),
        ({"x": np.zeros((5, 0))}, 5),
        ({"train_mask": np.ones(7, bool)}, 7),
        ({"train_mask": np.ones((2, 7), bool)}, 7),
        ({"train_mask": np.ones((7, 2), bool)}, 7),
        ({"node_ids": np.array(list("abcde"))}, 5),
    ],
)
def test_where_the_number_of_nodes_comes_from(tmp_path: Path, extra: dict[str, Any], nodes: int) -> None:
    g = load(npz(tmp_path, edge_index=EDGES, **extra))
    assert g.num_nodes == nodes
    assert any("N is 4, so that the largest id is the last" in change for change in g.changes) == (not extra)
    assert g.x is None


def test_ids_from_one_are_hinted_at(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ids seem to start at 1: add --index-base 1"):
        load(npz(tmp_path, edge_index=EDGES + 1, x=np.zeros((4, 1))))
    assert any("add --index-base 1" in change for change in load(npz(tmp_path, edge_index=EDGES + 1)).changes)


def test_a_two_by_two_edge_index_is_sources_and_destinations(tmp_path: Path) -> None:
    g = load(npz(tmp_path, edge_index=np.array([[0, 1], [2, 3]])))
    assert pairs(g) == [(0, 2), (1, 3)]
    assert any("[2, 2]" in change for change in g.changes)


def test_no_edges_at_all(tmp_path: Path) -> None:
    g = load(npz(tmp_path, edge_index=np.zeros((2, 0)), num_nodes=3))
    assert (g.num_nodes, g.num_edges) == (3, 0)
    with pytest.raises(ValueError, match="add num_nodes"):
        load(npz(tmp_path, edge_index=np.zeros((2, 0))))


@pytest.mark.parametrize(
    ("values", "task", "expected"),
    [
        (np.array([0, 2, -1, 1], np.int8), "single-label", [0, 2, -1, 1]),
        (np.array([[0], [2], [1], [1]]), "single-label", [0, 2, 1, 1]),
        (np.array([True, False, True, True]), "single-label", [1, 0, 1, 1]),
        (np.array([[0.0], [2.0], [np.nan], [1.0]]), "single-label", [0, 2, -1, 1]),
        (np.array([0.5, 2.0, np.nan, 1.0], np.float32), "regression", [0.5, 2.0, np.nan, 1.0]),
        (np.array([[0.5], [2.0], [-1.0], [1.0]]), "regression", [0.5, 2.0, -1.0, 1.0]),
        (np.array([-1.0, 1.0, 1.0, -1.0]), "regression", [-1.0, 1.0, 1.0, -1.0]),
        (np.array([[0.5, 1], [2, 0], [1, 0], [0, 0]], np.float16), "regression", [[0.5, 1], [2, 0], [1, 0], [0, 0]]),
        (np.array([[0, 1], [1, 1], [0, 0], [1, 0]]), "multi-label", [[0, 1], [1, 1], [0, 0], [1, 0]]),
        (np.array([[0, 1], [1, 1], [0, 0], [1, 0]], bool), "multi-label", [[0, 1], [1, 1], [0, 0], [1, 0]]),
        (np.array([[0.0, 1.0], [1.0, 1.0], [0, 0], [1, 0]]), "multi-label", [[0, 1], [1, 1], [0, 0], [1, 0]]),
    ],
)
def test_forms_of_labels(tmp_path: Path, values: NDArray[Any], task: str, expected: list[Any]) -> None:
    g = load(npz(tmp_path, edge_index=EDGES, y=values))
    assert g.task == task
    assert g.y is not None
    np.testing.assert_array_equal(g.y, expected)
    assert (
        g.y.dtype
        in {"single-label": [np.int64], "multi-label": [np.uint8], "regression": [np.float32, np.float64]}[task]
    )


def test_task_settles_what_labels_leave_open(tmp_path: Path) -> None:
    counts = np.array([0.0, 3.0, 1.0, 2.0])
    assert load(npz(tmp_path, edge_index=EDGES, y=counts)).task == "single-label"
    g = load(npz(tmp_path, edge_index=EDGES, y=counts, task="regression"))
    assert g.task == "regression"
    np.testing.assert_array_equal(g.y, counts)


def test_one_hot_rows_are_pointed_out(tmp_path: Path) -> None:
    g = load(npz(tmp_path, edge_index=EDGES, y=np.eye(4, dtype=np.int64)))
    assert g.task == "multi-label"
    assert any("exactly one 1" in change for change in g.changes)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.int64])
@pytest.mark.parametrize("form", ["[N]", "[N, 1]", "[k, N]", "[N, k]"])
def test_forms_of_masks(tmp_path: Path, form: str, dtype: type) -> None:
    mask = np.array([[1, 0, 0, 1], [0, 1, 1, 0]])
    saved = {"[N]": mask[0], "[N, 1]": mask[0][:, None], "[k, N]": mask, "[N, k]": mask.T}[form].astype(dtype)
    g = load(npz(tmp_path, edge_index=EDGES, num_nodes=4, train_mask=saved, test_mask=1 - mask[0]))
    assert g.splits is not None
    np.testing.assert_array_equal(g.splits.train, mask if "k" in form else mask[:1])
    assert g.splits.test.shape == g.splits.train.shape
    np.testing.assert_array_equal(g.splits.test[-1], 1 - mask[0])
    assert not g.splits.val.any()
    assert any("no val_mask" in change for change in g.changes)


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        (np.array([1, 2, 3, 2**24]), np.float32),
        (np.array([1, 2, 3, 2**24 + 1]), np.float64),
        (np.array([[1.0], [2], [3], [4]], np.float16), np.float32),
        (np.array([0.1, 2, 3, 4]), np.float64),
    ],
)
def test_edge_weights_keep_their_values(tmp_path: Path, weights: NDArray[Any], dtype: type) -> None:
    g = load(npz(tmp_path, edge_index=EDGES, edge_weight=weights))
    assert g.edge_weight is not None
    assert g.edge_weight.dtype == dtype
    np.testing.assert_array_equal(g.edge_weight, weights.reshape(-1))


def test_sparse_features_are_sorted_and_summed_and_unknown_arrays_named(tmp_path: Path) -> None:
    csr = {"x_data": [1.0, 2, 3, 4], "x_indices": [2, 0, 1, 1], "x_indptr": [0, 2, 4, 4, 4], "x_shape": [4, 3]}
    g = load(npz(tmp_path, edge_index=EDGES, **csr, note=np.array(["mine"])))
    assert isinstance(g.x, sp.csr_array)
    assert g.x.indices.tolist() == [0, 2, 1]
    assert g.x.data.tolist() == [2, 1, 7]
    assert any("note" in change for change in g.changes)
    assert any("1 value that was stored again for one place went into a sum" in change for change in g.changes)


BAD_PLAIN = {
    "float ids": ({"edge_index": EDGES.astype(float)}, "edge_index is float64; expected integers"),
    "edge rows": ({"edge_index": np.zeros((5, 2), np.int64)}, r"\[5, 2\]; expected \[2, E\].*edge_index\.T"),
    "three rows": ({"edge_index": np.zeros((3, 3), np.int64)}, r"\[3, 3\]; expected \[2, E\]"),
    "scalar": ({"edge_index": 3}, r"\[\]; expected \[2, E\]"),
    "negative id": ({"edge_index": EDGES - 1}, "edge 0 is -1 -> 0.*must not be negative"),
    "id beyond": ({"edge_index": EDGES, "x": np.zeros((3, 1))}, "edge 2 is 2 -> 3, but there are 3 nodes.*rows of x"),
    "huge id": ({"edge_index": EDGES.astype(np.uint64) + np.uint64(2**63)}, "does not fit into int64"),
    "far id": ({"edge_index": EDGES + 10**13}, "largest id is 10000000000003 for 4 edges"),
    "conflict": ({"x": np.zeros((5, 1)), "y": np.zeros(6, int)}, "rows of x: 5, rows of y: 6"),
    "num_nodes": ({"num_nodes": 5, "x": np.zeros((6, 1))}, "num_nodes: 5, rows of x: 6"),
    "no nodes": ({"num_nodes": 0}, r"N is 0 \(num_nodes\)"),
    "flat x": ({"x": np.zeros(4)}, r"x has shape \[4\]; expected \[N, F\]"),
    "text x": ({"x": np.full((4, 1), "a")}, "expected real numbers"),
    "complex x": ({"x": np.zeros((4, 1), complex)}, "expected real numbers"),
    "x twice": ({"x": np.zeros((4, 1)), "x_data": np.zeros(0)}, "dense and as CSR"),
    "x half": ({"x_data": np.zeros(0)}, "array x_indices is missing"),
    "ambiguous mask": ({"num_nodes": 4, "train_mask": np.ones((4, 4), bool)}, "look alike"),
    "mask length": ({"num_nodes": 4, "val_mask": np.ones(5, bool)}, r"val_mask has shape \[5\]; expected \[4\]"),
    "mask ids": ({"num_nodes": 4, "val_mask": np.array([0, 2, 3])}, "val_mask holds 2; expected a mask of 0 and 1"),
    "float mask": ({"num_nodes": 4, "val_mask": np.full(4, 0.5)}, "val_mask holds 0.5"),
    "mask counts": (
        {"num_nodes": 4, "train_mask": np.ones((2, 4), bool), "val_mask": np.ones((3, 4), bool)},
        "different numbers of splits",
    ),
    "class": ({"y": np.array([0, -7, 1, 1])}, r"y\[1\] is -7; classes are numbered from 0"),
    "labels": ({"y": np.array([[0, 1], [3, 1], [0, 0], [0, 0]])}, r"y\[1, 0\] is 3.*as floats"),
    "text labels": ({"y": np.array([["a", "b"]] * 4)}, r"y has shape \[4, 2\]; expected \[N\] names"),
    "fractions": ({"y": np.array([0.5, 1, 1, 1]), "task": "single-label"}, "with fractions"),
    "task": ({"y": np.zeros(4, int), "task": "ranking"}, "'ranking'; expected one of single-label"),
    "weights": ({"edge_weight": np.ones(3)}, r"edge_weight is float64 \[3\]; expected real numbers \[4\]"),
    "ids twice": ({"node_ids": np.array(list("abca"))}, "holds a more than once"),
    "node weight": ({"num_nodes": 4, "node_weight": np.int64(3)}, r"node_weight has shape \[\]"),
}


@pytest.mark.parametrize("case", BAD_PLAIN)
def test_a_bad_plain_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    arrays, message = BAD_PLAIN[case]
    with pytest.raises(ValueError, match=message) as caught:
        load(npz(tmp_path, **{"edge_index": EDGES, **arrays}))
    assert "g.npz" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_indptr": [0, 2, 1, 3, 3]}, "offsets that never fall"),
        ({"x_indptr": [0, 1, 2, 3]}, "must have 5 offsets"),
        ({"x_indptr": [0, 1, 2, 3, 4]}, "from 0 to 3"),
        ({"x_indices": [0, 1, 2]}, r"x_indices\[2\] is 2; the shape declares 2 columns"),
        ({"x_indices": [0, -1, 1]}, r"x_indices\[1\] is -1"),
        ({"x_indices": [0, 1]}, "one value an index"),
        ({"x_shape": [4]}, "expected two sizes"),
        ({"x_shape": [-4, 2]}, "expected two sizes"),
        ({"x_shape": [2**60, 2]}, "must have 1152921504606846977 offsets"),
    ],
)
def test_a_csr_that_does_not_fit_together_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    csr = {"x_data": np.ones(3), "x_indices": [0, 1, 1], "x_indptr": [0, 1, 2, 3, 3], "x_shape": [4, 2]}
    assert load(npz(tmp_path, edge_index=EDGES, **csr)).x is not None
    with pytest.raises(ValueError, match=message):
        load(npz(tmp_path, edge_index=EDGES, **{**csr, **change}))


def test_an_npz_of_another_layout_is_told_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds edge_list, weights; expected edge_index"):
        load(npz(tmp_path, edge_list=EDGES, weights=EDGES))


# ----------------------------------------------------------------------------------- the other layouts


def gnn_benchmark(**change: Any) -> dict[str, Any]:
    # Rows: 0 -> 1, 0 -> 1 (twice), 1 -> 1 (a loop), 2 -> 0; node 3 has no edge.
    given = {
        "adj_data": np.ones(4, np.float32),
        "adj_indices": np.array([1, 1, 1, 0], np.int32),
        "adj_indptr": np.array([0, 2, 3, 4, 4], np.int32),
        "adj_shape": np.array([4, 4]),
        "attr_matrix": np.eye(4, 3, dtype=np.float32),
        "labels": np.array([0, 1, 1, 0]),
    }
    return {name: value for name, value in {**given, **change}.items() if value is not None}


def test_gnn_benchmark_direction_loops_duplicates_and_weights(tmp_path: Path) -> None:
    g = load(npz(tmp_path, **gnn_benchmark()))
    assert pairs(g) == [(0, 1), (0, 1), (1, 1), (2, 0)]
    assert g.edge_weight is None
    assert isinstance(g.x, np.ndarray)
    weighted = load(npz(tmp_path, **gnn_benchmark(adj_data=np.array([1, 2, 1, 0.5]), labels=None)))
    assert weighted.y is None
    assert weighted.edge_weight is not None
    assert weighted.edge_weight.tolist() == [1, 2, 1, 0.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adj_shape": np.array([4, 5])}, r"\[4, 5\]; expected \[N, N\]"),
        ({"adj_indices": np.array([1, 1, 4, 0])}, r"adj_indices\[2\] is 4"),
        ({"adj_data": None}, "array adj_data is missing"),
        ({"labels": np.zeros(3, int)}, "labels has shape .3.; expected 4 rows"),
        ({"attr_matrix": np.zeros((5, 2))}, "attr_matrix has shape .5, 2.; expected 4 rows"),
        ({"labels": np.array([0, "a", None, 1], object)}, "g.npz: labels: it holds Python objects"),
    ],
)
def test_a_bad_gnn_benchmark_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(npz(tmp_path, **gnn_benchmark(**change)))


def test_pickled_arrays_that_nobody_needs_are_left_alone(tmp_path: Path) -> None:
    g = load(npz(tmp_path, **gnn_benchmark(class_names=np.array([{"a": 1}], object))))
    assert any("class_names" in change for change in g.changes)


def test_heterophilous_loops_and_repeated_pairs(tmp_path: Path) -> None:
    edges = np.array([[2, 0], [0, 2], [1, 1], [0, 1], [0, 1]])
    g = load(npz(tmp_path, edges=edges, node_features=np.ones((4, 2)), node_labels=np.zeros(4, int)))
    assert pairs(g) == [(0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    assert any("1 loop once" in change for change in g.changes)
    assert any("2 rows of edges repeated" in change for change in g.changes)
    assert g.splits is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edges": np.zeros((2, 3), int)}, r"edges has shape \[2, 3\]; expected \[M, 2\]"),
        ({"edges": np.array([[0, 1], [1, 9]])}, "edge 1 is 1 -> 9, but there are 4 nodes"),
        ({"node_labels": np.zeros(5, int)}, r"node_labels has shape \[5\]"),
        ({"train_masks": np.ones((2, 5), bool)}, r"train_masks has shape \[2, 5\]"),
    ],
)
def test_a_bad_heterophilous_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    given = {"edges": np.array([[0, 1]]), "node_features": np.ones((4, 2)), "node_labels": np.zeros(4, int)}
    with pytest.raises(ValueError, match=message):
        load(npz(tmp_path, **{**given, **change}))


# ------------------------------------------------------------------------------------ hostile archives


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def test_object_arrays_are_never_unpickled(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    for name in ("edge_index", "y", "x", "train_mask"):
        path = npz(tmp_path, **{"edge_index": EDGES, name: np.array([Bomb(target)] * 4, object)})
        with pytest.raises(ValueError, match=rf"g\.npz: {name}: it holds Python objects"):
            load(path)
    assert not target.exists()


@pytest.mark.parametrize("compressed", [False, True])
def test_a_cut_archive_never_loads(tmp_path: Path, compressed: bool) -> None:
    whole = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(whole, edge_index=EDGES, x=np.ones((4, 50)))
    raw, path = whole.getvalue(), tmp_path / "g.npz"
    for size in {0, 1, 21, len(raw) // 2, len(raw) - 30, len(raw) - 1}:
        path.write_bytes(raw[:size])
        with pytest.raises(ValueError, match=r"g\.npz"):
            load(str(path))


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = Path(npz(tmp_path, edge_index=EDGES, x=np.arange(40.0).reshape(4, 10)))
    raw = bytearray(path.read_bytes())
    raw[raw.index(np.float64(21.0).tobytes()) + 3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"g\.npz: x: Bad CRC-32"):
        load(str(path))


def member(shape: tuple[int, ...], data: bytes, descr: str = "<f8") -> bytes:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": shape})
    return head.getvalue() + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (member((10**15, 100), bytes(64)), r"declares float64 \[1000000000000000, 100\] = 800000000000000000 bytes"),
        (member((2**40, 2**40), bytes(64)), "bytes, but the file holds 64"),
        (member((2, 3), bytes(64)), "= 48 bytes, but the file holds 64"),
        (member((-1, -8), bytes(64)), "damaged"),
        (member((5,), b"", "<U0"), "damaged"),
        (b"\x93NUMPY\x01\x00\x20\x00{'descr': '<f8', 'shape': (84se, ", "header cannot be read"),
        (b"\x93NUMPY\x09\x00", "version 9.0"),
        (b"plain text", "header cannot be read"),
        (b"", "x"),
    ],
)
def test_sizes_that_a_header_declares_are_checked_first(tmp_path: Path, content: bytes, message: str) -> None:
    path = Path(npz(tmp_path, edge_index=EDGES))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(ValueError, match=message) as caught:
        load(str(path))
    assert "g.npz: x: " in str(caught.value)


def test_sizes_that_the_directory_declares_are_checked_first(tmp_path: Path) -> None:
    path = Path(npz(tmp_path, edge_index=EDGES))
    raw = path.read_bytes()
    entry = raw.index(b"PK\x01\x02")  # sizes stand 20 (packed) and 24 bytes into the directory's entry
    for offset, message in ((20, "directory declares"), (24, "can hold")):
        forged = bytearray(raw)
        struct.pack_into("<I", forged, entry + offset, 4_000_000_000)
        path.write_bytes(forged)
        with pytest.raises(ValueError, match=message):
            load(str(path))


def test_unusual_packing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "g.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("edge_index.npy", member((2, 4), EDGES.astype("<i8").tobytes(), "<i8"))
    with pytest.raises(ValueError, match="unusual method"):
        load(str(path))


# ------------------------------------------------------------------------------------------- planetoid


def planetoid(folder: Path, **change: Any) -> str:
    """A set like citeseer: nodes 0..5 in allx, test nodes 9, 6, 8; nobody describes node 7."""
    allx = sp.csr_matrix(np.arange(18).reshape(6, 3) % 4, dtype=np.float32)
    one_hot = np.eye(3, dtype=np.int32)
    given: dict[str, Any] = {
        "x": allx[:2],
        "y": one_hot[[0, 1]],
        "allx": allx,
        "ally": one_hot[[0, 1, 2, 0, 1, 2]],
        "tx": sp.csr_matrix([[9, 0, 0], [6, 0, 0], [8, 0, 0]], dtype=np.float32),
        "ty": one_hot[[1, 2, 0]],
        "graph": defaultdict(list, {0: [1, 1, 9], 1: [0], 3: [3], 8: [2], 7: []}),
        "test.index": "9\n6\n8\n",
        **change,
    }
    for part, value in given.items():
        raw = (
            value
            if isinstance(value, bytes)
            else str(value).encode()
            if part == "test.index"
            else pickle.dumps(value, 2)
        )
        (folder / f"ind.toy.{part}").write_bytes(raw)
    return str(folder / "ind.toy")


def test_planetoid_order_gaps_loops_and_duplicates(tmp_path: Path) -> None:
    g = load(planetoid(tmp_path))
    assert g.num_nodes == 10
    assert pairs(g) == [(0, 1), (0, 9), (1, 0), (2, 8), (8, 2), (9, 0)]
    assert g.y is not None
    assert g.y.tolist() == [0, 1, 2, 0, 1, 2, 2, -1, 0, 1]
    x = dense(g.x)
    np.testing.assert_array_equal(x[:6], np.arange(18).reshape(6, 3) % 4)
    assert x[6:, 0].tolist() == [6, 0, 8, 9]
    assert g.splits is not None
    masks = [np.flatnonzero(m[0]).tolist() for m in (g.splits.train, g.splits.val, g.splits.test)]
    assert masks == [[0, 1], [2, 3, 4, 5], [6, 8, 9]]
    assert any("1 nodes are in neither" in change for change in g.changes)
    assert any("6 listed neighbours" in change and "1 loop dropped" in change for change in g.changes)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_newer_pickle_protocols_and_dense_features(tmp_path: Path, protocol: int) -> None:
    allx = np.arange(18, dtype=">f8").reshape(6, 3)
    g = load(planetoid(tmp_path, allx=pickle.dumps(np.asfortranarray(allx), protocol)))
    np.testing.assert_array_equal(dense(g.x)[:6], allx)


@pytest.mark.parametrize("part", ["x", "y", "tx", "ty", "allx", "ally", "graph"])
def test_a_pickle_that_runs_a_command_is_refused_by_name(tmp_path: Path, part: str) -> None:
    target = tmp_path / "ran"
    for protocol in (0, 2, 4):
        for bomb in (Bomb(target), [Bomb(target)], {0: [Bomb(target)]}):
            with pytest.raises(ValueError, match=rf"ind\.toy\.{part}: .*asks for (posix|nt)\.system"):
                load(planetoid(tmp_path, **{part: pickle.dumps(bomb, protocol)}))
    assert not target.exists()


@pytest.mark.parametrize(
    "name", ["builtins eval", "builtins getattr", "numpy load", "numpy.core.multiarray scalar", "scipy.sparse.csr os"]
)
def test_no_other_name_is_found(tmp_path: Path, name: str) -> None:
    module, attribute = name.split()
    raw = b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b"(U\x011tR."
    with pytest.raises(ValueError, match=f"asks for {module}.{attribute}"):
        load(planetoid(tmp_path, graph=raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph": b""}, r"ind\.toy\.graph: not a pickle"),
        ({"graph": b"\x80\x02]r\xff\xff\xff\x7f."}, "memo slot 2147483647 in a file of"),
        ({"graph": pickle.dumps({0: 0}, 2)}, "expected a dict of lists"),
        ({"graph": [1, 2]}, "expected a dict of lists"),
        ({"graph": {0: ["a"]}}, "expected whole numbers"),
        ({"graph": {0: [2**70]}}, "does not fit into int64"),
        ({"graph": {0: [10]}}, "edge 0 is 0 -> 10, but there are 10 nodes"),
        ({"graph": {0: [-1]}}, "edge 0 is 0 -> -1"),
        ({"allx": np.zeros((6, 3)).tolist()}, "allx: holds a list"),
        ({"allx": np.array([[None] * 3] * 6)}, "allx: an array of 'O8'"),
        ({"ty": np.ones((3, 3), np.int32)}, "ty: row 0 is not one-hot"),
        ({"ty": np.eye(3, dtype=np.int32)[:2]}, r"ty has shape \[2, 3\]; the other files ask for \[3, 3\]"),
        ({"test.index": "9\n6\n6\n"}, "listed twice"),
        ({"test.index": "9\n6\n5\n"}, "names node 5, but nodes 0 to 5 are rows of allx"),
        ({"test.index": "9\n6\n-8\n"}, r"test\.index, line 3: '-8'"),
        ({"test.index": "9\n6\n99999999999\n"}, "out of all proportion"),
    ],
)
def test_a_bad_planetoid_set_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(planetoid(tmp_path, **change))


def test_one_list_that_stands_for_many_nodes_is_not_multiplied(tmp_path: Path) -> None:
    row = list(range(6)) * 1000
    with pytest.raises(ValueError, match=r"60000000 neighbours in \d+ bytes"):
        load(planetoid(tmp_path, graph=dict.fromkeys(range(10_000), row)))


def test_an_array_whose_size_is_a_lie_is_refused(tmp_path: Path) -> None:
    raw = pickle.dumps(np.eye(3, dtype=np.int32), 2)
    lie = raw.replace(b"K\x03K\x03\x86", b"J\xff\xff\xff\x7fK\x03\x86")
    assert lie != raw
    with pytest.raises(ValueError, match=r"int32 \[2147483647, 3\] with 36 bytes"):
        load(planetoid(tmp_path, ty=lie))


def test_missing_parts_and_several_sets(tmp_path: Path) -> None:
    spec = planetoid(tmp_path)
    shutil.copy(f"{spec}.graph", tmp_path / "ind.other.graph")
    with pytest.raises(ValueError, match=r"several Planetoid sets.*ind\.other.*ind\.toy"):
        load(str(tmp_path))
    os.remove(f"{spec}.ally")
    with pytest.raises(ValueError, match="missing: ally"):
        load(spec)


# ----------------------------------------------------------------------------------------------- METIS


def metis(folder: Path, text: str) -> str:
    path = folder / "g.graph"
    path.write_bytes(text.encode())
    return str(path)


@needs_data
def test_the_four_tiny_graphs_are_one_graph_with_different_weights() -> None:
    one, two, three, four = (load(str(SHARED / f"graphs/tiny_0{i}.graph")) for i in (1, 2, 3, 4))
    assert pairs(one) == pairs(two) == pairs(three) == pairs(four)
    assert pairs(one)[:5] == [(0, 4), (0, 2), (0, 1), (1, 0), (1, 2)]
    assert one.edge_weight is None
    assert four.edge_weight is None
    assert two.edge_weight is not None
    assert three.edge_weight is not None
    assert two.edge_weight[:5].tolist() == [1, 2, 1, 1, 2]
    assert three.edge_weight[-2:].tolist() == [6, 5]
    assert two.node_weight is None
    assert three.node_weight is not None
    assert four.node_weight is not None
    assert three.node_weight.tolist() == [[4], [2], [5], [3], [1], [6], [2]]
    assert four.node_weight[:3].tolist() == [[1, 2, 0], [0, 2, 2], [4, 1, 1]]


@st.composite
def metis_graphs(draw: st.DrawFn) -> tuple[int, dict[tuple[int, int], int], str, int]:
    """(nodes, weight of each pair, fmt, ncon)."""
    n = draw(st.integers(1, 8))
    node = st.integers(0, n - 1)
    ends = draw(st.sets(st.tuples(node, node).filter(lambda p: p[0] < p[1]), max_size=15))
    fmt = draw(
        st.sampled_from(["", "0", "00", "000", "1", "001", "10", "010", "11", "011", "100", "101", "110", "111"])
    )
    has_weights = fmt.zfill(3)[1] == "1"
    return (
        n,
        {pair: draw(st.integers(1, 99)) for pair in sorted(ends)},
        fmt,
        draw(st.integers(1, 3)) if has_weights else 0,
    )


@given(metis_graphs(), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_every_metis_form_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    graph: tuple[int, dict[tuple[int, int], int], str, int],
    end: str,
    comments: bool,
    last: bool,
) -> None:
    n, weight, fmt, ncon = graph
    sizes, _, edge_weights = (digit == "1" for digit in fmt.zfill(3))
    header = f"{n} {len(weight)} {fmt} {ncon if ncon > 1 else ''}"
    entries, lines = [], [header]
    for u in range(n):
        row = [7] * sizes + [10 * u + c for c in range(ncon)]
        for v in range(n):
            pair = (min(u, v), max(u, v))
            if pair in weight:
                entries.append((u, v))
                row += [v + 1] + [weight[pair]] * edge_weights
        lines += ["% 1 2 3"] * comments + [" " * (u % 3) + "\t ".join(map(str, row))]
    text = end.join(["%"] * comments + lines) + (end + "% end" + end * 3 if last else "")
    g = load(metis(tmp_path_factory.mktemp("metis"), text))
    assert g.num_nodes == n
    assert pairs(g) == entries
    expected = [weight[min(p), max(p)] for p in entries] if edge_weights else None
    assert (None if g.edge_weight is None else g.edge_weight.tolist()) == expected
    columns = [[10 * u + c for c in range(ncon)] for u in range(n)] if ncon else None
    assert (None if g.node_weight is None else g.node_weight.tolist()) == columns
    assert any("vertex sizes" in change for change in g.changes) == sizes


def test_metis_loops_duplicates_and_big_weights_are_kept(tmp_path: Path) -> None:
    g = load(metis(tmp_path, "2 3\n1 2 2\n1 1\n"))
    assert pairs(g) == [(0, 0), (0, 1), (0, 1), (1, 0), (1, 0)]
    assert any("1 loops" in change for change in g.changes)
    big = load(metis(tmp_path, f"2 1 1\n2 {2**24 + 1}\n1 {2**24 + 1}\n"))
    assert big.edge_weight is not None
    assert big.edge_weight.dtype == np.float64
    assert big.edge_weight.tolist() == [2**24 + 1] * 2


BAD_METIS = [
    ("", "holds no graph"),
    ("% only\n% comments\n", "holds no graph"),
    ("3\n", r"line 1: the header is '3'; expected 'N M"),
    ("% c\n\nx 3\n", "line 3: the header is 'x 3'"),
    ("2 1 0 0 0\n2\n1\n", "line 1: the header"),
    ("2 1 2\n2\n1\n", "line 1: fmt is 2; expected up to three digits of 0 and 1"),
    ("2 1 0 1\n2\n1\n", "line 1: ncon is 1, but fmt 000 says no vertex weights"),
    ("2 1 10 0\n1 2\n1 1\n", "line 1: ncon is 0, but fmt 010 says vertex weights"),
    ("0 0\n", "declares 0 nodes"),
    ("99999999999 1\n2\n1\n", "declares 99999999999 nodes, but 3 lines follow"),
    ("4 1\n2\n1\n", "declares 4 nodes, but 3 lines follow"),
    ("2 1\n2\n1\n\n2\n", "line 5: one line more than the 2 nodes"),
    ("2 2\n2\n1\n", "declares 2 edges = 4 entries, but the lines hold 2 entries; the header counts an edge once"),
    ("2 5\n2\n1\n", "declares 5 edges = 10 entries, but the lines hold 2 entries"),
    ("2 1\n2\n%\n1 3\n", "line 4: neighbour 3; expected 1 to 2"),
    ("2 1\n2\n0\n", "line 3: neighbour 0; expected 1 to 2"),
    ("2 1\n2\n-1\n", "line 3: '-1' is not a whole number"),
    ("2 1\n2 x7\n1\n", "line 2: 'x7' is not a whole number"),
    ("2 1 1\n2 1.5\n1 1.5\n", "line 2: '1.5' is not a whole number"),
    ("2 1\n2\n99999999999999999999\n", "line 3: '99999999999999999999' is not a whole number"),
    ("2 1 1\n2 5\n1\n", "line 3: fmt 001 asks for pairs of neighbour and edge weight"),
    ("2 1 1\n2 0\n1 0\n", "line 2: an edge weight of 0"),
    ("2 1 11 2\n1 1 2 5\n1\n", "line 3: 1 numbers; fmt 011 with ncon 2 asks for at least 2"),
    ("3 2\n2 3\n1\n2\n", "line 2: node 1 names neighbour 3, but the line of node 3 does not name 1"),
    ("2 2\n2 2 2\n1\n", "line 2: node 1 names neighbour 2, but the line of node 2 does not name 1 as often"),
    ("% c\n2 1 1\n2 5\n1 6\n", "line 3: the edge from 1 to 2 weighs 5 here and otherwise in the line of node 2"),
]


@pytest.mark.parametrize(("text", "message"), BAD_METIS)
def test_a_bad_metis_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(metis(tmp_path, text))
    assert "g.graph" in str(caught.value)


# ------------------------------------------------------------------------------------------------ demo


@pytest.fixture(scope="module")
def communities() -> Graph:
    return load("demo:communities")


def test_a_demo_is_what_it_promises(communities: Graph) -> None:
    s = summarise(communities)
    assert (s.num_nodes, s.num_edges, s.loops, s.duplicates, s.directed) == (20_000, 320_000, 0, 0, False)
    assert (s.num_features, s.feature_dtype, s.num_classes, s.task) == (64, "float32", 16, "single-label")
    assert [(c.train, c.val, c.test) for c in s.split_counts] == [(2_000, 4_000, 14_000)]
    assert (s.split_counts[0].overlap, s.split_counts[0].uncovered) == (0, 0)
    assert s.in_degree[1] > 20 * 16  # a power law has hubs
    assert s.largest_component > 19_000
    assert min(s.label_counts) > 500


def test_a_demo_is_homophilous_and_needs_its_neighbours(communities: Graph) -> None:
    g = communities
    assert isinstance(g.x, np.ndarray)
    assert g.y is not None
    assert g.splits is not None
    assert 0.5 < np.mean(g.y[g.src] == g.y[g.dst]) < 0.7
    mean = sp.csr_array((np.ones(g.num_edges, np.float32), (g.dst, g.src)), shape=(g.num_nodes, g.num_nodes)) @ g.x
    mean /= np.maximum(np.bincount(g.dst, minlength=g.num_nodes), 1)[:, None]

    def accuracy(x: NDArray[np.float32]) -> float:
        """Of the nearest class mean."""
        assert g.y is not None
        assert g.splits is not None
        train, test = g.splits.train[0], g.splits.test[0]
        centres = np.stack([x[train & (g.y == c)].mean(axis=0) for c in range(16)])
        distance = (centres**2).sum(axis=1) - 2 * x[test] @ centres.T
        return float(np.mean(distance.argmin(axis=1) == g.y[test]))

    assert 0.15 < accuracy(g.x) < 0.5
    assert accuracy(g.x + mean * 3) > 0.65


def test_the_same_keys_give_the_same_graph_and_another_seed_another() -> None:
    spec = "demo:communities?nodes=3000&degree=8&classes=5&features=7"
    a, b, c = load(spec), load(spec), load(f"{spec}&seed=1")
    for field in ("src", "dst", "x", "y"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
        assert not np.array_equal(getattr(a, field), getattr(c, field))
    assert (a.num_nodes, a.num_edges) == (3000, 24_000)
    assert a.x is not None
    assert a.x.shape == (3000, 7)
    assert any("seed=0" in change and "nodes=3000" in change for change in a.changes)


def test_ids_tell_nothing_of_communities(communities: Graph) -> None:
    assert communities.y is not None
    first = np.bincount(communities.y[:10_000], minlength=16)
    assert np.abs(first / np.bincount(communities.y) - 0.5).max() < 0.1


@pytest.mark.parametrize("name", ["arxiv-like", "reddit-like"])
def test_named_demos_keep_their_proportions_when_small(name: str) -> None:
    g = load(f"demo:{name}?nodes=20000")
    assert g.num_edges == 2 * round(20_000 * RECIPES[name].degree / 2)
    assert min(summarise(g).label_counts) > 0


def test_recipes_have_the_sizes_of_their_models() -> None:
    entries = {name: round(recipe.nodes * recipe.degree) for name, recipe in RECIPES.items()}
    assert entries == {
        "communities": 320_000,
        "arxiv-like": 2_332_486,
        "reddit-like": 5_000_000,
        "products-like": 123_718_280,
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("demo:", "no demo ''; expected one of communities, arxiv-like"),
        ("demo:cora", "no demo 'cora'"),
        ("demo:communities?size=3", "'size=3' is not key=value.*keys are nodes, degree"),
        ("demo:communities?nodes", "'nodes' is not key=value"),
        ("demo:communities?nodes=many", "nodes is 'many'; expected a whole number; keys are nodes"),
        ("demo:communities?nodes=2e4", "expected a whole number"),
        ("demo:communities?nodes=20", "nodes is 20; expected 160"),
        ("demo:communities?nodes=200&nodes=300", "nodes is given twice"),
        ("demo:communities?degree=5001", "degree is 5001.0; expected 0 to"),
        ("demo:communities?degree=nan", "degree is nan"),
        ("demo:communities?noise=-1", "noise is -1.0"),
        ("demo:communities?train=0.7&val=0.5", "val is 0.5; expected 0 to 0.3"),
        ("demo:communities?seed=-1", "seed is -1"),
        ("demo:communities?classes=0", "classes is 0"),
    ],
)
def test_a_bad_demo_spec_is_refused_with_what_there_is(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(spec)


def test_odd_demos(tmp_path: Path) -> None:
    assert load("demo:communities?nodes=100&classes=1&degree=0&features=1").num_edges == 0
    crowded = load("demo:communities?nodes=100&classes=5&degree=25&homophily=1&val=0.9")
    assert 1000 < crowded.num_edges <= 2500  # communities of 20 nodes fill up
    assert crowded.splits is not None
    assert not crowded.splits.test.any()
