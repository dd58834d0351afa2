"""The oracle: the whole graph in one process, in plain torch over lists of edges, differentiated by autograd.

Of the online runtime it uses the options, and the hash that says which elements dropout keeps and which numbers learned
features start from; aggregation, normalisation, attention, losses and metrics are written down again from their
definitions. Parameters have the names of ``fullgraph.models.GNN``, and learned features are called ``features``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

from fullgraph.config import TrainConfig
from fullgraph.dropout import MaskKey, keep_mask, threshold
from fullgraph.learned import initial_table
from partition_tools.graph import Graph


@dataclass(frozen=True, eq=False)
class WholeGraph:
    """N nodes and E edges ``src[i] -> dst[i]``, of a graph or of a part of one."""

    num_nodes: int
    src: Tensor
    """int64 [E]"""
    dst: Tensor
    weight: Tensor
    """[E], ones where the graph has none."""
    x: Tensor
    """[N, F] dense; a parameter where features are learned."""
    edge_x: Tensor | None
    """[E, K]"""
    node_ids: Tensor
    """int64 [N] what names the nodes in dropout's hash,"""
    edge_ids: Tensor
    """int64 [E] the edges,"""
    loop_ids: Tensor
    """int64 [N] and the loops that attention adds."""

    @classmethod
    def of(cls, graph: Graph, dtype: torch.dtype, feature_norm: str = "none", seed: int = 1) -> WholeGraph:
        nodes, edges = torch.arange(graph.num_nodes), torch.arange(graph.num_edges)
        x = graph.x.toarray() if isinstance(graph.x, sp.csr_array) else graph.x
        weight = np.ones(graph.num_edges) if graph.edge_weight is None else graph.edge_weight
        if x is None:
            rows: Tensor = initial_table(nodes, graph.learned_features, seed, dtype)
        else:
            rows = torch.as_tensor(np.asarray(x)).to(dtype)
        if feature_norm == "row":
            rows = torch.stack([row / row.sum() if row.sum() else row for row in rows])
        return cls(
            graph.num_nodes,
            torch.as_tensor(graph.src),
            torch.as_tensor(graph.dst),
            torch.as_tensor(weight).to(dtype),
            rows,
            None if graph.edge_x is None else torch.as_tensor(graph.edge_x).to(dtype),
            nodes,
            edges,
            graph.num_edges + nodes,
        )

    def induced(self, mask: Tensor) -> WholeGraph:
        """The subgraph of the nodes in ``mask`` [N]; ids stay."""
        place = torch.cumsum(mask, 0) - 1
        inside = mask[self.src] & mask[self.dst]
        return WholeGraph(
            int(mask.sum()),
            place[self.src[inside]],
            place[self.dst[inside]],
            self.weight[inside],
            self.x[mask],
            None if self.edge_x is None else self.edge_x[inside],
            self.node_ids[mask],
            self.edge_ids[inside],
            self.loop_ids[mask],
        )

    def sum(self, x: Tensor) -> Tensor:
        """[N, D] ``sum w_uv x_u`` over in-edges."""
        return add_at(self.num_nodes, self.dst, self.weight[:, None] * x[self.src])


def add_at(n: int, index: Tensor, rows: Tensor) -> Tensor:
    """[n, D] sums of the rows [E, D] that have the same index."""
    return torch.zeros(n, rows.shape[1], dtype=rows.dtype).index_add(0, index, rows)


class Dropout:
    """One forward pass's masks: the calls are numbered in the order in which they drop anything."""

    def __init__(self, training: bool, seed: int = 0, step: int = 0) -> None:
        self.training, self.seed, self.step, self.calls = training, seed, step, 0

    def __call__(self, x: Tensor, ids: Tensor, p: float) -> Tensor:
        if not self.training or p == 0:
            return x
        key = MaskKey(self.seed, self.step, self.calls)
        self.calls += 1
        return x * keep_mask(ids, x.shape[1], p, key) * threshold(p)[1]


