"""Moving nodes of the boundary to other parts, many at a time, to make a partition cost less.

A round proposes moves by a local surrogate and the objective decides. The surrogate holds every other node's share of
the message rows fixed: a node x has row (x, r) where it is in the cover of its own part's edges with part r. Moved to
part t, x costs one row for each part r other than t in which some neighbour y has no row (y, t) that covers the edge;
staying, it costs its own rows and those rows (y, p) that a neighbour has for x alone. The difference is the gain.

Proposals of a round are a random part of the nodes with a gain, more of them after a success and fewer after a
failure. The search may stand still for a while on partitions of equal cost; what is kept is only what costs less.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse as sp

from fullgraph.cut import CutGraph
from partition_tools.loads import Loads, Moves
from partition_tools.objective import Edges, Evaluation, Objective

MAX_TABLE = 1 << 28
"""Nodes times parts beyond which refinement would take gigabytes and is left out."""
_NODES_AT_ONCE = 1 << 16
_PATIENCE = 120
"""Rounds without a lower cost after which the search ends."""


@dataclass(frozen=True, eq=False)
class Refined:
    """A refined partition and its cost."""

    part: NDArray[np.int32]
    evaluation: Evaluation
    rounds: int
    """Rounds tried."""
    late: bool
    """Whether the time ended them."""


def refine(
    objective: Objective,
    loads: Loads,
    part: NDArray[np.int32],
    *,
    rounds: int,
    seed: int,
    deadline: float = float("inf"),
    compute: bool = False,
) -> Refined:
    """At most ``rounds`` rounds from ``part`` [N], until ``deadline`` (of `time.monotonic`).

    What must fall is the traffic; with ``compute`` the cost, and then traffic may not rise. So the result has no more
    of either, no load of it is beyond what is allowed where it was not before, and every part that had
    a node has one. Without ``deadline`` it depends on the arguments alone.
    """
    best = here = objective(part)
    kept = part
    if objective.parts == 1 or not objective.edges or part.shape[0] * objective.parts > MAX_TABLE:
        return Refined(part, best, 0, False)

    def score(evaluation: Evaluation) -> float:
        return evaluation.cost if compute else evaluation.traffic

    rng = np.random.default_rng(seed)
    totals, gains = loads.totals(part), _gains(objective, part, here)
    share, failures, done = 0.5, 0, 0
    while done < rounds and failures < _PATIENCE and gains.node.size:
        if time.monotonic() > deadline:
            return Refined(kept, best, done, True)
        done += 1
        # Noise below a row breaks ties; after failures moves that gain nothing are tried, and now and then worse ones.
        noisy = gains.table + rng.random(gains.table.shape, np.float32) * np.float32(0.9 * gains.unit)
        target = noisy.argmax(axis=1)
        gain = noisy[np.arange(target.shape[0]), target]
        least = 0.9 if failures < 6 else 0.0 if failures % 3 else -1.0
        able = np.flatnonzero(gain > least * gains.unit)
        chosen = able[rng.random(able.shape[0]) < share]
        moves = loads.admit(part, totals, Moves(gains.node[chosen], target[chosen], gain[chosen]))
        moves = _leaving_none_empty(part, moves, objective.parts)
        if not moves.node.size:
            failures += 1
            share = min(1.0, 2 * share)
            continue
        trial = part.copy()
        trial[moves.node] = moves.target
        found = objective(trial)
        if score(found) > score(here) or (compute and found.traffic > best.traffic):
            failures += 1
            share = max(share * 0.6, min(0.5, 2 / able.shape[0]))
            continue
        part, here, totals = trial, found, loads.totals(trial)
        gains = _gains(objective, part, here)
        if score(here) < score(best):
            kept, best, failures, share = part, here, 0, min(1.0, share * 1.3)
        else:
            failures += 1
    return Refined(kept, best, done, False)


def _leaving_none_empty(part: NDArray[np.int32], moves: Moves, parts: int) -> Moves:
    count = np.bincount(part, minlength=parts)
    left = count - np.bincount(part[moves.node], minlength=parts) + np.bincount(moves.target, minlength=parts)
    emptied = (left == 0) & (count > 0)
    return moves.take(~emptied[part[moves.node]]) if emptied.any() else moves


@dataclass(frozen=True, eq=False)
class _Gains:
    node: NDArray[np.int64]
    """[b] nodes with a cut edge."""
    table: NDArray[np.float32]
    """[b, P] seconds saved by moving each to each part; -inf where it has no neighbour there."""
    unit: float
    """Seconds of a row."""


def _gains(objective: Objective, part: NDArray[np.int32], evaluation: Evaluation) -> _Gains:
    n, parts = part.shape[0], objective.parts
    near = np.zeros(n * parts, np.bool_)
    for edges in objective.edges:
        crosses = part[edges.src] != part[edges.dst]
        u, v = edges.src[crosses], edges.dst[crosses]
        near[u * parts + part[v]] = True
        near[v * parts + part[u]] = True
    touched = near.reshape(n, parts)
    node = np.flatnonzero(touched.any(axis=1))
    place = np.full(n, -1)
    place[node] = np.arange(node.shape[0])
    table = np.zeros((node.shape[0], parts), np.float32)
    for edges, cut, weight in zip(objective.edges, evaluation.cuts, objective.weights, strict=True):
        for side, factor in _sides(edges, cut, n, parts, covers=objective.covers):
            inside = place[side.mine] >= 0
            x, y = side.mine[inside], side.other[inside]
            saved = _staying(x, y, side, part, parts)[node, None] - _moved(
                place[x], y, side, part, parts, node.shape[0]
            )
            table += np.float32(weight * factor) * saved
    table[~touched[node]] = -np.inf
    return _Gains(node, table, min(objective.weights))


@dataclass(frozen=True, eq=False)
class _Side:
    """Edges seen from one end, x = mine[i] and y = other[i], and rows as tables [N * P] of (node, foreign part)."""

    mine: NDArray[np.int64]
    other: NDArray[np.int64]
    own: NDArray[np.bool_]
    """Rows of nodes as x."""
    others: NDArray[np.bool_]
    """Rows of nodes as y."""
    each: bool = False
    """Whether every y without a row would need one of its own, as x can have none for them."""


def _sides(edges: Edges, cut: CutGraph, n: int, parts: int, *, covers: bool) -> list[tuple[_Side, int]]:
    """The ends from which an edge set is seen, and how often each counts."""
    raw, summed = np.zeros(n * parts, np.bool_), np.zeros(n * parts, np.bool_)
    if not covers:
        raw[cut.sources] = True
        if edges.symmetric:
            raw[cut.targets] = True
        return [
            (_Side(edges.src, edges.dst, raw, summed), 1),
            (_Side(edges.dst, edges.src, summed, raw, each=True), 1),
        ]
    sources, targets = cut.covered()
    raw[sources], summed[targets] = True, True
    if edges.symmetric:  # one cover serves both directions
        raw |= summed
        return [(_Side(edges.src, edges.dst, raw, raw), 2)]
    return [(_Side(edges.src, edges.dst, raw, summed), 1), (_Side(edges.dst, edges.src, summed, raw), 1)]


def _staying(
    x: NDArray[np.int64], y: NDArray[np.int64], side: _Side, part: NDArray[np.int32], parts: int
) -> NDArray[np.int64]:
    """[N] rows that hang on a node where it is: its own, and those of a neighbour that only it needs."""
    n, foreign = part.shape[0], part[y]
    crosses = part[x] != foreign
    rest = crosses & ~side.own[x * parts + foreign]
    row = y[rest] * parts + part[x[rest]]
    alone = np.bincount(row, minlength=n * parts)[row] == 1
    own: NDArray[np.int64] = np.count_nonzero(side.own.reshape(n, parts), axis=1)
    return own + np.bincount(x[rest][alone], minlength=n)


def _moved(
    x: NDArray[np.int64], y: NDArray[np.int64], side: _Side, part: NDArray[np.int32], parts: int, count: int
) -> NDArray[np.float32]:
    """[count, P] rows that x, one of ``count`` nodes, would cost in each part."""
    flags = side.others.reshape(-1, parts)
    if side.each:
        lacking = (~flags).astype(np.float32)
        lacking[np.arange(part.shape[0]), part] = 0
        matrix = sp.csr_array((np.ones(x.shape[0], np.float32), (x, y)), shape=(count, part.shape[0]))
        return np.asarray(matrix @ lacking)
    # Bit t of word w: whether every neighbour of x in part r has a row for part 64 w + t.
    packed = np.packbits(flags, axis=1, bitorder="little")
    words = -(-parts // 64)
    packed = np.pad(packed, ((0, 0), (0, 8 * words - packed.shape[1]))).view(np.uint64)
    key = x * parts + part[y]
    seen = np.zeros(count * parts, np.bool_)
    seen[key] = True
    group = np.flatnonzero(seen)
    number = np.empty(count * parts, np.int64)
    number[group] = np.arange(group.shape[0])
    all_have = np.full((words, group.shape[0]), np.iinfo(np.uint64).max, np.uint64)
    for word in range(words):
        np.bitwise_and.at(all_have[word], number[key], packed[y, word])
    first = np.flatnonzero(np.diff(group // parts, prepend=-1))
    out = np.zeros((count, parts), np.float32)
    for low in range(0, first.shape[0], _NODES_AT_ONCE):
        starts = first[low : low + _NODES_AT_ONCE]
        begin, end = (
            int(starts[0]),
            int(first[low + starts.shape[0]]) if low + starts.shape[0] < first.shape[0] else group.shape[0],
        )
        have = np.unpackbits(np.ascontiguousarray(all_have[:, begin:end].T).view(np.uint8), axis=1, bitorder="little")
        lacks = 1 - have[:, :parts]
        lacks[np.arange(end - begin), group[begin:end] % parts] = 0
        out[group[starts] // parts] = np.add.reduceat(lacks, starts - begin, axis=0, dtype=np.float32)
    return out
