"""The portfolio: what it minimises is what is counted, rounds cost no more, and one seed gives one partition."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fullgraph.cost import Machine
from fullgraph.cut import crossing_rows, label_reach, layer_counts
from fullgraph.step import ModelShape
from partition_tools import kahypar, load, portfolio
from partition_tools.assign import AssignOptions, Candidate, assign
from partition_tools.graph import Graph, Splits
from partition_tools.loads import Loads, Moves, even_shares
from partition_tools.metis import MetisError
from partition_tools.objective import Objective, model_shape
from partition_tools.order import numbering
from partition_tools.prepare import make_undirected
from partition_tools.refine import _gains, refine
from tests.data import SHARED, needs_data

RNG = np.random.default_rng(3)


def skewed(n: int = 400, pairs: int = 1600, *, directed: bool = False, train: float | None = None) -> Graph:
    rng = np.random.default_rng(n)
    src, dst = (n * rng.random(pairs) ** 2).astype(np.int64), rng.integers(0, n, pairs)
    if not directed:
        src, dst = np.concatenate([src, dst]), np.concatenate([dst, src])
    masks = rng.random((1, n)) < (train or 0)
    splits = None if train is None else Splits(train=masks, val=~masks, test=~masks)
    return Graph(name="skewed", num_nodes=n, src=src, dst=dst, y=rng.integers(0, 5, n), splits=splits)


def objective_of(graph: Graph, parts: int, **fields: Any) -> Objective:
    only_rows = fields.pop("only_rows", False)
    shape = dataclasses.replace(model_shape(graph, model="sage", layers=2, hidden=16), **fields)
    return Objective.make(graph, parts, shape, Machine(), tolerance=0.03, only_rows=only_rows)


def loads_of(graph: Graph, parts: int, tolerance: float = 0.1) -> Loads:
    ones = {"nodes": np.ones(graph.num_nodes, np.int64)}
    return Loads.make(ones, parts, tolerance=tolerance, shares=even_shares(parts))


def at_random(graph: Graph, parts: int) -> NDArray[np.int32]:
    return (np.random.default_rng(parts).permutation(graph.num_nodes) % parts).astype(np.int32)


# -------------------------------------------------------------------------------------------------------- objective


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("model", ["sage", "gat"])
@pytest.mark.parametrize("train", [None, 0.2])
def test_the_objective_counts_what_is_sent(directed: bool, model: Any, train: float | None) -> None:
    graph = skewed(directed=directed, train=train)
    objective = objective_of(graph, 5, model=model, layers=3)
    part = at_random(graph, 5)
    found = objective(part)
    edges = [(graph.src, graph.dst)]
    reach = None if graph.splits is None else label_reach(edges, graph.splits.train[0], 3)
    for layer, expected in enumerate(layer_counts(edges, part, 5, 3, reach=reach)):
        ours = found.layers[layer]
        for name in ("inputs", "rows", "edges"):
            assert np.array_equal(getattr(ours, name), getattr(expected, name)), (layer, name)
        if objective.layer_edges[layer] is not None:
            assert np.array_equal(ours.halo, expected.halo)
            assert np.array_equal(ours.cover, expected.cover)
    cut = part[graph.src] != part[graph.dst]
    halo, cover = crossing_rows(graph.src[cut], graph.dst[cut], part, 5)
    assert objective.halo_rows(part) == halo.sum()
    rows = objective_of(graph, 5, model=model, only_rows=True)(part)
    assert rows.cost == rows.traffic == (cover if model != "gat" else halo).sum()


def test_a_nodes_load_is_its_share_of_compute() -> None:
    graph = skewed(train=0.2)
    objective = objective_of(graph, 3)
    part = at_random(graph, 3)
    load = np.bincount(part, objective.compute_load(), 3)
    assert load.tolist() == pytest.approx(objective(part).step.compute.sum(axis=0).tolist(), rel=1e-9)


def test_a_graph_without_labels_or_features_has_a_model() -> None:
    graph = dataclasses.replace(skewed(), y=None)
    assert model_shape(graph, model="gcn", layers=2, hidden=32) == ModelShape(
        model="gcn", features=32, outputs=16, hidden=32, layers=2
    )


# ------------------------------------------------------------------------------------------------------- refinement


@pytest.mark.parametrize(("model", "exact"), [("gat", True), ("sage", False)])
@pytest.mark.parametrize("directed", [False, True])
def test_gains_of_single_moves(model: Any, exact: bool, directed: bool) -> None:
    """Of halo rows the surrogate is exact; of covers it never promises more than the true cover then saves."""
    graph = skewed(60, 150, directed=directed)
    objective = objective_of(graph, 4, model=model, only_rows=True)
    part = at_random(graph, 4)
    here = objective(part)
    gains = _gains(objective, part, here)
    checked = 0
    for i, node in enumerate(gains.node.tolist()):
        for q in np.flatnonzero(np.isfinite(gains.table[i])).tolist():
            if q == part[node]:
                continue
            trial = part.copy()
            trial[node] = q
            saved = here.traffic - objective(trial).traffic
            assert saved == gains.table[i, q] if exact else saved >= gains.table[i, q], (node, q)
            checked += 1
    assert checked > 50


@pytest.mark.parametrize("fields", [{}, {"model": "gat"}, {"only_rows": True}], ids=str)
def test_refinement_saves_within_the_balance(fields: dict[str, Any]) -> None:
    graph = skewed(train=0.3)
    objective, loads = objective_of(graph, 4, **fields), loads_of(graph, 4)
    part = at_random(graph, 4)
    found = refine(objective, loads, part, rounds=40, seed=1)
    assert found.evaluation.traffic < 0.97 * objective(part).traffic
    assert found.evaluation.traffic == objective(found.part).traffic
    assert loads.beyond(found.part) == {}
    again = refine(objective, loads, part, rounds=40, seed=1)
    assert np.array_equal(found.part, again.part)
    by_cost = refine(objective, loads, found.part, rounds=20, seed=1, compute=True).evaluation
    assert by_cost.cost <= found.evaluation.cost
    assert by_cost.traffic <= found.evaluation.traffic
    assert refine(objective, loads, part, rounds=40, seed=1, deadline=0.0).late


def test_more_than_64_parts() -> None:
    graph = skewed(900, 3000)
    objective, loads = objective_of(graph, 70, only_rows=True), loads_of(graph, 70, 0.5)
    part = at_random(graph, 70)
    found = refine(objective, loads, part, rounds=10, seed=1)
    assert found.evaluation.traffic < objective(part).traffic
    assert np.bincount(found.part, minlength=70).min() >= 1


def test_moves_that_overfill_are_left_out() -> None:
    part = np.array([0, 0, 0, 1, 1, 1], np.int32)
    loads = Loads.make({"nodes": np.ones(6, np.int64)}, 2, tolerance=0.4, shares=even_shares(2))  # at most 4
    node = np.array([0, 1, 2])
    moves = loads.admit(part, loads.totals(part), Moves(node, np.ones(3, np.int64), np.array([1.0, 3.0, 2.0])))
    assert moves.node.tolist() == [1]
    swapped = Moves(np.array([0, 1, 2, 3, 4]), np.array([1, 1, 1, 0, 0]), np.array([1.0, 3.0, 2.0, 0.5, 0.4]))
    assert sorted(loads.admit(part, loads.totals(part), swapped).node.tolist()) == [0, 1, 2, 3, 4]


# -------------------------------------------------------------------------------------------------------- portfolio


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portfolio, "_ROUNDS", (30, 40))


@pytest.mark.usefixtures("few_rounds")
def test_best_costs_least_of_its_table() -> None:
    graph = skewed(train=0.3)
    options = AssignOptions(parts=4, method="best", tries=2)
    found = assign(graph, options)
    (kept,) = (row for row in found.table if row.kept)
    assert isinstance(kept, Candidate)
    assert kept.traffic <= 1.01 * min(row.traffic for row in found.table if isinstance(row, Candidate))
    assert not kept.beyond
    assert kept.rounds > 0
    assert len({row.name for row in found.table if isinstance(row, Candidate)}) >= 3
    objective = objective_of(graph, 4, hidden=128, features=128)
    assert objective(found.part).traffic == pytest.approx(kept.traffic)  # renumbered, the cost is the same
    assert np.array_equal(assign(graph, options).part, found.part)


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize(("n", "parts", "kway"), [(400, 8, True), (390, 8, False)])
def test_kway_only_where_parts_are_large(n: int, parts: int, kway: bool) -> None:
    table = assign(skewed(n, 4 * n), AssignOptions(parts=parts, method="best", tries=2)).table
    assert any("kway" in row.name for row in table if isinstance(row, Candidate)) == kway


@pytest.mark.usefixtures("few_rounds")
def test_what_fails_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kahypar, "installed", lambda: True)
    monkeypatch.setattr(kahypar, "versions", lambda: {"mtkahypar": "0"})

    def fail(*_: Any, **__: Any) -> None:
        raise MetisError("it failed")

    monkeypatch.setattr(kahypar, "partition", fail)
    found = assign(skewed(), AssignOptions(parts=2, method="best", tries=2))
    assert "Mt-KaHyPar was left out: it failed" in found.notes


def test_time_that_runs_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(portfolio.time, "monotonic", lambda: 10.0 * next(clock))
    monkeypatch.setattr(kahypar, "installed", lambda: False)
    found = assign(skewed(), AssignOptions(parts=4, method="best", time_limit=100))
    assert any("refinement ended at --time-limit 100" in note for note in found.notes)
    assert any("runs of METIS were left out: half of --time-limit 100 had passed" in note for note in found.notes)
    with pytest.raises(MetisError, match="no partition was made within"):
        assign(skewed(), AssignOptions(parts=4, method="best", time_limit=0.5))


@pytest.mark.skipif(not kahypar.installed(), reason="the extra quality is not installed")
def test_kahypar_minimises_halo_rows() -> None:
    graph = make_undirected(skewed())
    edges = objective_of(graph, 4, only_rows=True).edges[0]
    common: dict[str, Any] = {"seed": 2, "imbalance": 0.03, "timeout": 60.0}
    part = kahypar.partition("g", edges.src, edges.dst, graph.num_nodes, 4, **common)
    assert np.bincount(part, minlength=4).max() <= 103
    assert np.array_equal(part, kahypar.partition("g", edges.src, edges.dst, graph.num_nodes, 4, **common))
    objective = objective_of(graph, 4, model="gat", only_rows=True)
    assert objective(part).cost < 0.8 * objective(at_random(graph, 4)).cost
    with pytest.raises(MetisError, match="took more than"):
        kahypar.partition("g", edges.src, edges.dst, graph.num_nodes, 4, seed=2, imbalance=0.03, timeout=0.01)


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize(("name", "parts", "most"), [("chameleon_filtered", 4, 0.60), ("chameleon_filtered", 8, 0.60)])
def test_rows_over_those_of_metis(name: str, parts: int, most: float) -> None:
    graph = make_undirected(load(str(SHARED / "heterophilous" / f"{name}.npz")))
    graph = dataclasses.replace(graph, splits=None)
    kway = assign(graph, AssignOptions(parts=parts, scheme="kway")).part
    found = assign(graph, AssignOptions(parts=parts, method="best")).part
    objective = objective_of(graph, parts, only_rows=True)
    assert objective(found).traffic <= most * objective.halo_rows(kway)


# --------------------------------------------------------------------------------------------------------- numbering


def test_parts_that_share_most_rows_are_neighbours() -> None:
    rows = np.zeros((6, 6), np.int64)
    for a, b, shared in [(0, 3, 9), (3, 5, 8), (5, 1, 7), (1, 4, 9), (4, 2, 8)]:
        rows[a, b] = shared
    order = np.argsort(numbering(rows)).tolist()
    pairs = {frozenset(pair) for pair in itertools.pairwise(order)}
    assert {frozenset((0, 3)), frozenset((1, 4))} <= pairs
    assert sum(int((rows + rows.T)[a, b]) for a, b in map(sorted, pairs)) >= 33
    assert sorted(numbering(np.zeros((5, 5), np.int64)).tolist()) == [0, 1, 2, 3, 4]
    assert numbering(rows[:2, :2]).tolist() == [0, 1]


def test_a_run_of_parts_of_a_chain_shares_most() -> None:
    """A path in shuffled ids: consecutive parts are consecutive stretches of it."""
    n, parts = 2000, 20
    ids = np.random.default_rng(1).permutation(n)
    path = Graph(name="path", num_nodes=n, src=ids[:-1].copy(), dst=ids[1:].copy())
    part = assign(path, AssignOptions(parts=parts)).part
    rows = crossing_rows(*(ends[part[path.src] != part[path.dst]] for ends in (path.src, path.dst)), part, parts)[0]
    assert np.trace(rows, 1) + np.trace(rows, -1) >= 0.8 * rows.sum()
