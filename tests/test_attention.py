"""Attention forward and backward against a loop over nodes under plain autograd."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fullgraph.attention import attention
from fullgraph.kernels import SparseMatrix, from_coo

N_OUT, N_ALL = 6, 9  # owned nodes, and with the halo
# Nodes 0 and 5 have no in-edge; node 2 has one twice; node 8 is nobody's source.
DST = np.array([1, 1, 1, 2, 2, 3, 4, 4, 4, 4])
SRC = np.array([0, 1, 7, 6, 6, 3, 2, 4, 5, 7])


class Rows(NamedTuple):
    z: Tensor
    att_source: Tensor
    att_target: Tensor


def graph() -> SparseMatrix:
    return from_coo((N_OUT, N_ALL), DST, SRC)


def draw(heads: int, width: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Rows:
    g = torch.Generator().manual_seed(seed)
    shapes = (N_ALL, heads * width), (heads, width), (heads, width)
    return Rows(*(torch.randn(*s, dtype=dtype, generator=g).requires_grad_() for s in shapes))


def plain(
    z: Tensor,
    att_source: Tensor,
    att_target: Tensor,
    a: SparseMatrix,
    slope: float,
    keep: Tensor | None,
    scale: float,
    edge: Tensor | None = None,
) -> Tensor:
    by_head = z.view(z.shape[0], *att_source.shape)
    source, target = ((by_head * att).sum(-1) for att in (att_source, att_target))
    out = []
    for v in range(a.shape[0]):
        edges = slice(int(a.indptr[v]), int(a.indptr[v + 1]))
        u = a.indices[edges].long()
        logits = source[u] + target[v] + (0 if edge is None else edge[edges])
        alpha = torch.softmax(torch.nn.functional.leaky_relu(logits, slope), dim=0)
        if keep is not None:
            alpha = alpha * keep[edges] * scale
        out.append((alpha[:, :, None] * by_head[u]).sum(0).flatten())
    return torch.stack(out)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (1, 5), (3, 1), (4, 2), (2, 8)])
def test_equals_the_loop_over_nodes(heads: int, width: int, dropped: bool) -> None:
    a, rows = graph(), draw(heads, width)
    keep = torch.rand(a.nnz, heads, generator=torch.Generator().manual_seed(1)) < 0.6 if dropped else None
    scale = 1 / 0.6 if dropped else 1.0
    found = attention(*rows, a, negative_slope=0.3, keep=keep, keep_scale=scale)
    expected = plain(*rows, a, 0.3, keep, scale)
    assert found.shape == (N_OUT, heads * width)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found[[0, 5]].eq(0).all()
    up = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(2))
    for gradient in (up, torch.ones(1, 1, dtype=up.dtype).expand_as(up), up.T.contiguous().T):
        ours = torch.autograd.grad(found, rows, gradient, retain_graph=True)  # twice: nothing saved is used up
        theirs = torch.autograd.grad(expected, rows, gradient, retain_graph=True)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    assert ours[0][8].eq(0).all()


@pytest.mark.parametrize("dropped", [False, True])
def test_what_an_edge_adds_to_its_logit(dropped: bool) -> None:
    a, rows = graph(), draw(3, 2)
    g = torch.Generator().manual_seed(5)
    edge = torch.randn(a.nnz, 3, dtype=torch.float64, generator=g).requires_grad_()
    keep = torch.rand(a.nnz, 3, generator=g) < 0.6 if dropped else None
    before = edge.detach().clone()
    found = attention(*rows, a, edge=edge, keep=keep, keep_scale=2.0)
    expected = plain(*rows, a, 0.2, keep, 2.0, edge)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    up = torch.randn(found.shape, dtype=found.dtype, generator=g)
    learnt = (*rows, edge)
    ours, theirs = (torch.autograd.grad(y, learnt, up) for y in (found, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    assert torch.equal(edge.detach(), before)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_gradients_by_finite_differences(heads: int, dropped: bool) -> None:
    a = graph()
    keep = torch.arange(a.nnz * heads).view(a.nnz, heads) % 3 != 0 if dropped else None
    scale = 1.5 if dropped else 1.0
    assert torch.autograd.gradcheck(
        lambda *rows: attention(*rows, a, keep=keep, keep_scale=scale), tuple(draw(heads, 2))
    )


def test_inputs_are_left_as_they_were() -> None:
    a, rows = graph(), draw(1, 3)
    keep = torch.ones(a.nnz, 1, dtype=torch.bool)
    before = [t.detach().clone() for t in (*rows, keep)]
    attention(*rows, a, keep=keep, keep_scale=2.0).sum().backward()
    for t, old in zip((*rows, keep), before, strict=True):
        assert torch.equal(t, old)


def test_logits_of_zero_have_torchs_slope() -> None:
    a, rows = graph(), draw(2, 2)
    rows = Rows(rows.z, *(torch.zeros(2, 2, dtype=torch.float64).requires_grad_() for _ in range(2)))
    ours = torch.autograd.grad(attention(*rows, a).square().sum(), rows)
    theirs = torch.autograd.grad(plain(*rows, a, 0.2, None, 1.0).square().sum(), rows)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_large_logits_neither_overflow_nor_vanish(shift: float) -> None:
    a, rows = graph(), draw(2, 3, torch.float32)
    found = attention(*rows, a, edge=torch.full((a.nnz, 2), shift), negative_slope=1.0)
    torch.testing.assert_close(found, attention(*rows, a, negative_slope=1.0), rtol=0, atol=5e-3)
    far = torch.zeros(a.nnz, 2)
    far[a.indices == 7] = 1e30  # takes all of the attention
    assert torch.equal(attention(*rows, a, edge=far)[1], rows.z[7])


def test_float32_is_float32() -> None:
    a, rows = graph(), draw(4, 3, torch.float32)
    found = attention(*rows, a)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain(*rows, a, 0.2, None, 1.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (4, 6)])
@pytest.mark.parametrize("dropped", [False, True])
def test_nodes_without_edges_and_ranks_without_nodes(shape: tuple[int, int], dropped: bool) -> None:
    m, n = shape
    a = from_coo(shape, np.zeros(0, np.int64), np.zeros(0, np.int64))
    rows = Rows(
        torch.randn(n, 6).requires_grad_(), torch.randn(2, 3).requires_grad_(), torch.randn(2, 3).requires_grad_()
    )
    keep = torch.ones(0, 2, dtype=torch.bool) if dropped else None
    found = attention(*rows, a, keep=keep, keep_scale=2.0)
    assert torch.equal(found, torch.zeros(m, 6))
    for t, gradient in zip(rows, torch.autograd.grad(found.sum(), rows), strict=True):
        assert torch.equal(gradient, torch.zeros_like(t))
