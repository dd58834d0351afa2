"""Seconds and bytes of a training step, predicted for a stated model and machine from counts of a partitioning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fullgraph.cost import (
    Crossing,
    InputShape,
    Layer0,
    Machine,
    crossings,
    layer0_seconds,
)
from fullgraph.cut import LayerCounts
from fullgraph.footprint import LayerRows, RankRows

_ACTIVATION, _LOSS, _ATTENTION = 2, 3, 35
"""Passes over the rows of a hidden layer, over the outputs, and over the logits of edges, forward and backward, in
units of one dropout with its derivative, as measured beside the probe."""
_NORM = {"none": 0, "layer": 3, "batch": 6}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model as far as its cost goes."""

    model: Literal["gcn", "sage", "gin", "gat"] = "sage"
    features: int
    outputs: int
    hidden: int = 128
    layers: int = 2
    heads: int = 1
    """Of attention, in hidden layers."""
    norm: Literal["none", "layer", "batch"] = "none"
    out_heads: int = 1
    dropped_input: bool = False
    """Whether the features are under dropout."""
    sparse_input: bool = False
    """Whether the features are stored as CSR."""
    learned_input: bool = False
    plan: Literal["cover", "halo"] = "cover"
    """What linear layers send; attention sends halo rows."""
    layer0: Layer0 | None = None
    """How layer 0 gets its rows; by default as should cost least."""
    itemsize: int = 4

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.features, *(self.hidden,) * (self.layers - 1), self.outputs)

    def rows_sent(self, count: LayerCounts) -> NDArray[np.int64]:
        """[P, P] of a layer."""
        return count.halo if self.model == "gat" or self.plan == "halo" else count.cover


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCost:
    """A training step as predicted."""

    layer0: Layer0
    compute: NDArray[np.float64]
    """[L, P] seconds, forward and backward."""
    exchange: NDArray[np.float64]
    """[L, P] seconds."""
    bytes_sent: NDArray[np.int64]
    """[P, P] bytes that p (axis 0) sends q (axis 1)."""
    crossings: tuple[Crossing, ...]
    """[L] what crosses in each layer."""

    @property
    def seconds(self) -> float:
        """All parts wait for each other in every layer, so the slowest counts."""
        return float((self.compute + self.exchange).max(axis=1).sum())


def rank_rows(counts: Sequence[LayerCounts], shape: ModelShape, whole: LayerCounts, part: int, **rest: Any) -> RankRows:
    """Counts of the rank of one part; ``whole`` are those of a layer that is not pruned, ``rest`` further fields."""
    sent = [shape.rows_sent(count) for count in counts]
    return RankRows(
        owned=int(whole.rows[part]),
        halo=int(whole.halo[:, part].sum()),
        edges=int(whole.edges[part]),
        layers=tuple(
            LayerRows(
                n_in=int(count.inputs[part]),
                n_out=int(count.rows[part]),
                edges=int(count.edges[part]),
                halo=int(count.halo[:, part].sum()),
                sent=int(rows[part].sum()),
                received=int(rows[:, part].sum()),
            )
            for count, rows in zip(counts, sent, strict=True)
        ),
        **rest,
    )


