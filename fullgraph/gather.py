"""Rows of all nodes on rank 0 in order of global id, in blocks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fullgraph.shards import Array
from fullgraph.world import World

_BLOCK_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class Block:
    """The rows of a run of global ids."""

    first: int
    """Its first global id."""
    own: slice
    """Which of this rank's nodes, in order of id, lie in it."""
    places: Array
    """[m] on rank 0: the place in the block of each row received, in order of rank; empty on others."""
    rows: Array
    """[m, D] on rank 0: the rows of the block; empty on others."""


def blocks_in_order(rows: Tensor, ids: Tensor, num_nodes: int, world: World) -> Iterator[Block]:
    """The blocks of all nodes' rows, of which this rank has ``rows`` [n, D] of the nodes ``ids`` [n] (a collective,
    and so is each step)."""
    order = torch.argsort(ids)
    rows, sorted_ids = rows.detach()[order].cpu(), ids[order].cpu().numpy()
    step = max(1, _BLOCK_BYTES // max(1, rows.shape[1] * rows.element_size()))
    for first in range(0, num_nodes, step):
        stop = min(first + step, num_nodes)
        a, b = (int(place) for place in np.searchsorted(sorted_ids, [first, stop]))
        counts = world.gather_vector([float(b - a)])[:, 0].to(torch.int64).tolist()
        sent = [b - a if rank == 0 else 0 for rank in range(world.size)]
        received = counts if world.rank == 0 else [0] * world.size
        places = world.exchange(torch.from_numpy(sorted_ids[a:b, None]), sent, received).wait()[:, 0].numpy() - first
        block = world.exchange(rows[a:b], sent, received).wait().numpy()
        if world.rank == 0:
            placed = np.empty_like(block)
            placed[places] = block
            block = placed
        yield Block(first, slice(a, b), places, block)


def gather_in_order(rows: Tensor, ids: Tensor, num_nodes: int, world: World) -> Tensor | None:
    """[N, D] on rank 0, None on others: every node's row, in order of global id (a collective)."""
    out = rows.new_empty(num_nodes, rows.shape[1], device="cpu", requires_grad=False) if world.rank == 0 else None
    for block in blocks_in_order(rows, ids, num_nodes, world):
        if out is not None:
            out[block.first : block.first + block.rows.shape[0]] = torch.from_numpy(block.rows)
    return out
