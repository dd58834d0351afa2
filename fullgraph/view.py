"""What a model sees of the partitioned graph: one ``LayerView`` a layer.

A model is ``forward(x, views) -> rows``. Layer l takes rows ``x`` [n_in, D] of this rank's nodes and returns rows for
the first ``n_out`` of them; ``view.own(x)`` are those nodes' input rows. It never learns that ranks exist:
``propagate`` is a linear aggregation over the whole graph's edges, ``with_halo`` gives the raw neighbour rows for any
other layer, ``dropout`` draws the same mask on any number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fullgraph.checks import check_range
from fullgraph.config import PlanKind
from fullgraph.convolve import ALONE, Surroundings, graph_linear, pair_linear
from fullgraph.cost import Layer0, Tag
from fullgraph.dropout import Activation, MaskKey, activate_, derive, dropout, keep_entries, keep_mask, threshold
from fullgraph.exchange import Carrier, halo_rows, received_rows
from fullgraph.kernels import SparseRows, at_least_float32, linear, sparse_matrix
from fullgraph.learned import initial_table
from fullgraph.plan import EdgeFeatures, LinearPlan, Plan, halo_route
from fullgraph.policy import StepPolicy
from fullgraph.propagate import propagate, sum_over_ranks
from fullgraph.reach import distances, local_graph, needed
from fullgraph.recompute import recomputed
from fullgraph.shards import Array, Shard
from fullgraph.wording import counted
from fullgraph.world import SETUP, World

Norm = Literal["sum", "mean", "gcn"]
Act = TypeVar("Act", bound=Activation)
Rows = TypeVar("Rows", Tensor, SparseRows, Tensor | SparseRows)


@dataclass
class Pass:
    """One forward pass: whether it trains, and the next dropout call's number."""

    training: bool
    seed: int = 0
    step: int = 0
    site: int = 0
    input: Tensor | SparseRows | None = None
    """The features that the model was given."""
    dropped_input: tuple[Tensor, float, MaskKey] | None = None
    """The features after dropout, and how they were drawn."""
    policy: StepPolicy | None = None
    """How message rows cross in a training pass; None where it is exact."""
    undropped: dict[int, tuple[Tensor, Tensor, float, MaskKey] | None] = field(default_factory=dict)
    """By layer, where rows are cached before dropout: rows after and before it, and how it was drawn; None where they
    are sparse."""

    recomputing: bool = False
    """Whether backward computes a layer again."""

    @contextlib.contextmanager
    def again(self, site: int) -> Iterator[None]:
        """The pass as it was when its next dropout call was number ``site``."""
        now, self.site, self.recomputing = self.site, site, True
        try:
            yield
        finally:
            self.site, self.recomputing = now, False

    def next_key(self) -> MaskKey:
        key = MaskKey(self.seed, self.step, self.site)
        self.site += 1
        return key


