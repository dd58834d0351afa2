"""Features, labels and splits in files of their own."""

from __future__ import annotations

import gzip
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from partition_tools import build, partition
from partition_tools.graph import Graph
from partition_tools.prepare import check
from partition_tools.sources import LoadOptions, load
from partition_tools.verify import verify

NAMED = "ann,bob\nbob,cid\ncid,ann\n"
ROWS = "0,1\n1,2\n2,0\n"


def put(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    if isinstance(content, str):
        raw = content.encode()
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    elif sp.issparse(content):
        sp.save_npz(path, content)
    elif isinstance(content, dict):
        np.savez(path, **content)
    else:
        np.save(path, content)
    return str(path)


def joined(folder: Path, edges: str, header: str = "no", **files: tuple[str, Any] | str) -> Graph:
    """The graph of an edge list and of files; an option that is no file is given as it is."""
    options: dict[str, Any] = {
        name: put(folder, *value) if isinstance(value, tuple) else value for name, value in files.items()
    }
    return load(put(folder, "g.csv", edges), LoadOptions(header=header, **options))


def by_id(graph: Graph, field: str) -> dict[Any, Any]:
    ids = range(graph.num_nodes) if graph.node_ids is None else graph.node_ids.tolist()
    return dict(zip(ids, np.asarray(getattr(graph, field)).tolist(), strict=True))


def said(graph: Graph) -> str:
    return "\n".join(graph.changes)


# -------------------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.uint8, np.int64, np.bool_])
def test_features_by_row_keep_their_type(tmp_path: Path, dtype: type) -> None:
    x = np.array([[0, 1], [1, 0], [1, 1], [0, 0]]).astype(dtype)
    g = joined(tmp_path, ROWS, features=("x.npy", x))
    assert g.num_nodes == 4  # a row a node: the last one has no edge
    assert isinstance(g.x, np.ndarray)
    assert g.x.dtype == (np.uint8 if dtype is np.bool_ else dtype)
    np.testing.assert_array_equal(g.x, x)
    assert "features of" in said(g)
    assert "by row" in said(g)


@pytest.mark.parametrize("form", [sp.csr_array, sp.csc_array, sp.coo_array])
def test_sparse_features_stay_sparse(tmp_path: Path, form: Any) -> None:
    x = np.array([[0, 1.5], [0, 0], [2, 0]])
    g = joined(tmp_path, ROWS, features=("x.npz", form(x)))
    assert isinstance(g.x, sp.csr_array)
    np.testing.assert_array_equal(g.x.toarray(), x)


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ("id,a,b\nann,1,2\ncid,5,6.5\nbob,3,4\n", {}),
        ("a;Node;b\n1;ann;2\n5;cid;6.5\n3;bob;4\n", {}),
        ("ann 1 2\ncid 5 6.5\nbob 3 4\n", {}),
        ("a,who,b\n1,ann,2\n5,cid,6.5\n3,bob,4\n", {"id_column": "who"}),
        ("1\tann\t2\n5\tcid\t6.5\n3\tbob\t4\n", {"id_column": "2"}),
    ],
)
def test_features_by_id_find_their_nodes(tmp_path: Path, content: str, options: dict[str, Any]) -> None:
    g = joined(tmp_path, NAMED, features=("x.csv.gz", content), **options)
    assert by_id(g, "x") == {"ann": [1, 2], "bob": [3, 4], "cid": [5, 6.5]}
    assert g.node_ids is not None
    assert g.node_ids.tolist() == ["ann", "cid", "bob"]  # the order of the features' file
    assert list(zip(g.node_ids[g.src].tolist(), g.node_ids[g.dst].tolist(), strict=True)) == [
        ("ann", "bob"), ("bob", "cid"), ("cid", "ann"),
    ]  # fmt: skip


def test_features_name_nodes_that_no_edge_names(tmp_path: Path) -> None:
    g = joined(tmp_path, "7,3\n", features=("x.csv", "node_id,a\n3,1\n9,2\n7,3\n"))
    assert by_id(g, "x") == {3: [1], 9: [2], 7: [3]}


