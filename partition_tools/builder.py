"""From a graph and its assignment to a folder of shards.

One shard is made and written at a time, so memory stays near that of the graph, one shard and about ten bytes an
edge. The folder is made under a hidden name beside its place and renamed when it is complete; a build that dies
leaves that hidden folder, which the next build into the same place removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
import xxhash
from numpy.typing import NDArray

from fullgraph.cut import halo_nodes
from fullgraph.files import sync
from fullgraph.shards import (
    BUILDING,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    Shard,
    local_id_dtype,
    part_name,
    write_manifest,
    write_shard,
)
from partition_tools.assign import Assignment
from partition_tools.graph import Array, Graph
from partition_tools.summary import Summary, summarise
from partition_tools.sums import bits, block_sums

SPARSE_BELOW = 0.1
"""Features are stored as CSR where the share of values other than zero is below this."""

Progress: TypeAlias = Callable[[int, int], None]

_OURS = re.compile(rf"\.?(part-\d{{5,}}-of-\d{{5,}}\.h5|{re.escape(MANIFEST)})(\.\d+\.tmp)?")


def build(
    graph: Graph,
    assignment: Assignment,
    out: str | Path,
    *,
    summary: Summary | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Write the shards of ``graph`` to the folder ``out``, which appears complete or not at all.

    ``summary`` saves counting the graph again. ``force`` replaces a build that is there; files of another kind are
    never removed. ``progress(done, parts)`` is called after each shard. The same graph, assignment and options give
    the same bytes. Raises ``ValueError`` where the folder must not be written to or the disk is too full.
    """
    out = Path(out).resolve()
    check_target(out, force=force)
    summary = summary or summarise(graph)
    cutter = _Cutter.make(graph, assignment, summary.num_classes)
    facts = summary.facts() | {
        "feature_dtype": None if cutter.x is None else str(cutter.x.dtype),
        "edge_feature_dtype": None if cutter.edge_x is None else str(cutter.edge_x.dtype),
    }
    partition = {
        "method": assignment.method,
        "seed": assignment.seed,
        "options": assignment.options,
        "versions": assignment.versions,
        "notes": list(assignment.notes),
    }
    sums = _sums(graph, cutter.x, cutter.edge_x)
    build_id = _build_id(assignment.part, facts, partition, graph.changes, sums)
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_space(cutter, out)
    with _folder_for(out, force) as folder:
        files = []
        for q in range(assignment.parts):
            files.append(write_shard(folder / part_name(q, assignment.parts), cutter.shard(q, build_id)))
            if progress is not None:
                progress(q + 1, assignment.parts)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            build_id=build_id,
            parts=assignment.parts,
            graph=facts,
            partition=partition,
            changes=graph.changes,
            files=tuple(files),
            sums=sums,
        )
        write_manifest(folder, manifest)
    return manifest


