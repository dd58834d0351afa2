from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition_tools import adjacency as module
from partition_tools.adjacency import Adjacency, rows_sent, symmetric_adjacency
from partition_tools.graph import Graph

Edges = list[tuple[int, int]]


def make_graph(num_nodes: int, edges: Edges) -> Graph:
    src, dst = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    return Graph(name="g", num_nodes=num_nodes, src=np.ascontiguousarray(src), dst=np.ascontiguousarray(dst))


@st.composite
def multigraphs(draw: st.DrawFn) -> tuple[int, Edges]:
    """Directed, with loops, duplicates and isolated nodes."""
    n = draw(st.integers(1, 12))
    node = st.integers(0, n - 1)
    return n, draw(st.lists(st.tuples(node, node), max_size=40))


def pairs_of(edges: Edges) -> set[tuple[int, int]]:
    return {(min(u, v), max(u, v)) for u, v in edges if u != v}


def neighbours(a: Adjacency) -> list[list[int]]:
    return [a.adjncy[a.xadj[i] : a.xadj[i + 1]].tolist() for i in range(a.num_nodes)]


@given(multigraphs())
@settings(max_examples=60, deadline=None)
def test_rows_are_the_sorted_neighbours_without_loops_and_duplicates(case: tuple[int, Edges]) -> None:
    n, edges = case
    expected = [sorted({b for p in pairs_of(edges) for a, b in (p, p[::-1]) if a == i}) for i in range(n)]
    adjacency = symmetric_adjacency(make_graph(n, edges))
    assert neighbours(adjacency) == expected
    assert adjacency.num_pairs == len(pairs_of(edges))
    assert adjacency.xadj.dtype == adjacency.adjncy.dtype == np.int64


@given(multigraphs())
@settings(max_examples=60, deadline=None)
def test_pair_weight_is_the_sum_of_its_entries_from_both_ends(case: tuple[int, Edges]) -> None:
    n, edges = case
    weight = np.arange(1, len(edges) + 1, dtype=np.int64)
    adjacency = symmetric_adjacency(make_graph(n, edges), weight)
    assert adjacency.weight is not None
    for i, row in enumerate(neighbours(adjacency)):
        for j, found in zip(row, adjacency.weight[adjacency.xadj[i] : adjacency.xadj[i + 1]], strict=True):
            assert found == sum(w for (u, v), w in zip(edges, weight, strict=True) if {u, v} == {i, j})


@given(multigraphs(), st.integers(1, 5), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_counts_equal_brute_force_in_blocks_of_any_size(case: tuple[int, Edges], parts: int, seed: int) -> None:
    n, edges = case
    part = np.random.default_rng(seed).integers(0, parts, n).astype(np.int32)
    adjacency = symmetric_adjacency(make_graph(n, edges))
    both = {(u, v) for a, b in pairs_of(edges) for u, v in ((a, b), (b, a))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", 3)
        assert adjacency.cut(part) == sum(part[u] != part[v] for u, v in pairs_of(edges))
        assert adjacency.volume(part, parts) == len({(u, int(part[v])) for u, v in both if part[u] != part[v]})
    graph = make_graph(n, edges)
    expected = {(u, int(part[v])) for u, v in edges if part[u] != part[v]}
    sent = rows_sent(graph.src, graph.dst, part, parts)
    assert sent.tolist() == [sum(int(part[u]) == p for u, _ in expected) for p in range(parts)]


def test_weighted_cut_counts_weights() -> None:
    graph = make_graph(3, [(0, 1), (1, 0), (1, 2)])
    adjacency = symmetric_adjacency(graph, np.array([5, 2, 11]))
    assert adjacency.cut(np.array([0, 1, 1], dtype=np.int32)) == 7


def test_breadth_first_order_takes_component_after_component() -> None:
    edges = [(0, 6), (6, 3), (0, 8), (8, 1), (2, 7), (7, 9)]  # Nodes 4 and 5 are isolated.
    assert symmetric_adjacency(make_graph(10, edges)).breadth_first_order().tolist() == [0, 6, 8, 3, 1, 2, 7, 9, 4, 5]


def test_breadth_first_order_of_a_long_chain() -> None:
    n = 100_000
    chain = np.arange(n - 1)
    graph = Graph(name="chain", num_nodes=n, src=chain, dst=chain + 1)
    assert np.array_equal(symmetric_adjacency(graph).breadth_first_order(), np.arange(n))


def test_induced_relabels_in_the_order_given() -> None:
    adjacency = symmetric_adjacency(make_graph(6, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (5, 1)]))
    assert neighbours(adjacency.induced(np.array([4, 0, 1, 3]))) == [[1, 3], [0, 2], [1], [0]]


def test_no_edges() -> None:
    adjacency = symmetric_adjacency(make_graph(3, []))
    assert adjacency.num_pairs == 0
    assert adjacency.cut(np.zeros(3, dtype=np.int32)) == 0
    assert adjacency.breadth_first_order().tolist() == [0, 1, 2]


def test_stored_is_the_same_and_mapped(tmp_path: Path) -> None:
    adjacency = symmetric_adjacency(make_graph(3, [(0, 1), (1, 2)]), np.array([3, 4]))
    stored = adjacency.stored(tmp_path)
    assert isinstance(stored.adjncy, np.memmap)
    for field in ("xadj", "adjncy", "weight"):
        assert np.array_equal(getattr(stored, field), getattr(adjacency, field))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adjncy.npy", "adjwgt.npy", "xadj.npy"]


@pytest.mark.parametrize(
    ("xadj", "adjncy", "weight", "message"),
    [
        ([0, 2, 1, 2], [1, 2], None, "falls from 2 to 1 at row 1"),
        ([0, 1, 5], [1, 0], None, r"ends at 5, but adjncy has shape \[2\]"),
        ([1, 2], [0, 0], None, "begin with 0"),
        ([0, 1, 2], [1, 2], None, r"adjncy\[1\] is 2; node ids go from 0 to 1"),
        ([0, 1, 2], [-1, 0], None, r"adjncy\[0\] is -1"),
        ([0, 1, 2], [1, 0], [7], r"weight has shape \[1\] for 2 entries"),
    ],
)
def test_arrays_that_would_crash_metis_are_refused(
    xadj: list[int], adjncy: list[int], weight: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Adjacency(xadj=np.array(xadj), adjncy=np.array(adjncy), weight=None if weight is None else np.array(weight))
