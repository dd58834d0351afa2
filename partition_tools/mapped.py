"""Arrays with an entry an edge that do not fit into memory: mapped from the user's file, or from scratch.

What is mapped can be read again, so its pages are given back (`graph.release`) after every block, and a graph of any
number of edges takes memory for its nodes and a few blocks. Scratch files lie in the folder for temporary files
(``TMPDIR``) and have no name: they are gone with the process, however it ends.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullgraph.host import available_memory
from partition_tools.graph import EDGE_BLOCK, Array, release
from partition_tools.stored import StoredRows

_SHARE = 4
"""Arrays stay on disk when they would take more than one part in so many of the memory that is free."""


def too_large(num_bytes: int) -> bool:
    """Whether as many bytes of edges should stay on disk."""
    return num_bytes > available_memory() // _SHARE


def scratch(shape: tuple[int, ...], dtype: Any) -> Array:
    """A mapped array of zeros in a file without a name. Raises ``ValueError`` where the disk has no room for it."""
    folder, needed = tempfile.gettempdir(), math.prod(shape) * np.dtype(dtype).itemsize
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{folder}: {needed / 1e9:,.1f} GB of edges are to be laid there meanwhile, but {free / 1e9:,.1f} GB are "
            f"free; make room, or name another folder with TMPDIR"
        )
    descriptor, name = tempfile.mkstemp(prefix="partition-tools-", dir=folder)
    try:
        with os.fdopen(descriptor, "r+b") as file:
            file.truncate(max(1, needed))
            if needed == 0:
                return np.empty(shape, dtype)
            return np.memmap(file, dtype, "r+", shape=shape)
    finally:
        os.unlink(name)


def mapped(rows: StoredRows) -> Array:
    """The same numbers, mapped from their file, in the byte order that they have there."""
    return np.memmap(rows.path, rows.stored_dtype, "r", rows.offset, rows.shape)


def blocks(count: int, size: int = EDGE_BLOCK) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def columns_of(rows: StoredRows) -> Array:
    """Values an edge: [E] or [E, K] native numbers, mapped from their file or, in another byte order, from scratch."""
    there = mapped(rows)
    if there.dtype.isnative:
        return there
    out = scratch(rows.shape, rows.dtype)
    for block in blocks(rows.shape[0]):
        out[block] = there[block]
        release(out)
        release(there)
    return out


def ends_of(rows: StoredRows, base: int, where: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sources and destinations [E] of edges [2, E], or of [E, 2], less ``base``.

    Raises ``ValueError`` for what does not fit into int64.
    """
    there = mapped(rows)
    turned = rows.shape[0] != 2
    src, dst = (there[:, 0], there[:, 1]) if turned else (there[0], there[1])
    if there.dtype == np.int64 and there.dtype.isnative and not base and not turned:
        return src, dst
    out = scratch((2, src.shape[0]), np.int64)
    for block in blocks(src.shape[0]):
        for end, values in enumerate((src, dst)):
            some = values[block]
            if some.dtype.kind == "u" and some.size and int(some.max()) > np.iinfo(np.int64).max:
                raise ValueError(
                    f"{where} holds {int(some.max())}, which does not fit into int64; number the nodes from 0"
                )
            out[end, block] = some
            out[end, block] -= base
        release(out)
        release(there)
    return out[0], out[1]


class Growing:
    """A mapped array of rows whose number is known when all of them are there."""

    def __init__(self, dtype: Any, row: tuple[int, ...] = ()) -> None:
        self._dtype, self._row = np.dtype(dtype), row
        self._file = tempfile.TemporaryFile(prefix="partition-tools-")  # noqa: SIM115
        self._count = 0

    def add(self, values: Array) -> None:
        try:
            np.ascontiguousarray(values, self._dtype).tofile(self._file)
        except OSError as error:
            raise ValueError(
                f"{tempfile.gettempdir()}: edges are laid there meanwhile, and it is full ({error}); make room, or "
                f"name another folder with TMPDIR"
            ) from error
        self._count += values.shape[0]

    def array(self) -> Array:
        self._file.flush()
        if self._count == 0:
            return np.empty((0, *self._row), self._dtype)
        return np.memmap(self._file, self._dtype, "r+", shape=(self._count, *self._row))


def extent(*arrays: Array) -> tuple[int, int]:
    """Smallest and largest number of arrays that are not empty."""
    low, high = [], []
    for array in arrays:
        for block in blocks(array.shape[0]):
            low.append(int(array[block].min()))
            high.append(int(array[block].max()))
            release(array)
    return min(low), max(high)
