"""Buffers: lent again when nobody holds them, and never before."""

from __future__ import annotations

import torch
from torch import Tensor

from fullgraph.buffers import Buffers

LIKE = torch.empty(0)


def test_a_buffer_is_lent_again_once_no_tensor_shares_it() -> None:
    buffers = Buffers()
    first = buffers.empty(1000, 500, LIKE)
    place = first.data_ptr()
    view = first[3:5]
    del first
    assert buffers.empty(1000, 500, LIKE).data_ptr() != place, "a view of it lives"
    del view
    assert buffers.empty(1000, 500, LIKE).data_ptr() == place
    assert buffers.bytes_kept == 2 * 1000 * 500 * 4


def test_what_autograd_saves_is_not_lent() -> None:
    buffers = Buffers()

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            rows = buffers.empty(1000, 500, x).fill_(3)
            ctx.save_for_backward(rows)
            return x * 2

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            return grad * ctx.saved_tensors[0]

    x = torch.ones(1000, 500, requires_grad=True)
    y = Keep.apply(x)
    buffers.empty(1000, 500, x).fill_(7)
    y.sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 3).all())


def test_a_somewhat_larger_buffer_serves_and_a_much_larger_does_not() -> None:
    buffers = Buffers()
    place = buffers.empty(1500, 500, LIKE).data_ptr()
    assert buffers.empty(1000, 500, LIKE).data_ptr() == place
    assert buffers.empty(600, 500, LIKE).data_ptr() != place


def test_small_tensors_and_other_types() -> None:
    buffers = Buffers()
    small = buffers.empty(3, 4, LIKE)
    assert small.shape == (3, 4)
    assert buffers.bytes_kept == 0
    rows = buffers.empty(1000, 500, torch.empty(0, dtype=torch.bfloat16))
    assert rows.dtype == torch.bfloat16
    assert rows.shape == (1000, 500)
    assert rows.is_contiguous()
