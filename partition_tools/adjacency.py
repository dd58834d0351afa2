"""The graph as a partitioner takes it: symmetric, without loops and duplicates, rows ascending, int64 CSR.

Training keeps the user's own edges; this form lives only while nodes are assigned to parts. It does not depend on
the order of the input's edges, so neither does anything computed from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse import csgraph

from partition_tools.graph import Array, Graph, entry_keys

_BLOCK = 1 << 22
"""Adjacency entries taken at a time by a pass over all of them, which bounds its memory."""


@dataclass(frozen=True, kw_only=True)
class Adjacency:
    """N nodes and M undirected pairs, each pair stored from both ends.

    Construction raises ``ValueError`` where offsets or ids would lead out of the arrays; that pairs are stored from
    both ends is the caller's promise.
    """

    xadj: NDArray[np.int64]
    """[N+1] offsets into adjncy."""
    adjncy: NDArray[np.int64]
    """[2M] neighbours, ascending in each row."""
    weight: NDArray[np.int64] | None = None
    """[2M] positive weights, the same from both ends; None where every pair counts 1."""

    def __post_init__(self) -> None:
        xadj, adjncy = self.xadj, self.adjncy
        if xadj.ndim != 1 or xadj.shape[0] < 1 or int(xadj[0]) != 0:
            raise ValueError(f"xadj is {list(xadj.shape)}; expected [N+1] offsets that begin with 0")
        if (np.diff(xadj) < 0).any():
            row = int(np.flatnonzero(np.diff(xadj) < 0)[0])
            raise ValueError(f"xadj falls from {int(xadj[row])} to {int(xadj[row + 1])} at row {row}")
        if adjncy.shape != (int(xadj[-1]),):
            raise ValueError(f"xadj ends at {int(xadj[-1])}, but adjncy has shape {list(adjncy.shape)}")
        if adjncy.size and (int(adjncy.min()) < 0 or int(adjncy.max()) >= self.num_nodes):
            at = int(np.flatnonzero((adjncy < 0) | (adjncy >= self.num_nodes))[0])
            raise ValueError(f"adjncy[{at}] is {int(adjncy[at])}; node ids go from 0 to {self.num_nodes - 1}")
        if self.weight is not None and self.weight.shape != adjncy.shape:
            raise ValueError(f"weight has shape {list(self.weight.shape)} for {adjncy.shape[0]} entries")

    @property
    def num_nodes(self) -> int:
        return int(self.xadj.shape[0]) - 1

    @property
    def num_pairs(self) -> int:
        return int(self.adjncy.shape[0]) // 2

    def stored(self, folder: Path) -> Adjacency:
        """The same adjacency, its arrays written to ``xadj.npy``, ``adjncy.npy`` and, with weights, ``adjwgt.npy`` of
        a folder and mapped from there, so that processes share one copy."""
        return Adjacency(
            xadj=_stored(folder / "xadj.npy", self.xadj),
            adjncy=_stored(folder / "adjncy.npy", self.adjncy),
            weight=None if self.weight is None else _stored(folder / "adjwgt.npy", self.weight),
        )

    def cut(self, part: NDArray[np.int32]) -> int:
        """Pairs whose ends lie in two parts, or their summed weight."""
        total = 0
        for rows, entries in self._blocks():
            foreign = part[rows] != part[self.adjncy[entries]]
            total += int(np.count_nonzero(foreign) if self.weight is None else self.weight[entries][foreign].sum())
        return total // 2

    def volume(self, part: NDArray[np.int32], parts: int) -> int:
        """Sum over nodes of the foreign parts among their neighbours: METIS's total communication volume."""
        return sum(int(rows_sent(rows, self.adjncy[entries], part, parts).sum()) for rows, entries in self._blocks())

    def breadth_first_order(self) -> NDArray[np.int64]:
        """[N] all nodes, component after component, each in breadth-first order from its lowest id."""
        n, entries = self.num_nodes, int(self.adjncy.shape[0])
        if entries + n > np.iinfo(np.int32).max:
            raise ValueError(
                f"breadth-first order takes up to {np.iinfo(np.int32).max} adjacency entries and nodes; this graph "
                f"has {entries + n} (--method metis or --method contiguous have no such limit)"
            )
        matrix = sp.csr_array((np.ones(entries, dtype=np.int8), self.adjncy, self.xadj), shape=(n, n))
        _, component = csgraph.connected_components(matrix, directed=False)
        del matrix
        roots = np.unique(component, return_index=True)[1]
        # One search from a virtual node that points at every root visits the components interleaved, but each of
        # them in its own breadth-first order, which a stable sort by component brings together.
        rooted = sp.csr_array(
            (
                np.ones(entries + roots.size, dtype=np.int8),
                np.concatenate([self.adjncy, roots]),
                np.append(self.xadj, entries + roots.size),
            ),
            shape=(n + 1, n + 1),
        )
        order = csgraph.breadth_first_order(rooted, n, directed=True, return_predecessors=False)[1:]
        by_component: NDArray[np.int64] = order[np.argsort(component[order], kind="stable")].astype(np.int64)
        return by_component

    def induced(self, nodes: NDArray[np.int64]) -> Adjacency:
        """The adjacency among k nodes [k], without weights, where ``nodes[i]`` becomes node i."""
        local = np.full(self.num_nodes, -1, dtype=np.int64)
        local[nodes] = np.arange(nodes.size)
        degree = self.xadj[nodes + 1] - self.xadj[nodes]
        ends = np.cumsum(degree)
        entries = np.arange(int(degree.sum())) + np.repeat(self.xadj[nodes] - (ends - degree), degree)
        columns = local[self.adjncy[entries]]
        inside = columns >= 0
        rows = np.repeat(np.arange(nodes.size), degree)[inside]
        key = rows * nodes.size + columns[inside]
        key.sort()
        return _from_sorted_keys(key, nodes.size)

    def _blocks(self) -> Iterator[tuple[NDArray[np.int64], slice]]:
        """Whole rows at a time: the row of each entry, and the entries."""
        marks = np.searchsorted(self.xadj, np.arange(0, self.adjncy.shape[0], _BLOCK), side="right") - 1
        bounds = np.unique(np.append(marks, self.num_nodes))
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            degree = np.diff(self.xadj[low : high + 1])
            yield np.repeat(np.arange(low, high), degree), slice(int(self.xadj[low]), int(self.xadj[high]))