@given(st.lists(st.integers(0, 2**62), min_size=2, max_size=12, unique=True), st.data())
@settings(max_examples=30, deadline=None)
def test_any_order_of_any_ids(tmp_path_factory: pytest.TempPathFactory, ids: list[int], data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("ids")
    shuffled = {name: data.draw(st.permutations(ids)) for name in ("features", "labels", "splits")}
    edges = "".join(f"{u},{v}\n" for u, v in pairwise(ids))
    words = {i: ("train", "valid", "test", "")[i % 4] for i in ids}
    g = joined(
        folder,
        edges,
        features=("x.csv", "id,a\n" + "".join(f"{i},{i % 97}\n" for i in shuffled["features"])),
        labels=("y.csv", "id,y\n" + "".join(f"{i},{i % 5}\n" for i in shuffled["labels"])),
        splits=("s.csv", "id,s\n" + "".join(f"{i},{words[i]}\n" for i in shuffled["splits"])),
    )
    assert by_id(g, "x") == {i: [i % 97] for i in ids}
    assert by_id(g, "y") == {i: i % 5 for i in ids}
    assert g.splits is not None
    own = np.array(list(by_id(g, "y")))
    assert sorted(own[g.splits.val[0]].tolist()) == sorted(i for i in ids if i % 4 == 1)


@pytest.mark.parametrize(
    ("edges", "files", "message"),
    [
        (ROWS, {"features": ("x.npy", np.ones((2, 1)))}, r"g\.csv, line 2: edge 1 -> 2: 2 nodes \(rows of .*x\.npy\)"),
        ("1,2\n2,3\n", {"features": ("x.npy", np.ones((3, 1)))}, "add --index-base 1"),
        (NAMED, {"features": ("x.npy", np.ones((3, 1)))}, "ids are text.*column of ids"),
        (ROWS, {"features": ("x.npy", np.ones(3))}, r"x has shape \[3\]|\.npy has shape \[3\]"),
        (ROWS, {"features": ("x.npy", np.array([["a"]]))}, "expected real numbers"),
        (ROWS, {"features": ("x.npy", np.array([[None]], object))}, "Python objects"),
        (ROWS, {"features": ("x.csv", "1,2\n3\n5,6\n")}, r"x\.csv, line 2: 1 column, but"),
        (ROWS, {"features": ("x.csv", "1,2\n3,x\n5,6\n")}, r"x\.csv, line 2: 'x' is not a number"),
        (ROWS, {"features": ("x.csv", "")}, "no rows"),
        (ROWS, {"features": ("x.csv", "id,a\n")}, "no rows below the names"),
        (ROWS, {"features": ("x.csv", "id\n1\n")}, "one column, the ids"),
        (NAMED, {"features": ("x.csv", "id,a\nann,1\nbob,2\n")},
         r"line 2: edge bob -> cid: cid is not among the 2 ids.*2 such"),
        (NAMED, {"features": ("x.csv", "id,a\nann,1\nann,2\n")},
         r"x\.csv, line 3: id ann stands here for the second time"),
        (NAMED, {"features": ("x.csv", "id,a\nann,1\n"), "id_column": "who"}, "--id-column who: .* names are id, a"),
        (ROWS, {"features": ("x.csv", "1,2\n"), "id_column": "3"}, "--id-column 3: .*numbers 1 to 2"),
        (ROWS, {"features": "nowhere.npy"},
         "--features nowhere.npy: no such file; .*degree, onehot, random:K or learned:K"),
        (NAMED, {"labels": ("y.csv", "id,y\nann,1\nbob,0\n"), "splits": ("s.csv", "id,s\ndan,train\n")},
         r"s\.csv, line 2: id dan is no node of g; 1 of 1 id unknown"),
        (ROWS, {"features": ("x.npy", np.ones((3, 1))), "labels": ("y.npy", np.zeros(4, int))},
         "4 rows of labels for 3 nodes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path: Path, edges: str, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        joined(tmp_path, edges, **files)


def test_missing_numbers_are_nan_and_nan_is_refused_unless_asked(tmp_path: Path) -> None:
    content = "1,2\n,NA\n3,inf\n"
    with pytest.raises(
        ValueError, match=r"x\.csv holds 3 values that are NaN or infinite, the first at node 1, column 0.*--nan"
    ):
        joined(tmp_path, ROWS, features=("x.csv", content))
    zero, mean = (joined(tmp_path, ROWS, features=("x.csv", content), nan=how) for how in ("zero", "mean"))
    np.testing.assert_array_equal(zero.x, np.float32([[1, 2], [0, 0], [3, 0]]))
    np.testing.assert_array_equal(mean.x, np.float32([[1, 2], [2, 2], [3, 2]]))
    assert "3 values that are NaN or infinite in x became 0" in said(zero)
    assert "2 empty fields were read as NaN" in said(mean)


def test_text_features_are_float32_where_that_holds_them_exactly(tmp_path: Path) -> None:
    assert joined(tmp_path, ROWS, features=("x.csv", "0.5\n1\n2\n")).x.dtype == np.float32
    assert joined(tmp_path, ROWS, features=("x.csv", "0.1\n1\n2\n")).x.dtype == np.float64


def test_very_long_rows(tmp_path: Path) -> None:
    row = ",".join(["0.125"] * 200_000) + "\n"
    g = joined(tmp_path, ROWS, features=("x.csv", row * 3))
    assert g.x is not None
    assert g.x.shape == (3, 200_000)


# ---------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("labels", "task", "expected"),
    [
        (("y.npy", np.array([2, 0, -1])), "single-label", [2, 0, -1]),
        (("y.npy", np.array([[2], [0], [1]])), "single-label", [2, 0, 1]),
        (("y.npy", np.array([2.0, np.nan, 0])), "single-label", [2, -1, 0]),
        (("y.npy", np.array([0.5, np.nan, 0])), "regression", [0.5, np.nan, 0]),
        (("y.npy", np.array([[0, 1], [1, 1], [0, 0]])), "multi-label", [[0, 1], [1, 1], [0, 0]]),
        (("y.npy", np.array(["b", "", "a"])), "single-label", [1, -1, 0]),
        (("y.csv", "2\n0\n1\n"), "single-label", [2, 0, 1]),
        (("y.csv", "label\n2\n0\n-1\n"), "single-label", [2, 0, -1]),
        (("y.csv", "id,label\n2,1\n0,0\n"), "single-label", [0, -1, 1]),
        (("y.csv", "id,label\n1,0.25\n2,1\n0,\n"), "regression", [np.nan, 0.25, 1]),
        (("y.csv", "id,label\n0,cat\n1,dog\n2,ant\n"), "single-label", [1, 2, 0]),
        (("y.csv", "id,label\n0,cat\n2,\n"), "single-label", [0, -1, -1]),
        (("y.tsv", "id\tp\tq\n0\t1\t0\n1\t1\t1\n2\t0\t0\n"), "multi-label", [[1, 0], [1, 1], [0, 0]]),
    ],
)
def test_forms_of_labels(tmp_path: Path, labels: tuple[str, Any], task: str, expected: list[Any]) -> None:
    g = joined(tmp_path, ROWS, labels=labels)
    assert g.task == task
    np.testing.assert_array_equal(g.y, expected)


def test_what_became_of_labels_is_said(tmp_path: Path) -> None:
    g = joined(tmp_path, NAMED, labels=("y.csv", "id,label\nann,cat\nbob,\n"))
    assert "1 name became classes in their order: cat" in said(g)
    assert "1 node has no row there and is without a label" in said(g)
    assert by_id(g, "y") == {"ann": 0, "bob": -1, "cid": -1}
    isolated = joined(tmp_path, NAMED, labels=("y.csv", "id,label\ndan,1\n"))
    assert by_id(isolated, "y") == {"ann": -1, "bob": -1, "cid": -1, "dan": 1}


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("y.csv", "0,1\n1,1\n2,0\n"), "2 columns without names.*--id-column 1"),
        (("y.csv", "id,a,b\n0,1,0\n1,1,1\n"), "1 node has no row, node 2 first; several labels"),
        (("y.csv", "id,a,b\n0,x,y\n1,x,y\n2,x,y\n"), "2 columns of names"),
        (("y.csv", "id,label\n0,1\n1,-3\n2,2\n"), "is -3; classes are numbered from 0"),
        (("y.npy", np.array([[["a"]]])), "expected .N. names of classes"),
    ],
)
def test_labels_that_cannot_be_are_refused(tmp_path: Path, labels: tuple[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        joined(tmp_path, ROWS, labels=labels)


def test_labels_numbered_from_one(tmp_path: Path) -> None:
    y = ("y.npy", np.array([1, 3, 2, 1]))
    g = joined(tmp_path, ROWS, labels=y)
    assert g.y is not None
    assert g.y.tolist() == [1, 3, 2, 1]
    assert "no node has class 0, all of 1 to 3 occur; if labels are numbered from 1, add --label-base 1" in said(g)
    based = joined(tmp_path, ROWS, labels=y, label_base=1)
    assert based.y is not None
    assert based.y.tolist() == [0, 2, 1, 0]
    assert "add --label-base" not in said(based)
    none = joined(tmp_path, ROWS, labels=("y.npy", np.array([1, 0, 2])), label_base=1)
    assert none.y is not None
    assert none.y.tolist() == [0, -1, 1]
    assert "1 node of label 0 has none" in said(none)


def test_labels_missing_in_a_mask_are_an_error_with_a_count(tmp_path: Path) -> None:
    g = joined(
        tmp_path, ROWS, labels=("y.npy", np.array([0.0, np.nan, np.nan])), splits=("s.csv", "train\ntrain\ntest\n")
    )
    with pytest.raises(ValueError, match=r"1 node of the train mask of split 0 has no label .*node 1 first"):
        check(g)


# ---------------------------------------------------------------------------------------------------------- splits

TRAIN, VAL, TEST = [True, False, False, False], [False, True, False, False], [False, False, True, False]


@pytest.mark.parametrize(
    "splits",
    [
        ("s.csv", "train\nval\ntest\nnone\n"),
        ("s.csv", "split\nTrain\nvalid\nTEST\n-\n"),
        ("s.csv", "id,split\n2,test\n0,training\n1,validation\n"),
        ("s.csv", "id,train,val,test\n0,1,0,0\n1,0,1,0\n2,0,0,1\n3,0,0,0\n"),
        ("s.csv", "test,train,valid\n0,1,0\n0,0,1\n1,0,0\n0,0,0\n"),
        ("s.npy", np.array(["train", "val", "test", ""])),
        ("s.npy", np.array([TRAIN, VAL, TEST]).T),
        ("s.npz", {"train": np.array(TRAIN), "val": np.array(VAL), "test": np.array(TEST)}),
        ("s.npz", {"train": np.array([0]), "valid": np.array([1]), "test": np.array([2])}),
        ("s.npz", {"train_mask": np.array(TRAIN), "val_idx": np.array([[1]]), "test_mask": np.array(TEST)[:, None]}),
    ],
)
def test_forms_of_splits(tmp_path: Path, splits: tuple[str, Any]) -> None:
    g = joined(tmp_path, ROWS, splits=splits, num_nodes=4)
    assert g.splits is not None
    assert (g.splits.train.tolist(), g.splits.val.tolist(), g.splits.test.tolist()) == ([TRAIN], [VAL], [TEST])


def test_several_splits(tmp_path: Path) -> None:
    words: NDArray[Any] = np.array([["train", "test"], ["val", "train"], ["test", "val"]])
    g = joined(tmp_path, ROWS, splits=("s.npy", words))
    assert g.splits is not None
    assert g.splits.train.tolist() == [[True, False, False], [False, True, False]]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (("s.csv", "train\nval\nfoo\n"), r"s\.csv, line 3: 'foo' is no split; expected train, val, test"),
        (("s.npy", np.array([0, 1, 2])), r"int64 \[3\]; expected words train, val, test"),
        (("s.npy", np.array([[1, 1, 0]] * 3)), "row 0: a node in more than one"),
        (("s.npz", {"a": np.array([0])}), "holds a; expected train, val and test"),
        (("s.npz", {"train": np.array([0]), "train_mask": np.array([1, 0, 0])}), "train_mask and train say the same"),
        (("s.npz", {"train": np.array([9])}), "train names node 9 at place 0; there are 3 nodes"),
        (("s.npz", {"train": np.array([-1])}), "train names node -1"),
        (("s.npz", {"train": np.array([0.5])}), "expected integers"),
        (("s.csv", "train\nval\n"), r"g\.csv, line 2: edge 1 -> 2: 2 nodes \(rows of .*s\.csv\)"),
    ],
)
def test_splits_that_cannot_be_are_refused(tmp_path: Path, splits: tuple[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        joined(tmp_path, ROWS, splits=splits)


def test_files_beside_a_graph_that_has_its_own_replace_them_and_say_so(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=[[0, 1], [1, 2]], x=np.ones((3, 2)), y=[0, 1, 0], node_ids=["a", "b", "c"])
    labels = put(tmp_path, "y.csv", "id,label\nc,5\na,4\nb,3\n")
    g = load(tmp_path / "g.npz", LoadOptions(labels=labels))
    assert g.y is not None
    assert g.y.tolist() == [4, 3, 5]
    assert "y.csv by id, in place of the graph's own" in said(g)


# ----------------------------------------------------------------------------------- what could be taken for another


@pytest.mark.parametrize(
    ("content", "line"),
    [("label\n1\n\n2\n0\n", 3), ("1\n2\n\n#\n0\n", 3), ("# c\n\n1\n \n2\n0\n", 4), ("1\r\n\r\n2\r\n0\r\n", 2)],
)
def test_a_blank_line_between_labels_by_row_shifts_no_node(tmp_path: Path, content: str, line: int) -> None:
    with pytest.raises(ValueError, match=rf"y\.csv, line {line}: blank between rows, of which each is a node"):
        joined(tmp_path, ROWS, labels=("y.csv", content))
    assert joined(tmp_path, ROWS, labels=("y.csv", "\n1\n2\n0\n\n")).num_nodes == 3


def test_comments_in_a_table_are_said(tmp_path: Path) -> None:
    g = joined(tmp_path, ROWS, labels=("y.csv", "1\n#2\n2\n0\n"))
    assert "y.csv: 1 line of comments was skipped" in said(g)


def test_a_first_column_that_counts_rows_is_pointed_out(tmp_path: Path) -> None:
    hint = "the first column counts the rows and was taken as a feature; if it holds ids, add --id-column 1"
    for first in (1, 0):
        content = "".join(f"{i + first},{i * 0.5}\n" for i in range(3))
        assert hint in said(joined(tmp_path, ROWS, features=("x.csv", content)))
    assert hint not in said(joined(tmp_path, ROWS, features=("x.csv", content), id_column="1"))


@pytest.mark.parametrize(
    ("edges", "lists"),
    [
        ("10,20\n20,30\n30,10\n", {"train": np.array([10]), "val": np.array([30]), "test": np.array([20])}),
        ("1,2\n2,3\n3,1\n", {"train_idx": np.array([1]), "val_idx": np.array([3]), "test_idx": np.array([2])}),
        ("a,b\nb,c\nc,a\n", {"train": np.array(["a"]), "val": np.array(["c"]), "test": np.array(["b"])}),
        ("0,1\n1,2\n2,0\n", {"train": np.array([0]), "val": np.array([2]), "test": np.array([1])}),
    ],
)
def test_lists_of_nodes_name_the_graphs_own_ids(tmp_path: Path, edges: str, lists: dict[str, Any]) -> None:
    g = joined(tmp_path, edges, splits=("s.npz", lists))
    assert g.splits is not None
    assert [np.flatnonzero(mask[0]).tolist() for mask in (g.splits.train, g.splits.val, g.splits.test)] == [
        [0],
        [2],
        [1],
    ]


def test_a_stranger_in_a_list_of_nodes_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train names node 0 at place 1; there are 3 nodes, with ids like 10, 30"):
        joined(tmp_path, "10,20\n20,30\n30,10\n", splits=("s.npz", {"train": np.array([10, 0])}))


def test_a_mask_tells_the_number_of_nodes(tmp_path: Path) -> None:
    masks = {"train": np.array([1, 0, 0, 0, 1], bool), "test": np.array([0, 1, 0, 0, 0], bool)}
    g = joined(tmp_path, ROWS, splits=("s.npz", masks))
    assert g.num_nodes == 5
    with pytest.raises(ValueError, match=r"5 nodes \(length of .*s\.npz: train\), so ids go from 0 to 4"):
        joined(tmp_path, "10,20\n", splits=("s.npz", masks))


def test_names_of_classes_and_of_label_columns_are_kept(tmp_path: Path) -> None:
    g = joined(tmp_path, NAMED, labels=("y.csv", "id,label\nann,dog\nbob,cat\ncid,dog\n"))
    assert g.class_names is not None
    assert g.class_names.tolist() == ["cat", "dog"]
    g = joined(tmp_path, NAMED, labels=("y.csv", "id,red,blue\nann,1,0\nbob,0,0\ncid,1,1\n"))
    assert g.class_names is not None
    assert (g.task, g.class_names.tolist()) == ("multi-label", ["red", "blue"])


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--labels .*: is a folder; expected a file"):
        joined(tmp_path, ROWS, labels=str(tmp_path))


# ------------------------------------------------------------------------------------------ sizes, indexes, duplicates


@pytest.mark.parametrize("form", ["csr", "coo"])
@pytest.mark.parametrize(("shape", "what"), [((3, 10**10), "columns"), ((10**13, 3), "rows")])
def test_sizes_that_a_sparse_file_invents_are_refused_by_name(
    tmp_path: Path, form: str, shape: tuple[int, int], what: str
) -> None:
    if form == "csr" and what == "rows":
        return  # its offsets are there, a number a row
    matrix = sp.coo_array((np.ones(2, np.float32), (np.array([0, 1]), np.array([0, 2]))), shape=shape)
    path = tmp_path / "x.npz"
    sp.save_npz(path, matrix.tocsr() if form == "csr" else matrix)
    with pytest.raises(ValueError, match=rf"x.npz: its shape declares {max(shape):,} {what}, .*; expected at most "):
        joined(tmp_path, "0,1\n1,2\n", features=str(path))


def test_wide_sparse_features_are_built(tmp_path: Path) -> None:
    """A width of which nothing is allocated."""
    matrix = sp.csr_array((np.ones(3, np.float32), np.array([0, 5, 10**9 - 1]), np.arange(4)), shape=(3, 10**9))
    sp.save_npz(tmp_path / "x.npz", matrix)
    graph = joined(tmp_path, "0,1\n1,2\n", features=str(tmp_path / "x.npz"))
    manifest = build(graph, partition(graph, 2, "contiguous"), tmp_path / "s")
    assert manifest.graph["num_features"] == 10**9
    assert verify(tmp_path / "s", deep=True) == []


@pytest.mark.parametrize(("dtype", "value"), [(np.uint8, 200), (np.float32, 1.5), (np.int64, 7)])
def test_values_of_one_place_are_summed_and_said(tmp_path: Path, dtype: type, value: float) -> None:
    data = np.full(4, value, dtype)
    place = (np.array([0, 0, 1, 2]), np.array([1, 1, 2, 0]))
    sp.save_npz(tmp_path / "x.npz", sp.coo_array((data, place), shape=(3, 3)))
    graph = joined(tmp_path, "0,1\n1,2\n", features=str(tmp_path / "x.npz"))
    assert "1 value that was stored again for one place went into a sum" in said(graph)
    assert isinstance(graph.x, sp.csr_array)
    assert graph.x.toarray()[0, 1] == 2 * value


def test_numbers_beyond_float32_stay_float64(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = joined(tmp_path, "0,1\n", features=("f.csv", "a,b\n1e39,1\n2,3\n"))
    assert isinstance(graph.x, np.ndarray)
    assert graph.x.dtype == np.float64
    assert graph.x[0, 0] == 1e39


@pytest.mark.parametrize(
    ("header", "rows", "shape", "by"),
    [
        (",a,b", ["0,1.5,2", "1,3,4", "2,5,6"], (3, 2), "left out: it counts the rows"),
        (",0,1", ["0,1.5,2", "1,3,4", "2,5,6"], (3, 2), "left out: it counts the rows"),
        (",a", ["2,1.5", "0,3", "1,5"], (3, 1), "taken as ids"),
    ],
)
def test_an_index_of_pandas_is_no_feature(
    tmp_path: Path, header: str, rows: list[str], shape: tuple[int, int], by: str
) -> None:
    graph = joined(tmp_path, "0,1\n1,2\n", features=("f.csv", "\n".join([header, *rows, ""])))
    assert isinstance(graph.x, np.ndarray)
    assert graph.x.shape == shape
    assert f"the first column has no name, as pandas writes an index, and was {by}" in said(graph)
    assert by_id(graph, "x")[0][0] == (3 if by == "taken as ids" else 1.5)


def test_an_index_of_pandas_is_no_label_and_no_end_of_an_edge(tmp_path: Path) -> None:
    graph = joined(tmp_path, "0,1\n1,2\n", labels=("y.csv", ",label\n0,1\n1,0\n2,1\n"))
    assert graph.y is not None
    assert graph.y.tolist() == [1, 0, 1]
    graph = load(put(tmp_path, "e.csv", ",a,b\n0,7,8\n1,8,9\n"))
    assert graph.num_edges == 2
    assert graph.node_ids is not None
    assert graph.node_ids.tolist() == [7, 8, 9]
    assert "column 1 was left out" in said(graph)


@pytest.mark.parametrize("kind", ["features", "labels"])
def test_nodes_that_only_a_table_names_are_said(tmp_path: Path, kind: str) -> None:
    rows = ("t.csv", "id,label\n1,0\n0,1\n77,1\n2,0\n88,1\n")
    graph = joined(tmp_path, "0,1\n1,2\n", **{kind: rows})
    assert graph.num_nodes == 5
    assert "2 of them occur in" in said(graph)
    assert "t.csv only, 77 first: nodes without edges" in said(graph)
    whole = joined(tmp_path, "0,1\n1,2\n", **{kind: ("t.csv", "id,label\n1,0\n0,1\n2,0\n")})
    assert "occur" not in said(whole)
