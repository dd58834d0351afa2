"""Graph attention (Velickovic et al. 2018, eq. 3 to 6) over local edges, without a tensor of edges x width.

Per head: ``logit_uv = leaky_relu(source_u + target_v + edge_uv)``, softmax over the in-edges of v, dropout, and the
weighted sum of the source rows. Every in-edge of an owned node is local, so nothing here communicates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fullgraph.kernels import SparseMatrix, sddmm, segment_max, segment_sum, spmm, spmm_transposed


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        source: Tensor,
        target: Tensor,
        edge: Tensor | None,
        edges: SparseMatrix,
        negative_slope: float,
        keep: Tensor | None,
        keep_scale: float,
    ) -> Tensor:
        heads, width = source.shape[1], z.shape[1] // source.shape[1]
        rows, cols = edges.rows, edges.indices
        logits = source.index_select(0, cols).add_(target.index_select(0, rows))
        if edge is not None:
            logits.add_(edge)
        negative = logits <= 0  # 0 has the slope of a negative logit, as in torch
        torch.nn.functional.leaky_relu_(logits, negative_slope)
        top = segment_max(edges, logits)
        alpha = logits.sub_(top.index_select(0, rows)).exp_()
        alpha.div_(segment_sum(edges, alpha).index_select(0, rows))
        weights = _dropped(alpha, keep, keep_scale)
        z_heads = z.view(z.shape[0], heads, width).transpose(0, 1).contiguous()  # [H, n_in + h, D]
        out = z.new_empty(edges.shape[0], heads, width)
        for head in range(heads):
            out[:, head] = spmm(edges, z_heads[head], weights[head])
        ctx.save_for_backward(z_heads, alpha, negative, *([] if keep is None else [keep]))
        ctx.edges, ctx.negative_slope, ctx.keep_scale = edges, negative_slope, keep_scale
        return out.view(edges.shape[0], heads * width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z_heads, alpha, negative, *rest = ctx.saved_tensors
        keep = rest[0] if rest else None
        edges: SparseMatrix = ctx.edges
        heads, sources, width = z_heads.shape
        grad_heads = grad.view(edges.shape[0], heads, width).transpose(0, 1).contiguous()
        weights = _dropped(alpha, keep, ctx.keep_scale)
        grad_z = grad.new_empty(sources, heads, width)
        grad_alpha = torch.empty_like(alpha)
        for head in range(heads):
            grad_z[:, head] = spmm_transposed(edges, grad_heads[head], weights[head])
            grad_alpha[:, head] = sddmm(edges, grad_heads[head], z_heads[head])
        if keep is not None:
            grad_alpha.mul_(keep).mul_(ctx.keep_scale)
        # Softmax: alpha * (g - sum over the row of alpha * g); then the leaky slope.
        grad_alpha.mul_(alpha)
        total = segment_sum(edges, grad_alpha)
        grad_alpha.addcmul_(alpha, total.index_select(0, edges.rows), value=-1.0)
        grad_logits = torch.where(negative, grad_alpha * ctx.negative_slope, grad_alpha)
        transposed, order = edges.transposed
        grad_source = segment_sum(transposed, grad_logits.index_select(0, order))
        grad_target = segment_sum(edges, grad_logits)
        grad_edge = grad_logits if ctx.needs_input_grad[3] else None
        return grad_z.view(sources, heads * width), grad_source, grad_target, grad_edge, None, None, None, None


def _dropped(alpha: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    """[H, e] contiguous attention weights after dropout, from alpha [e, H]."""
    if keep is not None:
        alpha = (alpha * keep).mul_(scale)
    return alpha.t().contiguous()


def attention(
    z: Tensor,
    source: Tensor,
    target: Tensor,
    edges: SparseMatrix,
    *,
    edge: Tensor | None = None,
    negative_slope: float = 0.2,
    keep: Tensor | None = None,
    keep_scale: float = 1.0,
) -> Tensor:
    """[n_out, H * D] attended rows.

    ``z`` is [n_in + h, H * D] with the columns of a head together; ``source`` [n_in + h, H] and ``target``
    [n_out, H] are the two halves of the logits, and ``edge`` [e, H] what each edge adds to its own; ``keep`` [e, H]
    marks the attention weights that dropout leaves, scaled by ``keep_scale``. A node without in-edges gets zeros.
    """
    return _Attention.apply(z, source, target, edge, edges, negative_slope, keep, keep_scale)  # type: ignore[no-any-return, no-untyped-call]
