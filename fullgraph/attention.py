"""Graph attention (Velickovic et al. 2018, eq. 3 to 6) over local edges, without a tensor of edges x width.

Per head: ``logit_uv = leaky_relu(source_u + target_v + edge_uv)``, softmax over the in-edges of v, dropout, and the
weighted sum of the source rows. Every in-edge of an owned node is local, so nothing here communicates.

Rows go in blocks that stay in a core's cache, forward by destination and backward by destination and then by source:
what is formed for the edges of a block is gone with it, but for a number or two an edge and head. The rows of a head
are not set apart either: rows [n, H * D] are as well n * H rows of D, of which head h of node u is row ``u H + h``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fullgraph.buffers import Buffers
from fullgraph.kernels import SparseMatrix, at_least_float32, sddmm, segment_max, segment_sum, spmm

_BLOCK_BYTES = 4 << 20
"""Of the rows of a block."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        att_source: Tensor,
        att_target: Tensor,
        edge: Tensor | None,
        bias: Tensor | None,
        edges: SparseMatrix,
        negative_slope: float,
        keep: Tensor | None,
        keep_scale: float,
        buffers: Buffers,
    ) -> Tensor:
        heads, width = att_source.shape
        both = at_least_float32(z @ _attentive(att_source, att_target, z))
        source, target = both[:, :heads].contiguous(), both[: edges.shape[0], heads:].contiguous()
        alpha = buffers.empty(edges.nnz, heads, both)
        negative = buffers.empty(edges.nnz, heads, torch.empty(0, dtype=torch.bool, device=z.device))
        out = buffers.empty(edges.shape[0], heads * width, z)
        by_head = z.view(-1, width)
        for rows, entries, block in _blocks(edges, z):
            logits = torch.index_select(source, 0, block.indices, out=alpha[entries])
            logits.add_(target[rows].index_select(0, block.rows))
            if edge is not None:
                logits.add_(edge[entries])
            torch.le(logits, 0, out=negative[entries])  # 0 has the slope of a negative logit, as in torch
            torch.nn.functional.leaky_relu_(logits, negative_slope)
            top = segment_max(block, logits)
            logits.sub_(top.index_select(0, block.rows)).exp_()
            logits.div_(segment_sum(block, logits).index_select(0, block.rows))
            weights = _dropped(logits, keep, entries, keep_scale).t().contiguous()
            out_by_head = out[rows].view(-1, heads, width)
            for head, of_head in enumerate(_of_heads(block, heads)):
                out_by_head[:, head] = spmm(of_head, by_head, weights[head])
            if bias is not None:
                out[rows].add_(bias.to(out.dtype))
        ctx.save_for_backward(z, att_source, att_target, alpha, negative, keep)
        ctx.edges, ctx.negative_slope, ctx.keep_scale, ctx.buffers = edges, negative_slope, keep_scale, buffers
        ctx.has_bias = bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, att_source, att_target, alpha, negative, keep = ctx.saved_tensors
        edges: SparseMatrix = ctx.edges
        heads, width = att_source.shape
        grad = grad.contiguous()
        grad_logits = ctx.buffers.empty(edges.nnz, heads, alpha)
        grad_both = alpha.new_zeros(z.shape[0], 2 * heads)  # of the sources and the targets
        by_head = z.view(-1, width)
        for rows, entries, block in _blocks(edges, z):
            found = grad_logits[entries]
            of_node = grad[rows].view(-1, heads, width)
            for head, of_head in enumerate(_of_heads(block, heads)):
                found[:, head] = sddmm(of_head, of_node[:, head].contiguous(), by_head)
            if keep is not None:
                found.mul_(keep[entries]).mul_(ctx.keep_scale)
            # Softmax: alpha * (g - sum over the row of alpha * g); then the leaky slope.
            found.mul_(alpha[entries])
            total = segment_sum(block, found)
            found.addcmul_(alpha[entries], total.index_select(0, block.rows), value=-1.0)
            torch.where(negative[entries], found * ctx.negative_slope, found, out=found)
            grad_both[rows, heads:] = segment_sum(block, found)
        attentive = _attentive(att_source, att_target, z).t()
        transposed, order = edges.transposed
        grad_z = ctx.buffers.empty(*z.shape, z)
        grad_by_head = grad.view(-1, width)
        for rows, entries, block in _blocks(transposed, z):
            here = order[entries]
            grad_both[rows, :heads] = segment_sum(block, grad_logits.index_select(0, here))
            weights = alpha.index_select(0, here)
            if keep is not None:
                weights.mul_(keep.index_select(0, here)).mul_(ctx.keep_scale)
            weights = weights.t().contiguous()
            out = grad_z[rows]
            for head, of_head in enumerate(_of_heads(block, heads)):
                out.view(-1, heads, width)[:, head] = spmm(of_head, grad_by_head, weights[head])
            out.addmm_(grad_both[rows].to(z.dtype), attentive)
        grad_vectors = torch.mm(z.t(), grad_both.to(z.dtype)).to(att_source.dtype)
        grad_vectors = grad_vectors.view(heads, width, 2, heads).diagonal(dim1=0, dim2=3)  # [D, 2, H]
        return (
            grad_z,
            grad_vectors[:, 0].t(),
            grad_vectors[:, 1].t(),
            grad_logits if ctx.needs_input_grad[3] else None,
            grad.sum(0, dtype=att_source.dtype) if ctx.has_bias else None,
            *(None,) * 5,
        )