@dataclass(frozen=True, eq=False)
class Degrees:
    """Whole-graph degrees of some nodes, each [n, 1]."""

    in_weight: Tensor
    """Sum of in-edge weights (the number of in-edges where the graph has no weights)."""
    loop_count: Tensor

    def take(self, rows: Tensor) -> Degrees:
        return Degrees(self.in_weight[rows], self.loop_count[rows])

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
class Input:
    """The features as layer 0 sees them. Unless they are learned they never change, so their neighbours' rows need not
    cross every step.

    ``once``: their aggregate is formed at start; ``keep``: the halo nodes' features are fetched at start;
    ``exchange``: as in every other layer. ``once`` serves undropped features only, and both serve dense ones only;
    otherwise rows are exchanged.
    """

    x: Tensor | SparseRows | nn.Parameter
    """[n, F]; a ``Parameter`` where they are learned."""
    mode: Layer0
    whole: Plan
    degrees: Degrees
    halo_degrees: Degrees
    """Of the shard's whole halo list."""
    halo_global: Tensor
    """int64 global ids of the same."""
    _aggregates: dict[Norm, Tensor] = field(default_factory=dict)
    _kept: dict[int, KeptRows] = field(default_factory=dict)
    _halo_nodes: dict[int, tuple[Tensor, Degrees]] = field(default_factory=dict)

    def aggregate(self, norm: Norm) -> Tensor:
        """``norm(A) x`` [n, F] (a collective the first time)."""
        assert isinstance(self.x, Tensor)
        if norm not in self._aggregates:
            with torch.no_grad():
                self._aggregates[norm] = _aggregate(self.x, norm, self.whole, self.degrees)
        return self._aggregates[norm]

    def has(self, plan: Plan) -> bool:
        return id(plan) in self._kept

    def kept(self, plan: Plan) -> KeptRows:
        """The features with those of the plan's halo rows (a collective the first time)."""
        assert isinstance(self.x, Tensor)
        if id(plan) not in self._kept:
            with torch.no_grad():
                rows = halo_rows(self.x[: plan.n_in], plan.halo.route, world=plan.world)
            self._kept[id(plan)] = KeptRows(rows, plan.n_in, *self.halo_nodes(plan))
        return self._kept[id(plan)]

    def halo_nodes(self, plan: Plan) -> tuple[Tensor, Degrees]:
        """(int64 [h] global ids of the plan's halo rows, degrees of its ``[owned | halo]`` rows)."""
        if id(plan) not in self._halo_nodes:
            halo = torch.from_numpy(plan.halo.halo).to(self.halo_global.device)
            owned = torch.arange(plan.n_in, device=halo.device)
            degrees = Degrees(
                torch.cat([self.degrees.in_weight[owned], self.halo_degrees.in_weight[halo]]),
                torch.cat([self.degrees.loop_count[owned], self.halo_degrees.loop_count[halo]]),
            )
            self._halo_nodes[id(plan)] = self.halo_global[halo], degrees
        return self._halo_nodes[id(plan)]


@dataclass(frozen=True, eq=False)
class KeptRows:
    """``[owned | halo]`` features of a plan, fetched once."""

    rows: Tensor
    """[n_in + h, F]"""
    n_in: int
    halo_global: Tensor
    """int64 [h]"""
    degrees: Degrees
    """[n_in + h]"""

    def drawn(self, dropped: tuple[Tensor, float, MaskKey] | None) -> Tensor:
        """The rows under the pass's dropout: the mask of a halo row hangs on its global id alone."""
        if dropped is None:
            return self.rows
        owned, p, key = dropped
        return torch.cat([owned, dropout(self.rows[self.n_in :], self.halo_global, p, key)])


def _aggregate(
    x: Tensor, norm: Norm, plan: Plan, degrees: Degrees, tag: Tag = SETUP, carrier: Carrier | None = None
) -> Tensor:
    """``norm(A) x`` [n_out, D] over all ranks for x [n_in, D]."""
    normalised = _normalised(plan.linear, norm, degrees, x.dtype)
    return propagate(x, normalised, world=plan.world, tag=tag, carrier=carrier)


def _normalised(plan: LinearPlan, norm: Norm, degrees: Degrees, dtype: torch.dtype) -> LinearPlan:
    n_out, n_in = plan.local.shape
    if norm == "mean":
        return plan.scaled("mean", None, degrees.mean_scale[:n_out, 0], dtype)
    if norm == "gcn":
        scale = degrees.gcn_scale[:, 0]
        return plan.with_loops.scaled("gcn", scale[:n_in], scale[:n_out], dtype)
    return plan


