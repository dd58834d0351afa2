"""A run from its first check to its summary: the loop over epochs, and what ends it.

Whatever depends on a clock or a value (time limit, signal, a loss that is not finite) is a flag that the ranks gather
with the loss, so that all act alike.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fullgraph.checkpoint import CheckpointWriter, way_on
from fullgraph.config import TrainConfig
from fullgraph.course import Course
from fullgraph.describe import config_record, headline, peak_memory, print_summary
from fullgraph.loading import load_shard
from fullgraph.memory import require_room
from fullgraph.models import ModelFactory
from fullgraph.profile import profile, show_profile
from fullgraph.resume import Start, find_start, lines_before, records_in
from fullgraph.runlog import RunLog, create_run_folder, write_json, write_state
from fullgraph.shards import Manifest
from fullgraph.signals import Signals
from fullgraph.trainer import Trainer, make_trainer
from fullgraph.world import REST, RankError, World

_LATE = 0.5  # a reason to stop, below the numbers of signals


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to; the same on every rank."""

    run: Path
    summary: dict[str, Any]
    losses: tuple[float, ...]
    """Training loss of each epoch."""


def train(
    folder: str | Path,
    config: TrainConfig | None = None,
    *,
    run: str | Path | None = None,
    resume: str | Path | None = None,
    world: World | None = None,
    model: ModelFactory | None = None,
    console: Console | None = None,
) -> Result:
    """Train on the shards in ``folder`` and leave a run folder; every rank of ``world`` calls this alike.

    ``model`` makes a model of the user's own from (features, outputs); by default it is ``config.model``.
    ``resume`` is the path of a checkpoint or run folder to go on from, or ``"latest"``: the newest checkpoint in
    ``run`` (or under runs/), and where there is none a new run. Without a ``config`` the options are the checkpoint's.
    Raises ``RankError``, the same on every rank, for whatever is wrong before training and for a loss that is not
    finite. Another error in the middle is raised where it arises; ``open_world`` tells the other ranks.
    """
    world, folder = world or World(), Path(folder)
    _check_same_options(config, resume, world)
    console = console or Console(stderr=False, quiet=world.rank != 0)
    loaded = load_shard(folder, world)
    manifest, placement = loaded.manifest, loaded.placement
    start = find_start(run, resume, config, manifest, placement, world)
    config, checkpoint = start.config, start.checkpoint
    with world.stage("options"):
        told = TrainConfig.timeout
        if world.size > 1 and config.timeout not in (told, world.timeout):
            raise ValueError(
                f"timeout is {config.timeout:g} s in the options but the ranks were joined with {world.timeout:g} s; "
                f"say open_world(timeout={config.timeout:g})"
            )
    layer0 = None
    if checkpoint is not None and checkpoint.fits(placement, manifest.build_id):
        layer0 = checkpoint.facts.layer0  # what "auto" chose then, it might not choose with the memory that is free now
    trainer = make_trainer(loaded.shard, config, world, model, layer0=layer0)
    del loaded
    room = require_room(trainer)
    course = Course(trainer)
    if checkpoint is not None:
        with world.stage("resume"):
            ids = trainer.part.whole.owned_global
            course.restore(checkpoint.read(placement, manifest.build_id, ids), checkpoint.facts.epoch)
    run_folder = _agree_run_folder(start, manifest, trainer)
    console.print(headline(trainer, manifest), room, *start.notes, sep="\n", highlight=False, soft_wrap=True)
    lines = b""
    with world.stage("run folder"):
        if world.rank == 0:
            lines = lines_before(start)
            write_json(run_folder / "config.json", config_record(folder, manifest, trainer))
    course.records = world.gather_json(records_in(lines))[0]
    world.remedy.find = lambda: way_on(run_folder)
    writer = CheckpointWriter(run_folder, world, placement, manifest, config.keep_checkpoints)
    if checkpoint is not None and start.source == run_folder:
        writer.last = checkpoint.folder.name
    log = RunLog(run_folder, config.epochs, course.early.metric, console, done=course.done, before=lines)
    summary = _run(course, trainer, run_folder, manifest, writer, log if world.rank == 0 else None, console)
    return Result(run=run_folder, summary=summary, losses=tuple(r["loss"] for r in course.records))


