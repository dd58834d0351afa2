"""Edges by the part of their destination, each part's in order of edge id.

Where the graph's edges are in memory, only their ids are put in order (four bytes an edge, eight from 2^31 on). Where
they are on disk they are copied, column by column, into files of a scratch folder in which each part's lie together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from partition_tools.graph import Array, Graph, release


@dataclass(frozen=True, kw_only=True, eq=False)
class PartEdges:
    """The e in-edges of a part's nodes, in order of edge id."""

    ids: NDArray[np.integer[Any]]
    """[e] global edge ids."""
    src: NDArray[np.int64]
    """[e] global ids of sources."""
    dst: NDArray[np.int64]
    columns: dict[str, Array]
    """What else an edge has, [e] or [e, K] under the name of the graph's field."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgesByPart:
    """Where each part's edges are found."""

    graph: Graph
    columns: dict[str, Array]
    """edge_weight and edge_x, where the graph has them."""
    offsets: NDArray[np.int64]
    """[P+1]"""
    ids: NDArray[np.integer[Any]]
    """[E] edge ids by part; mapped where the edges are on disk."""
    files: dict[str, Array] = field(default_factory=dict)
    """The columns in the same order, mapped, where the edges are on disk."""

    @classmethod
    def of(cls, graph: Graph, part: Array, columns: dict[str, Array], counts: NDArray[np.int64], scratch: Path) -> Self:
        """``part`` is [N] in the fewest bytes, ``counts`` [P] the in-edges of each part's nodes."""
        offsets = np.concatenate(([0], np.cumsum(counts)))
        dtype, e = np.dtype(np.int32 if graph.num_edges < 2**31 else np.int64), graph.num_edges
        tables = {"src": graph.src, "dst": graph.dst, **columns}
        if not graph.edges_on_disk or e == 0:
            ids = np.empty(e, dtype)
            for edges, order, places in _blocks(graph, part, offsets):
                by_part = (order + edges.start).astype(dtype)
                for at, run in places:
                    ids[at : at + run.stop - run.start] = by_part[run]
            return cls(graph=graph, columns=columns, offsets=offsets, ids=ids)
        scratch.mkdir()
        out: dict[str, Array] = {}
        for name, table in ({"ids": np.empty(0, dtype)} | tables).items():
            out[name] = np.memmap(scratch / name, table.dtype, "w+", shape=(e, *table.shape[1:]))
        for edges, order, places in _blocks(graph, part, offsets):
            for name, target in out.items():
                by_part = (order + edges.start).astype(dtype) if name == "ids" else tables[name][edges][order]
                for at, run in places:
                    target[at : at + run.stop - run.start] = by_part[run]
                release(target)
            for table in tables.values():
                release(table)
        return cls(graph=graph, columns=columns, offsets=offsets, ids=out.pop("ids"), files=out)

    def part(self, q: int) -> PartEdges:
        rows = slice(int(self.offsets[q]), int(self.offsets[q + 1]))
        if not self.files:
            ids = self.ids[rows]
            columns = {name: table[ids] for name, table in self.columns.items()}
            return PartEdges(ids=ids, src=self.graph.src[ids], dst=self.graph.dst[ids], columns=columns)
        found = {name: np.array(table[rows]) for name, table in (self.files | {"ids": self.ids}).items()}
        for table in (self.ids, *self.files.values()):
            release(table)
        return PartEdges(
            ids=found["ids"],
            src=found["src"],
            dst=found["dst"],
            columns={name: found[name] for name in self.columns},
        )


def _blocks(
    graph: Graph, part: Array, offsets: NDArray[np.int64]
) -> Iterator[tuple[slice, NDArray[np.int64], list[tuple[int, slice]]]]:
    """For each block of edges: which they are, their order by part, and for each part the place of its first one and
    which of the ordered ones are its own."""
    cursor = offsets[:-1].copy()
    for edges, _, dst in graph.edge_blocks():
        into = part[dst]
        counts = np.bincount(into, minlength=cursor.shape[0])
        ends = np.cumsum(counts)
        touched = np.flatnonzero(counts)
        runs = zip(cursor[touched].tolist(), (ends - counts)[touched].tolist(), ends[touched].tolist(), strict=True)
        yield edges, np.argsort(into, kind="stable"), [(at, slice(low, high)) for at, low, high in runs]
        cursor += counts