@dataclass(frozen=True, eq=False)
class LayerView:
    """The partitioned graph as one layer of a model sees it: ``n_in`` rows in, ``n_out <= n_in`` rows out."""

    layer: int
    plan: Plan
    degrees: Degrees
    num_nodes_global: int
    this_pass: Pass
    complete: bool
    """Whether ``n_out`` are all nodes, on every rank."""
    halo_nodes: Callable[[Plan], tuple[Tensor, Degrees]]
    """Of a plan: its halo rows' global ids, and the degrees of its ``[owned | halo]`` rows."""
    input: Input | None = None
    """For layer 0: the features."""

    @property
    def n_in(self) -> int:
        return self.plan.n_in

    @property
    def n_out(self) -> int:
        return self.plan.n_out

    @property
    def ids(self) -> Tensor:
        """int64 [n_in] global ids of the rows."""
        return self.plan.owned_global

    @property
    def training(self) -> bool:
        return self.this_pass.training

    @property
    def recomputing(self) -> bool:
        """Whether backward computes the layer again: what a first computation notes for good was noted then."""
        return self.this_pass.recomputing

    def recomputed(self, layer: Callable[[Rows], Tensor], x: Rows, parameters: Iterable[Tensor]) -> Tensor:
        """``layer(x)`` of rows x [n_in, D], keeping nothing for backward but x: the rest is computed again there, with
        the same dropout masks, and what it exchanges crosses again. ``parameters`` are all that ``layer`` uses; beside
        x they alone get gradients."""
        if not (self.training and torch.is_grad_enabled()):
            return layer(x)
        if self.this_pass.policy is not None:
            raise ValueError("recomputed: message rows that are approximate cannot cross a second time")
        return recomputed(layer, x, list(parameters), functools.partial(self.this_pass.again, self.this_pass.site))

    def _enter(self) -> Tag:
        """Tell the meter that what follows belongs to this layer."""
        what = "recompute" if self.this_pass.recomputing else "forward" if self.training else "evaluate"
        tag = (self.layer, what)
        self.plan.world.meter.enter(tag)
        return tag

    def _carrier(self) -> Carrier | None:
        policy = self.this_pass.policy
        return None if policy is None else policy.carrier(self.layer)

    def own(self, x: Rows) -> Rows:
        """The rows of the nodes that this layer computes: ``x[:n_out]``."""
        if isinstance(x, SparseRows):
            return x.narrow(self.n_out)
        return x[: self.n_out]

    def propagate(self, x: Tensor | SparseRows, norm: Norm = "sum", weight: Tensor | None = None) -> Tensor:
        """``norm(A) x weight^T`` [n_out, D]: a sum over in-edges u -> v of ``w_uv x_u``, normalised.

        ``sum``: as it stands; ``mean``: divided by ``sum of w``; ``gcn``: ``D^-1/2 (A + I) D^-1/2`` with a loop of
        weight 1 added to nodes that have none (Kipf and Welling 2017, eq. 2). Where a sum of weights is 0, or for
        ``gcn`` less, the scale is 0 and with it the row. ``weight`` is a [D, D_in] linear map,
        applied on the side of the aggregation where rows are narrower.
        """
        tag = self._enter()
        if isinstance(x, SparseRows):
            if weight is None:
                raise ValueError("sparse rows can be propagated only together with a weight")
            self._undropped(x)
            return _aggregate(linear(x, weight), norm, self.plan, self.degrees, tag, self._carrier())
        aggregated = self._aggregated_once(x, norm)
        if aggregated is not None:
            return aggregated if weight is None else linear(aggregated, weight)
        (rows, plan), world = self._linear_rows(x, norm, tag), self.plan.world
        return _narrow_side(
            rows, weight, lambda rows: propagate(rows, plan, world=world, tag=tag, carrier=self._carrier())
        )

    def convolve(
        self,
        x: Tensor | SparseRows,
        norm: Norm,
        weight: Tensor,
        root: Tensor | None = None,
        bias: Tensor | None = None,
        around: Surroundings = ALONE,
    ) -> Tensor:
        """``norm(A) x weight^T + own(x) root^T + bias`` [n_out, D] in as few passes over the rows as can be.

        ``weight`` and ``root`` are [D, D_in], ``bias`` is [D]. With ``around`` the layer applies the activation of
        its output, and the derivative of the one that made its input.
        """
        tag, world = self._enter(), self.plan.world
        if isinstance(x, SparseRows):
            self._undropped(x)
            y = _aggregate(linear(x, weight), norm, self.plan, self.degrees, tag, self._carrier())
            y = y if root is None else y + linear(self.own(x), root)
            y = y if bias is None else y + bias.to(y.dtype)
            return y if around.after is None else activate_(y, around.after)
        aggregated = self._aggregated_once(x, norm)
        if aggregated is None:
            rows, plan = self._linear_rows(x, norm, tag)
            if weight.shape[0] <= weight.shape[1]:
                return graph_linear(
                    rows, weight, root, bias, plan, world=world, tag=tag, carrier=self._carrier(), around=around
                )
            rows = derive(rows, around.before, world.buffers)
            x = derive(x, around.before, world.buffers)
            aggregated = propagate(rows, plan, world=world, tag=tag, carrier=self._carrier())
        own = None if root is None else self.own(x)
        return pair_linear(aggregated, weight, own, root, bias, world=world, around=Surroundings(after=around.after))

    def mapped(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, around: Surroundings = ALONE) -> Tensor:
        """``x weight^T + bias`` for rows [m, D_in] of this rank alone, with ``around`` as in ``convolve``."""
        return pair_linear(x, weight, None, None, bias, world=self.plan.world, around=around)

    def _aggregated_once(self, x: Tensor, norm: Norm) -> Tensor | None:
        """``norm(A) x`` [n_out, F] where that was formed at start and ``x`` are the features as they stand."""
        if self.input is None or self.input.mode != "once" or self._drawn_from_input(x) != ():
            return None
        return self.input.aggregate(norm)[: self.n_out]

    def _linear_rows(self, x: Tensor, norm: Norm, tag: Tag) -> tuple[Tensor, LinearPlan]:
        """What to aggregate, x [n_in, D] or ``[owned | halo]`` rows that are here, and the plan that does it."""
        dropped = self._drawn_from_input(x) if self._keeps else None
        if self.input is not None and dropped is not None:
            kept = self.input.kept(self.plan)
            return kept.drawn(dropped or None), _normalised(self.plan.kept_linear, norm, kept.degrees, x.dtype)
        if (cached := self._masked_here(x, tag)) is not None:
            return cached, _normalised(self.plan.kept_linear, norm, self.halo_nodes(self.plan)[1], x.dtype)
        return x, _normalised(self.plan.linear, norm, self.degrees, x.dtype)

    def with_halo(self, x: Tensor | SparseRows, weight: Tensor | None = None) -> Tensor:
        """``[owned | halo]`` rows [n_in + h, D] of x [n_in, D], or of ``x weight^T``; differentiable. ``edge_index[0]``
        indexes them."""
        tag = self._enter()
        if self.input is not None and isinstance(x, Tensor) and self._keeps:
            dropped = self._drawn_from_input(x)
            if dropped is not None:
                rows = self.input.kept(self.plan).drawn(dropped or None)
                return rows if weight is None else self.mapped(rows, weight)
        if self.this_pass.policy is not None and self.this_pass.policy.scales:
            raise ValueError(
                "--boundary-sample: layers that use the rows themselves (with_halo) cannot make up for those that are "
                "not drawn; leave it out, or add --refresh every:R or pipelined, where these stay as they were"
            )
        if (cached := self._masked_here(x, tag)) is not None:
            return cached if weight is None else self.mapped(cached, weight)
        if isinstance(x, SparseRows):
            if weight is None:
                raise ValueError("sparse rows can be exchanged only together with a weight")
            x, weight = linear(x, weight), None
        return halo_rows(x, self.plan.halo.route, weight, world=self.plan.world, tag=tag, carrier=self._carrier())

    def _masked_here(self, x: Tensor | SparseRows, tag: Tag) -> Tensor | None:
        """``[owned | halo]`` rows of dropped rows x of which the halo ones come undropped from a cache and are masked
        here, as a row hangs on its mask far more than on its age; None where that is not called for."""
        drawn = self._undropped(x)
        if drawn is None:
            return None
        carrier = self._carrier()
        assert carrier is not None
        assert isinstance(x, Tensor)
        _, before, p, key = drawn
        halo = received_rows(before, self.plan.halo.route, world=self.plan.world, tag=tag, carrier=carrier)
        return torch.cat([x, dropout(halo, self.halo_nodes(self.plan)[0], p, key)])

    def _undropped(self, x: Tensor | SparseRows) -> tuple[Tensor, Tensor, float, MaskKey] | None:
        """How rows x were dropped that are to be cached as they were before; ``ValueError`` where that is not known."""
        if self.layer not in self.this_pass.undropped:
            return None
        drawn = self.this_pass.undropped[self.layer]
        if drawn is None or drawn[0] is not x:
            raise ValueError(
                f"layer {self.layer}: its rows went through dropout and a map before they are exchanged, so they "
                f"cannot be cached undropped; exchange the rows that view.dropout gives, train without dropout, or add "
                f"--freeze-masks"
            )
        return drawn

    @property
    def _keeps(self) -> bool:
        """Evaluation uses the kept rows only where it shares training's plan."""
        return self.input is not None and self.input.mode == "keep" and (self.training or self.input.has(self.plan))

    def _drawn_from_input(self, x: Tensor) -> tuple[Tensor, float, MaskKey] | tuple[()] | None:
        """() where ``x`` are the features themselves, how they were drawn where they went through dropout, else
        None."""
        assert self.input is not None
        dropped = self.this_pass.dropped_input
        if dropped is not None and x is dropped[0]:
            return dropped
        return () if dropped is None and x is self.this_pass.input else None

    @property
    def edge_index(self) -> Tensor:
        """int64 [2, e] in-edges of the rows that this layer computes: source, as a row of ``with_halo``, and
        destination; in order of destination."""
        return self.plan.halo.edge_index

    @property
    def edge_weight(self) -> Tensor | None:
        """[e] weights of the same; None where the graph has none."""
        return self.plan.halo.edges.values

    @property
    def edge_x(self) -> Tensor | None:
        """[e, K] features of the same; None where the graph has none."""
        return self.plan.edge_x

    @property
    def edge_ids(self) -> Tensor:
        """int64 [e] global ids of the same."""
        return self.plan.halo.edge_global

    def dropout(self, x: Rows, p: float) -> Rows:
        """Dropout of node rows ``x`` [n_in, D] with a mask that does not depend on the partitioning."""
        if not self.training or p == 0.0:
            return x
        self._enter()
        key = self.this_pass.next_key()
        if isinstance(x, SparseRows):
            m = x.matrix
            if self._masks_at_receiver:
                self.this_pass.undropped[self.layer] = None
            keep = keep_entries(self.ids[: m.shape[0]][m.rows], m.indices, p, key)
            return SparseRows(m, x.values * keep * threshold(p)[1])
        y = dropout(x, self.ids[: x.shape[0]], p, key, self.plan.world.buffers)
        if self.input is not None and x is self.this_pass.input:
            self.this_pass.dropped_input = (y, p, key)
        if self._masks_at_receiver:
            self.this_pass.undropped[self.layer] = (y, x, p, key)
        return y

    @property
    def _masks_at_receiver(self) -> bool:
        policy = self.this_pass.policy
        return policy is not None and policy.masks_at_receiver

    def activation(self, kind: type[Act], p: float) -> Act | None:
        """The ``kind`` of activation, with dropout, of this layer's input rows [n_in, D], to be applied now or by the
        layer below; None where the rows are wanted undropped as well."""
        dropped = self.training and p > 0
        if dropped and self._masks_at_receiver:
            return None
        return kind(self.ids, p, self.this_pass.next_key() if dropped else None)

    def edge_keep(self, edge_ids: Tensor, width: int, p: float) -> Tensor | None:
        """bool [len(edge_ids), width] dropout mask of edges by global id; None when nothing is dropped.

        What is kept is to be scaled by ``dropout.threshold(p)[1]``.
        """
        if not self.training or p == 0.0:
            return None
        return keep_mask(edge_ids, width, p, self.this_pass.next_key())

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum over all ranks, differentiable: for statistics over all nodes of the graph."""
        if not self.complete:
            raise ValueError(
                "sum_over_ranks: this layer computes only the nodes that training needs, so a sum over its rows is not "
                "one over all nodes; leave out num_layers in the model, or train with --no-prune"
            )
        return sum_over_ranks(x, world=self.plan.world)


def _narrow_side(x: Tensor, weight: Tensor | None, aggregate: Callable[[Tensor], Tensor]) -> Tensor:
    """``aggregate(x) weight^T``, with the map on the side where rows are narrower."""
    if weight is None:
        return aggregate(x)
    if weight.shape[0] <= weight.shape[1]:
        return aggregate(linear(x, weight))
    return linear(aggregate(x), weight)


class SameViews(Sequence[LayerView]):
    """The same view for every layer, for a model that does not say how many it has."""

    def __init__(self, first: LayerView) -> None:
        self._first = first

    def __getitem__(self, layer: int) -> LayerView:  # type: ignore[override]
        return dataclasses.replace(self._first, layer=layer, input=None) if layer else self._first

    def __iter__(self) -> Iterator[LayerView]:
        return map(self.__getitem__, itertools.count())

    def __len__(self) -> int:
        raise TypeError("the model does not declare num_layers, so there is no number of views")


@dataclass(frozen=True, eq=False)
class GraphPart:
    """This rank's part of the graph on its device, ready for models: n owned nodes in the order of training."""

    world: World
    input: Input
    y: Tensor | None
    """int64 [n] classes, floating [n, C] 0/1 labels, or floating [n, T] targets."""
    masks: dict[str, Tensor]
    """bool [n] for train, val and test."""
    whole: Plan
    """All nodes in, all nodes out: for evaluation, and for layers that are not pruned."""
    training: tuple[tuple[Plan, bool], ...] | None
    """For each layer in training, its plan and whether it gives all nodes; None where the depth is not known."""
    num_nodes_global: int
    """Nodes of all ranks' parts."""

    @property
    def x(self) -> Tensor | SparseRows:
        """[n, F] features."""
        return self.input.x

    @property
    def table(self) -> nn.Parameter | None:
        """[n, F] the features where they are learned: its gradient is whole on this rank, not to be summed over
        ranks."""
        return self.input.x if isinstance(self.input.x, nn.Parameter) else None

    @property
    def degrees(self) -> Degrees:
        return self.input.degrees

    def with_layer0(self, mode: Layer0) -> GraphPart:
        """The same part with another way for layer 0 to get its rows; learned features can only be exchanged."""
        assert self.table is None or mode == "exchange"
        return dataclasses.replace(self, input=dataclasses.replace(self.input, mode=mode, _aggregates={}, _kept={}))

    def prepare(self, uses: Literal["linear", "halo"]) -> None:
        """Make and agree now the plans that a model's layers use (a collective)."""
        for plan in (self.whole, *(plan for plan, _ in self.training or ())):
            getattr(plan, uses)

    def views(self, this_pass: Pass) -> Sequence[LayerView]:
        """One view a layer for one forward pass; endlessly many where the depth is not known."""
        view = functools.partial(
            LayerView,
            degrees=self.degrees,
            num_nodes_global=self.num_nodes_global,
            halo_nodes=self.input.halo_nodes,
        )
        views: Sequence[LayerView]
        if self.training is None:
            views = SameViews(view(0, self.whole, this_pass=this_pass, complete=True, input=self.input))
        else:
            plans = self.training if this_pass.training else ((self.whole, True),) * len(self.training)
            views = [
                view(layer, plan, this_pass=this_pass, complete=complete, input=None if layer else self.input)
                for layer, (plan, complete) in enumerate(plans)
            ]
        return views

    def rows(self, count: int) -> Tensor | SparseRows:
        """The first ``count`` nodes' features in the type of rows, where learned ones are kept in that of weights."""
        x = self.x
        if isinstance(x, SparseRows):
            return x if count == x.shape[0] else x.narrow(count)
        return (x if count == x.shape[0] else x[:count]).to(self.whole.dtype)

    def run(self, model: nn.Module, this_pass: Pass) -> Tensor:
        """The model's outputs [n_out, C] of one pass: of all owned nodes, or in training of those that are needed; in
        float32 at least."""
        views = self.views(this_pass)
        n_in = views[0].n_in
        this_pass.input = self.rows(n_in)
        out: Tensor = model(this_pass.input, views)
        return at_least_float32(out)


