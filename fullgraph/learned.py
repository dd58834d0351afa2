"""Learned node features: a table with a row a node, of which each rank keeps and trains the rows of its own nodes.

A row's gradient comes to its owner through the exchanges of layer 0, whole, so it is not summed over ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fullgraph.dropout import MaskKey, uniform


def initial_table(ids: Tensor, width: int, seed: int, dtype: torch.dtype) -> nn.Parameter:
    """[n, width] first rows of the nodes with these global ids: uniform with mean 0 and variance 1, as standardised
    features have, from (seed, id, column) alone."""
    return nn.Parameter(((2 * uniform(ids, width, MaskKey(seed, -1, 0)) - 1) * math.sqrt(3)).to(dtype))
