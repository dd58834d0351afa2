"""Every way to send less changes no result: each option alone, and pairs of option values, on 1 to 4 ranks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullgraph.config import TrainConfig
from fullgraph.cut import PRUNE_SHARE
from fullgraph.loading import load_shard
from fullgraph.trainer import make_trainer
from fullgraph.world import World
from partition_tools.assign import Assignment
from partition_tools.builder import build
from partition_tools.graph import Graph, Splits
from tests.ranks import RankPool

NODES, STEPS, LAYERS = 60, 4, 3
BFLOAT16 = 0.05
"""What the first losses of training in bfloat16 may be off."""
MODELS = ("gcn", "sage", "gin", "gat")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "model": MODELS,
    "plan": ("cover", "halo"),
    "prune": (True, False),
    "layer0": ("exchange", "once", "keep"),
    "exchange_bytes": (1 << 30, 200),
    "norm": ("none", "layer", "batch"),
    "input_dropout": (0.0, 0.3),
    "residual": (False, True),
    "hidden": (4, 12),
    "dtype": ("float64", "bfloat16"),
    "recompute": (False, True),
    "weighted": (False, True),
    "parts": (2, 1, 3, 4),
}


def graph(weighted: bool) -> Graph:
    """Directed and skewed, with loops and duplicates; a tenth of the nodes trains, so that pruning bites."""
    rng = np.random.default_rng(5)
    src = (NODES * rng.random(260) ** 2).astype(np.int64)
    dst = rng.integers(0, NODES, 260)
    kind = rng.permutation(NODES)
    return Graph(
        name="traffic",
        num_nodes=NODES,
        src=src,
        dst=dst,
        x=rng.standard_normal((NODES, 8)),
        y=rng.integers(0, 3, NODES),
        splits=Splits(train=kind[None] < 6, val=kind[None] >= 40, test=(kind[None] >= 6) & (kind[None] < 40)),
        edge_weight=rng.random(260) + 0.5 if weighted else None,
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("traffic")

    @functools.cache
    def build_shards(weighted: bool, parts: int) -> Path:
        part = np.random.default_rng(parts).integers(0, parts, NODES).astype(np.int32)
        by = {"method": "test", "seed": 0, "options": {}, "versions": {}, "notes": ()}
        out = folder / f"{weighted}-{parts}"
        build(graph(weighted), Assignment(part=part, parts=parts, **by), out)
        return out

    return build_shards


def train(world: World, runs: list[tuple[Path, TrainConfig]]) -> list[dict[str, Any]]:
    out = []
    for folder, config in runs:
        world.meter.bytes_sent = 0
        bounded = World(**{**vars(world), "exchange_bytes": config.exchange_bytes})
        trainer = make_trainer(load_shard(folder, bounded).shard, config, bounded)
        losses = [trainer.step(step)[0]["loss"] for step in range(STEPS)]
        state = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        rows = [plan.n_out for plan, _ in trainer.part.training or ()]
        out.append(
            {
                "losses": losses,
                "state": state,
                "scores": trainer.evaluate(),
                "bytes": bounded.meter.bytes_sent,
                "rows": rows,
            }
        )
    return out


def config_of(choice: dict[str, Any]) -> TrainConfig:
    options = {name: value for name, value in choice.items() if name not in ("weighted", "parts")}
    return TrainConfig(**options, layers=LAYERS, heads=2, dropout=0.4, optimizer="sgd", lr=0.1)


def plainest(choice: dict[str, Any]) -> dict[str, Any]:
    """The same on one rank, with everything off that may not change a result."""
    off = {"plan": "halo", "prune": False, "layer0": "exchange", "exchange_bytes": 1 << 30}
    return choice | off | {"dtype": "float64", "recompute": False, "parts": 1}


def covering(options: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Choices in which every pair of values of two options occurs, found greedily from a fixed seed."""
    rng = np.random.default_rng(1)
    names = list(options)

    def pairs(choice: dict[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, choice[a], b, choice[b]) for a, b in itertools.combinations(names, 2)}

    left = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x, y in itertools.product(options[a], options[b])
    }
    out = []
    while left:
        a, x, b, y = min(left, key=repr)
        drawn = [
            {name: values[rng.integers(len(values))] for name, values in options.items()} | {a: x, b: y}
            for _ in range(60)
        ]
        best = max(drawn, key=lambda choice: len(left & pairs(choice)))
        left -= pairs(best)
        out.append(best)
    return out


