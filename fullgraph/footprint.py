"""Memory of a rank, predicted from counts: the one model behind estimates, reports and a run's refusal to start.

A step is gone through allocation by allocation, as ``fullgraph.models`` and the layers below it make them, so that the
most that lies in memory together is found, with the buffers that a step leaves to the next (``fullgraph.buffers``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from fullgraph.config import TrainConfig
from fullgraph.cost import ITEM_BYTES, Layer0

PROCESS_BYTES = 360 << 20
"""Memory of a rank's process beyond what is counted here: Python, torch, and the code that a step touches."""
_SMALLEST_BUFFER = 1 << 20
_MAPPED = 32 << 20
"""Bytes from which on glibc's malloc gives freed memory back to the system (M_MMAP_THRESHOLD, mallopt(3))."""
_BLOCK_BYTES = 4 << 20
"""Of the rows that a layer's work goes over at a time."""


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """Counts of one layer of a rank's training step."""

    n_in: int
    """Rows in."""
    n_out: int
    """Rows out."""
    edges: int
    """In-edges of the rows out, cut ones included."""
    halo: int
    """Halo nodes among their sources."""
    sent: int
    """Message rows to other ranks."""
    received: int


@dataclass(frozen=True, kw_only=True)
class RankRows:
    """Counts of one rank that its memory hangs on."""

    owned: int
    halo: int
    edges: int
    """In-edges of owned nodes."""
    layers: tuple[LayerRows, ...]
    """In training, pruned or not."""
    train: int = 0
    """Training nodes."""
    stored_features: int | None = None
    """Values of sparse features; None where they are dense."""
    weighted: bool = False
    edge_features: int = 0

    @classmethod
    def unpruned(cls, *, owned: int, halo: int, edges: int, sent: int, received: int, layers: int, **rest: Any) -> Self:
        """The counts where every layer computes every node."""
        layer = LayerRows(n_in=owned, n_out=owned, edges=edges, halo=halo, sent=sent, received=received)
        return cls(owned=owned, halo=halo, edges=edges, layers=(layer,) * layers, **rest)


def recomputed_layers(config: TrainConfig, widths: Sequence[int], *, layer0: str, sparse: bool) -> frozenset[int]:
    """The layers of a stack that ``--recompute`` computes again in backward: hidden ones that would keep more than
    their input. What the last layer keeps, backward needs at once."""
    found = set()
    for layer in range(config.layers - 1 if config.recompute else 0):
        widens = widths[layer + 1] > widths[layer] and not (layer == 0 and (sparse or layer0 == "once"))
        adds = config.norm != "none" or (config.residual and layer > 0)
        if config.model in ("gat", "gin") or adds or widens:
            found.add(layer)
    return frozenset(found)


_GRAPH_EDGE, _GRAPH_NODE, _GRAPH_HALO = 16, 32, 24
"""Bytes of a rank's structure: int64 ids of an edge and its source; order, position, id and offset of a node; id, owner
and index of a halo node."""
_TRAINED_EDGE = {"gcn": 44, "sage": 36, "gin": 20, "gat": 40}
"""Bytes an edge of a plan's matrices: pattern, rows, scales, and the transpose with its order."""
_EVALUATED_EDGE = {"gcn": 20, "sage": 12, "gin": 4, "gat": 28}
"""The same without the transpose."""
_TRAINED_ROW = {"gcn": 52, "sage": 16, "gin": 12, "gat": 36}
"""Bytes a row of a plan's matrices: offsets, and for gcn and gat the loop that is added."""


def learnt_bytes(
    config: TrainConfig, *, features: int, outputs: int, edge_features: int = 0, table_rows: int = 0
) -> int:
    """Bytes of a model's weights, their gradients and the optimiser's state, and the same of a table of features that
    are learned: what is held however few nodes there are."""
    widths = [features] + [config.hidden] * (config.layers - 1) + [outputs]
    copies = 2 + (1 if config.optimizer == "sgd" else 2)
    numbers = _weights(config, widths, edge_features) + table_rows * features
    return copies * numbers * ITEM_BYTES[config.weight_dtype]


