"""Dropout whose mask is a hash of (seed, step, site, id, column), so that it is the same on any number of ranks.

``id`` is the global node id of a row, or for attention the global edge id; ``site`` numbers the dropout calls of a
model. One 64-bit hash serves four neighbouring columns, 16 bits each. A row is zeroed with probability
``round(65536 p) / 65536`` and scaled by the inverse of the true keep rate, so the expectation is exact.

A row key and a column key, each fully mixed (splitmix64's finaliser), are joined by xor and mixed by two rounds of
multiply and xor-shift: xor alone would leave every 2 x 2 minor of the mask dependent.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fullgraph.buffers import Buffers

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
        self._keep: Tensor | None = None

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

    def drop(self, rows: Tensor, first: int, out: Tensor) -> Tensor:
        """Dropout of at most ``step`` rows into ``out``, which may be these; ``first`` is the index of the first."""
        if self._keep is None or self._keep.dtype != rows.dtype:
            self._keep = rows.new_empty(min(self.step, self.rows.shape[0]), self.width)
        kept = self.draw(slice(first, first + rows.shape[0]), self._keep)
        if rows.dtype == torch.bfloat16:  # in which the scale itself would be rounded, and the mean with it
            return torch.mul(rows, self.scale, out=out).mul_(kept)
        return torch.mul(rows, kept.mul_(self.scale), out=out)


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


def _drop(x: Tensor, out: Tensor, ids: Tensor, p: float, key: MaskKey) -> Tensor:
    """``out = dropout(x)`` in one pass over memory."""
    mask = _Mask(ids, x.shape[1], p, key)
    for block in mask.blocks():
        mask.drop(x[block], block.start, out[block])
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
    def forward(ctx: Any, x: Tensor, ids: Tensor, p: float, key: MaskKey, buffers: Buffers) -> Tensor:
        ctx.ids, ctx.p, ctx.key, ctx.buffers = ids, p, key, buffers
        return _drop(x, buffers.empty(x.shape[0], x.shape[1], x), ids, p, key)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (
            _drop(grad, ctx.buffers.empty(grad.shape[0], grad.shape[1], grad), ctx.ids, ctx.p, ctx.key),
            None,
            None,
            None,
            None,
        )


@dataclass(frozen=True, eq=False)
class Activation(abc.ABC):
    """``dropout(f(y))`` of hidden rows with global ``ids`` [rows]; f alone where ``p`` is 0 or there is no key.

    It is applied in the memory of y, and its derivative is a function of the result, so that neither y nor f(y) is
    kept. Nothing else may take such rows, where gradients are wanted.
    """

    ids: Tensor
    p: float
    key: MaskKey | None

    @staticmethod
    @abc.abstractmethod
    def function_(y: Tensor) -> Tensor:
        """f in the memory of y."""

    @abc.abstractmethod
    def derive(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """Into ``out`` [rows, D]: the gradient before this, from ``grad`` of rows x that it made."""

    @property
    def scale(self) -> float:
        """Of what dropout leaves."""
        return 1.0 if self.key is None else threshold(self.p)[1]

    def over(self, width: int) -> Callable[[Tensor, int], None]:
        """What applies it to rows [m, width], in place, of which the first has the given index."""
        mask = None if self.key is None else _Mask(self.ids, width, self.p, self.key)

        def apply_(rows: Tensor, first: int) -> None:
            if mask is None:
                self.function_(rows)
                return
            for start in range(0, rows.shape[0], mask.step):
                part = rows[start : start + mask.step]
                mask.drop(self.function_(part), first + start, part)

        return apply_


class ReluDropout(Activation):
    """The layer that makes the rows applies it to them block by block, and the layer that takes them applies its
    derivative to their gradient, block by block too, so that no pass over memory is spent on either."""

    @staticmethod
    def function_(y: Tensor) -> Tensor:
        return torch.relu_(y)

    def derive(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """What is positive in the result was positive and kept, so no mask is drawn."""
        step = max(1, _BLOCK * _LANES * torch.get_num_threads() // max(x.shape[1], 1))
        for start in range(0, x.shape[0], step):
            block = slice(start, start + step)
            torch.gt(x[block], 0, out=out[block])
            out[block].mul_(grad[block]).mul_(self.scale)
        return out


class EluDropout(Activation):
    @staticmethod
    def function_(y: Tensor) -> Tensor:
        return torch.nn.functional.elu_(y)

    def derive(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """``elu'(y) = 1 + min(elu(y), 0)``, and ``elu(y)`` is the result over ``scale`` where it was kept."""
        mask = _Mask(self.ids[: x.shape[0]], x.shape[1], self.p if self.key else 0.0, self.key or MaskKey(0, 0, 0))
        for block in mask.blocks():
            torch.clamp_max(x[block], 0, out=out[block]).div_(self.scale).add_(1).mul_(grad[block])
            if self.key is not None:
                mask.drop(out[block], block.start, out[block])
        return out


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, activation: Activation) -> Tensor:
        ctx.mark_dirty(y)
        activation.over(y.shape[1])(y, 0)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Derive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation, buffers: Buffers) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation, ctx.buffers = activation, buffers
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.activation.derive(x, grad, ctx.buffers.empty(*grad.shape, grad)), None, None


def dropout(x: Tensor, ids: Tensor, p: float, key: MaskKey, buffers: Buffers | None = None) -> Tensor:
    """``x`` [rows, D] with elements zeroed by ``keep_mask(ids, D, p, key)`` and the rest scaled up; ids is [rows]."""
    if p == 0.0 or x.shape[0] == 0:
        return x
    return _Dropout.apply(x, ids, p, key, buffers or Buffers())  # type: ignore[no-any-return, no-untyped-call]


def activate_(y: Tensor, activation: Activation) -> Tensor:
    """``activation`` of y [rows, D], in its memory. Its derivative is left to whoever takes the result (``derive``)."""
    return _Activate.apply(y, activation)  # type: ignore[no-any-return, no-untyped-call]


def derive(x: Tensor, activation: Activation | None, buffers: Buffers | None = None) -> Tensor:
    """x [rows, D] itself, which ``activation`` made; the gradient that goes back through here gets its derivative."""
    if activation is None:
        return x
    return _Derive.apply(x, activation, buffers or Buffers())  # type: ignore[no-any-return, no-untyped-call]
