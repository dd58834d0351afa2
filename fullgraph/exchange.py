"""Message rows across ranks, forward and backward: a private ``Function`` and a public function.

A ``Transfer`` starts as it is made, so that a caller can compute while rows travel, and goes in blocks of columns
where it would not fit the world's ``exchange_bytes``. ``send_rows`` and ``send_rows_back`` are each other's transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fullgraph.cost import Tag
from fullgraph.kernels import spmm, spmm_add_
from fullgraph.plan import Route
from fullgraph.world import SETUP, Pending, World


class Transfer:
    """An all-to-all on its way. Iterating gives (columns, received rows [rows received, columns])."""

    def __init__(
        self, messages: Callable[[slice], Tensor], width: int, start: Callable[[Tensor], Pending], block: int
    ) -> None:
        self._messages, self._start = messages, start
        self._columns = [slice(at, min(at + block, width)) for at in range(0, width, block)] or [slice(0, 0)]
        self._pending = start(messages(self._columns[0]))

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for at, columns in enumerate(self._columns):
            received = self._pending.wait()
            if at + 1 < len(self._columns):
                self._pending = self._start(self._messages(self._columns[at + 1]))
            yield columns, received


def send_rows(x: Tensor, route: Route, world: World, tag: Tag) -> Transfer:
    """Start ``all_to_all(S x)`` for owned rows x [n_in, D]; gives [rows received, D]."""

    def messages(columns: slice) -> Tensor:
        part = x[:, columns]
        return spmm(route.send, part) if route.select is None else part.index_select(0, route.select)

    counts = route.counts
    world.meter.enter(tag)
    return Transfer(
        messages,
        x.shape[1],
        lambda rows: world.exchange(rows, counts.sent, counts.received, tag),
        _block(x, route, world),
    )


def send_rows_back(grad: Tensor, route: Route, world: World, tag: Tag) -> Transfer:
    """Start the all-to-all of ``grad`` [rows received, D] back to the senders; gives [rows sent, D]."""
    counts = route.counts
    world.meter.enter(tag)
    return Transfer(
        lambda columns: grad[:, columns],
        grad.shape[1],
        lambda rows: world.exchange(rows, counts.received, counts.sent, tag),
        _block(grad, route, world),
    )


def _block(x: Tensor, route: Route, world: World) -> int:
    """Columns to send at a time; the same on every rank, for each takes part in every block."""
    column = max(route.most_rows, 1) * x.element_size()
    return max(1, min(max(x.shape[1], 1), world.exchange_bytes // column))


def add_returned_(grad_x: Tensor, returned: Transfer, route: Route) -> Tensor:
    """``grad_x += S^T returned`` for grad_x [n_in, D] and returned rows [rows sent, D]."""
    for columns, rows in returned:
        spmm_add_(grad_x[:, columns], route.send.transposed[0], rows)
    return grad_x


class _HaloRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, world: World, tag: Tag) -> Tensor:
        ctx.route, ctx.world, ctx.tag, ctx.n = route, world, (tag[0], "backward"), x.shape[0]
        transfer = send_rows(x, route, world, tag)
        out = x.new_empty(x.shape[0] + sum(route.counts.received), x.shape[1])
        out[: ctx.n] = x
        for columns, received in transfer:
            out[ctx.n :, columns] = received
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        transfer = send_rows_back(grad[ctx.n :], ctx.route, ctx.world, ctx.tag)
        grad_x = grad[: ctx.n].clone()
        return add_returned_(grad_x, transfer, ctx.route), None, None, None


def halo_rows(x: Tensor, route: Route, *, world: World, tag: Tag = SETUP) -> Tensor:
    """``[owned | halo]`` rows [n_in + h, D] of x [n_in, D]; differentiable."""
    return _HaloRows.apply(x, route, world, tag)  # type: ignore[no-any-return, no-untyped-call]
