"""Exchange policies against the exact run: nothing differs where nothing should, and all that was stated holds."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullgraph.config import TrainConfig
from fullgraph.exchange import halo_rows
from fullgraph.loading import load_shard
from fullgraph.policy import Policy, Recipe
from fullgraph.propagate import propagate
from fullgraph.trainer import make_trainer
from fullgraph.world import World
from partition_tools.builder import build
from partition_tools.graph import Graph, Splits
from tests.builds import assignment
from tests.ranks import RankPool

NODES = 80
CHEAP = {"layers": 3, "hidden": 8, "layer0": "exchange", "dropout": 0.0, "epochs": 9}


def graph() -> Graph:
    """Directed and skewed, with features that are integers."""
    rng = np.random.default_rng(3)
    kind = rng.permutation(NODES)
    return Graph(
        name="policy",
        num_nodes=NODES,
        src=(NODES * rng.random(420) ** 2).astype(np.int64),
        dst=rng.integers(0, NODES, 420),
        x=rng.integers(-4, 5, (NODES, 6)).astype(np.float32),
        y=rng.integers(0, 3, NODES),
        splits=Splits(train=kind[None] < 40, val=kind[None] >= 60, test=(kind[None] >= 40) & (kind[None] < 60)),
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("policy")

    @functools.cache
    def build_shards(parts: int, empty: bool = False) -> Path:
        """``empty``: the last part has one node, which sends to nobody (a pair of ranks with no rows)."""
        part = np.random.default_rng(parts).integers(0, parts, NODES)
        made = graph()
        if empty:
            part = np.where(part == parts - 1, 0, part)
            lonely = int(np.flatnonzero(~np.isin(np.arange(NODES), made.src[made.src != made.dst]))[0])
            part[lonely] = parts - 1
        out = folder / f"{parts}-{empty}"
        build(made, assignment(part, parts), out)
        return out

    return build_shards


class Cached(Recipe):
    """A recipe that goes through the caches even where that changes nothing."""

    exact = False
    stale = True


def cached(config: TrainConfig) -> Recipe:
    return Cached(**{f.name: getattr(Recipe.of(config), f.name) for f in dataclasses.fields(Recipe)})


def ran(
    world: World, folder: Path, options: dict[str, Any], steps: int = 6, by_cache: bool = False, disturbed: bool = False
) -> dict[str, Any]:
    """Losses, weights and what was sent of a short run on this rank; ``disturbed`` by evaluations and late ranks."""
    world = dataclasses.replace(world, meter=type(world.meter)())
    config = TrainConfig(**CHEAP | options)
    trainer = make_trainer(load_shard(folder, world).shard, config, world)
    if by_cache:
        trainer.policy = Policy(cached(config), trainer.world, config.seed)
    ages, records, ledgers, predicted = [], [], [], []
    for step in range(steps):
        before = {tag: list(line) for tag, line in world.meter.ledger.items()}
        if disturbed:
            time.sleep(0.02 * ((step + world.rank) % 3))
            trainer.evaluate()
        records.append(trainer.step(step)[0])
        now = world.meter.ledger
        moved = {tag: [a - b for a, b in zip(now[tag], before.get(tag, [0] * world.size), strict=True)] for tag in now}
        moved = {t: line for t, line in moved.items() if t[1] in ("forward", "backward") and any(line)}
        ledgers.append(moved)
        told = trainer.predicted_ledger([step])
        predicted.append(None if told is None else {tag: line for tag, line in told.items() if any(line)})
        ages.append({key: sorted(set(age.tolist())) for key, age in trainer.policy.ages(step).items()})
    stated, held = trainer.cache_bytes(), trainer.policy.nbytes
    scores = trainer.evaluate()
    trainer.policy.drain()
    weights = torch.cat([p.detach().flatten() for p in trainer.parameters])
    return {
        "losses": [record["loss"] for record in records],
        "drift": [record.get("drift") for record in records],
        "weights": weights,
        "sent": ledgers,
        "predicted": predicted,
        "ages": ages,
        "stated": stated,
        "held": held,
        "scores": scores,
    }


def many(world: World, folder: Path, jobs: list[tuple[dict[str, Any], bool]]) -> list[dict[str, Any]]:
    return [ran(world, folder, options, by_cache=by_cache) for options, by_cache in jobs]


MODELS = ({"model": "gcn"}, {"model": "sage", "plan": "halo"}, {"model": "gin"}, {"model": "gat", "heads": 2})
TRIVIAL = ({"refresh": "every:1"}, {"refresh": "drift:0"}, {"boundary_sample": 1.0}, {"codec": "float32"})


def test_trivial_settings_are_the_exact_run_bit_for_bit(ranks: RankPool, shards: Any) -> None:
    jobs: list[tuple[dict[str, Any], bool]] = []
    for model in MODELS:
        jobs.append((model, False))
        jobs += [(model | {"dropout": 0.3} | option, False) for option in ({}, *TRIVIAL)]
        jobs += [(model | option, True) for option in TRIVIAL[:2]]
    results = ranks.run(3, many, shards(3), jobs)
    for rank in results:
        for first in range(0, len(jobs), len(jobs) // len(MODELS)):
            plain, dropped, *rest = rank[first : first + len(jobs) // len(MODELS)]
            for found in rest[:4]:
                assert found["losses"] == dropped["losses"]
                assert torch.equal(found["weights"], dropped["weights"])
            for found in rest[4:]:
                assert found["losses"] == plain["losses"]
                assert torch.equal(found["weights"], plain["weights"])


def test_rows_cached_before_dropout_and_masked_where_they_are_used_are_the_exact_run(
    ranks: RankPool, shards: Any
) -> None:
    options = {"dropout": 0.4, "input_dropout": 0.2, "dtype": "float64"}
    jobs = [
        (model | options | when, way) for model in MODELS for when, way in (({}, False), ({"refresh": "every:1"}, True))
    ]
    for rank in ranks.run(3, many, shards(3), jobs):
        for exact, found in zip(rank[::2], rank[1::2], strict=True):
            assert found["losses"] == pytest.approx(exact["losses"], rel=1e-12)
            torch.testing.assert_close(found["weights"], exact["weights"], rtol=1e-9, atol=1e-11)


POLICIES: tuple[dict[str, Any], ...] = (
    {"refresh": "every:2"},
    {"refresh": "every:3", "stagger": True, "stale_grad": "drop", "codec": "int8"},
    {"refresh": "pipelined"},
    {"refresh": "pipelined", "stale_grad": "drop", "codec": "bfloat16", "cache_bfloat16": True},
    {"refresh": "pipelined", "pipeline_average": 0.5, "boundary_sample": 0.5},
    {"refresh": "every:2", "boundary_sample": 0.3, "codec": "int8", "freeze_masks": True},
    {"refresh": "drift:0.05", "codec": "int8"},
    {"refresh": "drift:1e9"},
    {"codec": "int8", "exchange_bytes": 300},
    {"codec": "bfloat16", "boundary_sample": 0.4},
    {"refresh": "every:2", "codec": "int8", "exchange_bytes": 300},
    {"refresh": "pipelined", "dtype": "bfloat16"},
    {"refresh": "drift:0.05", "codec": "int8", "dtype": "bfloat16"},
)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("model", [{"model": "gcn"}, {"model": "gat", "heads": 2}], ids=lambda model: model["model"])
def test_all_ranks_meet_and_send_hold_and_age_as_stated(
    ranks: RankPool, shards: Any, model: dict[str, Any], dropout: float
) -> None:
    """Also where a rank has nothing to send, a pair no rows, and no row has moved; and late ranks change nothing."""
    chosen = [p for p in POLICIES if model["model"] != "gat" or p.get("boundary_sample", 1) == 1 or "refresh" in p]
    jobs = [model | policy | {"dropout": dropout} for policy in chosen]
    found = ranks.run(3, many, shards(3, True), [(job, False) for job in jobs])
    again = ranks.run(3, disturbed, shards(3, True), jobs)
    for rank in range(3):
        for job, now, then in zip(jobs, found[rank], again[rank], strict=True):
            assert now["losses"] == then["losses"] == found[0][jobs.index(job)]["losses"], job
            assert np.isfinite(now["losses"]).all()
            assert torch.equal(now["weights"], then["weights"])
            assert now["held"] == now["stated"], job
            for sent, predicted in zip(now["sent"], now["predicted"], strict=True):
                assert predicted is None or sent == predicted, job
            assert (now["predicted"][1] is None) == ("drift" in job.get("refresh", ""))


def disturbed(world: World, folder: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [ran(world, folder, options, disturbed=True) for options in jobs]


def test_ages_are_what_the_schedule_says(ranks: RankPool, shards: Any) -> None:
    jobs = [
        {"refresh": "every:3"},
        {"refresh": "every:3", "stagger": True},
        {"refresh": "pipelined"},
        {"refresh": "drift:1e9"},
        {"refresh": "every:2", "exact_after": 3},
    ]
    for rank in ranks.run(2, many, shards(2), [({"model": "gcn"} | job, False) for job in jobs]):
        every, stagger, pipelined, drift, then_exact = (found["ages"] for found in rank)
        assert [ages[1, "forward"] for ages in every] == [[0], [1], [2], [0], [1], [2]]
        assert [ages[1, "backward"] for ages in every] == [[0], [1], [2], [0], [1], [2]]
        for layer in range(3):
            ages = [[0], *([(step - layer) % 3 if step >= layer else step] for step in range(1, 6))]
            assert [found[layer, "forward"] for found in stagger] == ages
        assert [ages[2, "forward"] for ages in pipelined] == [[0], [1], [1], [1], [1], [1]]
        assert [ages[2, "backward"] for ages in pipelined] == [[0], [1], [1], [1], [1], [1]]
        assert [ages[0, "forward"] for ages in drift] == [[step] for step in range(6)]
        assert [bool(ages) for ages in then_exact] == [True] * 3 + [False] * 3


def test_a_stale_step_uses_the_rows_that_were_sent_then(ranks: RankPool, shards: Any) -> None:
    """With a learning rate of nothing the weights stay, and with them every row: the caches hold what is exact."""
    still = {"model": "sage", "layers": 2, "lr": 1e-30, "dtype": "float64", "dropout": 0.3}
    when = ({}, {"refresh": "pipelined"}, {"refresh": "every:4"}, {"refresh": "drift:0.1"})
    for rank in ranks.run(3, many, shards(3), [(still | option, False) for option in when]):
        for found in rank[1:]:
            assert found["losses"] == pytest.approx(rank[0]["losses"], rel=1e-12)


def what_each_side_has(world: World, folder: Path, options: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(rows that this rank got, rows that the others remember to have sent it) of each layer, after some steps; and
    the steps of their sending."""
    trainer = make_trainer(load_shard(folder, world).shard, TrainConfig(**CHEAP | options), world)
    for step in range(6):
        trainer.step(step)
    assert trainer.part.training is not None
    state, found = trainer.policy.state(), []
    name = {int(key.split(".")[1]): key.removesuffix(".sent.rows") for key in state if key.endswith(".sent.rows")}
    for layer, (plan, _) in enumerate(trainer.part.training):
        counts = plan.halo.route.counts
        for what in ("rows", "sent"):
            sent, got = (state[f"{name[layer]}.{side}.{what}"].double() for side in ("sent", "forward"))
            sent, got = sent.view(len(sent), -1), got.view(len(got), -1)
            found.append((got, world.exchange(sent, counts.sent, counts.received).wait()))
    return found


