"""Linear propagation ``Y = A X`` over all ranks, one autograd node forward and backward.

Communication runs while ``A_local X`` is computed, and in backward while ``A_local^T dY`` is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fullgraph.cost import Tag
from fullgraph.exchange import Carrier, add_returned_, return_rows, send_rows
from fullgraph.kernels import spmm, spmm_add_, spmm_transposed
from fullgraph.plan import LinearPlan
from fullgraph.world import SETUP, World


class _Propagate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        plan: LinearPlan,
        world: World,
        tag: Tag,
        carrier: Carrier | None,
    ) -> Tensor:
        ctx.plan, ctx.world, ctx.tag, ctx.carrier = plan, world, (tag[0], "backward"), carrier
        if plan.route is None or plan.receive is None:
            y = spmm(plan.local, x)
        else:
            transfer = send_rows(x, plan.route, world, tag) if carrier is None else carrier.send(x, plan.route)
            y = spmm(plan.local, x)
            for columns, received in transfer:
                spmm_add_(y[:, columns], plan.receive, received)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: LinearPlan = ctx.plan
        grad = grad.contiguous()
        if plan.route is None or plan.receive is None:
            grad_x = spmm_transposed(plan.local, grad)
        else:
            receive = plan.receive
            returned = return_rows(lambda: spmm_transposed(receive, grad), plan.route, ctx.world, ctx.tag, ctx.carrier)
            grad_x = spmm_transposed(plan.local, grad)
            add_returned_(grad_x, returned, plan.route)
        return grad_x, None, None, None, None


def propagate(x: Tensor, plan: LinearPlan, *, world: World, tag: Tag = SETUP, carrier: Carrier | None = None) -> Tensor:
    """``A x`` [n_out, D] for owned rows x [n_in, D]; the transfer is metered under ``tag``."""
    return _Propagate.apply(x, plan, world, tag, carrier)  # type: ignore[no-any-return, no-untyped-call]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.sum_(x.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.world.sum_(grad.contiguous().clone()), None


def sum_over_ranks(x: Tensor, *, world: World) -> Tensor:
    """The sum of every rank's ``x``, on every rank; differentiable (each rank's loss may depend on it)."""
    return _SumOverRanks.apply(x, world)  # type: ignore[no-any-return, no-untyped-call]
