"""Fennel with restreaming: a partition from passes over the nodes, for graphs that METIS cannot hold.

A node goes to the part i with the most of its neighbours, less ``alpha gamma |P_i|^(gamma - 1)`` (Tsourakakis et al.
2014), with gamma = 1.5 and alpha = m P^(gamma - 1) / n^gamma; in the passes after the first every node leaves its part
and chooses again (Nishimura and Ugander 2013). Memory beyond the graph's own is one neighbour id for each end of an
edge, and about 24 bytes a node.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partition_tools.graph import Graph

GAMMA = 1.5
_EDGES_AT_ONCE = 1 << 22
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
    order = rng.permutation(n)
    part, sizes = np.full(n, -1, np.int32), np.zeros(parts, np.int64)
    pairs = neighbours.shape[0] / 2
    price = GAMMA * pairs * parts ** (GAMMA - 1) / n**GAMMA
    share = most / most.sum() * parts  # an unequal part pays by how full it is
    stream = _compiled() if (compiled() if use_numba is None else use_numba) else None
    for _ in range(passes):
        if stream is not None:
            stream(order, offsets, neighbours, part, sizes, most, share, price)
            continue
        for block in np.array_split(order, min(_BLOCKS, n)):
            _place(block, offsets, neighbours, part, sizes, most, share, price, rng)
    return part


def _neighbours(graph: Graph) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Offsets [N + 1] and the other end of every edge from both of its ends; loops are left out."""
    n = graph.num_nodes
    degree = np.zeros(n, np.int64)
    chunks = range(0, graph.num_edges, _EDGES_AT_ONCE)

    def ends(low: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        src, dst = graph.src[low : low + _EDGES_AT_ONCE], graph.dst[low : low + _EDGES_AT_ONCE]
        plain = src != dst
        src, dst = src[plain], dst[plain]
        return np.concatenate([src, dst]), np.concatenate([dst, src])

    for low in chunks:
        degree += np.bincount(ends(low)[0], minlength=n)
    offsets = np.zeros(n + 1, np.int64)
    np.cumsum(degree, out=offsets[1:])
    neighbours = np.empty(int(offsets[-1]), np.int32 if n < 2**31 else np.int64)
    free = offsets[:-1].copy()
    for low in chunks:
        here, there = ends(low)
        by_node = np.argsort(here, kind="stable")
        here = here[by_node]
        first = np.searchsorted(here, here)
        neighbours[free[here] + np.arange(here.shape[0]) - first] = there[by_node]
        free += np.bincount(here, minlength=n)
    return offsets, neighbours


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
