"""What a graph is, in numbers: printed before partitioning, and kept in the manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from fullgraph.wording import counted
from partition_tools.graph import Graph, release
from partition_tools.pairs import component_of_nodes, count_pairs
from partition_tools.stored import Features, StoredRows

_SHOWN = 12
"""Classes, and _SHOWN // 4 splits, that `render` shows one by one."""


@dataclass(frozen=True, kw_only=True)
class SplitCount:
    """Nodes in the masks of one split."""

    train: int
    val: int
    test: int
    overlap: int
    """Nodes in more than one of the three."""
    train_val: int
    """Nodes in train and val."""
    train_test: int
    """Nodes in train and test."""
    val_test: int
    """Nodes in val and test."""
    uncovered: int
    """Nodes in none of the three."""


@dataclass(frozen=True, kw_only=True)
class WeightCount:
    """Edge weights that a layer may not take as it takes others: layers say what they do with them."""

    zero: int
    """Edges of weight 0."""
    negative: int
    """Edges of negative weight."""
    zero_sums: int
    """Nodes with in-edges whose weights sum to 0."""
    negative_sums: int
    """Nodes whose in-edges' weights sum to less than 0."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    name: str
    num_nodes: int
    num_edges: int
    """Directed entries, as training sees them."""
    undirected_pairs: int
    """Distinct unordered pairs of two nodes: loops dropped, duplicates and directions merged."""
    loops: int
    """Entries u -> u."""
    duplicates: int
    """Entries beyond the first of their (source, destination)."""
    isolated: int
    """Nodes without an entry from or to another node."""
    components: int
    """Weakly connected components; an isolated node is one."""
    largest_component: int
    in_degree: tuple[int, int]
    """Smallest and largest number of in-entries of a node; duplicates and loops count."""
    out_degree: tuple[int, int]
    weighted: bool
    weights: WeightCount | None
    """None without edge weights."""
    directed: bool
    """Some entry u -> v occurs more often than v -> u."""
    num_features: int
    feature_dtype: str | None
    feature_density: float | None
    """Share of features that are not 0."""
    onehot: bool
    """The features are the N unit vectors: a column for each node of this very graph."""
    learned_features: int
    """Columns of a table that training learns in place of features; 0 for none."""
    num_edge_features: int
    edge_feature_dtype: str | None
    task: str | None
    num_classes: int
    """Classes, label columns or targets; 0 without labels."""
    num_labelled: int
    class_names: tuple[int | str, ...]
    """The user's own labels of the classes; empty where they are 0..C-1."""
    label_counts: tuple[int, ...]
    """Nodes of each class (single-label) or with each label (multi-label)."""
    num_splits: int
    split_counts: tuple[SplitCount, ...]
    changes: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """Everything but ``changes`` as plain values for JSON."""
        plain = asdict(self)
        del plain["changes"]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


def summarise(graph: Graph) -> Summary:
    n = graph.num_nodes
    counts, component = count_pairs(graph), component_of_nodes(graph)
    in_degree, out_degree, loops = np.zeros(n, np.int64), np.zeros(n, np.int64), 0
    for _, src, dst in graph.edge_blocks():
        in_degree += np.bincount(dst, minlength=n)
        out_degree += np.bincount(src, minlength=n)
        loops += int(np.count_nonzero(src == dst))
    component_size = np.bincount(component)
    x, splits = graph.x, graph.splits
    label_counts = _label_counts(graph)
    return Summary(
        name=graph.name,
        num_nodes=n,
        num_edges=graph.num_edges,
        undirected_pairs=counts.pairs,
        loops=loops,
        duplicates=graph.num_edges - counts.distinct,
        isolated=int(np.count_nonzero(component_size == 1)),
        components=int(component_size.shape[0]),
        largest_component=int(component_size.max()),
        in_degree=(int(in_degree.min()), int(in_degree.max())),
        out_degree=(int(out_degree.min()), int(out_degree.max())),
        weighted=graph.edge_weight is not None,
        weights=_weights(graph, in_degree),
        directed=not counts.symmetric,
        num_features=0 if x is None else int(x.shape[1]),
        feature_dtype=None if x is None else str(x.dtype),
        feature_density=None if x is None else _density(x),
        onehot=_is_onehot(x),
        learned_features=graph.learned_features,
        num_edge_features=0 if graph.edge_x is None else int(graph.edge_x.shape[1]),
        edge_feature_dtype=None if graph.edge_x is None else str(graph.edge_x.dtype),
        task=graph.task,
        num_classes=_num_classes(graph),
        num_labelled=int(graph.labelled.sum()),
        class_names=() if graph.class_names is None else tuple(graph.class_names.tolist()),
        label_counts=label_counts,
        num_splits=0 if splits is None else splits.count,
        split_counts=_split_counts(graph),
        changes=graph.changes,
    )


