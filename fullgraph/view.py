"""What a model sees of the partitioned graph: one ``LayerView`` a layer.

A model is ``forward(x, views) -> rows``. Layer l takes rows ``x`` [n_in, D] of this rank's nodes and returns rows for
the first ``n_out`` of them; ``view.own(x)`` are those nodes' input rows. It never learns that ranks exist:
``propagate`` is a linear aggregation over the whole graph's edges, ``with_halo`` gives the raw neighbour rows for any
other layer, ``dropout`` draws the same mask on any number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fullgraph.dropout import MaskKey, dropout, keep_entries, keep_mask, threshold
from fullgraph.exchange import halo_rows
from fullgraph.kernels import SparseMatrix, SparseRows, linear, sparse_matrix
from fullgraph.plan import Plan, make_plan
from fullgraph.propagate import propagate, sum_over_ranks
from fullgraph.shards import Shard
from fullgraph.world import World

Norm = Literal["sum", "mean", "gcn"]
Rows = TypeVar("Rows", Tensor, SparseRows, Tensor | SparseRows)


@dataclass
class Pass:
    """One forward pass: whether it trains, and the next dropout call's number."""

    training: bool
    seed: int = 0
    step: int = 0
    site: int = 0

    def next_key(self) -> MaskKey:
        key = MaskKey(self.seed, self.step, self.site)
        self.site += 1
        return key


@dataclass(frozen=True, eq=False)
class Degrees:
    """Whole-graph degrees of the owned nodes, each [n, 1]."""

    in_weight: Tensor
    """Sum of in-edge weights (the number of in-edges where the graph has no weights)."""
    loop_count: Tensor

    @functools.cached_property
    def mean_scale(self) -> Tensor:
        """1 / in_weight, 0 where that is 0."""
        return torch.where(self.in_weight != 0, 1.0 / self.in_weight, 0.0)

    @functools.cached_property
    def gcn_scale(self) -> Tensor:
        """(in-degree with the added loop)^-1/2, 0 where that degree is not positive."""
        degree = self.in_weight + (self.loop_count == 0)
        return torch.where(degree > 0, degree.clamp(min=0).rsqrt(), 0.0)


@dataclass(frozen=True, eq=False)
class LayerView:
    """The partitioned graph as one layer of a model sees it: ``n_in`` rows in, ``n_out <= n_in`` rows out."""

    plan: Plan
    world: World
    degrees: Degrees
    num_nodes_global: int
    this_pass: Pass

    @property
    def n_in(self) -> int:
        return self.plan.n_in

    @property
    def n_out(self) -> int:
        return self.plan.n_out

    @property
    def ids(self) -> Tensor:
        """int64 [n_in] global ids of the rows."""
        return self.plan.halo.owned_global

    @property
    def training(self) -> bool:
        return self.this_pass.training

    def own(self, x: Rows) -> Rows:
        """The rows of the nodes that this layer computes: ``x[:n_out]``."""
        if isinstance(x, SparseRows):
            return x.narrow(self.n_out)
        return x[: self.n_out]

    def propagate(self, x: Tensor | SparseRows, norm: Norm = "sum", weight: Tensor | None = None) -> Tensor:
        """``norm(A) x weight^T`` [n_out, D]: a sum over in-edges u -> v of ``w_uv x_u``, normalised.

        ``sum``: as it stands; ``mean``: divided by ``sum of w``; ``gcn``: ``D^-1/2 (A + I) D^-1/2`` with a loop of
        weight 1 added to nodes that have none (Kipf and Welling 2017, eq. 2). ``weight`` is a [D, D_in] linear map,
        applied on the side of the aggregation where rows are narrower.
        """
        if isinstance(x, SparseRows):
            if weight is None:
                raise ValueError("sparse rows can be propagated only together with a weight")
            x, weight = linear(x, weight), None
        elif weight is not None and weight.shape[0] <= weight.shape[1]:
            x, weight = linear(x, weight), None
        plan, in_scale, out_scale = self.plan.linear, None, None
        if norm == "mean":
            out_scale = self.degrees.mean_scale[: self.n_out]
        elif norm == "gcn":
            plan = plan.with_loops
            in_scale, out_scale = self.degrees.gcn_scale[: self.n_in], self.degrees.gcn_scale[: self.n_out]
        y = propagate(x, plan, world=self.world, in_scale=in_scale, out_scale=out_scale)
        return y if weight is None else linear(y, weight)

    def with_halo(self, x: Tensor) -> Tensor:
        """``[owned | halo]`` rows [n_in + h, D] of x [n_in, D], differentiable; columns of ``edges`` index them."""
        return halo_rows(x, self.plan.halo.route, world=self.world)

    @property
    def edges(self) -> SparseMatrix:
        """In-edges [n_out, n_in + h] as CSR: ``indptr``, ``indices`` (sources in ``with_halo`` rows), ``rows``
        (destinations), ``values`` (weights, or None)."""
        return self.plan.halo.edges

    @property
    def edge_ids(self) -> Tensor:
        """int64 [e] global ids of ``edges``."""
        return self.plan.halo.edge_global

    def dropout(self, x: Rows, p: float) -> Rows:
        """Dropout of node rows ``x`` [n_in, D] with a mask that does not depend on the partitioning."""
        if not self.training or p == 0.0:
            return x
        key = self.this_pass.next_key()
        if isinstance(x, SparseRows):
            m = x.matrix
            keep = keep_entries(self.ids[: m.shape[0]][m.rows], m.indices, p, key)
            return SparseRows(m, x.values * keep * threshold(p)[1])
        return dropout(x, self.ids[: x.shape[0]], p, key)

    def edge_keep(self, edge_ids: Tensor, width: int, p: float) -> Tensor | None:
        """bool [len(edge_ids), width] dropout mask of edges by global id; None when nothing is dropped.

        What is kept is to be scaled by ``dropout.threshold(p)[1]``.
        """
        if not self.training or p == 0.0:
            return None
        return keep_mask(edge_ids, width, p, self.this_pass.next_key())

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum over all ranks, differentiable: for statistics over all nodes of the graph."""
        return sum_over_ranks(x, world=self.world)


@dataclass(frozen=True, eq=False)
class GraphPart:
    """This rank's part of the graph on its device, ready for models: n owned nodes."""

    world: World
    x: Tensor | SparseRows
    """[n, F] features."""
    y: Tensor | None
    """int64 [n] classes, floating [n, C] 0/1 labels, or floating [n, T] targets."""
    masks: dict[str, Tensor]
    """bool [n] for train, val and test."""
    degrees: Degrees
    plan: Plan
    num_nodes_global: int

    def views(self, num_layers: int, this_pass: Pass) -> Sequence[LayerView]:
        """One view a layer for one forward pass."""
        view = LayerView(self.plan, self.world, self.degrees, self.num_nodes_global, this_pass)
        return [view] * num_layers


