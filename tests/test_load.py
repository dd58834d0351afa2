"""The door to all readers: options of every format, steps in their order, look-alikes."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import partition_tools
from fullgraph.config import TrainConfig
from partition_tools import partition, prepare
from partition_tools.graph import Graph
from partition_tools.options import AssignOptions
from partition_tools.sources import LoadOptions, load, save_npz
from tests.data import SHARED, needs_data

EDGES = np.array([[0, 1, 1, 2, 0], [1, 1, 0, 0, 1]])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, num_nodes=4)
    return tmp_path / "g.npz"


def pairs(graph: Graph) -> list[tuple[int, int]]:
    return list(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))


# --------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"duplicates": "merge"}, "--duplicates merge: expected keep, sum, first, error"),
        ({"nan": "skip"}, "--nan skip: expected error, zero, mean"),
        ({"index_base": 2}, "--index-base 2: expected 0, 1"),
        ({"label_base": -1}, "--label-base -1: expected 0, 1"),
        ({"task": "ranking"}, "--task ranking: expected single-label"),
        ({"header": "maybe"}, "--header maybe: expected yes, no"),
        ({"num_nodes": 0}, "--num-nodes 0: expected at least 1"),
        ({"features": "random"}, "--features random: expected random:K"),
        ({"features": "random:0"}, "--features random:0: expected random:K"),
        ({"features": "learned:8:1"}, "--features learned:8:1: expected learned:K"),
        ({"features": "learned:-3"}, "expected learned:K"),
        ({"id_column": "id"}, "--id-column has no effect without"),
        ({"text_ids": True, "num_nodes": 3}, "--text-ids: names are not numbered"),
    ],
)
def test_options_check_themselves(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadOptions(**fields)


def test_every_option_has_a_sentence_and_is_off_by_default() -> None:
    assert LoadOptions().asked() == ()
    assert LoadOptions(features="x.npy").features_file == "x.npy"
    assert LoadOptions(features="./degree").features_file == "./degree"
    assert LoadOptions(features="random:8:3").features_made == ("random", 8, 3)
    assert {field.name for field in dataclasses.fields(LoadOptions)} >= {"undirected", "num_nodes", "features", "nan"}


def test_options_may_be_keywords(path: Path) -> None:
    assert load(path, undirected=True).changes == load(path, LoadOptions(undirected=True)).changes
    with pytest.raises(ValueError, match=r"give options or keywords \(undirected\), not both"):
        load(path, LoadOptions(), undirected=True)
    with pytest.raises(ValueError, match="--nan never: expected error, zero, mean"):
        load(path, nan="never")
    assert partition_tools.LoadOptions is LoadOptions


@pytest.mark.parametrize("options", [{"text_ids": True}, {"header": "no"}])
def test_an_option_of_another_format_is_an_error(path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no effect on plain files, only on edge-list; leave it out"):
        load(path, LoadOptions(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": True}, "--weights: the file holds no edge weights"),
        ({"task": "regression"}, "no effect on a graph without labels"),
        ({"label_base": 1}, "no effect on a graph without labels"),
        ({"num_nodes": 5}, "contradictory .*num_nodes: 4, --num-nodes: 5"),
    ],
)
def test_an_option_that_contradicts_the_file_is_an_error(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(path, LoadOptions(**options))


@needs_data
def test_a_number_of_nodes_that_is_another_shows_both(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 34 nodes, but --num-nodes says 35"):
        load(SHARED / "graphs/karate.graph", LoadOptions(num_nodes=35))
    np.save(tmp_path / "x.npy", np.ones((33, 2)))
    with pytest.raises(ValueError, match="33 rows of features for 34 nodes of karate"):
        load(SHARED / "graphs/karate.graph", LoadOptions(features=str(tmp_path / "x.npy")))


def test_a_number_of_nodes_where_the_file_has_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES)
    assert load(tmp_path / "g.npz", LoadOptions(num_nodes=9)).num_nodes == 9
    np.save(tmp_path / "x.npy", np.ones((7, 2)))
    assert load(tmp_path / "g.npz", LoadOptions(features=str(tmp_path / "x.npy"))).num_nodes == 7
    with pytest.raises(ValueError, match="edge 3 is 2 -> 0, but there are 2 nodes"):
        load(tmp_path / "g.npz", LoadOptions(num_nodes=2))


@pytest.mark.parametrize(
    ("y", "task", "expected"),
    [
        ([0, 1, -1, 2], "regression", [0, 1, np.nan, 2]),
        ([0.0, 1, 3, 2], "regression", [0, 1, 3, 2]),
        (np.eye(4, dtype=int), "single-label", [0, 1, 2, 3]),
        ([[0, 1], [0, 0], [1, 0], [1, 0]], "single-label", [1, -1, 0, 0]),
        ([[0, 1], [0, 0], [1, 0], [1, 0]], "regression", [[0, 1], [0, 0], [1, 0], [1, 0]]),
        ([0, 1, 1, 0], "multi-label", [[0], [1], [1], [0]]),
        ([1, 0, 1, 2], "single-label", [1, 0, 1, 2]),
    ],
)
def test_a_task_that_labels_do_not_look_like(tmp_path: Path, y: Any, task: Any, expected: Any) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, y=y)
    g = load(tmp_path / "g.npz", LoadOptions(task=task))
    assert g.task == task
    np.testing.assert_array_equal(g.y, expected)


def test_a_task_that_labels_cannot_have(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, y=[[1, 1], [0, 0], [0, 0], [0, 1]])
    with pytest.raises(ValueError, match="node 0 has 2 labels; expected one at most"):
        load(tmp_path / "g.npz", LoadOptions(task="single-label"))
    np.savez(tmp_path / "g.npz", edge_index=EDGES, y=[0, 2, 1, 1])
    with pytest.raises(ValueError, match="0 or 1 each"):
        load(tmp_path / "g.npz", LoadOptions(task="multi-label"))


# ----------------------------------------------------------------------------------------------------------- steps


def test_steps_come_in_their_order_and_are_said(path: Path) -> None:
    g = load(path, LoadOptions(drop_loops=True, duplicates="sum", undirected=True, features="degree"))
    assert pairs(g) == [(0, 1), (1, 0), (2, 0), (0, 2)]
    assert g.edge_weight is not None
    assert g.edge_weight.tolist() == [2, 1, 1, 1]
    np.testing.assert_array_equal(g.x, np.log1p(np.array([[2], [1], [1], [0]])).astype(np.float32))
    text = "\n".join(g.changes)
    places = [
        text.index(word) for word in ("1 loop dropped", "1 edge that repeats", "made undirected", "features: log")
    ]
    assert places == sorted(places)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=20), st.booleans(), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_duplicates(
    tmp_path_factory: pytest.TempPathFactory, edges: list[tuple[int, int]], weighted: bool, seed: int
) -> None:
    path = tmp_path_factory.mktemp("npz") / "g.npz"
    src, dst = np.array(edges, np.int64).reshape(-1, 2).T
    weight = np.random.default_rng(seed).integers(1, 9, len(edges)).astype(np.float64)
    save_npz(path, Graph(name="g", num_nodes=4, src=src, dst=dst, edge_weight=weight if weighted else None))
    first = list(dict.fromkeys(edges))
    for how in ("keep", "first", "sum"):
        g = load(path, LoadOptions(duplicates=how))
        assert pairs(g) == (edges if how == "keep" else first)
        if how == "first" and weighted:
            assert g.edge_weight is not None
            assert g.edge_weight.tolist() == [weight[edges.index(pair)] for pair in first]
        if how == "sum" and len(first) < len(edges):
            total: Counter[tuple[int, int]] = Counter()
            for pair, w in zip(edges, weight if weighted else np.ones(len(edges)), strict=True):
                total[pair] += w
            assert g.edge_weight is not None
            assert g.edge_weight.tolist() == [total[pair] for pair in first]
    if len(first) < len(edges):
        again = next(i for i, pair in enumerate(edges) if pair in edges[:i])
        with pytest.raises(
            ValueError, match=rf"edge {again} \({edges[again][0]} -> {edges[again][1]}\) has the ends of an edge before"
        ):
            load(path, LoadOptions(duplicates="error"))
    else:
        assert load(path, LoadOptions(duplicates="error")).num_edges == len(edges)


def test_edge_features_go_along(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, edge_x=np.arange(10).reshape(5, 2))
    g = load(tmp_path / "g.npz", LoadOptions(drop_loops=True, duplicates="first", undirected=True))
    assert pairs(g) == [(0, 1), (1, 0), (2, 0), (0, 2)]
    assert g.edge_x is not None
    assert g.edge_x.tolist() == [[0, 1], [4, 5], [6, 7], [6, 7]]
    with pytest.raises(ValueError, match="1 edge repeats another, and their features have no sum"):
        load(tmp_path / "g.npz", LoadOptions(duplicates="sum"))
    np.savez(tmp_path / "h.npz", edge_index=EDGES, edge_attr=np.ones(5, np.float32), edge_x=np.ones((5, 1)))
    with pytest.raises(ValueError, match="edge_x and edge_attr say the same"):
        load(tmp_path / "h.npz")


def test_features_made_from_the_graph(path: Path) -> None:
    degree = load(path, LoadOptions(features="degree"))
    np.testing.assert_array_equal(degree.x, np.log1p(np.array([[2, 2], [3, 2], [0, 1], [0, 0]])).astype(np.float32))
    onehot = load(path, LoadOptions(features="onehot")).x
    assert isinstance(onehot, sp.csr_array)
    np.testing.assert_array_equal(onehot.toarray(), np.eye(4))
    random = [load(path, LoadOptions(features=f"random:{spec}")).x for spec in ("3", "3", "3:1")]
    np.testing.assert_array_equal(random[0], random[1])
    assert not np.array_equal(random[0], random[2])
    learned = load(path, LoadOptions(features="learned:16"))
    assert (learned.x, learned.learned_features) == (None, 16)
    assert "features: 16 columns that training learns" in learned.changes


def test_features_made_in_place_of_others_are_said(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, x=np.ones((3, 5)))
    g = load(tmp_path / "g.npz", LoadOptions(features="learned:2"))
    assert g.x is None
    assert "in place of the 5 of the graph's own" in g.changes[-1]


@pytest.mark.parametrize("sparse", [False, True])
def test_values_that_are_no_numbers_are_filled_on_request(tmp_path: Path, sparse: bool) -> None:
    x = np.array([[1, np.nan], [3, 0], [np.inf, -np.inf], [0, 0]], np.float16 if not sparse else np.float32)
    g = Graph(name="g", num_nodes=4, src=EDGES[0], dst=EDGES[1], x=sp.csr_array(x) if sparse else x)
    save_npz(tmp_path / "g.npz", g)
    for how, expected in (("zero", [[1, 0], [3, 0], [0, 0], [0, 0]]), ("mean", [[1, 0], [3, 0], [4 / 3, 0], [0, 0]])):
        filled = load(tmp_path / "g.npz", LoadOptions(nan=how))
        assert filled.x is not None
        assert filled.x.dtype == x.dtype
        dense = filled.x.toarray() if isinstance(filled.x, sp.csr_array) else filled.x
        np.testing.assert_array_equal(dense, np.array(expected).astype(x.dtype))
        assert any("3 values that are NaN or infinite in x" in change for change in filled.changes)


# ------------------------------------------------------------------------------------------------------ look-alikes


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("g.mesh", "a METIS mesh .*m2gmetis"),
        ("g.hgr", "a hypergraph"),
        ("g.graphml", "GraphML; .*write_edgelist"),
        ("g.gr.gz", "a DIMACS graph"),
        ("g.pkl", "a pickle, which is not read"),
        ("g.graph.part.8", "a partition .*--method file:PATH"),
        ("g.parquet", "Parquet"),
        ("g.csv.bz2", "packed by bzip2"),
    ],
)
def test_a_look_alike_is_told_what_it_is(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / name).write_bytes(b"1 2 3\n")
    with pytest.raises(ValueError, match=f"{name}: is {what}"):
        load(tmp_path / name)


def test_folders_that_are_no_graph(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="no known format"):
        load(tmp_path / "a")
    np.savez(tmp_path / "a" / "g.npz", edge_index=EDGES)
    with pytest.raises(ValueError, match="is a folder; name one of the files in it"):
        load(tmp_path / "a")
    (tmp_path / "b" / "processed").mkdir(parents=True)
    (tmp_path / "b" / "processed" / "data.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="a data set that PyG processed"):
        load(tmp_path / "b")


def test_a_metis_mesh_named_graph_is_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "g.graph").write_text("2\n1 2 3\n2 3 4\n")
    with pytest.raises(ValueError, match=r"line 1: the header is '2'.*m2gmetis"):
        load(tmp_path / "g.graph")


def test_lists_of_nodes_in_place_of_masks(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, num_nodes=4, train_idx=[0, 3], val_idx=[[1], [2]], test_idx=[])
    g = load(tmp_path / "g.npz")
    assert g.splits is not None
    assert g.splits.train.tolist() == [[True, False, False, True]] * 2
    assert g.splits.val.tolist() == [[False, True, False, False], [False, False, True, False]]
    assert not g.splits.test.any()


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="long double is float64 here")
@pytest.mark.parametrize("field", ["x", "edge_x", "edge_weight", "y"])
def test_numbers_that_no_shard_holds_are_not_narrowed(tmp_path: Path, field: str) -> None:
    rows = 4 if field in ("x", "y") else 5
    values = np.full((rows, 2) if field in ("x", "edge_x") else rows, 0.5, np.longdouble)
    np.savez(tmp_path / "g.npz", edge_index=EDGES, num_nodes=4, **{field: values})
    with pytest.raises(ValueError, match=f"{field} is {np.dtype(np.longdouble)}"):
        load(tmp_path / "g.npz")


def test_whole_weights_that_no_float_holds_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, edge_weight=np.full(5, 2**53 + 1))
    with pytest.raises(ValueError, match="9007199254740993, which no float holds exactly"):
        load(tmp_path / "g.npz")


# ------------------------------------------------------------------------------------------- numbering, names, places


ONE_BASED = {"edge_index": EDGES + 1, "num_nodes": 4, "y": [0, 1, 2, 1], "train_idx": [1, 4], "test_idx": [2]}


def save_as(kind: str, folder: Path, fields: dict[str, Any]) -> Path:
    path = folder / f"g.{kind}"
    if kind == "npz":
        np.savez(path, **fields)
    elif kind == "pt":
        import torch

        torch.save({name: torch.as_tensor(value) for name, value in fields.items()}, path)
    else:
        with h5py.File(path, "w") as file:
            file.attrs.update(format="fullgraph-graph", format_version=1)
            for name, value in fields.items():
                file[name] = np.asarray(value, np.int64)
    return path


@pytest.mark.parametrize("kind", ["npz", "pt", "h5"])
def test_nodes_numbered_from_one(tmp_path: Path, kind: str) -> None:
    fields = ONE_BASED if kind != "h5" else {name: value for name, value in ONE_BASED.items() if name != "num_nodes"}
    path = save_as(kind, tmp_path, fields)
    with pytest.raises(ValueError, match="train_idx names node 4 at place 1; there are 4 nodes, 0 to 3"):
        load(path)
    g = load(path, LoadOptions(index_base=1))
    assert (g.num_nodes, pairs(g)) == (4, list(zip(*EDGES.tolist(), strict=True)))
    assert g.node_ids is not None
    assert g.node_ids.tolist() == [1, 2, 3, 4]
    assert g.splits is not None
    assert np.flatnonzero(g.splits.train[0]).tolist() == [0, 3]
    assert np.flatnonzero(g.splits.test[0]).tolist() == [1]


def test_a_wrong_index_base_is_refused_with_the_files_own_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, num_nodes=4)
    with pytest.raises(ValueError, match=r"edge 0 is 0 -> 1, .*ids go from 1 to 4; .*ids start at 0: leave out"):
        load(tmp_path / "g.npz", LoadOptions(index_base=1))
    np.savez(tmp_path / "h.npz", edge_index=EDGES + 1, num_nodes=3, train_idx=[4])
    with pytest.raises(ValueError, match="train_idx names node 4 at place 0; there are 3 nodes, 1 to 3"):
        load(tmp_path / "h.npz", LoadOptions(index_base=1))
    np.savez(tmp_path / "i.npz", edge_index=EDGES + 1)
    assert load(tmp_path / "i.npz", LoadOptions(index_base=1)).num_nodes == 3


def test_a_list_of_nodes_that_is_a_mask_is_pointed_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, num_nodes=4, train_idx=[1, 0, 0, 1])
    with pytest.raises(ValueError, match=r"names node 0 more than once; .*a mask is bool, or named train_mask"):
        load(tmp_path / "g.npz")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_masks_of_floats_are_masks(tmp_path: Path, dtype: type) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, num_nodes=4, train_mask=np.array([[1], [0], [0], [1]], dtype))
    splits = load(tmp_path / "g.npz").splits
    assert splits is not None
    assert splits.train.tolist() == [[True, False, False, True]]


def test_labels_keep_the_users_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, y=np.array(["cat", "", "ape", "cat"]))
    g = load(tmp_path / "g.npz")
    assert g.y is not None
    assert g.class_names is not None
    assert (g.y.tolist(), g.class_names.tolist()) == ([1, -1, 0, 1], ["ape", "cat"])
    save_npz(tmp_path / "again.npz", g)
    again = load(tmp_path / "again.npz").class_names
    assert again is not None
    assert again.tolist() == ["ape", "cat"]
    np.savez(tmp_path / "h.npz", edge_index=EDGES, y=[1, 3, 2, 1])
    names = load(tmp_path / "h.npz", LoadOptions(label_base=1)).class_names
    assert names is not None
    assert names.tolist() == [1, 2, 3]
    for options, message in (
        (LoadOptions(label_base=1), "--label-base 1 has no effect on names of classes"),
        (LoadOptions(task="regression"), "--task regression: the labels are names"),
    ):
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "g.npz", options)
    with pytest.raises(ValueError, match="--label-base 1: numbers classes, and --task regression has none"):
        LoadOptions(label_base=1, task="regression")
    np.savez(tmp_path / "i.npz", edge_index=EDGES, y=[0, 1, 2, 1], class_names=np.array(["a", "b"]))
    with pytest.raises(ValueError, match="class_names has 2 names; expected one for each class"):
        load(tmp_path / "i.npz")


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (np.array([0, 1, 255, 1], np.uint8), "its largest class is 255; if that says that a node has no label"),
        (np.array([0, 1, 40, 1]), "of the classes 0 to 40 only 3 occur"),
        (np.array([[0, 1], [1, np.nan], [0, 0], [1, 1]]), "holds 0, 1 and NaN: taken as targets of a regression"),
    ],
)
def test_odd_labels_are_pointed_out(tmp_path: Path, y: Any, said: str) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, y=y)
    assert said in "\n".join(load(tmp_path / "g.npz").changes)


def test_a_class_far_beyond_the_others_is_refused_before_anything_is_counted(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, y=[0, 1, 2_000_000_000, 1])
    with pytest.raises(ValueError, match=r"y\[2\] is 2000000000, but only 3 classes occur"):
        load(tmp_path / "g.npz")


def test_random_features_that_no_memory_holds_are_refused() -> None:
    graph = Graph(name="g", num_nodes=10**6, src=np.zeros(0, np.int64), dst=np.zeros(0, np.int64))
    with pytest.raises(ValueError, match=r"--features random:9999999: .*GiB, and this machine has"):
        prepare.make_features(graph, "random", 9999999, 0)


def test_errors_name_the_file_and_the_users_ids(tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text("a,b\nb,c\nc,a\n")
    (tmp_path / "x.csv").write_text("id,f\na,1\nb,nan\nc,3\n")
    (tmp_path / "y.csv").write_text("id,label\na,cat\nc,dog\n")
    (tmp_path / "s.csv").write_text("id,split\nb,train\n")
    labels = str(tmp_path / "y.csv")
    with pytest.raises(ValueError, match=r"x\.csv holds 1 value that is NaN or infinite, the first at node b"):
        load(tmp_path / "g.csv", features=str(tmp_path / "x.csv"), labels=labels)
    g = load(tmp_path / "g.csv", LoadOptions(labels=labels, splits=str(tmp_path / "s.csv")))
    with pytest.raises(ValueError, match=r"y\.csv: 1 node of the train mask of split 0 has no label .* node b first"):
        prepare.check(g)
    with pytest.raises(ValueError, match=r"g\.csv: --parts 4 for 3 nodes"):
        partition(g, 4)
    (tmp_path / "w.csv").write_text("a,b,nan\nb,c,1\n")
    with pytest.raises(ValueError, match=r"w\.csv: edge_weight holds 1 value .*the first is nan of edge 0 \(a -> b\)"):
        load(tmp_path / "w.csv", weights=True)
    with pytest.raises(ValueError, match=r"g\.csv: y: --random-split splits labelled nodes"):
        prepare.random_split(load(tmp_path / "g.csv"), (0.6, 0.2, 0.2), 1)


def test_a_keyword_that_is_no_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"load\(\) has no option undirectd; did you mean undirected\?"):
        load("demo:communities?nodes=160", undirectd=True)
    graph = load("demo:communities?nodes=160")
    with pytest.raises(TypeError, match=r"partition\(\) has no option sed; did you mean seed\?"):
        partition(graph, 2, sed=3)
    with pytest.raises(TypeError, match=r"graph is 'g.npz'; expected a Graph"):
        partition("g.npz", 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoadOptions(undirected="yes"), "--undirected is 'yes'; expected True or False"),  # type: ignore[arg-type]
        (lambda: LoadOptions(num_nodes="5"), "--num-nodes is '5'; expected a whole number or None"),  # type: ignore[arg-type]
        (lambda: LoadOptions(labels=3), "--labels is 3; expected text or None"),  # type: ignore[arg-type]
        (lambda: AssignOptions(parts=2, imbalance="x"), "--imbalance is 'x'; expected a number"),  # type: ignore[arg-type]
        (lambda: TrainConfig(layers=2.5), "--layers is 2.5; expected a whole number"),  # type: ignore[arg-type]
        (lambda: TrainConfig(prune=1), "--prune is 1; expected True or False"),  # type: ignore[arg-type]
    ],
)
def test_options_from_python_have_their_types(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_numbers_of_numpy_and_paths_are_taken() -> None:
    options = LoadOptions(num_nodes=np.int32(5), features=Path("f.npy"), undirected=np.True_)  # type: ignore[arg-type]
    assert (options.num_nodes, options.features, options.undirected) == (5, "f.npy", True)
    assert type(options.num_nodes) is int
    assert TrainConfig(lr=np.float32(0.5), layers=np.int64(3)).as_dict()["layers"] == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("base", [0, 1])
def test_a_number_of_nodes_beyond_memory_is_refused(tmp_path: Path, base: Any) -> None:
    (tmp_path / "g.csv").write_text("1,2\n2,3\n")
    np.savez(tmp_path / "g.npz", edge_index=np.array([[1, 2], [2, 3]]), num_nodes=np.int64(10**13))
    for name, options in (("g.csv", {"num_nodes": 10**13}), ("g.npz", {})):
        with pytest.raises(ValueError, match=r"10,000,000,000,000 nodes.*memory do not suffice"):
            load(tmp_path / name, index_base=base, **options)


def test_a_mesh_in_place_of_a_graph_is_told(tmp_path: Path) -> None:
    for text in ("2 4\n1 2 3\n2 3 4\n", "4 6\n1 2 3\n2 3 4\n1 3 4\n1 2 4\n"):
        (tmp_path / "m.graph").write_text(text)
        with pytest.raises(ValueError, match=r"every line has 3 numbers: a METIS mesh"):
            load(tmp_path / "m.graph")
