"""What is refused before any rank starts, and that it is what the ranks would refuse."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullgraph.__main__
from fullgraph.checks import GraphFacts, check_training
from fullgraph.config import TrainConfig
from fullgraph.loop import train
from fullgraph.shards import read_manifest, read_shard
from partition_tools import Graph, build, partition
from tests.graphs import CASES, random_graph

GRAPH = random_graph("any", nodes=30, edges=90)
Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds of graphs that lack something, in two parts, and a run on the whole one in one part."""
    out = tmp_path_factory.mktemp("checks")
    assert GRAPH.splits is not None
    empty = np.zeros_like(GRAPH.splits.train)
    graphs = {
        "whole": GRAPH,
        "no-labels": dataclasses.replace(GRAPH, y=None),
        "no-splits": dataclasses.replace(GRAPH, splits=None),
        "no-features": dataclasses.replace(GRAPH, x=None),
        "learned": dataclasses.replace(GRAPH, x=None, learned_features=3),
        "no-train": dataclasses.replace(GRAPH, splits=dataclasses.replace(GRAPH.splits, train=empty)),
        "no-val": dataclasses.replace(GRAPH, splits=dataclasses.replace(GRAPH.splits, val=empty)),
        "narrow": dataclasses.replace(GRAPH, x=np.ones((30, 2))),
        "targets": dataclasses.replace(GRAPH, y=np.linspace(0, 1, 30)),
    }
    for name, graph in graphs.items():
        build(graph, partition(graph, 2, "contiguous"), out / name)
    build(GRAPH, partition(GRAPH, 1), out / "one")
    build(graphs["targets"], partition(graphs["targets"], 1), out / "one-target")
    config = TrainConfig(epochs=1, hidden=4, layers=1)
    train(out / "one", config, run=out / "run")
    train(out / "one-target", config, run=out / "run-of-targets")
    return out


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command where no rank may start; returns exit code and standard error."""

    def start(*_: Any, **__: Any) -> int:
        raise AssertionError("a rank was started")

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fullgraph", *arguments])
        error = io.StringIO()
        with contextlib.redirect_stderr(error), pytest.raises(SystemExit) as end:
            fullgraph.__main__.main()
        assert isinstance(end.value.code, int)
        return end.value.code, error.getvalue()

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("fullgraph.launch.launch_local", start)
    monkeypatch.setattr("fullgraph.world.open_world", start)
    monkeypatch.chdir(folder)
    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train no-labels", "graph any has no labels, which training and scores need; build it again with some"),
        ("train no-splits", "graph any has no split into train, val and test; build it again with --random-split"),
        ("train no-features", "graph any has no node features; build it again with some: --features FILE"),
        ("train no-train", "split 0 of graph any has no training nodes; take another --split, or build it again"),
        ("train no-val --patience 3", "--patience 3 needs validation nodes, and split 0 has none; leave it out"),
        ("train no-val --scheduler plateau", "--scheduler plateau needs validation nodes"),
        ("train whole", "graph any has 2 splits; say which one to train on: --split 0 to 1"),
        ("train whole --split 2", "--split 2: graph any has 2 splits; expected 0 to 1"),
        ("train whole --metric mae", "--metric mae does not fit a single-label task"),
        ("train whole --metric roc_auc", "--metric roc_auc needs 2 classes"),
        ("train whole --task multi-label", "--task multi-label does not fit the graph's labels"),
        ("train targets --class-weights balanced", "--class-weights balanced is for single-label targets"),
        ("train learned --inductive", "--inductive: the 3 features of graph any are learned"),
        ("train learned --layer0 once", "--layer0 once: the 3 features"),
        ("train whole --run run", "run already holds a run; name another folder with --run"),
        ("train whole --run .", " is not empty; name another folder with --run"),
        ("train whole --run run/config.json", "run/config.json is a file; name a folder with --run"),
        ("train nothing", "nothing: no such folder"),
        ("predict whole --run nothing --out p.csv", "nothing is not a run folder: it has no config.json"),
        ("predict whole --run run --out p.txt", "--out p.txt: the name must end in .npy, .h5, .csv"),
        ("predict whole --run run --out no/p.csv", "--out no/p.csv: the folder no does not exist"),
        ("predict whole --run run --out p.csv --probabilities --embeddings", "exclude each other"),
        ("predict targets --run run-of-targets --out p.csv --probabilities", "a regression model has none"),
        ("predict narrow --run run --out p.csv", "takes 10 features, but narrow holds 2"),
        ("predict whole --run run --out p.csv --graph narrow", "takes 10 features, but narrow holds 2"),
        ("predict learned --run run --out p.csv", "takes 10 features, but learned holds 3 learned"),
        ("evaluate no-labels --run run", "graph any has no labels, which training and scores need"),
        ("evaluate whole --run run --split 2", "--split 2: graph any has 2 splits; expected 0 to 1"),
        ("evaluate whole --run run --split -1", "--split -1: graph any has 2 splits; expected 0 to 1"),
        (
            "evaluate targets --run run-of-targets --confusion",
            "--confusion is for single-label targets; these are",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_rank_starts(
    command: Command, folder: Path, arguments: str, message: str
) -> None:
    code, error = command(*arguments.split())
    assert code == 2
    assert error.startswith("fullgraph: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_run_that_did_not_end_is_named(command: Command, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "run" / "config.json").read_text())
    code, error = command("predict", "whole", "--run", str(tmp_path), "--out", str(tmp_path / "p.npy"))
    assert code == 2
    assert "best.pt does not exist; the run did not end" in error


@pytest.mark.parametrize("name", CASES)
def test_a_manifest_tells_what_the_shards_tell(name: str, tmp_path: Path) -> None:
    graph = CASES[name].graph
    build(graph, partition(graph, 2, "contiguous"), tmp_path / "s")
    manifest = read_manifest(tmp_path / "s")
    by_manifest = GraphFacts.of_manifest(manifest)
    for q in range(2):
        assert dataclasses.replace(by_manifest, split_counts=()) == GraphFacts.of_shard(read_shard(tmp_path / "s", q))
    assert len(by_manifest.split_counts) == by_manifest.num_splits
    check_training(by_manifest, TrainConfig())


def test_a_manifest_that_says_little_is_not_refused(tmp_path: Path) -> None:
    build(GRAPH, partition(GRAPH, 1), tmp_path / "s")
    record = json.loads((tmp_path / "s" / "manifest.json").read_text())
    del record["graph"]["split_counts"]
    (tmp_path / "s" / "manifest.json").write_text(json.dumps(record))
    check_training(GraphFacts.of_manifest(read_manifest(tmp_path / "s")), TrainConfig(patience=3))


def test_a_graph_checks_itself() -> None:
    with pytest.raises(ValueError, match="class_names has 1 names"):
        Graph(
            name="g",
            num_nodes=2,
            src=np.array([0]),
            dst=np.array([1]),
            y=np.array([0, 1]),
            class_names=np.array(["a"]),
        )