def test_drift_goes_by_what_the_receiver_has(ranks: RankPool, shards: Any) -> None:
    options = {"model": "gin", "plan": "halo", "dropout": 0.3, "refresh": "drift:0.05", "codec": "int8"}
    for rank in ranks.run(3, what_each_side_has, shards(3), options):
        for got, sent in rank:
            assert torch.equal(got, sent)
        steps = torch.cat([got for got, _ in rank[1::2]])
        assert bool((steps < 5).any() and (steps > 0).any())  # some rows were sent again, some were not


def test_exact_after_sends_what_the_exact_run_sends(ranks: RankPool, shards: Any) -> None:
    jobs = [({"model": "gcn"} | option, False) for option in ({}, {"codec": "int8", "exact_after": 2})]
    for exact, coded in ranks.run(2, many, shards(2), jobs):
        assert coded["sent"][2:] == exact["sent"][2:]
        assert coded["sent"][1] != exact["sent"][1]


def test_measuring_drift_changes_nothing_and_finds_it(ranks: RankPool, shards: Any) -> None:
    jobs: list[tuple[dict[str, Any], bool]] = []
    for option in ({"codec": "int8"}, {"refresh": "every:3"}, {"boundary_sample": 0.5}):
        jobs += [({"model": "sage", "dropout": 0.2} | option | more, False) for more in ({}, {"measure_drift": 2})]
    for rank in ranks.run(2, many, shards(2), jobs):
        for plain, measured in zip(rank[::2], rank[1::2], strict=True):
            assert plain["losses"] == measured["losses"]
            assert plain["sent"] == measured["sent"]
            assert plain["drift"] == [None] * 6
            assert [found is not None for found in measured["drift"]] == [False, True] * 3
        int8, every, drawn = (found["drift"] for found in rank[1::2])
        assert all(0 < layer["relative_error"] < 0.02 and layer["cosine"] > 0.999 for layer in int8[1])
        assert every[3] == [{"layer": layer, "relative_error": 0.0, "cosine": pytest.approx(1.0)} for layer in range(3)]
        assert every[1][2]["relative_error"] > 0 < every[5][2]["relative_error"]
        assert 0.3 < drawn[3][1]["relative_error"] < 3


