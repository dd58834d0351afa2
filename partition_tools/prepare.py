"""What may happen to a graph between its file and its partitioning, each step asked for and said in ``changes``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp

from partition_tools.graph import Array, Graph, Splits, entry_keys

_BLOCK_ROWS = 1 << 16


def check(graph: Graph) -> None:
    """Raise ``ValueError`` for data that would turn a training run into NaN.

    That is: NaN or infinity in features, edge weights or targets (a target of NaN means no label), and nodes without
    a label in a mask.
    """
    if graph.x is not None:
        _check_features(graph)
    if graph.edge_weight is not None:
        bad = np.flatnonzero(~np.isfinite(graph.edge_weight))
        if bad.size:
            edge = int(bad[0])
            raise ValueError(
                f"{graph.name}: edge_weight holds {bad.size} values that are NaN or infinite; the first is "
                f"{graph.edge_weight[edge]} of edge {edge} ({int(graph.src[edge])} -> {int(graph.dst[edge])}); "
                f"replace them or remove those edges"
            )
    if graph.y is None:
        return
    if graph.task == "regression" and np.isinf(graph.y).any():
        node = int(np.argwhere(np.isinf(graph.y))[0, 0])
        raise ValueError(f"{graph.name}: y of node {node} is infinite; NaN says that a node has no target")
    if graph.splits is None:
        return
    unlabelled = ~graph.labelled
    for part in ("train", "val", "test"):
        mask = getattr(graph.splits, part) & unlabelled
        counts = mask.sum(axis=1)
        if counts.any():
            split = int(np.argmax(counts > 0))
            raise ValueError(
                f"{graph.name}: {int(counts[split])} nodes of the {part} mask of split {split} have no label (-1 or "
                f"NaN), node {int(np.argmax(mask[split]))} first; take them out of the mask or label them"
            )


def _check_features(graph: Graph) -> None:
    x = graph.x
    assert x is not None
    if not np.issubdtype(x.dtype, np.floating):
        return
    count, place = 0, (0, 0)
    if isinstance(x, sp.csr_array):
        bad = np.flatnonzero(~np.isfinite(x.data))
        if bad.size:
            count = bad.size
            place = (int(np.searchsorted(x.indptr, bad[0], "right")) - 1, int(x.indices[bad[0]]))
    else:
        for start in range(0, graph.num_nodes, _BLOCK_ROWS):
            rows, columns = np.nonzero(~np.isfinite(x[start : start + _BLOCK_ROWS]))
            if rows.size and count == 0:
                place = (start + int(rows[0]), int(columns[0]))
            count += rows.size
    if count:
        raise ValueError(
            f"{graph.name}: x holds {count} values that are NaN or infinite, the first at node {place[0]}, column "
            f"{place[1]}; replace them (by 0 or the column's mean) or drop the column"
        )


def make_undirected(graph: Graph) -> Graph:
    """The graph with an entry v -> u, of the same weight, for each entry u -> v that has none.

    Of a repeated entry the i-th copy is answered by the i-th copy of its reverse, so the result holds u -> v as often
    as v -> u. Entries of the graph keep their ids; new ones follow. Loops have no reverse.
    """
    there = entry_keys(graph.src, graph.dst, graph.num_nodes)
    back = entry_keys(graph.dst, graph.src, graph.num_nodes)
    order = np.argsort(there, kind="stable")
    ordered = there[order]
    copy = np.empty_like(order)
    copy[order] = np.arange(order.size) - np.searchsorted(ordered, ordered, "left")
    answers = np.searchsorted(ordered, back, "right") - np.searchsorted(ordered, back, "left")
    alone = np.flatnonzero((copy >= answers) & (graph.src != graph.dst))
    weight = graph.edge_weight
    return replace(
        graph,
        src=np.concatenate([graph.src, graph.dst[alone]]),
        dst=np.concatenate([graph.dst, graph.src[alone]]),
        edge_weight=None if weight is None else np.concatenate([weight, weight[alone]]),
        changes=(
            *graph.changes,
            f"made undirected: {alone.size} reverse entries added, {graph.num_edges} entries became "
            f"{graph.num_edges + alone.size}",
        ),
    )


def parse_fractions(text: str) -> tuple[float, float, float]:
    """Shares of train, val and test from ``0.6/0.2/0.2``; ``ValueError`` unless each is in 0..1 and they fit into 1."""
    expected = "expected three shares like 0.6/0.2/0.2 (train/val/test), each 0 to 1, together at most 1"
    try:
        train, val, test = (float(share) for share in text.split("/"))
    except ValueError as error:
        raise ValueError(f"fractions are {text!r}; {expected}") from error
    # All but NaN and what lies outside; a sum such as 0.7 + 0.2 + 0.1 may exceed 1 by rounding.
    if not all(0 <= share <= 1 for share in (train, val, test)) or not train > 0 or train + val + test > 1 + 1e-9:
        raise ValueError(f"fractions are {text!r}; {expected}; train must not be 0")
    return train, val, test


def random_split(graph: Graph, fractions: tuple[float, float, float], seed: int) -> Graph:
    """The graph with one random split of its labelled nodes, by ``fractions``, in place of the splits it had.

    Stratified for single-label graphs: in each class every share is met to within one node. Nodes without a label are
    in no mask; shares that sum to less than 1 leave the rest in none. Raises ``ValueError`` for a graph without labels.
    """
    labelled = np.flatnonzero(graph.labelled)
    if labelled.size == 0:
        raise ValueError(f"{graph.name}: no node has a label, so there is nothing to split into train, val and test")
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(labelled)
    stratified = graph.task == "single-label"
    strata = graph.y[shuffled] if stratified and graph.y is not None else np.zeros(shuffled.size, np.int64)
    order = np.argsort(strata, kind="stable")
    nodes, stratum = shuffled[order], strata[order]
    begin = np.searchsorted(stratum, stratum, "left")
    size = np.searchsorted(stratum, stratum, "right") - begin
    part = _parts(np.arange(nodes.size) - begin, size, fractions)
    masks = np.zeros((3, 1, graph.num_nodes), np.bool_)
    for index in range(3):
        masks[index, 0, nodes[part == index]] = True
    counts = masks.sum(axis=(1, 2))
    shares = "/".join(f"{share:g}" for share in fractions)
    without = graph.num_nodes - labelled.size
    sentence = (
        f"{'stratified ' if stratified else ''}random split {shares} with seed {seed}: {counts[0]} train, {counts[1]} "
        f"val, {counts[2]} test"
        + (f"; {without} nodes without a label are in no mask" if without else "")
        + (f", in place of the splits there were ({graph.splits.count})" if graph.splits is not None else "")
    )
    return replace(
        graph, splits=Splits(train=masks[0], val=masks[1], test=masks[2]), changes=(*graph.changes, sentence)
    )


def _parts(rank: Array, size: Array, fractions: tuple[float, float, float]) -> Array:
    """0 train, 1 val, 2 test, 3 none, for the ``rank``-th of ``size`` nodes of a class."""
    # Rounding the running sums, not the shares, keeps every boundary within half a node of where it should lie.
    bounds = np.floor(np.cumsum(fractions)[:, None] * size + 0.5 + 1e-9)
    return np.asarray((rank[None, :] >= bounds).sum(axis=0))
