"""Sums over blocks of global ids: taken from the graph before it is partitioned, and again from the shards.

The sum of a block is ``sum mix(hash(row of id) + mix(id))`` over its ids, modulo 2^53. It depends on which row
belongs to which id and not on the order in which rows are met, so the shards of a build can be summed one after the
other. ``hash`` is multilinear, ``sum_j r_j bits(row_j)`` modulo 2^64 with odd pseudorandom r_j: a change of one value
always changes it, and a zero adds nothing, so that dense and sparse rows of the same values have the same hash.
``mix`` is the finaliser of splitmix64 (Steele, Lea and Flood 2014). It guards against accidents, not against forgery.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Hash: TypeAlias = NDArray[np.uint64]

_BLOCKS = 1024
_KEEP = np.uint64(2**53 - 1)  # JSON readers keep integers exactly up to here
_CHUNK_BYTES = 1 << 18
"""What is hashed at a time, so that all of it stays in a core's cache."""


def num_blocks(count: int) -> int:
    """Blocks of ``count`` ids."""
    return min(count, _BLOCKS)


def block_of(ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """[m] block of each id of ``count``; blocks are runs of ids that differ in length by one at most."""
    return np.asarray(ids * num_blocks(count) // count)


def block_ids(block: int, count: int) -> tuple[int, int]:
    """First id of a block and of the next one."""
    blocks = num_blocks(count)
    return -(-block * count // blocks), -(-(block + 1) * count // blocks)


def block_sums(ids: NDArray[np.int64], rows: Array | sp.csr_array, count: int) -> Hash:
    """[B] sums of the blocks of ``count`` ids over ``rows`` ([m] or [m, F]) of ``ids`` ([m]).

    Sums over disjoint sets of ids add up, by `add`.
    """
    total = np.zeros(num_blocks(count), np.uint64)
    step, factors = _step_and_factors(rows)
    for start in range(0, ids.shape[0], step):
        some = ids[start : start + step]
        hashed = _mix(_row_hash(rows[start : start + step], factors) + _mix(some.astype(np.uint64)))
        np.add.at(total, block_of(some, count), hashed)
    return total & _KEEP


class SumOfRows:
    """`block_sums` of the rows of all ``count`` ids, given in order, any number at a time."""

    def __init__(self, count: int) -> None:
        self._total = np.zeros(num_blocks(count), np.uint64)
        self._firsts = -(-np.arange(num_blocks(count) + 1) * count // max(1, num_blocks(count)))
        self._done = 0

    def add(self, rows: Array | sp.csr_array) -> SumOfRows:
        step, factors = _step_and_factors(rows)
        for start in range(0, rows.shape[0], step):
            some = rows[start : start + step]
            first, last = self._done, self._done + int(some.shape[0])
            hashed = _mix(_row_hash(some, factors) + _mix(np.arange(first, last, dtype=np.uint64)))
            low = int(np.searchsorted(self._firsts, first, side="right")) - 1
            high = int(np.searchsorted(self._firsts, last, side="left"))
            self._total[low:high] += np.add.reduceat(hashed, np.maximum(self._firsts[low:high] - first, 0))
            self._done = last
        return self

    @property
    def sums(self) -> Hash:
        return self._total & _KEEP


def _step_and_factors(rows: Array | sp.csr_array) -> tuple[int, Hash | None]:
    """Rows to hash at a time, and the factors of their columns; None for sparse rows, of few columns among many."""
    if isinstance(rows, sp.csr_array):
        return max(1, _CHUNK_BYTES * rows.shape[0] // (8 * max(1, rows.nnz))), None
    width = max(1, int(np.prod(rows.shape[1:])))
    return max(1, _CHUNK_BYTES // (8 * width)), _factors(np.arange(width))


def _factors(columns: Array) -> Hash:
    return _mix(columns.astype(np.uint64) + np.uint64(1)) | np.uint64(1)


def add(left: Hash, right: Hash) -> Hash:
    return (left + right) & _KEEP


def _row_hash(rows: Array | sp.csr_array, factors: Hash | None) -> Hash:
    if isinstance(rows, sp.csr_array):
        ends = np.zeros(rows.nnz + 1, np.uint64)
        np.cumsum(bits(rows.data).astype(np.uint64) * _factors(rows.indices), out=ends[1:])
        return ends[rows.indptr[1:]] - ends[rows.indptr[:-1]]
    assert factors is not None
    if rows.dtype.kind in "UO":
        text = np.ascontiguousarray(rows, dtype=np.str_)
        words = text.view(np.uint32).reshape(text.shape[0], -1)
        factors = _factors(np.arange(words.shape[1]))
    else:
        words = bits(rows).reshape(rows.shape[0], -1)
    if words.shape[1] == 1:
        return np.asarray(words[:, 0].astype(np.uint64) * factors[0])
    return np.asarray(np.einsum("ij,j->i", words.astype(np.uint64), factors[: words.shape[1]]))


def bits(values: Array) -> Array:
    """The same bytes as unsigned integers of the same size (at most 8 bytes)."""
    return np.ascontiguousarray(values).view(np.dtype(f"u{values.dtype.itemsize}"))


def _mix(z: Hash) -> Hash:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    shifted = z >> np.uint64(30)
    for factor, shift in ((0xBF58476D1CE4E5B9, 27), (0x94D049BB133111EB, 31)):
        z ^= shifted
        z *= np.uint64(factor)
        np.right_shift(z, np.uint64(shift), out=shifted)
    z ^= shifted
    return np.asarray(z)
