"""Fennel with restreaming: within its sizes, better with more passes, the same for a seed, compiled or not."""

from __future__ import annotations

import numpy as np
import pytest

from partition_tools import streaming
from partition_tools.adjacency import symmetric_adjacency
from partition_tools.assign import AssignOptions, assign
from partition_tools.graph import Graph
from partition_tools.streaming import compiled, fennel
from tests.graphs import random_graph


def communities(n: int = 600, groups: int = 6) -> Graph:
    """Groups of nodes with ids at random, of which nine edges in ten stay inside."""
    rng = np.random.default_rng(4)
    group = rng.integers(0, groups, n)
    by_group = [np.flatnonzero(group == g) for g in range(groups)]
    src = rng.integers(0, n, 6 * n)
    inside = np.array([rng.choice(by_group[group[u]]) for u in src])
    dst = np.where(rng.random(6 * n) < 0.9, inside, rng.integers(0, n, 6 * n))
    return Graph(name="communities", num_nodes=n, src=src, dst=dst)


WAYS = [False, pytest.param(True, marks=pytest.mark.skipif(not compiled(), reason="the extra fast is not installed"))]


@pytest.mark.parametrize("use_numba", WAYS)
def test_more_passes_cut_less(use_numba: bool) -> None:
    graph = communities()
    adjacency = symmetric_adjacency(graph)
    allowed = np.full(6, 1.1 * 100)
    cuts = [adjacency.cut(fennel(graph, allowed, passes=k, seed=1, use_numba=use_numba)) for k in (1, 5)]
    random = adjacency.cut((np.random.default_rng(1).permutation(600) % 6).astype(np.int32))
    assert cuts[1] < cuts[0] < random
    assert cuts[1] < 0.4 * random


@pytest.mark.parametrize("use_numba", WAYS)
@pytest.mark.parametrize("most", [[34, 33, 33], [100, 1, 1], [60, 30, 10]])
def test_sizes_are_kept(use_numba: bool, most: list[int]) -> None:
    graph = random_graph("g", nodes=100, edges=700, loops=9, isolated=7)
    part = fennel(graph, np.array(most, float), passes=3, seed=2, use_numba=use_numba)
    assert (np.bincount(part, minlength=3) <= most).all()
    assert part.min() >= 0
    assert np.array_equal(part, fennel(graph, np.array(most, float), passes=3, seed=2, use_numba=use_numba))


def test_neighbours_are_those_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph("g", nodes=40, edges=150, loops=5)
    monkeypatch.setattr(streaming, "_BUCKET", 32)
    offsets, neighbours = streaming._neighbours(graph)
    for v in range(40):
        expected = sorted([*graph.dst[graph.src == v], *graph.src[graph.dst == v]])
        assert sorted(neighbours[offsets[v] : offsets[v + 1]]) == [u for u in expected if u != v]


def test_it_is_a_method() -> None:
    graph = communities()
    found = assign(graph, AssignOptions(parts=4, method="fennel", passes=2))
    assert np.bincount(found.part).max() <= 154
    assert "numpy" in found.versions
    small = Graph(name="none", num_nodes=5, src=np.empty(0, np.int64), dst=np.empty(0, np.int64))
    assert np.bincount(assign(small, AssignOptions(parts=5, method="fennel")).part).tolist() == [1] * 5