def make_part(
    shard: Shard,
    world: World,
    *,
    split: int = 0,
    dtype: torch.dtype = torch.float32,
    feature_norm: str = "none",
    kind: PlanKind = "cover",
    num_layers: int | None = None,
    whole_layers: int = 0,
    prune: bool = True,
    layer0: Layer0 = "exchange",
    dense: bool = False,
    seed: int = 1,
) -> GraphPart:
    """Put a shard on the world's device and agree its plans with every other rank (a collective).

    A model of ``num_layers`` layers is pruned in training (``fullgraph.reach``) above its first ``whole_layers``;
    one whose depth is not known (None) is not. ``dense`` spreads out sparse features; ``seed`` draws the first rows of
    learned ones. Raises ``RankError`` on all ranks where two shards do not fit, or one has no features.
    """
    device, wide = world.device, torch.promote_types(dtype, torch.float32)
    with world.stage("load"):
        if shard.x is None and not shard.learned_features:
            raise ValueError(
                f"graph {shard.graph} has no node features; build it again with some: --features FILE, degree, onehot, "
                f"random:K or learned:K"
            )
        _check_labelled(shard, split)
        check_range(shard, str(dtype).removeprefix("torch."))
        n = shard.num_owned
        train = shard.train[split] if shard.train.shape[0] else np.zeros(n, np.bool_)
    graph = local_graph(shard)
    route = halo_route(graph, world)
    counts: tuple[int, ...] | None = None
    near = np.zeros(n, np.int32) if shard.cluster is None else shard.cluster
    nodes = np.argsort(near, kind="stable")
    if num_layers is not None:
        counts, complete = (n,) * (num_layers + 1), (True,) * (num_layers + 1)
        if prune:
            send = route.send.indices.cpu().numpy()
            reach = distances(graph, train, num_layers, send, route.counts, world)
            counts, complete = needed(reach, num_layers, whole_layers, world)
            nodes = np.lexsort((near, reach))
    if (np.diff(nodes) != 1).any():
        graph = local_graph(shard, nodes)
    edge_features = EdgeFeatures(graph, device, wide)
    whole = Plan(graph, world, n, n, kind, dtype, edge_features)
    training = None
    if counts is not None:
        training = tuple(
            (whole if out == n and into == n and done else dataclasses.replace(whole, n_in=into, n_out=out), done)
            for into, out, done in zip(counts[:-1], counts[1:], complete[1:], strict=True)
        )
    with world.stage("load"):
        order = torch.from_numpy(graph.order)
        x: Tensor | SparseRows
        if shard.x is None:
            x = initial_table(whole.owned_global, shard.learned_features, seed, wide)
        else:
            x = _features(shard.x, graph.order, dtype, feature_norm, device)
        x = x.to_dense() if dense and isinstance(x, SparseRows) else x
        masks = {
            name: torch.from_numpy(getattr(shard, name)[split])[order].to(device)
            for name in ("train", "val", "test")
            if getattr(shard, name).shape[0]
        }
        y = None if shard.y is None else _labels(shard, wide)[order].to(device)
        in_weight = torch.from_numpy(shard.in_weight).to(wide)[:, None]
        loops = torch.from_numpy(shard.loop_count).to(wide)[:, None]
        degrees = Degrees(in_weight[order].to(device), loops[order].to(device))
        halo_degrees = Degrees(in_weight[n:].to(device), loops[n:].to(device))
        halo_global = torch.from_numpy(shard.halo_global).to(device)
    features = Input(x, layer0, whole, degrees, halo_degrees, halo_global)
    num_nodes = int(world.gather_vector([n]).sum())
    return GraphPart(world, features, y, masks, whole, training, num_nodes)


