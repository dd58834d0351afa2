"""Bytes and seconds predicted from counts: plain arithmetic that offline reports and the runtime share.

A training step sends, in each layer, its message rows forward and, where their gradient is wanted, the same rows
back. What a row is wide is the narrower side of the layer's linear map.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from fullgraph.config import TrainConfig

Tag = tuple[int, str]
"""(layer, "forward" or "backward")"""
Ledger = dict[Tag, list[int]]
"""Bytes that a rank sends to each rank."""
ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a rank can do a second. The defaults are one core of a 2-core virtual machine and gloo on loopback."""

    flops: float = 55e9
    """Floating-point operations of a float32 matrix product."""
    gather: float = 8e9
    """Bytes of rows that the sparse kernel reads."""
    bandwidth: float = 0.6e9
    """Bytes sent."""
    latency: float = 5e-4
    """Seconds that an exchange takes at least."""

    def __post_init__(self) -> None:
        for name in ("flops", "gather", "bandwidth"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name} {getattr(self, name)}: expected a number above 0")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"--latency {self.latency}: expected 0 seconds or more")


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What crosses between ranks in one layer of a training step."""

    width: int
    """Columns of a message row; 0 where nothing crosses."""
    backward: bool
    """Whether rows' gradients cross back."""


def crossings(
    model: str,
    widths: Sequence[int],
    *,
    heads: int = 1,
    out_heads: int = 1,
    layer0: str,
    sparse_input: bool,
    learned_input: bool = False,
) -> tuple[Crossing, ...]:
    """For each layer of a stack with ``widths`` (features, hidden widths, outputs).

    Layer 0 sends nothing where its input is aggregated ``once`` or its halo rows are ``keep``; where it aggregates
    before its linear map no gradient crosses, for the features need none unless they are learned.
    """
    last = len(widths) - 2
    out = []
    for layer, (d_in, d_out) in enumerate(itertools.pairwise(widths)):
        if layer == 0 and layer0 != "exchange" and not sparse_input:
            out.append(Crossing(width=0, backward=False))
        elif model == "gat":
            out.append(Crossing(width=d_out * out_heads if layer == last else d_out, backward=True))
        else:
            map_first = d_out <= d_in or (layer == 0 and sparse_input)
            out.append(Crossing(width=d_out if map_first else d_in, backward=layer > 0 or map_first or learned_input))
    return tuple(out)


def layer_ledger(layer: int, crossing: Crossing, sent: Sequence[int], received: Sequence[int], itemsize: int) -> Ledger:
    """Bytes that one layer sends to each rank in a step, given the rows it sends to and receives from each."""
    if not crossing.width or len(sent) == 1:
        return {}
    row = crossing.width * itemsize
    ledger: Ledger = {(layer, "forward"): [count * row for count in sent]}
    if crossing.backward:
        ledger[layer, "backward"] = [count * row for count in received]
    return ledger


def row_bytes(codec: str, width: int, itemsize: int) -> int:
    """Bytes of a message row of ``width`` numbers on its way: int8 adds a float32 scale."""
    return {"float32": width * itemsize, "bfloat16": 2 * width, "int8": 4 + width}[codec]


def rows_drawn(count: int, share: float) -> int:
    """Message rows of a pair of ranks that cross when a share of its ``count`` is drawn: at least one, where it has
    any."""
    return math.ceil(count * share - 1e-9)


Layer0 = Literal["once", "keep", "exchange"]


@dataclass(frozen=True, kw_only=True)
class InputShape:
    """What decides how layer 0 gets its rows: counts of one rank, or the largest over ranks."""

    rows: int
    """Rows computed."""
    halo: int
    """Halo rows."""
    messages: int
    """Message rows of an exchange."""
    edges: int
    features: int
    hidden: int
    itemsize: int = 4


def layer0_seconds(shape: InputShape, *, attention: bool, dropped: bool, machine: Machine) -> dict[Layer0, float]:
    """Predicted seconds a step of each way that serves: ``once`` needs undropped features and a linear layer."""
    rows = shape.rows
    map_first = attention or shape.hidden <= shape.features
    width = shape.hidden if map_first else shape.features

    def product(count: int) -> float:
        return 4.0 * count * shape.features * shape.hidden / machine.flops  # forward and the weights' gradient

    sparse = shape.edges * width * shape.itemsize * (2 if map_first else 1) / machine.gather
    travel = shape.messages * width * shape.itemsize * (2 if map_first else 1) / machine.bandwidth + machine.latency
    out: dict[Layer0, float] = {"exchange": product(rows) + sparse + (travel if shape.messages else 0.0)}
    out["keep"] = product(rows + shape.halo if map_first else rows) + sparse
    if not attention and not dropped:
        out["once"] = product(rows)
    return out


def layer0_bytes(shape: InputShape) -> dict[Layer0, int]:
    """Memory that each way holds over the run."""
    row = shape.features * shape.itemsize
    return {"exchange": 0, "keep": (shape.rows + shape.halo) * row, "once": shape.rows * row}


# ------------------------------------------------------------------------------------------------------------- memory


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


