"""A run that was interrupted ends as one that was not: bit for bit on the same ranks, to rounding on others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console
from torch import Tensor

from fullgraph.checkpoint import CheckpointWriter, Snapshot, checkpoints_of, read_checkpoint
from fullgraph.config import TrainConfig
from fullgraph.loading import Placement
from fullgraph.loop import train
from fullgraph.resume import saved_options
from fullgraph.shards import read_manifest
from fullgraph.world import RankError, World
from partition_tools.builder import build
from tests.builds import assignment, rich_graph
from tests.graphs import CASES
from tests.ranks import RankPool

PARTS = 3
EPOCHS, AT = 9, 4
QUICK = TrainConfig(
    model="gcn",
    hidden=8,
    epochs=EPOCHS,
    lr=0.05,
    dropout=0.4,
    seed=3,
    norm="batch",
    checkpoint_every=AT,
    keep_checkpoints=9,
)
OPTIONS: dict[str, dict[str, Any]] = {
    "adam": {"eval_every": 2, "clip": 1.0},
    "cosine": {"scheduler": "cosine", "optimizer": "adamw", "patience": 50, "norm": "none"},
    "plateau": {"scheduler": "plateau", "optimizer": "sgd", "input_dropout": 0.2, "model": "sage"},
    "gat": {"model": "gat", "heads": 2, "residual": True, "metric": "accuracy", "split": 0},
    "stale": {"refresh": "every:3", "stagger": True, "codec": "int8", "layer0": "exchange"},
    "drift": {"refresh": "drift:0.1"},
    "inductive": {"inductive": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a graph in three parts, of the same in two, of another, and of one with learned features."""
    out = tmp_path_factory.mktemp("checkpoint")
    rng = np.random.default_rng(5)
    graph = rich_graph(60, 400, seed=4, y=rng.integers(0, 4, 60))
    build(graph, assignment(rng.permutation(60) % PARTS, PARTS), out / "shards")
    build(graph, assignment(rng.permutation(60) % 2, 2), out / "two")
    other = dataclasses.replace(graph, y=rng.integers(0, 4, 60))
    build(other, assignment(rng.permutation(60) % PARTS, PARTS), out / "other")
    case = CASES["learned features"]
    build(case.graph, assignment(case.part(PARTS), PARTS), out / "learned")
    return out


def train_here(world: World, shards: Path, steps: list[tuple[TrainConfig | None, Path, Any]]) -> list[Any]:
    """Runs one after the other: (options, run folder, what to resume); the losses of each, or its error."""
    out: list[Any] = []
    for config, run, resume in steps:
        torch.manual_seed(0)
        try:
            out.append(list(train(shards, config, run=run, resume=resume, world=world).losses))
        except RankError as error:
            out.append(str(error))
    return out


def steps_on(ranks: RankPool, size: int, shards: Path, *steps: tuple[TrainConfig | None, Path, Any]) -> list[Any]:
    first, *others = ranks.run(size, train_here, shards, list(steps))
    assert all(other == first for other in others)
    return list(first)


def checkpoint(run: Path, epoch: int = AT) -> Path:
    return run / "checkpoints" / f"epoch-{epoch:08d}"


def epochs_of(run: Path) -> list[int]:
    return [read_checkpoint(path).facts.epoch for path in checkpoints_of(run)]


def metrics(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in ("seconds", "comm_seconds")} for record in records]