def check_target(out: str | Path, *, force: bool) -> None:
    """Raise ``ValueError`` where a build must not be written to ``out``."""
    out = Path(out)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Cutter:
    """What every shard is cut from: nodes and edges in order of part, and whole-graph degrees."""

    graph: Graph
    part: NDArray[np.int32]
    parts: int
    x: Array | sp.csr_array | None
    sparse: bool
    edge_x: Array | None
    nodes: NDArray[np.int64]
    """[N] node ids by (part, id)."""
    node_offsets: NDArray[np.int64]
    """[P+1]"""
    index: NDArray[np.int64]
    """[N] index of a node in its owner's list."""
    edges: NDArray[np.int64]
    """[E] edge ids by (part of destination, id)."""
    edge_offsets: NDArray[np.int64]
    """[P+1]"""
    in_degree: NDArray[np.int64]
    in_weight: NDArray[np.float64]
    loop_count: NDArray[np.int64]
    num_classes: int

    @classmethod
    def make(cls, graph: Graph, assignment: Assignment, num_classes: int) -> _Cutter:
        n, parts, part = graph.num_nodes, assignment.parts, assignment.part
        if part.shape != (n,):
            raise ValueError(f"{graph.name}: the assignment has {part.shape[0]} entries for {n} nodes")
        # Sorting one or two bytes is a counting sort.
        small = part.astype(np.min_scalar_type(parts - 1))
        nodes, node_offsets = _by_part(small, parts)
        edges, edge_offsets = _by_part(small[graph.dst], parts)
        index = np.empty(n, np.int64)
        index[nodes] = np.arange(n) - np.repeat(node_offsets[:-1], np.diff(node_offsets))
        in_degree = np.bincount(graph.dst, minlength=n)
        weight = graph.edge_weight
        x, edge_x = _canonical(graph.x, "x"), _canonical(graph.edge_x, "edge_x")
        assert not isinstance(edge_x, sp.csr_array)
        return cls(
            graph=graph,
            part=part,
            parts=parts,
            x=x,
            sparse=x is not None and _density(x) < SPARSE_BELOW,
            edge_x=edge_x,
            nodes=nodes,
            node_offsets=node_offsets,
            index=index,
            edges=edges,
            edge_offsets=edge_offsets,
            in_degree=in_degree,
            in_weight=(in_degree if weight is None else np.bincount(graph.dst, weight, n)).astype(np.float64),
            loop_count=np.bincount(graph.dst[graph.src == graph.dst], minlength=n),
            num_classes=num_classes,
        )

    def shard(self, q: int, build_id: str) -> Shard:
        graph, splits = self.graph, self.graph.splits
        owned = self.nodes[self.node_offsets[q] : self.node_offsets[q + 1]]
        edges = self.edges[self.edge_offsets[q] : self.edge_offsets[q + 1]]
        src = graph.src[edges]
        halo = halo_nodes(src, self.part, q)
        n, known = owned.shape[0], np.concatenate((owned, halo))
        local = np.empty(graph.num_nodes, local_id_dtype(known.shape[0]))
        local[known] = np.arange(known.shape[0])
        row, source = self.index[graph.dst[edges]], local[src]
        # Edge ids ascend, so a stable sort leaves ties in order of edge id.
        order = np.argsort(row * known.shape[0] + source, kind="stable")
        edges = edges[order]
        masks = {
            name: np.zeros((0, n), np.bool_) if splits is None else getattr(splits, name)[:, owned]
            for name in ("train", "val", "test")
        }
        return Shard(
            part=q,
            parts=self.parts,
            build_id=build_id,
            graph=graph.name,
            num_nodes_global=graph.num_nodes,
            num_edges_global=graph.num_edges,
            task=graph.task,
            num_classes=self.num_classes,
            owned_global=owned,
            halo_global=halo,
            halo_owner=self.part[halo],
            halo_index=self.index[halo],
            indptr=np.concatenate(([0], np.cumsum(np.bincount(row, minlength=n)))),
            indices=source[order],
            edge_global=edges,
            edge_weight=None if graph.edge_weight is None else graph.edge_weight[edges],
            edge_x=None if self.edge_x is None else self.edge_x[edges],
            in_degree=self.in_degree[known],
            in_weight=self.in_weight[known],
            loop_count=self.loop_count[known],
            x=None if self.x is None else _rows(self.x, owned, self.sparse),
            learned_features=graph.learned_features,
            y=None if graph.y is None else graph.y[owned],
            **masks,
            node_ids=None if graph.node_ids is None else graph.node_ids[owned],
        )

    def least_bytes(self) -> int:
        """Bytes that all shards together take at least: halo lists and string ids are not counted."""
        graph, n, e = self.graph, self.graph.num_nodes, self.graph.num_edges
        node = 8 + 3 * 8 + (0 if graph.splits is None else 3 * graph.splits.count)
        node += 0 if graph.y is None else graph.y.dtype.itemsize * int(np.prod(graph.y.shape[1:]))
        edge = 8 + 4 + (0 if graph.edge_weight is None else graph.edge_weight.dtype.itemsize)
        edge += 0 if self.edge_x is None else self.edge_x.dtype.itemsize * self.edge_x.shape[1]
        features = 0
        if self.x is not None:
            stored = _nonzero(self.x) if self.sparse else int(np.prod(self.x.shape))
            features = stored * (self.x.dtype.itemsize + (4 if self.sparse else 0))
        return n * node + e * edge + features


