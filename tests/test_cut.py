"""Counts of the cut against counting by hand and by brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fullgraph.cut import CutCounts, cut_counts, cut_counts_of_shards, cut_entries, halo_nodes
from tests.builds import two_triangles
from tests.graphs import CASES, shard_of


def same(a: CutCounts, b: CutCounts) -> bool:
    return (a.cut_edges, a.cut_pairs) == (b.cut_edges, b.cut_pairs) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("nodes", "edges", "rows")
    )


def by_brute_force(src: list[int], dst: list[int], part: list[int], parts: int) -> CutCounts:
    rows = np.zeros((parts, parts), np.int64)
    for u, q in {(u, part[v]) for u, v in zip(src, dst, strict=True) if part[u] != part[v]}:
        rows[part[u], q] += 1
    cut = [(u, v) for u, v in zip(src, dst, strict=True) if part[u] != part[v]]
    return CutCounts(
        cut_edges=len(cut),
        cut_pairs=len({frozenset(pair) for pair in cut}),
        nodes=np.array([part.count(q) for q in range(parts)]),
        edges=np.array([sum(part[v] == q for v in dst) for q in range(parts)]),
        rows=rows,
    )


def test_two_triangles() -> None:
    graph = two_triangles()
    counts = cut_counts(graph.src, graph.dst, np.array([0, 0, 0, 1, 1, 1], np.int32), 2)
    assert (counts.cut_edges, counts.cut_pairs) == (2, 1)
    assert counts.nodes.tolist() == [3, 3]
    assert counts.edges.tolist() == [7, 7]
    assert counts.rows.tolist() == [[0, 1], [1, 0]]
    assert counts.halo_rows.tolist() == counts.rows_sent.tolist() == [1, 1]
    assert counts.neighbours.tolist() == [1, 1]
    assert (counts.total_rows, counts.max_rows_sent, counts.parts) == (2, 1, 2)


def test_direction_and_duplicates_are_told_apart() -> None:
    """0 -> 1 three times and 1 -> 0 once, loops on both: 4 cut edges, one pair, one row each way."""
    src, dst = np.array([0, 0, 0, 1, 0, 1]), np.array([1, 1, 1, 0, 0, 1])
    counts = cut_counts(src, dst, np.array([0, 1]), 2)
    assert (counts.cut_edges, counts.cut_pairs) == (4, 1)
    assert counts.rows.tolist() == [[0, 1], [1, 0]]
    assert counts.edges.tolist() == [2, 4]


def test_equal_cuts_may_send_different_rows() -> None:
    """A hub with 8 leaves elsewhere sends one row; 8 cut edges of a chain send eight."""
    hub = cut_counts(np.zeros(8, np.int64), np.arange(1, 9), np.array([0] + [1] * 8), 2)
    chain = cut_counts(np.arange(8), np.arange(1, 9), np.arange(9) % 2, 2)
    assert hub.cut_edges == chain.cut_edges == 8
    assert (hub.total_rows, chain.total_rows) == (1, 8)
    assert (hub.max_rows_sent, chain.max_rows_sent) == (1, 4)


def test_neighbours_counts_parts_that_only_send() -> None:
    counts = cut_counts(np.array([0, 1]), np.array([2, 2]), np.array([0, 1, 2, 3]), 4)
    assert counts.neighbours.tolist() == [1, 1, 2, 0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_multigraph(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    parts = data.draw(st.integers(1, n))
    node = st.integers(0, n - 1)
    edges = data.draw(st.lists(st.tuples(node, node), max_size=80))
    part = data.draw(st.lists(st.integers(0, parts - 1), min_size=n, max_size=n))
    src, dst = [u for u, _ in edges], [v for _, v in edges]
    found = cut_counts(np.array(src, np.int64), np.array(dst, np.int64), np.array(part, np.int32), parts)
    assert same(found, by_brute_force(src, dst, part, parts))


@pytest.mark.parametrize("name", CASES)
def test_shards_give_the_same_counts(name: str) -> None:
    case = CASES[name]
    part = case.part(4)
    shards = [shard_of(case.graph, part, q, 4) for q in range(4)]
    assert same(cut_counts_of_shards(iter(shards)), cut_counts(case.graph.src, case.graph.dst, part, 4))


def test_cut_entries_name_row_and_halo_node() -> None:
    graph = two_triangles()
    shard = shard_of(graph, np.array([0, 0, 0, 1, 1, 1], np.int32), 1, 2)
    row, halo = cut_entries(shard)
    assert shard.owned_global[row].tolist() == [3]
    assert shard.halo_global[halo].tolist() == [2]


def test_halo_is_sorted_by_owner_then_id() -> None:
    part: NDArray[np.int32] = np.array([0, 2, 1, 2, 1, 0], np.int32)
    assert halo_nodes(np.array([3, 1, 4, 2, 4, 0, 5]), part, 0).tolist() == [2, 4, 1, 3]
    assert halo_nodes(np.array([], np.int64), part, 0).tolist() == []


def test_a_part_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match="node 1 is in part 2; expected parts 0 to 1"):
        cut_counts(np.array([0]), np.array([1]), np.array([0, 2]), 2)