def memory_by_tensor(
    config: TrainConfig,
    rank: RankRows,
    *,
    features: int,
    outputs: int,
    layer0: Layer0 = "exchange",
    learned: bool = False,
) -> dict[str, int]:
    """Bytes that a rank holds at the peak of a training step or an evaluation, by tensor; their sum is that peak.

    For the layers of ``fullgraph.models``, as ``config`` asks for them. What autograd keeps for backward is named by
    layer. ``working rows`` are what layers need for the time of their own work, forward or backward, beyond what is
    kept, and buffers that wait for the next step; ``exchange`` are message rows on their way. The process itself
    (`PROCESS_BYTES`) and what it needs while it loads (`loading_bytes`) are not in it. ``learned``: the features are a
    table that training learns.
    """
    size, weight_size = ITEM_BYTES[config.dtype], ITEM_BYTES[config.weight_dtype]
    widths = [features] + [config.hidden] * (config.layers - 1) + [outputs]
    weights = _weights(config, widths, rank.edge_features) * weight_size
    sparse = rank.stored_features is not None
    table = rank.owned * features * weight_size if learned else 0
    states = 1 if config.optimizer == "sgd" else 2
    held: dict[str, int] = {
        "weights": weights,
        "gradients": 2 * weights + table,
        "optimiser state": states * (weights + table),
        "features": (
            rank.owned * features * size if rank.stored_features is None else rank.stored_features * (20 + size)
        ),
        "labels and masks": rank.owned * 11,
        "graph": _GRAPH_EDGE * rank.edges
        + _GRAPH_NODE * rank.owned
        + _GRAPH_HALO * rank.halo
        + rank.edges * (8 * rank.weighted + 2 * size * rank.edge_features),
        "matrices": _matrices(config.model, rank, size),
    }
    if layer0 != "exchange" and not sparse:
        count = rank.owned if layer0 == "once" else rank.layers[0].n_in + rank.layers[0].halo
        held["features aggregated" if layer0 == "once" else "features of halo nodes"] = count * features * size
    step = _Step(config, widths, rank, size, "exchange" if sparse else layer0, sparse, learned)
    step.train()
    step.evaluate()
    held |= step.kept
    held["exchange"] = step.exchange
    held["freed, kept by malloc"] = step.memory.scattered
    held["working rows"] = step.memory.peak - sum(step.kept.values()) - step.exchange
    return {name: value for name, value in held.items() if value}


class _Memory:
    """Allocations one after the other: those of `fullgraph.buffers`, which stay for good, and others."""

    def __init__(self) -> None:
        self.peak = 0
        self.scattered = 0
        """Most of what malloc's heap holds at a time: about as much again lies between it, freed and not given back."""
        self._heap = 0
        self._kept = 0
        self._free: list[int] = []
        self._other = 0

    def take(self, size: int, *, pooled: bool = True) -> tuple[int, bool]:
        """What `give` takes back."""
        if not pooled or size < _SMALLEST_BUFFER:
            self._other += size
            self._heap += size if size < _MAPPED else 0
            self.scattered = max(self.scattered, self._heap)
            self.peak = max(self.peak, self._kept + self._other)
            return size, False
        fitting = [kept for kept in self._free if size <= kept <= 2 * size]
        if fitting:
            size = min(fitting)
            self._free.remove(size)
        else:
            self._kept += size
            self.peak = max(self.peak, self._kept + self._other)
        return size, True

    def give(self, *taken: tuple[int, bool]) -> None:
        for size, pooled in taken:
            if pooled:
                self._free.append(size)
            else:
                self._other -= size
                self._heap -= size if size < _MAPPED else 0

    def touch(self, size: int) -> None:
        """Something that is needed for a moment."""
        self.give(self.take(size, pooled=False))


