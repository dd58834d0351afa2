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

from fullgraph.config import TrainConfig
from fullgraph.describe import config_record, headline, peak_memory, print_summary
from fullgraph.loading import load_shard
from fullgraph.memory import require_room
from fullgraph.models import ModelFactory
from fullgraph.profile import profile, show_profile
from fullgraph.runlog import RunLog, create_run_folder, write_json, write_state
from fullgraph.shards import Manifest
from fullgraph.signals import StopSignal
from fullgraph.stopping import Best, EarlyStopping
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
    world: World | None = None,
    model: ModelFactory | None = None,
    console: Console | None = None,
) -> Result:
    """Train on the shards in ``folder`` and leave a run folder; every rank of ``world`` calls this alike.

    ``model`` makes a model of the user's own from (features, outputs); by default it is ``config.model``.
    Raises ``RankError``, the same on every rank, for whatever is wrong before training and for a loss that is not
    finite. Another error in the middle is raised where it arises; ``open_world`` tells the other ranks.
    """
    config, world, folder = config or TrainConfig(), world or World(), Path(folder)
    _check_same_options(config, world)
    console = console or Console(stderr=False, quiet=world.rank != 0)
    with world.stage("options"):
        told = TrainConfig.timeout
        if world.size > 1 and config.timeout not in (told, world.timeout):
            raise ValueError(
                f"timeout is {config.timeout:g} s in the options but the ranks were joined with {world.timeout:g} s; "
                f"say open_world(timeout={config.timeout:g})"
            )
    loaded = load_shard(folder, world)
    manifest = loaded.manifest
    trainer = make_trainer(loaded.shard, config, world, model)
    del loaded
    room = require_room(trainer)
    run_folder = _agree_run_folder(run, manifest, trainer)
    console.print(headline(trainer, manifest), room, sep="\n", highlight=False, soft_wrap=True)
    if world.rank == 0:
        write_json(run_folder / "config.json", config_record(folder, manifest, trainer))
    summary, losses = _run(trainer, run_folder, manifest, console)
    return Result(run=run_folder, summary=summary, losses=tuple(losses))


def _run(trainer: Trainer, folder: Path, manifest: Manifest, console: Console) -> tuple[dict[str, Any], list[float]]:
    config, world, metric = trainer.config, trainer.world, trainer.target.metric
    log = RunLog(folder, config.epochs, metric, console) if world.rank == 0 else None
    early = EarlyStopping(metric, config.patience)
    best_state: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    stop_signal = StopSignal(world)
    stopped_by: str | None = None
    failure: RankError | None = None
    started = time.monotonic()
    world.meter.enter(REST)
    with log or contextlib.nullcontext(), stop_signal:
        for epoch in range(config.epochs):
            late = config.time_limit is not None and time.monotonic() - started >= config.time_limit
            try:
                record, stop = trainer.step(epoch, stop_signal.number or _LATE * late)
            except RankError as error:  # every rank has it, so what was learnt before can be kept
                failure = error
                break
            records.append(record)
            scores = None
            last = stop or epoch == config.epochs - 1
            if last or (epoch + 1) % config.eval_every == 0:
                scores = trainer.evaluate()
                if early.improves(epoch, scores):
                    best_state = trainer.state()
            trainer.advance(scores)
            if log is not None:
                log.epoch(record, scores)
            if stop:
                stopped_by = "time limit" if stop == _LATE else signal.Signals(int(stop)).name
            elif scores is not None and early.ends(epoch):
                stopped_by = "patience"
            if stopped_by is not None:
                break
        if failure is not None and early.best is None:
            raise failure
        best = early.best
        if best is None:  # no epoch, or no validation node: the last state is the best known
            best = Best(len(records) - 1, trainer.evaluate())
            best_state = trainer.state()
    if config.profile:
        found = profile(world, trainer.predicted_ledger(range(len(records))), len(records))
        show_profile(found, console)
        if world.rank == 0:
            write_json(folder / "profile.json", found)
    peaks = world.gather_vector([peak_memory(world)])
    seconds = [r["seconds"] for r in records]
    summary = {
        "best_epoch": best.epoch,
        "val": best.scores.get("val", {}),
        "test": best.scores.get("test", {}),
        "epochs": len(records),
        "seconds_per_epoch": float(np.median(seconds)) if seconds else 0.0,
        "bytes_sent_per_epoch": int(np.median([r["bytes_sent"] for r in records])) if records else 0,
        "peak_memory_bytes": int(peaks.max()),
        "parts": manifest.parts,
        "ranks": world.size,
        "metric": metric,
        "total_seconds": time.monotonic() - started,
        "stopped_by": str(failure) if failure else stopped_by,
    }
    trainer.policy.close()
    _save(trainer, folder / "best.pt", manifest, best_state, epoch=best.epoch)
    optimizer = trainer.optimizer_state()
    _save(trainer, folder / "last.pt", manifest, trainer.state(), epoch=len(records) - 1, optimizer=optimizer)
    with world.stage("save"):  # the run folder is whole when any rank goes on
        if world.rank == 0:
            write_json(folder / "summary.json", summary)
    print_summary(summary, folder, console)
    if failure is not None:
        raise failure
    return summary, [r["loss"] for r in records]


def _save(trainer: Trainer, path: Path, manifest: Manifest, state: dict[str, Any], **facts: Any) -> None:
    """Write a state of all ranks (a collective)."""
    state = trainer.of_all_ranks(state)
    with trainer.world.stage("save"):
        if trainer.world.rank == 0:
            write_state(path, state | facts | {"config": trainer.config.as_dict(), "build_id": manifest.build_id})


def _check_same_options(config: TrainConfig, world: World) -> None:
    """Ranks on other hosts are started by other commands."""
    options = world.gather_json(config.as_dict())
    for rank, other in enumerate(options):
        for name, value in options[0].items():
            if other[name] != value and name != "threads":
                flag = f"--{name.replace('_', '-')}"
                raise RankError(
                    f"options: rank 0 was started with {flag} {value}, rank {rank} with {flag} {other[name]}; start "
                    f"all ranks with the same options"
                )


def _agree_run_folder(run: str | Path | None, manifest: Manifest, trainer: Trainer) -> Path:
    world, started = trainer.world, time.strftime("%Y%m%d-%H%M%S")
    name = Path(run) if run else Path("runs") / f"{_slug(manifest)}-{trainer.model_name}-{started}"
    path = Path(world.gather_json(str(name))[0])
    with world.stage("run folder"):
        if world.rank == 0:
            create_run_folder(path)
    return path


def _slug(manifest: Manifest) -> str:
    name = str(manifest.graph.get("name", "graph"))
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-") or "graph"
