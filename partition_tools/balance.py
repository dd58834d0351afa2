"""Balance by one or several loads at once: which loads, clusters packed under all of them, and repair by moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse as sp

from partition_tools import metis
from partition_tools.adjacency import Adjacency
from partition_tools.graph import Graph
from partition_tools.loads import Loads, integer_load

CLUSTERS_A_PART = 32
"""Clusters that are packed into a part: many, so that every load can be met, and few, so that each hangs together."""
_NODES_A_CLUSTER = 4
_STEPS = 400
"""Of a repair."""


def loads_of(
    graph: Graph, balance: Sequence[str], cost: Callable[[], NDArray[np.float64]], notes: list[str]
) -> dict[str, NDArray[np.int64]]:
    """The loads [N] that ``balance`` names; ``cost()`` is the seconds [N] that each node takes in a step.

    Raises ``ValueError`` where the graph has no such load.
    """
    found: dict[str, NDArray[np.int64]] = {}
    given = graph.node_weight
    if given is not None and "nodes" not in balance:
        notes.append("node weights were not used for the partition (--balance nodes uses them)")
    for name in balance:
        if name == "nodes" and given is not None:
            columns = checked_weights(graph.name, given)
            several = len(columns) > 1
            found |= {f"node weights, column {i}" if several else "node weights": c for i, c in enumerate(columns)}
            notes.append(
                "parts are balanced by the graph's node weights" + (f", {len(columns)} columns" if several else "")
            )
        elif name == "nodes":
            found["nodes"] = np.ones(graph.num_nodes, np.int64)
        elif name == "edges":
            # Balanced alone, a node without in-edges counts as one, so that such nodes are spread, too.
            least = 0 if "nodes" in balance and graph.num_edges else 1
            into = np.zeros(graph.num_nodes, np.int64)
            for _, _, dst in graph.edge_blocks():
                into += np.bincount(dst, minlength=graph.num_nodes)
            found["edges"] = np.maximum(into, least)
        elif name == "train":
            if graph.splits is None or not graph.splits.train[:1].any():
                raise ValueError(
                    f"{graph.name}: --balance train: the graph has no training nodes; leave it out, or give it a split "
                    f"(--random-split)"
                )
            found["train"] = graph.splits.train[0].astype(np.int64)
        else:
            found["cost"] = integer_load(cost())
    return found


def checked_weights(name: str, weights: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The columns of node weights [N, c], c >= 1."""
    if weights.ndim != 2 or weights.shape[1] < 1 or not np.issubdtype(weights.dtype, np.integer):
        raise ValueError(f"{name}: node weights are {weights.dtype} {list(weights.shape)}; expected integers [N, c]")
    columns = []
    for index, column in enumerate(weights.T):
        if int(column.min()) < 0:
            node = int(np.flatnonzero(column < 0)[0])
            raise ValueError(f"{name}: node {node} has weight {int(column[node])} in column {index}; expected >= 0")
        total = column.sum(dtype=np.float64)
        if not 0 < total < metis.MAX_TOTAL_WEIGHT:
            raise ValueError(
                f"{name}: node weights in column {index} sum to {total:.0f}; expected more than 0 and less than "
                f"{metis.MAX_TOTAL_WEIGHT} (scale them down)"
            )
        columns.append(np.ascontiguousarray(column, dtype=np.int64))
    return columns


