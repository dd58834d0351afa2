from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from partition_tools.graph import Graph, Splits, entry_keys
from partition_tools.prepare import (
    check,
    drop_loops,
    fill_features,
    make_undirected,
    merge_duplicates,
    parse_fractions,
    random_split,
)
from partition_tools.summary import SplitCount, render, summarise, warnings

Edges = list[tuple[int, int]]


def make(num_nodes: int, edges: Edges, **fields: Any) -> Graph:
    src, dst = np.array(edges, np.int64).reshape(-1, 2).T
    return Graph(name="g", num_nodes=num_nodes, src=np.ascontiguousarray(src), dst=np.ascontiguousarray(dst), **fields)


def splits(num_nodes: int, **nodes: list[int]) -> Splits:
    masks = {part: np.zeros((1, num_nodes), np.bool_) for part in ("train", "val", "test")}
    for part, members in nodes.items():
        masks[part][0, members] = True
    return Splits(**masks)


@st.composite
def multigraphs(draw: st.DrawFn) -> tuple[int, Edges]:
    n = draw(st.integers(1, 8))
    node = st.integers(0, n - 1)
    return n, draw(st.lists(st.tuples(node, node), max_size=25))


# --------------------------------------------------------------------------------------------- summary


@given(multigraphs())
@settings(max_examples=80, deadline=None)
def test_the_summary_counts_what_a_count_by_hand_gives(case: tuple[int, Edges]) -> None:
    n, edges = case
    s = summarise(make(n, edges))
    times = Counter(edges)
    reached = list(range(n))  # components by merging names
    for _ in range(n):
        for u, v in edges:
            reached[u] = reached[v] = min(reached[u], reached[v])
    touched = {w for u, v in edges if u != v for w in (u, v)}
    assert s.num_edges == len(edges)
    assert s.undirected_pairs == len({frozenset(p) for p in edges if p[0] != p[1]})
    assert s.loops == sum(u == v for u, v in edges)
    assert s.duplicates == len(edges) - len(times)
    assert s.isolated == n - len(touched)
    assert s.components == len(set(reached))
    assert s.largest_component == max(Counter(reached).values())
    assert s.directed == any(times[u, v] != times[v, u] for u, v in edges)
    in_degree = [sum(v == w for _, v in edges) for w in range(n)]
    assert s.in_degree == (min(in_degree), max(in_degree))


def labelled_graph() -> Graph:
    return make(
        5,
        [(0, 1), (1, 0), (1, 1), (3, 2), (3, 2)],
        x=np.array([[0, 1], [2, 0], [0, 0], [0, 0], [1, 0]], np.float32),
        y=np.array([0, 2, 2, -1, 0]),
        splits=splits(5, train=[0, 1], val=[1, 2]),
        edge_weight=np.ones(5, np.float32),
        changes=("something [bold] was done",),
    )


def test_the_summary_of_labels_features_and_splits() -> None:
    s = summarise(labelled_graph())
    assert (s.task, s.num_classes, s.num_labelled, s.label_counts) == ("single-label", 3, 4, (2, 0, 2))
    assert (s.num_features, s.feature_dtype, s.feature_density) == (2, "float32", 0.3)
    assert s.split_counts == (
        SplitCount(train=2, val=2, test=0, overlap=1, train_val=1, train_test=0, val_test=0, uncovered=2),
    )
    assert s.weighted
    assert s.directed
    sparse = summarise(dataclasses.replace(labelled_graph(), x=sp.csr_array(labelled_graph().x)))
    assert sparse == s


@pytest.mark.parametrize(
    ("y", "task", "classes", "counts"),
    [
        (None, None, 0, ()),
        (np.array([[1, 0, 1], [1, 0, 0]], np.uint8), "multi-label", 3, (2, 0, 1)),
        (np.array([0.5, np.nan]), "regression", 1, ()),
        (np.array([[0.5, 1], [1, np.nan]]), "regression", 2, ()),
        (np.array([-1, -1]), "single-label", 0, ()),
    ],
)
def test_the_summary_of_every_task(y: Any, task: str | None, classes: int, counts: tuple[int, ...]) -> None:
    s = summarise(make(2, [(0, 1)], y=y))
    assert (s.task, s.num_classes, s.label_counts) == (task, classes, counts)
    assert render(s)


