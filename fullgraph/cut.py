"""The cut of a partitioned graph: which nodes are halo, what crosses between parts, and how much of it.

Everything here is counted from the edges themselves, never taken from a partitioner.

Words: an *edge* is a directed entry ``u -> v``, stored with the owner of v. A *cut edge* has its ends in different
parts. A *cut pair* is an unordered pair of nodes joined by at least one cut edge. Part p sends part q one *row* for
each distinct node of p with an edge into q; to q such a node is a *halo* node, so rows sent p -> q and halo rows that
q receives from p are the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import breadth_first_order, maximum_bipartite_matching

from fullgraph.shards import Shard

Ids = NDArray[np.integer[Any]]
Blocks: TypeAlias = Iterable[tuple[Ids, Ids]]
"""The edges of a graph as blocks (src, dst) of global ids, gone through several times. All in-edges of a part's nodes
are in one block: one block may hold them all, or each part's shard be a block of its own."""

PRUNE_SHARE = 0.05
"""A layer is pruned where that saves at least this share of its rows over all ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CutCounts:
    """What crosses between P parts."""

    cut_edges: int
    """Directed entries whose ends lie in different parts; duplicates counted."""
    cut_pairs: int
    """Unordered pairs of nodes with at least one cut edge between them."""
    nodes: NDArray[np.int64]
    """[P] nodes owned."""
    edges: NDArray[np.int64]
    """[P] in-edges stored."""
    rows: NDArray[np.int64]
    """[P, P] rows that p (axis 0) sends q (axis 1) in one halo exchange."""
    cover: NDArray[np.int64] | None = None
    """The same by the fewest rows, a minimum cover; counted from shards only."""

    @property
    def parts(self) -> int:
        return int(self.nodes.shape[0])

    @property
    def halo_rows(self) -> NDArray[np.int64]:
        """[P] rows received."""
        return np.asarray(self.rows.sum(axis=0))

    @property
    def rows_sent(self) -> NDArray[np.int64]:
        """[P] rows sent."""
        return np.asarray(self.rows.sum(axis=1))

    @property
    def total_rows(self) -> int:
        return int(self.rows.sum())

    @property
    def max_rows_sent(self) -> int:
        return int(self.rows_sent.max())

    @property
    def neighbours(self) -> NDArray[np.int64]:
        """[P] other parts that a part sends rows to or receives rows from."""
        return np.asarray(np.count_nonzero(self.rows + self.rows.T, axis=1), np.int64)


def cut_counts(src: Ids, dst: Ids, part: Ids, parts: int) -> CutCounts:
    """Counts for edges ``src[i] -> dst[i]`` ([E] global ids) under ``part`` ([N], the part of each node).

    Memory: a few arrays of the length of the cut, and one of E bytes. Raises ``ValueError`` where ``part`` names a
    part outside 0..parts-1.
    """
    n = part.shape[0]
    if n and (int(part.min()) < 0 or int(part.max()) >= parts):
        bad = int(np.flatnonzero((part < 0) | (part >= parts))[0])
        raise ValueError(f"node {bad} is in part {int(part[bad])}; expected parts 0 to {parts - 1}")
    cut = part[src] != part[dst]
    u, v = src[cut].astype(np.int64), dst[cut].astype(np.int64)
    sent = np.unique(u * parts + part[v])
    return CutCounts(
        cut_edges=u.shape[0],
        cut_pairs=_pairs(u, v, n).shape[0],
        nodes=np.bincount(part, minlength=parts),
        edges=np.bincount(part[dst], minlength=parts),
        rows=np.bincount(part[sent // parts].astype(np.int64) * parts + sent % parts, minlength=parts**2).reshape(
            parts, parts
        ),
    )


def cut_counts_of_shards(shards: Iterable[Shard]) -> CutCounts:
    """The same counts from all shards of one build, one at a time; features are not needed.

    Memory: one shard and the distinct pairs of the cut.
    """
    nodes, edges, columns, covers, pairs, cut_edges = [], [], [], [], [], 0
    for shard in shards:
        row, halo = cut_entries(shard)
        cut_edges += row.shape[0]
        pairs.append(_pairs(shard.halo_global[halo], shard.owned_global[row], shard.num_nodes_global))
        nodes.append(shard.num_owned)
        edges.append(shard.num_edges)
        columns.append(np.bincount(shard.halo_owner, minlength=shard.parts))
        covers.append(cover_factors(row, halo, shard.halo_owner, shard.parts).row_counts)
    return CutCounts(
        cut_edges=cut_edges,
        cut_pairs=np.unique(np.concatenate(pairs)).shape[0],
        nodes=np.asarray(nodes, np.int64),
        edges=np.asarray(edges, np.int64),
        rows=np.stack(columns, axis=1).astype(np.int64),
        cover=np.stack(covers, axis=1).astype(np.int64),
    )


def cut_entries(shard: Shard) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The cut edges of a shard in stored order: row of the owned destination and index in the halo list, [c] each."""
    positions = np.flatnonzero(shard.indices >= shard.num_owned)
    row = np.searchsorted(shard.indptr, positions, side="right") - 1
    return row, shard.indices[positions].astype(np.int64) - shard.num_owned


