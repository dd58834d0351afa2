"""The shard of a subgraph: some of the nodes, and the edges between them, cut out of a shard with the other ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from fullgraph.plan import halo_route
from fullgraph.reach import local_graph
from fullgraph.shards import Shard, local_id_dtype
from fullgraph.world import World


def induced_shard(shard: Shard, nodes: NDArray[np.bool_], world: World) -> Shard:
    """This rank's shard of the subgraph that ``nodes`` [n] of every rank induce (a collective).

    Degrees are those of the subgraph; nodes and edges keep their global ids, and the numbers of both in the whole graph
    stay, so that a dropout mask is that of the same node or edge.
    """
    n = shard.num_owned
    route = halo_route(local_graph(shard), world)

    def to_halo(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """[columns, h] what the owners of the halo nodes have in ``columns``, [n] each."""
        rows = torch.from_numpy(np.stack(columns, axis=1))[route.send.indices.cpu().to(torch.int64)]
        received: NDArray[np.int64] = world.exchange(rows, route.counts.sent, route.counts.received).wait().numpy()
        return received.T

    index = np.cumsum(nodes) - 1
    halo_nodes, halo_index = to_halo(nodes.astype(np.int64), index)
    row = np.repeat(np.arange(n), np.diff(shard.indptr))
    kept = nodes[row] & np.concatenate([nodes, halo_nodes.astype(np.bool_)])[shard.indices]
    row, source, edge_global = row[kept], shard.indices[kept], shard.edge_global[kept]
    weight = None if shard.edge_weight is None else shard.edge_weight[kept]

    in_degree = np.bincount(row, minlength=n)
    loop_count = np.bincount(row[row == source], minlength=n)
    if weight is None:
        in_weight = in_degree.astype(np.float64)
    else:  # added in order of edge id, as everywhere
        order = np.argsort(edge_global)
        in_weight = np.bincount(row[order], weight[order], minlength=n).astype(np.float64)
    degree, loops, weight_bits = to_halo(in_degree, loop_count, in_weight.view(np.int64))

    used = np.concatenate([nodes, np.zeros(shard.num_halo, np.bool_)])
    used[source] = True
    local, halo = np.cumsum(used) - 1, used[n:]
    return dataclasses.replace(
        shard,
        owned_global=shard.owned_global[nodes],
        halo_global=shard.halo_global[halo],
        halo_owner=shard.halo_owner[halo],
        halo_index=halo_index[halo],
        indptr=np.concatenate([[0], np.cumsum(in_degree[nodes])]),
        indices=local[source].astype(local_id_dtype(int(used.sum()))),
        edge_global=edge_global,
        edge_weight=weight,
        edge_x=None if shard.edge_x is None else shard.edge_x[kept],
        in_degree=np.concatenate([in_degree[nodes], degree[halo]]),
        in_weight=np.concatenate([in_weight[nodes], weight_bits[halo].view(np.float64)]),
        loop_count=np.concatenate([loop_count[nodes], loops[halo]]),
        x=None if shard.x is None else shard.x[nodes],
        y=None if shard.y is None else shard.y[nodes],
        train=shard.train[:, nodes],
        val=shard.val[:, nodes],
        test=shard.test[:, nodes],
        node_ids=None if shard.node_ids is None else shard.node_ids[nodes],
        cluster=None if shard.cluster is None else shard.cluster[nodes],
    )