def _features(
    x: Array | sp.csr_array, order: NDArray[np.int64], dtype: torch.dtype, feature_norm: str, device: torch.device
) -> Tensor | SparseRows:
    if isinstance(x, np.ndarray):
        dense = torch.from_numpy(x[order]).to(device)
        if feature_norm == "row":
            dense = dense.to(torch.promote_types(dtype, torch.float32))
            total = dense.sum(1, keepdim=True)
            dense = torch.where(total != 0, dense / total, dense)
        return dense.to(dtype)
    x = x[order]
    matrix = sparse_matrix(x.shape, x.indptr, x.indices).to(device, dtype)
    values = torch.from_numpy(x.data).to(device, dtype)
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
            of = f"of the {name} mask of split {split}"
            raise ValueError(
                f"part {shard.part}: {counted(bad.size, f'node {of} has', f'nodes {of} have')} no label, first "
                f"node {int(shard.owned_global[bad[0]])}; build again from a graph whose masks cover labelled nodes"
            )


def _labels(shard: Shard, dtype: torch.dtype) -> Tensor:
    assert shard.y is not None
    y = torch.from_numpy(np.ascontiguousarray(shard.y))
    if shard.task == "single-label":
        return y.to(torch.int64)
    return y.to(dtype) if y.ndim == 2 else y.to(dtype)[:, None]
