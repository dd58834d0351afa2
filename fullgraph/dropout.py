"""Dropout whose mask is a hash of (seed, step, site, id, column), so that it is the same on any number of ranks.

``id`` is the global node id of a row, or for attention the global edge id; ``site`` numbers the dropout calls of a
model. One 64-bit hash serves four neighbouring columns, 16 bits each. A row is zeroed with probability
``round(65536 p) / 65536`` and scaled by the inverse of the true keep rate, so the expectation is exact.

A row key and a column key, each fully mixed (splitmix64's finaliser), are joined by xor and mixed by two rounds of
multiply and xor-shift: xor alone would leave every 2 x 2 minor of the mask dependent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_GOLDEN = -7046029254386353131  # 2^64 / phi
_MIX1 = -4658895280553007687  # splitmix64
_MIX2 = -7723592293110705685
_LOW32 = (1 << 32) - 1
_LANES = 4
_BLOCK = 1 << 15  # hashes a block: 256 KiB, within a core's cache


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


def keep_mask(ids: Tensor, width: int, p: float, key: MaskKey) -> Tensor:
    """bool [rows, width]: which elements of rows with global ``ids`` [rows] stay."""
    rows = row_keys(ids, key)
    groups = -(-width // _LANES)
    columns = _mix(torch.arange(1, groups + 1, device=ids.device) * _MIX2)
    cut, _ = threshold(p)
    keep = torch.empty(rows.shape[0], width, dtype=torch.bool, device=ids.device)
    block = rows.shape[0] if ids.is_cuda else max(1, _BLOCK // max(groups, 1))
    for start in range(0, rows.shape[0], max(block, 1)):
        h = rows[start : start + block, None] ^ columns
        h.mul_(_MIX1).bitwise_xor_((h >> 32).bitwise_and_(_LOW32))
        h.mul_(_MIX2).bitwise_xor_((h >> 32).bitwise_and_(_LOW32))
        torch.ge(h.view(torch.int16)[:, :width], cut, out=keep[start : start + block])
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
    @staticmethod
    def forward(ctx, x: Tensor, ids: Tensor, p: float, key: MaskKey) -> Tensor:  # type: ignore[no-untyped-def]
        keep = keep_mask(ids, x.shape[1], p, key)
        ctx.save_for_backward(keep)
        ctx.scale = threshold(p)[1]
        out: Tensor = torch.ops.aten.native_dropout_backward(x, keep, ctx.scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        (keep,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grad, keep, ctx.scale), None, None, None


def dropout(x: Tensor, ids: Tensor, p: float, key: MaskKey) -> Tensor:
    """``x`` [rows, D] with elements zeroed by ``keep_mask(ids, D, p, key)`` and the rest scaled up; ids is [rows]."""
    if p == 0.0 or x.shape[0] == 0:
        return x
    return _Dropout.apply(x, ids, p, key)  # type: ignore[no-any-return, no-untyped-call]
