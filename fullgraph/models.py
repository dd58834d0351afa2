"""GCN, GraphSAGE, GIN and GAT on layer views, with the parameters and results of PyG's layers of these names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullgraph.attention import attention
from fullgraph.config import TrainConfig
from fullgraph.convolve import ALONE, Surroundings
from fullgraph.dropout import Activation, EluDropout, ReluDropout, activate_, derive, threshold
from fullgraph.kernels import SparseRows, at_least_float32
from fullgraph.shards import Shard
from fullgraph.view import LayerView

Input = Tensor | SparseRows


class GCNConv(nn.Module):
    """``D^-1/2 (A + I) D^-1/2 X W + b`` (Kipf and Welling 2017); D are the sums of in-weights, loop included.

    Edge weights may be anything. A node whose D is 0 or less has the scale 0: it neither gives nor takes messages.
    """

    def __init__(self, d_in: int, d_out: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Input, view: LayerView, around: Surroundings = ALONE) -> Tensor:
        return view.convolve(x, "gcn", self.weight, bias=self.bias, around=around)


class SAGEConv(nn.Module):
    """``W_l mean(x_u) + W_r x_v + b`` (Hamilton et al. 2017); the mean is weighted where edges are.

    The mean is ``sum w_uv x_u / sum w_uv`` whatever the weights: negative ones subtract. It is 0 where the sum of the
    weights is, as at a node without in-edges.
    ``root_weight=False`` leaves out W_r; ``normalize=True`` scales the result's rows to length 1.
    """

    def __init__(
        self, d_in: int, d_out: int, *, bias: bool = True, root_weight: bool = True, normalize: bool = False
    ) -> None:
        super().__init__()
        self.neighbor = nn.Linear(d_in, d_out, bias=bias)
        self.root = nn.Linear(d_in, d_out, bias=False) if root_weight else None
        self.normalize = normalize

    def forward(self, x: Input, view: LayerView, around: Surroundings = ALONE) -> Tensor:
        assert not (self.normalize and around.after), "rows are normalised before they are activated"
        root = None if self.root is None else self.root.weight
        y = view.convolve(x, "mean", self.neighbor.weight, root, self.neighbor.bias, around)
        return F.normalize(y, dim=1) if self.normalize else y


class GINConv(nn.Module):
    """``MLP((1 + eps) x_v + sum w_uv x_u)`` (Xu et al. 2019) with a two-layer MLP; ``train_eps`` learns eps.

    A sum takes edge weights of any sign; an edge of weight 0 adds nothing.
    """

    def __init__(self, d_in: int, d_out: int, *, bias: bool = True, eps: float = 0.0, train_eps: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(d_in, d_out)
        self.second = nn.Linear(d_out, d_out, bias=bias)
        self.eps: Tensor
        if train_eps:
            self.eps = nn.Parameter(torch.tensor(float(eps)))
        else:
            self.register_buffer("eps", torch.tensor(float(eps)))

    def forward(self, x: Input, view: LayerView, around: Surroundings = ALONE) -> Tensor:
        # The MLP's first map commutes with the sum.
        first, inner = self.first, ReluDropout(view.ids, 0.0, None)
        own = (1 + self.eps) * first.weight
        hidden = view.convolve(x, "sum", first.weight, own, first.bias, Surroundings(around.before, inner))
        return view.mapped(hidden, self.second.weight, self.second.bias, Surroundings(inner, around.after))


class GATConv(nn.Module):
    """Graph attention (Velickovic et al. 2018) with loops replaced by one a node.

    Edge weights are not used, so that an edge of weight 0 or less counts as any other.
    ``d_out`` is the width of a head; heads are concatenated, or averaged with ``concat=False``. With ``edge_dim`` the
    logit of an edge has a third part from its features [K]; a node's loop has the mean of those of its other in-edges,
    zeros where there are none. Only ``x_uv (W_edge^T a_edge)``, a number an edge and head, is ever formed.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        heads: int = 1,
        *,
        bias: bool = True,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        edge_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.d_out, self.concat = heads, d_out, concat
        self.negative_slope, self.dropout = negative_slope, dropout
        self.weight = nn.Parameter(torch.empty(heads * d_out, d_in))
        self.att_source = nn.Parameter(torch.empty(heads, d_out))
        self.att_target = nn.Parameter(torch.empty(heads, d_out))
        self.bias = nn.Parameter(torch.zeros(heads * d_out if concat else d_out)) if bias else None
        nn.init.xavier_uniform_(self.weight)
        nn.init.xavier_uniform_(self.att_source)
        nn.init.xavier_uniform_(self.att_target)
        self.lin_edge = self.att_edge = None
        if edge_dim is not None:
            self.lin_edge = nn.Parameter(torch.empty(heads * d_out, edge_dim))
            self.att_edge = nn.Parameter(torch.empty(heads, d_out))
            nn.init.xavier_uniform_(self.lin_edge)
            nn.init.xavier_uniform_(self.att_edge)

    def forward(self, x: Input, view: LayerView) -> Tensor:
        z = view.with_halo(x, self.weight)
        edges, edge_ids = view.plan.halo.one_loop
        keep = view.edge_keep(edge_ids, self.heads, self.dropout)
        y = attention(
            z,
            self.att_source,
            self.att_target,
            edges,
            edge=self._edge_logits(view),
            bias=self.bias if self.concat else None,
            negative_slope=self.negative_slope,
            keep=keep,
            keep_scale=threshold(self.dropout)[1],
            buffers=view.plan.world.buffers,
        )
        if self.concat:
            return y
        y = y.view(-1, self.heads, self.d_out).mean(1)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _edge_logits(self, view: LayerView) -> Tensor | None:
        """[e', heads] in the order of the edges with one loop a node."""
        if self.lin_edge is None or self.att_edge is None:
            return None
        edge_x = view.plan.edge_x_with_one_loop
        if edge_x is None:
            raise ValueError("GATConv has edge_dim, but the graph has no edge features")
        by_head = self.lin_edge.view(self.heads, self.d_out, -1)
        return edge_x @ torch.einsum("hdk,hd->kh", by_head, self.att_edge)


