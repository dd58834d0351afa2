"""Dropout masks: the documented hash, independent of layout, and random enough to train with.

The masks are deterministic, so a statistical test here passes always or never.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fullgraph.dropout import MaskKey, dropout, keep_entries, keep_mask, threshold
from fullgraph.kernels import from_coo

KEY = MaskKey(seed=7, step=3, site=1)
PROBABILITIES = (0.01, 0.1, 0.5, 0.9, 0.99)
U64 = (1 << 64) - 1


def true_rate(p: float) -> float:
    """What 16 bits make of the probability of keeping."""
    return 1 - round(65536 * p) / 65536


def close(found: float, expected: float, standard_error: float) -> bool:
    return abs(found - expected) <= 5 * standard_error


# --- which mask ---


def mix(h: int) -> int:
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & U64
    h = (h ^ h >> 27) * 0x94D049BB133111EB & U64
    return h ^ h >> 31


def lane(key: MaskKey, row: int, column: int) -> int:
    """The 16 bits of one element in Python's own integers."""
    golden = 0x9E3779B97F4A7C15
    state = key.seed
    for part in (key.step, key.site):
        state = mix(state + (part + 1) * golden & U64)
    h = mix(row * golden + state & U64) ^ mix((column // 4 + 1) * 0x94D049BB133111EB & U64)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        h = h * factor & U64
        h ^= h >> 32
    bits = h >> 16 * (column % 4) & 0xFFFF
    return bits - 65536 if bits >= 32768 else bits


@pytest.mark.parametrize("key", [KEY, MaskKey(0, 0, 0), MaskKey(2**63 - 1, 10**6, 40)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_mask_is_the_hash_of_its_docstring(key: MaskKey, p: float) -> None:
    ids = [0, 1, 2, 5, 1000, 2**31 - 1, 2**31, 2**40 + 3]
    cut = round(65536 * p) - 32768
    expected = [[lane(key, row, column) >= cut for column in range(11)] for row in ids]
    assert keep_mask(torch.tensor(ids), 11, p, key).tolist() == expected


def test_mask_depends_on_the_ids_and_not_on_their_order_or_company() -> None:
    ids = torch.randperm(5000, generator=torch.Generator().manual_seed(0)) * 3
    full = keep_mask(torch.arange(15000), 10, 0.3, KEY)
    assert torch.equal(keep_mask(ids, 10, 0.3, KEY), full[ids])
    assert torch.equal(keep_mask(ids[:1], 10, 0.3, KEY), full[ids[:1]])
    assert torch.equal(keep_mask(ids[[4, 4, 4]], 10, 0.3, KEY), full[ids[[4, 4, 4]]])
    assert torch.equal(keep_mask(ids.to(torch.int32), 10, 0.3, KEY), full[ids])


@pytest.mark.parametrize("width", range(1, 10))
def test_blocks_and_widths_do_not_change_masks(width: int) -> None:
    ids = torch.arange(70_000)  # several blocks at any of these widths
    full = keep_mask(ids, width, 0.5, KEY)
    assert full.shape == (70_000, width)
    wider = torch.cat([keep_mask(piece, 12, 0.5, KEY) for piece in ids.split(9_999)])
    assert torch.equal(full, wider[:, :width])


def test_wide_rows_are_masked_whole() -> None:
    width = 4 * (1 << 15) + 5  # one row is more than a block
    mask = keep_mask(torch.arange(3), width, 0.5, KEY)
    columns = torch.tensor([0, width // 2, width - 1])
    for row in range(3):
        assert torch.equal(mask[row, columns], keep_entries(torch.tensor([row] * 3), columns, 0.5, KEY))


@pytest.mark.parametrize(("rows", "width"), [(0, 0), (0, 3), (5, 0)])
def test_masks_without_elements(rows: int, width: int) -> None:
    assert keep_mask(torch.arange(rows), width, 0.5, KEY).shape == (rows, width)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_entries_of_a_sparse_matrix_have_the_mask_of_the_dense_one(p: float, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    local = torch.randint(0, 500, (4000,), generator=draw)
    columns = torch.randint(0, 203, (4000,), generator=draw)
    ids = torch.randint(0, 2**40, (500,), generator=draw)
    a = from_coo((500, 203), local.numpy(), columns.numpy())
    found = keep_entries(ids[a.rows], a.indices.to(dtype), p, KEY)
    assert torch.equal(found, keep_mask(ids, 203, p, KEY)[a.rows, a.indices])
    assert keep_entries(ids[:0], a.indices[:0], p, KEY).shape == (0,)


def test_no_two_keys_of_a_run_agree() -> None:
    keys = [MaskKey(*parts).as_int64() for parts in itertools.product(range(10), range(40), range(8))]
    assert len(set(keys)) == len(keys)


# --- how often, and how independently ---


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.arange(4096)


@pytest.mark.parametrize("p", PROBABILITIES)
def test_keep_rate_of_every_lane(ids: Tensor, p: float) -> None:
    mask, q = keep_mask(ids, 128, p, KEY), true_rate(p)
    assert close(mask.double().mean().item(), q, math.sqrt(q * (1 - q) / mask.numel()))
    for first in range(4):
        one = mask[:, first::4]
        assert close(one.double().mean().item(), q, math.sqrt(q * (1 - q) / one.numel()))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rows_and_columns_are_kept_as_often_as_chance_says(ids: Tensor, p: float) -> None:
    mask, q = keep_mask(ids, 512, p, KEY).double(), true_rate(p)
    for axis in (0, 1):
        counts, length, number = mask.sum(axis), mask.shape[axis], mask.shape[1 - axis]
        ratio = ((counts - length * q).square().mean() / (length * q * (1 - q))).item()
        assert close(ratio, 1.0, math.sqrt(2 / number))
        assert (counts - length * q).abs().max().item() < 6 * math.sqrt(length * q * (1 - q))


def assert_independent(a: Tensor, b: Tensor, q: float, *others: Tensor) -> None:
    """The elements of masks of keep rate ``q`` do not depend on each other: their centred product has mean 0."""
    centred = [(m.float() - q) / math.sqrt(q * (1 - q)) for m in (a, b, *others)]
    product = math.prod(centred[1:], start=centred[0])
    assert close(product.mean().item(), 0.0, 1 / math.sqrt(product.numel()))


RATES = (0.1, 0.5, 0.9)


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("apart", [1, 2, 64, 2048])
def test_rows_are_independent(ids: Tensor, apart: int, p: float) -> None:
    mask = keep_mask(ids, 64, p, KEY)
    assert_independent(mask[:-apart], mask[apart:], true_rate(p))


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("apart", [1, 2, 3, 4, 8, 32])
def test_columns_are_independent(ids: Tensor, apart: int, p: float) -> None:
    mask = keep_mask(ids, 64, p, KEY)
    assert_independent(mask[:, :-apart], mask[:, apart:], true_rate(p))


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("rows", [1, 2048])
@pytest.mark.parametrize("columns", [1, 4])
def test_2_by_2_minors_are_independent(ids: Tensor, columns: int, rows: int, p: float) -> None:
    mask = keep_mask(ids, 64, p, KEY)
    top, bottom = mask[:-rows], mask[rows:]
    corners = top[:, :-columns], top[:, columns:], bottom[:, :-columns], bottom[:, columns:]
    assert_independent(corners[0], corners[1], true_rate(p), *corners[2:])


@pytest.mark.parametrize("columns", [1, 4])
def test_parity_of_2_by_2_minors(ids: Tensor, columns: int) -> None:
    mask = keep_mask(ids, 64, 0.5, KEY)
    odd = mask[:-1, :-columns] ^ mask[:-1, columns:] ^ mask[1:, :-columns] ^ mask[1:, columns:]
    assert close(odd.double().mean().item(), 0.5, 0.5 / math.sqrt(odd.numel()))


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize(
    "other",
    [
        MaskKey(7, 4, 1),
        MaskKey(7, 3, 2),
        MaskKey(8, 3, 1),
        MaskKey(7, 1, 3),
        MaskKey(3, 7, 1),
        MaskKey(7 + 2**62, 3, 1),
        MaskKey(7, 3 + 4096, 1),
    ],
    ids=lambda key: f"{key.seed}-{key.step}-{key.site}",
)
def test_masks_of_other_steps_sites_and_seeds_are_independent(ids: Tensor, other: MaskKey, p: float) -> None:
    mine, theirs = keep_mask(ids, 64, p, KEY), keep_mask(ids, 64, p, other)
    assert_independent(mine, theirs, true_rate(p))
    assert_independent(mine[:-1], theirs[1:], true_rate(p))
    assert_independent(mine[:, :-4], theirs[:, 4:], true_rate(p))


# --- what it does to rows ---


@pytest.mark.parametrize("p", [0.0, 1e-6, 1e-5, *PROBABILITIES, 1 / 3, 0.99999, 1 - 1e-9])
def test_scale_is_the_inverse_of_the_true_keep_rate(p: float) -> None:
    cut, scale = threshold(p)
    kept = 32768 - cut  # of the 65,536 values of a lane
    assert 1 <= kept <= 65536
    assert abs(kept / 65536 - (1 - p)) <= 1 / 65536
    assert scale == pytest.approx(65536 / kept, rel=1e-15)


def test_every_element_has_the_expectation_it_had(ids: Tensor) -> None:
    x = torch.linspace(-2, 3, 8, dtype=torch.float64)
    for p in (0.1, 0.5, 0.9):
        q = true_rate(p)
        mean = dropout(x.expand(4096, 8), ids, p, KEY).mean(0)
        assert ((mean - x).abs() <= 5 * x.abs() * math.sqrt((1 - q) / q / 4096) + 1e-12).all()


def test_dropout_is_mask_times_scale_forward_and_backward() -> None:
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(300, 7, dtype=dtype, generator=draw).requires_grad_()
        up = torch.randn(300, 7, dtype=dtype, generator=draw)
        ids, p = torch.randperm(300, generator=draw) * 11, 0.3
        kept = keep_mask(ids, 7, p, KEY) * threshold(p)[1]
        y = dropout(x, ids, p, KEY)
        assert y.dtype == dtype
        assert torch.allclose(y, x * kept, rtol=1e-6, atol=0)
        assert torch.equal(y == 0, kept == 0)
        y.backward(up)
        assert x.grad is not None
        assert torch.allclose(x.grad, up * kept, rtol=1e-6, atol=0)
        assert torch.equal(x.grad == 0, kept == 0)


def test_gradient_of_a_sum_and_by_finite_differences() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.arange(5)
    (grad,) = torch.autograd.grad(dropout(x, ids, 0.5, KEY).sum(), x)
    assert torch.equal(grad, keep_mask(ids, 3, 0.5, KEY) * 2.0)
    assert torch.autograd.gradcheck(lambda x: dropout(x, ids, 0.5, KEY), (x,))


def test_probability_zero_and_no_rows_leave_the_input_as_it_is() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    assert dropout(x, torch.arange(4), 0.0, KEY) is x
    assert keep_mask(torch.arange(1000), 8, 0.0, KEY).all()
    empty = torch.empty(0, 3, requires_grad=True)
    assert dropout(empty, torch.arange(0), 0.5, KEY).shape == (0, 3)