def resumed(world: World, folder: Path, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    config = TrainConfig(**CHEAP | options)
    losses = []
    for stop in (False, True):
        trainer = make_trainer(load_shard(folder, world).shard, config, world)
        mine = []
        for step in range(6):
            if stop and step == 3:
                kept = trainer.state(), trainer.optimizer.state_dict(), trainer.policy.state()
                trainer.policy.drain()
                trainer = make_trainer(load_shard(folder, world).shard, config, world)
                trainer.model.load_state_dict(kept[0]["model"])
                trainer.optimizer.load_state_dict(kept[1])
                trainer.policy.load_state(kept[2])
            mine.append(trainer.step(step)[0]["loss"])
        trainer.policy.drain()
        losses.append(mine)
    return losses[0], losses[1]


@pytest.mark.parametrize("refresh", ["pipelined", "every:3", "drift:0.1"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(ranks: RankPool, shards: Any, refresh: str) -> None:
    for straight, broken in ranks.run(2, resumed, shards(2), {"model": "gcn", "refresh": refresh, "dropout": 0.2}):
        assert straight == broken


def mean_of_draws(world: World, folder: Path, options: dict[str, Any], draws: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean - exact, standard error of the mean) of the row sums of an aggregate and of its gradient."""
    config = TrainConfig(**CHEAP | options)
    trainer = make_trainer(load_shard(folder, world).shard, config, world)
    plan = trainer.part.whole
    draw = torch.Generator().manual_seed(world.rank)
    x = torch.randn(plan.n_in, 8, dtype=torch.float64, generator=draw)
    wanted = torch.randn(plan.n_out, 8, dtype=torch.float64, generator=draw)

    def sums(carrier: Any) -> torch.Tensor:
        rows = x.clone().requires_grad_()
        y = propagate(rows, plan.linear, world=world, carrier=carrier)
        y.backward(wanted)
        assert rows.grad is not None
        return torch.cat([y.detach().sum(1), rows.grad.sum(1)])

    exact = sums(None)
    policy = Policy(Recipe.of(config), world, seed=4)
    found = torch.stack([sums(policy.at(step).carrier(0)) - exact for step in range(draws)])  # type: ignore[union-attr]
    return found.mean(0), found.std(0) / draws**0.5


@pytest.mark.parametrize("option", [{"boundary_sample": 0.3}, {"codec": "int8"}], ids=["drawn", "rounded"])
def test_the_mean_of_many_draws_is_the_exact_aggregate(ranks: RankPool, shards: Any, option: dict[str, Any]) -> None:
    for error, standard in ranks.run(3, mean_of_draws, shards(3), {"model": "gcn", "dtype": "float64"} | option, 2000):
        assert bool((standard > 0).any())
        assert bool((error.abs() <= 4 * standard + 1e-5).all())


def bound(rows: torch.Tensor, codec: str) -> torch.Tensor:
    """How far each number may arrive from what was sent."""
    if codec == "bfloat16":
        return 2.0**-8 * rows.abs()
    return (rows.abs().amax(1, keepdim=True) / 127 * (1 + 1e-5)).expand_as(rows)


def sent_there_and_back(world: World, folder: Path, codec: str) -> list[tuple[torch.Tensor, ...]]:
    """(error, bound) of the halo rows and of the gradient that comes back for them."""
    config = TrainConfig(**CHEAP | {"model": "gcn", "dtype": "float64", "codec": codec})
    plan = make_trainer(load_shard(folder, world).shard, config, world).part.whole
    draw = torch.Generator().manual_seed(world.rank)
    x = torch.randn(plan.n_in, 7, dtype=torch.float64, generator=draw)
    wanted = torch.randn(len(plan.halo.halo), 7, dtype=torch.float64, generator=draw)

    def through(carrier: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.clone().requires_grad_()
        halo = halo_rows(rows, plan.halo.route, world=world, carrier=carrier)[plan.n_in :]
        halo.backward(grad)
        assert rows.grad is not None
        return halo.detach(), rows.grad

    step = Policy(Recipe.of(config), world, seed=4).at(0)
    assert step is not None
    (rows, grad), (exact_rows, exact_grad) = through(step.carrier(0), wanted), through(None, wanted)
    _, grad_bound = through(None, bound(wanted, codec))  # a gradient is a sum over those who got the row
    return [(rows - exact_rows, bound(exact_rows, codec)), (grad - exact_grad, grad_bound)]


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_rows_and_gradients_cross_within_the_bound(ranks: RankPool, shards: Any, codec: str) -> None:
    for found in ranks.run(3, sent_there_and_back, shards(3), codec):
        for error, most in found:
            assert bool((error.abs() <= most + 1e-12).all())
            assert bool((error.abs() > 0.05 * most).any())  # else the bound would say nothing


class Mapped(torch.nn.Module):
    """Exchanges a map of dropped rows, linearly or raw."""

    num_layers = 1

    def __init__(self, features: int, outputs: int, raw: bool = False, dropped: bool = True) -> None:
        super().__init__()
        self.map, self.raw, self.dropped = torch.nn.Linear(features, outputs), raw, dropped

    def forward(self, x: torch.Tensor, views: Any) -> torch.Tensor:
        x = self.map(views[0].dropout(x, 0.5) if self.dropped else x)
        rows: torch.Tensor = views[0].with_halo(x)[: views[0].n_out] if self.raw else views[0].propagate(x)
        return rows


def steps_of_own_model(world: World, folder: Path, options: dict[str, Any], raw: bool, dropped: bool) -> str:
    config = TrainConfig(**CHEAP | options)
    factory = functools.partial(Mapped, raw=raw, dropped=dropped)
    trainer = make_trainer(load_shard(folder, world).shard, config, world, factory)
    try:
        for step in range(3):
            trainer.step(step)
    except ValueError as error:
        return str(error)
    finally:
        trainer.policy.drain()
    return ""


@pytest.mark.parametrize(
    ("options", "raw", "dropped", "said"),
    [
        ({"refresh": "every:2"}, False, True, "--freeze-masks"),
        ({"refresh": "pipelined"}, True, True, "--freeze-masks"),
        ({"refresh": "every:2", "freeze_masks": True}, False, True, ""),
        ({"refresh": "every:2"}, True, False, ""),
        ({"boundary_sample": 0.5}, True, False, "with_halo"),
        ({"boundary_sample": 0.5}, False, True, ""),
        ({"boundary_sample": 0.5, "refresh": "every:2"}, True, False, ""),
    ],
)
def test_a_model_of_the_users_own_is_served_or_refused(
    ranks: RankPool, shards: Any, options: dict[str, Any], raw: bool, dropped: bool, said: str
) -> None:
    for message in ranks.run(2, steps_of_own_model, shards(2), options, raw, dropped):
        assert said in message
        assert bool(said) == bool(message)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"refresh": "sometimes"}, "--refresh is sometimes; expected always"),
        ({"refresh": "every:0"}, "R at least 1"),
        ({"refresh": "drift:nan"}, "T at least 0"),
        ({"refresh": "pipelined:2"}, "--refresh is pipelined:2"),
        ({"stagger": True}, "--stagger"),
        ({"stale_grad": "drop", "refresh": "drift:1"}, "--stale-grad"),
        ({"pipeline_average": 0.5}, "--pipeline-average"),
        ({"pipeline_average": 1.0, "refresh": "pipelined"}, "--pipeline-average"),
        ({"boundary_sample": 0.0}, "--boundary-sample"),
        ({"boundary_sample": 0.5, "refresh": "drift:1"}, "--boundary-sample"),
        ({"boundary_sample": 0.5, "model": "gat"}, "attention"),
        ({"codec": "int4"}, "--codec"),
        ({"exact_after": -1}, "--exact-after"),
        ({"measure_drift": 0}, "--measure-drift"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        TrainConfig(**options)


def test_one_rank_has_nothing_to_exchange(shards: Any) -> None:
    exact = {kind: ran(World(), shards(1), {"model": "gcn", "dtype": kind}) for kind in ("float32", "bfloat16")}
    for policy in POLICIES:
        found = ran(World(), shards(1), {"model": "gcn"} | policy)
        assert found["losses"] == exact[policy.get("dtype", "float32")]["losses"]