@dataclass
class _Step:
    """One training step, then an evaluation, as `fullgraph.models` and the layers below it go through memory."""

    config: TrainConfig
    widths: Sequence[int]
    rank: RankRows
    size: int
    layer0: Layer0
    sparse: bool
    learned: bool
    memory: _Memory = field(default_factory=_Memory)
    kept: dict[str, int] = field(default_factory=dict)
    exchange: int = 0

    def train(self) -> None:
        again = recomputed_layers(self.config, self.widths, layer0=self.layer0, sparse=self.sparse)
        for _ in range(2):  # the second finds the buffers of the first
            self.kept.clear()
            layers: list[_Layer] = []
            entering: Taken | None = None
            for number, rows in enumerate(self.rank.layers):
                layer = self._layer(number, rows, training=True)
                entering = layer.forward(entering)
                if number in again:
                    layer.shed()
                layers.append(layer)
            loss = self.memory.take(4 * self.rank.train * self.widths[-1] * self.size, pooled=False)
            assert entering is not None
            self.memory.give(loss, entering)
            grad = self.memory.take(self.rank.layers[-1].n_out * self.widths[-1] * self.size, pooled=False)
            for layer in reversed(layers):
                if layer.number in again:
                    layer.compute_again()
                grad = layer.backward(grad)
            self.memory.give(grad)

    def evaluate(self) -> None:
        """Keeps nothing but the input of the layer at work."""
        rank = self.rank
        first = rank.layers[0]
        every = RankRows.unpruned(
            owned=rank.owned,
            halo=rank.halo,
            edges=rank.edges,
            sent=first.sent,
            received=first.received,
            layers=len(rank.layers),
        )
        entering: Taken | None = None
        for number, rows in enumerate(every.layers):
            layer = self._layer(number, rows, training=False)
            out = layer.forward(entering)
            layer.forget()
            entering = out
        assert entering is not None
        self.memory.touch(4 * rank.owned * self.widths[-1] * self.size)
        self.memory.give(entering)

    def _layer(self, number: int, rows: LayerRows, *, training: bool) -> _Layer:
        kind = _AttentionLayer if self.config.model == "gat" else _LinearLayer
        return kind(self, number, rows, training)


Taken = tuple[int, bool]