_GRAPH_EDGE, _GRAPH_NODE, _GRAPH_HALO = 16, 32, 24
"""Bytes of a rank's structure: int64 ids of an edge and its source; order, position, id and offset of a node; id, owner
and index of a halo node."""
_TRAINED_EDGE = {"gcn": 44, "sage": 36, "gin": 20, "gat": 40}
"""Bytes an edge of a plan's matrices: pattern, rows, scales, and the transpose with its order."""
_EVALUATED_EDGE = {"gcn": 20, "sage": 12, "gin": 4, "gat": 28}
"""The same without the transpose."""
_TRAINED_ROW = {"gcn": 52, "sage": 16, "gin": 12, "gat": 36}
"""Bytes a row of a plan's matrices: offsets, and for gcn and gat the loop that is added."""


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
    layer. ``working rows`` are the most that a layer needs for the time of its own work, forward or backward, beyond
    what is kept; ``exchange`` are the message rows on their way. The process itself (Python, torch) and what it needs
    while it loads (`loading_bytes`) are not in it. ``learned``: the features are a table that training learns.
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
    kept: dict[str, int] = {}
    peak = exchange = 0
    for layer, rows in enumerate(rank.layers):
        step = _layer(config, widths, layer, rows, size, "exchange" if sparse else layer0, sparse)
        peak = max(peak, sum(kept.values()) + step.forward)
        kept |= {f"layer {layer} {name}": value for name, value in step.kept.items()}
        peak = max(peak, sum(kept.values()) + step.backward)
        exchange = max(exchange, step.exchange)
    peak = max(peak, sum(kept.values()) + 4 * rank.train * outputs * size)
    every = RankRows.unpruned(
        owned=rank.owned,
        halo=rank.halo,
        edges=rank.edges,
        sent=rank.layers[0].sent,
        received=rank.layers[0].received,
        layers=config.layers,
    )
    for layer, rows in enumerate(every.layers):  # evaluation keeps nothing but the input of the layer at work
        step = _layer(config, widths, layer, rows, size, "exchange" if sparse else layer0, sparse)
        entered = rows.n_in * widths[layer] * size if layer else 0
        peak = max(peak, entered + step.forward + step.kept.get("attention", 0) + step.kept.get("aggregate", 0))
    held |= kept
    held["working rows"] = peak - sum(kept.values())
    held["exchange"] = min(exchange, 2 * config.exchange_bytes)
    return {name: value for name, value in held.items() if value}


@dataclass(frozen=True, kw_only=True)
class _LayerBytes:
    kept: dict[str, int]
    """For backward."""
    forward: int
    """At work beyond what is kept, at most."""
    backward: int
    exchange: int


def _layer(
    config: TrainConfig, widths: Sequence[int], layer: int, rows: LayerRows, size: int, layer0: Layer0, sparse: bool
) -> _LayerBytes:
    """What `fullgraph.models` and `fullgraph.propagate` hold for one layer."""
    a, b, last = widths[layer], widths[layer + 1], layer == len(widths) - 2
    n_in, n_out, messages = rows.n_in * size, rows.n_out * size, (rows.sent + rows.received) * size
    first = layer == 0
    kept: dict[str, int] = {}
    if not first:
        kept["input"] = n_in * a
    elif config.input_dropout and not sparse:
        kept["input"] = (n_in + (rows.halo * size if layer0 == "keep" else 0)) * a
    needs_grad = not first  # the features' own gradient is not wanted
    if not last and config.norm != "none":
        kept["normalised"] = n_out * b
    if not last and layer and config.residual:
        kept["residual"] = n_out * b
    if config.model == "gat":
        return _attention_layer(config, kept, a, b, last, rows, size, first and layer0 == "keep", needs_grad)
    once = first and layer0 == "once" and not config.input_dropout
    here = first and layer0 == "keep"
    map_first = b <= a or (first and sparse)
    if config.model == "gin":
        kept["hidden rows"] = n_out * b
    outs = {"gcn": 2, "sage": 3, "gin": 4}[config.model] * n_out * b
    if once:
        return _LayerBytes(kept=kept, forward=outs, backward=2 * n_out * b, exchange=0)
    source = n_in + (rows.halo * size if here else 0)
    width = b if map_first else a
    exchange = 0 if here else messages * width
    if map_first:
        forward = max(source * b + n_out * b, outs)
        backward = n_out * b + source * b + (n_in * a if needs_grad else 0)
    else:
        kept["aggregate"] = n_out * a
        forward = outs
        backward = n_out * (a + b) + (n_in * a if needs_grad else 0)
    if config.model != "gcn" and needs_grad:  # a second path to the same input
        backward += n_out * a
    return _LayerBytes(kept=kept, forward=forward, backward=backward, exchange=exchange)


def _attention_layer(
    config: TrainConfig,
    kept: dict[str, int],
    a: int,
    b: int,
    last: bool,
    rows: LayerRows,
    size: int,
    here: bool,
    needs_grad: bool,
) -> _LayerBytes:
    heads = config.out_heads if last else config.heads
    w = b * heads if last else b
    entries = (rows.edges + rows.n_out) * heads
    known, n_in, n_out = (rows.n_in + rows.halo) * size, rows.n_in * size, rows.n_out * size
    wide = max(size, 4)  # what is formed for the edges is in float32 at least
    kept["attention"] = known * w + entries * (wide + 1 + bool(config.dropout))
    forward = n_out * w
    backward = n_out * w + known * w + entries * size
    if needs_grad:
        backward = max(backward, known * w + n_in * w + n_in * a)
    exchange = 0 if here else (rows.sent + rows.received) * w * size
    return _LayerBytes(kept=kept, forward=forward, backward=backward, exchange=exchange)


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
