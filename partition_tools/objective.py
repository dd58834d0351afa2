"""What a partition is chosen by: the predicted cost of a training step of a stated model on a stated machine.

Rows that cross are counted as the trainer sends them: the fewest a layer needs (a minimum cover, or halo rows for
attention), layers cut to what the training nodes of the first split need, and once more all of them for the evaluation
that follows every step by default. Links and memory are shared by all parts, so the rows of all count; parts wait for
each other in every layer, so the slowest counts, too:

    traffic = sum over exchanges of the mean part's seconds
    cost    = sum over layers of (slowest part + mean part) / 2, of exchange with its latency + compute

Traffic is made small first, and the cost without giving back any of it. Compute within the tolerance of balance counts
as even: what is promised to be good enough is not bought with rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullgraph.cost import Layer0, Machine, crossings
from fullgraph.cut import CutGraph, LayerCounts, label_reach, whole_boundaries
from fullgraph.step import ModelShape, StepCost, step_cost
from partition_tools.graph import Graph, entry_keys

UNKNOWN_OUTPUTS = 16
"""Classes of a model for a graph without labels, whose features are taken to be as wide as its hidden layers."""


@dataclass(frozen=True, eq=False)
class Edges:
    """Distinct directed edges without loops that one or more layers aggregate over."""

    src: NDArray[np.int64]
    """[e] ascending."""
    dst: NDArray[np.int64]
    symmetric: bool
    """Whether every edge is there both ways, so that rows p -> q equal rows q -> p."""

    def cut(self, part: NDArray[np.int32], parts: int) -> CutGraph:
        """Of all cut edges, or of those from a lower to a higher part where that tells everything."""
        p, q = part[self.src], part[self.dst]
        crosses = np.flatnonzero(p < q if self.symmetric else p != q)
        return CutGraph.make(self.src[crosses], self.dst[crosses], part, parts)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A partition as the objective sees it."""

    traffic: float
    """Seconds of exchanges, or rows where only these count: what is made small first."""
    cost: float
    """The same with compute: what decides between partitions of nearly the same traffic."""
    step: StepCost
    layers: tuple[LayerCounts, ...]
    cuts: tuple[CutGraph, ...]
    """One for each of the objective's edge sets."""
    rows: NDArray[np.int64]
    """[P, P] message rows that a training step sends forward."""

    @property
    def total_rows(self) -> int:
        return int(self.rows.sum())

    @property
    def max_rows(self) -> int:
        """Most rows that a part sends or receives."""
        return int(max(self.rows.sum(axis=0).max(), self.rows.sum(axis=1).max()))


