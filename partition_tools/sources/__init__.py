"""Graph files of every known format become a :class:`~partition_tools.graph.Graph` through one door, :func:`load`.

A new format is one module with a ``READER`` and one line in ``READERS``. Of two readers that match, the first reads.
Nothing in a file is ever executed: pickled Python objects are refused (Planetoid's pickles are taken apart by a
reader that knows arrays, lists and dicts only), and sizes that a header declares are checked against the file's
before anything is allocated.
"""

from __future__ import annotations

import os

from partition_tools.graph import Graph
from partition_tools.sources import demo, gnn_benchmark, heterophilous, metis, plain, planetoid
from partition_tools.sources.plain import save_npz
from partition_tools.sources.reader import Reader

__all__ = ["READERS", "Reader", "formats", "load", "save_npz"]

READERS: tuple[Reader, ...] = (
    demo.READER,
    planetoid.READER,
    metis.READER,
    gnn_benchmark.READER,
    heterophilous.READER,
    plain.READER,
)


def formats() -> tuple[tuple[str, str], ...]:
    """(name, one-line description) of each format, in the order in which they are tried."""
    return tuple((reader.name, reader.description) for reader in READERS)


def load(spec: str) -> Graph:
    """The graph that ``spec`` names: a path, or ``demo:NAME?key=value&...`` for a generated one.

    Raises ``ValueError`` for a file that does not exist, cannot be read, has no known format or breaks its own.
    """
    spec = str(spec)
    try:
        for reader in READERS:
            if reader.matches(spec):
                return reader.read(spec)
    except OSError as error:
        raise ValueError(f"{spec}: cannot be read: {error.strerror or error}") from error
    problem = "no known format has this name or content" if os.path.exists(spec) else "no such file"
    tried = "\n".join(f"  {name}: {description}" for name, description in formats())
    raise ValueError(f"{spec}: {problem}. Give one of these:\n{tried}")
