"""Fennel with restreaming: a partition from passes over the nodes, for graphs that METIS cannot hold.

A node goes to the part i with the most of its neighbours, less ``alpha gamma |P_i|^(gamma - 1)`` (Tsourakakis et al.
2014), with gamma = 1.5 and alpha = m P^(gamma - 1) / n^gamma; in the passes after the first every node leaves its part
and chooses again (Nishimura and Ugander 2013). Memory beyond the graph's own is two ids for
each end of an edge, on disk where the graph's edges are, and about 40 bytes a node.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partition_tools.graph import Graph, release
from partition_tools.mapped import scratch

GAMMA = 1.5
_BUCKET = 1 << 24
"""Entries that are sorted together."""
_RUN = 1 << 26
"""Entries of nodes that are gone through together."""
_BLOCKS = 256
"""Blocks of a pass whose nodes choose at once, where no compiler is at hand."""


def versions() -> dict[str, str]:
    """Libraries that the result depends on: with numba nodes choose one by one, without it block by block."""
    found = {"numpy": np.__version__}
    return found | ({"numba": metadata.version("numba")} if compiled() else {})


def compiled() -> bool:
    return importlib.util.find_spec("numba") is not None


def fennel(
    graph: Graph, allowed: NDArray[np.float64], *, passes: int, seed: int, use_numba: bool | None = None
) -> NDArray[np.int32]:
    """[N] parts with at most ``allowed`` [P] nodes each; deterministic for a seed.

    ``use_numba`` says whether to compile (by default where numba is installed).
    """
    n, parts = graph.num_nodes, allowed.shape[0]
    most = np.floor(allowed + 1e-9).astype(np.int64)
    assert int(most.sum()) >= n
    offsets, neighbours = _neighbours(graph)
    rng = np.random.default_rng(seed)
    order = _order(offsets, rng)
    part, sizes = np.full(n, -1, np.int32), np.zeros(parts, np.int64)
    pairs = neighbours.shape[0] / 2
    price = GAMMA * pairs * parts ** (GAMMA - 1) / n**GAMMA
    share = most / most.sum() * parts  # an unequal part pays by how full it is
    stream = _compiled() if (compiled() if use_numba is None else use_numba) else None
    for _ in range(passes):
        for run in order:
            if stream is not None:
                stream(run, offsets, np.asarray(neighbours), part, sizes, most, share, price)
            else:
                for block in np.array_split(run, min(max(1, _BLOCKS * run.shape[0] // n), run.shape[0])):
                    _place(block, offsets, neighbours, part, sizes, most, share, price, rng)
            release(neighbours)
    return part


def _order(offsets: NDArray[np.int64], rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """All nodes in random order; of a graph of very many edges runs of nodes in random order, so that the neighbours
    that are looked at together lie together."""
    n = offsets.shape[0] - 1
    starts = np.unique(np.append(np.searchsorted(offsets[:-1], np.arange(0, int(offsets[-1]) + 1, _RUN)), 0))
    starts = starts[starts < n]
    runs = [low + rng.permutation(high - low) for low, high in itertools.pairwise([*starts.tolist(), n])]
    return [runs[i] for i in rng.permutation(len(runs))] if runs[1:] else runs


def _neighbours(graph: Graph) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Offsets [N + 1] and the other end of every edge from both of its ends; loops are left out.

    Ends go into buckets of nodes whose entries fit into memory, and each bucket is sorted; all of it is on disk where
    the edges are.
    """
    n = graph.num_nodes
    degree = np.zeros(n, np.int64)
    for here, _ in _ends(graph):
        degree += np.bincount(here, minlength=n)
    offsets = np.zeros(n + 1, np.int64)
    np.cumsum(degree, out=offsets[1:])
    dtype = np.dtype(np.int32 if n < 2**31 else np.int64)
    make = scratch if graph.edges_on_disk else np.empty
    total = (int(offsets[-1]),)
    nodes, neighbours = (make(shape=total, dtype=dtype) for _ in range(2))
    bucket = offsets[:-1] // _BUCKET
    bucket = (bucket - bucket[0]).astype(np.min_scalar_type(int(bucket[-1])))
    first = offsets[np.searchsorted(bucket, np.arange(int(bucket[-1]) + 2))]
    cursor = first[:-1].copy()
    for here, there in _ends(graph):
        into = bucket[here]
        order = np.argsort(into, kind="stable")
        counts = np.bincount(into, minlength=cursor.shape[0])
        ends = np.cumsum(counts)
        for at in np.flatnonzero(counts).tolist():
            run = order[ends[at] - counts[at] : ends[at]]
            place = slice(int(cursor[at]), int(cursor[at] + counts[at]))
            nodes[place], neighbours[place] = here[run], there[run]
        cursor += counts
        release(nodes)
        release(neighbours)
    for low, high in itertools.pairwise(first.tolist()):
        neighbours[low:high] = neighbours[low:high][np.argsort(nodes[low:high], kind="stable")]
        release(nodes)
        release(neighbours)
    return offsets, neighbours


