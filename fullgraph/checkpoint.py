"""Checkpoints: the state of a run between two epochs, so written that a kill at any instant leaves the one before good.

::

    RUN/checkpoints/
      epoch-00000040/            state after 40 epochs (a second one of the same epoch ends in .2)
        replicated.pt            what all ranks have alike: weights, optimiser, scheduler, early stopping
        part-00002-of-00004.pt   what belongs to the nodes of one part, where something does
        manifest.json            facts, and size and xxh3 of every file

A checkpoint MUST be written under a hidden name, its manifest last, and get its own name by rename when all of it is
on disk. The ``.pt`` files hold tensors and plain values and are read with ``weights_only=True``; nothing in them is
executed. Size and checksum MUST be checked before a file is read. ``replicated.pt`` and the manifest are written once
a file system, by the first rank that sees it; there each rank writes the files of its parts.

A file of a part holds ``ids`` (global ids of the part's nodes, ascending), ``rows`` (tensors with a row for each of
them, which fit any number of ranks and any partition) and ``local`` (whatever fits only the same parts on the same
rank; in the file of the rank's first part).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from fullgraph.cost import Layer0
from fullgraph.files import FileEntry, checksum, sync
from fullgraph.loading import Placement
from fullgraph.runlog import write_json, write_state, writes
from fullgraph.shards import MANIFEST, Manifest
from fullgraph.world import RankError, World

FORMAT = "fullgraph-checkpoint"
FORMAT_VERSION = 1
FOLDER = "checkpoints"
_REPLICATED = "replicated.pt"
_NAME = re.compile(r"epoch-(\d{8,})(?:\.(\d+))?")
_HIDDEN = re.compile(r"\.epoch-.*\.[0-9a-f]+\.(saving|removed)")
_MAX_MANIFEST_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run as one rank has it."""

    replicated: dict[str, Any]
    """Tensors and plain values that all ranks have alike."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """[n, ...] each: a row for each of the rank's nodes, whose global ids are ``ids``."""
    ids: Tensor
    """int64 [n]."""
    local: dict[str, Any] = field(default_factory=dict)
    """Tensors and plain values that mean something only to this rank with the parts that it has."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a manifest says beside its files."""

    epoch: int
    """Epochs that are done."""
    id: str
    """The same in the manifests of all file systems of one checkpoint."""
    build_id: str
    content_id: str
    """``Manifest.content_id`` of the shards."""
    ranks: tuple[int, ...]
    """The rank of each part."""
    parts_with_files: tuple[int, ...]
    config: dict[str, Any]
    layer0: Layer0
    metrics_bytes: int
    """Length of metrics.jsonl when the checkpoint was written."""
    score: float | None
    """The epoch's validation score, the larger the better; None where it was not evaluated."""
    saved_at: str

    def __post_init__(self) -> None:
        kinds: dict[str, type | tuple[type, ...]] = dict.fromkeys(("id", "build_id", "content_id", "layer0"), str)
        kinds |= dict.fromkeys(("epoch", "metrics_bytes"), int) | {"saved_at": str, "config": dict}
        kinds |= {"ranks": tuple, "parts_with_files": tuple, "score": (float, int, type(None))}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}")
        if self.epoch < 0 or self.metrics_bytes < 0:
            raise ValueError(f"epoch is {self.epoch}, metrics_bytes {self.metrics_bytes}; expected 0 or more")
        if self.layer0 not in get_args(Layer0):
            raise ValueError(f"layer0 is {self.layer0!r}; expected one of {', '.join(get_args(Layer0))}")
        for name in ("ranks", "parts_with_files"):
            if not all(type(number) is int and number >= 0 for number in getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected numbers of 0 or more")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk whose manifest has been read."""

    folder: Path
    facts: Facts
    files: dict[str, FileEntry]
    """By name."""

    def check(self, placement: Placement, build_id: str) -> None:
        """Raise ``ValueError`` where a file that a rank reads is missing or damaged."""
        held = [part for part in self.needed(placement, build_id) if part in self.facts.parts_with_files]
        for name in (_REPLICATED, *(_part_name(part, self.parts) for part in held)):
            path = self.folder / name
            entry = self.files.get(name)
            if entry is None or not path.is_file():
                raise ValueError(f"{path} is not there; copy it from the host that wrote it")
            if (size := path.stat().st_size) != entry.bytes:
                raise ValueError(f"{path}: {size} bytes; the manifest says {entry.bytes}")
            if (found := checksum(path)) != entry.xxh3:
                raise ValueError(f"{path}: checksum is {found}; the manifest says {entry.xxh3}")

    @property
    def parts(self) -> int:
        return len(self.facts.ranks)

    def needed(self, placement: Placement, build_id: str) -> tuple[int, ...]:
        """Parts whose files a rank reads: its own, or all where the shards are those of another build."""
        return placement.mine if self.facts.build_id == build_id else tuple(range(self.parts))

    def fits(self, placement: Placement, build_id: str) -> bool:
        """Whether each rank has the parts that it had when the checkpoint was written."""
        return self.facts.build_id == build_id and self.facts.ranks == placement.ranks

    def read(self, placement: Placement, build_id: str, ids: Tensor) -> Snapshot:
        """The state for a rank whose nodes have the global ids ``ids``; the files are to be checked before.

        ``local`` is empty where this rank had other parts when the checkpoint was written.
        """
        replicated = self._load(_REPLICATED)
        rows: dict[str, Tensor] = {}
        local: dict[str, Any] = {}
        sorted_ids, order = torch.sort(ids.cpu())
        missing = torch.ones(ids.shape[0], dtype=torch.bool)
        for part in self.needed(placement, build_id):
            if part not in self.facts.parts_with_files:
                continue
            name = _part_name(part, self.parts)
            state = self._load(name)
            held, given = state.get("ids"), state.get("rows")
            if not isinstance(held, Tensor) or held.dtype != torch.int64 or not isinstance(given, dict):
                raise ValueError(f"{self.folder / name} does not hold the state of a part")
            if self.fits(placement, build_id) and part == placement.mine[0]:
                local = state.get("local", {})
            # Where in the file those of this rank's nodes lie that are in it.
            place = torch.searchsorted(held, sorted_ids)
            here = torch.nonzero(place < held.shape[0]).squeeze(1)
            here = here[held[place[here]] == sorted_ids[here]]
            missing[order[here]] = False
            for key, values in given.items():
                if not isinstance(values, Tensor) or values.shape[:1] != held.shape:
                    raise ValueError(f"{self.folder / name}: {key} does not hold a row for each of its nodes")
                out = rows.setdefault(key, values.new_zeros(ids.shape[0], *values.shape[1:]))
                out[order[here]] = values[place[here]]
        if rows and bool(missing.any()):
            node = int(ids[int(torch.nonzero(missing)[0])])
            raise ValueError(f"{self.folder} holds no rows of node {node}; copy its files from all hosts")
        return Snapshot(replicated=replicated, rows=rows, ids=ids, local=local)

    def _load(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as e:
            reason = next(iter(str(e).splitlines()), type(e).__name__)
            raise ValueError(f"{path} cannot be read as a state: {reason}") from None
        if not isinstance(state, dict):
            raise ValueError(f"{path} holds {type(state).__name__}; expected a dictionary")
        return state


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder; ``ValueError`` says what is wrong with its manifest."""
    path = folder / MANIFEST
    try:
        size = path.stat().st_size
        if size > _MAX_MANIFEST_BYTES:
            raise ValueError(f"{size} bytes; no manifest is that long")
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"the format is not {FORMAT}")
        if content.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"format version {content.get('format_version')!r}, but this version of fullgraph reads version "
                f"{FORMAT_VERSION}"
            )
        names = [f.name for f in dataclasses.fields(Facts)]
        values = {name: content[name] for name in names}
        lists = {name: tuple(values[name]) for name in ("ranks", "parts_with_files")}
        files = [FileEntry(path=f["path"], bytes=f["bytes"], xxh3=f["xxh3"]) for f in content["files"]]
        return Checkpoint(folder=folder, facts=Facts(**values | lists), files={file.path: file for file in files})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        why = f"{e} is missing" if isinstance(e, KeyError) else str(e)
        raise ValueError(f"{path}: not the manifest of a checkpoint ({why})") from None


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is named like a checkpoint and has a manifest."""
    return _NAME.fullmatch(folder.name) is not None and (folder / MANIFEST).is_file()


def checkpoints_of(run: Path) -> list[Path]:
    """Folders of the run's checkpoints, the newest first; what they hold is not looked at."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in (run / FOLDER).iterdir():
            if name := _NAME.fullmatch(entry.name):
                found.append((int(name[1]), int(name[2] or 1), entry))
    return [entry for _, _, entry in sorted(found, reverse=True)]


def way_on(run: Path | None) -> str:
    """What a person can do when ranks of a run are gone."""
    for folder in [] if run is None else checkpoints_of(run):
        with contextlib.suppress(ValueError):
            return f"go on from epoch {read_checkpoint(folder).facts.epoch} with --resume {run}"
    return "no checkpoint is there, so start again (--checkpoint-every and --max-restarts let a run go on)"


def _part_name(part: int, parts: int) -> str:
    return f"part-{part:05d}-of-{parts:05d}.pt"


class CheckpointWriter:
    """Writes the checkpoints of a run and removes those that are no longer wanted; ``save`` is a collective.

    The last ``keep`` stay, and of the others the one with the best validation score.
    """

    def __init__(self, run: Path, world: World, placement: Placement, manifest: Manifest, keep: int) -> None:
        self.folder, self.world, self.placement, self.keep = run / FOLDER, world, placement, keep
        self._ids = {"build_id": manifest.build_id, "content_id": manifest.content_id}
        self._first: int | None = None
        """The first rank on this rank's file system, once it is known."""
        self.last: str | None = None
        """Name of the newest that this writer wrote or was told of."""

    def save(self, snapshot: Snapshot, **facts: Any) -> None:
        """Write one checkpoint; ``facts`` are those fields of ``Facts`` that only the caller knows.

        Raises ``RankError`` on all ranks where one cannot write; the checkpoint before is as it was.
        """
        world, epoch = self.world, facts["epoch"]
        unfinished = self.folder
        try:
            first = self._first_rank_here()
            token = str(world.gather_json(secrets.token_hex(8))[0])
            unfinished = self.folder / f".epoch-{epoch:08d}.{token}.saving"
            with world.stage("checkpoint"):
                if world.rank == first:
                    with writes(unfinished):
                        unfinished.mkdir(parents=True)
                        remove_unfinished(self.folder, but=unfinished)
            written: dict[int, FileEntry] = {}
            replicated: list[FileEntry] = []
            with world.stage("checkpoint"):
                written = _write_parts(unfinished, snapshot, self.placement)
                if world.rank == first:
                    replicated = [_write(unfinished / _REPLICATED, snapshot.replicated)]
            mine = {part: dataclasses.asdict(entry) for part, entry in written.items()}
            told = world.gather_json([first, list(mine), list(mine.values())])
            with world.stage("checkpoint"):
                if world.rank == first:
                    here = [FileEntry(**entry) for of, _, entries in told if of == first for entry in entries]
                    parts = tuple(sorted(part for _, held, _ in told for part in held))
                    about = Facts(
                        **self._ids | facts,
                        id=token,
                        ranks=self.placement.ranks,
                        parts_with_files=parts,
                        saved_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                    )
                    _write_manifest(unfinished, [*replicated, *here], about)
                    with writes(unfinished):
                        os.rename(unfinished, _free_name(self.folder, epoch))
                        sync(self.folder)
        except RankError as error:
            if self._first == world.rank:
                shutil.rmtree(unfinished, ignore_errors=True)
            good = f"; {self.folder / self.last} is as it was" if self.last else ""
            raise RankError(f"{error}{good}", shown_by=error.shown_by) from error.__cause__
        self.last = f"epoch-{epoch:08d}"
        with world.stage("checkpoint"):
            if world.rank == first:
                self._prune(epoch)

    def _first_rank_here(self) -> int:
        """The first rank that sees the folder as this one does: each host's first rank leaves a mark, and all look
        which marks they see."""
        if self._first is None:
            world = self.world
            token = str(world.gather_json(secrets.token_hex(4))[0])
            mark = self.folder / f".seen-{token}-{world.rank}"
            with world.stage("checkpoint"):
                if world.local_rank == 0:
                    with writes(self.folder):
                        self.folder.mkdir(parents=True, exist_ok=True)
                        mark.touch()
            with world.stage("checkpoint"):
                seen = [int(path.name.rpartition("-")[2]) for path in self.folder.glob(f".seen-{token}-*")]
                if not seen:
                    raise ValueError(f"{self.folder} is not seen by this rank, but by the first of its host")
                self._first = min(seen)
            with world.stage("checkpoint"):
                mark.unlink(missing_ok=True)
        assert self._first is not None
        return self._first

    def _prune(self, epoch: int) -> None:
        """What is older than the last few and not the best, and what is newer than ``epoch``: leftovers of a future
        that did not come, because they could not be read."""
        facts = {}
        for folder in checkpoints_of(self.folder.parent):
            with contextlib.suppress(ValueError):
                facts[folder] = read_checkpoint(folder).facts
        newest: dict[int, Path] = {}  # the first of each epoch is the newest
        for folder, f in facts.items():
            newest.setdefault(f.epoch, folder)
        past = [folder for at, folder in newest.items() if at <= epoch]
        kept = set(past[: self.keep])
        scored = {folder: score for folder in past if (score := facts[folder].score) is not None}
        if scored:
            kept.add(max(scored, key=lambda folder: scored[folder]))
        for folder in checkpoints_of(self.folder.parent):
            if folder not in kept:
                _remove(folder)


def _write_parts(folder: Path, snapshot: Snapshot, placement: Placement) -> dict[int, FileEntry]:
    """Write the files of this rank's parts; their entries by part."""
    if not snapshot.rows and not snapshot.local:
        return {}
    written = {}
    part_of = placement.part_of(snapshot.ids.cpu().numpy())
    for part in placement.mine if snapshot.rows else placement.mine[:1]:
        index = np.flatnonzero(part_of == part)
        place = torch.from_numpy(index)[torch.argsort(snapshot.ids.cpu()[index])]
        state = {
            "ids": snapshot.ids.cpu()[place],
            "rows": {name: rows.detach().cpu()[place] for name, rows in snapshot.rows.items()},
            "local": snapshot.local if part == placement.mine[0] else {},
        }
        written[part] = _write(folder / _part_name(part, len(placement.ranks)), state)
    return written


def _write(path: Path, state: dict[str, Any]) -> FileEntry:
    write_state(path, state)
    return FileEntry(path=path.name, bytes=path.stat().st_size, xxh3=checksum(path))


def _write_manifest(folder: Path, files: list[FileEntry], facts: Facts) -> None:
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(facts)}
    write_json(folder / MANIFEST, content | {"files": [dataclasses.asdict(file) for file in files]})


def _free_name(folder: Path, epoch: int) -> Path:
    """A name for a checkpoint that does not stand in the way of one of the same epoch."""
    name, number = f"epoch-{epoch:08d}", 1
    path = folder / name
    while path.exists():
        number += 1
        path = folder / f"{name}.{number}"
    return path


def remove_unfinished(folder: Path, but: Path | None = None) -> None:
    """Remove from a folder of checkpoints what was not finished, ``but`` for one."""
    for entry in folder.iterdir():
        if entry != but and _HIDDEN.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name.startswith(".seen-"):
            entry.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Remove a checkpoint; one that is removed in part only has no name any more."""
    hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.removed")
    with contextlib.suppress(OSError):  # the next one may succeed
        os.rename(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
