"""Message rows across ranks, forward and backward: a private ``Function`` and a public function.

A ``Transfer`` starts as it is made, so that a caller can compute while rows travel, and goes in blocks of columns
where it would not fit the world's ``exchange_bytes``. ``send_rows`` and ``send_rows_back`` are each other's transpose.
A ``Carrier`` may move them in another way (``fullgraph.policy``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fullgraph.cost import Tag
from fullgraph.kernels import spmm, spmm_add_
from fullgraph.plan import Route
from fullgraph.world import SETUP, World

Arrivals = Iterable[tuple[slice, Tensor]]
"""(columns, rows [rows received, columns]), which together are all columns, or nothing at all."""


class Carrier(Protocol):
    """Another way for the rows of one propagate to cross, and then for their gradients to cross back."""

    def send(self, x: Tensor, route: Route) -> Arrivals:
        """``all_to_all(S x)`` for owned rows x [n_in, D], or what is taken for it; gives [rows received, D]."""

    def send_back(self, grad: Callable[[], Tensor], route: Route) -> Arrivals:
        """The way back of ``grad()`` [rows received, D]; gives [rows sent, D]."""


class Arriving(Protocol):
    """Rows on their way."""

    def wait(self) -> Tensor: ...


class Transfer:
    """An all-to-all on its way. Iterating gives (columns, received rows [rows received, columns])."""

    def __init__(
        self, messages: Callable[[slice], Tensor], start: Callable[[Tensor], Arriving], columns: list[slice]
    ) -> None:
        self._messages, self._start, self._columns = messages, start, columns
        self._pending = start(messages(self._columns[0]))

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for at, columns in enumerate(self._columns):
            received = self._pending.wait()
            if at + 1 < len(self._columns):
                self._pending = self._start(self._messages(self._columns[at + 1]))
            yield columns, received


def send_rows(x: Tensor, route: Route, world: World, tag: Tag) -> Transfer:
    """Start ``all_to_all(S x)`` for owned rows x [n_in, D]; gives [rows received, D]."""
    counts = route.counts
    world.meter.enter(tag)
    return Transfer(
        lambda columns: message_rows(x, route, columns),
        lambda rows: world.exchange(rows, counts.sent, counts.received, tag),
        column_blocks(x.shape[1], x.element_size(), route.most_rows, world.exchange_bytes),
    )


def send_rows_back(grad: Tensor, route: Route, world: World, tag: Tag) -> Transfer:
    """Start the all-to-all of ``grad`` [rows received, D] back to the senders; gives [rows sent, D]."""
    counts = route.counts
    world.meter.enter(tag)
    return Transfer(
        lambda columns: grad[:, columns],
        lambda rows: world.exchange(rows, counts.received, counts.sent, tag),
        column_blocks(grad.shape[1], grad.element_size(), route.most_rows, world.exchange_bytes),
    )


def message_rows(x: Tensor, route: Route, columns: slice) -> Tensor:
    """``S x`` [rows sent, columns]."""
    part = x[:, columns]
    return spmm(route.send, part) if route.select is None else part.index_select(0, route.select)


def column_blocks(width: int, itemsize: int, most_rows: int, exchange_bytes: int) -> list[slice]:
    """Columns to send at a time; the same on every rank, for each takes part in every block."""
    block = max(1, min(max(width, 1), exchange_bytes // (max(most_rows, 1) * itemsize)))
    return [slice(at, min(at + block, width)) for at in range(0, width, block)] or [slice(0, 0)]


def add_returned_(grad_x: Tensor, returned: Arrivals, route: Route) -> Tensor:
    """``grad_x += S^T returned`` for grad_x [n_in, D] and returned rows [rows sent, D]."""
    for columns, rows in returned:
        spmm_add_(grad_x[:, columns], route.send.transposed[0], rows)
    return grad_x


class _HaloRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, route: Route, world: World, tag: Tag, carrier: Carrier | None
    ) -> Tensor:
        ctx.route, ctx.world, ctx.tag, ctx.carrier, ctx.n = route, world, (tag[0], "backward"), carrier, x.shape[0]
        ctx.save_for_backward(*(() if weight is None else (x, weight)))
        width = x.shape[1] if weight is None else weight.shape[0]
        out = world.buffers.empty(ctx.n + sum(route.counts.received), width, x)
        own = out[: ctx.n]
        own = own.copy_(x) if weight is None else torch.mm(x, weight.t(), out=own)
        for columns, received in send_rows(own, route, world, tag) if carrier is None else carrier.send(own, route):
            out[ctx.n :, columns] = received
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        returned = return_rows(lambda: grad[ctx.n :], ctx.route, ctx.world, ctx.tag, ctx.carrier)
        grad_own = ctx.world.buffers.empty(ctx.n, grad.shape[1], grad).copy_(grad[: ctx.n])
        add_returned_(grad_own, returned, ctx.route)
        if not ctx.saved_tensors:
            return grad_own, *(None,) * 5
        x, weight = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.mm(grad_own, weight, out=ctx.world.buffers.empty(*x.shape, grad))
        return grad_x, torch.mm(grad_own.t(), x), *(None,) * 4


class _ReceivedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, world: World, tag: Tag, carrier: Carrier) -> Tensor:
        ctx.route, ctx.world, ctx.tag, ctx.carrier, ctx.shape = route, world, (tag[0], "backward"), carrier, x.shape
        blocks = [rows.detach() for _, rows in carrier.send(x, route)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        returned = return_rows(grad.contiguous, ctx.route, ctx.world, ctx.tag, ctx.carrier)
        return add_returned_(grad.new_zeros(ctx.shape), returned, ctx.route), None, None, None, None


def return_rows(grad: Callable[[], Tensor], route: Route, world: World, tag: Tag, carrier: Carrier | None) -> Arrivals:
    """The way back by ``carrier``, exact where there is none."""
    return send_rows_back(grad(), route, world, tag) if carrier is None else carrier.send_back(grad, route)


def halo_rows(
    x: Tensor,
    route: Route,
    weight: Tensor | None = None,
    *,
    world: World,
    tag: Tag = SETUP,
    carrier: Carrier | None = None,
) -> Tensor:
    """``[owned | halo]`` rows [n_in + h, D] of x [n_in, D], or of ``x weight^T``; differentiable."""
    weight = None if weight is None else weight.to(x.dtype)
    return _HaloRows.apply(x, weight, route, world, tag, carrier)  # type: ignore[no-any-return, no-untyped-call]


def received_rows(x: Tensor, route: Route, *, world: World, tag: Tag, carrier: Carrier) -> Tensor:
    """The halo rows [h, D] alone, as ``carrier`` brings them; differentiable in x."""
    return _ReceivedRows.apply(x, route, world, tag, carrier)  # type: ignore[no-any-return, no-untyped-call]
