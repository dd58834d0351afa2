"""Estimates before a build: of its memory, and of each rank's training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import partition_tools.memory as memory_module
from fullgraph.config import TrainConfig
from fullgraph.cost import Machine
from fullgraph.loading import load_shard
from fullgraph.memory import _predicted
from fullgraph.trainer import make_trainer
from fullgraph.world import World
from partition_tools.__main__ import main
from partition_tools.assign import AssignOptions
from partition_tools.builder import build
from partition_tools.estimate import training
from partition_tools.memory import build_need, require_memory
from partition_tools.sources import load
from partition_tools.summary import summarise
from tests.builds import assignment

SPEC = "demo:communities?nodes=2000&degree=8&features=20&classes=6&train=0.05"


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_what_is_told_offline_is_what_the_trainer_tells(model: Any, tmp_path: Path) -> None:
    graph = load(SPEC)
    alone = assignment(np.zeros(2000, np.int32), 1)
    build(graph, alone, tmp_path / "shards")
    config = TrainConfig(model=model, hidden=16)
    (rank,), seconds = training(graph, summarise(graph), alone, config, Machine())
    trainer = make_trainer(load_shard(tmp_path / "shards", World()).shard, config, World())
    assert rank.tensors == _predicted(trainer)
    assert seconds > 0
    assert rank.bytes_sent == 0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["estimate", SPEC, "--parts", "3", "--model", "gin", "--hidden", "24"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(rank["nodes"] for rank in told["ranks"]) == 2000
    assert all(rank["memory"] > sum(rank["tensors"].values()) > 0 for rank in told["ranks"])
    assert told["need"]["most"] > told["need"]["held"]
    assert main(arguments) == 0
    assert "training gin, 2 layers, hidden 24" in capsys.readouterr().out


def test_a_build_that_cannot_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, options = load(SPEC), AssignOptions(parts=2)
    need = build_need(graph, options)
    assert need.partition > max(need.prepare, need.build)
    monkeypatch.setattr(memory_module, "available_memory", lambda: max(need.prepare, need.build) + 1)
    with pytest.raises(ValueError, match=r"the build takes up to .* MiB more of memory .*--method random, contiguous"):
        require_memory(graph, options)
    assert "now free" in require_memory(graph, options, refuse=False)
    assert "memory: at most" in require_memory(graph, AssignOptions(parts=2, method="random"))


def test_a_refused_build_says_so_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_module, "available_memory", lambda: 1000)
    assert main(["build", SPEC, "--parts", "2", "--out", str(tmp_path / "s")]) == 2
    assert "but 0 MiB are free" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["build", SPEC, "--parts", "2", "--out", str(tmp_path / "s"), "--no-memory-check"]) == 0
