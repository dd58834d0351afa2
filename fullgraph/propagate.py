"""Linear propagation ``Y = out_scale * (A (in_scale * X))`` over all ranks, one autograd node forward and backward.

Communication runs while ``A_local X`` is computed, and in backward while ``A_local^T dY`` is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fullgraph.cost import Tag
from fullgraph.exchange import add_returned_, send_rows, send_rows_back
from fullgraph.kernels import spmm, spmm_add_, spmm_transposed
from fullgraph.plan import LinearPlan
from fullgraph.world import SETUP, World


class _Propagate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        in_scale: Tensor | None,
        out_scale: Tensor | None,
        plan: LinearPlan,
        world: World,
        tag: Tag,
    ) -> Tensor:
        ctx.in_scale, ctx.out_scale, ctx.plan, ctx.world, ctx.tag = (
            in_scale,
            out_scale,
            plan,
            world,
            (tag[0], "backward"),
        )
        if in_scale is not None:
            x = x * in_scale
        if plan.route is None or plan.receive is None:
            y = spmm(plan.local, x)
        else:
            transfer = send_rows(x, plan.route, world, tag)
            y = spmm(plan.local, x)
            for columns, received in transfer:
                spmm_add_(y[:, columns], plan.receive, received)
        return y if out_scale is None else y.mul_(out_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: LinearPlan = ctx.plan
        grad = grad.contiguous() if ctx.out_scale is None else grad * ctx.out_scale
        if plan.route is None or plan.receive is None:
            grad_x = spmm_transposed(plan.local, grad)
        else:
            transfer = send_rows_back(spmm_transposed(plan.receive, grad), plan.route, ctx.world, ctx.tag)
            grad_x = spmm_transposed(plan.local, grad)
            add_returned_(grad_x, transfer, plan.route)
        return grad_x if ctx.in_scale is None else grad_x.mul_(ctx.in_scale), None, None, None, None, None


def propagate(
    x: Tensor,
    plan: LinearPlan,
    *,
    world: World,
    in_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    tag: Tag = SETUP,
) -> Tensor:
    """``out_scale * (A (in_scale * x))`` [n_out, D] for owned rows x [n_in, D]; scales are [n_in, 1] and [n_out, 1]."""
    return _Propagate.apply(x, in_scale, out_scale, plan, world, tag)  # type: ignore[no-any-return, no-untyped-call]


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
