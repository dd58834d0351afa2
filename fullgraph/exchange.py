"""Message rows across ranks, forward and backward: a private ``Function`` and a public function.

``send_rows`` and ``send_rows_back`` are each other's transpose; both only start the transfer, so that a caller can
compute while rows travel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fullgraph.kernels import spmm, spmm_add_
from fullgraph.plan import Route
from fullgraph.world import Pending, World


def send_rows(x: Tensor, route: Route, world: World) -> Pending:
    """Start ``all_to_all(S x)`` for owned rows x [n_in, D]; gives [rows received, D]."""
    messages = spmm(route.send, x) if route.select is None else x.index_select(0, route.select)
    return world.exchange(messages, route.send_counts, route.recv_counts)


def send_rows_back(grad: Tensor, route: Route, world: World) -> Pending:
    """Start the all-to-all of ``grad`` [rows received, D] back to the senders; gives [rows sent, D]."""
    return world.exchange(grad, route.recv_counts, route.send_counts)


def add_returned_(grad_x: Tensor, returned: Tensor, route: Route) -> Tensor:
    """``grad_x += S^T returned`` for grad_x [n_in, D] and returned [rows sent, D]."""
    return spmm_add_(grad_x, route.send.transposed[0], returned)


class _HaloRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, world: World) -> Tensor:
        ctx.route, ctx.world, ctx.n = route, world, x.shape[0]
        return torch.cat([x, send_rows(x, route, world).wait()])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        pending = send_rows_back(grad[ctx.n :], ctx.route, ctx.world)
        grad_x = grad[: ctx.n].clone()
        return add_returned_(grad_x, pending.wait(), ctx.route), None, None


def halo_rows(x: Tensor, route: Route, *, world: World) -> Tensor:
    """``[owned | halo]`` rows [n_in + h, D] of x [n_in, D]; differentiable."""
    return _HaloRows.apply(x, route, world)  # type: ignore[no-any-return, no-untyped-call]
