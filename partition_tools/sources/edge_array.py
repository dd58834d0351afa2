"""Edges as one array in an ``.npy`` file: [2, E], sources and then destinations, or [E, 2], an edge a row.

Nodes are numbered from 0, or from 1 by --index-base 1. The file is mapped, not read, where it is too large for memory.
"""

from __future__ import annotations

from pathlib import Path

from partition_tools.graph import Array, Graph
from partition_tools.sources import layout
from partition_tools.sources.archive import npy_rows
from partition_tools.sources.fields import Fields
from partition_tools.sources.reader import Reader, Request
from partition_tools.stored import StoredRows


class _OneArray(Fields):
    """The file as if it held an edge_index alone."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def names(self) -> tuple[str, ...]:
        return ("edge_index",)

    def where(self, name: str) -> str:
        return self.path

    def read(self, name: str) -> Array:
        raise self.missing(name)

    def rows(self, name: str) -> Array | StoredRows:
        return npy_rows(self.path)


def _matches(spec: str) -> bool:
    return spec.endswith(".npy") and Path(spec).is_file()


def _read(spec: str, request: Request) -> Graph:
    return layout.graph_of(_OneArray(spec), request, turned=True)


READER = Reader(
    name="npy",
    description="NAME.npy of edges, [2, E] or [E, 2] integers",
    matches=_matches,
    read=_read,
    takes=frozenset({"index_base"}),
)
