"""Where a run begins: anew, or at a checkpoint that all ranks can read and whose options agree.

A run goes on in its own run folder. Where another is named, that one goes on from the checkpoint and the first stays as
it is. A run that its launcher has started again goes on from its last checkpoint by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullgraph.checkpoint import Checkpoint, checkpoints_of, is_checkpoint, read_checkpoint
from fullgraph.config import TrainConfig
from fullgraph.loading import Placement
from fullgraph.policy import Recipe
from fullgraph.runlog import METRICS
from fullgraph.shards import Manifest
from fullgraph.wording import counted
from fullgraph.world import RankError, World

LATEST = "latest"
MAY_CHANGE = frozenset(
    (
        *("epochs", "time_limit", "patience", "checkpoint_every", "checkpoint_minutes", "keep_checkpoints"),
        *("profile", "memory_check", "debug", "measure_drift", "threads", "timeout", "exchange_bytes"),
    )
)
"""Options that do not change what a step computes."""
_RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins; the same on every rank but for the checkpoint's path."""

    config: TrainConfig
    run: Path | None = None
    """The run folder; None for a new one."""
    again: bool = False
    """Whether the folder may be that of this run's earlier start."""
    checkpoint: Checkpoint | None = None
    source: Path | None = None
    """The run folder that the checkpoint is from."""
    notes: tuple[str, ...] = ()
    """Lines for a person."""


def find_start(
    run: str | Path | None,
    resume: str | Path | None,
    config: TrainConfig | None,
    manifest: Manifest,
    placement: Placement,
    world: World,
) -> Start:
    """Where to begin, by what was asked for and what is on disk (a collective).

    ``resume`` is None, ``"latest"`` (the run's last good checkpoint, where there is one), or the path of a checkpoint
    or run folder. ``config`` None takes the checkpoint's. Raises ``RankError`` on all ranks.
    """
    run = None if run is None else Path(run)
    if world.restarts > 0:
        with world.stage("resume"):
            earlier = (run or _run_of_launch(world.launch, manifest)) if world.rank == 0 else None
        told = world.gather_json(None if earlier is None else str(earlier))[0]
        earlier = None if told is None else Path(told)
        found = None if earlier is None else _newest_good(earlier, None, manifest, placement, world)
        if found is not None:
            assert earlier is not None
            return _go_on(earlier, earlier, found, config, manifest, placement, world)
        run = earlier or run
    if resume is None:
        return Start(config=config or TrainConfig(), run=run, again=world.restarts > 0)
    chosen: list[str | None] = [None, None]
    with world.stage("resume"):
        if world.rank == 0:
            source, name = _source(run, resume, manifest)
            chosen = [None if source is None else str(source), name]
    told, name = world.gather_json(chosen)[0]
    source = None if told is None else Path(told)
    found = None if source is None else _newest_good(source, name, manifest, placement, world)
    if found is None:
        return Start(config=config or TrainConfig(), run=run or source, again=True)
    assert source is not None
    return _go_on(run or source, source, found, config, manifest, placement, world)


def _go_on(
    run: Path,
    source: Path,
    found: tuple[Checkpoint, list[str]],
    config: TrainConfig | None,
    manifest: Manifest,
    placement: Placement,
    world: World,
) -> Start:
    checkpoint, skipped = found
    facts = checkpoint.facts
    with world.stage("resume"):
        saved = _config_of(checkpoint)
        config = config or saved
        _check_options(config, saved, checkpoint)
    notes = [*skipped, f"goes on from {checkpoint.folder}, after epoch {facts.epoch}"]
    before = len(set(facts.ranks))
    if before != world.size:
        same = "losses are the same but for the order of summation"
        effect = same if Recipe.of(config).exact else "an approximate exchange approximates other rows"
        notes.append(f"{counted(world.size, 'rank')} now, {before} before: {effect}")
    if manifest.build_id != facts.build_id:
        notes.append(f"the shards are another build of the same graph ({manifest.build_id})")
    if world.size > 1 and not Recipe.of(config).exact and not checkpoint.fits(placement, manifest.build_id):
        notes.append("caches of message rows are of other parts: one exact pass fills them anew")
    return Start(
        config=config, run=run, again=world.restarts > 0, checkpoint=checkpoint, source=source, notes=tuple(notes)
    )


def saved_options(run: str | Path | None, resume: str | Path) -> TrainConfig | None:
    """The options of the checkpoint that ``resume`` names, before shards are read: what a command's flags start from.
    None where there is none, or none that can be read; the run says so later."""
    path = Path(resume) if resume != LATEST else None if run is None else Path(run)
    if path is None:
        return None
    for folder in [path] if is_checkpoint(path) else checkpoints_of(path):
        with contextlib.suppress(ValueError):
            return _config_of(read_checkpoint(folder))
    return None


def run_of(run: Path | None, resume: str | None, launch: str, manifest: Manifest) -> Path | None:
    """The run folder of a launch whose options said ``run`` and ``resume``; None where it did not come to have one."""
    if run is None and resume not in (None, LATEST):
        path = Path(str(resume))
        run = path.absolute().parent.parent if is_checkpoint(path) else path
    return run or _run_of_launch(launch, manifest)


def lines_before(start: Start) -> bytes:
    """What metrics.jsonl held when the checkpoint was written, or what is left of it, in whole lines."""
    if start.checkpoint is None or start.source is None:
        return b""
    with contextlib.suppress(FileNotFoundError):
        with (start.source / METRICS).open("rb") as file:
            text = file.read(start.checkpoint.facts.metrics_bytes)
        return text[: text.rfind(b"\n") + 1]
    return b""


