"""Training runs on one and two ranks: what stops them, what they leave, and every error before they start."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from fullgraph.config import TrainConfig
from fullgraph.loading import load_shard
from fullgraph.loop import train
from fullgraph.runlog import RunLog
from fullgraph.shards import part_name, read_manifest
from fullgraph.trainer import make_trainer
from fullgraph.world import RankError, World
from partition_tools.builder import build
from partition_tools.graph import Graph
from tests.builds import assignment, change, put, refresh_manifest
from tests.graphs import CASES, random_graph, train_on
from tests.ranks import RankPool

GRAPH = random_graph("any", nodes=60, undirected=True, edges=120, features=8, seed=21)
QUICK: dict[str, Any] = {"model": "gcn", "hidden": 8, "epochs": 6, "lr": 0.05, "dtype": "float64", "seed": 3}


def build_parts(graph: Graph, folder: Path, parts: int, seed: int = 0) -> Path:
    part = np.random.default_rng(seed).permutation(graph.num_nodes) % parts
    build(graph, assignment(part, parts), folder / f"{graph.name} {parts} {seed}")
    return folder / f"{graph.name} {parts} {seed}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def shards(folder: Path) -> dict[int, Path]:
    """By number of parts."""
    return {parts: build_parts(GRAPH, folder, parts) for parts in (1, 2, 3)}


@pytest.fixture
def damaged(shards: dict[int, Path], tmp_path: Path) -> Path:
    """A copy of the two parts, to be damaged."""
    return shutil.copytree(shards[2], tmp_path / "damaged")


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**QUICK | changes)


@dataclass(frozen=True)
class Run:
    """What a rank brings back, and what lies in the run folder."""

    summary: dict[str, Any]
    losses: tuple[float, ...]
    shown: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def state(self, name: str) -> dict[str, Any]:
        return torch.load(self.folder / name, weights_only=True)  # type: ignore[no-any-return]


def train_here(
    world: World, folders: list[Path], run: Path | None, options: TrainConfig, factory: Any = None
) -> Run | str:
    """A run on this rank's folder of shards, or the text of the error that ended it."""
    console = Console(quiet=world.rank != 0, width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    try:
        result = train(
            folders[world.rank % len(folders)], options, run=run, world=world, model=factory, console=console
        )
    except RankError as error:
        return str(error)
    return Run(result.summary, result.losses, console.export_text(), result.run)


def run_on(ranks: RankPool, size: int, shards: Path, run: Path, factory: Any = None, **options: Any) -> Run:
    first, *others = ranks.run(size, train_here, [shards], run, config(**options), factory)
    assert isinstance(first, Run), first
    assert all(other.losses == first.losses for other in others)
    return first


# ---------------------------------------------------------------------------------------------- errors at the start


def error_on(
    ranks: RankPool, size: int, *folders: Path, run: Path | None = None, factory: Any = None, **options: Any
) -> str:
    """The one error of all ranks."""
    run = run or folders[0].parent / "refused"
    found = ranks.run(size, train_here, list(folders), run, config(**options), factory)
    assert all(isinstance(text, str) for text in found), found
    assert len(set(found)) == 1, found
    assert not (run / "metrics.jsonl").exists()
    return str(found[0])


@pytest.mark.parametrize(("parts", "size"), [(2, 3), (1, 2)])
def test_more_ranks_than_parts(ranks: RankPool, shards: dict[int, Path], parts: int, size: int) -> None:
    text = error_on(ranks, size, shards[parts])
    assert f"{shards[parts]} holds {parts} part{'s' * (parts > 1)} but {size} ranks were started" in text
    assert f"torchrun --nproc-per-node {parts}" in text
    assert f"build again with --parts {size}" in text


def test_ranks_that_read_different_builds(ranks: RankPool, shards: dict[int, Path], folder: Path) -> None:
    other = build_parts(GRAPH, folder, 2, seed=1)
    text = error_on(ranks, 2, shards[2], other)
    ids = [read_manifest(path).build_id for path in (shards[2], other)]
    assert f"rank 0 reads build {ids[0]} but rank 1 reads build {ids[1]}" in text
    assert "copy them again" in text


def test_a_shard_of_another_build(ranks: RankPool, damaged: Path, folder: Path) -> None:
    other = build_parts(GRAPH, folder, 2, seed=2)
    shutil.copy(other / part_name(1, 2), damaged)
    # As it is, it has another checksum; with the manifest made to agree, it still says where it is from.
    for _ in range(2):
        text = error_on(ranks, 2, damaged)
        assert text.startswith(f"load (rank 1): {damaged / part_name(1, 2)}: ")
        assert read_manifest(other).build_id in text
        assert read_manifest(damaged).build_id in text
        refresh_manifest(damaged)
    assert "belongs to another build" in text


def test_parts_that_changed_places(ranks: RankPool, damaged: Path) -> None:
    names = [part_name(part, 2) for part in range(2)]
    (damaged / names[0]).rename(damaged / "x")
    (damaged / names[1]).rename(damaged / names[0])
    (damaged / "x").rename(damaged / names[1])
    refresh_manifest(damaged)
    text = error_on(ranks, 2, damaged)
    assert "rank 0: " in text
    assert "rank 1: " in text
    assert "part is 1, but the manifest says 0" in text


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: path.unlink(), "the manifest lists this file, but it is not there"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes; the manifest says"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9] + b"\xff" + path.read_bytes()[-8:]), "checksum is"),
        (lambda path: path.write_bytes(b""), "0 bytes; the manifest says"),
    ],
    ids=["missing", "truncated", "altered", "empty"],
)
def test_a_damaged_shard(ranks: RankPool, damaged: Path, damage: Callable[[Path], None], text: str) -> None:
    path = damaged / part_name(1, 2)
    damage(path)
    found = error_on(ranks, 2, damaged)
    who = "rank 1" if path.exists() else "all ranks"  # what is there one rank reads, what is not all miss
    assert found.startswith(f"load ({who}): {path}: ")
    assert text in found
    assert "copy the file again from where it was built, or build the folder again" in found


