"""The memory that training is said to need is what its tensors take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullgraph import buffers, footprint
from fullgraph.config import TrainConfig
from fullgraph.footprint import LayerRows, RankRows, memory_by_tensor
from fullgraph.loading import load_shard
from fullgraph.trainer import Trainer, make_trainer
from fullgraph.world import World
from partition_tools.builder import build
from partition_tools.sources import load
from tests.builds import assignment

SPEC = "demo:communities?nodes=2000&degree=8&features=20&classes=6&train=0.05"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "shards"
    build(load(SPEC), assignment(np.zeros(2000, np.int32), 1), folder)
    return folder


def rank_rows(trainer: Trainer) -> RankRows:
    """The counts of a trainer that is alone."""
    part = trainer.part
    assert part.training is not None
    layers = tuple(
        LayerRows(n_in=plan.n_in, n_out=plan.n_out, edges=plan.num_edges, halo=0, sent=0, received=0)
        for plan, _ in part.training
    )
    graph = part.whole.graph
    return RankRows(owned=graph.n, halo=0, edges=graph.indices.shape[0], layers=layers, train=len(trainer.train_rows))


def kept_for_backward(trainer: Trainer) -> int:
    """Bytes that autograd holds after a forward pass, parameters and features not counted."""
    part = trainer.part
    trainer.gradients(0)  # makes what stays
    known = [*trainer.learnt, part.x, part.degrees.in_weight, trainer.y, *part.masks.values(), trainer.train_rows]
    known += list(part.input._aggregates.values()) + [kept.rows for kept in part.input._kept.values()]
    others = {t.untyped_storage().data_ptr() for t in known if isinstance(t, torch.Tensor)}
    found: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        first = torch._C._current_graph_task_id() < 0  # not what backward computes again
        if first and storage.data_ptr() not in others:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        trainer.gradients(1)
    return sum(found.values())


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide": {"hidden": 48},
    "norm": {"norm": "layer", "layers": 3},
    "residual": {"residual": True, "layers": 3, "prune": False},
    "input dropout": {"input_dropout": 0.3, "layer0": "exchange"},
    "float64": {"dtype": "float64", "dropout": 0.0},
    "bfloat16": {"dtype": "bfloat16"},
    "recompute": {"recompute": True, "layers": 3},
    "recompute norm": {"recompute": True, "layers": 3, "norm": "layer"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
def test_what_is_kept_for_backward(model: Any, way: str, shards: Path) -> None:
    config = TrainConfig(**{"model": model, "hidden": 16, "heads": 2, **WAYS[way]})
    world = World()
    trainer = make_trainer(load_shard(shards, world).shard, config, world)
    told = memory_by_tensor(config, rank_rows(trainer), features=20, outputs=6, layer0=trainer.part.input.mode)
    kept = sum(value for name, value in told.items() if name.startswith("layer "))
    loss = 3 * len(trainer.train_rows) * 6 * torch.get_default_dtype().itemsize
    found = kept_for_backward(trainer)
    assert abs(found - kept) <= 0.1 * kept + loss + 4 * 2000, (found, told)
    weights = sum(p.numel() * p.element_size() for p in trainer.parameters)
    assert told["weights"] == weights
    trainer.step(0)
    state = sum(v.numel() * v.element_size() for s in trainer.optimizer.state.values() for v in s.values() if v.ndim)
    assert told["optimiser state"] == state


@pytest.mark.parametrize("way", ["plain", "wide", "norm"])
@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
def test_buffers_that_are_reused(model: Any, way: str, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_SMALLEST", 1)
    monkeypatch.setattr(footprint, "_SMALLEST_BUFFER", 1)
    config, world = TrainConfig(**{"model": model, "hidden": 16, "heads": 2, **WAYS[way]}), World()
    trainer = make_trainer(load_shard(shards, world).shard, config, world)
    for step in range(2):
        trainer.step(step)
    trainer.evaluate()
    rank = rank_rows(trainer)
    widths = [20] + [config.hidden] * (config.layers - 1) + [6]
    told = footprint._Step(config, widths, rank, 4, trainer.part.input.mode, False, False)
    told.train()
    told.evaluate()
    assert told.memory._kept == pytest.approx(world.buffers.bytes_kept, rel=0.15)
