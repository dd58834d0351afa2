"""Who sends which rows to whom: plans made from a shard at start, agreed with every other rank, never changed.

The cut block of every ordered pair of ranks is factored ``A_qp = R_qp S_qp``. The receiver q decides and tells the
sender p its S as entries (message row, index of the source in p's owned list, global id of the source, value); p
checks every index against its own ids. In a *selecting* S each message row is one raw row: halo exchange.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fullgraph.kernels import SparseMatrix, from_coo, sparse_matrix
from fullgraph.shards import Shard
from fullgraph.world import World


@dataclass(frozen=True, eq=False)
class Route:
    """One exchange of message rows: what this rank sends, and how many rows go to and come from each rank."""

    send: SparseMatrix
    """S [rows sent, n_in], rows in order of destination rank."""
    select: Tensor | None
    """[rows sent] int64, where S merely selects rows; None where it sums some."""
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]

    @property
    def rows_sent(self) -> int:
        return sum(self.send_counts)

    @property
    def rows_received(self) -> int:
        return sum(self.recv_counts)


@dataclass(frozen=True, eq=False)
class LinearPlan:
    """One linear propagate, ``Y = A_local X + R all_to_all(S X)``."""

    local: SparseMatrix
    """[n_out, n_in] edges between owned nodes."""
    receive: SparseMatrix
    """R [n_out, rows received]."""
    route: Route

    @functools.cached_property
    def no_loop(self) -> Tensor:
        """bool [n_out]: owned nodes without a loop."""
        m = self.local
        loops = m.rows[m.rows == m.indices].to(torch.int64)
        out = torch.ones(m.shape[0], dtype=torch.bool, device=m.indices.device)
        out[loops] = False
        return out

    @functools.cached_property
    def with_loops(self) -> LinearPlan:
        """The same with a loop of weight 1 added to each owned node that has none."""
        m = self.local
        nodes = torch.nonzero(self.no_loop).squeeze(1).to(m.indices.dtype)
        rows = torch.cat([m.rows, nodes])
        cols = torch.cat([m.indices, nodes])
        order = torch.argsort(rows, stable=True)
        indptr = m.indptr.clone()
        indptr[1:] += torch.cumsum(self.no_loop, 0).to(indptr.dtype)
        values = None if m.values is None else torch.cat([m.values, m.values.new_ones(nodes.shape[0])])[order]
        local = SparseMatrix(m.shape, indptr, cols[order], values)
        return LinearPlan(local, self.receive, self.route)


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """Raw halo rows beside the owned ones, and the in-edges over ``[owned | halo]``."""

    edges: SparseMatrix
    """[n_out, n_in + h]; values are the edge weights, None where the graph has none."""
    edge_global: Tensor
    """int64 [e] global edge ids."""
    route: Route
    num_edges_global: int
    owned_global: Tensor
    """int64 [n_in] global ids of the owned nodes."""

    @functools.cached_property
    def one_loop(self) -> tuple[SparseMatrix, Tensor]:
        """(edges with loops replaced by one for each owned node, the [e'] global ids of its edges).

        The loop added to global node i carries the edge id E + i. Edge weights are kept, an added loop's is 1.
        """
        m = self.edges
        keep = m.rows != m.indices
        nodes = torch.arange(m.shape[0], dtype=m.indices.dtype, device=m.indices.device)
        rows = torch.cat([m.rows[keep], nodes])
        cols = torch.cat([m.indices[keep], nodes])
        order = torch.argsort(rows, stable=True)
        indptr = torch.zeros_like(m.indptr)
        torch.cumsum(torch.bincount(rows, minlength=m.shape[0]), 0, out=indptr[1:])
        values = None if m.values is None else torch.cat([m.values[keep], m.values.new_ones(nodes.shape[0])])[order]
        ids = torch.cat([self.edge_global[keep], self.num_edges_global + self.owned_global])[order]
        return SparseMatrix(m.shape, indptr, cols[order], values), ids


@dataclass(frozen=True, eq=False)
class Plan:
    """How one layer of this rank moves rows: ``n_in`` owned rows in, the first ``n_out`` of them out."""

    n_in: int
    n_out: int
    linear: LinearPlan
    halo: HaloPlan


def make_plan(shard: Shard, world: World, dtype: torch.dtype) -> Plan:
    """The unpruned halo-exchange plan of this rank's shard, on the world's device, agreed with every other rank.

    Raises ``RankError`` on all ranks where two shards do not fit, naming both sides.
    """
    n, h = shard.owned_global.shape[0], shard.halo_global.shape[0]
    halo_counts = np.bincount(shard.halo_owner, minlength=world.size)
    entries = np.stack([np.arange(h), shard.halo_index, shard.halo_global], axis=1).astype(np.int64)
    # Number the message rows from 0 for each sender.
    entries[:, 0] -= np.repeat(np.cumsum(halo_counts) - halo_counts, halo_counts)
    route = agree_route(shard, world, entries, None, halo_counts, halo_counts, dtype)

    weight = None if shard.edge_weight is None else torch.from_numpy(shard.edge_weight).to(dtype).numpy()
    edges = sparse_matrix((n, n + h), shard.indptr, shard.indices, weight)
    rows = np.repeat(np.arange(n), np.diff(shard.indptr))
    inside = shard.indices < n
    local = _block((n, n), rows, shard.indices, weight, inside, 0)
    receive = _block((n, h), rows, shard.indices, weight, ~inside, n)
    put = functools.partial(SparseMatrix.to, device=world.device, dtype=dtype)
    halo = HaloPlan(
        put(edges),
        torch.from_numpy(shard.edge_global).to(world.device),
        route,
        shard.num_edges_global,
        torch.from_numpy(shard.owned_global).to(world.device),
    )
    return Plan(n, n, LinearPlan(put(local), put(receive), route), halo)


def _block(
    shape: tuple[int, int],
    rows: NDArray[np.int64],
    cols: NDArray[np.integer[Any]],
    weight: NDArray[np.floating[Any]] | None,
    keep: NDArray[np.bool_],
    first: int,
) -> SparseMatrix:
    """The kept entries (in CSR order) as a matrix whose column 0 is column ``first``."""
    indptr = np.zeros(shape[0] + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows[keep], minlength=shape[0]), out=indptr[1:])
    return sparse_matrix(shape, indptr, cols[keep] - first, None if weight is None else weight[keep])


def agree_route(
    shard: Shard,
    world: World,
    entries: NDArray[np.int64],
    values: NDArray[np.floating[Any]] | None,
    entry_counts: NDArray[np.integer[Any]],
    row_counts: NDArray[np.integer[Any]],
    dtype: torch.dtype,
) -> Route:
    """Tell every sender the S that this rank wants of it, and take the S that others want of this rank.

    ``entries`` is [k, 3]: message row (numbered from 0 for each sender), index of the source in the sender's owned
    list, and the source's global id, ordered by sender; ``entry_counts`` and ``row_counts`` [P] count entries and
    message rows of each sender; ``values`` [k] are None where all are 1.
    """
    counts = np.stack([entry_counts, row_counts]).astype(np.int64)
    matrix = world.gather_vector(counts.ravel().tolist()).to(torch.int64).reshape(world.size, 2, world.size).numpy()
    asked_entries, asked_rows = matrix[:, 0, world.rank], matrix[:, 1, world.rank]
    take = functools.partial(world.exchange, send_counts=entry_counts.tolist(), recv_counts=asked_entries.tolist())
    asked = take(torch.from_numpy(np.ascontiguousarray(entries))).wait().numpy()
    asked_values = None
    if values is not None:
        asked_values = take(torch.from_numpy(values).to(torch.float64)[:, None]).wait()[:, 0].to(dtype).numpy()

    with world.stage("plan"):
        receiver = np.repeat(np.arange(world.size), asked_entries)
        row, source, global_id = asked.T
        _check_asked(shard, world.rank, receiver, row, source, global_id, asked_rows)
        row = row + (np.cumsum(asked_rows) - asked_rows)[receiver]
        send = from_coo((int(asked_rows.sum()), shard.owned_global.shape[0]), row, source, asked_values)
        selecting = asked_values is None and send.nnz == send.shape[0] and bool((np.bincount(row) == 1).all())
    send = send.to(world.device, dtype)
    return Route(
        send,
        send.indices.to(torch.int64) if selecting else None,
        tuple(int(c) for c in asked_rows),
        tuple(int(c) for c in row_counts),
    )


def _check_asked(
    shard: Shard,
    rank: int,
    receiver: NDArray[np.int64],
    row: NDArray[np.int64],
    source: NDArray[np.int64],
    global_id: NDArray[np.int64],
    asked_rows: NDArray[np.int64],
) -> None:
    n = shard.owned_global.shape[0]
    if (receiver == rank).any():
        raise ValueError(f"part {rank} lists itself as the owner of one of its halo nodes; build the shards again")
    bad = (source < 0) | (source >= n)
    bad[~bad] = shard.owned_global[source[~bad]] != global_id[~bad]
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        at = int(source[i])
        found = f"node {int(shard.owned_global[at])}" if 0 <= at < n else f"only {n} nodes"
        raise ValueError(
            f"part {int(receiver[i])} expects node {int(global_id[i])} at index {at} of part {rank}, which has {found} "
            f"there; the shards do not fit together: build them again"
        )
    bad = (row < 0) | (row >= asked_rows[receiver])
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"part {int(receiver[i])} asks part {rank} for message row {int(row[i])} of "
            f"{int(asked_rows[receiver[i]])}; the shards do not fit together: build them again"
        )
