"""Minimum-cover plans: the factors give back the cut, and no factorisation by sources and destinations is smaller."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fullgraph.cut import Factors, cover_factors, cut_counts_of_shards, selecting_factors
from tests.graphs import CASES, shard_of

Cut = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]
"""(row, halo, halo_owner, parts)"""


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    rows, halo, parts = draw(st.integers(1, 6)), draw(st.integers(1, 7)), draw(st.integers(1, 3))
    owner = np.sort(np.array(draw(st.lists(st.integers(0, parts - 1), min_size=halo, max_size=halo)), np.int64))
    ends = st.tuples(st.integers(0, rows - 1), st.integers(0, halo - 1))
    edges = np.array(draw(st.lists(ends, max_size=14)), np.int64).reshape(-1, 2)
    return edges[:, 0], edges[:, 1], owner, parts


def product(factors: Factors, weight: NDArray[np.float64], rows: int, halo: int) -> NDArray[np.float64]:
    """R S as a dense matrix."""

    def values(edge: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.where(edge < 0, 1.0, np.append(weight, 0.0)[edge])

    send = sp.coo_array(
        (values(factors.send_edge), (factors.send_message, factors.send_halo)), shape=(factors.rows, halo)
    )
    receive = sp.coo_array(
        (values(factors.receive_edge), (factors.receive_row, factors.receive_message)), shape=(rows, factors.rows)
    )
    return np.asarray((receive.tocsr() @ send.tocsr()).toarray())


def smallest_cover(edges: set[tuple[int, int]]) -> int:
    """By trying all sets of sources; each leaves the destinations of the other sources' edges."""
    sources = sorted({source for _, source in edges})
    return min(
        len(chosen) + len({row for row, source in edges if source not in chosen})
        for count in range(len(sources) + 1)
        for chosen in map(set, itertools.combinations(sources, count))
    )


@settings(max_examples=150, deadline=None)
@given(cuts())
def test_factors_give_back_the_cut_with_the_fewest_rows(cut: Cut) -> None:
    row, halo, owner, parts = cut
    weight = np.arange(1.0, len(row) + 1)
    shape = (int(row.max(initial=0)) + 1, len(owner))
    expected = sp.coo_array((weight, (row, halo)), shape=shape).toarray()
    fewest = cover_factors(row, halo, owner, parts)
    for factors in (fewest, selecting_factors(row, halo, owner, parts)):
        np.testing.assert_array_equal(product(factors, weight, *shape), expected)
        sender = np.repeat(np.arange(parts), factors.row_counts)  # rows are in order of sender, and each is its own
        np.testing.assert_array_equal(sender[factors.send_message], owner[factors.send_halo])
        assert (np.diff(factors.send_message) >= 0).all()
    for p in range(parts):
        mine = {(int(r), int(h)) for r, h in zip(row, halo, strict=True) if owner[h] == p}
        assert fewest.row_counts[p] == smallest_cover(mine)


def test_stars_send_one_row_whichever_way_they_point() -> None:
    hub_sends = cover_factors(np.arange(50), np.zeros(50, np.int64), np.zeros(1, np.int64), 1)
    hub_receives = cover_factors(np.zeros(50, np.int64), np.arange(50), np.zeros(50, np.int64), 1)
    assert (hub_sends.rows, hub_receives.rows) == (1, 1)
    assert selecting_factors(np.zeros(50, np.int64), np.arange(50), np.zeros(50, np.int64), 1).rows == 50


def test_a_cover_that_saves_nothing_sends_raw_rows_only() -> None:
    matching = np.arange(9)
    assert (cover_factors(matching, matching, np.zeros(9, np.int64), 1).send_edge == -1).all()


def test_a_long_chain_of_alternating_edges_is_covered() -> None:
    n = 20_000
    row, halo = np.repeat(np.arange(n), 2)[:-1], np.repeat(np.arange(n), 2)[1:]
    assert cover_factors(row, halo, np.zeros(n, np.int64), 1).rows == n


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("name", ["undirected", "directed", "weighted"])
def test_a_report_counts_the_cover_of_every_pair(name: str, parts: int) -> None:
    case = CASES[name]
    part = case.part(parts)
    counts = cut_counts_of_shards(shard_of(case.graph, part, q, parts) for q in range(parts))
    assert counts.cover is not None
    for p, q in itertools.permutations(range(parts), 2):
        across = (part[case.graph.src] == p) & (part[case.graph.dst] == q)
        pairs = {(int(v), int(u)) for u, v in zip(case.graph.src[across], case.graph.dst[across], strict=True)}
        if len({u for _, u in pairs}) <= 12:
            assert counts.cover[p, q] == smallest_cover(pairs)
        assert counts.cover[p, q] <= counts.rows[p, q]
    assert not counts.cover.diagonal().any()