def step_cost(
    counts: Sequence[LayerCounts],
    shape: ModelShape,
    machine: Machine,
    *,
    whole: LayerCounts | None = None,
    layer0: Layer0 | None = None,
) -> StepCost:
    """Cost of a training step given `fullgraph.cut.layer_counts` of the partitioning.

    ``layer0`` is how layer 0 gets its rows; by default as the trainer chooses, which goes by ``whole``, the counts of a
    layer that is not pruned (by default those of layer 0).

    Compute is the matrix products at ``machine.flops``, the rows that the sparse kernel reads at ``machine.gather``,
    what dropout, activations and the softmax of attention go through at ``machine.elements``, and ``machine.overhead``
    a layer; an exchange takes the longer of a part's bytes out and in at ``machine.bandwidth``, and the latency.
    Nothing is taken to overlap.
    """
    widths, parts, itemsize = shape.widths, counts[0].rows.shape[0], shape.itemsize
    assert len(counts) == shape.layers
    attention = shape.model == "gat"
    rows = [shape.rows_sent(count) for count in counts]
    layer0 = layer0 or _layer0(counts[0], shape.rows_sent(whole or counts[0]), shape, machine)
    crossing = crossings(
        shape.model,
        widths,
        out_heads=shape.out_heads,
        layer0=layer0,
        sparse_input=shape.sparse_input,
        learned_input=shape.learned_input,
    )
    compute, exchange = np.zeros((shape.layers, parts)), np.zeros((shape.layers, parts))
    bytes_sent = np.zeros((parts, parts), np.int64)
    for layer, (count, cross) in enumerate(zip(counts, crossing, strict=True)):
        d_in, d_out = widths[layer], widths[layer + 1] * (shape.out_heads if layer == shape.layers - 1 else 1)
        # The gradient of the input is not wanted in layer 0, unless that is learned.
        passes = 2 if layer == 0 and not shape.learned_input else 3
        map_first = attention or d_out <= d_in or (layer == 0 and shape.sparse_input)
        # gin's second map, and its and sage's map of the node itself, are on computed rows.
        second = {"gin": d_out * (d_in + d_out), "sage": d_in * d_out}.get(shape.model, 0)
        mapped = count.inputs if map_first else count.rows
        if attention and layer == 0 and layer0 == "keep":
            mapped = mapped + count.halo.sum(axis=0)
        compute[layer] = 2.0 * passes * (mapped * d_in * d_out + count.rows * second) / machine.flops
        if layer or layer0 != "once":
            aggregated = (2 if layer or map_first else 1) * min(d_in, d_out)
            if attention:  # the rows at both ends of an edge for its logit's gradient, besides
                aggregated = 3 * d_out
            compute[layer] += count.edges * float(aggregated * itemsize) / machine.gather
        compute[layer] += _elements(count, shape, layer, d_out) / machine.elements + machine.overhead
        if cross.width and parts > 1:
            forward = rows[layer] * (cross.width * itemsize)
            backward = forward.T if cross.backward else np.zeros_like(forward)
            bytes_sent += forward + backward
            for sent in (forward, backward):
                most = np.maximum(sent.sum(axis=1), sent.sum(axis=0))
                exchange[layer] += most / machine.bandwidth + machine.latency * bool(most.any())
    return StepCost(layer0=layer0, compute=compute, exchange=exchange, bytes_sent=bytes_sent, crossings=crossing)


def _elements(count: LayerCounts, shape: ModelShape, layer: int, width: int) -> NDArray[np.float64]:
    """[P] numbers of a layer that are gone through one by one, forward and backward."""
    last = layer == shape.layers - 1
    times = _LOSS if last else _ACTIVATION + _NORM[shape.norm]
    found: NDArray[np.float64] = count.rows * np.float64(times * width)
    if shape.model == "gat":
        heads = shape.out_heads if last else shape.heads
        found = found + (count.edges + count.rows) * np.float64(_ATTENTION * heads)
    return found


def _layer0(count: LayerCounts, rows: NDArray[np.int64], shape: ModelShape, machine: Machine) -> Layer0:
    """What is asked for, or what the trainer takes by default, granted the memory."""
    if shape.layer0 == "once" and (shape.dropped_input or shape.model == "gat"):
        return "exchange"  # as the trainer does: the aggregate of undropped features serves linear layers only
    if shape.layer0 is not None:
        return shape.layer0
    if shape.sparse_input or shape.learned_input:
        return "exchange"
    largest = InputShape(
        rows=int(count.rows.max()),
        halo=int(rows.sum(axis=0).max()),
        messages=int(max(rows.sum(axis=0).max(), rows.sum(axis=1).max())),
        edges=int(count.edges.max()),
        features=shape.features,
        hidden=shape.widths[1],
        itemsize=shape.itemsize,
    )
    seconds = layer0_seconds(largest, attention=shape.model == "gat", dropped=shape.dropped_input, machine=machine)
    return min(seconds, key=lambda mode: seconds[mode])