def _by_part(part: Array, parts: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions by (part, position), and the [P+1] offsets of the parts."""
    counts = np.bincount(part, minlength=parts)
    return np.argsort(part, kind="stable"), np.concatenate(([0], np.cumsum(counts)))


def _canonical(x: Array | sp.csr_array | None, name: str) -> Array | sp.csr_array | None:
    """Features of at most 8 bytes a value, bool as uint8, duplicate sparse entries summed."""
    if x is None:
        return None
    if x.dtype.kind not in "biuf" or x.dtype.itemsize > 8:
        raise ValueError(f"{name} is {x.dtype}; expected a real number of at most 8 bytes")
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    if isinstance(x, sp.csr_array) and not x.has_canonical_format:
        x = x.copy()
        x.sum_duplicates()
    return x


def _nonzero(x: Array | sp.csr_array) -> int:
    values = x.data if isinstance(x, sp.csr_array) else x
    return int(np.count_nonzero(bits(values)))


def _density(x: Array | sp.csr_array) -> float:
    return _nonzero(x) / max(1, int(np.prod(x.shape)))


def _rows(x: Array | sp.csr_array, owned: NDArray[np.int64], sparse: bool) -> Array | sp.csr_array:
    """Rows of x in the form in which they are stored. Bits are moved, not values, so that -0.0 and NaN survive."""
    if isinstance(x, sp.csr_array):
        rows = x[owned]
        if sparse:
            return rows
        stored = sp.csr_array((bits(rows.data), rows.indices, rows.indptr), shape=rows.shape)
        return np.asarray(stored.toarray().view(rows.dtype))
    dense = x[owned]
    if not sparse:
        return dense
    found = sp.csr_array(bits(dense))
    return sp.csr_array((found.data.view(dense.dtype), found.indices, found.indptr), shape=dense.shape)


def _sums(graph: Graph, x: Array | sp.csr_array | None, edge_x: Array | None) -> dict[str, list[int]]:
    """Sums of every dataset that is copied from the graph, under the name of the field of `Shard`."""
    nodes, edges = np.arange(graph.num_nodes), np.arange(graph.num_edges)
    tables: dict[str, tuple[NDArray[np.int64], Any]] = {
        "src": (edges, graph.src),
        "dst": (edges, graph.dst),
        "edge_weight": (edges, graph.edge_weight),
        "edge_x": (edges, edge_x),
        "x": (nodes, x),
        "y": (nodes, graph.y),
        "node_ids": (nodes, graph.node_ids),
    }
    if graph.splits is not None:
        tables |= {name: (nodes, getattr(graph.splits, name).T) for name in ("train", "val", "test")}
    return {
        name: block_sums(ids, rows, ids.shape[0]).tolist() for name, (ids, rows) in tables.items() if rows is not None
    }


def _build_id(part: NDArray[np.int32], *content: Any) -> str:
    digest = xxhash.xxh3_128(part.tobytes())
    digest.update(json.dumps(content, sort_keys=True).encode())
    return digest.hexdigest()


def _check_space(cutter: _Cutter, out: Path) -> None:
    needed, free = cutter.least_bytes(), shutil.disk_usage(out.parent).free
    if needed > free:
        raise ValueError(
            f"{out}: the shards take at least {needed / 1e6:,.0f} MB, but {free / 1e6:,.0f} MB are free there; "
            "make room, or name a folder on another disk (--out)"
        )


# ------------------------------------------------------------------------------------------------------- the folder


@contextlib.contextmanager
def _folder_for(out: Path, force: bool) -> Iterator[Path]:
    """Yields a new folder beside ``out`` that takes its place when the block ends, and is removed if it raises."""
    _remove_left_behind(out)
    folder = out.with_name(f".{out.name}.{secrets.token_hex(4)}{BUILDING}")
    folder.mkdir()
    try:
        with _locked(folder):
            yield folder
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