def test_facts_are_plain_and_complete() -> None:
    facts = summarise(labelled_graph()).facts()
    assert json.loads(json.dumps(facts)) == facts
    assert {
        "name",
        "num_nodes",
        "num_edges",
        "undirected_pairs",
        "loops",
        "duplicates",
        "isolated",
        "components",
        "weighted",
        "directed",
        "num_features",
        "feature_dtype",
        "task",
        "num_classes",
        "num_splits",
        "split_counts",
    } <= facts.keys()
    assert facts["split_counts"] == [dataclasses.asdict(summarise(labelled_graph()).split_counts[0])]


def test_the_summary_in_print() -> None:
    text = render(summarise(labelled_graph()))
    for line in (
        "nodes             5 (1 isolated)",
        "directed entries  5 (1 loop, 1 duplicate)",
        "undirected pairs  2",
        "components        3",
        "in-degree         0 to 2, mean 1.0",
        "split 0           train 2, val 2, test 0, 1 in more than one, 2 in none",
        "changed           something [bold] was done",
    ):
        assert line in text


def test_keys_that_would_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="3037000500 nodes"):
        entry_keys(np.zeros(1, np.int64), np.zeros(1, np.int64), 3_037_000_500)


# ------------------------------------------------------------------------------------------ undirected


@given(multigraphs())
@settings(max_examples=80, deadline=None)
def test_make_undirected_adds_exactly_what_is_missing(case: tuple[int, Edges]) -> None:
    n, edges = case
    times = Counter(edges)
    g = make_undirected(make(n, edges))
    after = list(zip(g.src.tolist(), g.dst.tolist(), strict=True))
    assert after[: len(edges)] == edges
    assert Counter(after) == {(u, v): max(times[u, v], times[v, u]) for u, v in {*times, *((v, u) for u, v in times)}}
    assert not summarise(g).directed
    assert make_undirected(g).num_edges == g.num_edges


def test_make_undirected_copies_weights_and_says_what_it_did() -> None:
    g = make(3, [(0, 1), (1, 0), (0, 1), (1, 2), (2, 2)], edge_weight=np.array([1, 2, 3, 4, 5], np.float32))
    u = make_undirected(g)
    assert list(zip(u.src.tolist(), u.dst.tolist(), strict=True))[5:] == [(1, 0), (2, 1)]
    assert u.edge_weight is not None
    assert u.edge_weight.dtype == np.float32
    assert u.edge_weight.tolist() == [1, 2, 3, 4, 5, 3, 4]
    assert u.changes == ("made undirected: 2 reverse entries added, 5 entries became 7",)
    assert g.num_edges == 5


# ---------------------------------------------------------------------------------------------- splits