@dataclass(frozen=True, eq=False)
class Objective:
    """A graph, a model and a machine, ready to cost partitions into ``parts``."""

    parts: int
    num_nodes: int
    in_degree: NDArray[np.int64]
    """[N] with loops and duplicates."""
    shape: ModelShape
    machine: Machine
    tolerance: float
    layer0: Layer0
    layer_edges: tuple[int | None, ...]
    """For each layer the index of its edge set; None where nothing crosses."""
    edges: tuple[Edges, ...]
    kept: tuple[NDArray[np.bool_] | None, ...]
    """For each of the L + 1 boundaries the nodes [N] that have rows there; None where all have."""
    weights: tuple[float, ...]
    """Seconds that a row of each edge set costs in a step and an evaluation."""
    only_rows: bool
    evaluated: tuple[int, float] | None
    """Edge set of an evaluation's exchanges, and seconds that a row of it costs in all of them together."""

    @classmethod
    def make(
        cls,
        graph: Graph,
        parts: int,
        shape: ModelShape,
        machine: Machine,
        *,
        tolerance: float,
        only_rows: bool = False,
    ) -> Objective:
        """``only_rows``: the cost is the number of rows that an exchange of all nodes sends, pruning left aside.

        Sorts the edges and goes through them once a layer.
        """
        src, dst = _distinct(graph)
        layers, n = shape.layers, graph.num_nodes
        limits: list[int | None] = [None] * (layers + 1)
        reach = None
        if graph.splits is not None and graph.splits.train[:1].any() and not only_rows:
            reach = label_reach([(src, dst)], graph.splits.train[0], layers)
            whole = whole_boundaries([int((reach <= layers - i).sum()) for i in range(layers + 1)], n)
            limits = [None if whole[i] else layers - i for i in range(layers + 1)]
        layer0: Layer0 = "once"
        if shape.sparse_input or shape.learned_input:
            layer0 = "exchange"
        elif shape.model == "gat" or shape.dropped_input:
            layer0 = "keep"
        crossing = crossings(
            shape.model,
            shape.widths,
            out_heads=shape.out_heads,
            layer0=layer0,
            sparse_input=shape.sparse_input,
            learned_input=shape.learned_input,
        )
        used = sorted({limits[i + 1] for i in range(layers) if crossing[i].width}, key=lambda k: (k is not None, k))
        if only_rows:
            used = [None]
        evaluated = None
        if used:
            if used[0] is not None:
                used.insert(0, None)
            evaluated = 0, sum(cross.width for cross in crossing) * shape.itemsize / machine.bandwidth
        edges, weights = [], []
        for limit in used:
            kept = slice(None) if limit is None or reach is None else reach[dst] <= limit
            edges.append(_edges(src[kept], dst[kept], n))
            widths = [c.width * (1 + c.backward) for i, c in enumerate(crossing) if limits[i + 1] == limit]
            weights.append(sum(widths) * shape.itemsize / machine.bandwidth)
        if only_rows:
            weights = [1.0] * len(used)
        elif evaluated is not None:
            weights[0] += evaluated[1]
        return cls(
            parts=parts,
            num_nodes=n,
            in_degree=np.bincount(graph.dst, minlength=n),
            shape=shape,
            machine=replace(machine, overhead=0.0),  # which is the same whatever the parts
            tolerance=tolerance,
            layer0=layer0,
            layer_edges=tuple(used.index(limits[i + 1]) if cross.width else None for i, cross in enumerate(crossing)),
            edges=tuple(edges),
            kept=tuple(None if limit is None or reach is None else reach <= limit for limit in limits),
            weights=tuple(weights),
            only_rows=only_rows,
            evaluated=evaluated,
        )

    @property
    def covers(self) -> bool:
        """Whether layers send minimum covers; else halo rows."""
        return self.shape.model != "gat" and self.shape.plan == "cover"

    def __call__(self, part: NDArray[np.int32]) -> Evaluation:
        """Cost of ``part`` [N]."""
        parts = self.parts
        cuts = tuple(edges.cut(part, parts) for edges in self.edges)
        halo = [c.halo + c.halo_of_reversed if e.symmetric else c.halo for c, e in zip(cuts, self.edges, strict=True)]
        cover = [c.cover + c.cover.T if e.symmetric else c.cover for c, e in zip(cuts, self.edges, strict=True)]
        nothing = np.zeros((parts, parts), np.int64)
        count = functools.cache(lambda i: self._by_part(part, i))
        layers = tuple(
            LayerCounts(
                inputs=count(i)[0],
                rows=count(i + 1)[0],
                edges=count(i + 1)[1],
                halo=nothing if at is None else halo[at],
                cover=nothing if at is None else cover[at],
            )
            for i, at in enumerate(self.layer_edges)
        )
        step = step_cost(layers, self.shape, self.machine, layer0=self.layer0)
        even = step.compute.mean(axis=1, keepdims=True) * (1 + self.tolerance)
        part_seconds = np.maximum(step.compute, even) + step.exchange
        cost = float((part_seconds.max(axis=1) + part_seconds.mean(axis=1)).sum()) / 2
        sent = cover if self.covers else halo
        traffic = sum(w * float(r.sum()) / self.parts for w, r in zip(self.weights, sent, strict=True))
        if self.evaluated is not None:
            at, a_row = self.evaluated
            cost += a_row * _shared(sent[at])
        rows = sum((self.shape.rows_sent(layer) for layer in layers), nothing)
        if self.only_rows:
            traffic = cost = float(sent[0].sum())
        return Evaluation(traffic, cost, step, layers, cuts, rows)

    def _by_part(self, part: NDArray[np.int32], boundary: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """([P] nodes that have rows at a boundary, [P] their in-edges)."""
        kept = self.kept[boundary]
        owner, degree = (part, self.in_degree) if kept is None else (part[kept], self.in_degree[kept])
        edges = np.bincount(owner, degree, self.parts).astype(np.int64)
        return np.bincount(owner, minlength=self.parts), edges

    def halo_rows(self, part: NDArray[np.int32]) -> int:
        """Rows of one halo exchange of all nodes; 0 where no layer sends any."""
        if not self.edges:
            return 0
        whole = self.edges[0]
        cut = whole.cut(part, self.parts)
        return int((cut.halo + cut.halo_of_reversed if whole.symmetric else cut.halo).sum())

    def compute_load(self) -> NDArray[np.float64]:
        """[N] seconds that owning a node adds to its part's compute in a step."""
        load = np.zeros(self.num_nodes)
        for layer in range(self.shape.layers):
            taken, given = (self.kept[layer + i] for i in (0, 1))
            load[slice(None) if taken is None else taken] += self._compute(layer, inputs=1)
            load[slice(None) if given is None else given] += self._compute(layer, rows=1)
            load += self._compute(layer, edges=1) * (self.in_degree if given is None else given * self.in_degree)
        return load

    def _compute(self, layer: int, *, inputs: int = 0, rows: int = 0, edges: int = 0) -> float:
        """Seconds of one part's compute that these counts of a layer add; all are linear in them."""

        def counts(*of: int) -> LayerCounts:
            zero = np.zeros((1, 1), np.int64)
            taken, given, read = (np.array([count]) for count in of)
            return LayerCounts(inputs=taken, rows=given, edges=read, halo=zero, cover=zero)

        layers = [counts(*((inputs, rows, edges) if i == layer else (0, 0, 0))) for i in range(self.shape.layers)]
        return float(step_cost(layers, self.shape, self.machine, layer0=self.layer0).compute.sum())


def model_shape(graph: Graph, *, model: Any, layers: int, hidden: int) -> ModelShape:
    """The shape of a model on a graph's own features and labels."""
    outputs = UNKNOWN_OUTPUTS
    if graph.y is not None:
        several = graph.y.ndim == 2
        outputs = graph.y.shape[1] if several else int(graph.y.max()) + 1 if graph.task == "single-label" else 1
    features = hidden if graph.x is None else int(graph.x.shape[1])
    return ModelShape(
        model=model,
        features=graph.learned_features or features,
        outputs=max(1, int(outputs)),
        hidden=hidden,
        layers=layers,
        learned_input=graph.learned_features > 0,
    )


def _distinct(graph: Graph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Edges in order of (source, destination), without loops and duplicates."""
    key = entry_keys(graph.src, graph.dst, graph.num_nodes)
    key = np.unique(key[graph.src != graph.dst])
    return key // graph.num_nodes, key % graph.num_nodes


def _edges(src: NDArray[np.int64], dst: NDArray[np.int64], n: int) -> Edges:
    back = np.sort(dst * np.int64(n) + src)
    return Edges(src, dst, bool(np.array_equal(back, src * np.int64(n) + dst)))


def _shared(rows: NDArray[np.int64]) -> float:
    """(Most + mean) / 2 of the rows [P, P] that parts send or receive, whichever are more."""
    most = np.maximum(rows.sum(axis=0), rows.sum(axis=1))
    return float(most.max() + most.mean()) / 2