class LayerNorm(nn.LayerNorm):
    """Layer norm of each row."""

    def forward(self, x: Tensor, view: LayerView) -> Tensor:  # type: ignore[override]
        return super().forward(at_least_float32(x)).to(x.dtype)


class BatchNorm(nn.Module):
    """Batch norm over all nodes of all ranks, with the parameters and running statistics of ``nn.BatchNorm1d``.

    The variance is that of the rows after the global mean is taken off, summed in a second pass: a single pass of
    squares would lose digits. It needs every node of the graph, so views below it are never pruned.
    """

    def __init__(self, width: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor, view: LayerView) -> Tensor:
        if not view.training:
            scale = self.weight * torch.rsqrt(self.running_var + self.eps)
            return ((x - self.running_mean) * scale + self.bias).to(x.dtype)
        dtype, x = x.dtype, at_least_float32(x)
        count = view.num_nodes_global
        mean = view.sum_over_ranks(x.sum(0)) / count
        centred = x - mean
        var = view.sum_over_ranks(centred.square().sum(0)) / count
        if not view.recomputing:
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * (count / max(count - 1, 1)), self.momentum)
        return (centred * (self.weight * torch.rsqrt(var + self.eps)) + self.bias).to(dtype)


class GNN(nn.Module):
    """A stack of graph layers: dropout, convolution, and on hidden layers norm, activation and residual. A layer
    before a batch norm has no bias, which the norm would take off again.

    ``num_layers`` declares the depth, and ``whole_layers`` how many layers must give all nodes. ``forward(x, views)``
    takes features [n_in, F] and one view a layer and gives [n_out, C]. ``edge_dim`` is the number of edge features that
    GAT is to use.
    """

    def __init__(self, config: TrainConfig, d_in: int, d_out: int, edge_dim: int = 0) -> None:
        super().__init__()
        self.num_layers, self.edge_dim = config.layers, edge_dim
        self.whole_layers = config.layers - 1 if config.norm == "batch" else 0
        self.dropout, self.input_dropout = config.dropout, config.input_dropout
        self.residual = config.residual
        widths = [d_in] + [config.hidden] * (config.layers - 1) + [d_out]
        self.convs = nn.ModuleList(
            _conv(config, a, b, edge_dim, last=layer == config.layers - 1)
            for layer, (a, b) in enumerate(itertools.pairwise(widths))
        )
        norm = {"layer": LayerNorm, "batch": BatchNorm}.get(config.norm)
        self.norms = nn.ModuleList([] if norm is None else [norm(config.hidden) for _ in range(config.layers - 1)])
        self.widths = tuple(widths)
        self.uses: Literal["linear", "halo"] = "halo" if config.model == "gat" else "linear"
        self.fuses = config.model != "gat"
        self.recomputed: frozenset[int] = frozenset()
        """Layers that are computed again in backward."""
        self.activation: type[Activation] = EluDropout if config.model == "gat" else ReluDropout

    def forward(self, x: Input, views: Sequence[LayerView]) -> Tensor:
        if not self.fuses:
            return self.convs[-1](self.embed(x, views), views[-1])  # type: ignore[no-any-return]
        x, before = self._hidden(x, views)
        assert before is None or isinstance(before, ReluDropout)
        return self.convs[-1](x, views[-1], Surroundings(before))  # type: ignore[no-any-return]

    def embed(self, x: Input, views: Sequence[LayerView]) -> Input:
        """The last layer's input [n_in of the last view, hidden]; the features where there is but one layer."""
        x, before = self._hidden(x, views)
        return x if isinstance(x, SparseRows) else derive(x, before, views[-1].plan.world.buffers)

    def _hidden(self, x: Input, views: Sequence[LayerView]) -> tuple[Input, Activation | None]:
        """The last layer's input, and the activation that made it, whose derivative is still to be applied."""
        x = views[0].dropout(x, self.input_dropout)
        before: Activation | None = None
        for layer in range(self.num_layers - 1):
            if layer in self.recomputed and views[layer].training:
                acts: list[Activation | None] = []

                def once_more(x: Input, layer: int = layer, before: Activation | None = before) -> Tensor:
                    y, act = self._layer(layer, x, before, views)
                    acts.append(act)  # noqa: B023 - of this turn of the loop
                    return y

                parameters = [p for part in self._parts(layer) for p in part.parameters()]
                x, before = views[layer].recomputed(once_more, x, parameters), acts[0]
            else:
                x, before = self._layer(layer, x, before, views)
        return x, before

    def _parts(self, layer: int) -> list[nn.Module]:
        return [self.convs[layer], *([self.norms[layer]] if self.norms else [])]

    def _layer(
        self, layer: int, x: Input, before: Activation | None, views: Sequence[LayerView]
    ) -> tuple[Tensor, Activation | None]:
        """A hidden layer's output, and the activation that made it where the next layer is to see to its derivative, as
        this one is to that of ``before``."""
        view, after, conv = views[layer], views[layer + 1], self.convs[layer]
        residual = self.residual and layer > 0
        if self.fuses and not self.norms and not residual:
            fused = after.activation(ReluDropout, self.dropout)
            if fused is not None:
                assert before is None or isinstance(before, ReluDropout)
                return conv(x, view, Surroundings(before, fused)), fused
        if before is not None:
            assert isinstance(x, Tensor)
            x = derive(x, before, view.plan.world.buffers)
        y: Tensor = conv(x, view)
        if self.norms:
            y = self.norms[layer](y, view)
        act = None if residual else after.activation(self.activation, self.dropout)
        if act is not None:
            return activate_(y, act), act
        y = self.activation.function_(y)
        if residual and isinstance(x, Tensor):
            y = y + view.own(x)
        return after.dropout(y, self.dropout), None