def cluster_count(nodes: int, parts: int) -> int:
    """Clusters to make where they are to be packed."""
    return max(parts, min(CLUSTERS_A_PART * parts, nodes // _NODES_A_CLUSTER))


def pack(cluster: NDArray[np.int32], adjacency: Adjacency, loads: Loads) -> NDArray[np.int32]:
    """[N] parts: whole clusters (``cluster`` is [N]) put where they have most neighbours and every load has room.

    The largest cluster first, each into the part that it overfills least, of these the one with most of its pairs; then
    clusters move on to where they have more pairs as long as there is room.
    """
    count, parts = int(cluster.max()) + 1, loads.parts
    pairs = _pairs_between(cluster, cluster, adjacency, count, count).toarray() if count <= 4096 else None
    sparse = None if pairs is not None else _pairs_between(cluster, cluster, adjacency, count, count)
    carried = np.stack([np.bincount(cluster, row, count) for row in loads.load])
    target = np.maximum(loads.target, 1e-12)
    owner = np.full(count, -1)
    totals = np.zeros_like(loads.target)

    def links(c: int) -> NDArray[np.float64]:
        """[P] pairs of a cluster with each part."""
        if pairs is not None:
            owners, weight = owner, pairs[c]
        else:
            assert sparse is not None
            row = sparse[[c]]
            owners, weight = owner[row.indices], row.data
        placed = owners >= 0
        out: NDArray[np.float64] = np.bincount(owners[placed], weight[placed], parts).astype(np.float64)
        if owner[c] >= 0 and pairs is not None:
            out[owner[c]] -= pairs[c, c]
        return out

    size = (carried / target.mean(axis=1, keepdims=True)).max(axis=0)
    for c in np.argsort(-size, kind="stable").tolist():
        after = totals + carried[:, [c]]
        over = np.maximum(after - loads.allowed, 0) / target
        fill = (after / target).max(axis=0)
        q = int(np.lexsort((fill, -links(c), np.round(over.max(axis=0), 9)))[0])
        owner[c] = q
        totals[:, q] += carried[:, c]
    for _ in range(4):
        moved = False
        for c in range(count):
            p, linked = int(owner[c]), links(c)
            q = int(np.argmax(linked))
            room = ((totals[:, q] + carried[:, c]) <= loads.allowed[:, q]).all()
            alone = np.count_nonzero(owner == p) == 1
            if linked[q] > linked[p] and room and not alone:
                owner[c], moved = q, True
                totals[:, q] += carried[:, c]
                totals[:, p] -= carried[:, c]
        if not moved:
            break
    return owner[cluster].astype(np.int32)


def repair(part: NDArray[np.int32], adjacency: Adjacency, loads: Loads) -> NDArray[np.int32]:
    """The same parts with nodes moved until no load is beyond what is allowed, or no more can be done.

    Every step lowers ``sum ((carried - target) / target)^2`` over loads and parts: for the part that is most beyond,
    the best move out of it or into it is found, and with that move go the nodes that lower the sum nearly as well and
    lose least of their pairs. Every part keeps a node.
    """
    part = part.copy()
    n = part.shape[0]
    matrix = sp.csr_array(
        (np.ones(adjacency.adjncy.shape[0], np.float32), adjacency.adjncy, adjacency.xadj), shape=(n, n)
    )
    target = np.maximum(loads.target, 1e-12)
    unit = (loads.load / target.mean(axis=1, keepdims=True)).T
    square = (unit**2).sum(axis=1)
    for _ in range(_STEPS):
        totals = loads.totals(part)
        excess = (totals - loads.allowed) / target
        worst = int(np.argmax(excess.max(axis=0)))
        if excess[:, worst].max() <= 1e-9:
            break
        # Change of the sum, halved, by moving v from p to q: l_v . (d_q - d_p + l_v).
        off = (totals - target) / target
        inside = np.flatnonzero(part == worst)
        leave = unit[inside] @ (off - off[:, [worst]]) + square[inside, None]
        leave[:, worst] = np.inf
        outside = np.flatnonzero(part != worst)
        enter = (unit[outside] * (off[:, [worst]] - off[:, part[outside]]).T).sum(axis=1) + square[outside]
        if leave.min() <= enter.min():
            p, q = worst, int(np.argmin(leave.min(axis=0)))
            nodes, change = inside, leave[:, q]
        else:
            p, q = int(part[outside[np.argmin(enter)]]), worst
            of_p = part[outside] == p
            nodes, change = outside[of_p], enter[of_p]
        if nodes.size < 2 or change.min() >= -1e-15:
            break
        worth = change / np.sqrt(np.maximum(square[nodes], 1e-300))
        able = nodes[worth <= 0.5 * worth[change < 0].min()]
        rows = matrix[able]
        gain = rows @ (part == q).astype(np.float32) - rows @ (part == p).astype(np.float32)
        able = able[np.argsort(-gain, kind="stable")][: nodes.size - 1]
        carried = np.cumsum(unit[able], axis=0)
        after = carried @ (off[:, q] - off[:, p]) + (carried**2).sum(axis=1)
        least = int(np.argmin(after))
        part[able[: max(1, (least + 1) // 2)]] = q
    return part


def _pairs_between(
    a: NDArray[np.int32], b: NDArray[np.int32], adjacency: Adjacency, rows: int, columns: int
) -> sp.csr_array:
    """[rows, columns] adjacency entries between groups of nodes."""
    node = np.repeat(np.arange(adjacency.num_nodes), np.diff(adjacency.xadj))
    return sp.csr_array((np.ones(node.shape[0], np.float64), (a[node], b[adjacency.adjncy])), shape=(rows, columns))
