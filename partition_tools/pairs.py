"""Pairs, duplicates, directions and components of a graph's edges, in time linear in their number.

Edges go by the lower of their ends into buckets that fit into a core's cache several times over, and each bucket is
sorted. Memory is eight bytes an edge; where the edges are on disk, that is on disk, too.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse import csgraph

from partition_tools.graph import Graph, entry_keys, release

_BUCKET = 1 << 20
"""Edges of a bucket."""
_MOST_BUCKETS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class PairCounts:
    """Of E directed entries."""

    pairs: int
    """Distinct unordered pairs of two nodes."""
    distinct: int
    """Distinct (source, destination)."""
    symmetric: bool
    """Whether u -> v occurs as often as v -> u, for all u and v."""


def count_pairs(graph: Graph) -> PairCounts:
    if not graph.edges_on_disk:
        return _count(graph, np.empty(graph.num_edges, np.uint64))
    with tempfile.TemporaryDirectory(prefix="partition-tools-pairs-") as folder:
        keys = np.memmap(Path(folder) / "keys", np.uint64, "w+", shape=(graph.num_edges,))
        return _count(graph, keys)


def _count(graph: Graph, keys: NDArray[np.uint64]) -> PairCounts:
    n = graph.num_nodes
    starts_at, has_loop = np.zeros(n + 1, np.int64), np.zeros(n, np.bool_)
    for _, src, dst in graph.edge_blocks():
        loops = src[src == dst]
        has_loop[loops] = True
        starts_at[1:] += np.bincount(np.minimum(src, dst), minlength=n) - np.bincount(loops, minlength=n)
    np.cumsum(starts_at, out=starts_at)
    # A node's bucket: ``_BUCKET`` edges, or one node with more.
    size = max(_BUCKET, -(-graph.num_edges // _MOST_BUCKETS))
    bucket = (starts_at[:-1] // size).astype(np.min_scalar_type(graph.num_edges // size))
    first = np.searchsorted(bucket, np.arange(int(bucket[-1]) + 2))
    bounds = starts_at[first]
    cursor = bounds[:-1].copy()
    for _, src, dst in graph.edge_blocks():
        if has_loop.any():
            plain = src != dst
            src, dst = src[plain], dst[plain]
        low, high = np.minimum(src, dst), np.maximum(src, dst)
        key = entry_keys(low, high, n).view(np.uint64)
        key <<= np.uint64(1)
        key |= src > dst
        if cursor.shape[0] == 1:
            keys[cursor[0] : cursor[0] + key.shape[0]] = key
            cursor[0] += key.shape[0]
            continue
        into = bucket[low]
        key = key[np.argsort(into, kind="stable")]
        counts = np.bincount(into, minlength=cursor.shape[0])
        taken = np.cumsum(counts) - counts
        for at in np.flatnonzero(counts).tolist():
            keys[cursor[at] : cursor[at] + counts[at]] = key[taken[at] : taken[at] + counts[at]]
        cursor += counts
        release(keys)
    pairs, distinct, symmetric = 0, int(np.count_nonzero(has_loop)), True
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        some = _count_sorted(keys[begin:end])
        pairs, distinct, symmetric = pairs + some.pairs, distinct + some.distinct, symmetric and some.symmetric
        release(keys)
    return PairCounts(pairs=pairs, distinct=distinct, symmetric=symmetric)


def _count_sorted(keys: NDArray[np.uint64]) -> PairCounts:
    """Of a bucket's keys, pair * 2 + direction, which are sorted in place."""
    keys.sort()
    even, odd = keys[::2], keys[1::2]
    one = np.uint64(1)
    paired = even.shape == odd.shape and bool((even + one == odd).all()) and not bool((even & one).any())
    if paired and not bool((even[1:] == even[:-1]).any()):  # every pair once in each direction
        return PairCounts(pairs=even.shape[0], distinct=keys.shape[0], symmetric=True)
    pair = keys >> one
    first = np.ones(keys.shape[0], np.bool_)
    np.not_equal(pair[1:], pair[:-1], out=first[1:])
    begins = np.flatnonzero(first)
    distinct = int(np.count_nonzero(keys[1:] != keys[:-1])) + bool(keys.shape[0])
    backward = np.add.reduceat((keys & one).astype(np.int64), begins) if begins.size else begins
    times = np.diff(begins, append=keys.shape[0])
    return PairCounts(pairs=begins.shape[0], distinct=distinct, symmetric=bool((2 * backward == times).all()))


def component_of_nodes(graph: Graph) -> NDArray[np.int64]:
    """[N] the weakly connected component of each node, numbered from 0.

    Components of a few edges of every neighbourhood come first: they are nearly those of the graph, so that few edges
    are left to join two of them (Sutton et al. 2018, "Optimizing parallel graph connectivity computation via subgraph
    sampling").
    """
    n, e = graph.num_nodes, graph.num_edges
    label, count = np.arange(n, dtype=np.int32 if n < 2**31 else np.int64), n
    if not graph.edges_on_disk:
        stride = max(1, e // (2 * n))
        label, count = _joined(label, count, graph.src[::stride], graph.dst[::stride])
    for _, src, dst in graph.edge_blocks():
        label, count = _joined(label, count, src, dst)
    return label.astype(np.int64)


def _joined(
    label: NDArray[Any], count: int, src: NDArray[np.int64], dst: NDArray[np.int64]
) -> tuple[NDArray[Any], int]:
    """Labels 0..count-1 after the edges, and how many are left."""
    u, v = label[src], label[dst]
    apart = u != v
    if not apart.any():
        return label, count
    u, v = u[apart], v[apart]
    links = sp.csr_array((np.ones(u.shape[0], np.int8), (u, v)), shape=(count, count))
    count, merged = csgraph.connected_components(links, directed=False)
    return merged.astype(label.dtype, copy=False)[label], int(count)
