"""Who sends which rows to whom: plans made from a shard at start, agreed with every other rank, never changed.

The cut block of every ordered pair of ranks is factored ``A_qp = R_qp S_qp`` (``fullgraph.cut``). The receiver q
decides and tells the sender p its S as entries (message row, index of the source in p's shard, global id of the
source, value); p checks every index against its own ids. A *halo* plan's S selects raw rows; a *cover* plan's S has
the fewest rows, some of them partial sums.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fullgraph.config import PlanKind
from fullgraph.cut import Factors, cover_factors, selecting_factors
from fullgraph.kernels import SparseMatrix, from_coo, sparse_matrix
from fullgraph.reach import Counts, LocalGraph
from fullgraph.world import World


@dataclass(frozen=True, eq=False)
class Route:
    """One exchange of message rows: what this rank sends, and how many rows go to and come from each rank."""

    send: SparseMatrix
    """S [rows sent, n_in], rows in order of destination rank."""
    select: Tensor | None
    """[rows sent] int64, where S merely selects rows; None where it sums some."""
    counts: Counts
    most_rows: int
    """Most rows that any rank sends or receives."""


@dataclass(frozen=True, eq=False)
class LinearPlan:
    """One linear propagate, ``Y = A_local X + R all_to_all(S X)``; without a route, ``Y = A_local X``."""

    local: SparseMatrix
    """[n_out, n_in] edges between owned nodes."""
    receive: SparseMatrix | None = None
    """R [n_out, rows received]."""
    route: Route | None = None

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

    @functools.cached_property
    def _scaled(self) -> dict[str, LinearPlan]:
        return {}

    def scaled(self, name: str, in_scale: Tensor | None, out_scale: Tensor | None, dtype: torch.dtype) -> LinearPlan:
        """``diag(out_scale) A diag(in_scale)`` in ``dtype``, made once under ``name``; scales are [n_in] and [n_out].

        The scales are values of the matrices, which costs the sparse kernel nothing and saves passes over the rows.
        """
        if name not in self._scaled:
            receive = None if self.receive is None else self.receive.scaled(out_scale, None, dtype)
            route = self.route
            if route is not None and in_scale is not None:
                route = dataclasses.replace(route, send=route.send.scaled(None, in_scale, dtype), select=None)
            self._scaled[name] = LinearPlan(self.local.scaled(out_scale, in_scale, dtype), receive, route)
        return self._scaled[name]


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
    halo: NDArray[np.int64]
    """[h] index in the shard's halo list of each halo row."""

    @functools.cached_property
    def edge_index(self) -> Tensor:
        """int64 [2, e] (source in ``[owned | halo]`` rows, destination)."""
        return torch.stack([self.edges.indices.to(torch.int64), self.edges.rows.to(torch.int64)])

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
        ids = torch.cat([self.edge_global[keep], self.num_edges_global + self.owned_global[: m.shape[0]]])[order]
        return SparseMatrix(m.shape, indptr, cols[order], values), ids


@dataclass(frozen=True, eq=False)
class EdgeFeatures:
    """Features of a rank's edges on its device, made when first asked for. A plan's edges are the first of them."""

    graph: LocalGraph
    device: torch.device
    dtype: torch.dtype

    @functools.cached_property
    def rows(self) -> Tensor | None:
        """[e, K] in the order of the edges; None where the graph has none."""
        edge_x = self.graph.edge_x
        return None if edge_x is None else torch.from_numpy(edge_x).to(self.device, self.dtype)

    @functools.cached_property
    def with_one_loop(self) -> Tensor | None:
        """[e', K] in the order of ``HaloPlan.one_loop``; a loop has the mean of the node's other in-edges' features,
        zeros where there are none."""
        graph = self.graph
        if graph.edge_x is None:
            return None
        row = np.repeat(np.arange(graph.n), np.diff(graph.indptr))
        kept = np.flatnonzero(row != graph.indices)
        row = row[kept]
        order = torch.from_numpy(np.argsort(np.concatenate([row, np.arange(graph.n)]), kind="stable"))
        rows = torch.from_numpy(graph.edge_x[kept]).to(self.dtype)
        degree = np.bincount(row, minlength=graph.n)
        mean = rows.new_zeros(graph.n, rows.shape[1]).index_add_(0, torch.from_numpy(row), rows)
        mean /= torch.from_numpy(np.maximum(degree, 1))[:, None]
        return torch.cat([rows, mean])[order].to(self.device)