def assert_same_state(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_state(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            assert_same_state(x, y)
    else:
        assert a == b or (a != a and b != b)


def assert_same_run(a: Path, b: Path) -> None:
    """All that two runs leave but times and places."""
    assert metrics(a) == metrics(b)
    for name in ("best.pt", "last.pt"):
        states = [torch.load(run / name, weights_only=True) for run in (a, b)]
        assert_same_state(*states)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (a, b)]
    for key in ("best_epoch", "val", "test", "epochs", "stopped_by", "bytes_sent_per_epoch"):
        assert summaries[0][key] == summaries[1][key], key


# ------------------------------------------------------------------------------------------------------ bit for bit


@pytest.mark.parametrize(("size", "name"), [(3, name) for name in OPTIONS] + [(1, "adam"), (2, "plateau")])
def test_a_resumed_run_equals_an_unbroken_one(
    ranks: RankPool, folder: Path, tmp_path: Path, size: int, name: str
) -> None:
    config = dataclasses.replace(QUICK, **OPTIONS[name])
    whole, later = tmp_path / "whole", tmp_path / "later"
    a, b = steps_on(ranks, size, folder / "shards", (config, whole, None), (None, later, checkpoint(whole)))
    assert a == b
    assert len(a) == EPOCHS
    assert_same_run(whole, later)


@pytest.mark.parametrize("size", [1, 3])
def test_learned_features_go_on_bit_for_bit(ranks: RankPool, folder: Path, tmp_path: Path, size: int) -> None:
    whole, later = tmp_path / "whole", tmp_path / "later"
    a, b = steps_on(ranks, size, folder / "learned", (QUICK, whole, None), (QUICK, later, checkpoint(whole)))
    assert a == b
    assert_same_run(whole, later)
    assert len(list(checkpoint(whole).glob(f"part-*-of-0000{PARTS}.pt"))) == PARTS


def test_patience_is_not_given_anew(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(QUICK, epochs=100, lr=1e-6, patience=6)
    whole, later = tmp_path / "whole", tmp_path / "later"
    a, b = steps_on(ranks, 1, folder / "shards", (config, whole, None), (config, later, checkpoint(whole)))
    assert a == b
    assert json.loads((whole / "summary.json").read_text())["stopped_by"] == "patience"
    assert_same_run(whole, later)


def test_a_run_goes_on_in_its_folder_and_its_log_is_cut_back(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    (expected,) = steps_on(ranks, 2, folder / "shards", (QUICK, whole, None))
    steps_on(ranks, 2, folder / "shards", (QUICK, run, None))
    # As after a kill in epoch 8: the last checkpoint has 4 epochs, the log more, and half a line.
    for path in checkpoints_of(run)[:-1]:
        shutil.rmtree(path)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:7]) + lines[7][:20])
    (run / "summary.json").unlink()
    (found,) = steps_on(ranks, 2, folder / "shards", (QUICK, run, "latest"))
    assert found == expected
    assert_same_run(run, whole)
    longer = dataclasses.replace(QUICK, epochs=12)
    (more,) = steps_on(ranks, 2, folder / "shards", (longer, run, run))
    assert more[:EPOCHS] == expected
    assert len(metrics(run)) == len(more) == 12
    assert epochs_of(run)[:2] == [12, 9]
    assert json.loads((run / "config.json").read_text())["epochs"] == 12


# -------------------------------------------------------------------------------------- other ranks, and other builds


