"""Small graphs that between them hold every odd thing a graph or its partition can hold, and their shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from fullgraph.cut import halo_nodes
from fullgraph.shards import Shard, local_id_dtype
from partition_tools.graph import Graph, Splits

Parts = Callable[[Graph, int], NDArray[np.int32]]


@dataclass(frozen=True)
class Case:
    """A graph and how it falls into parts."""

    graph: Graph
    split_up: Parts
    options: dict[str, Any] = field(default_factory=dict)
    """Options of TrainConfig under which the everyday tests train on it."""
    everyday: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers of ranks on which they do; for kinds of data, which do not depend on the parts, one is enough."""

    def part(self, parts: int) -> NDArray[np.int32]:
        """[N] the part of each node."""
        return self.split_up(self.graph, parts) if parts > 1 else np.zeros(self.graph.num_nodes, np.int32)


# ------------------------------------------------------------------------------------------------------------ parts


def at_random(graph: Graph, parts: int) -> NDArray[np.int32]:
    return np.random.default_rng(parts).permutation(graph.num_nodes).astype(np.int32) % parts


def without_part(empty: int) -> Parts:
    """At random over all parts but one."""

    def split_up(graph: Graph, parts: int) -> NDArray[np.int32]:
        part = at_random(graph, parts - 1)
        return part + (part >= empty % parts).astype(np.int32)

    return split_up