def halo_nodes(src: Ids, part: Ids, q: int) -> NDArray[np.int64]:
    """[h] halo nodes of part q, sorted by (owner, global id), given the sources [e] of all its in-edges."""
    foreign = np.unique(src[part[src] != q])
    return foreign[np.argsort(part[foreign], kind="stable")].astype(np.int64)


def _pairs(u: Ids, v: Ids, n: int) -> NDArray[np.int64]:
    """One sorted key for each distinct unordered pair (u[i], v[i]) of ids below n."""
    return np.unique(np.minimum(u, v) * np.int64(n) + np.maximum(u, v))


@dataclass(frozen=True, kw_only=True, eq=False)
class Factors:
    """The cut blocks of one receiver as ``A_qp = R_qp S_qp`` for every sender p.

    Message rows are numbered from 0 over all senders, in order of sender. An ``edge`` index points into the cut edges
    that were given and names the entry's value, its weight; -1 stands for the value 1.
    """

    row_counts: NDArray[np.int64]
    """[P] message rows of each sender."""
    send_message: NDArray[np.int64]
    """[k] entries of S: message row (ascending),"""
    send_halo: NDArray[np.int64]
    """[k] index of the source in the halo list,"""
    send_edge: NDArray[np.int64]
    """[k] and value."""
    receive_row: NDArray[np.int64]
    """[m] entries of R: row of the destination,"""
    receive_message: NDArray[np.int64]
    """[m] message row,"""
    receive_edge: NDArray[np.int64]
    """[m] and value."""

    @property
    def rows(self) -> int:
        return int(self.row_counts.sum())


def selecting_factors(row: Ids, halo: Ids, halo_owner: Ids, parts: int) -> Factors:
    """Halo exchange: S selects each halo node that an edge uses.

    The cut edges go from halo node ``halo[i]`` (index in the halo list, which is in order of owner) to the owned row
    ``row[i]``; ``halo_owner`` is [h].
    """
    used, message = np.unique(halo, return_inverse=True)
    return Factors(
        row_counts=np.bincount(halo_owner[used], minlength=parts),
        send_message=np.arange(used.shape[0]),
        send_halo=used.astype(np.int64),
        send_edge=np.full(used.shape[0], -1),
        receive_row=row.astype(np.int64),
        receive_message=message.astype(np.int64),
        receive_edge=np.arange(row.shape[0]),
    )


