"""Shards cut from a graph: nodes and edges in order of part, local ids, whole-graph degrees.

A node's *position* is its place in the order of (part, id): the owned nodes of a part are a run of positions, and halo
nodes, which a shard lists by (owner, id), come in order of position.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from fullgraph.shards import Reserved, Shard, local_id_dtype
from partition_tools.buckets import EdgesByPart
from partition_tools.graph import Array, Graph, release
from partition_tools.stored import Features, StoredRows, row_blocks
from partition_tools.sums import SumOfRows, bits

SPARSE_BELOW = 0.1
"""Features are stored as CSR where the share of values other than zero is below this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cutter:
    """What every shard is cut from."""

    graph: Graph
    part: NDArray[np.int32]
    small_part: Array
    """[N] the same in the fewest bytes, which sort fastest."""
    parts: int
    x: Features | None
    """As it is to be stored: a CSR matrix, or dense rows that are dealt out afterwards."""
    columns: dict[str, Array]
    """edge_weight and edge_x, where the graph has them."""
    nodes: NDArray[np.int64]
    """[N] node ids by position."""
    node_offsets: NDArray[np.int64]
    """[P+1]"""
    position: NDArray[np.integer[Any]]
    """[N]"""
    in_degree: NDArray[np.int64]
    loop_count: NDArray[np.int64]
    num_classes: int
    cluster: NDArray[np.int32] | None
    """[N]"""
    sums: dict[str, list[int]]
    """Sums of every dataset that is copied from the graph, under the name of the field of `Shard`."""

    @classmethod
    def make(
        cls,
        graph: Graph,
        part: NDArray[np.int32],
        parts: int,
        num_classes: int,
        cluster: NDArray[np.int32] | None = None,
    ) -> Cutter:
        n = graph.num_nodes
        if part.shape != (n,):
            raise ValueError(f"{graph.name}: the assignment has {part.shape[0]} entries for {n} nodes")
        small = part.astype(np.min_scalar_type(parts - 1))
        nodes = np.argsort(small, kind="stable")
        position = np.empty(n, local_id_dtype(n))
        position[nodes] = np.arange(n, dtype=position.dtype)
        in_degree, loop_count = np.zeros(n, np.int64), np.zeros(n, np.int64)
        src_sums, dst_sums = SumOfRows(graph.num_edges), SumOfRows(graph.num_edges)
        for _, src, dst in graph.edge_blocks():
            in_degree += np.bincount(dst, minlength=n)
            loop_count += np.bincount(dst[src == dst], minlength=n)
            src_sums.add(src)
            dst_sums.add(dst)
        edge_x = graph.edge_x
        if edge_x is not None:
            _check_storable(edge_x.dtype, "edge_x")
            edge_x = edge_x.view(np.uint8) if edge_x.dtype == np.bool_ else edge_x
        columns = {"edge_weight": graph.edge_weight, "edge_x": edge_x}
        given = {name: table for name, table in columns.items() if table is not None}
        sums = {"src": src_sums.sums.tolist(), "dst": dst_sums.sums.tolist()}
        sums |= {name: _sums_of(table) for name, table in given.items()}
        x, x_sums = _as_stored(graph.x)
        if x_sums is not None:
            sums["x"] = x_sums
        rows = {"y": graph.y, "node_ids": graph.node_ids}
        if graph.splits is not None:
            rows |= {name: getattr(graph.splits, name).T for name in ("train", "val", "test")}
        sums |= {name: _sums_of(table) for name, table in rows.items() if table is not None}
        return cls(
            graph=graph,
            part=part,
            small_part=small,
            parts=parts,
            x=x,
            columns=given,
            nodes=nodes,
            node_offsets=np.concatenate(([0], np.cumsum(np.bincount(small, minlength=parts)))),
            position=position,
            in_degree=in_degree,
            loop_count=loop_count,
            num_classes=num_classes,
            cluster=cluster,
            sums=sums,
        )

    def edges_by_part(self, scratch: Path) -> EdgesByPart:
        """The edges in order of part; ``scratch`` is a folder to make where they are on disk."""
        counts = np.add.reduceat(np.append(self.in_degree[self.nodes], 0), self.node_offsets[:-1])
        counts[np.diff(self.node_offsets) == 0] = 0
        return EdgesByPart.of(self.graph, self.small_part, self.columns, counts, scratch)

    def in_weight(self, edges: EdgesByPart) -> NDArray[np.float64]:
        """[N] sums of in-edge weights, added in order of edge id."""
        weight, n = self.graph.edge_weight, self.graph.num_nodes
        if weight is None:
            return self.in_degree.astype(np.float64)
        if not self.graph.edges_on_disk:
            return np.bincount(self.graph.dst, weight, n).astype(np.float64)  # integers where there is no edge
        total = np.zeros(n)
        for q in range(self.parts):
            mine, first = edges.part(q), int(self.node_offsets[q])
            owned = self.nodes[first : int(self.node_offsets[q + 1])]
            row = self.position[mine.dst] - first
            total[owned] = np.bincount(row, mine.columns["edge_weight"], owned.shape[0])
        return total

    def reserved(self, q: int) -> Reserved | None:
        """The features of part q where they are dense, which `deal_out` writes."""
        if self.x is None or isinstance(self.x, sp.csr_array):
            return None
        owned = int(self.node_offsets[q + 1] - self.node_offsets[q])
        return Reserved(shape=(owned, int(self.x.shape[1])), dtype=self.x.dtype)

    def shard(self, q: int, build_id: str, edges: EdgesByPart, in_weight: NDArray[np.float64]) -> Shard:
        """Part q, without features that are dense."""
        graph, splits, mine = self.graph, self.graph.splits, edges.part(q)
        first, last = int(self.node_offsets[q]), int(self.node_offsets[q + 1])
        n, owned = last - first, self.nodes[first:last]
        source, row = self.position[mine.src], self.position[mine.dst] - first
        foreign = (source < first) | (source >= last)
        halo = np.sort(source[foreign])
        halo = halo[np.concatenate(([True], halo[1:] != halo[:-1]))] if halo.size else halo
        known = np.concatenate((owned, self.nodes[halo]))
        local = np.empty(graph.num_nodes, local_id_dtype(known.shape[0]))
        local[first:last] = np.arange(n, dtype=local.dtype)
        local[halo] = np.arange(n, known.shape[0], dtype=local.dtype)
        order, indices = _in_rows(row, local[source], n, known.shape[0])
        owner = self.part[known[n:]]
        degree = self.in_degree[known]
        masks = {
            name: np.zeros((0, n), np.bool_) if splits is None else getattr(splits, name)[:, owned]
            for name in ("train", "val", "test")
        }
        columns = {name: table[order] for name, table in mine.columns.items()}
        x = self.x
        return Shard(
            part=q,
            parts=self.parts,
            build_id=build_id,
            graph=graph.name,
            num_nodes_global=graph.num_nodes,
            num_edges_global=graph.num_edges,
            task=graph.task,
            num_classes=self.num_classes,
            owned_global=owned,
            halo_global=known[n:],
            halo_owner=owner,
            halo_index=halo - self.node_offsets[owner],
            indptr=np.concatenate(([0], np.cumsum(degree[:n]))),
            indices=indices,
            edge_global=mine.ids[order].astype(np.int64),
            edge_weight=columns.get("edge_weight"),
            edge_x=columns.get("edge_x"),
            in_degree=degree,
            in_weight=in_weight[known],
            loop_count=self.loop_count[known],
            x=x[owned] if isinstance(x, sp.csr_array) else None,
            learned_features=graph.learned_features,
            y=None if graph.y is None else graph.y[owned],
            **masks,
            node_ids=None if graph.node_ids is None else graph.node_ids[owned],
            cluster=None if self.cluster is None else self.cluster[owned],
        )

    def least_bytes(self) -> int:
        """Bytes on disk that all shards together, and what is laid there meanwhile, take at least: halo lists and
        string ids are not counted."""
        graph, n, e = self.graph, self.graph.num_nodes, self.graph.num_edges
        node = 8 + 3 * 8 + (0 if graph.splits is None else 3 * graph.splits.count)
        node += 0 if graph.y is None else graph.y.dtype.itemsize * int(np.prod(graph.y.shape[1:]))
        columns = sum(table.dtype.itemsize * int(np.prod(table.shape[1:])) for table in self.columns.values())
        edge = 8 + 4 + columns + (20 + columns if graph.edges_on_disk else 0)
        features = 0
        if isinstance(self.x, sp.csr_array):
            features = self.x.nnz * (self.x.dtype.itemsize + 4)
        elif self.x is not None:
            features = int(np.prod(self.x.shape)) * self.x.dtype.itemsize
        return n * node + e * edge + features