class GCN(nn.Module):
    """``D^-1/2 (A + I) D^-1/2 X W^T + b``: a loop of weight 1 for a node without one, D its rows' sums."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(d_out, d_in)), nn.Parameter(torch.empty(d_out))

    def forward(self, x: Tensor, graph: WholeGraph, drop: Dropout) -> Tensor:
        n, looped = graph.num_nodes, graph.src[graph.src == graph.dst]
        dense = torch.zeros(n, n, dtype=x.dtype).index_put((graph.dst, graph.src), graph.weight, accumulate=True)
        dense += torch.diag((torch.bincount(looped, minlength=n) == 0).to(x.dtype))
        degree = dense.sum(1)
        scale = torch.where(degree > 0, degree.abs() ** -0.5, 0.0)
        return scale[:, None] * dense * scale @ x @ self.weight.T + self.bias


class SAGE(nn.Module):
    """``W_l (sum w x / sum w) + b + W_r x``."""

    def __init__(self, d_in: int, d_out: int, root_weight: bool = True, normalize: bool = False) -> None:
        super().__init__()
        self.neighbor = nn.Linear(d_in, d_out)
        self.root = nn.Linear(d_in, d_out, bias=False) if root_weight else None
        self.normalize = normalize

    def forward(self, x: Tensor, graph: WholeGraph, drop: Dropout) -> Tensor:
        total = graph.sum(torch.ones(graph.num_nodes, 1, dtype=x.dtype))
        mean = torch.where(total == 0, 0.0, graph.sum(x) / torch.where(total == 0, 1.0, total))
        y: Tensor = self.neighbor(mean)
        if self.root is not None:
            y = y + self.root(x)
        return y / y.norm(dim=1, keepdim=True).clamp(min=1e-12) if self.normalize else y


class GIN(nn.Module):
    """``second(relu(first((1 + eps) x + sum w x)))``."""

    def __init__(self, d_in: int, d_out: int, eps: float = 0.0, train_eps: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(d_in, d_out), nn.Linear(d_out, d_out)
        self.eps: Tensor
        if train_eps:
            self.eps = nn.Parameter(torch.tensor(eps))
        else:
            self.register_buffer("eps", torch.tensor(eps))

    def forward(self, x: Tensor, graph: WholeGraph, drop: Dropout) -> Tensor:
        out: Tensor = self.second(self.first((1 + self.eps) * x + graph.sum(x)).relu())
        return out


class GAT(nn.Module):
    """``sum_u dropout(softmax_u(leaky_relu(a_s z_u + a_t z_v))) z_u`` a head, loops replaced by one a node."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        edge_dim: int = 0,
    ) -> None:
        super().__init__()
        self.heads, self.d_out, self.concat = heads, d_out, concat
        self.negative_slope, self.dropout, self.edge_dim = negative_slope, dropout, edge_dim
        self.weight = nn.Parameter(torch.empty(heads * d_out, d_in))
        self.att_source = nn.Parameter(torch.empty(heads, d_out))
        self.att_target = nn.Parameter(torch.empty(heads, d_out))
        if edge_dim:
            self.lin_edge = nn.Parameter(torch.empty(heads * d_out, edge_dim))
            self.att_edge = nn.Parameter(torch.empty(heads, d_out))
        self.bias = nn.Parameter(torch.empty(heads * d_out if concat else d_out))

    def forward(self, x: Tensor, graph: WholeGraph, drop: Dropout) -> Tensor:
        n = graph.num_nodes
        edge = torch.nonzero(graph.src != graph.dst).squeeze(1)
        node = torch.arange(n)
        src, dst = torch.cat([graph.src[edge], node]), torch.cat([graph.dst[edge], node])
        ids = torch.cat([graph.edge_ids[edge], graph.loop_ids])
        z = (x @ self.weight.T).view(n, self.heads, self.d_out)
        logits = (z * self.att_source).sum(2)[src] + (z * self.att_target).sum(2)[dst]
        if self.edge_dim:
            assert graph.edge_x is not None
            loops = [graph.edge_x[edge[graph.dst[edge] == v]] for v in range(n)]
            means = [rows.mean(0) if len(rows) else rows.sum(0) for rows in loops]
            mapped = torch.cat([graph.edge_x[edge], torch.stack(means)]) @ self.lin_edge.T
            logits = logits + (mapped.view(-1, self.heads, self.d_out) * self.att_edge).sum(2)
        logits = F.leaky_relu(logits, self.negative_slope)
        top = torch.full((n, self.heads), -torch.inf, dtype=x.dtype).scatter_reduce(
            0, dst[:, None].expand_as(logits), logits.detach(), "amax"
        )
        weight = torch.exp(logits - top[dst])  # [E', H]
        alpha = drop(weight / add_at(n, dst, weight)[dst], ids, self.dropout)
        y = add_at(n, dst, (alpha[:, :, None] * z[src]).flatten(1)).view(n, self.heads, self.d_out)
        return (y.flatten(1) if self.concat else y.mean(1)) + self.bias


