"""Bytes and seconds predicted from counts: plain arithmetic that offline reports and the runtime share.

A training step sends, in each layer, its message rows forward and, where their gradient is wanted, the same rows
back. What a row is wide is the narrower side of the layer's linear map.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
    elements: float = 2.5e8
    """Numbers that dropout and activations, or a softmax over edges, go through."""
    overhead: float = 2e-3
    """Seconds that a layer takes, forward and backward, however few its rows are."""

    def __post_init__(self) -> None:
        for name in ("flops", "gather", "bandwidth", "elements"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name} {getattr(self, name)}: expected a number above 0")
        for name in ("latency", "overhead"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name} {getattr(self, name)}: expected 0 seconds or more")


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