def first_apart(graph: Graph, parts: int) -> NDArray[np.int32]:
    """The first third of the nodes are part 0; the rest are at random over the others."""
    others = np.random.default_rng(parts).integers(1, parts, graph.num_nodes)
    return np.where(np.arange(graph.num_nodes) < graph.num_nodes // 3, 0, others).astype(np.int32)


def halves(graph: Graph, parts: int) -> NDArray[np.int32]:
    """Even parts share the first half of the nodes, odd parts the second."""
    node = np.arange(graph.num_nodes)
    second = node >= graph.num_nodes // 2
    evens, odds = -(-parts // 2), parts // 2
    return np.where(second, 2 * (node % odds) + 1, 2 * (node % evens)).astype(np.int32)


# ----------------------------------------------------------------------------------------------------------- graphs


def random_graph(
    name: str,
    *,
    nodes: int = 48,
    edges: int = 150,
    features: int = 10,
    classes: int = 4,
    seed: int = 0,
    undirected: bool = False,
    weighted: bool = False,
    loops: int = 0,
    isolated: int = 0,
) -> Graph:
    """Single-label, two splits. Without loops unless asked; the last ``isolated`` nodes have no edge."""
    rng = np.random.default_rng(seed)
    linked = nodes - isolated
    src = rng.integers(linked, size=edges)
    dst = (src + rng.integers(1, linked, size=edges)) % linked
    if undirected:
        src, dst = np.concatenate([src, dst]), np.concatenate([dst, src])
    at = rng.integers(linked, size=loops)
    src, dst = np.concatenate([src, at]), np.concatenate([dst, at])
    order = rng.permutation(src.shape[0])
    return Graph(
        name=name,
        num_nodes=nodes,
        src=src[order].astype(np.int64),
        dst=dst[order].astype(np.int64),
        x=rng.standard_normal((nodes, features)),
        y=rng.integers(classes, size=nodes),
        splits=random_splits(rng, nodes, count=2),
        edge_weight=rng.uniform(0.1, 2.0, src.shape[0]) if weighted else None,
    )


def random_splits(rng: np.random.Generator, nodes: int, count: int) -> Splits:
    kind = rng.choice(4, size=(count, nodes), p=[0.4, 0.25, 0.25, 0.1])
    return Splits(train=kind == 0, val=kind == 1, test=kind == 2)


def train_on(graph: Graph, mask: NDArray[np.bool_]) -> Graph:
    """``graph`` with the training nodes outside ``mask`` [N] moved to no split."""
    assert graph.splits is not None
    return dataclasses.replace(graph, splits=dataclasses.replace(graph.splits, train=graph.splits.train & mask))


def _case_undirected() -> Case:
    return Case(random_graph("undirected", undirected=True, edges=90, seed=1), at_random, {"clip": 0.5})


def _case_directed() -> Case:
    graph = random_graph("directed", seed=2, features=6)
    return Case(graph, at_random, {"norm": "layer", "layers": 3, "split": 1})


def _case_weighted() -> Case:
    """Weighted; the in-edges of one node all weigh nothing, and one edge's weight is negative."""
    graph = random_graph("weighted", weighted=True, seed=3, features=8)
    assert graph.edge_weight is not None
    weight = graph.edge_weight.copy()
    weight[graph.dst == graph.dst[0]] = 0.0
    heavy = np.argmax(weight)
    weight[np.flatnonzero(graph.dst == graph.dst[heavy])[0]] = -0.01
    return Case(dataclasses.replace(graph, edge_weight=weight), at_random, {"residual": True, "optimizer": "adamw"})


def _case_loops() -> Case:
    """Weighted, with single and repeated loops and with edges given up to three times."""
    graph = random_graph("loops", weighted=True, loops=30, edges=60, seed=4)
    src, dst = (
        np.concatenate([graph.src, graph.src[:40], graph.src[:20]]),
        np.concatenate([graph.dst, graph.dst[:40], graph.dst[:20]]),
    )
    weight = np.random.default_rng(4).uniform(0.1, 2.0, src.shape[0])
    return Case(dataclasses.replace(graph, src=src, dst=dst, edge_weight=weight), at_random, {"norm": "batch"})


def _case_isolated() -> Case:
    """A quarter of the nodes have no edge, and the last part owns nothing but such nodes."""
    graph = random_graph("isolated", undirected=True, edges=60, isolated=12, seed=5)

    def split_up(graph: Graph, parts: int) -> NDArray[np.int32]:
        part = at_random(graph, parts - 1) if parts > 2 else np.zeros(graph.num_nodes, np.int32)
        part[-8:] = parts - 1
        return part

    return Case(graph, split_up, {"norm": "batch", "layers": 3, "hidden": 16, "heads": 4})


def _case_empty_part() -> Case:
    graph = random_graph("empty part", undirected=True, edges=90, seed=6)
    return Case(graph, without_part(-1), {"norm": "batch", "residual": True, "layers": 3})


def _case_empty_first_part() -> Case:
    return Case(random_graph("empty first part", seed=7), without_part(0), {"norm": "layer"}, (3,))


def _case_no_halo() -> Case:
    """Part 0 is a component of its own."""
    graph = random_graph("no halo", edges=250, seed=8)
    third = graph.num_nodes // 3
    inside = (graph.src < third) == (graph.dst < third)
    return Case(dataclasses.replace(graph, src=graph.src[inside], dst=graph.dst[inside]), first_apart)


def _case_no_training_node() -> Case:
    """Rank 0 has no training node."""
    graph = random_graph("no training node", seed=9)
    graph = train_on(graph, np.arange(graph.num_nodes) >= graph.num_nodes // 3)
    return Case(graph, first_apart, {"class_weights": "balanced"})


def _case_one_training_node() -> Case:
    """One rank has the only training node, and no rank but that of the last node a validation node."""
    graph = random_graph("one training node", undirected=True, edges=90, seed=10)
    train = np.zeros(graph.num_nodes, np.bool_)
    train[graph.num_nodes // 2] = True
    splits = Splits(train=train[None], val=np.roll(train, -1 - graph.num_nodes // 2)[None], test=~train[None])
    return Case(dataclasses.replace(graph, splits=splits), at_random, {"norm": "batch"}, (4,))


def _case_one_way() -> Case:
    """Ten nodes that only send and ten that only receive, in different parts."""
    rng = np.random.default_rng(11)
    graph = random_graph("one way", nodes=20, edges=0, seed=11)
    src, dst = rng.integers(10, size=40), rng.integers(10, 20, size=40)
    return Case(dataclasses.replace(graph, src=src.astype(np.int64), dst=dst.astype(np.int64)), halves, everyday=(2, 4))


def _case_sparse() -> Case:
    """Features stored as CSR, several labels a node."""
    rng = np.random.default_rng(12)
    graph = random_graph("sparse", seed=12)
    x = sp.random_array((graph.num_nodes, 40), density=0.06, format="csr", rng=rng)
    y = (rng.random((graph.num_nodes, 3)) < 0.4).astype(np.uint8)
    graph = dataclasses.replace(graph, x=sp.csr_array(x), y=y)
    return Case(graph, at_random, {"feature_norm": "row", "metric": "roc_auc"}, (1, 3))


def _case_regression() -> Case:
    """Two targets, missing for some nodes outside the splits."""
    rng = np.random.default_rng(13)
    graph = random_graph("regression", weighted=True, seed=13)
    assert graph.splits is not None
    y = rng.standard_normal((graph.num_nodes, 2))
    y[~(graph.splits.train | graph.splits.val | graph.splits.test).any(0)] = np.nan
    return Case(dataclasses.replace(graph, y=y), at_random, {"optimizer": "sgd", "lr": 1e-3, "norm": "layer"}, (3,))


def _case_two_classes() -> Case:
    """Two classes, and nodes without a label outside the splits."""
    graph = random_graph("two classes", classes=2, undirected=True, edges=90, seed=14)
    assert graph.y is not None
    assert graph.splits is not None
    inside = (graph.splits.train | graph.splits.val | graph.splits.test).any(0)
    y = np.where(inside, graph.y, -1)
    return Case(dataclasses.replace(graph, y=y), at_random, {"metric": "roc_auc", "class_weights": "balanced"}, (2,))


def _case_edge_features() -> Case:
    """Features of edges that come up to three times, of single and repeated loops, beside nodes without any edge."""
    rng = np.random.default_rng(15)
    graph = random_graph("edge features", loops=20, edges=70, isolated=6, features=6, seed=15)
    src, dst = (np.concatenate([ends, ends[:30], ends[:10]]) for ends in (graph.src, graph.dst))
    edge_x = rng.standard_normal((src.shape[0], 3), dtype=np.float32)
    return Case(dataclasses.replace(graph, src=src, dst=dst, edge_x=edge_x), at_random, {"clip": 0.3}, (1, 3))


def _case_learned_features() -> Case:
    """A table of features is learned; few nodes are trained on, so that most rows have no gradient."""
    graph = random_graph("learned features", edges=80, seed=16)
    graph = train_on(graph, np.arange(graph.num_nodes) < 14)
    graph = dataclasses.replace(graph, x=None, learned_features=5)
    return Case(graph, at_random, {"clip": 0.2, "weight_decay": 0.01}, (1, 2, 3))


CASES: dict[str, Case] = {
    case.graph.name: case
    for case in (
        _case_undirected(),
        _case_directed(),
        _case_weighted(),
        _case_loops(),
        _case_isolated(),
        _case_empty_part(),
        _case_empty_first_part(),
        _case_no_halo(),
        _case_no_training_node(),
        _case_one_training_node(),
        _case_one_way(),
        _case_sparse(),
        _case_regression(),
        _case_two_classes(),
        _case_edge_features(),
        _case_learned_features(),
    )
}
"""By name of the graph."""


# ----------------------------------------------------------------------------------------------------------- shards


def shard_of(graph: Graph, part: NDArray[np.int32], q: int, parts: int) -> Shard:
    """Part q of ``graph`` under ``part`` [N]."""
    edges = np.flatnonzero(part[graph.dst] == q)
    owned = np.flatnonzero(part == q)
    halo = halo_nodes(graph.src[edges], part, q)
    n, known = owned.shape[0], np.concatenate([owned, halo])
    index = np.zeros(graph.num_nodes, np.int64)
    for p in range(parts):
        index[part == p] = np.arange(np.count_nonzero(part == p))
    local = np.full(graph.num_nodes, -1, np.int64)
    local[known] = np.arange(known.shape[0])
    edges = edges[np.lexsort((edges, local[graph.src[edges]], local[graph.dst[edges]]))]
    in_degree = np.bincount(graph.dst, minlength=graph.num_nodes)
    weight = graph.edge_weight
    in_weight = np.bincount(graph.dst, weight, graph.num_nodes).astype(np.float64)
    y, splits = graph.y, graph.splits
    classes = 0 if y is None else int(y.max()) + 1 if graph.task == "single-label" else y.reshape(len(y), -1).shape[1]
    masks = {
        name: np.zeros((0, n), np.bool_) if splits is None else getattr(splits, name)[:, owned]
        for name in ("train", "val", "test")
    }
    return Shard(
        part=q,
        parts=parts,
        build_id="test",
        graph=graph.name,
        num_nodes_global=graph.num_nodes,
        num_edges_global=graph.num_edges,
        task=graph.task,
        num_classes=classes,
        owned_global=owned,
        halo_global=halo,
        halo_owner=part[halo].astype(np.int32),
        halo_index=index[halo],
        indptr=np.concatenate([[0], np.cumsum(np.bincount(local[graph.dst[edges]], minlength=n))]),
        indices=local[graph.src[edges]].astype(local_id_dtype(known.shape[0])),
        edge_global=edges,
        edge_weight=None if weight is None else weight[edges],
        edge_x=None if graph.edge_x is None else graph.edge_x[edges],
        in_degree=in_degree[known],
        in_weight=in_weight[known],
        loop_count=np.bincount(graph.dst[graph.src == graph.dst], minlength=graph.num_nodes)[known],
        x=None if graph.x is None else graph.x[owned],
        learned_features=graph.learned_features,
        y=None if y is None else y[owned],
        **masks,
        node_ids=None,
    )
