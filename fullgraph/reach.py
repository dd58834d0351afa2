"""The order in which a rank keeps its nodes, and how many of them each layer needs.

In training, layer l of L (counted from 0) must produce rows only for nodes with a directed path of at most L - 1 - l
edges to a training node: its *reach* is that distance. Owned nodes are kept in order of reach, so that "needed at
layer l" is a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fullgraph.cut import whole_boundaries
from fullgraph.shards import Array, Shard
from fullgraph.world import World


@dataclass(frozen=True, eq=False)
class LocalGraph:
    """A shard's structure with its n owned nodes in the order of training: numpy arrays, h halo nodes, e edges."""

    order: NDArray[np.int64]
    """[n] index in the shard of each row."""
    position: NDArray[np.int64]
    """[n] row of each index in the shard, the inverse of ``order``."""
    owned_global: NDArray[np.int64]
    """[n]"""
    indptr: NDArray[np.int64]
    """[n + 1]"""
    indices: NDArray[np.int64]
    """[e] sources: rows below n, and n + index in the halo list."""
    edge_global: NDArray[np.int64]
    """[e]"""
    edge_weight: Array | None
    """[e]"""
    edge_x: Array | None
    """[e, K]"""
    halo_global: NDArray[np.int64]
    halo_owner: NDArray[np.int64]
    halo_index: NDArray[np.int64]
    """[h] index in the owner's shard."""
    num_edges_global: int
    num_nodes_global: int

    @property
    def n(self) -> int:
        return int(self.order.shape[0])


def local_graph(shard: Shard, order: NDArray[np.int64] | None = None) -> LocalGraph:
    """The shard's structure with row i holding its owned node ``order[i]`` (as it stands by default)."""
    n = shard.num_owned
    order = np.arange(n) if order is None else order
    position = np.empty(n, np.int64)
    position[order] = np.arange(n)
    degrees = np.diff(shard.indptr)
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(degrees[order], out=indptr[1:])
    # Where each edge of the new order stands in the shard.
    taken = np.arange(shard.num_edges) + np.repeat(shard.indptr[:-1][order] - indptr[:-1], degrees[order])
    indices = shard.indices[taken].astype(np.int64)
    inside = indices < n
    indices[inside] = position[indices[inside]]
    return LocalGraph(
        order=order,
        position=position,
        owned_global=shard.owned_global[order],
        indptr=indptr,
        indices=indices,
        edge_global=shard.edge_global[taken],
        edge_weight=None if shard.edge_weight is None else shard.edge_weight[taken],
        edge_x=None if shard.edge_x is None else shard.edge_x[taken],
        halo_global=shard.halo_global,
        halo_owner=shard.halo_owner.astype(np.int64),
        halo_index=shard.halo_index,
        num_edges_global=shard.num_edges_global,
        num_nodes_global=shard.num_nodes_global,
    )


@dataclass(frozen=True)
class Counts:
    """Rows to and from each rank."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


def distances(
    graph: LocalGraph, train: NDArray[np.bool_], depth: int, send: NDArray[np.int64], counts: Counts, world: World
) -> NDArray[np.int64]:
    """[n] edges on the shortest directed path to a training node, ``depth + 1`` where it has more than ``depth``
    (a collective).

    ``train`` is [n]; ``send`` are the rows of the owned nodes that are halo nodes elsewhere, and ``counts`` how many
    of them go to and how many halo nodes come from each rank.
    """
    n = graph.n
    far = depth + 1
    reach = np.full(n + graph.halo_global.shape[0], far, np.int64)
    reach[:n][train] = 0
    rows = np.repeat(np.arange(n), np.diff(graph.indptr))
    for level in range(depth):
        source = graph.indices[reach[rows] == level]
        reach[source[reach[source] > level + 1]] = level + 1
        # Halo nodes found at this level are told to their owners.
        found = torch.from_numpy((reach[n:] == level + 1)[:, None])
        told = send[world.exchange(found, counts.received, counts.sent).wait()[:, 0].numpy()]
        reach[told[reach[told] > level + 1]] = level + 1
    return reach[:n]


def needed(
    reach: NDArray[np.int64], depth: int, whole_layers: int, world: World
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Rows that each layer takes and gives: ``depth + 1`` prefixes of this rank's nodes in order of reach, those of
    layer l's input at l and its output at l + 1; and whether they are all nodes of all ranks (a collective).

    The first ``whole_layers`` layers produce all nodes. So does every layer below one that is not pruned.
    """
    n = reach.shape[0]
    prefix = [int(np.count_nonzero(reach <= depth - layer)) for layer in range(depth + 1)]
    everything, *of_all = world.gather_vector([n, *prefix]).sum(0).tolist()
    whole = whole_boundaries(of_all, everything, whole_layers)
    return tuple(n if w else p for w, p in zip(whole, prefix, strict=True)), whole