def cover_factors(row: Ids, halo: Ids, halo_owner: Ids, parts: int) -> Factors:
    """The fewest message rows: a minimum vertex cover of each sender's bipartite cut graph.

    A source in the cover is sent raw. Every other edge ends in a destination in the cover, for which the sender forms
    the partial sum over those edges. By Koenig's theorem the cover is as large as the maximum matching: nodes of the
    source side that no alternating path from an unmatched source reaches, and destinations that one reaches. All
    senders' graphs are one block-diagonal graph, whose destinations are (sender, row) pairs, so one matching and one
    breadth-first search do for all. A sender whose cover saves nothing sends raw rows alone.

    Time: O(c sqrt(h + r)) for c cut edges and r such pairs at worst, near linear in practice; memory a few arrays
    of c.
    """
    if row.shape[0] == 0:
        return selecting_factors(row, halo, halo_owner, parts)
    sources, source = np.unique(halo, return_inverse=True)
    owner = halo_owner[sources].astype(np.int64)
    span = int(row.max()) + 1
    pairs, target = np.unique(owner[source] * span + row, return_inverse=True)
    match = _matching(source, target, sources.shape[0], pairs.shape[0])
    raw, summed = _koenig(source, target, match, pairs.shape[0])

    # A sender whose cover is no smaller than its sources sends these raw, which needs no sums.
    pair_owner = pairs // span
    used = np.bincount(owner, minlength=parts)
    covered = np.bincount(owner[raw], minlength=parts) + np.bincount(pair_owner[summed], minlength=parts)
    plain = covered >= used
    raw |= plain[owner]
    summed &= ~plain[pair_owner]

    counts = np.bincount(owner[raw], minlength=parts) + np.bincount(pair_owner[summed], minlength=parts)
    # Message rows in order of sender, raw rows before sums.
    key = np.concatenate([owner[raw] * 2, pair_owner[summed] * 2 + 1])
    number = np.empty(key.shape[0], np.int64)
    number[np.argsort(key, kind="stable")] = np.arange(key.shape[0])
    raw_message = np.full(sources.shape[0], -1)
    raw_message[raw] = number[: int(raw.sum())]
    sum_message = np.full(pairs.shape[0], -1)
    sum_message[summed] = number[int(raw.sum()) :]

    direct = raw[source]
    edge = np.arange(row.shape[0])
    send_message = np.concatenate([raw_message[raw], sum_message[target[~direct]]])
    send_halo = np.concatenate([sources[raw], halo[~direct]])
    send_edge = np.concatenate([np.full(int(raw.sum()), -1), edge[~direct]])
    order = np.argsort(send_message, kind="stable")
    return Factors(
        row_counts=counts,
        send_message=send_message[order],
        send_halo=send_halo[order].astype(np.int64),
        send_edge=send_edge[order],
        receive_row=np.concatenate([row[direct], pairs[summed] % span]).astype(np.int64),
        receive_message=np.concatenate([raw_message[source[direct]], sum_message[summed]]),
        receive_edge=np.concatenate([edge[direct], np.full(int(summed.sum()), -1)]),
    )


def _matching(source: Ids, target: Ids, sources: int, targets: int) -> NDArray[np.integer[Any]]:
    """[sources] the target that a maximum matching gives each source, or -1; every source and target has an edge."""
    graph = sp.csr_array((np.ones(source.shape[0], np.int8), (source, target)), shape=(sources, targets))
    match: NDArray[np.integer[Any]] = maximum_bipartite_matching(graph, perm_type="column")
    return match


