"""Exchange policies against the exact run: nothing differs where nothing should, and all that was stated holds."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullgraph.config import TrainConfig
from fullgraph.loading import load_shard
from fullgraph.policy import Policy, Recipe
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


def ran(world: World, folder: Path, options: dict[str, Any], steps: int = 6, by_cache: bool = False) -> dict[str, Any]:
    """Losses, weights and what was sent of a short run on this rank."""
    world = dataclasses.replace(world, meter=type(world.meter)())
    config = TrainConfig(**CHEAP | options)
    trainer = make_trainer(load_shard(folder, world).shard, config, world)
    if by_cache:
        trainer.policy = Policy(cached(config), trainer.world, config.seed)
    ages, records, ledgers, predicted = [], [], [], []
    for step in range(steps):
        before = {tag: list(line) for tag, line in world.meter.ledger.items()}
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
    trainer.policy.close()
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


@pytest.mark.parametrize("parts", [2, 3])
def test_trivial_settings_are_the_exact_run_bit_for_bit(ranks: RankPool, shards: Any, parts: int) -> None:
    jobs: list[tuple[dict[str, Any], bool]] = []
    for model in MODELS:
        jobs.append((model, False))
        jobs += [(model | {"dropout": 0.3} | option, False) for option in ({}, *TRIVIAL)]
        jobs += [(model | option, True) for option in TRIVIAL[:2]]
    results = ranks.run(parts, many, shards(parts), jobs)
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