@dataclass(frozen=True, eq=False)
class Plan:
    """How one layer of this rank moves rows: ``n_in`` owned rows in, the first ``n_out`` of them out.

    ``linear`` and ``halo`` are made and agreed with the other ranks when first asked for, which every rank does at
    the same place.
    """

    graph: LocalGraph
    world: World
    n_in: int
    n_out: int
    kind: PlanKind
    dtype: torch.dtype
    edge_features: EdgeFeatures
    """Shared by the plans of a graph."""

    @property
    def num_edges(self) -> int:
        """In-edges of the rows that it gives."""
        return int(self.graph.indptr[self.n_out])

    @functools.cached_property
    def linear(self) -> LinearPlan:
        graph, n = self.graph, self.graph.n
        _, rows, cols, weight = self._edges()
        inside = cols < n
        local = self._csr((self.n_out, self.n_in), rows[inside], cols[inside], weight, inside)
        row, halo = rows[~inside], cols[~inside] - n
        make = cover_factors if self.kind == "cover" else selecting_factors
        factors = make(row, halo, graph.halo_owner, self.world.size)
        outside = None if weight is None else weight[~inside]
        receive = from_coo(
            (self.n_out, factors.rows),
            factors.receive_row,
            factors.receive_message,
            _values(outside, factors.receive_edge),
        )
        route = agree_route(self, factors, _values(outside, factors.send_edge))
        return LinearPlan(self._put(local), self._put(receive), route)

    @functools.cached_property
    def halo(self) -> HaloPlan:
        graph, n = self.graph, self.graph.n
        indptr, rows, cols, weight = self._edges()
        outside = cols >= n
        factors = selecting_factors(rows[outside], cols[outside] - n, graph.halo_owner, self.world.size)
        cols = cols.copy()
        cols[outside] = self.n_in + factors.receive_message
        edges = sparse_matrix((self.n_out, self.n_in + factors.rows), indptr, cols, weight)
        route = agree_route(self, factors, None)
        device = self.world.device
        return HaloPlan(
            self._put(edges),
            torch.from_numpy(graph.edge_global[: cols.shape[0]]).to(device),
            route,
            graph.num_edges_global,
            self.owned_global,
            factors.send_halo,
        )

    @functools.cached_property
    def kept_linear(self) -> LinearPlan:
        """A propagate over ``[owned | halo]`` rows that are all here."""
        return LinearPlan(self.halo.edges)

    @property
    def edge_x(self) -> Tensor | None:
        """[e, K] features of the in-edges of the rows that it gives; None where the graph has none."""
        rows = self.edge_features.rows
        return None if rows is None else rows[: self.num_edges]

    @property
    def edge_x_with_one_loop(self) -> Tensor | None:
        """[e', K] the same in the order of ``HaloPlan.one_loop``."""
        rows = self.edge_features.with_one_loop
        return None if rows is None else rows[: self.halo.one_loop[0].nnz]

    @functools.cached_property
    def owned_global(self) -> Tensor:
        """int64 [n_in] global ids of the rows."""
        return torch.from_numpy(self.graph.owned_global[: self.n_in]).to(self.world.device)

    def _edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[Any] | None]:
        """In-edges of the first n_out rows: (indptr, rows, sources, weights)."""
        graph = self.graph
        indptr = graph.indptr[: self.n_out + 1]
        rows = np.repeat(np.arange(self.n_out), np.diff(indptr))
        weight = None if graph.edge_weight is None else graph.edge_weight[: rows.shape[0]]
        return indptr, rows, graph.indices[: rows.shape[0]], weight

    def _csr(
        self,
        shape: tuple[int, int],
        rows: NDArray[np.int64],
        cols: NDArray[np.int64],
        weight: NDArray[Any] | None,
        kept: NDArray[np.bool_],
    ) -> SparseMatrix:
        indptr = np.zeros(shape[0] + 1, dtype=np.int64)
        np.cumsum(np.bincount(rows, minlength=shape[0]), out=indptr[1:])
        return sparse_matrix(shape, indptr, cols, None if weight is None else weight[kept])

    def _put(self, matrix: SparseMatrix) -> SparseMatrix:
        return matrix.to(self.world.device, self.dtype)