@pytest.mark.parametrize("name", ["shards", "learned"])
def test_other_numbers_of_ranks_go_on_to_the_same_losses(
    ranks: RankPool, folder: Path, tmp_path: Path, name: str
) -> None:
    config = dataclasses.replace(QUICK, dtype="float64")
    run = tmp_path / "run"
    (expected,) = steps_on(ranks, 3, folder / name, (config, run, None))
    for size in (1, 2):
        (found,) = steps_on(ranks, size, folder / name, (config, tmp_path / str(size), checkpoint(run)))
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_another_build_of_the_graph_goes_on_and_another_graph_does_not(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(QUICK, dtype="float64")
    run = tmp_path / "run"
    (expected,) = steps_on(ranks, 3, folder / "shards", (config, run, None))
    (found,) = steps_on(ranks, 2, folder / "two", (config, tmp_path / "two", checkpoint(run)))
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    (text,) = steps_on(ranks, 3, folder / "other", (config, tmp_path / "other", run))
    ids = [read_manifest(folder / name).build_id for name in ("shards", "other")]
    assert f"is of build {ids[0]}, but the shards are build {ids[1]}, of another graph" in text


def what_is_said(world: World, shards: Path, run: Path, resume: Path) -> str:
    console = Console(quiet=world.rank != 0, width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    train(shards, None, run=run, resume=resume, world=world, console=console)
    return console.export_text()


def test_what_is_not_as_it_was_is_said(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    run, shards = tmp_path / "run", folder / "shards"
    steps_on(ranks, 3, shards, (dataclasses.replace(QUICK, refresh="every:4"), run, None))
    same, *_ = ranks.run(3, what_is_said, shards, tmp_path / "same", checkpoint(run))
    fewer, *_ = ranks.run(2, what_is_said, shards, tmp_path / "fewer", checkpoint(run))
    for text in (same, fewer):
        assert f"goes on from {checkpoint(run)}, after epoch {AT}" in text
    assert "one exact pass fills them anew" not in same
    assert "2 ranks now, 3 before: an approximate exchange approximates other rows" in fewer
    assert "caches of message rows are of other parts: one exact pass fills them anew" in fewer


# --------------------------------------------------------------------------------------------- what may be asked for


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"lr": 0.01}, ["--lr is 0.01, but was 0.05", "stay as they were"]),
        ({"hidden": 16, "dropout": 0.0}, ["--hidden is 16, but was 8", "--dropout is 0.0, but was 0.4"]),
        ({"epochs": 2}, ["--epochs is 2, but", f"has {EPOCHS} done"]),
    ],
)
def test_options_that_conflict_are_named_with_both_values(
    ranks: RankPool, folder: Path, tmp_path: Path, changes: dict[str, Any], texts: list[str]
) -> None:
    run = tmp_path / "run"
    _, text = steps_on(
        ranks, 1, folder / "shards", (QUICK, run, None), (dataclasses.replace(QUICK, **changes), run, "latest")
    )
    assert all(each in text for each in texts), text
    assert len(metrics(run)) == EPOCHS