class BatchNorm(nn.Module):
    """``nn.BatchNorm1d`` without its count of batches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=self.training)


def _without_bias(conv: nn.Module) -> None:
    """A batch norm takes off whatever a layer's bias adds."""
    match conv:
        case GCN() | GAT():
            del conv.bias
            conv.bias = 0.0
        case SAGE():
            conv.neighbor.bias = None
        case GIN():
            conv.second.bias = None


class Reference(nn.Module):
    """What ``fullgraph.models.GNN`` computes, over the whole graph."""

    def __init__(self, config: TrainConfig, d_in: int, d_out: int, edge_dim: int) -> None:
        super().__init__()
        self.config, self.edge_dim = config, edge_dim if config.edge_features else 0
        widths = [d_in] + [config.hidden] * (config.layers - 1) + [d_out]
        self.convs = nn.ModuleList(
            self._conv(layer, widths[layer], widths[layer + 1]) for layer in range(config.layers)
        )
        if config.norm == "batch":
            for conv in self.convs[:-1]:
                _without_bias(conv)
        norm = {"layer": nn.LayerNorm, "batch": BatchNorm}.get(config.norm)
        self.norms = nn.ModuleList(norm(config.hidden) for _ in range(config.layers - 1) if norm is not None)
        self.to(getattr(torch, config.dtype))

    def _conv(self, layer: int, d_in: int, d_out: int) -> nn.Module:
        config = self.config
        if config.model == "gat" and layer < config.layers - 1:
            heads = config.heads
            return GAT(d_in, d_out // heads, heads, True, dropout=config.dropout, edge_dim=self.edge_dim)
        if config.model == "gat":
            return GAT(d_in, d_out, config.out_heads, False, dropout=config.dropout, edge_dim=self.edge_dim)
        return {"gcn": GCN, "sage": SAGE, "gin": GIN}[config.model](d_in, d_out)

    def forward(self, graph: WholeGraph, drop: Dropout) -> Tensor:
        config, x, nodes = self.config, graph.x, graph.node_ids
        for layer, conv in enumerate(self.convs):
            x = drop(x, nodes, config.dropout if layer else config.input_dropout)
            y: Tensor = conv(x, graph, drop)
            if layer < config.layers - 1:
                y = self.norms[layer](y) if config.norm != "none" else y
                y = F.elu(y) if config.model == "gat" else F.relu(y)
                y = y + x if config.residual and layer > 0 else y
            x = y
        return x


@dataclass(frozen=True, eq=False)
class Course:
    """How training went."""

    losses: list[float]
    """[steps]"""
    gradients: dict[str, Tensor]
    """Of the first step, before clipping, by name of the parameter."""
    state: dict[str, Tensor]
    """Parameters and buffers at the end."""
    scores: dict[str, dict[str, float]]
    """split -> metric -> value, at the end."""


def train(graph: Graph, config: TrainConfig, initial: dict[str, Tensor], steps: int) -> Course:
    """``steps`` steps from the ``initial`` state, and an evaluation."""
    assert graph.splits is not None
    dtype = getattr(torch, config.dtype)
    whole = WholeGraph.of(graph, dtype, config.feature_norm, config.seed)
    task = config.task or graph.task
    y, outputs = labels(graph, task, dtype)
    model = Reference(config, whole.x.shape[1], outputs, 0 if whole.edge_x is None else whole.edge_x.shape[1])
    model.load_state_dict(initial)
    learnt = dict(model.named_parameters())
    if isinstance(whole.x, nn.Parameter):
        learnt["features"] = whole.x
    optimizer = _optimizer(config, learnt.values())
    masks = {
        name: torch.as_tensor(mask[config.split])
        for name, mask in (("train", graph.splits.train), ("val", graph.splits.val), ("test", graph.splits.test))
    }
    class_weight = _balanced(y[masks["train"]], outputs, dtype) if config.class_weights == "balanced" else None
    trained = masks["train"]
    seen = whole.induced(trained) if config.inductive else whole
    rows = torch.arange(seen.num_nodes) if config.inductive else trained
    losses, gradients = [], {}
    for step in range(steps):
        model.train()
        logits = model(seen, Dropout(True, config.seed, step))
        loss = _loss(task, logits[rows], y[trained], class_weight)
        optimizer.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            gradients = {name: _gradient(p).clone() for name, p in learnt.items()}
        if config.clip is not None:
            nn.utils.clip_grad_norm_(learnt.values(), config.clip)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(whole, Dropout(False))
    scores = {
        name: _scores(task, logits[mask], y[mask], class_weight, config.metric)
        for name, mask in masks.items()
        if mask.any()
    }
    features = {name: p.detach() for name, p in learnt.items() if name == "features"}
    return Course(losses, gradients, model.state_dict() | features, scores)


def _gradient(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def labels(graph: Graph, task: str | None, dtype: torch.dtype) -> tuple[Tensor, int]:
    """(labels as the loss takes them, number of outputs)."""
    assert graph.y is not None
    y = torch.as_tensor(graph.y)
    if task == "single-label":
        return y, int(y.max()) + 1
    y = y.to(dtype).reshape(graph.num_nodes, -1)
    return y, y.shape[1]


def _balanced(y: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    counts = [int((y == c).sum()) for c in range(classes)]
    return torch.tensor([len(y) / (classes * count) if count else 0.0 for count in counts], dtype=dtype)


def _optimizer(config: TrainConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=0.9, weight_decay=config.weight_decay)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return kind(parameters, lr=config.lr, weight_decay=config.weight_decay)


def _loss(task: str | None, logits: Tensor, y: Tensor, class_weight: Tensor | None) -> Tensor:
    if task == "single-label":
        return F.cross_entropy(logits, y, class_weight)
    return F.binary_cross_entropy_with_logits(logits, y) if task == "multi-label" else F.mse_loss(logits, y)


def _scores(
    task: str | None, logits: Tensor, y: Tensor, class_weight: Tensor | None, metric: str | None
) -> dict[str, float]:
    scores: dict[str, Any] = {"loss": _loss(task, logits, y, class_weight)}
    if task == "single-label":
        guess = logits.argmax(1)
        scores |= {"accuracy": accuracy_score(y, guess), "micro_f1": f1_score(y, guess, average="micro")}
        if logits.shape[1] == 2:
            scores["roc_auc"] = roc_auc_score(y, logits.softmax(1)[:, 1])
    elif task == "multi-label":
        scores["micro_f1"] = f1_score(y, logits > 0, average="micro")
        if metric == "roc_auc":
            scores["roc_auc"] = roc_auc_score(y, logits, average="macro")
    else:
        scores["mae"] = mean_absolute_error(y, logits)
    return {name: float(value) for name, value in scores.items()}