def test_a_folder_that_is_none_of_shards(ranks: RankPool, shards: dict[int, Path], tmp_path: Path) -> None:
    graph = tmp_path / "graph.npz"
    np.savez(graph, edge_index=np.zeros((2, 1), np.int64))
    (tmp_path / "empty").mkdir()
    (tmp_path / "unfinished").mkdir()
    shutil.copy(shards[2] / part_name(0, 2), tmp_path / "unfinished")
    for path, text in {
        graph: f"if it is a graph, partition it first: partition-tools build {graph} --parts P --out DIR",
        tmp_path / "absent": "no such folder; build it: partition-tools build",
        tmp_path / "empty": "not a folder of shards",
        tmp_path / "unfinished": "has parts but no manifest.json",
        shards[2].parent: "there is one in",
    }.items():
        found = error_on(ranks, 2, path, run=tmp_path / "run")
        assert found.startswith(f"load (all ranks): {path}")
        assert text in found


def test_one_rank_that_does_not_see_the_folder(ranks: RankPool, shards: dict[int, Path], tmp_path: Path) -> None:
    text = error_on(ranks, 2, shards[2], tmp_path / "elsewhere")
    assert text.startswith(f"load (rank 1): {tmp_path / 'elsewhere'}: no such folder")


def shift(dataset: str, at: int, by: int) -> Callable[[h5py.File], None]:
    return put(dataset, at, lambda value: value + by)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (shift("halo/index", -1, 1000), "of part 1, which has only 30 nodes there"),
        (shift("halo/index", -1, 1), "of part 1, which has "),
        (shift("halo/global_id", -1, 1), "of part 1, which has node "),
    ],
    ids=["past the end", "one on", "another node"],
)
def test_halo_lists_that_do_not_fit(
    ranks: RankPool, folder: Path, tmp_path: Path, edit: Callable[[h5py.File], None], text: str
) -> None:
    # Part 0 has the first half of the nodes, so that the last halo node can be another one of part 1's.
    part = (np.arange(GRAPH.num_nodes) >= 30).astype(np.int32)
    src, dst = GRAPH.src.copy(), GRAPH.dst.copy()
    inside = (src < 58) & (dst < 58)
    graph = dataclasses.replace(GRAPH, src=src[inside], dst=dst[inside])
    build(graph, assignment(part, 2), tmp_path / "s")
    change(tmp_path / "s", 0, edit)
    found = error_on(ranks, 2, tmp_path / "s")
    assert found.startswith("plan (rank 1): part 0 expects node ")
    assert text in found
    assert "the shards do not fit together: build them again" in found


