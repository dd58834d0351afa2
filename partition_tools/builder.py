"""From a graph and its assignment to a folder of shards.

One shard is made and written at a time, and dense features are dealt out to all shards in one pass over their rows, so
memory stays near that of the graph without features, one shard and a few bytes an edge. The folder is made under a
hidden name beside its place and renamed when it is complete; a build that dies leaves that hidden folder, which the
next build into the same place removes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import xxhash
from numpy.typing import NDArray

from fullgraph.files import sync
from fullgraph.shards import (
    BUILDING,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    ShardFile,
    part_name,
    reserve_shard,
    seal_shard,
    write_manifest,
    write_shard,
)
from partition_tools.assign import Assignment
from partition_tools.cutter import Cutter
from partition_tools.graph import Array, Graph
from partition_tools.progress import Report
from partition_tools.stored import StoredRows, row_blocks
from partition_tools.summary import Summary, summarise

_MOST_OPEN = 256
"""Shards that are kept open while features are dealt out."""

_OURS = re.compile(rf"\.?(part-\d{{5,}}-of-\d{{5,}}\.h5|{re.escape(MANIFEST)})(\.\d+\.tmp)?")


def build(
    graph: Graph,
    assignment: Assignment,
    out: str | Path,
    *,
    summary: Summary | None = None,
    force: bool = False,
    progress: Report | None = None,
) -> Manifest:
    """Write the shards of ``graph`` to the folder ``out``, which appears complete or not at all.

    ``summary`` saves counting the graph again. ``force`` replaces a build that is there; files of another kind are
    never removed. ``progress`` is called with ("writing shards", edges, of all) after each shard, and then with
    ("writing features", rows, of all). The same graph, assignment and options give
    the same bytes. Raises ``ValueError`` where the folder must not be written to or the disk is too full.
    """
    out = Path(out).resolve()
    check_target(out, force=force)
    summary = summary or summarise(graph)
    cutter = Cutter.make(graph, assignment.part, assignment.parts, summary.num_classes, assignment.cluster)
    edge_x = cutter.columns.get("edge_x")
    facts = summary.facts() | {
        "feature_dtype": None if cutter.x is None else str(cutter.x.dtype),
        "edge_feature_dtype": None if edge_x is None else str(edge_x.dtype),
    }
    partition = {
        "method": assignment.method,
        "seed": assignment.seed,
        "options": assignment.options,
        "versions": assignment.versions,
        "notes": list(assignment.notes),
        "table": [dataclasses.asdict(row) for row in assignment.table],
    }
    build_id = _build_id(assignment.part, facts, partition, graph.changes, cutter.sums)
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_space(cutter, out)
    with _folder_for(out, force) as folder:
        files = _write_shards(cutter, build_id, folder, progress)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            build_id=build_id,
            parts=assignment.parts,
            graph=facts,
            partition=partition,
            changes=graph.changes,
            files=files,
            sums=cutter.sums,
        )
        write_manifest(folder, manifest)
    return manifest


def _write_shards(cutter: Cutter, build_id: str, folder: Path, progress: Report | None) -> tuple[ShardFile, ...]:
    scratch = folder / "scratch"
    edges = cutter.edges_by_part(scratch)
    in_weight = cutter.in_weight(edges)
    paths = [folder / part_name(q, cutter.parts) for q in range(cutter.parts)]
    files: list[ShardFile] = []
    places: list[int] = []
    counts: list[tuple[int, int]] = []
    for q, path in enumerate(paths):
        shard, features = cutter.shard(q, build_id, edges, in_weight), cutter.reserved(q)
        if features is None:
            files.append(write_shard(path, shard))
        else:
            places.append(reserve_shard(path, shard, features))
        counts.append((shard.num_owned, shard.num_edges))
        del shard
        if progress is not None:
            progress("writing shards", int(edges.offsets[q + 1]), int(edges.offsets[-1]))
    del edges, in_weight
    shutil.rmtree(scratch, ignore_errors=True)
    if cutter.x is not None and not isinstance(cutter.x, sp.csr_array):
        _deal_out(cutter.x, cutter.small_part, paths, places, progress)
        files = [seal_shard(path, *count) for path, count in zip(paths, counts, strict=True)]
    return tuple(files)


def _deal_out(
    x: Array | StoredRows, part: Array, paths: list[Path], places: list[int], progress: Report | None
) -> None:
    """Write the rows of each part into its file from ``places`` [P] on, in one pass over all rows."""
    if math.prod(x.shape) == 0:
        return
    with contextlib.ExitStack() as stack:
        few = len(paths) <= _MOST_OPEN
        kept = [stack.enter_context(open(path, "r+b", buffering=0)) for path in paths] if few else []
        cursor = np.array(places, np.int64)
        for start, block in row_blocks(x):
            into = part[start : start + block.shape[0]]
            counts = np.bincount(into, minlength=len(paths))
            ends = np.cumsum(counts)
            rows = np.ascontiguousarray(block if len(paths) == 1 else block[np.argsort(into, kind="stable")])
            for q in np.flatnonzero(counts).tolist():
                run = rows[ends[q] - counts[q] : ends[q]].data.cast("B")
                with contextlib.nullcontext(kept[q]) if few else open(paths[q], "r+b", buffering=0) as file:
                    _write_at(file.fileno(), run, int(cursor[q]))
                cursor[q] += run.nbytes
            if progress is not None:
                progress("writing features", start + block.shape[0], x.shape[0])


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def check_target(out: str | Path, *, force: bool) -> None:
    """Raise ``ValueError`` where a build must not be written to ``out``."""
    out = Path(out)
    file = next((parent for parent in out.absolute().parents if parent.exists() and not parent.is_dir()), None)
    if file is not None:
        raise ValueError(f"{out}: {file} is a file, so no folder can be in it; name another (--out)")
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out}: is a file; expected a folder that is new, empty or holds a build (--out)")
    if os.path.ismount(out):
        raise ValueError(f"{out}: is a mount point, which cannot be replaced as a whole; name a folder in it (--out)")
    names = sorted(entry.name for entry in out.iterdir())
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    if MANIFEST in names and not _is_ours(out / MANIFEST):
        foreign.append(MANIFEST)
    if foreign:
        raise ValueError(f"{out}: holds files that no build wrote ({', '.join(foreign[:3])}); name another folder")
    if names and not force:
        raise ValueError(f"{out}: holds a build already; --force replaces it, or name another folder with --out")


def _is_ours(manifest: Path) -> bool:
    """Whether manifest.json is that of a build, of any version and however damaged, and not some other tool's."""
    with open(manifest, "rb") as file:
        return FORMAT.encode() in file.read(256)