@given(
    st.lists(st.integers(-1, 3), min_size=1, max_size=60).filter(lambda y: max(y) >= 0),
    st.sampled_from([(0.6, 0.2, 0.2), (0.1, 0.1, 0.1), (1.0, 0.0, 0.0), (0.05, 0.05, 0.9)]),
    st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_a_random_split_is_stratified(y: list[int], fractions: tuple[float, float, float], seed: int) -> None:
    g = random_split(make(len(y), [], y=np.array(y)), fractions, seed)
    assert g.splits is not None
    masks = np.stack([g.splits.train[0], g.splits.val[0], g.splits.test[0]])
    assert masks.sum(axis=0).max() <= 1
    assert not masks[:, np.array(y) == -1].any()
    for c in range(4):
        size = y.count(c)
        for mask, share in zip(masks, fractions, strict=True):
            assert abs(int(mask[np.array(y) == c].sum()) - share * size) <= 1
    if sum(fractions) > 0.99:
        assert masks.sum() == len(y) - y.count(-1)


def test_a_random_split_follows_its_seed_and_says_so() -> None:
    g = make(200, [], y=np.arange(200) % 3 - 1, splits=splits(200, train=[1]))
    a, b, c = (random_split(g, (0.5, 0.25, 0.25), seed) for seed in (4, 4, 5))
    assert a.splits is not None
    assert b.splits is not None
    assert c.splits is not None
    np.testing.assert_array_equal(a.splits.train, b.splits.train)
    assert not np.array_equal(a.splits.train, c.splits.train)
    said = a.changes[-1]
    assert said.startswith("stratified random split 0.5/0.25/0.25 with seed 4: ")
    assert "67 nodes without a label are in no mask" in said
    assert "in place of the splits there were (1)" in said


@pytest.mark.parametrize(
    "y", [np.ones((50, 2), np.uint8), np.where(np.arange(50) < 10, np.nan, 1.5), np.full((50, 2), 0.5, np.float32)]
)
def test_a_random_split_of_other_tasks(y: Any) -> None:
    g = random_split(make(50, [], y=y), (0.6, 0.2, 0.2), 0)
    count = summarise(g).split_counts[0]
    total = 40 if np.isnan(y).any() else 50
    assert (count.train, count.val, count.test) == (total * 3 // 5, total // 5, total // 5)
    check(g)


def test_a_graph_without_labels_cannot_be_split() -> None:
    for y in (None, np.full(3, -1)):
        with pytest.raises(ValueError, match="no node has a label"):
            random_split(make(3, [], y=y), (0.6, 0.2, 0.2), 0)


def test_fractions() -> None:
    assert parse_fractions("0.6/0.2/0.2") == (0.6, 0.2, 0.2)
    assert parse_fractions("0.7/0.2/0.1") == (0.7, 0.2, 0.1)
    assert parse_fractions("1/0/0") == (1, 0, 0)
    for text in (
        "",
        "0.5",
        "0.5/0.5",
        "0.5/0.2/0.2/0.1",
        "a/b/c",
        "0.9/0.2/0.2",
        "-0.1/0.5/0.5",
        "nan/0/0",
        "0/0.5/0.5",
    ):
        with pytest.raises(ValueError, match="expected three shares like"):
            parse_fractions(text)


# ----------------------------------------------------------------------------------------------- check


def test_labels_are_asked_for_in_masks_only() -> None:
    y = np.array([0, -1, 1, -1])
    check(make(4, [], y=y, splits=splits(4, train=[0], test=[2])))
    with pytest.raises(
        ValueError, match=r"2 nodes of the val mask of split 0 have no label \(-1 or NaN\), node 1 first"
    ):
        check(make(4, [], y=y, splits=splits(4, train=[0], val=[1, 2, 3])))
    targets = np.array([0.5, np.nan, 1, 1])
    check(make(4, [], y=targets, splits=splits(4, train=[0])))
    with pytest.raises(ValueError, match="1 node of the train mask"):
        check(make(4, [], y=targets, splits=splits(4, train=[0, 1])))
    check(make(4, [], splits=splits(4, train=[0, 1])))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sparse", [False, True])
def test_features_that_are_no_numbers_are_found(bad: float, sparse: bool) -> None:
    x = np.eye(4, 3, dtype=np.float32)
    check(make(4, [], x=sp.csr_array(x) if sparse else x))
    x[2, 1] = x[3, 0] = bad
    with pytest.raises(ValueError, match="x holds 2 values that are NaN or infinite, the first at node 2, column 1"):
        check(make(4, [], x=sp.csr_array(x) if sparse else x))


def test_features_are_searched_beyond_one_block() -> None:
    x = np.zeros((70_000, 1), np.float16)
    x[69_999] = np.nan
    with pytest.raises(ValueError, match=r"x holds 1 value .* node 69999, column 0"):
        check(make(70_000, [], x=x))
    check(make(3, [], x=np.zeros((3, 2), np.uint8)))


def test_weights_and_targets_that_are_no_numbers_are_found() -> None:
    with pytest.raises(ValueError, match=r"edge_weight holds 1 value .* the first is nan of edge 1 \(1 -> 0\)"):
        check(make(2, [(0, 1), (1, 0)], edge_weight=np.array([1, np.nan])))
    with pytest.raises(ValueError, match="y: the target of node 1 is infinite"):
        check(make(2, [], y=np.array([0.5, np.inf])))


def test_edge_features_are_checked_and_searched() -> None:
    good = np.zeros((2, 3))
    check(make(2, [(0, 1), (1, 0)], edge_x=good))
    bad = good.copy()
    bad[1, 2] = np.inf
    with pytest.raises(ValueError, match=r"edge_x holds 1 value .* the first at edge 1 .*, column 2"):
        check(make(2, [(0, 1), (1, 0)], edge_x=bad))
    for shape in ((3, 3), (2,)):
        with pytest.raises(ValueError, match=r"edge_x has shape .*expected \[E, K\] with E = 2"):
            make(2, [(0, 1), (1, 0)], edge_x=np.zeros(shape))


def test_learned_features_stand_in_place_of_others() -> None:
    assert make(2, [], learned_features=3).learned_features == 3
    for fields in ({"learned_features": -1}, {"learned_features": 2, "x": np.zeros((2, 1))}):
        with pytest.raises(ValueError, match="learned_features is"):
            make(2, [], **fields)


# ------------------------------------------------------------------------------------- loops and duplicates


@given(multigraphs())
@settings(max_examples=60, deadline=None)
def test_loops_and_duplicates_can_be_left_out(case: tuple[int, Edges]) -> None:
    n, edges = case
    g = make(n, edges, edge_weight=np.arange(1.0, len(edges) + 1))
    loopless = drop_loops(g)
    assert list(zip(loopless.src.tolist(), loopless.dst.tolist(), strict=True)) == [(u, v) for u, v in edges if u != v]
    loops = sum(u == v for u, v in edges)
    assert loopless.changes == (f"{loops} loop{'s' * (loops != 1)} dropped",)
    summed, first = merge_duplicates(g, "sum"), merge_duplicates(g, "first")
    assert summarise(summed).duplicates == summarise(first).duplicates == 0
    assert first.edge_weight is not None
    assert summed.edge_weight is not None
    assert first.edge_weight.tolist() == [edges.index(pair) + 1 for pair in dict.fromkeys(edges)]
    assert summed.edge_weight.sum() == g.edge_weight.sum()


def test_a_mean_is_that_of_the_finite_values_of_a_column() -> None:
    x = np.array([[1, np.nan, np.nan], [4, np.nan, np.inf], [7, np.nan, 3]])
    for given_x in (x, sp.csr_array(x)):
        filled = fill_features(make(3, [], x=given_x), "mean").x
        dense = filled.toarray() if isinstance(filled, sp.csr_array) else filled
        np.testing.assert_array_equal(dense, [[1, 0, 3], [4, 0, 3], [7, 0, 3]])


def test_more_nodes_than_memory_can_hold_are_refused_by_name() -> None:
    none = np.zeros(0, np.int64)
    with pytest.raises(ValueError, match=r"vast: num_nodes is 10000000000000, for which .* do not suffice"):
        Graph(name="vast", num_nodes=10**13, src=none, dst=none)


def test_overlaps_and_empty_splits_are_warned_of() -> None:
    def of(**masks: list[int]) -> list[str]:
        return warnings(summarise(dataclasses.replace(labelled_graph(), splits=splits(5, **masks))))

    assert of(train=[0], val=[1], test=[2]) == []
    assert of(train=[0, 1], val=[1, 2]) == [
        "split 0: 1 node is in train and val; the score that picks the best epoch is of nodes trained on"
    ]
    assert of(train=[0, 1], test=[0, 1])[0].startswith("split 0: 2 nodes are in train and test; the test score is of")
    assert of(train=[0], val=[1], test=[1])[0].startswith("split 0: 1 node is in val and test")
    assert of(val=[1]) == ["split 0: no node is in train; it cannot be trained on"]
    many = Splits(**{part: np.ones((3, 5), np.bool_) for part in ("train", "val", "test")})
    found = warnings(summarise(dataclasses.replace(labelled_graph(), splits=many)))
    assert found[0].startswith("split 0: 5 nodes are in train and val, and so in 2 other splits; ")
    assert warnings(summarise(make(2, [(0, 1)]))) == []