def symmetric_adjacency(graph: Graph, entry_weight: NDArray[np.int64] | None = None) -> Adjacency:
    """The adjacency of a graph; a pair's weight is the sum of ``entry_weight`` [E] over its entries both ways."""
    n = graph.num_nodes
    key = entry_keys(np.minimum(graph.src, graph.dst), np.maximum(graph.src, graph.dst), n)
    plain = graph.src != graph.dst
    weight = entry_weight
    if not plain.all():
        key = key[plain]
        weight = None if weight is None else weight[plain]
    del plain
    key, weight = _sorted(key, weight)
    first = _first_of_run(key)
    if weight is not None:
        weight = np.add.reduceat(weight, np.flatnonzero(first)) if key.size else weight
    key = key[first]
    key = np.concatenate([key, entry_keys(key % n, key // n, n)])
    key, weight = _sorted(key, None if weight is None else np.concatenate([weight, weight]))
    return _from_sorted_keys(key, n, weight)


def rows_sent(src: NDArray[np.int64], dst: NDArray[np.int64], part: NDArray[np.int32], parts: int) -> NDArray[np.int64]:
    """[parts] rows each part sends in one halo exchange along edges ``src[i] -> dst[i]``: pairs of an owned source
    and a foreign part that reads it."""
    return np.asarray(rows_between(src, dst, part, parts).sum(axis=1))


def rows_between(
    src: NDArray[np.int64], dst: NDArray[np.int64], part: NDArray[np.int32], parts: int
) -> NDArray[np.int64]:
    """[parts, parts] the same rows by sender and reader."""
    return _count_rows(_rows_read(src, dst, part, parts), part, parts)


def graph_rows_between(graph: Graph, part: NDArray[np.int32], parts: int) -> NDArray[np.int64]:
    """[parts, parts] the same of a graph's edges, which may be on disk: the rows alone are in memory."""
    if not graph.edges_on_disk:
        return rows_between(graph.src, graph.dst, part, parts)
    key, more, waiting = np.empty(0, np.int64), [np.empty(0, np.int64)], 0
    for _, src, dst in graph.edge_blocks():
        more.append(_rows_read(src, dst, part, parts))
        waiting += more[-1].shape[0]
        if waiting > max(key.shape[0], _BLOCK):
            key, more, waiting = np.unique(np.concatenate([key, *more])), [], 0
    return _count_rows(np.unique(np.concatenate([key, *more])), part, parts)


def _rows_read(
    src: NDArray[np.int64], dst: NDArray[np.int64], part: NDArray[np.int32], parts: int
) -> NDArray[np.int64]:
    """Ascending ``source * parts + reader`` of the cut edges, each once."""
    reader = part[dst]
    cut = part[src] != reader
    key = src[cut]
    key *= parts
    key += reader[cut]
    del reader, cut
    key.sort()
    return np.asarray(key[_first_of_run(key)])


def _count_rows(key: NDArray[np.int64], part: NDArray[np.int32], parts: int) -> NDArray[np.int64]:
    pair = part[key // parts].astype(np.int64) * parts + key % parts
    return np.bincount(pair, minlength=parts**2).reshape(parts, parts)


def _from_sorted_keys(key: NDArray[np.int64], n: int, weight: NDArray[np.int64] | None = None) -> Adjacency:
    """From ascending keys row * n + column, which become the columns in place."""
    xadj = np.searchsorted(key, np.arange(n + 1) * n)
    key %= max(n, 1)
    return Adjacency(xadj=xadj, adjncy=key, weight=weight)


def _sorted(
    key: NDArray[np.int64], weight: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    if weight is None:
        key.sort()
        return key, None
    order = np.argsort(key)
    return key[order], weight[order]


def _first_of_run(ascending: NDArray[np.int64]) -> NDArray[np.bool_]:
    first = np.ones(ascending.shape[0], dtype=np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return first


def _stored(path: Path, array: Array) -> Array:
    np.save(path, array, allow_pickle=False)
    mapped: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped
