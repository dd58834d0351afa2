"""Layers that keep nothing for backward but their input: what else backward needs is computed again there.

The rows that a layer exchanges cross once more, on all ranks in the order in which backward comes to the layers.
Dropout masks are hashes, so the second computation equals the first to the bit, and so do gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: Callable[[Any], Tensor],
        again: Callable[[], AbstractContextManager[None]],
        x: Any,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.layer, ctx.again, ctx.parameters = layer, again, parameters
        ctx.takes_gradient = isinstance(x, Tensor) and x.requires_grad
        if ctx.takes_gradient:
            ctx.save_for_backward(x)
        else:
            ctx.x = x  # the very object: a view knows the features by it
        return layer(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_() if ctx.takes_gradient else ctx.x
        wanted = [*([x] if ctx.takes_gradient else []), *ctx.parameters]
        with torch.enable_grad(), ctx.again():
            y = ctx.layer(x)
        found = torch.autograd.grad(y, wanted, grad, allow_unused=True)
        return None, None, *(() if ctx.takes_gradient else (None,)), *found


def recomputed(
    layer: Callable[[Any], Tensor],
    x: Any,
    parameters: Sequence[Tensor],
    again: Callable[[], AbstractContextManager[None]],
) -> Tensor:
    """``layer(x)``, of which backward finds x alone; ``parameters`` are those that the layer uses.

    The layer is called a second time within ``again()``, and must then do what it did.
    """
    learnt = [p for p in parameters if p.requires_grad]
    return _Recomputed.apply(layer, again, x, *learnt)  # type: ignore[no-any-return, no-untyped-call]