def test_the_cosine_keeps_its_length(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    run, config = tmp_path / "run", dataclasses.replace(QUICK, scheduler="cosine")
    longer = dataclasses.replace(config, epochs=20)
    _, text = steps_on(ranks, 1, folder / "shards", (config, run, None), (longer, run, run))
    assert f"--epochs is 20, but was {EPOCHS}, over which --scheduler cosine falls to zero" in text


def test_what_can_be_named(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    run, shards = tmp_path / "run", folder / "shards"
    nothing, older, fresh = steps_on(
        ranks,
        2,
        shards,
        (QUICK, tmp_path / "a", tmp_path / "nowhere"),
        (QUICK, run, "latest"),  # there is none, so it begins
        (QUICK, run, checkpoint(run)),
    )
    assert "neither a checkpoint nor a run folder that holds any" in nothing
    assert len(older) == EPOCHS
    assert f"the run has gone on to epoch-{EPOCHS:08d}; name a new folder with --run" in fresh
    assert saved_options(run, "latest") == saved_options(None, checkpoint(run)) == QUICK
    assert saved_options(None, tmp_path / "nowhere") is None


def test_a_run_without_checkpoints_begins_anew_under_latest(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    (run / "metrics.jsonl").write_text("{}\n")
    refused, losses = steps_on(ranks, 1, folder / "shards", (QUICK, run, None), (QUICK, run, "latest"))
    assert "already holds a run" in refused
    assert len(losses) == len(metrics(run)) == EPOCHS
    plain = dataclasses.replace(QUICK, checkpoint_every=None)
    whole = tmp_path / "whole"
    _, text = steps_on(ranks, 1, folder / "shards", (plain, whole, None), (plain, whole, "latest"))
    assert "already holds a run" in text


# ----------------------------------------------------------------------------------------------- which ones are kept


def test_the_last_and_the_best_are_kept(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = dataclasses.replace(QUICK, checkpoint_every=1, keep_checkpoints=2)
    steps_on(ranks, 2, folder / "shards", (config, run, None))
    scores = [record["val"]["accuracy"] for record in metrics(run)]
    best = max(range(EPOCHS), key=lambda epoch: (scores[epoch], epoch)) + 1
    assert epochs_of(run) == sorted({EPOCHS, EPOCHS - 1, best}, reverse=True)
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


def test_a_clock_saves(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(QUICK, checkpoint_every=None, checkpoint_minutes=1e-9, keep_checkpoints=100)
    steps_on(ranks, 2, folder / "shards", (config, tmp_path / "run", None))
    assert epochs_of(tmp_path / "run") == list(range(EPOCHS, 0, -1))


# ------------------------------------------------------------------------------------------------------------ damage


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank with checkpoints after 4, 8 and 9 epochs."""
    run = tmp_path_factory.mktemp("saved") / "run"
    train(folder / "shards", QUICK, run=run)
    return run


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: os.truncate(path / "manifest.json", 300),
    "another version": lambda path: edit(path, format_version=2),
    "an id that is none": lambda path: edit(path, id=7),
    "a negative epoch": lambda path: edit(path, epoch=-1),
    "a way out of the folder": lambda path: edit(path, files=[{"path": "../x", "bytes": 1, "xxh3": "0" * 16}]),
    "ranks that are none": lambda path: edit(path, ranks=["a"]),
    "no state": lambda path: (path / "replicated.pt").unlink(),
    "a flipped byte": lambda path: flip(path / "replicated.pt", 900),
    "a flipped byte of a part": lambda path: flip(next(path.glob("part-*")), 900),
}


def edit(path: Path, **fields: Any) -> None:
    content = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(content | fields))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_left_out_for_the_one_before(
    folder: Path, saved: Path, tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(saved, tmp_path / "run")
    expected = metrics(saved)
    DAMAGE[damage](checkpoint(run, EPOCHS))
    train(folder / "shards", None, run=run, resume="latest")
    out = capfd.readouterr().out
    assert out.count("warning: left out a checkpoint: ") == 1
    assert f"goes on from {checkpoint(run, 8)}, after epoch 8" in out
    assert metrics(run) == expected
    assert epochs_of(run)[0] == EPOCHS

    assert epochs_of(run) == [EPOCHS, 8, 4]
    for path in checkpoints_of(run):
        DAMAGE[damage](path)
    with pytest.raises(RankError, match=r"resume: no checkpoint of .* can be used: "):
        train(folder / "shards", None, run=run, resume="latest")


def test_a_state_cut_anywhere_is_left_out(folder: Path, saved: Path, tmp_path: Path) -> None:
    """And one whose manifest agrees with what is left of it is one message."""
    run = shutil.copytree(saved, tmp_path / "run")
    path = checkpoint(run, EPOCHS) / "replicated.pt"
    whole, placement = path.read_bytes(), placement_of(1)
    build_id = read_manifest(folder / "shards").build_id
    for twentieth in range(20):
        path.write_bytes(whole[: len(whole) * twentieth // 20])
        with pytest.raises(ValueError, match=r"replicated\.pt: \d+ bytes; the manifest says"):
            read_checkpoint(path.parent).check(placement, build_id)
        with pytest.raises(ValueError, match=r"replicated\.pt"):
            read_checkpoint(path.parent).read(placement, build_id, torch.arange(60))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/never-made-by-a-checkpoint",)


def test_nothing_in_a_checkpoint_is_executed(folder: Path, saved: Path, tmp_path: Path) -> None:
    run = shutil.copytree(saved, tmp_path / "run")
    path = checkpoint(run, EPOCHS)
    torch.save({"model": Evil()}, path / "replicated.pt")
    with pytest.raises(ValueError, match="cannot be read as a state"):
        read_checkpoint(path).read(placement_of(1), "", torch.arange(60))
    assert not Path("/tmp/never-made-by-a-checkpoint").exists()


# ------------------------------------------------------------------------------------------------- kills and failures


def placement_of(parts: int) -> Placement:
    return Placement(
        ranks=(0,) * parts,
        mine=tuple(range(parts)),
        owned_global=np.arange(6),
        owned_part=np.arange(6, dtype=np.int32) % parts,
    )


def save(run: Path, shards: Path, epoch: int, keep: int = 1) -> None:
    """One checkpoint of two parts with a little state."""
    writer = CheckpointWriter(run, World(), placement_of(2), read_manifest(shards), keep)
    state = Snapshot(
        replicated={"epoch": epoch}, rows={"r": torch.full((6, 2), float(epoch))}, ids=torch.arange(6).flip(0)
    )
    facts = {"config": QUICK.as_dict(), "layer0": "once", "metrics_bytes": 0, "score": None}
    writer.save(state, epoch=epoch, **facts)


_CALLS = ("fsync", "replace", "rename", "mkdir", "open", "unlink", "rmdir")


def killed_at(call: int, run: Path, shards: Path) -> None:
    """Save, and die before the ``call``-th change of the file system; exit code 9, or 0 where there are fewer."""
    left = call

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            return real(*args, **kwargs)

        return count

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))
    save(run, shards, 2)


def kill_everywhere(run: Path, shards: Path, outcome: Any) -> None:
    """In a process with one thread, whose copies can be killed cheaply."""
    torch.set_num_threads(1)
    seen = []
    for call in range(200):
        shutil.rmtree(run, ignore_errors=True)
        save(run, shards, 1)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                killed_at(call, run, shards)
                os._exit(0)
            os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found = checkpoints_of(run)
        epochs = []
        for path in found:
            good = read_checkpoint(path)
            good.check(placement_of(2), read_manifest(shards).build_id)
            state = good.read(placement_of(2), read_manifest(shards).build_id, torch.arange(6))
            assert state.replicated["epoch"] == good.facts.epoch
            assert state.rows["r"].unique().item() == good.facts.epoch
            epochs.append(good.facts.epoch)
        save(run, shards, 3)
        clean = [path.name for path in (run / "checkpoints").iterdir()] == ["epoch-00000003"]
        seen.append((code, epochs, clean))
        if code != 9:
            break
    outcome.send(seen)


def test_a_kill_at_any_instant_leaves_a_good_checkpoint(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=kill_everywhere, args=(tmp_path / "run", folder / "shards", theirs))
    process.start()
    theirs.close()
    seen = ours.recv()
    process.join()
    *killed, last = seen
    assert last == (0, [2], True)
    assert len(killed) > 20
    assert all(code == 9 for code, _, _ in killed)
    assert all(clean for _, _, clean in killed)
    assert {tuple(epochs) for _, epochs, _ in killed} == {(1,), (2, 1), (2,)}


def fail_to_write(world: World, run: Path, shards: Path, broken: str) -> str:
    config = dataclasses.replace(QUICK, checkpoint_every=2, epochs=6)
    real, calls = torch.save, 0

    def full(state: Any, path: Any) -> None:
        nonlocal calls
        calls += "optimizer" in state and "best" in state
        if world.rank == 0 and calls == 2:
            raise OSError(28, "No space left on device", broken)
        real(state, path)

    torch.save = full
    try:
        train(shards, config, run=run, world=world)
    except RankError as error:
        return str(error)
    finally:
        torch.save = real
    return "it ended well"


def test_a_full_disk_is_one_message_and_the_checkpoint_before_is_good(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (text,) = set(ranks.run(3, fail_to_write, run, folder / "shards", "replicated.pt"))
    assert text.startswith(f"checkpoint (rank 0): {run}")
    assert "replicated.pt: cannot be written (No space left on device)" in text
    assert text.endswith(f"{checkpoint(run, 2)} is as it was")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["epoch-00000002"]
    (losses,) = steps_on(ranks, 3, folder / "shards", (None, run, run))
    (whole,) = steps_on(ranks, 3, folder / "shards", (dataclasses.replace(QUICK, epochs=6), tmp_path / "whole", None))
    assert losses == whole


# -------------------------------------------------------------------------------------------- signals and new starts


def fullgraph(*arguments: str, launch: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", *launch, *(("-m",) if launch else ()), "fullgraph", *arguments]


def started(command: list[str], log: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, text=True, env=environment, cwd=log.parent)


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """In order of rank."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RANK" in child.environ():
                found.append((int(child.environ()["RANK"]), child))
    return [child for _, child in sorted(found, key=lambda item: item[0])]


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


FLAGS = (
    *("--model", "gcn", "--hidden", "8", "--epochs", "400", "--eval-every", "50", "--lr", "0.01", "--threads", "1"),
    *("--split", "0"),
)


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> list[dict[str, Any]]:
    """The log of the run of ``FLAGS`` on two ranks, from the start to the end."""
    log = folder / "unbroken.log"
    command = fullgraph("train", str(folder / "two"), "--run", str(folder / "unbroken"), *FLAGS)
    process = started(command, log)
    assert process.wait(240) == 0, log.read_text()
    return metrics(folder / "unbroken")


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")


@pytest.mark.parametrize("launcher", ["ours", "torchrun"])
def test_a_killed_rank_is_followed_by_the_rest_of_the_run(
    folder: Path, tmp_path: Path, unbroken: list[dict[str, Any]], launcher: str
) -> None:
    """Under torchrun in a folder that no flag names."""
    log = tmp_path / "log"
    arguments = ["train", str(folder / "two"), *FLAGS, "--checkpoint-every", "20"]
    if launcher == "ours":
        command = fullgraph(*arguments, "--run", "runs/mine", "--max-restarts", "1")
    else:
        command = fullgraph(*arguments, launch=TORCHRUN)
    process = started(command, log)
    try:
        wait_for(lambda: any(tmp_path.glob("runs/*/checkpoints/epoch-*/manifest.json")), process, log)
        killed = ranks_of(process)[1]
        killed.kill()
        assert process.wait(240) == 0, log.read_text()
    finally:
        process.kill()
    text = log.read_text()
    assert "goes on from runs/" in text
    (run,) = tmp_path.glob("runs/*")
    assert metrics(run) == unbroken
    assert json.loads((run / "summary.json").read_text())["epochs"] == 400
    if launcher == "ours":
        assert "fullgraph: error: rank 1 was ended by SIGKILL" in text
        assert "fullgraph: start 2 of 2" in text


def test_a_signal_saves_and_another_saves_and_stops(folder: Path, tmp_path: Path) -> None:
    log, run = tmp_path / "log", tmp_path / "run"
    slow = ["--epochs", "100000", "--eval-every", "100000"]
    process = started(fullgraph("train", str(folder / "two"), *FLAGS, *slow, "--run", str(run)), log)
    try:
        wait_for(lambda: (run / "metrics.jsonl").is_file() and len(metrics(run)) > 3, process, log)
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: checkpoints_of(run), process, log)
        assert process.poll() is None
        assert len(ranks_of(process)) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM
    finally:
        process.kill()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["stopped_by"] == "SIGTERM"
    assert epochs_of(run)[0] == summary["epochs"] == len(metrics(run))

    # The flags are the checkpoint's but for those that are given.
    done = summary["epochs"]
    more = ["--resume", str(run), "--epochs", str(done + 3), "--ranks", "1"]
    process = started(fullgraph("train", str(folder / "two"), *more), log)
    assert process.wait(120) == 0, log.read_text()
    assert len(metrics(run)) == done + 3