def _ends(graph: Graph) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(one end, the other end) of every edge, from both sides, block by block."""
    for _, src, dst in graph.edge_blocks():
        plain = src != dst
        src, dst = src[plain], dst[plain]
        yield src, dst
        yield dst, src


def _place(
    block: NDArray[np.int64],
    offsets: NDArray[np.int64],
    neighbours: NDArray[Any],
    part: NDArray[np.int32],
    sizes: NDArray[np.int64],
    most: NDArray[np.int64],
    share: NDArray[np.float64],
    price: float,
    rng: np.random.Generator,
) -> None:
    """A block of nodes chooses at once, those first that gain most; whom a full part turns away chooses again."""
    parts = sizes.shape[0]
    was = part[block]
    sizes -= np.bincount(was[was >= 0], minlength=parts)
    degree = offsets[block + 1] - offsets[block]
    ends = np.cumsum(degree)
    entries = np.arange(int(degree.sum())) + np.repeat(offsets[block] - (ends - degree), degree)
    at = part[neighbours[entries]]
    row = np.repeat(np.arange(block.shape[0]), degree)
    placed = at >= 0
    score = np.bincount(row[placed] * parts + at[placed], minlength=block.shape[0] * parts).reshape(-1, parts)
    noisy = score + rng.random(score.shape) * 1e-3
    left = np.arange(block.shape[0])
    while left.size:
        value = noisy[left] - price * np.sqrt(sizes / share)
        value[:, sizes >= most] = -np.inf
        choice = value.argmax(axis=1)
        order = np.lexsort((-value[np.arange(left.size), choice], choice))
        ordered = choice[order]
        place = np.arange(left.size) - np.searchsorted(ordered, ordered)
        taken = np.zeros(left.size, np.bool_)
        taken[order] = place < (most - sizes)[ordered]
        part[block[left[taken]]] = choice[taken]
        sizes += np.bincount(choice[taken], minlength=parts)
        left = left[~taken]


@functools.cache
def _compiled() -> Any:
    """One pass, node by node, as machine code."""
    import numba

    @numba.njit(cache=False)
    def stream(order, offsets, neighbours, part, sizes, most, share, price):  # type: ignore[no-untyped-def]
        parts = sizes.shape[0]
        found = np.zeros(parts)
        for v in order:
            if part[v] >= 0:
                sizes[part[v]] -= 1
            found[:] = 0
            for i in range(offsets[v], offsets[v + 1]):
                p = part[neighbours[i]]
                if p >= 0:
                    found[p] += 1
            best, value = -1, -np.inf
            for p in range(parts):
                if sizes[p] < most[p]:
                    here = found[p] - price * np.sqrt(sizes[p] / share[p])
                    if here > value:
                        best, value = p, here
            part[v] = best
            sizes[best] += 1

    return stream