class _Layer:
    """What a layer takes and gives back, forward and backward."""

    def __init__(self, step: _Step, number: int, rows: LayerRows, training: bool) -> None:
        self.step, self.number, self.training, self.rows = step, number, training, rows
        self.config, self.memory = step.config, step.memory
        self.last, self.first = number == len(step.widths) - 2, number == 0
        self.a, self.b = step.widths[number], step.widths[number + 1]
        self.dropped = training and bool(self.config.input_dropout if self.first else self.config.dropout)
        self.stays: list[Taken] = []
        self.entered = False
        self.here = here = self.first and step.layer0 == "keep"
        self.once = self.first and step.layer0 == "once" and not (training and self.config.input_dropout)
        self.messages = 0 if here or self.once else rows.sent + rows.received
        self.sources = rows.n_in + (rows.halo if here and (training or rows.n_out == rows.n_in) else 0)

    def forward(self, entering: Taken | None) -> Taken:
        raise NotImplementedError

    def backward(self, grad: Taken) -> Taken:
        raise NotImplementedError

    @property
    def wants_gradient(self) -> bool:
        """Of its input."""
        return not self.first or self.step.learned

    def rows_of(self, count: int, width: int, *, pooled: bool = True) -> Taken:
        return self.memory.take(count * width * self.step.size, pooled=pooled)

    def work(self, times: int) -> None:
        """Blocks of rows that are at work together."""
        whole = self.rows.n_in * max(self.a, self.b) * self.step.size
        self.memory.touch(times * min(_BLOCK_BYTES, whole))

    def keep(self, name: str, taken: Taken) -> Taken:
        """For backward; in evaluation, until the layer's work is done."""
        self.stays.append(taken)
        if self.training:
            name = f"layer {self.number} {name}"
            self.step.kept[name] = self.step.kept.get(name, 0) + taken[0]
        return taken

    def shed(self) -> None:
        """Keep the input alone."""
        prefix, kept = f"layer {self.number} ", self.step.kept
        inputs = 1 if prefix + "input" in kept else 0  # which comes first
        self.memory.give(*self.stays[inputs:])
        del self.stays[inputs:]
        for name in [name for name in kept if name.startswith(prefix) and name != prefix + "input"]:
            del kept[name]

    def compute_again(self) -> None:
        """What was shed, for the time of the layer's backward."""
        kept, self.entered = dict(self.step.kept), True
        self.stays.append(self.forward(None))
        self.step.kept.clear()
        self.step.kept |= kept

    def forget(self) -> None:
        self.memory.give(*self.stays)
        self.stays.clear()

    def send(self, width: int, *, back: bool = False) -> None:
        """Message rows of this width, whose sending is seen to while others are looked at."""
        size = self.step.size
        sent, received = self.rows.sent, self.rows.received
        if back:
            sent, received = received, sent
        most = max(sent, received) * width * size
        blocks = max(1, -(-most // self.config.exchange_bytes))
        out = self.memory.take(sent * width * size // blocks, pooled=False)
        into = self.memory.take(received * width * size // blocks)
        self.step.exchange = max(self.step.exchange, out[0] + into[0])
        self.memory.give(out)
        self.memory.touch(2 * received * width * size // blocks)  # their products, and the rows that these are added to
        self.memory.give(into)

    def after(self, y: Taken) -> Taken:
        """Norm, activation, residual and dropout of a hidden layer's rows."""
        config, rows = self.config, self.rows.n_out
        if self.last:
            return y
        residual = config.residual and not self.first
        if config.norm != "none":
            normed = self.rows_of(rows, self.b, pooled=False)
            if config.norm == "batch":
                self.memory.touch(2 * rows * self.b * self.step.size)
            self.keep("normalised", y if config.norm == "layer" else self.rows_of(rows, self.b, pooled=False))
            if config.norm == "batch":
                self.memory.give(y)
            y = normed
        if not residual:
            return y
        active = self.rows_of(rows, self.b, pooled=False)
        self.memory.give(y)
        self.keep("residual", active)
        total = self.rows_of(rows, self.b, pooled=False)
        if not config.dropout or not self.training:
            return total
        y = self.rows_of(rows, self.b)
        self.memory.give(total)
        return y

    def before(self, grad: Taken) -> Taken:
        """The way back through the same."""
        if not self.last and (self.config.norm != "none" or (self.config.residual and not self.first)):
            other = self.rows_of(self.rows.n_out, self.b, pooled=False)
            self.memory.touch((3 if self.config.norm == "batch" else 1) * self.rows.n_out * self.b * self.step.size)
            self.memory.give(grad)
            grad = other
        return grad

    def enter(self, entering: Taken | None) -> None:
        """The layer's input, which its linear map keeps."""
        if self.entered:
            return
        if entering is not None:
            self.keep("input", entering)
        elif self.dropped and not self.step.sparse:
            self.keep("input", self.rows_of(self.sources, self.a))


class _LinearLayer(_Layer):
    """GCN, SAGE and GIN."""

    @property
    def map_first(self) -> bool:
        return self.b <= self.a or (self.first and self.step.sparse)

    @property
    def waits(self) -> bool:
        """Whether all rows are mapped before any is aggregated: where neighbours' rows are here, it goes by blocks."""
        return not self.here or self.b != self.a

    def forward(self, entering: Taken | None) -> Taken:
        self.enter(entering)
        n_out = self.rows.n_out
        if self.once:
            y = self.rows_of(n_out, self.b)
        elif self.map_first:
            y = self.rows_of(n_out, self.b)
            if self.waits:
                z = self.rows_of(self.sources, self.b)
                if self.messages:
                    self.send(self.b)
                self.memory.give(z)
            self.work(1)
        else:
            if self.messages:
                self.send(self.a)
            self.keep("aggregate", self.rows_of(n_out, self.a, pooled=False))
            y = self.rows_of(n_out, self.b)
        if self.config.model == "gin":
            self.keep("hidden rows", y)
            y = self.rows_of(n_out, self.b)
        return self.after(y)

    def backward(self, grad: Taken) -> Taken:
        n_in, n_out = self.rows.n_in, self.rows.n_out
        grad = self.before(grad)
        if self.config.model == "gin":
            inner = self.rows_of(n_out, self.b)
            self.memory.give(grad)
            grad = inner
        if self.once:
            self.memory.give(grad)
            self.forget()
            return self.memory.take(0)
        if self.map_first:
            out = self.rows_of(n_in, self.a) if self.wants_gradient else self.memory.take(0)
            if not self.here:
                back = self.rows_of(self.rows.received, self.b, pooled=False)
                self.send(self.b, back=True)
                dz = self.rows_of(n_in, self.b)
                self.memory.give(back, dz)
            self.work(3)
        else:
            aggregated = self.rows_of(n_out, self.a)
            own = self.rows_of(n_out, self.a) if self.config.model != "gcn" and self.wants_gradient else None
            out = self.memory.take(0)
            if self.wants_gradient:
                if self.messages:
                    self.send(self.a, back=True)
                out = self.rows_of(n_in, self.a, pooled=False)
                if own is not None:
                    self.memory.touch(n_in * self.a * self.step.size)
                derived = self.rows_of(n_in, self.a, pooled=False)
                self.memory.give(out)
                out = derived
            self.memory.give(aggregated, *([] if own is None else [own]))
        self.memory.give(grad)
        self.forget()
        return out


class _AttentionLayer(_Layer):
    """GAT."""

    @property
    def heads(self) -> int:
        return self.config.out_heads if self.last else self.config.heads

    @property
    def width(self) -> int:
        return self.b * self.config.out_heads if self.last else self.b

    @property
    def entries(self) -> int:
        """Edges, the loops that are added among them, times heads."""
        return (self.rows.edges + self.rows.n_out) * self.heads

    def forward(self, entering: Taken | None) -> Taken:
        self.enter(entering)
        rows, size, width = self.rows, self.step.size, self.width
        known = rows.n_in + rows.halo
        self.keep("attention", self.rows_of(known, width))
        if self.messages:
            self.send(width)
        if self.dropped_edges:
            self.keep("attention", self.memory.take(self.entries, pooled=False))
        self.keep("attention", self.memory.take(self.entries * max(size, 4)))
        self.keep("attention", self.memory.take(self.entries))
        y = self.rows_of(rows.n_out, width)
        self.work(4)
        if self.last:
            mean = self.rows_of(rows.n_out, self.b, pooled=False)
            self.memory.touch(mean[0])
            self.memory.give(y)
            return mean
        return self.after(y)

    @property
    def dropped_edges(self) -> bool:
        return self.training and bool(self.config.dropout)

    def backward(self, grad: Taken) -> Taken:
        rows, width = self.rows, self.width
        known = rows.n_in + rows.halo
        if not self.last:
            active = self.rows_of(rows.n_out, width)
            self.memory.give(grad)
            grad = self.before(active)
        logits = self.memory.take(self.entries * max(self.step.size, 4))
        dz = self.rows_of(known, width)
        self.work(4)
        self.memory.give(logits, grad)
        out = self.memory.take(0)
        if not self.here:
            owned = self.rows_of(rows.n_in, width)
            self.send(width, back=True)
            if self.wants_gradient:
                out = self.rows_of(rows.n_in, self.a)
            self.memory.give(owned)
        self.memory.give(dz)
        self.forget()
        return out


def _weights(config: TrainConfig, widths: Sequence[int], edge_features: int) -> int:
    """Parameters of the stack."""
    total = 0
    for layer, (a, b) in enumerate(itertools.pairwise(widths)):
        last = layer == len(widths) - 2
        if config.model == "gat":
            w = b * config.out_heads if last else b
            total += w * (a + 2 + (edge_features + 1 if edge_features else 0)) + b
        else:
            total += {"gcn": a * b, "sage": 2 * a * b, "gin": (a + b + 1) * b}[config.model] + b
        if not last:
            total += {"none": 0, "layer": 2 * b, "batch": b}[config.norm]
    return total


def _matrices(model: str, rank: RankRows, size: int) -> int:
    """Matrices of the distinct plans: those of training, and that of evaluation where it is not among them."""
    total = 0
    for rows in set(rank.layers):
        total += rows.edges * (_TRAINED_EDGE[model] + 2 * size * rank.weighted) + rows.n_out * _TRAINED_ROW[model]
        total += 24 * (rows.sent + rows.received)
    if all(rows.n_in < rank.owned or rows.n_out < rank.owned for rows in rank.layers):
        total += rank.edges * (_EVALUATED_EDGE[model] + size * rank.weighted) + rank.owned * _TRAINED_ROW[model] // 2
    return total


def loading_bytes(rank: RankRows, held: dict[str, int], shard: int) -> int:
    """Bytes at the peak of loading and planning, given `memory_by_tensor` and the bytes of the shard's file: the shard,
    what stays of it, and the temporary arrays that plans are made with."""
    stays = sum(held.get(name, 0) for name in ("features", "labels and masks", "graph", "matrices"))
    return shard + stays + 48 * rank.edges