def _values(weight: NDArray[Any] | None, edge: NDArray[np.int64]) -> NDArray[Any] | None:
    """The values that ``Factors`` names; None in a graph without weights, where all are 1."""
    if weight is None:
        return None
    out = np.ones(edge.shape[0], weight.dtype)
    out[edge >= 0] = weight[edge[edge >= 0]]
    return out


def agree_route(plan: Plan, factors: Factors, values: NDArray[Any] | None) -> Route:
    """Tell every sender the S that this rank wants of it, and take the S that others want of this rank.

    ``values`` [k] are those of S's entries, None where all are 1. Raises ``RankError`` on all ranks where two shards
    do not fit, naming both sides.
    """
    graph, world = plan.graph, plan.world
    entry_counts = np.bincount(graph.halo_owner[factors.send_halo], minlength=world.size)
    counts = np.stack([entry_counts, factors.row_counts])
    matrix = world.gather_vector(counts.ravel().tolist()).to(torch.int64).reshape(world.size, 2, world.size).numpy()
    asked_entries, asked_rows = matrix[:, 0, world.rank], matrix[:, 1, world.rank]
    take = functools.partial(world.exchange, send_counts=entry_counts.tolist(), recv_counts=asked_entries.tolist())
    first = np.cumsum(factors.row_counts) - factors.row_counts
    owner = graph.halo_owner[factors.send_halo]
    entries = np.stack(
        [
            factors.send_message - first[owner],
            graph.halo_index[factors.send_halo],
            graph.halo_global[factors.send_halo],
        ],
        axis=1,
    )
    asked = take(torch.from_numpy(entries)).wait().numpy()
    asked_values = None
    if values is not None:
        asked_values = take(torch.from_numpy(values).to(torch.float64)[:, None]).wait()[:, 0].numpy()

    with world.stage("plan"):
        receiver = np.repeat(np.arange(world.size), asked_entries)
        row, source, global_id = asked.T
        _check_asked(graph, world.rank, receiver, row, source, global_id, asked_rows)
        source = graph.position[source]
        assert source.size == 0 or int(source.max()) < plan.n_in, "a pruned node was asked for"
        row = row + (np.cumsum(asked_rows) - asked_rows)[receiver]
        send = from_coo((int(asked_rows.sum()), plan.n_in), row, source, asked_values)
        ones = asked_values is None or bool((asked_values == 1.0).all())
        selecting = ones and send.nnz == send.shape[0] and bool((np.bincount(row) == 1).all())
        if selecting:
            send = SparseMatrix(send.shape, send.indptr, send.indices)
    send = send.to(world.device, plan.dtype)
    rows = matrix[:, 1]
    return Route(
        send,
        send.indices.to(torch.int64) if selecting else None,
        Counts(tuple(int(c) for c in asked_rows), tuple(int(c) for c in factors.row_counts)),
        int(max(rows.sum(0).max(), rows.sum(1).max())),
    )


def halo_route(graph: LocalGraph, world: World) -> Route:
    """The exchange of a row for every halo node, in the order of the halo lists (a collective, which proves that they
    fit)."""
    every = np.arange(graph.halo_global.shape[0])
    plan = Plan(graph, world, graph.n, graph.n, "halo", torch.float64, EdgeFeatures(graph, world.device, torch.float64))
    return agree_route(plan, selecting_factors(0 * every, every, graph.halo_owner, world.size), None)


def _check_asked(
    graph: LocalGraph,
    rank: int,
    receiver: NDArray[np.int64],
    row: NDArray[np.int64],
    source: NDArray[np.int64],
    global_id: NDArray[np.int64],
    asked_rows: NDArray[np.int64],
) -> None:
    n = graph.n
    if (receiver == rank).any():
        raise ValueError(f"part {rank} lists itself as the owner of one of its halo nodes; build the shards again")
    owned = np.empty(n, np.int64)
    owned[graph.order] = graph.owned_global  # as the shard has them
    bad = (source < 0) | (source >= n)
    bad[~bad] = owned[source[~bad]] != global_id[~bad]
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        at = int(source[i])
        found = f"node {int(owned[at])}" if 0 <= at < n else f"only {n} nodes"
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