def _blocks(edges: SparseMatrix, z: Tensor) -> Iterator[tuple[slice, slice, SparseMatrix]]:
    """(rows, entries, the matrix of these rows) of blocks of rows; on a GPU, of all."""
    step = edges.shape[0] if z.is_cuda else max(1, _BLOCK_BYTES // max(1, z.shape[1] * z.element_size()))
    at = 0
    for rows, block in edges.blocks(step):
        yield rows, slice(at, at + block.nnz), block
        at += block.nnz


def _of_heads(block: SparseMatrix, heads: int) -> Iterator[SparseMatrix]:
    """For each head the matrix whose columns are rows ``u H + h``."""
    shape = (block.shape[0], block.shape[1] * heads)
    indptr, indices = block.indptr, block.indices
    if shape[1] >= 2**31:
        indptr, indices = indptr.to(torch.int64), indices.to(torch.int64)
    columns = indices * heads
    for head in range(heads):
        yield SparseMatrix(shape, indptr, columns + head if head else columns)


def _dropped(alpha: Tensor, keep: Tensor | None, entries: slice, scale: float) -> Tensor:
    return alpha if keep is None else (alpha * keep[entries]).mul_(scale)


def _attentive(att_source: Tensor, att_target: Tensor, z: Tensor) -> Tensor:
    """[H * D, 2 H] what rows z are multiplied by to give the halves of the logits."""
    return torch.cat([_on_diagonal(att_source), _on_diagonal(att_target)], 1).to(z.dtype)


def _on_diagonal(vectors: Tensor) -> Tensor:
    """[H * D, H] from vectors [H, D]: column h has vector h in the rows of head h."""
    heads, width = vectors.shape
    eye = torch.eye(heads, dtype=vectors.dtype, device=vectors.device)
    return (vectors[:, :, None] * eye[:, None, :]).reshape(heads * width, heads)


def attention(
    z: Tensor,
    att_source: Tensor,
    att_target: Tensor,
    edges: SparseMatrix,
    *,
    edge: Tensor | None = None,
    bias: Tensor | None = None,
    negative_slope: float = 0.2,
    keep: Tensor | None = None,
    keep_scale: float = 1.0,
    buffers: Buffers | None = None,
) -> Tensor:
    """[n_out, H * D] attended rows, plus ``bias`` [H * D].

    ``z`` is [n_in + h, H * D] with the columns of a head together, and its products with ``att_source`` and
    ``att_target`` [H, D] are the two halves of the logits; ``edge`` [e, H] is what each edge adds to its own; ``keep``
    [e, H] marks the attention weights that dropout leaves, scaled by ``keep_scale``. A node without in-edges gets
    zeros.
    """
    return _Attention.apply(  # type: ignore[no-any-return, no-untyped-call]
        z, att_source, att_target, edge, bias, edges, negative_slope, keep, keep_scale, buffers or Buffers()
    )