def _conv(config: TrainConfig, d_in: int, d_out: int, edge_dim: int, *, last: bool) -> nn.Module:
    bias = last or config.norm != "batch"
    if config.model == "gat":
        heads = config.out_heads if last else config.heads
        width = d_out if last else d_out // heads
        return GATConv(
            d_in, width, heads, bias=bias, concat=not last, dropout=config.dropout, edge_dim=edge_dim or None
        )
    kinds: dict[str, Callable[..., nn.Module]] = {"gcn": GCNConv, "sage": SAGEConv, "gin": GINConv}
    return kinds[config.model](d_in, d_out, bias=bias)


def edge_features_used(config: TrainConfig, shard: Shard) -> int:
    """Columns of edge features that ``config``'s model uses of those in the shards."""
    return shard.num_edge_features if config.model == "gat" and config.edge_features else 0


ModelFactory = Callable[[int, int], nn.Module]
"""(features, outputs) -> a model ``forward(x, views)`` of the user's own; one with an int ``num_layers`` is pruned."""


def build_model(
    config: TrainConfig, d_in: int, d_out: int, factory: ModelFactory | None = None, *, edge_dim: int = 0
) -> nn.Module:
    """``config``'s model, or the user's, with initial weights by ``config.seed`` alone, so that every rank has the
    same; in ``config.weight_dtype``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = GNN(config, d_in, d_out, edge_dim) if factory is None else factory(d_in, d_out)
    return model.to(getattr(torch, config.weight_dtype))