GRAPHS: dict[str, tuple[Graph, str]] = {
    "no features": (dataclasses.replace(GRAPH, x=None), "graph any has no node features; build it again with some"),
    "no labels": (dataclasses.replace(GRAPH, y=None), "graph any has no labels, which training and scores need"),
    "no split": (
        dataclasses.replace(GRAPH, splits=None),
        "graph any has no split into train, val and test",
    ),
    "no training nodes": (
        train_on(GRAPH, np.zeros(GRAPH.num_nodes, np.bool_)),
        "split 0 has no training nodes; take another, or build it again",
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_that_lacks_something(ranks: RankPool, tmp_path: Path, name: str) -> None:
    graph, text = GRAPHS[name]
    assert text in error_on(ranks, 2, build_parts(graph, tmp_path, 2))


def test_a_label_that_is_missing_in_a_mask(ranks: RankPool, damaged: Path) -> None:
    with h5py.File(damaged / part_name(1, 2)) as file:
        at = int(np.flatnonzero(file["splits/val"][1])[0])
        node = int(file["owned/global_id"][at])
    change(damaged, 1, put("labels/y", at, -1))
    text = error_on(ranks, 2, damaged, split=1)
    assert text == (
        f"load (rank 1): part 1: 1 node of the val mask of split 1 has no label, first node {node}; build again from "
        f"a graph whose masks cover labelled nodes"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"split": 2}, "options (all ranks): --split 2: graph any has 2 splits; expected 0 to 1"),
        ({"metric": "mae"}, "options (all ranks): --metric mae does not fit a single-label task; it has accuracy"),
        ({"metric": "roc_auc"}, "--metric roc_auc needs 2 classes or multi-label targets; the graph has 4 classes"),
        ({"task": "multi-label"}, "--task multi-label does not fit the graph's labels, which are single-label"),
        ({"task": "regression", "class_weights": "balanced"}, "--class-weights balanced is for single-label targets"),
    ],
)
def test_an_option_that_does_not_fit(ranks: RankPool, shards: dict[int, Path], options: Any, text: str) -> None:
    assert text in error_on(ranks, 2, shards[2], **options)


@pytest.mark.parametrize("options", [{"patience": 3}, {"scheduler": "plateau"}])
def test_an_option_that_needs_validation_nodes(ranks: RankPool, tmp_path: Path, options: Any) -> None:
    assert GRAPH.splits is not None
    splits = dataclasses.replace(GRAPH.splits, val=np.zeros_like(GRAPH.splits.val))
    shards = build_parts(dataclasses.replace(GRAPH, splits=splits), tmp_path, 2)
    text = error_on(ranks, 2, shards, **options)
    assert "needs validation nodes, and split 0 has none; leave it out" in text


def differently_started(world: World, folder: Path) -> str | Run:
    return train_here(world, [folder], None, config(dropout=0.5 + 0.1 * world.rank, threads=world.rank + 1))


def test_ranks_that_were_started_differently(ranks: RankPool, shards: dict[int, Path]) -> None:
    text = (
        "options: rank 0 was started with --dropout 0.5, rank 1 with --dropout 0.6; start all ranks with the same "
        "options"
    )
    assert ranks.run(2, differently_started, shards[2]) == [text] * 2


def test_a_run_folder_that_cannot_be_one(ranks: RankPool, shards: dict[int, Path], tmp_path: Path) -> None:
    used, file = tmp_path / "used", tmp_path / "file"
    used.mkdir()
    (used / "config.json").write_text("{}")
    file.write_text("")
    for run, text in {
        used: f"{used} already holds a run; name another folder with --run, or remove it first",
        file: f"{file}",
        file / "below": f"{file / 'below'}",
    }.items():
        found = error_on(ranks, 2, shards[2], run=run)
        assert found.startswith("run folder (rank 0): ")
        assert text in found


# ---------------------------------------------------------------------------------------------- models of a user's own


class Mean(nn.Module):
    """Two mean aggregations; ``start`` is added to the first weight."""

    def __init__(self, features: int, outputs: int, start: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, 6), nn.Linear(6, outputs)
        with torch.no_grad():
            self.first.weight += start

    def forward(self, x: Tensor, views: Any) -> Tensor:
        x = views[0].dropout(torch.relu(views[0].propagate(self.first(x), "mean")), 0.3)
        return self.second(views[1].propagate(x, "gcn")) + 0 * views[1].with_halo(x).sum()


