"""Dropout whose mask is a hash of (seed, step, site, id, column), so that it is the same on any number of ranks.

``id`` is the global node id of a row, or for attention the global edge id; ``site`` numbers the dropout calls of a
model. One 64-bit hash serves four neighbouring columns, 16 bits each. A row is zeroed with probability
``round(65536 p) / 65536`` and scaled by the inverse of the true keep rate, so the expectation is exact.

A row key and a column key, each fully mixed (splitmix64's finaliser), are joined by xor and mixed by two rounds of
multiply and xor-shift: xor alone would leave every 2 x 2 minor of the mask dependent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_GOLDEN = -7046029254386353131  # 2^64 / phi
_MIX1 = -4658895280553007687  # splitmix64
_MIX2 = -7723592293110705685
_LOW32 = (1 << 32) - 1
_LANES = 4
_BLOCK = 1 << 15  # hashes a block and thread: 256 KiB, within a core's cache


def _mix(h: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 (arithmetic shifts masked to logical ones)."""
    h = (h ^ ((h >> 30) & ((1 << 34) - 1))) * _MIX1
    h = (h ^ ((h >> 27) & ((1 << 37) - 1))) * _MIX2
    return h ^ ((h >> 31) & ((1 << 33) - 1))


def _wrap(value: int) -> int:
    """A Python integer modulo 2^64, as int64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


@dataclass(frozen=True)
class MaskKey:
    """What names one draw of masks: the run's seed, the training step, and the dropout call of the model."""

    seed: int
    step: int
    site: int

    def as_int64(self) -> int:
        state = torch.tensor([_wrap(self.seed)])
        for part in (self.step, self.site):
            state = _mix(state + _wrap((part + 1) * _GOLDEN))
        return int(state)


def threshold(p: float) -> tuple[int, float]:
    """(drop threshold of a 16-bit lane, scale of what is kept) for drop probability ``p`` in [0, 1)."""
    drop = min(round(p * 65536), 65535)
    return drop - 32768, 65536.0 / (65536 - drop)


def row_keys(ids: Tensor, key: MaskKey) -> Tensor:
    """[rows] int64 keys of global ids [rows]."""
    return _mix(ids.to(torch.int64) * _GOLDEN + key.as_int64())