def _build_id(part: NDArray[np.int32], *content: Any) -> str:
    digest = xxhash.xxh3_128(part.tobytes())
    digest.update(json.dumps(content, sort_keys=True).encode())
    return digest.hexdigest()


def _check_space(cutter: Cutter, out: Path) -> None:
    needed, free = cutter.least_bytes(), shutil.disk_usage(out.parent).free
    if needed > free:
        raise ValueError(
            f"{out}: the shards take at least {needed / 1e6:,.1f} MB, but {free / 1e6:,.1f} MB are free there; "
            "make room, or name a folder on another disk (--out)"
        )


# ------------------------------------------------------------------------------------------------------- the folder


@contextlib.contextmanager
def _folder_for(out: Path, force: bool) -> Iterator[Path]:
    """Yields a new folder beside ``out`` that takes its place when the block ends, and is removed if it raises."""
    _remove_left_behind(out)
    folder = out.with_name(f".{out.name}.{secrets.token_hex(4)}{BUILDING}")
    try:
        folder.mkdir()
    except OSError as error:
        raise OSError(f"{out}: cannot be made ({error.strerror}); name another folder with --out") from None
    try:
        with _locked(folder):
            try:
                yield folder
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, None):
                    raise
                reason = error.strerror or str(error)
                remedy = "make room, or name a folder on another disk (--out)"
                raise OSError(f"{out}: cannot be written ({reason}); {remedy}") from error
            check_target(out, force=force)
            _put_in_place(folder, out)
            sync(out.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, out: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        os.rename(folder, out)
        return
    old = folder.with_suffix(".replaced")
    os.rename(out, old)
    try:
        os.rename(folder, out)
    except OSError:
        os.rename(old, out)
        raise
    for entry in old.iterdir():
        if _OURS.fullmatch(entry.name):
            entry.unlink()
    with contextlib.suppress(OSError):  # something else has been put there meanwhile; it stays
        old.rmdir()


def _remove_left_behind(out: Path) -> None:
    """Remove what builds into ``out`` left that died; one that still runs holds its lock."""
    for folder in out.parent.iterdir():
        if folder.name.startswith(f".{out.name}.") and folder.name.endswith(BUILDING) and folder.is_dir():
            with contextlib.suppress(OSError), _locked(folder) as alone:  # another build may be clearing it, too
                if alone:
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder; yields whether it was free. File systems without locks count as never free."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:
            free = False
        yield free
    finally:
        os.close(descriptor)
