"""Rows of numbers that stay in their file: read a block at a time, never held whole.

Features are most of a graph's bytes and are needed in order of their rows only: to be looked over once, and to be
dealt out to the parts once. They are read, not mapped: a mapped file counts against a limit on address space, and its
pages against what the process is seen to use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp

from partition_tools.sums import Array, Hash, SumOfRows, bits

BLOCK_BYTES = 1 << 23
"""Bytes of rows that are read at a time."""
STORED_FROM = 1 << 26
"""Bytes from which on an array stays in its file."""


class StoredRows:
    """[M, F] numbers in row-major order at ``offset`` of a file; ``dtype`` may be of the other byte order there.

    Like an array as far as ``shape``, ``dtype``, slices of rows and ``numpy.asarray`` go. bool is read as uint8.
    """

    def __init__(self, path: str, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        assert not dtype.hasobject
        dtype = np.dtype(np.uint8) if dtype == np.bool_ else dtype
        self.path, self.offset, self.stored_dtype = path, offset, dtype
        self.dtype, self.shape = dtype.newbyteorder("="), shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, rows: slice) -> Array:
        """Rows ``start:stop``. Raises ``ValueError`` where the file has become shorter than it was."""
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1
        width = math.prod(self.shape[1:])
        count = max(0, stop - start) * width
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset + start * width * self.dtype.itemsize)
            values = np.fromfile(file, self.stored_dtype, count)
        if values.shape[0] != count:
            raise ValueError(f"{self.path}: has become shorter while it was read; leave it as it is during a build")
        return values.astype(self.dtype, copy=False).reshape(-1, *self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:].astype(dtype or self.dtype, copy=False)

    @functools.cached_property
    def scan(self) -> Scan:
        """What one pass over the rows tells; made once."""
        return scan(self)


Features: TypeAlias = Array | sp.csr_array | StoredRows


def row_blocks(x: Array | StoredRows, budget: int = BLOCK_BYTES) -> Iterator[tuple[int, Array]]:
    """(first row, rows) of blocks of about ``budget`` bytes."""
    row = max(1, math.prod(x.shape[1:]) * x.dtype.itemsize)
    step = max(1, budget // row)
    for start in range(0, x.shape[0], step):
        yield start, x[start : start + step]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """What one pass over rows [M, F] tells."""

    not_finite: int
    """Values that are NaN or infinite."""
    first: tuple[int, int]
    """Row and column of the first of them."""
    nonzero: int
    """Values other than 0."""
    stored: int
    """Values some bit of which is set: -0.0 is one."""
    sums: Hash
    """`sums.block_sums` of all rows."""


def scan(x: Array | StoredRows) -> Scan:
    """One pass over dense rows."""
    not_finite, first, nonzero, stored = 0, (0, 0), 0, 0
    floating = x.dtype.kind == "f"
    total = SumOfRows(x.shape[0])
    for start, block in row_blocks(x):
        if floating and not np.isfinite(block.sum()):
            rows, columns = np.nonzero(~np.isfinite(block))
            if rows.size and not not_finite:
                first = (start + int(rows[0]), int(columns[0]))
            not_finite += rows.size
        stored += int(np.count_nonzero(bits(block)))
        nonzero += int(np.count_nonzero(block))
        total.add(block)
    return Scan(not_finite=not_finite, first=first, nonzero=nonzero, stored=stored, sums=total.sums)