class _Mask:
    """The mask of rows with global ``ids`` [rows] and ``width`` columns, drawn block by block."""

    def __init__(self, ids: Tensor, width: int, p: float, key: MaskKey) -> None:
        self.rows, self.width = row_keys(ids, key), width
        groups = -(-width // _LANES)
        self.columns = _mix(torch.arange(1, groups + 1, device=ids.device) * _MIX2)
        self.cut, self.scale = threshold(p)
        count = self.rows.shape[0]
        self.step = max(1, count if ids.is_cuda else _BLOCK * torch.get_num_threads() // max(groups, 1))
        shape = (min(self.step, count), groups)
        self._hash, self._shifted = self.columns.new_empty(shape), self.columns.new_empty(shape)

    def blocks(self) -> Iterator[slice]:
        for start in range(0, self.rows.shape[0], self.step):
            yield slice(start, min(start + self.step, self.rows.shape[0]))

    def draw(self, block: slice, out: Tensor) -> Tensor:
        """Which elements of the block stay, into ``out`` [rows of the block, width]: bool, or 0.0 and 1.0."""
        count = block.stop - block.start
        h, shifted = self._hash[:count], self._shifted[:count]
        torch.bitwise_xor(self.rows[block, None], self.columns, out=h)
        for factor in (_MIX1, _MIX2):
            h.mul_(factor)
            h.bitwise_xor_(torch.bitwise_right_shift(h, 32, out=shifted).bitwise_and_(_LOW32))
        return torch.ge(h.view(torch.int16)[:, : self.width], self.cut, out=out[:count])


def keep_mask(ids: Tensor, width: int, p: float, key: MaskKey) -> Tensor:
    """bool [rows, width]: which elements of rows with global ``ids`` [rows] stay."""
    mask = _Mask(ids, width, p, key)
    keep = torch.empty(mask.rows.shape[0], width, dtype=torch.bool, device=ids.device)
    for block in mask.blocks():
        mask.draw(block, keep[block])
    return keep


def keep_entries(ids: Tensor, columns: Tensor, p: float, key: MaskKey) -> Tensor:
    """bool [nnz]: ``keep_mask`` at the entries (id, column) of a sparse matrix."""
    group = torch.div(columns, _LANES, rounding_mode="floor").to(torch.int64)
    h = row_keys(ids, key) ^ _mix((group + 1) * _MIX2)
    h.mul_(_MIX1).bitwise_xor_((h >> 32).bitwise_and_(_LOW32))
    h.mul_(_MIX2).bitwise_xor_((h >> 32).bitwise_and_(_LOW32))
    lanes = h.view(torch.int16).view(-1, _LANES)
    lane = (columns.to(torch.int64) % _LANES)[:, None]
    return lanes.gather(1, lane).squeeze(1) >= threshold(p)[0]


def _drop(x: Tensor, out: Tensor, ids: Tensor, p: float, key: MaskKey, *, relu: bool = False) -> Tensor:
    """``out = dropout(x)``, or of ``relu(x)``, in one pass over memory; ``out`` may be ``x``."""
    mask = _Mask(ids, x.shape[1], p, key)
    keep = x.new_empty(min(mask.step, x.shape[0]), x.shape[1])
    for block in mask.blocks():
        kept = mask.draw(block, keep).mul_(mask.scale)
        if relu:
            torch.clamp_min(x[block], 0, out=out[block])
            out[block].mul_(kept)
        else:
            torch.mul(x[block], kept, out=out[block])
    return out


def uniform(ids: Tensor, width: int, key: MaskKey) -> Tensor:
    """float64 [rows, width] numbers in [0, 1) by the same hash, a whole one each."""
    rows, columns = row_keys(ids, key), _mix(torch.arange(1, width + 1, device=ids.device) * _MIX2)
    out = torch.empty(rows.shape[0], width, dtype=torch.float64, device=ids.device)
    block = max(1, _BLOCK // max(width, 1))
    for start in range(0, rows.shape[0], block):
        h = _mix(rows[start : start + block, None] ^ columns)
        out[start : start + block] = (h >> 11) & ((1 << 53) - 1)
    return out.mul_(2.0**-53)


class _Dropout(torch.autograd.Function):
    """The mask is drawn anew in backward: that costs less than the memory it would fill."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, p: float, key: MaskKey) -> Tensor:
        ctx.ids, ctx.p, ctx.key = ids, p, key
        return _drop(x, torch.empty_like(x), ids, p, key)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _drop(grad, torch.empty_like(grad), ctx.ids, ctx.p, ctx.key), None, None, None


class _ReluDropout(torch.autograd.Function):
    """In place. What is positive in the result was positive and kept, so backward needs nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, p: float, key: MaskKey) -> Tensor:
        ctx.mark_dirty(x)
        _drop(x, x, ids, p, key, relu=True)
        ctx.save_for_backward(x)
        ctx.scale = threshold(p)[1]
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (y,) = ctx.saved_tensors
        out = torch.empty_like(grad)
        step = max(1, _BLOCK * _LANES * torch.get_num_threads() // max(grad.shape[1], 1))
        for start in range(0, grad.shape[0], step):
            block = slice(start, start + step)
            torch.gt(y[block], 0, out=out[block])
            out[block].mul_(grad[block]).mul_(ctx.scale)
        return out, None, None, None


def dropout(x: Tensor, ids: Tensor, p: float, key: MaskKey) -> Tensor:
    """``x`` [rows, D] with elements zeroed by ``keep_mask(ids, D, p, key)`` and the rest scaled up; ids is [rows]."""
    if p == 0.0 or x.shape[0] == 0:
        return x
    return _Dropout.apply(x, ids, p, key)  # type: ignore[no-any-return, no-untyped-call]


def relu_dropout_(x: Tensor, ids: Tensor, p: float, key: MaskKey) -> Tensor:
    """``dropout(relu(x))`` in one pass, in the memory of ``x``, which nothing may need as it was."""
    if p == 0.0 or x.shape[0] == 0:
        return torch.relu_(x)
    return _ReluDropout.apply(x, ids, p, key)  # type: ignore[no-any-return, no-untyped-call]
