"""Cora's public split through the command line: accuracy, what a run leaves behind, and torchrun's own launcher."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from torch.distributed.run import parse_args as parse_torchrun

from fullgraph.__main__ import Train
from fullgraph.config import TrainConfig
from fullgraph.shards import read_shard
from fullgraph.trainer import make_trainer
from fullgraph.world import World
from tests.data import SHARED, needs_data

SEEDS = (1, 2)
# The hyper-parameters of Kipf and Welling 2017.
GCN: dict[str, Any] = {
    "model": "gcn",
    "layers": 2,
    "hidden": 16,
    "dropout": 0.5,
    "input_dropout": 0.5,
    "feature_norm": "row",
    "lr": 0.01,
    "weight_decay": 5e-4,
    "epochs": 200,
}
ALWAYS = {"epoch", "loss", "seconds", "comm_seconds", "bytes_sent"}
EVALUATED = {"train", "val", "test"}
TORCHRUN = ("--standalone", "--nproc-per-node", "2", "-m", "fullgraph")


@dataclass(frozen=True)
class Run:
    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Run:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        config, summary = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "summary"))
        return cls(folder, config, [json.loads(line) for line in lines], summary)

    def state(self, name: str) -> dict[str, Any]:
        return torch.load(self.folder / name, weights_only=True)  # type: ignore[no-any-return]


def flags(**changes: Any) -> list[str]:
    return [text for name, value in (GCN | changes).items() for text in (f"--{name.replace('_', '-')}", str(value))]


def python(module: str, *arguments: object) -> str:
    """The output of ``python -m MODULE ARGUMENTS``, which must succeed."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cora") / "shards"
    python("partition_tools", "build", SHARED / "planetoid" / "ind.cora", "--parts", 2, "--out", out)
    return out


@pytest.fixture(scope="module")
def runs(shards: Path) -> dict[int, Run]:
    folders = {seed: shards.parent / f"run-{seed}" for seed in SEEDS}
    for seed, folder in folders.items():
        python("fullgraph", "train", shards, "--run", folder, *flags(seed=seed))
    return {seed: Run.read(folder) for seed, folder in folders.items()}


def test_torchrun_passes_on_every_flag_but_run(capsys: pytest.CaptureFixture[str]) -> None:
    """torchrun's parser takes unfinished names of its own options even behind the module: ``--run`` is two of them."""
    with pytest.raises(SystemExit):
        tyro.cli(Train, args=["--help"])
    names = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", capsys.readouterr().out))
    assert {"--model", "--run", "--run-dir", "--no-residual"} <= names

    def passes(flag: str) -> bool:
        try:
            parsed = parse_torchrun([*TORCHRUN, "train", "DIR", flag, "1"])
        except SystemExit:
            return False
        ours: list[str] = parsed.training_script_args
        return ours == ["train", "DIR", flag, "1"] and parsed.nproc_per_node == "2"

    assert {name for name in names if not passes(name)} == {"--run"}


@needs_data
def test_accuracy_on_two_ranks(runs: dict[int, Run]) -> None:
    accuracies = [run.summary["test"]["accuracy"] for run in runs.values()]
    assert min(accuracies) >= 0.79
    assert sum(accuracies) / len(accuracies) >= 0.80
    assert runs[1].metrics[-1]["loss"] != runs[2].metrics[-1]["loss"]


@needs_data
def test_metrics_have_a_line_an_epoch(runs: dict[int, Run]) -> None:
    for run in runs.values():
        assert [line["epoch"] for line in run.metrics] == list(range(GCN["epochs"]))
        for line in run.metrics:
            assert set(line) == ALWAYS | EVALUATED
            assert 0 <= line["comm_seconds"] <= line["seconds"]
            assert line["bytes_sent"] == run.metrics[0]["bytes_sent"] > 0
            assert all(set(line[split]) >= {"loss", "accuracy", "micro_f1"} for split in EVALUATED)
        assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]


@needs_data
def test_summary_is_the_first_epoch_of_best_validation(runs: dict[int, Run]) -> None:
    for run in runs.values():
        validation = [line["val"]["accuracy"] for line in run.metrics]
        best = validation.index(max(validation))
        expected = {
            "best_epoch": best,
            "val": run.metrics[best]["val"],
            "test": run.metrics[best]["test"],
            "epochs": GCN["epochs"],
            "bytes_sent_per_epoch": run.metrics[0]["bytes_sent"],
            "parts": 2,
            "ranks": 2,
        }
        assert {name: run.summary[name] for name in expected} == expected
        assert run.summary["seconds_per_epoch"] > 0
        assert run.summary["peak_memory_bytes"] > 2**20


@needs_data
def test_config_tells_what_was_run(runs: dict[int, Run], shards: Path) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    for seed, run in runs.items():
        asked = GCN | {"seed": seed}
        assert {name: run.config[name] for name in asked} == asked
        assert run.config["shards"] == str(shards)
        assert run.config["build_id"] == manifest["build_id"]
        assert (run.config["ranks"], run.config["metric"]) == (2, "accuracy")
        assert sorted(entry.name for entry in run.folder.iterdir()) == [
            "best.pt",
            "config.json",
            "last.pt",
            "metrics.jsonl",
            "summary.json",
        ]


@needs_data
def test_best_state_scores_the_same_in_one_process(runs: dict[int, Run], shards: Path) -> None:
    whole = shards.parent / "whole"
    python("partition_tools", "build", SHARED / "planetoid" / "ind.cora", "--parts", 1, "--out", whole)
    shard = read_shard(whole, 0)
    for run in runs.values():
        state = run.state("best.pt")
        trainer = make_trainer(shard, TrainConfig(**state["config"]), World())
        trainer.model.load_state_dict(state["model"])
        scores = trainer.evaluate()
        # Another order of summation may turn a node that stands on the edge.
        assert scores["test"]["accuracy"] == pytest.approx(run.summary["test"]["accuracy"], abs=0.0011)
        assert scores["val"]["loss"] == pytest.approx(run.summary["val"]["loss"], rel=1e-5)


@needs_data
def test_states_are_tensors_and_plain_values(runs: dict[int, Run]) -> None:
    for run in runs.values():
        best, last = run.state("best.pt"), run.state("last.pt")
        assert (best["epoch"], last["epoch"]) == (run.summary["best_epoch"], GCN["epochs"] - 1)
        assert best["model"].keys() == last["model"].keys()
        assert best["build_id"] == last["build_id"] == run.config["build_id"]
        assert best["config"] == last["config"]
        assert len(last["optimizer"]["state"]) == len(last["model"])


@needs_data
def test_torchrun_gives_the_same_losses(runs: dict[int, Run], shards: Path) -> None:
    folder = shards.parent / "torchrun"
    options = flags(seed=1, epochs=5, eval_every=2)
    python("torch.distributed.run", *TORCHRUN, "train", shards, "--run-dir", folder, *options)
    run = Run.read(folder)
    losses = [line["loss"] for line in run.metrics]
    assert losses == pytest.approx([line["loss"] for line in runs[1].metrics[:5]], rel=1e-5)
    # Every second epoch is evaluated, and the last.
    assert [set(line) >= EVALUATED for line in run.metrics] == [False, True, False, True, True]
    assert all(set(line) == ALWAYS for line in run.metrics[::2][:2])
    assert run.summary["ranks"] == 2