def _run(
    course: Course,
    trainer: Trainer,
    folder: Path,
    manifest: Manifest,
    writer: CheckpointWriter,
    log: RunLog | None,
    console: Console,
) -> dict[str, Any]:
    config, world, metric = trainer.config, trainer.world, trainer.target.metric
    stopped_by: str | None = None
    failure: RankError | None = None
    started = saved = time.monotonic()
    first = course.done
    minutes, every = config.checkpoint_minutes, config.checkpoint_every
    world.meter.enter(REST)
    with log or contextlib.nullcontext(), Signals(world) as signals:
        for epoch in range(first, config.epochs):
            now = time.monotonic()
            late = config.time_limit is not None and now - started >= config.time_limit
            due = signals.save or (minutes is not None and now - saved >= 60 * minutes)
            signals.save = False
            try:
                record, (stop, save) = trainer.step(epoch, [signals.stop or _LATE * late, due])
            except RankError as error:  # every rank has it, so what was learnt before can be kept
                failure = error
                break
            last = stop or epoch == config.epochs - 1
            scores = trainer.evaluate() if last or (epoch + 1) % config.eval_every == 0 else None
            course.take(record, scores)
            if log is not None:
                log.epoch(record, scores)
            if stop:
                stopped_by = "time limit" if stop == _LATE else signal.Signals(int(stop)).name
            elif scores is not None and course.early.ends(epoch):
                stopped_by = "patience"
            asked = every is not None or minutes is not None
            if stop or save or (every and course.done % every == 0) or (asked and (last or stopped_by)):
                save_checkpoint(course, trainer, writer, folder, manifest, log)
                saved = time.monotonic()
            if stopped_by is not None:
                break
        if failure is not None and course.early.best is None:
            raise failure
        best = course.best
    if config.profile:
        steps = range(first, course.done)
        found = profile(world, trainer.predicted_ledger(steps), len(steps))
        show_profile(found, console)
        if world.rank == 0:
            write_json(folder / "profile.json", found)
    peaks = world.gather_vector([peak_memory(world)])
    records = course.records
    seconds = [r["seconds"] for r in records]
    summary = {
        "best_epoch": best.epoch,
        "val": best.scores.get("val", {}),
        "test": best.scores.get("test", {}),
        "epochs": course.done,
        "seconds_per_epoch": float(np.median(seconds)) if seconds else 0.0,
        "bytes_sent_per_epoch": int(np.median([r["bytes_sent"] for r in records])) if records else 0,
        "peak_memory_bytes": int(peaks.max()),
        "parts": manifest.parts,
        "ranks": world.size,
        "metric": metric,
        "total_seconds": time.monotonic() - started,
        "stopped_by": str(failure) if failure else stopped_by,
    }
    trainer.policy.drain()
    _save(trainer, folder / "best.pt", manifest, course.best_state, epoch=best.epoch)
    optimizer = trainer.optimizer_state()
    _save(trainer, folder / "last.pt", manifest, trainer.state(), epoch=course.done - 1, optimizer=optimizer)
    with world.stage("save"):  # the run folder is whole when any rank goes on
        if world.rank == 0:
            write_json(folder / "summary.json", summary)
    print_summary(summary, folder, console)
    if failure is not None:
        raise failure
    return summary


def save_checkpoint(
    course: Course, trainer: Trainer, writer: CheckpointWriter, folder: Path, manifest: Manifest, log: RunLog | None
) -> None:
    """Save the run as it stands between two epochs, and the best state, which can be predicted with (a collective)."""
    world = trainer.world
    snapshot, length = course.snapshot(), 0
    with world.stage("checkpoint"):
        if log is not None:
            length = log.sync()
    writer.save(
        snapshot,
        epoch=course.done,
        config=trainer.config.as_dict(),
        layer0=trainer.part.input.mode,
        metrics_bytes=world.gather_json(length)[0],
        score=course.score,
    )
    if (best := course.early.best) is not None:
        _save(trainer, folder / "best.pt", manifest, course.best_state, epoch=best.epoch)


def _save(trainer: Trainer, path: Path, manifest: Manifest, state: dict[str, Any], **facts: Any) -> None:
    """Write a state of all ranks (a collective)."""
    state = trainer.of_all_ranks(state)
    with trainer.world.stage("save"):
        if trainer.world.rank == 0:
            write_state(path, state | facts | {"config": trainer.config.as_dict(), "build_id": manifest.build_id})


def _check_same_options(config: TrainConfig | None, resume: str | Path | None, world: World) -> None:
    """Ranks on other hosts are started by other commands."""
    mine = {"resume": None if resume is None else str(resume)} | (config.as_dict() if config else {})
    options = world.gather_json(mine)
    for rank, other in enumerate(options):
        for name, value in options[0].items():
            if other.get(name) != value and name != "threads":
                flag = f"--{name.replace('_', '-')}"
                raise RankError(
                    f"options: rank 0 was started with {flag} {value}, rank {rank} with {flag} {other.get(name)}; "
                    f"start all ranks with the same options"
                )


def _agree_run_folder(start: Start, manifest: Manifest, trainer: Trainer) -> Path:
    world, now = trainer.world, time.strftime("%Y%m%d-%H%M%S")
    name = start.run or Path("runs") / f"{_slug(manifest)}-{trainer.model_name}-{now}"
    path = Path(world.gather_json(str(name))[0])
    with world.stage("run folder"):
        if world.rank == 0 and not (start.checkpoint is not None and path == start.source):
            create_run_folder(path, again=start.again)
    return path


def _slug(manifest: Manifest) -> str:
    name = str(manifest.graph.get("name", "graph"))
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-") or "graph"