class Deep(Mean):
    num_layers = 2


class Unlike(Mean):
    """Draws weights from what is not torch's generator."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__(features, outputs, start=float(os.getpid()))


class Signalled(Deep):
    """Rank 1 gets a signal in the third step."""

    def forward(self, x: Tensor, views: Any) -> Tensor:
        if views[0].training and views[0].this_pass.step == 2 and views[0].plan.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(x, views)


def test_weights_that_differ_are_refused(ranks: RankPool, shards: dict[int, Path]) -> None:
    text = error_on(ranks, 3, shards[3], factory=Unlike)
    assert text.startswith("model: ranks 0 and 1 start from different weights")
    assert "from torch's generator alone" in text


def test_a_run_that_compares_every_step_is_the_same_run(
    ranks: RankPool, shards: dict[int, Path], tmp_path: Path
) -> None:
    plain, compared = (run_on(ranks, 3, shards[3], tmp_path / str(on), epochs=3, debug=on) for on in (False, True))
    assert compared.losses == plain.losses


def initial_weights(world: World, folder: Path, options: TrainConfig) -> list[Tensor]:
    torch.manual_seed(world.rank)  # of no consequence
    torch.rand(world.rank)
    shard = load_shard(folder, world).shard
    return list(make_trainer(shard, options, world).model.state_dict().values())


def test_initial_weights_are_those_of_the_seed(ranks: RankPool, shards: dict[int, Path]) -> None:
    one = ranks.run(1, initial_weights, shards[1], config())[0]
    for weights in ranks.run(3, initial_weights, shards[3], config()):
        assert all(torch.equal(a, b) for a, b in zip(weights, one, strict=True))
    other = ranks.run(1, initial_weights, shards[1], config(seed=4))[0]
    assert not torch.equal(one[0], other[0])


def test_a_model_without_num_layers_is_not_pruned(ranks: RankPool, shards: dict[int, Path], tmp_path: Path) -> None:
    runs = [
        run_on(ranks, size, shards[size], tmp_path / f"{model.__name__}{size}", model)
        for size in (1, 2)
        for model in (Mean, Deep)
    ]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-12)
    assert "not pruned: the model does not declare num_layers" in runs[2].shown
    assert "nodes computed by layer" in runs[3].shown
    assert runs[2].summary["bytes_sent_per_epoch"] > runs[3].summary["bytes_sent_per_epoch"] > 0
    assert "Mean of" in runs[2].shown


# ------------------------------------------------------------------------------------------------- what a run leaves


METRICS = {"epoch", "loss", "seconds", "comm_seconds", "bytes_sent"}
SUMMARY = {
    "best_epoch",
    "val",
    "test",
    "epochs",
    "seconds_per_epoch",
    "bytes_sent_per_epoch",
    "peak_memory_bytes",
    "parts",
    "ranks",
}
SPLITS = {"train", "val", "test"}


def test_fields_of_the_files(ranks: RankPool, shards: dict[int, Path], tmp_path: Path) -> None:
    run = run_on(ranks, 2, shards[2], tmp_path / "run", eval_every=4)
    assert [set(line) for line in run.metrics] == [
        METRICS | (SPLITS if epoch in (3, 5) else set()) for epoch in range(6)
    ]
    assert [line["loss"] for line in run.metrics] == list(run.losses)
    for line in run.metrics:
        assert type(line["bytes_sent"]) is int
        assert 0 <= line["comm_seconds"] <= line["seconds"]
        assert all(set(line[split]) == {"loss", "accuracy", "micro_f1"} for split in SPLITS & set(line))
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary == run.summary
    assert set(summary) == SUMMARY | {"metric", "total_seconds", "stopped_by"}
    best = summary["best_epoch"]
    assert best in (3, 5)
    assert (summary["val"], summary["test"]) == (run.metrics[best]["val"], run.metrics[best]["test"])
    assert (summary["epochs"], summary["parts"], summary["ranks"], summary["stopped_by"]) == (6, 2, 2, None)
    assert summary["bytes_sent_per_epoch"] == run.metrics[0]["bytes_sent"]
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "best.pt",
        "config.json",
        "last.pt",
        "metrics.jsonl",
        "summary.json",
    ]


def test_a_run_without_a_name_goes_to_a_new_folder(
    ranks: RankPool, shards: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ranks.run(2, train_in, tmp_path, [shards[2]])
    assert found[0] == found[1]
    assert found[0].parent == Path("runs")
    assert found[0].name.startswith("any-gcn-20")
    assert (tmp_path / found[0] / "summary.json").is_file()


def train_in(world: World, place: Path, folders: list[Path]) -> Path:
    before = Path.cwd()
    os.chdir(place)
    try:
        run = train_here(world, folders, None, config(epochs=1))
    finally:
        os.chdir(before)
    assert isinstance(run, Run), run
    return run.folder


def scores_of_state(world: World, folder: Path, state: Path) -> dict[str, Any]:
    saved = torch.load(state, weights_only=True)
    shard = load_shard(folder, world).shard
    trainer = make_trainer(shard, TrainConfig(**saved["config"]), world)
    trainer.model.load_state_dict(saved["model"])
    return trainer.evaluate()


TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("undirected", {"lr": 0.3}),
    ("sparse", {"model": "sage", "metric": "roc_auc"}),
    ("sparse", {"model": "gin"}),
    ("regression", {"model": "sage", "lr": 0.3}),
    ("two classes", {"metric": "roc_auc", "class_weights": "balanced", "norm": "batch", "lr": 0.2}),
    ("loops", {"model": "gat", "norm": "layer", "heads": 2, "task": "regression", "lr": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), TARGETS)
def test_states_score_what_was_reported(ranks: RankPool, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """On two ranks as on one; the best state is the best by validation, the last that of the last epoch."""
    graph = CASES[name].graph
    folders = {size: build_parts(graph, tmp_path, size) for size in (1, 2)}
    runs = {size: run_on(ranks, size, folders[size], tmp_path / f"run{size}", epochs=12, **options) for size in (1, 2)}
    run, one = runs[2], runs[1]
    assert run.losses == pytest.approx(one.losses, rel=1e-9)
    metric = run.summary["metric"]
    validation = [line["val"][metric] for line in run.metrics]
    best = validation.index(min(validation) if metric == "mae" else max(validation))
    assert run.summary["best_epoch"] == one.summary["best_epoch"] == best
    assert run.state("best.pt")["epoch"] == best
    assert run.state("last.pt")["epoch"] == 11
    for state, line in {"best.pt": run.metrics[best], "last.pt": run.metrics[-1]}.items():
        scores = ranks.run(1, scores_of_state, folders[1], run.folder / state)[0]
        for split in SPLITS:
            assert scores[split] == pytest.approx(line[split], rel=1e-9), state
            assert line[split] == pytest.approx(one.metrics[line["epoch"]][split], rel=1e-9)


def test_the_best_state_is_not_the_last(ranks: RankPool, shards: dict[int, Path], tmp_path: Path) -> None:
    """Else the test above would not tell them apart."""
    run = run_on(ranks, 2, shards[2], tmp_path / "run", epochs=12, lr=0.3)
    assert run.summary["best_epoch"] < 11
    best, last = run.state("best.pt")["model"], run.state("last.pt")["model"]
    assert not any(torch.equal(best[name], last[name]) for name in best)


def test_a_run_of_no_epochs(ranks: RankPool, shards: dict[int, Path], tmp_path: Path) -> None:
    run = run_on(ranks, 2, shards[2], tmp_path / "run", epochs=0)
    assert (run.losses, run.metrics) == ((), [])
    assert (run.summary["best_epoch"], run.summary["epochs"], run.summary["bytes_sent_per_epoch"]) == (-1, 0, 0)
    assert set(run.summary["val"]) == {"loss", "accuracy", "micro_f1"}
    assert run.state("best.pt")["model"].keys() == run.state("last.pt")["model"].keys()


# --------------------------------------------------------------------------------------------------- how steps go


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": "cosine", "optimizer": "adam", "clip": 0.1},
        {"scheduler": "plateau", "optimizer": "sgd", "eval_every": 2},
        {"scheduler": "plateau", "optimizer": "adamw", "clip": 2.0},
        {"scheduler": "none", "optimizer": "sgd", "clip": 0.05, "eval_every": 5},
        {"scheduler": "cosine", "optimizer": "adamw", "model": "gat", "eval_every": 3, "norm": "batch"},
    ],
)
def test_schedulers_clipping_and_optimizers_on_one_and_two_ranks(
    ranks: RankPool, shards: dict[int, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    runs = [
        run_on(ranks, size, shards[size], tmp_path / f"run{size}", epochs=30, dropout=0.2, **options) for size in (1, 2)
    ]
    one, two = runs
    assert two.losses == pytest.approx(one.losses, rel=1e-8)
    assert len(set(two.losses)) == 30
    groups = [run.state("last.pt")["optimizer"]["param_groups"][0] for run in runs]
    assert groups[0]["lr"] == groups[1]["lr"] == pytest.approx(rate_after(options["scheduler"], two.metrics))


def rate_after(scheduler: str, metrics: list[dict[str, Any]]) -> float:
    """The learning rate after a run, by the definition of its schedule."""
    rate = QUICK["lr"]
    if scheduler == "cosine":
        return 0.0
    if scheduler == "plateau":
        best, stalled = -math.inf, 0
        for line in metrics:
            if "val" in line:
                better = line["val"]["accuracy"] > best * (1 + 1e-4)
                best, stalled = (line["val"]["accuracy"], 0) if better else (best, stalled + 1)
                if stalled > 10:
                    rate, stalled = rate / 2, 0
    return rate


def test_one_seed_gives_one_result_to_the_bit(ranks: RankPool, shards: dict[int, Path], tmp_path: Path) -> None:
    options = {"dtype": "float32", "model": "gat", "heads": 2, "input_dropout": 0.2, "norm": "batch"}
    first, again = (run_on(ranks, 2, shards[2], tmp_path / name, **options) for name in "ab")
    assert first.losses == again.losses
    for name in ("best.pt", "last.pt"):
        states = [run.state(name)["model"] for run in (first, again)]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert run_on(ranks, 2, shards[2], tmp_path / "c", **options | {"seed": 4}).losses != first.losses


# ------------------------------------------------------------------------------------------------- how runs stop


@pytest.mark.parametrize(("patience", "eval_every"), [(1, 1), (4, 1), (3, 5), (7, 2)])
def test_early_stopping(
    ranks: RankPool, shards: dict[int, Path], tmp_path: Path, patience: int, eval_every: int
) -> None:
    run = run_on(ranks, 2, shards[2], tmp_path / "run", epochs=60, lr=0.2, patience=patience, eval_every=eval_every)
    best, score, expected = -1, -math.inf, 0
    for line in run.metrics:
        expected = line["epoch"] + 1
        if expected % eval_every:
            continue
        if line["val"]["accuracy"] > score:
            best, score = line["epoch"], line["val"]["accuracy"]
        elif line["epoch"] - best >= patience:
            break
    assert run.summary["epochs"] == len(run.metrics) == expected < 60
    assert run.summary["best_epoch"] == best
    assert run.summary["stopped_by"] == "patience"
    assert "val" in run.metrics[-1]
    assert f"stopped after {expected} epochs: patience" in run.shown


def test_a_time_limit_stops_all_ranks_after_an_epoch(ranks: RankPool, shards: dict[int, Path], tmp_path: Path) -> None:
    run = run_on(ranks, 2, shards[2], tmp_path / "run", epochs=10**6, time_limit=0.2, eval_every=10**6)
    assert 1 <= run.summary["epochs"] == len(run.metrics) < 10**6
    assert run.summary["stopped_by"] == "time limit"
    assert run.summary["best_epoch"] == run.metrics[-1]["epoch"]
    assert "test" in run.metrics[-1]


def test_a_signal_to_one_rank_stops_all_after_the_epoch(
    ranks: RankPool, shards: dict[int, Path], tmp_path: Path
) -> None:
    run = run_on(ranks, 3, shards[3], tmp_path / "run", Signalled, epochs=100, eval_every=50)
    assert run.summary["epochs"] in (3, 4)  # the flags of a step are gathered after its forward pass
    assert run.summary["stopped_by"] == "SIGTERM"
    assert (run.folder / "last.pt").is_file()
    assert "stopped after" in run.shown
    assert ranks.run(3, handler_of_sigterm) == ["default"] * 3


def handler_of_sigterm(world: World) -> str:
    return "default" if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else "changed"


def test_a_loss_that_is_not_finite_stops_all_ranks_and_keeps_the_best(
    ranks: RankPool, shards: dict[int, Path], tmp_path: Path
) -> None:
    options = config(dtype="float32", lr=1e30, optimizer="sgd", epochs=50)
    found = ranks.run(2, train_here, [shards[2]], tmp_path / "run", options)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    epochs = summary["epochs"]
    text = (
        f"train: the loss of epoch {epochs + 1} is nan; the first not to be finite is the output of layer 1, convs.1 "
        f"(GCNConv); try a smaller --lr (now 1e+30), or --clip 1"
    )
    assert found == [text] * 2
    assert summary["stopped_by"] == text
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == epochs >= 1
    best = torch.load(tmp_path / "run" / "best.pt", weights_only=True)
    assert best["epoch"] == summary["best_epoch"] < epochs
    assert all(bool(value.isfinite().all()) for value in best["model"].values())


def test_a_loss_that_is_not_finite_at_once(ranks: RankPool, damaged: Path, tmp_path: Path) -> None:
    change(damaged, 0, put("features/x", (slice(None), 0), np.nan))
    found = ranks.run(2, train_here, [damaged], tmp_path / "run", config())
    text = (
        "train: the loss of epoch 1 is nan; the first not to be finite is the node features on rank 0; build the "
        "shards again from features that are finite, or with --nan zero"
    )
    assert found == [text] * 2
    assert not (tmp_path / "run" / "best.pt").exists()


class Rooted(Deep):
    """The square root of 0 has no finite derivative."""

    def forward(self, x: Tensor, views: Any) -> Tensor:
        x = views[0].propagate(self.first(x), "mean")
        root = (0 * x).sqrt() if views[0].this_pass.step >= 2 else 0
        return self.second(views[1].propagate(x + root, "gcn"))


def test_a_gradient_that_is_not_finite_leaves_the_weights_as_they_were(
    ranks: RankPool, shards: dict[int, Path], tmp_path: Path
) -> None:
    found = ranks.run(2, train_here, [shards[2]], tmp_path / "run", config(), Rooted)
    text = (
        "train: a gradient of epoch 3 is not finite; backward, the first not to be finite is that of first.bias; try "
        "a smaller --lr (now 0.05), or --clip 1"
    )
    assert found == [text] * 2
    last = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert last["epoch"] == 1
    assert all(bool(value.isfinite().all()) for value in last["model"].values())


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_weights_that_are_not_finite_are_named_and_statistics_kept(
    ranks: RankPool, shards: dict[int, Path], norm: str
) -> None:
    for weight, statistics in ranks.run(2, broken_step, shards[2], config(norm=norm)):
        assert "the loss of epoch 5 is nan; the first not to be finite is the weight convs.1.weight (layer 1)" in weight
        assert statistics


def broken_step(world: World, folder: Path, options: TrainConfig) -> tuple[str, bool]:
    shard = load_shard(folder, world).shard
    trainer = make_trainer(shard, options, world)
    model: Any = trainer.model
    with torch.no_grad():
        model.convs[1].weight[0, 0] = torch.nan
    before = [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(RankError) as error:
        trainer.step(4)
    return str(error.value), all(map(torch.equal, before, model.buffers()))


# --------------------------------------------------------------------------------------------- what a person watches


@pytest.mark.parametrize(
    ("width", "kept"),
    [
        (160, ("loss", "train", "val", "test", "s/epoch", "comm", "MB sent", "ETA", "━")),
        (120, ("loss", "val", "test", "s/epoch", "comm", "MB sent", "ETA")),
        (80, ("loss", "val", "s/epoch", "comm", "ETA")),
        (40, ("loss", "val")),
        (16, ()),
    ],
)
def test_the_live_line_leaves_out_what_does_not_fit(tmp_path: Path, width: int, kept: tuple[str, ...]) -> None:
    console = Console(width=width, height=5, force_terminal=True, color_system=None, file=io.StringIO())
    record = {"epoch": 37, "loss": 0.0456, "seconds": 0.0352, "comm_seconds": 0.03, "bytes_sent": 22_000}
    scores = {split: {"accuracy": 1.0} for split in ("train", "val", "test")}
    with RunLog(tmp_path, 400, "accuracy", console) as log:
        log.epoch(record, scores)
    assert isinstance(console.file, io.StringIO)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue()).replace("\r", "\n").split("\n")
    shown = [line.rstrip() for line in lines if "38/400" in line]
    assert shown
    for line in shown:
        assert line.startswith("epoch 38/400")
        assert len(line) <= width
        assert [
            word for word in ("loss", "train", "val", "test", "s/epoch", "comm", "MB sent", "ETA", "━") if word in line
        ] == [*kept]