def records_in(lines: bytes) -> list[dict[str, Any]]:
    """Records of metrics.jsonl, so far as they are such."""
    out = []
    for line in lines.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            out.append({key: record[key] for key in ("epoch", "loss", "seconds", "bytes_sent")})
    return out


def _source(run: Path | None, resume: str | Path, manifest: Manifest) -> tuple[Path | None, str | None]:
    """(run folder that the checkpoint is from, its name where one is named)."""
    if resume == LATEST:
        return run or _newest_run(manifest), None
    path = Path(resume)
    if is_checkpoint(path):
        source = path.absolute().parent.parent
        newest = next(iter(checkpoints_of(source)), path)
        if (run is None or run.absolute() == source.absolute()) and newest.name != path.name:
            raise ValueError(
                f"--resume {path}: the run has gone on to {newest.name}; name a new folder with --run to go on from "
                f"here beside it, or --resume {source} to go on with it"
            )
        return source, path.name
    if not checkpoints_of(path):
        raise ValueError(
            f"--resume {path}: neither a checkpoint nor a run folder that holds any; name one of the two, or "
            f"{LATEST} to begin anew where there is none"
        )
    return path, None


def _newest_run(manifest: Manifest) -> Path | None:
    """The run of these shards under runs/ whose checkpoint is newest."""
    found = []
    for folder in _RUNS.glob("*/"):
        for path in checkpoints_of(folder)[:1]:
            with contextlib.suppress(ValueError):
                facts = read_checkpoint(path).facts
                if facts.content_id == manifest.content_id:
                    found.append((facts.saved_at, folder))
    return max(found)[1] if found else None


def _run_of_launch(launch: str, manifest: Manifest) -> Path | None:
    """The run folder that an earlier start of this launch made."""
    found = []
    for path in _RUNS.glob("*/config.json"):
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(path.read_text())
            wanted = {"launch": launch, "build_id": manifest.build_id}
            if isinstance(record, dict) and wanted.items() <= record.items():
                found.append((path.stat().st_mtime, path.parent))
    return max(found)[1] if launch and found else None


def _newest_good(
    source: Path, name: str | None, manifest: Manifest, placement: Placement, world: World
) -> tuple[Checkpoint, list[str]] | None:
    """The newest checkpoint that is whole on every rank, and a line on each that is not; None where there is none (a
    collective). One that is named is the only one."""
    folders = checkpoints_of(source)
    names = [name] if name else [folder.name for folder in folders]
    names = list(world.gather_json(names)[0])
    skipped: list[str] = []
    for each in names:
        checkpoint, problem = None, None
        try:
            checkpoint = read_checkpoint(source / "checkpoints" / each)
            _check_graph(checkpoint, manifest)
            checkpoint.check(placement, manifest.build_id)
        except (ValueError, OSError) as error:
            problem = str(error)
        told = world.gather_json([problem, None if checkpoint is None else checkpoint.facts.id])
        bad = [f"rank {rank}: {text}" if world.size > 1 else text for rank, (text, _) in enumerate(told) if text]
        if not bad and len({id_ for _, id_ in told}) > 1:
            bad = [f"{each} is another checkpoint on rank 0 than on others; remove those that are not of this run"]
        if not bad:
            assert checkpoint is not None
            return checkpoint, skipped
        skipped.append(f"warning: left out a checkpoint: {bad[0]}")
    if not names:
        return None
    texts = "; ".join(line.removeprefix("warning: left out a checkpoint: ") for line in skipped)
    raise RankError(f"resume: no checkpoint of {source} can be used: {texts}")


def _check_graph(checkpoint: Checkpoint, manifest: Manifest) -> None:
    facts = checkpoint.facts
    if facts.build_id != manifest.build_id and facts.content_id != manifest.content_id:
        raise ValueError(
            f"{checkpoint.folder} is of build {facts.build_id}, but the shards are build {manifest.build_id}, of "
            f"another graph or other features, labels or splits; train on the shards it was made with"
        )


def _config_of(checkpoint: Checkpoint) -> TrainConfig:
    saved = checkpoint.facts.config
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    unknown = sorted(set(saved) - fields)
    try:
        if unknown:
            raise ValueError(f"unknown options {', '.join(unknown)}: it was written by another version of fullgraph")
        return TrainConfig(**saved)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{checkpoint.folder}: {e}") from None


def _check_options(config: TrainConfig, saved: TrainConfig, checkpoint: Checkpoint) -> None:
    now, then = config.as_dict(), saved.as_dict()
    different = [name for name in now if now[name] != then[name] and name not in MAY_CHANGE]
    if different:
        flags = "; ".join(f"--{name.replace('_', '-')} is {now[name]}, but was {then[name]}" for name in different)
        raise ValueError(
            f"{flags}: options that change what is computed stay as they were when a run goes on from "
            f"{checkpoint.folder}; leave them out, or begin anew without --resume"
        )
    if config.epochs != saved.epochs and saved.scheduler == "cosine":
        raise ValueError(
            f"--epochs is {config.epochs}, but was {saved.epochs}, over which --scheduler cosine falls to zero; leave "
            f"it as it was, or begin anew without --resume"
        )
    if config.epochs < checkpoint.facts.epoch:
        raise ValueError(
            f"--epochs is {config.epochs}, but {checkpoint.folder} has {checkpoint.facts.epoch} done; ask for at least "
            f"as many"
        )