def _in_rows(
    row: NDArray[np.integer[Any]], source: NDArray[np.integer[Any]], rows: int, sources: int
) -> tuple[NDArray[np.int64], Array]:
    """(Order by (row, source, place), sources in this order) of e edges."""
    e = row.shape[0]
    place_bits, source_bits = max(1, e).bit_length(), max(1, sources).bit_length()
    if place_bits + source_bits + max(1, rows).bit_length() > 63:
        # Two counting sorts, the less important key first: both are stable.
        order = _counting_order(source, sources)
        order = order[_counting_order(row[order], rows)]
        return order, source[order]
    # All three in one number, which numpy sorts ten times faster than it sorts places by two keys.
    key = row.astype(np.int64)
    key <<= source_bits
    key |= source
    key <<= place_bits
    key |= np.arange(e)
    key.sort()
    order = key & ((1 << place_bits) - 1)
    key >>= place_bits
    key &= (1 << source_bits) - 1
    return order, key.astype(source.dtype)


def _counting_order(key: NDArray[np.integer[Any]], count: int) -> NDArray[np.int64]:
    """The stable order of keys below ``count``, in linear time."""
    e = key.shape[0]
    one_row = sp.csr_array((np.arange(e), key, np.array([0, e])), shape=(1, count))
    return np.asarray(one_row.tocsc().data)


