"""What every layer sends, counted offline from edges and an assignment, against the ledger of ranks that train."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fullgraph.config import TrainConfig
from fullgraph.cost import Ledger, Machine, crossings, layer_ledger
from fullgraph.cut import (
    PRUNE_SHARE,
    LayerCounts,
    cover_factors,
    cut_counts,
    label_reach,
    layer_counts,
    whole_boundaries,
)
from fullgraph.step import ModelShape, step_cost
from fullgraph.trainer import make_trainer
from fullgraph.world import Meter, World
from partition_tools.graph import Graph
from tests.builds import two_triangles
from tests.graphs import CASES, shard_of
from tests.ranks import RankPool, rank_pool

RUNS = [
    {"model": "sage", "layers": 2},
    {"model": "gcn", "layers": 3, "plan": "halo"},
    {"model": "gin", "layers": 2, "prune": False, "layer0": "exchange"},
    {"model": "sage", "layers": 3, "norm": "batch", "input_dropout": 0.2},
    {"model": "gat", "layers": 2},
]


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    with rank_pool(8) as pool:
        yield pool


def ledgers(world: World, runs: list[tuple[str, dict[str, Any]]]) -> list[tuple[Ledger | None, str]]:
    """For each run what this rank's trainer says that a step sends, from its plans, and how layer 0 gets its rows."""
    out = []
    for name, options in runs:
        case = CASES[name]
        shard = shard_of(case.graph, case.part(world.size), world.rank, world.size)
        config = TrainConfig(hidden=8, heads=2, dropout=0.3, **options)
        trainer = make_trainer(shard, config, dataclasses.replace(world, meter=Meter()))
        out.append((trainer.predicted_ledger(), trainer.part.input.mode))
    return out


def offline(graph: Graph, part: NDArray[np.int32], parts: int, options: dict[str, Any], mode: str) -> list[Ledger]:
    """The same of every rank, from edges and assignment alone."""
    config = TrainConfig(hidden=8, heads=2, dropout=0.3, **options)
    edges = [(graph.src, graph.dst)]
    reach = None
    if config.prune:
        train = np.zeros(graph.num_nodes, np.bool_) if graph.splits is None else graph.splits.train[0]
        reach = label_reach(edges, train, config.layers)
    whole_layers = config.layers - 1 if config.norm == "batch" else 0
    counts = layer_counts(edges, part, parts, config.layers, reach=reach, whole_layers=whole_layers)
    shape = shape_of(graph, config)
    dropped = config.input_dropout > 0
    crossing = crossings(
        config.model,
        shape.widths,
        layer0="exchange" if mode == "once" and (dropped or config.model == "gat") else mode,
        sparse_input=shape.sparse_input,
    )
    out: list[Ledger] = [{} for _ in range(parts)]
    for layer, (count, cross) in enumerate(zip(counts, crossing, strict=True)):
        rows = dataclasses.replace(shape, plan=config.plan).rows_sent(count)
        for rank in range(parts):
            out[rank] |= layer_ledger(layer, cross, rows[rank].tolist(), rows[:, rank].tolist(), 4)
    return out


def shape_of(graph: Graph, config: TrainConfig) -> ModelShape:
    assert graph.x is not None
    assert graph.y is not None
    return ModelShape(
        model=config.model,
        features=graph.x.shape[1],
        outputs=int(graph.y.max()) + 1,
        hidden=config.hidden,
        layers=config.layers,
        sparse_input=not isinstance(graph.x, np.ndarray),
    )


def check(pool: RankPool, parts: int, names: Sequence[str]) -> None:
    runs = [(name, options) for name in names for options in RUNS]
    found = pool.run(parts, ledgers, runs, timeout=120)
    sent = 0
    for i, (name, options) in enumerate(runs):
        case = CASES[name]
        expected = offline(case.graph, case.part(parts), parts, options, found[0][i][1])
        for rank in range(parts):
            assert found[rank][i][0] == expected[rank], f"rank {rank} of {parts}: {name}, {options}"
            sent += sum(map(sum, expected[rank].values()))
    assert sent > 0


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_counts_equal_the_ledger_of_a_run(ranks: RankPool, parts: int) -> None:
    check(ranks, parts, ("directed", "one way"))


def test_counts_equal_the_ledger_of_a_run_on_eight_ranks(eight: RankPool) -> None:
    check(eight, 8, ("directed",))


# ----------------------------------------------------------------------------------------------- against brute force


@st.composite
def partitioned(draw: st.DrawFn) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], int]:
    n, parts = draw(st.integers(1, 30)), draw(st.integers(1, 5))
    node = st.integers(0, n - 1)
    edges = np.array(draw(st.lists(st.tuples(node, node), max_size=60)), np.int64).reshape(-1, 2)
    part = draw(st.lists(st.integers(0, parts - 1), min_size=n, max_size=n))
    return edges[:, 0].copy(), edges[:, 1].copy(), np.array(part, np.int32), parts