def _density(x: Features) -> float:
    if isinstance(x, StoredRows):
        nonzero = x.scan.nonzero
    else:
        nonzero = int(np.count_nonzero(x.data if isinstance(x, sp.csr_array) else x))
    return nonzero / max(1, int(x.shape[0]) * int(x.shape[1]))


def _is_onehot(x: Features | None) -> bool:
    if not isinstance(x, sp.csr_array) or not x.shape[0] == x.shape[1] == x.nnz or x.nnz < 2:
        return False
    nodes = np.arange(x.nnz)
    return bool((x.data == 1).all() and np.array_equal(x.indices, nodes) and np.array_equal(x.indptr[:-1], nodes))


def _weights(graph: Graph, in_degree: NDArray[np.int64]) -> WeightCount | None:
    if graph.edge_weight is None:
        return None
    sums, zero, negative = np.zeros(graph.num_nodes), 0, 0
    for block, _, dst in graph.edge_blocks():
        weight = graph.edge_weight[block]
        np.add.at(sums, dst, weight)  # in order of edges, whatever the blocks
        zero += int(np.count_nonzero(weight == 0))
        negative += int(np.count_nonzero(weight < 0))
        release(graph.edge_weight)
    return WeightCount(
        zero=zero,
        negative=negative,
        zero_sums=int(np.count_nonzero((sums == 0) & (in_degree > 0))),
        negative_sums=int(np.count_nonzero(sums < 0)),
    )


def _num_classes(graph: Graph) -> int:
    if graph.y is None:
        return 0
    if graph.task == "single-label":
        return int(graph.y.max(initial=-1)) + 1
    return int(graph.y.shape[1]) if graph.y.ndim == 2 else 1


def _label_counts(graph: Graph) -> tuple[int, ...]:
    if graph.y is None or graph.task == "regression":
        return ()
    if graph.task == "multi-label":
        return tuple(int(count) for count in graph.y.sum(axis=0, dtype=np.int64))
    return tuple(int(count) for count in np.bincount(graph.y[graph.labelled], minlength=_num_classes(graph)))


def _split_counts(graph: Graph) -> tuple[SplitCount, ...]:
    if graph.splits is None:
        return ()
    masks = np.stack([graph.splits.train, graph.splits.val, graph.splits.test]).astype(np.uint8)
    sizes, times = masks.sum(axis=2, dtype=np.int64), masks.sum(axis=0)
    both = [(masks[a] & masks[b]).sum(axis=1, dtype=np.int64) for a, b in ((0, 1), (0, 2), (1, 2))]
    return tuple(
        SplitCount(
            train=int(sizes[0, split]),
            val=int(sizes[1, split]),
            test=int(sizes[2, split]),
            overlap=int(np.count_nonzero(times[split] > 1)),
            train_val=int(both[0][split]),
            train_test=int(both[1][split]),
            val_test=int(both[2][split]),
            uncovered=int(np.count_nonzero(times[split] == 0)),
        )
        for split in range(graph.splits.count)
    )