def check(ranks: RankPool, shards: Any, choices: list[dict[str, Any]]) -> None:
    wanted: dict[int, list[tuple[Path, TrainConfig]]] = {}
    for choice in [*choices, *map(plainest, choices)]:
        run = (shards(choice["weighted"], choice["parts"]), config_of(choice))
        if run not in wanted.setdefault(choice["parts"], []):
            wanted[choice["parts"]].append(run)
    found = {}
    for parts, runs in wanted.items():
        by_rank = ranks.run(parts, train, runs, timeout=60 + 3.0 * len(runs))
        for i, run in enumerate(runs):
            found[run] = by_rank[0][i]
    for choice in choices:
        plain = plainest(choice)
        a = found[shards(choice["weighted"], choice["parts"]), config_of(choice)]
        b = found[shards(plain["weighted"], 1), config_of(plain)]
        if choice["dtype"] == "bfloat16":
            assert a["losses"] == pytest.approx(b["losses"], rel=BFLOAT16), choice
            continue
        assert a["losses"] == pytest.approx(b["losses"], rel=1e-10), choice
        torch.testing.assert_close(a["state"], b["state"], rtol=1e-8, atol=1e-10, msg=str(choice))
        for split, metrics in b["scores"].items():
            assert a["scores"][split] == pytest.approx(metrics, rel=1e-8), (choice, split)


DEFAULT = {name: values[0] for name, values in OPTIONS.items()}


def test_each_option_alone(ranks: RankPool, shards: Any) -> None:
    alone = [DEFAULT | {name: value} for name, values in OPTIONS.items() for value in values]
    check(ranks, shards, alone)


def test_every_pair_of_option_values(ranks: RankPool, shards: Any) -> None:
    choices = covering(OPTIONS)
    assert len(choices) < 60
    check(ranks, shards, choices)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_what_is_computed_again_is_the_same_to_the_bit(ranks: RankPool, shards: Any, parts: int) -> None:
    """With dropout, over norms, residuals, sparse and widening layers; the rows of such layers cross once more."""
    choices = [
        DEFAULT | {"model": model, "norm": norm, "hidden": hidden, "parts": parts, "residual": norm == "none"}
        for model, norm, hidden in itertools.product(MODELS, ("none", "batch"), (4, 12))
    ]
    runs = [
        (shards(False, parts), dataclasses.replace(config_of(choice), recompute=recompute, dtype="float32"))
        for choice in choices
        for recompute in (False, True)
    ]
    for of_rank in ranks.run(parts, train, runs, timeout=60 + 3.0 * len(runs)):
        for choice, once, again in zip(choices, of_rank[::2], of_rank[1::2], strict=True):
            assert once["losses"] == again["losses"], choice
            assert torch.equal(once["state"], again["state"]), choice
            assert once["scores"] == again["scores"], choice
            assert again["bytes"] >= once["bytes"]
        more = sum(run["bytes"] for run in of_rank[1::2]) - sum(run["bytes"] for run in of_rank[::2])
        assert (more > 0) == (parts > 1)


def test_bfloat16_sends_half_the_bytes_of_float32(ranks: RankPool, shards: Any) -> None:
    def sent(dtype: str) -> int:
        runs = [
            (shards(False, 3), config_of(DEFAULT | {"model": model, "parts": 3, "dtype": dtype})) for model in MODELS
        ]
        return sum(found["bytes"] for of_rank in ranks.run(3, train, runs) for found in of_rank)

    assert 4 * sent("bfloat16") == 2 * sent("float32") == sent("float64") > 0


def test_what_is_pruned_and_covered_is_less(ranks: RankPool, shards: Any) -> None:
    def run(**options: Any) -> dict[str, Any]:
        choice = DEFAULT | {"layer0": "exchange", "parts": 3} | options
        return {
            name: sum(np.asarray(rank[0][name]) for rank in by_rank)
            for by_rank in [ranks.run(3, train, [(shards(False, 3), config_of(choice))])]
            for name in ("bytes", "rows")
        }

    plain, covered = run(plan="halo", prune=False), run(plan="cover", prune=False)
    pruned = run(plan="cover", prune=True)
    assert list(plain["rows"]) == [NODES] * LAYERS
    assert plain["bytes"] > covered["bytes"] > pruned["bytes"]
    assert pruned["rows"][-1] == 6  # the last layer gives the training nodes alone
    for rows in pruned["rows"]:
        assert rows == NODES or rows <= (1 - PRUNE_SHARE) * NODES
    # Below a batch norm every node counts.
    assert list(run(norm="batch")["rows"]) == [NODES] * (LAYERS - 1) + [6]