def make_part(
    shard: Shard, world: World, *, split: int = 0, dtype: torch.dtype = torch.float32, feature_norm: str = "none"
) -> GraphPart:
    """Put a shard on the world's device and agree its plan with every other rank (a collective).

    Raises ``RankError`` on all ranks where the shard has no features or labels or not that split.
    """
    with world.stage("load"):
        if shard.x is None:
            raise ValueError(f"graph {shard.graph} has no node features; training needs some")
        x = _features(shard, dtype, feature_norm, world.device)
        masks = {
            name: torch.from_numpy(np.ascontiguousarray(getattr(shard, name)[split])).to(world.device)
            for name in ("train", "val", "test")
            if getattr(shard, name).shape[0]
        }
        y = None if shard.y is None else _labels(shard, dtype).to(world.device)
        _check_labelled(shard, split)
        n = shard.owned_global.shape[0]

        def column(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values[:n, None])).to(world.device, dtype)

        degrees = Degrees(column(shard.in_weight), column(shard.loop_count))
    plan = make_plan(shard, world, dtype)
    return GraphPart(world, x, y, masks, degrees, plan, shard.num_nodes_global)


def _features(shard: Shard, dtype: torch.dtype, feature_norm: str, device: torch.device) -> Tensor | SparseRows:
    x = shard.x
    if isinstance(x, np.ndarray):
        dense = torch.from_numpy(np.ascontiguousarray(x)).to(device, dtype)
        if feature_norm == "row":
            total = dense.sum(1, keepdim=True)
            dense = torch.where(total != 0, dense / total, dense)
        return dense
    assert x is not None
    matrix = sparse_matrix(x.shape, x.indptr, x.indices).to(device, dtype)
    values = torch.from_numpy(np.ascontiguousarray(x.data)).to(device, dtype)
    if feature_norm == "row":
        total = torch.zeros(x.shape[0], dtype=dtype, device=device).index_add_(0, matrix.rows.long(), values)
        values = values / torch.where(total != 0, total, 1.0)[matrix.rows.long()]
    return SparseRows(matrix, values)


def _check_labelled(shard: Shard, split: int) -> None:
    if shard.y is None:
        return
    y = shard.y if shard.y.ndim == 2 else shard.y[:, None]
    missing = (np.isnan(y) if np.issubdtype(y.dtype, np.floating) else y < 0).any(axis=1)
    for name in ("train", "val", "test"):
        masks = getattr(shard, name)
        if masks.shape[0] and (bad := np.flatnonzero(missing & masks[split])).size:
            raise ValueError(
                f"part {shard.part}: {bad.size} nodes of the {name} mask of split {split} have no label, first "
                f"node {int(shard.owned_global[bad[0]])}; build again from a graph whose masks cover labelled nodes"
            )


def _labels(shard: Shard, dtype: torch.dtype) -> Tensor:
    assert shard.y is not None
    y = torch.from_numpy(np.ascontiguousarray(shard.y))
    if shard.task == "single-label":
        return y.to(torch.int64)
    return y.to(dtype) if y.ndim == 2 else y.to(dtype)[:, None]
