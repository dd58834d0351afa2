"""P ranks compute what one process computes: propagation, gradients, training and scores, on every odd graph."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fullgraph.config import TrainConfig
from fullgraph.loading import load_shard
from fullgraph.models import build_model, edge_features_used
from fullgraph.propagate import sum_over_ranks
from fullgraph.trainer import Trainer, make_trainer
from fullgraph.view import LayerView, Pass, make_part
from fullgraph.world import World
from partition_tools.assign import Assignment
from partition_tools.builder import build
from partition_tools.graph import Graph
from tests import reference
from tests.graphs import CASES, shard_of
from tests.ranks import RankPool
from tests.reference import Course

MODELS = ("gcn", "sage", "gin", "gat")
SIZES = (1, 2, 3, 4)
STEPS = 20
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
LEARNED = "learned features"
INTEGERS = 50
"""Inputs and weights are integers of this size at most, so that every order of summation gives the same bits."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For the oracle, which otherwise takes the cores that the ranks need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --------------------------------------------------------------------------------------- propagation, bit for bit


def open_view(world: World, graph: Graph, part: NDArray[np.int32]) -> LayerView:
    data = make_part(shard_of(graph, part, world.rank, world.size), world, dtype=torch.float64)
    return data.views(Pass(training=False))[0]


def propagate_on_ranks(
    world: World, graph: Graph, part: NDArray[np.int32], x: Tensor, c: Tensor
) -> dict[str, NDArray[Any]]:
    """Rows and gradients of this rank's nodes: of ``sum(c * propagate(x))``, and of
    ``(rank + 1) * sum(c * with_halo(x))``."""
    view = open_view(world, graph, part)
    mine = x[view.ids].requires_grad_()
    y = view.propagate(mine)
    (grad_y,) = torch.autograd.grad((y * c[view.ids]).sum(), mine)
    rows = view.with_halo(mine)
    ids = view.with_halo(view.ids.to(torch.float64)[:, None])[:, 0].to(torch.int64)
    (grad_rows,) = torch.autograd.grad((world.rank + 1) * (rows * c[ids]).sum(), mine)
    # The gradient of a plain sum is one number seen at every place: a tensor without strides.
    (grad_sum,) = torch.autograd.grad(view.propagate(mine).sum() + view.with_halo(mine).sum(), mine)
    out = {"ids": view.ids, "y": y, "rows": rows, "row_ids": ids}
    out |= {"grad_y": grad_y, "grad_rows": grad_rows, "grad_sum": grad_sum}
    return {name: value.detach().numpy() for name, value in out.items()}


def check_propagation(ranks: RankPool, graph: Graph, part: NDArray[np.int32], parts: int) -> None:
    rng = np.random.default_rng(99)
    x, c = rng.integers(-INTEGERS, INTEGERS + 1, (2, graph.num_nodes, 5)).astype(np.float64)
    weight = np.ones(graph.num_edges) if graph.edge_weight is None else graph.edge_weight
    dense = np.zeros((graph.num_nodes, graph.num_nodes))
    np.add.at(dense, (graph.dst, graph.src), weight)
    # holds[r, u]: rank r owns node u or an edge from it.
    holds = np.arange(parts)[:, None] == part
    holds[part[graph.dst], graph.src] = True

    results = ranks.run(parts, propagate_on_ranks, graph, part, torch.from_numpy(x), torch.from_numpy(c))
    ids = np.concatenate([result["ids"] for result in results])
    np.testing.assert_array_equal(np.sort(ids), np.arange(graph.num_nodes))
    expected = {
        "y": dense @ x,
        "grad_y": dense.T @ c,
        "grad_rows": (np.arange(1, parts + 1) @ holds)[:, None] * c,
        "grad_sum": np.broadcast_to((dense.sum(0) + holds.sum(0))[:, None], x.shape),
    }
    for name, value in expected.items():
        np.testing.assert_array_equal(np.concatenate([result[name] for result in results]), value[ids], err_msg=name)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(np.sort(result["row_ids"]), np.flatnonzero(holds[rank]))
        np.testing.assert_array_equal(result["rows"], x[result["row_ids"]])


def with_integer_weights(graph: Graph) -> Graph:
    if graph.edge_weight is None:
        return graph
    weight = np.random.default_rng(98).integers(-3, 4, graph.num_edges).astype(np.float64)
    return dataclasses.replace(graph, edge_weight=weight)


