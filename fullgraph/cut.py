"""The cut of a partitioned graph: which nodes are halo, what crosses between parts, and how much of it.

Everything here is counted from the edges themselves, never taken from a partitioner.

Words: an *edge* is a directed entry ``u -> v``, stored with the owner of v. A *cut edge* has its ends in different
parts. A *cut pair* is an unordered pair of nodes joined by at least one cut edge. Part p sends part q one *row* for
each distinct node of p with an edge into q; to q such a node is a *halo* node, so rows sent p -> q and halo rows that
q receives from p are the same number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullgraph.shards import Shard

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class CutCounts:
    """What crosses between P parts."""

    cut_edges: int
    """Directed entries whose ends lie in different parts; duplicates counted."""
    cut_pairs: int
    """Unordered pairs of nodes with at least one cut edge between them."""
    nodes: NDArray[np.int64]
    """[P] nodes owned."""
    edges: NDArray[np.int64]
    """[P] in-edges stored."""
    rows: NDArray[np.int64]
    """[P, P] rows that p (axis 0) sends q (axis 1) in one halo exchange."""

    @property
    def parts(self) -> int:
        return int(self.nodes.shape[0])

    @property
    def halo_rows(self) -> NDArray[np.int64]:
        """[P] rows received."""
        return np.asarray(self.rows.sum(axis=0))

    @property
    def rows_sent(self) -> NDArray[np.int64]:
        """[P] rows sent."""
        return np.asarray(self.rows.sum(axis=1))

    @property
    def total_rows(self) -> int:
        return int(self.rows.sum())

    @property
    def max_rows_sent(self) -> int:
        return int(self.rows_sent.max())

    @property
    def neighbours(self) -> NDArray[np.int64]:
        """[P] other parts that a part sends rows to or receives rows from."""
        return np.asarray(np.count_nonzero(self.rows + self.rows.T, axis=1), np.int64)


def cut_counts(src: Ids, dst: Ids, part: Ids, parts: int) -> CutCounts:
    """Counts for edges ``src[i] -> dst[i]`` ([E] global ids) under ``part`` ([N], the part of each node).

    Memory: a few arrays of the length of the cut, and one of E bytes. Raises ``ValueError`` where ``part`` names a
    part outside 0..parts-1.
    """
    n = part.shape[0]
    if n and (int(part.min()) < 0 or int(part.max()) >= parts):
        bad = int(np.flatnonzero((part < 0) | (part >= parts))[0])
        raise ValueError(f"node {bad} is in part {int(part[bad])}; expected parts 0 to {parts - 1}")
    cut = part[src] != part[dst]
    u, v = src[cut].astype(np.int64), dst[cut].astype(np.int64)
    sent = np.unique(u * parts + part[v])
    return CutCounts(
        cut_edges=u.shape[0],
        cut_pairs=_pairs(u, v, n).shape[0],
        nodes=np.bincount(part, minlength=parts),
        edges=np.bincount(part[dst], minlength=parts),
        rows=np.bincount(part[sent // parts].astype(np.int64) * parts + sent % parts, minlength=parts**2).reshape(
            parts, parts
        ),
    )


def cut_counts_of_shards(shards: Iterable[Shard]) -> CutCounts:
    """The same counts from all shards of one build, one at a time; features are not needed.

    Memory: one shard and the distinct pairs of the cut.
    """
    nodes, edges, columns, pairs, cut_edges = [], [], [], [], 0
    for shard in shards:
        row, halo = cut_entries(shard)
        cut_edges += row.shape[0]
        pairs.append(_pairs(shard.halo_global[halo], shard.owned_global[row], shard.num_nodes_global))
        nodes.append(shard.num_owned)
        edges.append(shard.num_edges)
        columns.append(np.bincount(shard.halo_owner, minlength=shard.parts))
    return CutCounts(
        cut_edges=cut_edges,
        cut_pairs=np.unique(np.concatenate(pairs)).shape[0],
        nodes=np.asarray(nodes, np.int64),
        edges=np.asarray(edges, np.int64),
        rows=np.stack(columns, axis=1).astype(np.int64),
    )


def cut_entries(shard: Shard) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The cut edges of a shard in stored order: row of the owned destination and index in the halo list, [c] each."""
    positions = np.flatnonzero(shard.indices >= shard.num_owned)
    row = np.searchsorted(shard.indptr, positions, side="right") - 1
    return row, shard.indices[positions].astype(np.int64) - shard.num_owned


def halo_nodes(src: Ids, part: Ids, q: int) -> NDArray[np.int64]:
    """[h] halo nodes of part q, sorted by (owner, global id), given the sources [e] of all its in-edges."""
    foreign = np.unique(src[part[src] != q])
    return foreign[np.argsort(part[foreign], kind="stable")].astype(np.int64)


def _pairs(u: Ids, v: Ids, n: int) -> NDArray[np.int64]:
    """One sorted key for each distinct unordered pair (u[i], v[i]) of ids below n."""
    return np.unique(np.minimum(u, v) * np.int64(n) + np.maximum(u, v))