@settings(max_examples=40, deadline=None)
@given(partitioned(), st.integers(0, 29), st.integers(1, 4))
def test_counts_of_a_layer(drawn: tuple[Any, Any, NDArray[np.int32], int], labelled: int, layers: int) -> None:
    src, dst, part, parts = drawn
    n = part.shape[0]
    train = np.arange(n) <= labelled // 4
    reach = label_reach([(src, dst)], train, layers)
    expected = np.where(train, 0, layers + 1)
    for _ in range(layers):
        for u, v in zip(src.tolist(), dst.tolist(), strict=True):
            expected[u] = min(expected[u], expected[v] + 1)
    assert reach.tolist() == expected.tolist()

    of_shards = [(src[part[dst] == q], dst[part[dst] == q]) for q in range(parts)]
    assert label_reach(of_shards, train, layers).tolist() == reach.tolist()
    counts = layer_counts([(src, dst)], part, parts, layers, reach=reach)
    for ours, theirs in zip(counts, layer_counts(of_shards, part, parts, layers, reach=reach), strict=True):
        assert all(np.array_equal(getattr(ours, f.name), getattr(theirs, f.name)) for f in dataclasses.fields(ours))
    whole = whole_boundaries([int((reach <= layers - i).sum()) for i in range(layers + 1)], n)
    for layer, count in enumerate(counts):
        kept = np.full(n, True) if whole[layer + 1] else reach <= layers - 1 - layer
        mine = kept[dst]
        assert count.rows.tolist() == np.bincount(part[kept], minlength=parts).tolist()
        assert count.edges.tolist() == np.bincount(part[dst[mine]], minlength=parts).tolist()
        assert np.array_equal(count.halo, cut_counts(src[mine], dst[mine], part, parts).rows)
        for q in range(parts):
            into = mine & (part[dst] == q) & (part[src] != q)
            owner = part[src[into]].astype(np.int64)
            halo = np.argsort(owner, kind="stable")
            factors = cover_factors(dst[into][halo], _ids(src[into][halo], n, owner[halo]), _owners(n, part), parts)
            assert np.array_equal(count.cover[:, q], factors.row_counts)
    for before, after in itertools.pairwise(counts):
        assert np.array_equal(before.rows, after.inputs)


def _ids(source: NDArray[np.int64], n: int, owner: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of nodes in a halo list that has every node of every owner."""
    return owner * n + source


def _owners(n: int, part: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.repeat(np.arange(int(part.max()) + 1), n)


@pytest.mark.parametrize(
    ("needed", "whole_layers", "whole"),
    [
        ([100, 96, 95], 0, (True, True, False)),
        ([100, 90, 80], 0, (True, False, False)),
        ([90, 96, 5], 0, (True, True, False)),  # what is whole above is whole below
        ([50, 20, 5], 1, (True, True, False)),
        ([0, 0, 0], 0, (False, False, False)),
    ],
)
def test_what_saves_little_is_not_pruned(needed: list[int], whole_layers: int, whole: tuple[bool, ...]) -> None:
    assert PRUNE_SHARE == 0.05
    assert whole_boundaries(needed, 100, whole_layers) == whole


# ---------------------------------------------------------------------------------------------------------- seconds


def test_cost_of_two_triangles_by_hand() -> None:
    """Two parts send each other one row; the first of two layers is aggregated once."""
    graph = two_triangles()
    part = np.array([0, 0, 0, 1, 1, 1], np.int32)
    counts = layer_counts([(graph.src, graph.dst)], part, 2, 2)
    machine = Machine(flops=1e3, gather=1e2, bandwidth=10.0, latency=0.5, elements=20.0, overhead=0.25)
    shape = ModelShape(model="sage", features=4, outputs=2, hidden=8)
    cost = step_cost(counts, shape, machine)
    assert cost.layer0 == "once"
    # Layer 0: 3 rows, two products forward and for their weights. Layer 1 maps 8 to 2, with the input's gradient, and
    # reads 7 rows of 2 floats twice.
    products = 2 * 2 * (3 * 4 * 8 * 2) / 1e3, 2 * 3 * (3 * 8 * 2 * 2) / 1e3
    read = 7 * 2 * 4 * 2 / 1e2
    first, second = products[0] + 2 * 3 * 8 / 20 + 0.25, products[1] + read + 3 * 3 * 2 / 20 + 0.25
    assert cost.compute[0].tolist() == pytest.approx([first] * 2)
    assert cost.compute[1].tolist() == pytest.approx([second] * 2)
    assert cost.exchange.tolist() == [[0, 0], pytest.approx([2 * (2 * 4 / 10 + 0.5)] * 2)]
    assert cost.bytes_sent.tolist() == [[0, 16], [16, 0]]
    assert cost.seconds == pytest.approx(first + second + 2 * 1.3)


def test_the_slowest_part_of_each_layer_counts() -> None:
    zero = np.zeros((2, 2), np.int64)
    counts = [
        LayerCounts(inputs=rows, rows=rows, edges=0 * rows, halo=zero, cover=zero)
        for rows in (np.array([10, 2]), np.array([3, 9]))
    ]
    shape = ModelShape(model="gcn", features=1, outputs=1, hidden=1)
    assert step_cost(counts, shape, Machine(flops=1.0, elements=1e300, overhead=0.0)).seconds == 2 * 2 * 10 + 2 * 3 * 9