def _koenig(
    source: Ids, target: Ids, match: NDArray[np.integer[Any]], targets: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The minimum vertex cover that a maximum matching gives: (in cover [sources], [targets])."""
    sources = match.shape[0]
    matched = np.flatnonzero(match >= 0)
    # Alternating paths from a virtual root: root -> unmatched source -> target -> its matched source -> ...
    root = sources + targets
    free = np.flatnonzero(match < 0)
    tail = np.concatenate([np.full(free.shape[0], root), source, sources + match[matched]])
    head = np.concatenate([free, sources + target, matched])
    paths = sp.csr_array((np.ones(tail.shape[0], np.int8), (tail, head)), shape=(root + 1, root + 1))
    reached = np.zeros(root + 1, np.bool_)
    reached[breadth_first_order(paths, root, return_predecessors=False)] = True
    return ~reached[:sources], reached[sources:root]


# ------------------------------------------------------------------------------------------------- layers of training


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCounts:
    """What the P parts compute and send in one layer of a training step, forward; backward sends the same rows back."""

    inputs: NDArray[np.int64]
    """[P] rows taken: those that the layer before computes."""
    rows: NDArray[np.int64]
    """[P] rows computed."""
    edges: NDArray[np.int64]
    """[P] in-edges of these rows."""
    halo: NDArray[np.int64]
    """[P, P] rows that p (axis 0) sends q (axis 1), one for each halo node that a computed row needs."""
    cover: NDArray[np.int64]
    """[P, P] the same by the fewest rows, a minimum cover."""


def label_reach(blocks: Blocks, train: NDArray[np.bool_], depth: int) -> NDArray[np.int16]:
    """[N] edges on the shortest directed path to a training node, ``depth + 1`` where it has more than ``depth``.

    ``train`` is [N]. Goes through the blocks ``depth`` times; memory is a byte an edge of a block.
    """
    reach = np.full(train.shape[0], depth + 1, np.int16)
    reach[train] = 0
    for level in range(depth):
        for src, dst in blocks:
            source = src[reach[dst] == level]
            reach[source[reach[source] > level + 1]] = level + 1
    return reach


def whole_boundaries(needed: Sequence[int], nodes: int, whole_layers: int = 0) -> tuple[bool, ...]:
    """Whether all nodes have rows at each of the L + 1 boundaries of L layers, of which boundary l is layer l's input.

    ``needed`` [L + 1] are the nodes that boundary l must have: those with a reach of at most L - l. A boundary that
    leaves out less than ``PRUNE_SHARE`` of the nodes keeps all, and so does every one below it. The first
    ``whole_layers`` layers give all nodes.
    """
    whole = [0 < layer <= whole_layers or nodes - count < PRUNE_SHARE * nodes for layer, count in enumerate(needed)]
    return tuple(any(whole[layer:]) for layer in range(len(whole)))


def layer_counts(
    blocks: Blocks,
    part: Ids,
    parts: int,
    layers: int,
    *,
    reach: NDArray[np.int16] | None = None,
    whole_layers: int = 0,
) -> tuple[LayerCounts, ...]:
    """Counts of each of ``layers`` layers under ``part`` [N], equal to what ranks then measure.

    ``reach`` is that of `label_reach` with ``depth=layers``; None where nothing is pruned. Memory is a few arrays of
    the length of the cut, and N * parts bytes where that is less than the cut.
    """
    nodes = part.shape[0]
    whole = (True,) * (layers + 1)
    if reach is not None:
        needed = [int(np.count_nonzero(reach <= layers - layer)) for layer in range(layers + 1)]
        whole = whole_boundaries(needed, nodes, whole_layers)
    # A boundary has the nodes with a reach of at most its limit, or all.
    limits = [None if whole[layer] else layers - layer for layer in range(layers + 1)]
    computed = [np.bincount(part if k is None or reach is None else part[reach <= k], minlength=parts) for k in limits]
    found = {limit: _Crossing.none(parts) for limit in limits[1:]}
    for src, dst in blocks:
        crosses = part[src] != part[dst]
        cut_src, cut_dst = src[crosses], dst[crosses]
        for limit, count in found.items():
            u, v, ends = cut_src, cut_dst, dst
            if limit is not None:
                assert reach is not None
                kept = reach[cut_dst] <= limit
                u, v, ends = cut_src[kept], cut_dst[kept], dst[reach[dst] <= limit]
            halo, cover = crossing_rows(u, v, part, parts)
            found[limit] = _Crossing(
                count.edges + np.bincount(part[ends], minlength=parts), count.halo + halo, count.cover + cover
            )
    return tuple(
        LayerCounts(inputs=computed[layer], rows=computed[layer + 1], **found[limits[layer + 1]]._asdict())
        for layer in range(layers)
    )


class _Crossing(NamedTuple):
    edges: NDArray[np.int64]
    halo: NDArray[np.int64]
    cover: NDArray[np.int64]

    @classmethod
    def none(cls, parts: int) -> _Crossing:
        return cls(*(np.zeros(shape, np.int64) for shape in ((parts,), (parts, parts), (parts, parts))))


def crossing_rows(src: Ids, dst: Ids, part: Ids, parts: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[P, P] rows that p sends q for the cut edges ``src[i] -> dst[i]``: (one a halo node, a minimum cover)."""
    cut = CutGraph.make(src, dst, part, parts)
    return cut.halo, cut.cover


@dataclass(frozen=True, kw_only=True, eq=False)
class CutGraph:
    """The cut edges of all pairs of parts as one block-diagonal bipartite graph of (source, receiver) and
    (sender, destination), with a maximum matching: as large as the minimum cover, pair by pair (Koenig)."""

    parts: int
    sources: NDArray[np.int64]
    """[s] ascending ``source * parts + receiver``."""
    targets: NDArray[np.int64]
    """[t] ascending ``destination * parts + sender``."""
    pair: NDArray[np.int64]
    """[s] ``sender * parts + receiver``."""
    back: NDArray[np.int64]
    """[t] ``receiver * parts + sender``: who would send to whom if the edges were reversed."""
    edge: tuple[NDArray[np.int64], NDArray[np.int64]]
    """Places of each cut edge's source and target among these."""
    match: NDArray[np.integer[Any]]
    """[s] the target matched, or -1."""

    @classmethod
    def make(cls, src: Ids, dst: Ids, part: Ids, parts: int) -> CutGraph:
        nodes = part.shape[0]
        sources, source = _numbered(src, part[dst], nodes, parts)
        targets, target = _numbered(dst, part[src], nodes, parts)
        pair = part[sources // parts].astype(np.int64) * parts + sources % parts
        back = part[targets // parts].astype(np.int64) * parts + targets % parts
        match: NDArray[np.integer[Any]] = np.empty(0, np.int64)
        if src.shape[0]:
            match = _matching(source, target, sources.shape[0], targets.shape[0])
        return cls(
            parts=parts, sources=sources, targets=targets, pair=pair, back=back, edge=(source, target), match=match
        )

    @property
    def halo(self) -> NDArray[np.int64]:
        """[P, P] rows sent, one for each source and receiver."""
        return self._by_pair(self.pair)

    @property
    def halo_of_reversed(self) -> NDArray[np.int64]:
        """[P, P] the same of the edges reversed, whose cover is ``cover`` transposed."""
        return self._by_pair(self.back)

    @property
    def cover(self) -> NDArray[np.int64]:
        """[P, P] the fewest rows."""
        return self._by_pair(self.pair[self.match >= 0])

    def _by_pair(self, pair: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(pair, minlength=self.parts**2).reshape(self.parts, self.parts)

    def covered(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A minimum cover: its sources, which are sent raw, and its targets, whose sums are sent."""
        if not self.match.shape[0]:
            return self.sources, self.targets
        source, target = self.edge
        raw, summed = _koenig(source, target, self.match, self.targets.shape[0])
        return self.sources[raw], self.targets[summed]


def _numbered(node: Ids, other: Ids, nodes: int, parts: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(Distinct keys ``node * parts + other`` ascending, the place of each given pair among them)."""
    key = node.astype(np.int64) * parts + other
    if nodes * parts > 4 * key.shape[0]:
        distinct, place = np.unique(key, return_inverse=True)
        return distinct, place
    seen = np.zeros(nodes * parts, np.bool_)
    seen[key] = True
    distinct = np.flatnonzero(seen)
    number = np.empty(nodes * parts, np.int64)
    number[distinct] = np.arange(distinct.shape[0])
    return distinct, number[key]
