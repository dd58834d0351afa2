"""Sparse kernels against dense products. Values are small integers, so equality is exact whatever the order of sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullgraph.kernels import (
    SparseMatrix,
    SparseRows,
    from_coo,
    linear,
    sddmm,
    segment_max,
    segment_sum,
    sparse_matrix,
    spmm,
    spmm_add_,
    spmm_transposed,
)

# Empty rows and columns at the start, inside and at the end; duplicates.
ROWS = np.array([1, 1, 1, 3, 3, 4, 4, 6, 6, 6])
COLS = np.array([2, 2, 4, 1, 4, 2, 5, 1, 2, 4])
SHAPE = (8, 7)
WIDTHS = (0, 1, 3, 8, 17, 64, 100)


def example(
    *, values: bool = False, dtype: torch.dtype = torch.float64, index: torch.dtype = torch.int32
) -> SparseMatrix:
    a = from_coo(SHAPE, ROWS, COLS, np.arange(1.0, 11.0) if values else None).to(torch.device("cpu"), dtype)
    return SparseMatrix(a.shape, a.indptr.to(index), a.indices.to(index), a.values)


def integers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense(a: SparseMatrix, values: Tensor | None = None) -> Tensor:
    values = a.values if values is None else values
    values = torch.ones(a.nnz) if values is None else values
    out = torch.zeros(a.shape, dtype=torch.float64)
    return out.index_put_((a.rows.long(), a.indices.long()), values.double(), accumulate=True)


# --- the matrix ---


def test_coo_entries_are_put_in_order_and_duplicates_stay_apart() -> None:
    shuffled = np.random.default_rng(0).permutation(len(ROWS))
    a = from_coo(SHAPE, ROWS[shuffled], COLS[shuffled], np.arange(10.0)[shuffled])
    assert a.nnz == 10
    assert a.indptr.tolist() == [0, 0, 3, 3, 5, 7, 7, 10, 10]
    assert a.indices.tolist() == COLS.tolist()
    assert a.rows.tolist() == ROWS.tolist()
    assert a.values is not None
    assert a.values.tolist() == list(range(10))


@pytest.mark.parametrize(("columns", "expected"), [(2**31 - 1, torch.int32), (2**31, torch.int64)])
def test_indices_are_int32_where_the_shape_allows(columns: int, expected: torch.dtype) -> None:
    a = sparse_matrix((1, columns), np.array([0, 1]), np.array([columns - 1]))
    assert a.indptr.dtype == a.indices.dtype == a.rows.dtype == expected
    assert a.indices.tolist() == [columns - 1]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_transpose_is_the_transpose_and_its_order_maps_entries(index: torch.dtype) -> None:
    a = example(values=True, index=index)
    t, order = a.transposed
    assert torch.equal(dense(t), dense(a).T)
    assert (t.indptr.dtype, t.indices.dtype) == (index, index)
    assert a.values is not None
    assert t.values is not None
    assert torch.equal(t.values, a.values[order])
    assert a.transposed[0] is t
    back, _ = t.transposed
    assert torch.equal(back.indptr, a.indptr)
    assert torch.equal(back.indices, a.indices)
    assert torch.equal(back.values, a.values)


def test_nonempty_keeps_only_rows_with_entries() -> None:
    a = example(values=True)
    rows, compact = a.nonempty
    assert rows.tolist() == [1, 3, 4, 6]
    assert compact.shape == (4, 7)
    assert torch.equal(dense(compact), dense(a)[rows])


@pytest.mark.parametrize("rows", range(9))
def test_head_is_the_first_rows_and_is_made_once(rows: int) -> None:
    a = example()
    head = a.head(rows)
    assert head.shape == (rows, 7)
    assert torch.equal(dense(head), dense(a)[:rows])
    assert a.head(rows) is head
    assert (head is a) == (rows == 8)


def test_to_changes_the_type_of_values_alone() -> None:
    a = example(values=True, dtype=torch.float32)
    assert a.values is not None
    assert (a.values.dtype, a.indices.dtype) == (torch.float32, torch.int32)
    assert example().values is None


# --- products ---


@pytest.mark.parametrize("given_values", [False, True])
@pytest.mark.parametrize("own_values", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_equal_dense_ones(
    dtype: torch.dtype, index: torch.dtype, own_values: bool, given_values: bool
) -> None:
    a = example(values=own_values, dtype=dtype, index=index)
    values = integers(a.nnz, dtype=dtype, seed=1) if given_values else None
    matrix, at = dense(a, values), (a.rows.long(), a.indices.long())
    for width in WIDTHS:
        x, y = integers(7, width, dtype=dtype, seed=2), integers(8, width, dtype=dtype, seed=3)
        for found, product in (
            (spmm(a, x, values), lambda m, x, y: m @ x),
            (spmm_transposed(a, y, values), lambda m, x, y: m.T @ y),
            (sddmm(a, y, x), lambda m, x, y: (y @ x.T)[at]),
        ):
            expected = product(matrix, x.double(), y.double())
            assert found.dtype == dtype
            assert found.shape == expected.shape
            # These sums may have more digits than the 8 bits of bfloat16.
            unit = 2.0**-7 if dtype == torch.bfloat16 else 0.0
            error = (found.double() - expected).abs()
            assert (error <= unit * product(matrix.abs(), x.double().abs(), y.double().abs())).all()


def test_bfloat16_sum_is_rounded_to_bfloat16() -> None:
    a = from_coo((1, 3), np.zeros(3, np.int64), np.arange(3))
    x = torch.tensor([[1.0], [0.5], [0.125]], dtype=torch.bfloat16)
    assert spmm(a, x).tolist() == [[1.625]]


def test_strided_rows_are_read_right() -> None:
    a, x, y = example(), integers(20, 7).T[:, ::2], integers(20, 8).T[:, ::2]
    assert torch.equal(spmm(a, x), dense(a) @ x)
    assert torch.equal(spmm_transposed(a, y), dense(a).T @ y)
    assert torch.equal(sddmm(a, y, x), (y @ x.T)[a.rows.long(), a.indices.long()])
    one_row = torch.ones(1, 1, dtype=torch.float64).expand(7, 4)  # what a sum's gradient looks like
    assert torch.equal(spmm(a, one_row), dense(a) @ one_row)


@pytest.mark.parametrize("values", [False, True])
def test_add_touches_only_rows_with_entries(values: bool) -> None:
    a, x = example(values=values), integers(7, 5)
    empty = torch.tensor([0, 2, 5, 7])
    out = integers(8, 5, seed=4)
    out[empty] = torch.nan  # a row that is read or written would show
    before = out.clone()
    assert spmm_add_(out, a, x) is out
    assert torch.equal((before + dense(a) @ x)[[1, 3, 4, 6]], out[[1, 3, 4, 6]])
    assert out[empty].isnan().all()


def test_add_where_every_row_has_entries() -> None:
    a, out = from_coo((2, 3), np.array([0, 1, 1]), np.array([2, 0, 1])), integers(2, 4)
    expected = out + dense(a) @ integers(3, 4, seed=5)
    assert torch.equal(spmm_add_(out, a, integers(3, 4, seed=5)), expected)


def test_rows_without_entries_do_not_read_rows_that_nobody_asks_for() -> None:
    x = integers(7, 4)
    x[[0, 3, 6]] = torch.nan  # columns without entries
    assert not spmm(example(), x).isnan().any()
    assert spmm(example(), x)[[0, 2, 5, 7]].eq(0).all()


def test_a_wrong_number_of_rows_is_named() -> None:
    with pytest.raises(ValueError, match="A is 8 x 7 but x has 8 rows"):
        spmm(example(), integers(8, 3))
    with pytest.raises(ValueError, match="A is 7 x 8 but x has 7 rows"):
        spmm_transposed(example(), integers(7, 3))


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (4, 6)])
@pytest.mark.parametrize("width", [0, 1, 3])
def test_matrix_without_entries(shape: tuple[int, int], width: int) -> None:
    m, n = shape
    a = from_coo(shape, np.zeros(0, np.int64), np.zeros(0, np.int64))
    x, y, none = integers(n, width), integers(m, width), torch.zeros(0, dtype=torch.float64)
    for values in (None, none):
        assert torch.equal(spmm(a, x, values), torch.zeros(m, width, dtype=torch.float64))
        assert torch.equal(spmm_transposed(a, y, values), torch.zeros(n, width, dtype=torch.float64))
    assert sddmm(a, y, x).shape == (0,)
    assert torch.equal(spmm_add_(y.clone(), a, x), y)
    assert torch.equal(segment_sum(a, none.view(0, 1)), torch.zeros(m, 1, dtype=torch.float64))
    assert torch.equal(segment_max(a, none.view(0, 1)), torch.full((m, 1), -torch.inf, dtype=torch.float64))
    assert a.transposed[0].shape == (n, m)
    assert a.nonempty[0].shape == (0,)
    assert a.head(m).shape == shape


def test_a_sum_of_ones_over_a_million_edges_is_the_in_degree() -> None:
    n, e = 50_000, 1_000_000
    rng = np.random.default_rng(0)
    src, dst = (n * rng.random((2, e)) ** 3).astype(np.int64)  # skewed: a few nodes of large degree, some of none
    a = from_coo((n, n), dst, src)
    ones = torch.ones(n, 2)
    assert torch.equal(spmm(a, ones)[:, 0].long(), torch.from_numpy(np.bincount(dst, minlength=n)))
    assert torch.equal(spmm_transposed(a, ones)[:, 1].long(), torch.from_numpy(np.bincount(src, minlength=n)))
    assert torch.equal(segment_sum(a, torch.ones(e, 1))[:, 0].long(), torch.from_numpy(np.bincount(dst, minlength=n)))


@st.composite
def matrices(draw: st.DrawFn) -> SparseMatrix:
    m, n = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    entry = st.tuples(st.integers(0, max(m - 1, 0)), st.integers(0, max(n - 1, 0)), st.integers(-4, 4))
    entries = np.array(draw(st.lists(entry, max_size=30)) if m and n else [], np.int64).reshape(-1, 3)
    return from_coo((m, n), entries[:, 0], entries[:, 1], entries[:, 2].astype(float) if draw(st.booleans()) else None)


@given(a=matrices(), width=st.integers(0, 9), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_any_matrix(a: SparseMatrix, width: int, seed: int) -> None:
    (m, n), matrix = a.shape, dense(a)
    x, y, entries = integers(n, width, seed=seed), integers(m, width, seed=seed + 1), integers(a.nnz, 2, seed=seed)
    assert torch.equal(spmm(a, x), matrix @ x)
    assert torch.equal(spmm_transposed(a, y), matrix.T @ y)
    assert torch.equal(spmm_add_(y.clone(), a, x), y + matrix @ x)
    assert torch.equal(sddmm(a, y, x), (y @ x.T)[a.rows.long(), a.indices.long()])
    assert torch.equal(spmm(a, x, entries[:, 0].contiguous()), dense(a, entries[:, 0]) @ x)
    for row in range(m):
        mine = entries[a.indptr[row] : a.indptr[row + 1]]
        assert torch.equal(segment_sum(a, entries)[row], mine.sum(0))
        assert torch.equal(
            segment_max(a, entries)[row], mine.max(0).values if len(mine) else mine.new_full((2,), -torch.inf)
        )


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [0, 1, 4])
def test_segments_take_any_width_and_type(width: int, index: torch.dtype) -> None:
    for dtype in (torch.float32, torch.float64):
        a, entries = example(index=index), integers(10, width, dtype=dtype)
        assert torch.equal(segment_sum(a, entries)[6], entries[7:10].sum(0))
        assert segment_sum(a, entries).dtype == dtype
        assert segment_max(a, entries).shape == (8, width)
        assert segment_max(a, entries)[[0, 2, 5, 7]].eq(-torch.inf).all()


# --- sparse rows ---


def rows() -> SparseRows:
    return SparseRows(example(), integers(10, seed=6))


def test_sparse_rows_narrow_to_the_first_rows() -> None:
    full = dense(rows().matrix, rows().values)
    for count in (0, 1, 2, 5, 8):
        narrow = rows().narrow(count)
        assert narrow.shape == (count, 7)
        assert torch.equal(dense(narrow.matrix, narrow.values), full[:count])


@pytest.mark.parametrize("count", [0, 4, 8])
def test_sparse_rows_multiply_like_dense_ones_forward_and_backward(count: int) -> None:
    x, weight, bias = (
        rows().narrow(count),
        integers(3, 7, seed=7).requires_grad_(),
        integers(3, seed=8).requires_grad_(),
    )
    full = dense(x.matrix, x.values)
    up = integers(count, 3, seed=9)
    found = linear(x, weight, bias)
    expected = torch.nn.functional.linear(full, weight, bias)
    assert torch.equal(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (weight, bias), up), torch.autograd.grad(expected, (weight, bias), up), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert torch.equal(linear(x, weight), full @ weight.T)
    assert torch.equal(linear(full, weight, bias), expected)


def test_sparse_rows_gradient_by_finite_differences() -> None:
    weight = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: rows().matmul(w).sin(), (weight,))
