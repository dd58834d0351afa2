"""What may happen to a graph between its file and its partitioning, each step asked for and said in ``changes``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from fullgraph.host import available_memory
from fullgraph.wording import counted
from partition_tools.graph import Array, Graph, Splits, entry_keys, machine_memory, release
from partition_tools.mapped import Growing, blocks
from partition_tools.stored import Features, StoredRows, row_blocks

_FEATURES = {"x": "node", "edge_x": "edge"}
"""Fields of features, and what a row of each is."""
_MERGE_EDGE, _REVERSE_EDGE = 56, 96
"""Bytes an edge that merging duplicates and adding reverse edges take: keys, their order, and the result."""


def check(graph: Graph) -> None:
    """Raise ``ValueError`` for data that would turn a training run into NaN: `check_values` and `check_masks`."""
    check_values(graph)
    check_masks(graph)


def check_values(graph: Graph) -> None:
    """Raise ``ValueError`` for NaN or infinity in features of nodes or edges or in edge weights, and for infinite
    targets (NaN means no label)."""
    for field, row in _FEATURES.items():
        found = _not_finite(getattr(graph, field))
        if found is not None:
            count, (index, column) = found
            place = graph.node(index) if row == "node" else graph.edge(index)
            raise ValueError(
                f"{graph.where(field)} holds {_no_numbers(count)}, the first at {place}, column {column}; "
                f"replace them (--nan zero or --nan mean) or drop the column"
            )
    if graph.edge_weight is not None:
        count, edge = 0, 0
        for block in blocks(graph.num_edges):
            bad = np.flatnonzero(~np.isfinite(graph.edge_weight[block]))
            if bad.size and not count:
                edge = block.start + int(bad[0])
            count += bad.size
            release(graph.edge_weight)
        if count:
            raise ValueError(
                f"{graph.where('edge_weight')} holds {_no_numbers(count)}; the first is {graph.edge_weight[edge]} "
                f"of {graph.edge(edge)}; replace them or remove those edges"
            )
    if graph.y is not None and graph.task == "regression" and np.isinf(graph.y).any():
        node = int(np.argwhere(np.isinf(graph.y))[0, 0])
        raise ValueError(
            f"{graph.where('y')}: the target of {graph.node(node)} is infinite; NaN says that a node has none"
        )


def check_masks(graph: Graph) -> None:
    """Raise ``ValueError`` for nodes without a label in a mask of a graph with labels."""
    if graph.y is None or graph.splits is None:
        return
    unlabelled = ~graph.labelled
    for part in ("train", "val", "test"):
        mask = getattr(graph.splits, part) & unlabelled
        counts = mask.sum(axis=1)
        if counts.any():
            split = int(np.argmax(counts > 0))
            of = f"of the {part} mask of split {split}"
            without = counted(int(counts[split]), f"node {of} has", f"nodes {of} have")
            raise ValueError(
                f"{graph.where('y')}: {without} no label (-1 or NaN), {graph.node(int(np.argmax(mask[split])))} first; "
                f"take them out of the mask or label them"
            )


def _no_numbers(count: int) -> str:
    return counted(count, "value that is NaN or infinite", "values that are NaN or infinite")


def _not_finite(x: Features | None) -> tuple[int, tuple[int, int]] | None:
    """How many values are NaN or infinite, and the row and column of the first; None where all are finite."""
    if x is None or not np.issubdtype(x.dtype, np.floating):
        return None
    if isinstance(x, sp.csr_array):
        bad = np.flatnonzero(~np.isfinite(x.data))
        if bad.size == 0:
            return None
        return bad.size, (int(np.searchsorted(x.indptr, bad[0], "right")) - 1, int(x.indices[bad[0]]))
    if isinstance(x, StoredRows):
        return (x.scan.not_finite, x.scan.first) if x.scan.not_finite else None
    count, place = 0, (0, 0)
    for start, block in row_blocks(x):
        rows, columns = np.nonzero(~np.isfinite(block))
        if rows.size and count == 0:
            place = (start + int(rows[0]), int(columns[0]))
        count += rows.size
        release(x)
    return (count, place) if count else None


def fill_features(graph: Graph, how: str) -> Graph:
    """The graph with features of nodes and edges that are NaN or infinite replaced by 0 or by their column's mean.

    ``how`` is zero or mean. A mean is that of the column's finite values, those that a sparse matrix does not store
    (zeros) included; 0 for a column without any. Dtypes stay.
    """
    filled: dict[str, Any] = {}
    changes = list(graph.changes)
    for field in _FEATURES:
        x = getattr(graph, field)
        found = _not_finite(x)
        if found is None:
            continue
        filled[field] = _filled_sparse(x, how) if isinstance(x, sp.csr_array) else _filled(np.asarray(x), how)
        became = "0" if how == "zero" else "the mean of their column"
        changes.append(f"{_no_numbers(found[0])} in {field} became {became}")
    return replace(graph, **filled, changes=tuple(changes))


def _filled(x: Array, how: str) -> Array:
    values, (rows, columns) = x.copy(), np.nonzero(~np.isfinite(x))
    values[rows, columns] = 0
    if how == "mean":
        means = _means(values.sum(axis=0, dtype=np.float64), columns, x.shape[0])
        values[rows, columns] = means[columns]
    return values


def _filled_sparse(x: sp.csr_array, how: str) -> sp.csr_array:
    values, bad = x.data.copy(), ~np.isfinite(x.data)
    values[bad] = 0
    if how == "mean":
        columns = x.indices[bad]
        means = _means(np.bincount(x.indices, values, x.shape[1]), columns, x.shape[0])
        values[bad] = means[columns]
    return sp.csr_array((values, x.indices, x.indptr), shape=x.shape)


def _means(total: Array, bad_columns: Array, rows: int) -> NDArray[np.float64]:
    """Means of columns by their sums without the bad values."""
    good = rows - np.bincount(bad_columns, minlength=total.shape[0])
    return np.asarray(total / np.maximum(good, 1))


def _with_edges(graph: Graph, edges: NDArray[np.int64], change: str) -> Graph:
    """The graph with these of its edges, in this order."""
    return replace(
        graph,
        src=graph.src[edges],
        dst=graph.dst[edges],
        edge_weight=None if graph.edge_weight is None else graph.edge_weight[edges],
        edge_x=None if graph.edge_x is None else graph.edge_x[edges],
        changes=(*graph.changes, change),
    )


def drop_loops(graph: Graph) -> Graph:
    """The graph without edges from a node to itself; the others keep their order."""
    if graph.edges_on_disk:
        return _without_loops_on_disk(graph)
    kept = np.flatnonzero(graph.src != graph.dst)
    return _with_edges(graph, kept, f"{counted(graph.num_edges - kept.size, 'loop')} dropped")


def _without_loops_on_disk(graph: Graph) -> Graph:
    tables = {name: getattr(graph, name) for name in ("src", "dst", "edge_weight", "edge_x")}
    given = {name: table for name, table in tables.items() if table is not None}
    kept = {name: Growing(table.dtype, table.shape[1:]) for name, table in given.items()}
    for block, src, dst in graph.edge_blocks():
        plain = src != dst
        for name, table in given.items():
            kept[name].add(table[block][plain])
            release(table)
    without: dict[str, Any] = {name: table.array() for name, table in kept.items()}
    dropped = graph.num_edges - without["src"].shape[0]
    return replace(graph, **without, changes=(*graph.changes, f"{counted(dropped, 'loop')} dropped"))


def in_memory(graph: Graph, flag: str, bytes_an_edge: int) -> Graph:
    """The graph with its edges in memory, where ``flag`` needs them there; ``ValueError`` where they do not fit."""
    if not graph.edges_on_disk:
        return graph
    needed, free = bytes_an_edge * graph.num_edges, available_memory()
    if needed > free:
        raise ValueError(
            f"{graph.where('edges')}: {flag} sorts all edges in memory, {needed / 2**30:,.1f} GiB of it for "
            f"{counted(graph.num_edges, 'edge')}, and {free / 2**30:,.1f} GiB are free; apply it before, and name the "
            f"file that results"
        )
    tables: dict[str, Any] = {name: getattr(graph, name) for name in ("src", "dst", "edge_weight", "edge_x")}
    held: dict[str, Any] = {name: None if table is None else np.array(table) for name, table in tables.items()}
    return replace(graph, **held)


def merge_duplicates(graph: Graph, how: str) -> Graph:
    """The graph with one edge for all that have the same source and destination, in the order of the first of each.

    ``how`` is sum (weights are summed; where there are none an edge counts 1), first (the first is kept as it is) or
    error (``ValueError`` naming the first repeated edge).
    """
    graph = in_memory(graph, f"--duplicates {how}", _MERGE_EDGE)
    keys = entry_keys(graph.src, graph.dst, graph.num_nodes)
    order = np.argsort(keys, kind="stable")
    begins = np.flatnonzero(np.diff(keys[order], prepend=-1))
    firsts = order[begins]
    repeated = graph.num_edges - firsts.size
    if repeated and how == "error":
        again = np.ones(graph.num_edges, np.bool_)
        again[firsts] = False
        edge = int(np.argmax(again))
        raise ValueError(
            f"{graph.where('edges')}: {graph.edge(edge)} has the ends of an edge before it; "
            f"{counted(repeated, 'edge repeats', 'edges repeat')} another (--duplicates error); --duplicates sum or "
            f"first merges them"
        )
    if repeated == 0:
        return replace(graph, changes=(*graph.changes, "no edge repeats another, so no duplicates were merged"))
    if how == "sum" and graph.edge_x is not None:
        raise ValueError(
            f"{graph.where('edges')}: --duplicates sum: {counted(repeated, 'edge repeats', 'edges repeat')} another, "
            f"and their features have no sum; --duplicates first keeps those of the first"
        )
    by_first = np.argsort(firsts)
    said = counted(repeated, "edge that repeats another was", "edges that repeat another were") + " merged with it: "
    merged = _with_edges(
        graph, firsts[by_first], said + ("weights summed" if how == "sum" else "the first of each was kept")
    )
    if how == "first":
        return merged
    weight = np.ones(graph.num_edges, np.float32) if graph.edge_weight is None else graph.edge_weight
    summed = np.add.reduceat(weight[order].astype(np.float64), begins).astype(weight.dtype)
    return replace(merged, edge_weight=summed[by_first])


def make_features(graph: Graph, kind: str, columns: int, seed: int) -> Graph:
    """The graph with features made from it: degree, onehot, random or learned.

    degree: float32 log(1 + in-degree), and log(1 + out-degree) where some node's differs. onehot: the N unit vectors,
    sparse. random: ``columns`` standard normal float32, by ``seed``. learned: none, but ``learned_features`` columns
    that training learns.
    """
    n = graph.num_nodes
    memory = machine_memory()
    if kind == "random" and 4 * n * columns > memory:
        raise ValueError(
            f"--features random:{columns}: {columns:,} float32 columns of {counted(n, 'node')} are "
            f"{4 * n * columns / 2**30:,.0f} GiB, and this machine has {memory / 2**30:.0f}; take fewer columns"
        )
    x: Array | sp.csr_array | None = None
    if kind == "degree":
        into, out = (np.bincount(ends, minlength=n) for ends in (graph.dst, graph.src))
        alike = np.array_equal(into, out)
        x = np.log1p(np.stack([into] if alike else [into, out], axis=1)).astype(np.float32)
        said = "log(1 + degree)" if alike else "log(1 + in-degree) and log(1 + out-degree)"
    elif kind == "onehot":
        ones, offsets = np.ones(n, np.float32), np.arange(n + 1)
        x = sp.csr_array((ones, offsets[:-1], offsets), shape=(n, n))
        said = f"a column for each of {counted(n, 'node')} (one-hot)"
    elif kind == "random":
        x = np.random.default_rng(seed).standard_normal((n, columns), np.float32)
        said = f"{counted(columns, 'random column')}, standard normal with seed {seed}"
    else:
        said = f"{counted(columns, 'column')} that training learns"
    instead = "" if graph.x is None else f", in place of the {graph.x.shape[1]} of the graph's own"
    return replace(
        graph,
        x=x,
        learned_features=columns if kind == "learned" else 0,
        changes=(*graph.changes, f"features: {said}{instead}"),
    )


def make_undirected(graph: Graph) -> Graph:
    """The graph with an entry v -> u, of the same weight and features, for each entry u -> v that has none.

    Of a repeated entry the i-th copy is answered by the i-th copy of its reverse, so the result holds u -> v as often
    as v -> u. Entries of the graph keep their ids; new ones follow. Loops have no reverse.
    """
    graph = in_memory(graph, "--undirected", _REVERSE_EDGE)
    there = entry_keys(graph.src, graph.dst, graph.num_nodes)
    back = entry_keys(graph.dst, graph.src, graph.num_nodes)
    order = np.argsort(there, kind="stable")
    ordered = there[order]
    copy = np.empty_like(order)
    copy[order] = np.arange(order.size) - np.searchsorted(ordered, ordered, "left")
    answers = np.searchsorted(ordered, back, "right") - np.searchsorted(ordered, back, "left")
    alone = np.flatnonzero((copy >= answers) & (graph.src != graph.dst))
    weight, edge_x = graph.edge_weight, graph.edge_x
    return replace(
        graph,
        src=np.concatenate([graph.src, graph.dst[alone]]),
        dst=np.concatenate([graph.dst, graph.src[alone]]),
        edge_weight=None if weight is None else np.concatenate([weight, weight[alone]]),
        edge_x=None if edge_x is None else np.concatenate([edge_x, edge_x[alone]]),
        changes=(
            *graph.changes,
            f"made undirected: {counted(alone.size, 'reverse entry', 'reverse entries')} added, {graph.num_edges:,} "
            f"entries became {graph.num_edges + alone.size:,}",
        ),
    )


def weights_as_features(graph: Graph) -> Graph:
    """The graph with its edge weights, which stay, as one more column of edge features. Raises ``ValueError`` for a
    graph without weights."""
    if graph.edge_weight is None:
        raise ValueError(
            f"{graph.where('edges')}: --weights-as-features: the graph has no edge weights (--weights takes those of a "
            f"matrix or an edge list)"
        )
    column = graph.edge_weight[:, None]
    edge_x = column if graph.edge_x is None else np.concatenate([graph.edge_x, column], axis=1)
    said = f"edge weights were added as column {edge_x.shape[1] - 1} of the edge features, {edge_x.dtype}"
    return replace(graph, edge_x=edge_x, changes=(*graph.changes, said))


def parse_fractions(text: str) -> tuple[float, float, float]:
    """Shares of train, val and test from --random-split's ``0.6/0.2/0.2``; ``ValueError`` unless each is in 0..1 and
    they fit into 1."""
    expected = "expected three shares like 0.6/0.2/0.2 (train/val/test), each 0 to 1, together at most 1"
    try:
        train, val, test = (float(share) for share in text.split("/"))
    except ValueError as error:
        raise ValueError(f"--random-split {text}: {expected}") from error
    # All but NaN and what lies outside; a sum such as 0.7 + 0.2 + 0.1 may exceed 1 by rounding.
    if not all(0 <= share <= 1 for share in (train, val, test)) or not train > 0 or train + val + test > 1 + 1e-9:
        raise ValueError(f"--random-split {text}: {expected}; train must not be 0")
    return train, val, test


def random_split(graph: Graph, fractions: tuple[float, float, float], seed: int) -> Graph:
    """The graph with one random split of its labelled nodes, by ``fractions``, in place of the splits it had.

    Stratified for single-label graphs: in each class every share is met to within one node. Nodes without a label are
    in no mask; shares that sum to less than 1 leave the rest in none. Raises ``ValueError`` for a graph without labels.
    """
    labelled = np.flatnonzero(graph.labelled)
    if labelled.size == 0:
        raise ValueError(
            f"{graph.where('y')}: --random-split splits labelled nodes into train, val and test, but no node has a "
            f"label"
        )
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
        + (f"; {counted(without, 'node without a label is', 'nodes without a label are')} in no mask" * bool(without))
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
