"""Sparse kernels behind one door: ``spmm`` and ``sddmm`` over a CSR matrix that knows its transpose.

On the CPU ``aten::_embedding_bag_forward_only`` (mode sum) is an SpMM, several times faster than ``torch.sparse``; its
transpose is the same kernel over the transposed CSR. On CUDA the product is ``torch.sparse`` CSR (cuSPARSE).

``torch.sparse.sampled_addmm`` is the faster SDDMM, the gradient of ``embedding_bag``'s weights the one for bfloat16.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

_MODE_SUM = 0
_embedding_bag = torch.ops.aten._embedding_bag_forward_only
_sample_weights_backward = torch.ops.aten._embedding_bag_per_sample_weights_backward


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """An m x n CSR matrix of nnz entries with int32 (or, when too large, int64) indices."""

    shape: tuple[int, int]
    indptr: Tensor
    """[m + 1]"""
    indices: Tensor
    """[nnz] column of each entry."""
    values: Tensor | None = None
    """[nnz], or None for a matrix of ones."""

    @property
    def nnz(self) -> int:
        return self.indices.shape[0]

    @functools.cached_property
    def rows(self) -> Tensor:
        """[nnz] row of each entry."""
        counts = (self.indptr[1:] - self.indptr[:-1]).to(torch.int64)
        ids = torch.arange(self.shape[0], dtype=self.indices.dtype, device=self.indices.device)
        return torch.repeat_interleave(ids, counts, output_size=self.nnz)

    @functools.cached_property
    def transposed(self) -> tuple[SparseMatrix, Tensor]:
        """(the n x m transpose, [nnz] position in this matrix of each of its entries)."""
        order = torch.argsort(self.indices, stable=True)
        counts = torch.bincount(self.indices, minlength=self.shape[1])
        indptr = torch.zeros(self.shape[1] + 1, dtype=self.indptr.dtype, device=self.indptr.device)
        torch.cumsum(counts, 0, out=indptr[1:])
        indices = self.rows[order]
        values = None if self.values is None else self.values[order]
        if self.shape[0] == self.shape[1] and torch.equal(indptr, self.indptr) and torch.equal(indices, self.indices):
            indptr, indices = self.indptr, self.indices  # a symmetric pattern is kept once, and so are equal values
            if self.values is None or values is None or torch.equal(values, self.values):
                return self, order
        return SparseMatrix((self.shape[1], self.shape[0]), indptr, indices, values), order

    def scaled(self, rows: Tensor | None, cols: Tensor | None, dtype: torch.dtype) -> SparseMatrix:
        """``diag(rows) A diag(cols)`` over the same pattern, rounded to ``dtype`` once; scales are [m] and [n], None
        for ones."""
        values = self.values
        for scale, ids in ((rows, self.rows), (cols, self.indices)):
            if scale is not None:
                factor = scale.index_select(0, ids)
                values = factor if values is None else values * factor
        return SparseMatrix(self.shape, self.indptr, self.indices, None if values is None else values.to(dtype))

    @functools.cached_property
    def nonempty(self) -> tuple[Tensor, SparseMatrix]:
        """(int64 [r] rows that hold an entry, the r x n matrix of just these)."""
        counts = self.indptr[1:] - self.indptr[:-1]
        rows = torch.nonzero(counts).squeeze(1)
        indptr = torch.cat([self.indptr[:1], self.indptr[1:][rows]])
        return rows, SparseMatrix((rows.shape[0], self.shape[1]), indptr, self.indices, self.values)

    @functools.cached_property
    def _heads(self) -> dict[int, SparseMatrix]:
        return {}

    def head(self, rows: int) -> SparseMatrix:
        """The first ``rows`` rows of a matrix without values, made once."""
        assert self.values is None
        if rows == self.shape[0]:
            return self
        if rows not in self._heads:
            nnz = int(self.indptr[rows])
            self._heads[rows] = SparseMatrix((rows, self.shape[1]), self.indptr[: rows + 1], self.indices[:nnz])
        return self._heads[rows]

    @functools.cached_property
    def _blocks(self) -> dict[int, list[tuple[slice, SparseMatrix]]]:
        return {}

    def blocks(self, rows: int) -> list[tuple[slice, SparseMatrix]]:
        """(rows, the matrix of these rows) for each block of ``rows`` rows, made once; the last may be shorter."""
        if rows >= self.shape[0]:
            return [(slice(0, self.shape[0]), self)]
        if rows not in self._blocks:
            starts = range(0, self.shape[0], rows)
            ends = [min(start + rows, self.shape[0]) for start in starts]
            edges = self.indptr[[*starts, self.shape[0]]].tolist()
            self._blocks[rows] = [
                (
                    slice(start, end),
                    SparseMatrix(
                        (end - start, self.shape[1]),
                        self.indptr[start : end + 1] - first,
                        self.indices[first:last],
                        None if self.values is None else self.values[first:last],
                    ),
                )
                for start, end, (first, last) in zip(starts, ends, itertools.pairwise(edges), strict=True)
            ]
        return self._blocks[rows]

    def to(self, device: torch.device, dtype: torch.dtype) -> SparseMatrix:
        """On ``device``, with values of ``dtype``."""
        values = None if self.values is None else self.values.to(device, dtype)
        return SparseMatrix(self.shape, self.indptr.to(device), self.indices.to(device), values)


def sparse_matrix(
    shape: tuple[int, int], indptr: NDArray[Any], indices: NDArray[Any], values: NDArray[Any] | None = None
) -> SparseMatrix:
    """A ``SparseMatrix`` over numpy CSR arrays: int32 where shape and nnz allow, int64 otherwise."""
    small = max(*shape, int(indptr[-1])) < 2**31
    dtype = np.int32 if small else np.int64
    return SparseMatrix(
        (int(shape[0]), int(shape[1])),
        torch.from_numpy(np.ascontiguousarray(indptr, dtype=dtype)),
        torch.from_numpy(np.ascontiguousarray(indices, dtype=dtype)),
        None if values is None else torch.from_numpy(np.ascontiguousarray(values)),
    )


def from_coo(
    shape: tuple[int, int], rows: NDArray[Any], cols: NDArray[Any], values: NDArray[Any] | None = None
) -> SparseMatrix:
    """The same from entries in any order; duplicates stay separate entries."""
    order = np.lexsort((cols, rows))
    indptr = np.zeros(shape[0] + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=shape[0]), out=indptr[1:])
    return sparse_matrix(shape, indptr, cols[order], None if values is None else values[order])


def _csr(a: SparseMatrix, values: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(a.indptr, a.indices, values, size=a.shape, check_invariants=False)


with warnings.catch_warnings():  # torch says once that its CSR tensors are new
    warnings.simplefilter("ignore")
    _csr(SparseMatrix((1, 1), torch.tensor([0, 0]), torch.empty(0, dtype=torch.int64)), torch.empty(0))


def spmm(a: SparseMatrix, x: Tensor, values: Tensor | None = None) -> Tensor:
    """``A x`` [m, D] for x [n, D]; ``values`` [nnz] replaces those of ``a``. bfloat16 rows are added up in float32 and
    their sum is rounded once."""
    if x.shape[0] != a.shape[1]:
        raise ValueError(f"spmm: A is {a.shape[0]} x {a.shape[1]} but x has {x.shape[0]} rows")
    if values is None:
        values = a.values
    if a.nnz == 0 or x.shape[1] == 0:
        return x.new_zeros(a.shape[0], x.shape[1])
    if values is not None:
        values = values.to(x.dtype)
    if x.is_cuda:
        product: Tensor = torch.sparse.mm(_csr(a, x.new_ones(a.nnz) if values is None else values), x)
        return product
    out: Tensor = _embedding_bag(x.contiguous(), a.indices, a.indptr, False, _MODE_SUM, False, values, True, -1)[0]
    return out


def spmm_transposed(a: SparseMatrix, x: Tensor, values: Tensor | None = None) -> Tensor:
    """``A^T x`` [n, D] for x [m, D]; ``values`` [nnz] (in A's order) replaces those of ``a``."""
    t, order = a.transposed
    return spmm(t, x, None if values is None else values[order])


def spmm_add_(out: Tensor, a: SparseMatrix, x: Tensor) -> Tensor:
    """``out += A x`` touching only the rows of ``out`` [m, D] where A has entries."""
    if a.nnz == 0:
        return out
    rows, compact = a.nonempty
    y = spmm(compact, x)
    if compact.shape[0] == a.shape[0]:
        return out.add_(y)
    return out.index_copy_(0, rows, out.index_select(0, rows).add_(y))


def sddmm(a: SparseMatrix, x: Tensor, y: Tensor) -> Tensor:
    """[nnz] dot products ``<x[row], y[column]>`` at the entries of A, for x [m, D] and y [n, D]."""
    if a.nnz == 0 or x.shape[1] == 0:
        return x.new_zeros(a.nnz)
    if x.dtype in (torch.float32, torch.float64) and a.nnz <= a.shape[0] * a.shape[1]:  # it refuses more
        sampled: Tensor = torch.sparse.sampled_addmm(_csr(a, x.new_zeros(a.nnz)), x, y.t(), beta=0.0)
        return sampled.values()
    out: Tensor = _sample_weights_backward(
        x.contiguous(), y.contiguous(), a.indices, a.indptr[:-1].contiguous(), a.rows, _MODE_SUM, -1
    )
    return out


def segment_sum(a: SparseMatrix, entries: Tensor) -> Tensor:
    """[m, H] sums over each row's entries of ``entries`` [nnz, H]."""
    if a.nnz == 0:
        return entries.new_zeros(a.shape[0], entries.shape[1])
    out: Tensor = torch.segment_reduce(entries, "sum", offsets=a.indptr.to(torch.int64), axis=0, initial=0.0)
    return out


def segment_max(a: SparseMatrix, entries: Tensor) -> Tensor:
    """[m, H] maxima over each row's entries of ``entries`` [nnz, H]; -inf for an empty row."""
    if a.nnz == 0:
        return entries.new_full((a.shape[0], entries.shape[1]), -torch.inf)
    out: Tensor = torch.segment_reduce(entries, "max", offsets=a.indptr.to(torch.int64), axis=0, initial=-torch.inf)
    return out


class _SparseLinear(torch.autograd.Function):
    """``A W`` for constant sparse A: forward A W, backward A^T dY."""

    @staticmethod
    def forward(ctx, a: SparseMatrix, values: Tensor | None, w: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.a, ctx.values = a, values
        return spmm(a, w, values)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return None, None, spmm_transposed(ctx.a, grad, ctx.values)


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Constant sparse rows [n, F] in the place of a dense input, with values that may differ from the matrix's."""

    matrix: SparseMatrix
    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    def narrow(self, rows: int) -> SparseRows:
        """The first ``rows`` rows."""
        head = self.matrix.head(rows)
        return SparseRows(head, self.values[: head.nnz])

    def to_dense(self) -> Tensor:
        """[n, F]"""
        out = self.values.new_zeros(self.shape)
        out[self.matrix.rows.long(), self.matrix.indices.long()] = self.values
        return out

    def matmul(self, w: Tensor) -> Tensor:
        """``X w`` [n, D], differentiable in w [F, D]."""
        return _SparseLinear.apply(self.matrix, self.values, w.to(self.values.dtype))  # type: ignore[no-any-return, no-untyped-call]


def at_least_float32(x: Tensor) -> Tensor:
    """``x``, or what it holds in float32 where it is narrower."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(x: Tensor | SparseRows, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias`` for dense or sparse rows, in their type; weight is [D_out, D_in] as in
    ``torch.nn.Linear``."""
    if isinstance(x, SparseRows):
        y = x.matmul(weight.t())
        return y if bias is None else y + bias.to(y.dtype)
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