def warnings(summary: Summary) -> list[str]:
    """Sentences on splits that train or score something else than people mean."""
    said = []
    for what, effect, nodes in (
        (
            "train and val",
            "the score that picks the best epoch is of nodes trained on",
            [c.train_val for c in summary.split_counts],
        ),
        ("train and test", "the test score is of nodes trained on", [c.train_test for c in summary.split_counts]),
        (
            "val and test",
            "the test score is of nodes that pick the best epoch",
            [c.val_test for c in summary.split_counts],
        ),
    ):
        found = [(split, count) for split, count in enumerate(nodes) if count]
        if found:
            split, count = found[0]
            more = f", and so in {counted(len(found) - 1, 'other split')}" if len(found) > 1 else ""
            said.append(f"split {split}: {counted(count, 'node is', 'nodes are')} in {what}{more}; {effect}")
    empty = [split for split, count in enumerate(summary.split_counts) if not count.train]
    if empty and summary.task is not None:
        more = f", nor in {counted(len(empty) - 1, 'other split')}" if len(empty) > 1 else ""
        said.append(f"split {empty[0]}: no node is in train{more}; it cannot be trained on")
    return said


def render(summary: Summary) -> str:
    """The summary as lines for a terminal or a log."""
    s = summary
    rows = [
        ("graph", s.name),
        ("nodes", f"{s.num_nodes:,} ({s.isolated:,} isolated)"),
        ("directed entries", f"{s.num_edges:,} ({counted(s.loops, 'loop')}, {counted(s.duplicates, 'duplicate')})"),
        ("undirected pairs", f"{s.undirected_pairs:,} (loops dropped, duplicates merged)"),
        (
            "direction",
            "directed (some entries have no reverse)" if s.directed else "undirected (every entry has its reverse)",
        ),
        ("edge weights", _edge_weights(s)),
        ("components", f"{s.components:,} (largest {counted(s.largest_component, 'node')})"),
        ("in-degree", f"{s.in_degree[0]:,} to {s.in_degree[1]:,}, mean {s.num_edges / s.num_nodes:.1f}"),
        ("out-degree", f"{s.out_degree[0]:,} to {s.out_degree[1]:,}"),
    ]
    if s.feature_density is not None:
        rows.append(("features", f"{s.num_features:,} {s.feature_dtype}, {100 * s.feature_density:.3g} % not 0"))
    elif s.learned_features:
        rows.append(("features", f"{s.learned_features:,} that training learns, a row a node"))
    else:
        rows.append(("features", "none"))
    if s.edge_feature_dtype is not None:
        rows.append(("edge features", f"{s.num_edge_features:,} {s.edge_feature_dtype}"))
    rows.append(("labels", _labels(s)))
    for index, split in enumerate(s.split_counts[: _SHOWN // 4]):
        extra = "".join(
            f", {count:,} {what}"
            for what, count in (("in more than one", split.overlap), ("in none", split.uncovered))
            if count
        )
        rows.append((f"split {index}", f"train {split.train:,}, val {split.val:,}, test {split.test:,}{extra}"))
    hidden = s.num_splits - _SHOWN // 4
    if s.num_splits == 0:
        rows.append(("splits", "none"))
    elif hidden > 0:
        rows.append(("splits", f"{s.num_splits}, {hidden} not shown"))
    rows += [("changed" if index == 0 else "", change) for index, change in enumerate(s.changes)]
    return "\n".join(f"{label:<17} {value}" for label, value in rows)


def _edge_weights(s: Summary) -> str:
    if s.weights is None:
        return "yes" if s.weighted else "no"
    w, odd = s.weights, ""
    if w.zero or w.negative:
        odd += f", {w.zero:,} of them 0, {w.negative:,} negative"
    if w.zero_sums or w.negative_sums:
        odd += (
            f"; into {counted(w.zero_sums, 'node')} they sum to 0, into {w.negative_sums:,} to less (gcn and sage "
            f"divide by it)"
        )
    return f"yes{odd}"


def _labels(s: Summary) -> str:
    if s.task is None:
        return "none"
    one, many = {"single-label": ("class", "classes"), "multi-label": ("label", "labels")}.get(
        s.task, ("target", "targets")
    )
    counts = ", ".join(f"{count:,}" for count in s.label_counts[:_SHOWN])
    return (
        f"{s.task}, {counted(s.num_classes, one, many)}, {s.num_labelled:,} of {counted(s.num_nodes, 'node')} labelled"
        + (f"; nodes each: {counts}" if counts else "")
        + (", ..." if len(s.label_counts) > _SHOWN else "")
    )
