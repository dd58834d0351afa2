"""Several loads at once: met within the tolerance, or said by how much not; capacities; clusters."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from partition_tools.adjacency import symmetric_adjacency
from partition_tools.assign import AssignOptions, assign
from partition_tools.balance import pack, repair
from partition_tools.graph import Graph, Splits
from partition_tools.loads import Loads, even_shares


def path(n: int = 400, labelled: int = 80) -> Graph:
    """A path whose first nodes are trained on: a weight that sums both loads gives 328, 24, 24 and 24 nodes."""
    ids = np.arange(n)
    train = (ids < labelled)[None]
    splits = Splits(train=train, val=~train, test=~train)
    return Graph(name="path", num_nodes=n, src=ids[:-1].copy(), dst=ids[1:].copy(), splits=splits)


def skewed(n: int = 1200) -> Graph:
    rng = np.random.default_rng(n)
    src, dst = rng.integers(0, n, 5 * n), (n * rng.random(5 * n) ** 3).astype(np.int64)
    train = rng.random((1, n)) < np.linspace(0, 0.4, n)
    return Graph(name="skewed", num_nodes=n, src=src, dst=dst, splits=Splits(train=train, val=~train, test=~train))


@pytest.mark.parametrize("method", ["metis", "best"])
def test_training_nodes_are_balanced_without_ruining_nodes(method: str) -> None:
    graph = path()
    found = assign(graph, AssignOptions(parts=4, method=method, balance=("nodes", "train"), tries=2))
    assert graph.splits is not None
    assert np.bincount(found.part).max() <= 103
    assert np.bincount(found.part[graph.splits.train[0]]).tolist() == [20, 20, 20, 20]
    assert any("balanced by all of nodes, train" in note for note in found.notes)
    assert symmetric_adjacency(graph).cut(found.part) <= 40


def test_four_loads_at_once() -> None:
    graph = skewed()
    found = assign(graph, AssignOptions(parts=5, balance=("nodes", "edges", "train", "cost")))
    assert graph.splits is not None
    for load in (np.ones(1200), np.bincount(graph.dst, minlength=1200), graph.splits.train[0].astype(int)):
        totals = np.bincount(found.part, load)
        assert totals.max() <= max(1.03 * totals.mean(), np.ceil(totals.mean()))


def test_what_cannot_be_met_is_said_by_how_much() -> None:
    weight = np.ones((40, 2), np.int64)
    weight[:, 1] = 0
    weight[:5, 1] = [7, 7, 7, 7, 4]
    graph = dataclasses.replace(path(40, 8), node_weight=weight)
    found = assign(graph, AssignOptions(parts=3))
    totals = np.bincount(found.part, weight[:, 1])
    assert totals.max() == 14
    assert any(
        "1.31 times the mean load, beyond --imbalance 0.03 (by node weights, column 1)" in n for n in found.notes
    )


@pytest.mark.parametrize("method", ["metis", "best", "fennel", "supernode:32:packed", "random", "contiguous", "bfs"])
def test_capacities(method: str) -> None:
    tries: dict[str, Any] = {"tries": 2} if method == "best" else {}
    found = assign(skewed(800), AssignOptions(parts=3, method=method, capacities=(2, 1, 1), **tries))
    sizes = np.bincount(found.part)
    tolerance = 1.1 if method.startswith("supernode") else 1.031
    assert (sizes <= np.array([400, 200, 200]) * tolerance).all(), sizes


def test_repair_only_touches_what_is_beyond() -> None:
    graph = path()
    loads = Loads.make({"nodes": np.ones(400, np.int64)}, 4, tolerance=0.03, shares=even_shares(4))
    even = (np.arange(400) // 100).astype(np.int32)
    adjacency = symmetric_adjacency(graph)
    assert np.array_equal(repair(even, adjacency, loads), even)
    lopsided = np.minimum(np.arange(400) // 120, 3).astype(np.int32)
    fixed = repair(lopsided, adjacency, loads)
    assert loads.beyond(fixed) == {}
    assert np.count_nonzero(fixed != lopsided) < 120


def test_clusters_are_packed_whole_and_together() -> None:
    graph = path(64, 8)
    loads = Loads.make({"nodes": np.ones(64, np.int64)}, 2, tolerance=0.01, shares=even_shares(2))
    cluster = (np.arange(64) // 8).astype(np.int32)
    part = pack(cluster, symmetric_adjacency(graph), loads)
    assert np.bincount(part).tolist() == [32, 32]
    assert all(np.unique(part[cluster == c]).size == 1 for c in range(8))
    assert symmetric_adjacency(graph).cut(part) <= 3


def test_supernodes_are_dealt_at_random_by_seed() -> None:
    graph = skewed(600)
    one, same, other = (
        assign(graph, AssignOptions(parts=4, method="supernode:24", seed=seed, imbalance=0.5)).part
        for seed in (1, 1, 2)
    )
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    adjacency = symmetric_adjacency(path())
    dealt, packed = (
        assign(path(), AssignOptions(parts=4, method=f"supernode:24{how}", imbalance=0.1)).part
        for how in ("", ":packed")
    )
    assert adjacency.cut(packed) < adjacency.cut(dealt)
    with pytest.raises(ValueError, match="expected 4 clusters, one for each part, to 600"):
        assign(graph, AssignOptions(parts=4, method="supernode:3"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "supernode"}, "--method supernode: expected metis, best"),
        ({"method": "supernode:x"}, "--method supernode:x: expected supernode:C"),
        ({"capacities": (1.0,)}, "--capacities has 1 numbers for --parts 2"),
        ({"capacities": (1.0, 0.0)}, "--capacities 0.0: expected numbers above 0"),
        ({"method": "file:x", "capacities": (1.0, 2.0)}, "--capacities has no effect with --method file:x"),
        ({"balance": ("nodes", "nodes")}, "--balance nodes nodes: expected one or several, each once"),
        ({"hidden": 64}, "--hidden has no effect with --method metis and without --balance cost"),
        ({"method": "best", "objective": "cut"}, "--objective cut with --method best: expected auto, time, rows"),
        ({"method": "best", "bandwidth": 0.0}, "--bandwidth 0.0: expected more than 0"),
        ({"method": "fennel", "passes": 0}, "--passes 0: expected at least 1"),
        ({"method": "best", "timeout": 3.0}, "--timeout has no effect with --method best"),
    ],
)
def test_options_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AssignOptions(parts=2, **fields)


def test_train_balance_needs_training_nodes() -> None:
    graph = dataclasses.replace(path(), splits=None)
    with pytest.raises(ValueError, match="path: --balance train: the graph has no training nodes"):
        assign(graph, AssignOptions(parts=2, balance=("train",)))