# ----------------------------------------------------------------------------------------------------------- features


def _check_storable(dtype: np.dtype[Any], name: str) -> None:
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ValueError(f"{name} is {dtype}; expected a real number of at most 8 bytes")


def _as_stored(x: Features | None) -> tuple[Features | None, list[int] | None]:
    """Features in the form in which shards hold them, and their sums. Bits are moved, not values, so that -0.0 and NaN
    survive."""
    if x is None:
        return None, None
    _check_storable(x.dtype, "x")
    size = max(1, int(np.prod(x.shape)))
    if isinstance(x, sp.csr_array):
        x = x.astype(np.uint8) if x.dtype == np.bool_ else x
        if not x.has_canonical_format:
            x = x.copy()
            x.sum_duplicates()
        sums = SumOfRows(x.shape[0]).add(x).sums.tolist()
        if int(np.count_nonzero(bits(x.data))) / size < SPARSE_BELOW:
            return x, sums
        dense = sp.csr_array((bits(x.data), x.indices, x.indptr), shape=x.shape).toarray()
        return dense.view(x.dtype), sums
    if isinstance(x, StoredRows):
        stored, sums = x.scan.stored, x.scan.sums.tolist()
    else:
        x = x.view(np.uint8) if x.dtype == np.bool_ else x
        stored = sum(int(np.count_nonzero(bits(block))) for _, block in row_blocks(x))
        sums = SumOfRows(x.shape[0]).add(x).sums.tolist()
    shape = (int(x.shape[0]), int(x.shape[1]))
    if stored / size >= SPARSE_BELOW:
        return x, sums
    found = [sp.csr_array(bits(block)) for _, block in row_blocks(x)]
    rows = sp.vstack(found, format="csr") if found else sp.csr_array(shape, dtype=bits(x[:0]).dtype)
    return sp.csr_array((rows.data.view(x.dtype), rows.indices, rows.indptr), shape=shape), sums


def _sums_of(table: Array) -> list[int]:
    total = SumOfRows(table.shape[0])
    for _, block in row_blocks(table):
        total.add(block)
        release(table)
    sums: list[int] = total.sums.tolist()
    return sums
