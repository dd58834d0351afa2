"""Several parts on one rank: which parts a rank runs, and their shards as one.

The merged shard is that of a build whose part is the union: edges between the parts are no longer cut, and halo nodes
are owned by ranks. So nothing that comes after needs to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import maximum_bipartite_matching

from fullgraph.shards import Array, Shard, local_id_dtype

Ids = NDArray[np.int64]


def choose_ranks(cost: NDArray[Any], readable: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[P] the rank of each part: runs of consecutive parts, one a rank, whose largest cost is least.

    ``cost`` [P] is a part's; ``readable`` [W, P] says which parts a rank can read. As many ranks as parts take one
    each, their own where they can. Raises ``ValueError`` where no such choice gives every rank parts that it can read.
    """
    ranks, parts = readable.shape
    assert 1 <= ranks <= parts == cost.shape[0]
    if ranks == parts:
        if readable.diagonal().all():
            return np.arange(parts, dtype=np.int32)
        match = maximum_bipartite_matching(sp.csr_array(readable.T.astype(np.int8)), perm_type="column")
        if (match < 0).any():
            raise ValueError(_impossible(readable))
        return match.astype(np.int32)
    return _runs(np.concatenate([[0.0], np.cumsum(cost, dtype=np.float64)]), readable)


def _runs(before: NDArray[np.float64], readable: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The same for fewer ranks than parts, by dynamic programming over the ends of the runs: O(W P^2) in numpy.

    ``before`` [P+1] is the cost of all parts before one. Ranks take their runs in order of what they can read.
    """
    ranks, parts = readable.shape
    first, last = readable.argmax(axis=1), parts - readable[:, ::-1].argmax(axis=1)
    order = np.lexsort((np.arange(ranks), last, first))
    cost = before[None, :] - before[:, None]  # [start, stop]
    ends = np.arange(parts + 1)
    least = np.where(ends == 0, 0.0, np.inf)
    starts = np.empty((ranks, parts + 1), np.int64)
    for i, rank in enumerate(order):
        # The first part from each start on that this rank cannot read.
        gaps = np.concatenate([np.flatnonzero(~readable[rank]), [parts]])
        limit = np.append(gaps[np.searchsorted(gaps, np.arange(parts))], parts)
        good = (ends[None, :] > ends[:, None]) & (ends[None, :] <= limit[:, None])
        largest = np.where(good, np.maximum(least[:, None], cost), np.inf)
        starts[i] = largest.argmin(axis=0)
        least = largest.min(axis=0)
    if not np.isfinite(least[parts]):
        raise ValueError(_impossible(readable))
    out, stop = np.empty(parts, np.int32), parts
    for i in reversed(range(ranks)):
        start = starts[i, stop]
        out[start:stop] = order[i]
        stop = start
    return out


def _impossible(readable: NDArray[np.bool_]) -> str:
    ranks, parts = readable.shape
    lists = [f"rank {rank} reads {_list(np.flatnonzero(row))}" for rank, row in enumerate(readable)]
    each = "one part" if ranks == parts else "a run of consecutive parts"
    return (
        f"{parts} parts cannot be given to {ranks} ranks so that each has {each} that it can read "
        f"({'; '.join(lists[:8])}{'; ...' if ranks > 8 else ''}); copy the missing files to the hosts that lack them"
    )


def _list(parts: NDArray[np.int64]) -> str:
    return ", ".join(map(str, parts.tolist())) or "none"


@dataclass(frozen=True, eq=False)
class Joined:
    """Shards of one rank, matched with each other: everything about their union but where its halo nodes lie in the
    unions of other ranks, which those must be asked."""

    shards: Sequence[Shard]
    ranks: NDArray[np.int32]
    """[P] the rank of each part."""
    rank: int
    order: Ids
    """[n] place in the concatenated owned lists of each owned node of the union."""
    position: Ids
    """[n] the inverse."""
    local: tuple[Ids, ...]
    """For each shard, [n+h] local id in the union of each of its local ids."""
    halo_first: Ids
    """[h] place in the concatenated halo lists of each halo node of the union."""
    halo_global: Ids
    """[h] sorted by (rank, global id)."""
    halo_rank: NDArray[np.int32]
    halo_part: Ids
    halo_index: Ids
    """[h] index in the owned list of its part."""

    @property
    def owned_global(self) -> Ids:
        """[n] ascending."""
        return np.concatenate([s.owned_global for s in self.shards])[self.order]

    @property
    def owned_part(self) -> NDArray[np.int32]:
        """[n] the part of each owned node of the union."""
        return np.concatenate([np.full(s.num_owned, s.part, np.int32) for s in self.shards])[self.order]

    def places(self, part: Ids, index: Ids, global_id: Ids) -> Ids:
        """Where nodes that others know by part, index in it and global id lie in the union's owned list.

        Raises ``ValueError`` where another node or none lies there.
        """
        return self.position[_find(self.shards, part, index, global_id, f"rank {self.rank}")]

    def shard(self, halo_index: Ids) -> Shard:
        """The union, given the index of each halo node in its owner's union."""
        shards, n, order = self.shards, self.order.shape[0], self.order
        degree = np.concatenate([np.diff(s.indptr) for s in shards])
        start = np.cumsum(degree) - degree
        indptr = np.concatenate([[0], np.cumsum(degree[order])]).astype(np.int64)
        row = np.repeat(np.arange(n), degree[order])
        # Where each edge lies in the concatenated edge lists: rows in order of the union, then sources in each.
        taken = np.arange(row.shape[0]) + np.repeat(start[order] - indptr[:-1], degree[order])
        source = np.concatenate([local[s.indices] for local, s in zip(self.local, shards, strict=True)])[taken]
        # Equal sources of a row stand in order of edge id, and a stable sort leaves them so.
        by_source = np.argsort(row * (n + self.halo_global.shape[0]) + source, kind="stable")
        taken, source = taken[by_source], source[by_source]

        def owned(name: str, axis: int = 0) -> Any:
            values = self._each(name)
            return None if values is None else np.concatenate(values, axis=axis).take(order, axis)

        def edges(name: str) -> Any:
            values = self._each(name)
            return None if values is None else np.concatenate(values)[taken]

        def known(name: str) -> Array:
            pieces = [(getattr(s, name)[: s.num_owned], getattr(s, name)[s.num_owned :]) for s in shards]
            mine, halo = (np.concatenate(side) for side in zip(*pieces, strict=True))
            return np.concatenate([mine[order], halo[self.halo_first]])

        return replace(
            shards[0],
            part=self.rank,
            parts=int(self.ranks.max()) + 1,
            owned_global=self.owned_global,
            halo_global=self.halo_global,
            halo_owner=self.halo_rank,
            halo_index=halo_index,
            indptr=indptr,
            indices=source.astype(local_id_dtype(n + self.halo_global.shape[0])),
            edge_global=edges("edge_global"),
            edge_weight=edges("edge_weight"),
            edge_x=edges("edge_x"),
            in_degree=known("in_degree"),
            in_weight=known("in_weight"),
            loop_count=known("loop_count"),
            x=self._features(),
            y=owned("y"),
            train=owned("train", 1),
            val=owned("val", 1),
            test=owned("test", 1),
            node_ids=owned("node_ids"),
            cluster=owned("cluster"),
        )

    def _each(self, name: str) -> list[Any] | None:
        values = [getattr(s, name) for s in self.shards]
        if all(value is None for value in values):
            return None
        for s, value in zip(self.shards, values, strict=True):
            if value is None:
                raise ValueError(f"part {s.part} has no {name}, but others have; build the shards again")
        return values

    def _features(self) -> Array | sp.csr_array | None:
        values = self._each("x")
        if values is None:
            return None
        if any(isinstance(x, sp.csr_array) for x in values):
            x = sp.csr_array(sp.vstack([sp.csr_array(x) for x in values], format="csr"))[self.order]
            dtype = local_id_dtype(max(x.shape[1], x.nnz + 1))
            indptr, indices = x.indptr.astype(dtype, copy=False), x.indices.astype(dtype, copy=False)
            return sp.csr_array((x.data, indices, indptr), shape=x.shape)
        out = np.empty((self.order.shape[0], values[0].shape[1]), np.result_type(*values))
        first = 0
        for x in values:  # one copy, not two
            out[self.position[first : first + x.shape[0]]] = x
            first += x.shape[0]
        return out


def join(shards: Sequence[Shard], ranks: NDArray[np.int32], rank: int) -> Joined:
    """Match the shards of the parts that ``rank`` runs, in order of part; ``ranks`` [P] is the rank of each part.

    Raises ``ValueError`` where two of them do not fit together.
    """
    owned = np.concatenate([s.owned_global for s in shards])
    n = owned.shape[0]
    order = np.argsort(owned, kind="stable")
    position = np.empty(n, np.int64)
    position[order] = np.arange(n)
    halo = np.concatenate([s.halo_global for s in shards])
    part = np.concatenate([s.halo_owner for s in shards]).astype(np.int64)
    index = np.concatenate([s.halo_index for s in shards])
    inside = ranks[part] == rank
    local = np.empty(halo.shape[0], np.int64)
    who = f"rank {rank}"
    local[inside] = position[_find(shards, part[inside], index[inside], halo[inside], who)]

    outside = np.flatnonzero(~inside)
    unique, first, inverse = np.unique(halo[outside], return_index=True, return_inverse=True)
    first = outside[first]
    for name, values in (("owner", part), ("index", index)):
        same = values[first][inverse] == values[outside]
        if not same.all():
            node = int(halo[outside][np.argmin(same)])
            raise ValueError(f"halo/{name}: parts of {who} differ on node {node}; build the shards again")
    by_rank = np.lexsort((unique, ranks[part[first]]))
    number = np.empty(unique.shape[0], np.int64)
    number[by_rank] = np.arange(unique.shape[0])
    local[outside] = n + number[inverse]
    first = first[by_rank]

    stops = np.cumsum([(s.num_owned, s.num_halo) for s in shards], axis=0)
    locals_ = tuple(
        np.concatenate([position[a - s.num_owned : a], local[b - s.num_halo : b]])
        for s, (a, b) in zip(shards, stops.tolist(), strict=True)
    )
    return Joined(
        shards=shards,
        ranks=ranks,
        rank=rank,
        order=order,
        position=position,
        local=locals_,
        halo_first=first,
        halo_global=halo[first],
        halo_rank=ranks[part[first]].astype(np.int32),
        halo_part=part[first],
        halo_index=index[first],
    )


def _find(shards: Sequence[Shard], part: Ids, index: Ids, global_id: Ids, who: str) -> Ids:
    """Place in the concatenated owned lists of nodes known by part, index in it and global id."""
    owned = np.concatenate([s.owned_global for s in shards])
    sizes = np.array([s.num_owned for s in shards])
    starts = np.cumsum(sizes) - sizes
    number = np.searchsorted([s.part for s in shards], part)
    place: Ids = starts[number] + index
    bad = (index < 0) | (index >= sizes[number])
    bad[~bad] = owned[place[~bad]] != global_id[~bad]
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(
            f"node {int(global_id[i])} is expected at index {int(index[i])} of part {int(part[i])} ({who}), where it "
            f"is not; the shards do not fit together: build them again"
        )
    return place