@pytest.mark.parametrize("parts", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_sums_of_integers_are_equal_bit_for_bit(ranks: RankPool, name: str, parts: int) -> None:
    case = CASES[name]
    check_propagation(ranks, with_integer_weights(case.graph), case.part(parts), parts)


@st.composite
def multigraphs(draw: st.DrawFn) -> tuple[Graph, NDArray[np.int32], int]:
    n, parts = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    ends = st.integers(0, n - 1)
    edges = np.array(draw(st.lists(st.tuples(ends, ends, st.integers(-3, 3)), max_size=25)), np.int64).reshape(-1, 3)
    part = draw(st.lists(st.integers(0, parts - 1), min_size=n, max_size=n))
    weight = edges[:, 2].astype(np.float64) if draw(st.booleans()) else None
    graph = Graph(name="any", num_nodes=n, src=edges[:, 0], dst=edges[:, 1], x=np.zeros((n, 1)), edge_weight=weight)
    return graph, np.array(part, np.int32), parts


@settings(max_examples=40, deadline=None)
@given(multigraphs())
def test_any_multigraph_in_any_parts(ranks: RankPool, drawn: tuple[Graph, NDArray[np.int32], int]) -> None:
    check_propagation(ranks, *drawn)


# ------------------------------------------------------------------------------------- collectives, and transposes


def inner_products(world: World, graph: Graph, part: NDArray[np.int32], kind: str) -> tuple[float, float]:
    """This rank's share of ``<y, A x>`` and ``<A^T y, x>`` for integer x and y; A^T by the backward pass at 0."""
    view = open_view(world, graph, part)

    def apply(x: Tensor) -> Tensor:
        if kind == "with_halo":
            return view.with_halo(x)
        if kind == "sum_over_ranks":
            return sum_over_ranks(x[: x.shape[0] // 2].sum(0), world=world)
        return view.propagate(x, kind)  # type: ignore[arg-type]

    generator = torch.Generator().manual_seed(world.rank)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-INTEGERS, INTEGERS + 1, shape, generator=generator).to(torch.float64)

    x = integers(view.n_in, 3)
    image = apply(x)
    y = integers(*image.shape)
    zero = torch.zeros_like(x, requires_grad=True)
    (transposed,) = torch.autograd.grad(apply(zero), zero, y)
    return float((y * image).sum()), float((transposed * x).sum())


@pytest.mark.parametrize("kind", ["sum", "mean", "gcn", "with_halo", "sum_over_ranks"])
@pytest.mark.parametrize("parts", SIZES)
def test_backward_is_the_transpose(ranks: RankPool, parts: int, kind: str) -> None:
    for name in ("loops", "one way", "isolated", "empty part"):
        case = CASES[name]
        shares = ranks.run(parts, inner_products, with_integer_weights(case.graph), case.part(parts), kind)
        forward, backward = np.sum(shares, axis=0)
        if kind in ("mean", "gcn"):
            assert backward == pytest.approx(forward, rel=1e-12)
        else:
            assert backward == forward, name
        assert forward != 0, name


def sums_on_ranks(world: World) -> tuple[list[float], list[float]]:
    x = torch.full((2,), 10.0**world.rank, dtype=torch.float64, requires_grad=True)
    total = sum_over_ranks(x, world=world)
    (total * (world.rank + 1)).sum().backward()
    assert x.grad is not None
    return total.tolist(), x.grad.tolist()


@pytest.mark.parametrize("parts", SIZES)
def test_sum_over_ranks(ranks: RankPool, parts: int) -> None:
    total, weight = sum(10.0**rank for rank in range(parts)), parts * (parts + 1) / 2
    assert ranks.run(parts, sums_on_ranks) == [([total] * 2, [weight] * 2)] * parts


# ------------------------------------------------------------------------------------------------------- training


Shards = Callable[[str, int], Path]
"""(case, number of parts) -> folder of its shards"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    folder = tmp_path_factory.mktemp("shards")

    @functools.cache
    def build_case(name: str, parts: int) -> Path:
        case, out = CASES[name], folder / f"{name} {parts}"
        by = {"method": "test", "seed": 0, "options": {}, "versions": {}, "notes": ()}
        by["cluster"] = (np.arange(case.graph.num_nodes) * 7 % 5).astype(np.int32)  # not the order of ids
        build(case.graph, Assignment(part=case.part(parts), parts=parts, **by), out)
        return out

    return build_case


def train_on_ranks(world: World, runs: list[tuple[Path, TrainConfig]]) -> list[Course]:
    return [_train(world, folder, config) for folder, config in runs]


def _train(world: World, folder: Path, config: TrainConfig) -> Course:
    shard = load_shard(folder, world).shard
    trainer = make_trainer(shard, config, world)
    model = trainer.model
    trainer.gradients(0)
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    if trainer.table is not None:
        assert trainer.table.grad is not None
        gradients["features"] = rows_of_all(trainer, trainer.table.grad)
    features, edge_dim = trainer.part.x.shape[1], edge_features_used(config, shard)
    fresh = build_model(config, features, trainer.target.outputs, edge_dim=edge_dim)
    model.load_state_dict(fresh.state_dict())  # statistics of batch norm
    losses = [trainer.step(step)[0]["loss"] for step in range(STEPS)]
    state = model.state_dict()
    if trainer.table is not None:
        state["features"] = rows_of_all(trainer, trainer.table)
    return Course(losses, gradients, state, trainer.evaluate())


def rows_of_all(trainer: Trainer, rows: Tensor) -> Tensor:
    """[N, D] on every rank, in order of global id."""
    ids = trainer.world.gather_rows(trainer.part.whole.owned_global[:, None])[:, 0]
    out = torch.empty(ids.shape[0], rows.shape[1], dtype=rows.dtype)
    out[ids] = trainer.world.gather_rows(rows)
    return out


@functools.cache
def oracle(name: str, config: TrainConfig) -> Course:
    graph = CASES[name].graph
    features = graph.learned_features if graph.x is None else graph.x.shape[1]
    edge_dim = 0 if graph.edge_x is None or config.model != "gat" else graph.edge_x.shape[1]
    _, outputs = reference.labels(graph, config.task or graph.task, torch.float64)
    model = build_model(config, features, outputs, edge_dim=edge_dim if config.edge_features else 0)
    return reference.train(graph, config, model.state_dict(), STEPS)


def differences(found: Course, expected: Course, tolerance: float) -> list[str]:
    """What differs, in words."""
    out = []
    for step, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if not abs(a - b) <= tolerance * max(1.0, abs(b)):
            out.append(f"loss of step {step} is {a!r}; expected {b!r}")
            break
    largest = max(float(g.abs().max()) for g in expected.gradients.values())
    assert largest > 0
    assert found.gradients.keys() == expected.gradients.keys()
    for parameter, gradient in expected.gradients.items():
        error = float((found.gradients[parameter] - gradient).abs().max()) / largest
        if not error <= tolerance:
            out.append(f"gradient of {parameter} is off by {error:.2g} of the largest gradient")
    if tolerance > 1e-8:  # at this precision a near tie may change a count, and a zero gradient is noise to adam
        return out
    late = 1000 * tolerance  # adam scales up the rounding of a gradient that should be zero
    for entry, value in expected.state.items():
        error = float((found.state[entry] - value).abs().max()) / max(1.0, float(value.abs().max()))
        if not error <= late:
            out.append(f"{entry} is off by {error:.2g} after {STEPS} steps")
    if {split: scores.keys() for split, scores in found.scores.items()} != {
        s: m.keys() for s, m in expected.scores.items()
    }:
        out.append(f"scores are {found.scores}; expected {expected.scores}")
        return out
    for split, metrics in expected.scores.items():
        for metric, value in metrics.items():
            if found.scores[split][metric] != pytest.approx(value, rel=late):
                out.append(f"{metric} of {split} is {found.scores[split][metric]!r}; expected {value!r}")
    return out


def same(a: Course, b: Course) -> bool:
    """Whether two ranks have the same results to the bit."""
    tensors = all(
        x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
        for x, y in ((a.gradients, b.gradients), (a.state, b.state))
    )
    return tensors and a.losses == b.losses and a.scores == b.scores


def check_training(ranks: RankPool, shards: Shards, parts: int, runs: list[tuple[str, TrainConfig]]) -> None:
    jobs = [(shards(name, parts), config) for name, config in runs]
    courses = ranks.run(parts, train_on_ranks, jobs, timeout=30 + 6.0 * len(jobs))
    faults = []
    for i, (name, config) in enumerate(runs):
        first, *others = [course[i] for course in courses]
        found = differences(first, oracle(name, config), TOLERANCE[config.dtype])
        found += [
            f"rank {r} has other results than rank 0" for r, other in enumerate(others, 1) if not same(first, other)
        ]
        faults += [f"{name}, {describe(config)}:\n    " + "\n    ".join(found)] if found else []
    assert not faults, "\n".join(faults)


def describe(config: TrainConfig) -> str:
    default = TrainConfig().as_dict()
    return " ".join(f"{name}={value}" for name, value in config.as_dict().items() if value != default[name])


def options(model: str, name: str, **others: Any) -> TrainConfig:
    """Small, with everything dropped that can be, and as the case and ``others`` say."""
    base = {"dtype": "float64", "hidden": 8, "heads": 2, "dropout": 0.4, "input_dropout": 0.2, "seed": 3}
    chosen: dict[str, Any] = {"model": model} | base | CASES[name].options | others
    return TrainConfig(**chosen)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("parts", SIZES)
def test_training_equals_one_process(ranks: RankPool, shards: Shards, parts: int, model: str) -> None:
    check_training(
        ranks, shards, parts, [(name, options(model, name)) for name in CASES if parts in CASES[name].everyday]
    )


@pytest.mark.parametrize("parts", SIZES)
def test_training_in_single_precision(ranks: RankPool, shards: Shards, parts: int) -> None:
    names = ("undirected", "loops")
    check_training(
        ranks, shards, parts, [(name, options(model, name, dtype="float32")) for name in names for model in MODELS]
    )


BFLOAT16_LOSS, BFLOAT16_GRADIENT = 2.0**-6, 2.0**-3
"""What a step in bfloat16 may be off: of the loss, and of the norm of the gradient. An element is rounded to 2^-9 of
itself; one that relu or a norm then treats otherwise counts for more on graphs of a few dozen nodes."""


@pytest.mark.parametrize("parts", SIZES)
def test_a_step_in_bfloat16_is_near_that_in_float32(ranks: RankPool, shards: Shards, parts: int) -> None:
    runs = [
        (name, options(model, name, dtype="bfloat16"))
        for name, model in [*itertools.product(("loops", "weighted"), MODELS), ("sparse", "sage"), (LEARNED, "gcn")]
    ]
    jobs = [(shards(name, parts), config) for name, config in runs]
    courses = ranks.run(parts, train_on_ranks, jobs, timeout=30 + 6.0 * len(jobs))
    for i, (name, config) in enumerate(runs):
        expected = oracle(name, dataclasses.replace(config, dtype="float32"))
        first, *others = [course[i] for course in courses]
        assert all(same(first, other) for other in others), (name, config)
        assert first.losses[0] == pytest.approx(expected.losses[0], rel=BFLOAT16_LOSS), (name, config)
        assert all(gradient.dtype == torch.float32 for gradient in first.gradients.values())
        found, wanted = (
            torch.cat([of[parameter].flatten() for parameter in expected.gradients])
            for of in (first.gradients, expected.gradients)
        )
        error = float((found - wanted).norm() / wanted.norm())
        assert error <= BFLOAT16_GRADIENT, (name, config, error)


@pytest.mark.parametrize("parts", [1, 3])
def test_options_that_change_the_model(ranks: RankPool, shards: Shards, parts: int) -> None:
    runs = [
        ("undirected", options("gat", "undirected", out_heads=3, heads=4)),
        ("undirected", options("gcn", "undirected", layers=1)),
        ("directed", options("sage", "directed", layers=5, residual=True)),
        ("loops", options("gin", "loops", task="regression")),
        ("directed", options("gin", "directed", feature_norm="row", dropout=0.0)),
    ]
    check_training(ranks, shards, parts, runs)


def test_edge_features_can_be_left_out(ranks: RankPool, shards: Shards) -> None:
    check_training(ranks, shards, 3, [("edge features", options("gat", "edge features", edge_features=False))])


def test_learned_features_under_other_options(ranks: RankPool, shards: Shards) -> None:
    runs = [
        (LEARNED, options("sage", LEARNED, optimizer="sgd", lr=0.1, layers=3, clip=None, prune=False)),
        (LEARNED, options("gcn", LEARNED, norm="batch", hidden=3, heads=1)),  # aggregates on the features' side
        (LEARNED, options("gin", LEARNED, dtype="float32", input_dropout=0.0)),
        (LEARNED, options("gat", LEARNED, layers=1, optimizer="adamw")),
    ]
    check_training(ranks, shards, 3, runs)


@pytest.mark.parametrize("parts", SIZES)
def test_inductive_training_equals_one_process_on_the_subgraph(ranks: RankPool, shards: Shards, parts: int) -> None:
    """Loops and duplicates, weights, batch norm over the subgraph's nodes, features of edges, parts left empty."""
    runs = [
        ("loops", options("gat", "loops", inductive=True)),
        ("weighted", options("sage", "weighted", inductive=True)),
        ("empty part", options("gcn", "empty part", inductive=True)),
        ("isolated", options("gin", "isolated", inductive=True)),
        ("edge features", options("gat", "edge features", inductive=True)),
        ("no training node", options("gcn", "no training node", inductive=True, input_dropout=0.0, split=1)),
        ("sparse", options("sage", "sparse", inductive=True)),
    ]
    check_training(ranks, shards, parts, runs)


def test_residual_of_sparse_features(ranks: RankPool, shards: Shards) -> None:
    check_training(ranks, shards, 2, [("sparse", options("gcn", "sparse", residual=True, hidden=40, layers=3))])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("parts", SIZES)
def test_every_combination(ranks: RankPool, shards: Shards, parts: int, model: str, norm: str, dtype: str) -> None:
    # Adam's first steps are signs of the gradient, so in single precision a zero one would count.
    others = {"norm": norm, "dtype": dtype} | ({"optimizer": "sgd"} if dtype == "float32" else {})
    runs = [
        (name, options(model, name, residual=residual, layers=layers, **others))
        for name, (residual, layers) in itertools.product(CASES, [(False, 2), (True, 3)])
    ]
    check_training(ranks, shards, parts, runs)
