"""Offline half: a graph file becomes one HDF5 shard a rank, and a report that compares partitionings.

``build(graph := load("graph.npz"), partition(graph, parts=4), "shards")`` is all of it. Names are imported when they
are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partition_tools.assign import partition as partition
    from partition_tools.builder import build as build
    from partition_tools.graph import Graph as Graph
    from partition_tools.graph import Splits as Splits
    from partition_tools.sources import LoadOptions as LoadOptions
    from partition_tools.sources import load as load

_HOME = {
    "Graph": "graph",
    "Splits": "graph",
    "LoadOptions": "sources",
    "build": "builder",
    "load": "sources",
    "partition": "assign",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"partition_tools.{_HOME[name]}"), name)
    raise AttributeError(f"module 'partition_tools' has no attribute {name!r}")
