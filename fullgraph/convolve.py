"""One graph layer with its linear maps, ``Y = A X W^T + X V^T + b``, in one autograd node.

The sparse product, the dense ones, bias, relu and dropout go over the rows in blocks that stay in a core's cache, so a
layer reads its input once and writes its output once, forward and backward. What backward needs is X, no product of
it: with ``dZ = A^T dY`` the gradients are ``dX = dZ W + dY V``, ``dW = dZ^T X`` and ``dV = dY^T X``.

Message rows travel while everything that does not need them is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fullgraph.cost import Tag
from fullgraph.dropout import ReluDropout
from fullgraph.exchange import Arrivals, Carrier, add_returned_, return_rows, send_rows
from fullgraph.kernels import spmm, spmm_add_, spmm_transposed
from fullgraph.plan import LinearPlan
from fullgraph.world import World

_BLOCK_BYTES = 4 << 20
"""Of the rows of a block: what the dense product of a block reads should lie in cache."""


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What becomes of a layer's rows before and after it, where the layer is to see to it."""

    before: ReluDropout | None = None
    """What made the layer's input: its derivative is applied to the input's gradient."""
    after: ReluDropout | None = None
    """Applied to the layer's output."""


ALONE = Surroundings()


def _block_rows(x: Tensor, width: int) -> int:
    """Rows of a block: on a GPU, all."""
    return max(1, x.shape[0] if x.is_cuda else _BLOCK_BYTES // max(1, width * x.element_size()))


def _rows(count: int, step: int) -> Iterator[slice]:
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _finisher(after: ReluDropout | None, bias: Tensor | None, y: Tensor) -> Callable[[Tensor, int], None]:
    """What a block of finished sums y goes through: bias, then relu and dropout."""
    apply_ = None if after is None else after.over(y.shape[1])
    bias = None if bias is None else bias.to(y.dtype)

    def finish_(rows: Tensor, first: int) -> None:
        if bias is not None:
            rows.add_(bias)
        if apply_ is not None:
            apply_(rows, first)

    return finish_


class _GraphLinear(torch.autograd.Function):
    """For maps that do not widen; rows cross mapped."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        root: Tensor | None,
        bias: Tensor | None,
        plan: LinearPlan,
        world: World,
        tag: Tag,
        carrier: Carrier | None,
        around: Surroundings,
    ) -> Tensor:
        ctx.plan, ctx.world, ctx.tag, ctx.carrier, ctx.around = plan, world, (tag[0], "backward"), carrier, around
        ctx.save_for_backward(x, weight, root)
        ctx.has_bias = bias is not None
        width, weight, root = weight.shape[0], weight.to(x.dtype), None if root is None else root.to(x.dtype)
        step = _block_rows(x, width)
        y = world.buffers.empty(plan.local.shape[0], width, x)
        finish_ = _finisher(around.after, bias, y)
        receive, route = plan.receive, plan.route
        if route is None and width == x.shape[1]:
            # The sum of a block is mapped while it is in cache.
            for block, local in plan.local.blocks(step):
                out = torch.mm(spmm(local, x), weight.t(), out=y[block])
                if root is not None:
                    out.addmm_(x[block], root.t())
                finish_(out, block.start)
            return y
        z = torch.mm(x, weight.t(), out=world.buffers.empty(x.shape[0], width, x))
        arriving: Arrivals | None = None
        if route is not None:
            arriving = send_rows(z, route, world, tag) if carrier is None else carrier.send(z, route)
        for block, local in plan.local.blocks(step):
            out = y[block]
            out.copy_(spmm(local, z))
            if root is not None:
                out.addmm_(x[block], root.t())
            if arriving is None:
                finish_(out, block.start)
        if arriving is not None:
            assert receive is not None
            del z
            for columns, received in arriving:
                spmm_add_(y[:, columns], receive, received)
            for block in _rows(y.shape[0], step):
                finish_(y[block], block.start)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: LinearPlan = ctx.plan
        x, weight, root = ctx.saved_tensors
        grad = grad.contiguous()
        back = plan.local.transposed[0]
        ctx.world.meter.enter(ctx.tag)
        receive, route = plan.receive, plan.route
        out = ctx.world.buffers.empty(*x.shape, x) if ctx.needs_input_grad[0] else None
        found = _Gradients(x, weight, root, ctx.around.before, out)
        blocks = back.blocks(_block_rows(x, max(x.shape[1], grad.shape[1])))
        if route is None or receive is None:
            for block, rows in blocks:
                found.add_root(block, grad[block])
                found.add(block, spmm(rows, grad))
        else:
            arriving = return_rows(lambda: spmm_transposed(receive, grad), route, ctx.world, ctx.tag, ctx.carrier)
            for block, _ in blocks:
                found.add_root(block, grad[block])
            dz = ctx.world.buffers.empty(back.shape[0], grad.shape[1], grad)
            for block, rows in blocks:
                dz[block] = spmm(rows, grad)
            add_returned_(dz, arriving, route)
            for block, _ in blocks:
                found.add(block, dz[block])
        grad_bias = grad.sum(0, dtype=weight.dtype) if ctx.has_bias else None
        return found.x, found.weight, found.root, grad_bias, None, None, None, None, None


class _Gradients:
    """Gradients of a layer's input and maps, gathered block by block of the input's rows."""

    def __init__(
        self, x: Tensor, weight: Tensor, root: Tensor | None, before: ReluDropout | None, out: Tensor | None
    ) -> None:
        self._x, self._before = x, before
        scale = 1.0 if before is None else before.scale  # the maps carry it
        self._map = (weight * scale).to(x.dtype)
        self._root_map = None if root is None else (root * scale).to(x.dtype)
        self.x = out
        self.weight = torch.zeros_like(weight)
        self.root = None if root is None else torch.zeros_like(root)

    def add_root(self, block: slice, grad: Tensor) -> None:
        """First, what comes to a block by V; ``grad`` is its rows of dY: those that the layer gives."""
        if self.root is None or self._root_map is None:
            return
        count = grad.shape[0]
        _add_product_(self.root, grad.t(), self._x[block][:count])
        if self.x is not None:
            torch.mm(grad, self._root_map, out=self.x[block][:count])
            self.x[block][count:] = 0

    def add(self, block: slice, dz: Tensor) -> None:
        """Then what comes by W; ``dz`` is its rows of dZ."""
        x = self._x[block]
        _add_product_(self.weight, dz.t(), x)
        if self.x is None:
            return
        out = self.x[block]
        if self.root is None:
            torch.mm(dz, self._map, out=out)
        else:
            out.addmm_(dz, self._map)
        if self._before is not None:
            out.mul_(torch.gt(x, 0, out=torch.empty_like(x)))


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a b``, where total may be of a wider type."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(torch.mm(a, b))


class _Linear(torch.autograd.Function):
    """``after(P W^T + Q V^T + b)`` for rows that are here."""

    @staticmethod
    def forward(
        ctx: Any,
        p: Tensor,
        weight: Tensor,
        q: Tensor | None,
        root: Tensor | None,
        bias: Tensor | None,
        world: World,
        around: Surroundings,
    ) -> Tensor:
        ctx.save_for_backward(p, weight, q, root)
        ctx.world, ctx.before, ctx.has_bias = world, around.before, bias is not None
        width, weight, root = weight.shape[0], weight.to(p.dtype), None if root is None else root.to(p.dtype)
        y = world.buffers.empty(p.shape[0], width, p)
        finish_ = _finisher(around.after, bias, y)
        for block in _rows(p.shape[0], _block_rows(p, width)):
            out = torch.mm(p[block], weight.t(), out=y[block])
            if q is not None and root is not None:
                out.addmm_(q[block], root.t())
            finish_(out, block.start)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, weight, q, root = ctx.saved_tensors
        grad_p = _through(grad, weight, p, ctx.before, ctx.world) if ctx.needs_input_grad[0] else None
        grad_q = _through(grad, root, q, None, ctx.world) if q is not None and ctx.needs_input_grad[2] else None
        return (
            grad_p,
            torch.mm(grad.t(), p).to(weight.dtype),
            grad_q,
            None if q is None or root is None else torch.mm(grad.t(), q).to(root.dtype),
            grad.sum(0, dtype=weight.dtype) if ctx.has_bias else None,
            None,
            None,
        )


def _through(grad: Tensor, weight: Tensor, x: Tensor, before: ReluDropout | None, world: World) -> Tensor:
    """The gradient of rows x [n, D_in] by that of ``x weight^T``, and of what ``before`` made x of."""
    out = world.buffers.empty(grad.shape[0], weight.shape[1], grad)
    scaled = (weight if before is None else weight * before.scale).to(grad.dtype)
    for block in _rows(grad.shape[0], _block_rows(grad, weight.shape[1])):
        torch.mm(grad[block], scaled, out=out[block])
        if before is not None:
            out[block].mul_(torch.gt(x[block], 0, out=torch.empty_like(x[block])))
    return out


def graph_linear(
    x: Tensor,
    weight: Tensor,
    root: Tensor | None,
    bias: Tensor | None,
    plan: LinearPlan,
    *,
    world: World,
    tag: Tag,
    carrier: Carrier | None = None,
    around: Surroundings = ALONE,
) -> Tensor:
    """``after(A x weight^T + x[:n_out] root^T + bias)`` [n_out, D_out] for x [n_in, D], D_out <= D."""
    return _GraphLinear.apply(x, weight, root, bias, plan, world, tag, carrier, around)  # type: ignore[no-any-return, no-untyped-call]


def pair_linear(
    p: Tensor,
    weight: Tensor,
    q: Tensor | None,
    root: Tensor | None,
    bias: Tensor | None,
    *,
    world: World,
    around: Surroundings = ALONE,
) -> Tensor:
    """``after(p weight^T + q root^T + bias)`` [n, D_out] for p [n, D_in] and q [n, D_in]; what came ``before`` is what
    made p."""
    return _Linear.apply(p, weight, q, root, bias, world, around)  # type: ignore[no-any-return, no-untyped-call]
