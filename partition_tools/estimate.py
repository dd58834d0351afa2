"""Time and memory of a build, and of each rank's training, before either is paid for.

What a build takes follows from the graph's sizes and constants of this machine's kind. What training takes hangs on
what the parts send each other, which only an assignment tells: one is made by the method that is asked for, and nothing
is written.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import numpy as np
import scipy.sparse as sp
from rich.console import Console
from rich.table import Table

from fullgraph.config import TrainConfig
from fullgraph.cost import Machine
from fullgraph.cut import label_reach, layer_counts
from fullgraph.footprint import PROCESS_BYTES, RankRows, loading_bytes, memory_by_tensor
from fullgraph.step import ModelShape, rank_rows, step_cost
from partition_tools.assign import Assignment, AssignOptions
from partition_tools.cutter import SPARSE_BELOW
from partition_tools.graph import Graph
from partition_tools.memory import Need, build_need
from partition_tools.summary import Summary

METIS_EDGE = {"kway": 0.8e-6, "recursive": 1.0e-6}
"""Seconds an edge that METIS takes on one core of a 2-core virtual machine; recursive bisection for each level."""
_LOOK_EDGE, _WRITE_EDGE = 0.15e-6, 0.25e-6
"""Seconds an edge to look over the graph, and to cut and write shards,"""
_BYTE = 1.5e-9
"""a byte of features to look over and deal out,"""
_PART = 0.03
"""and a shard."""


def assign_seconds(graph: Graph, options: AssignOptions) -> float:
    """Seconds that assigning the nodes should take."""
    levels = max(1, (options.parts - 1).bit_length())
    if options.method == "best" and options.parts > 1:  # nine runs of METIS, and rounds of at most so many edges
        return min(options.time_limit, 5 + 9 * METIS_EDGE["recursive"] * levels * graph.num_edges + 30)
    if options.method == "fennel":
        return 1e-7 * options.passes * graph.num_edges
    if options.parts == 1 or not (options.method == "metis" or options.clusters):
        return 1e-7 * (graph.num_edges if options.method == "bfs" else graph.num_nodes)
    recursive = options.scheme == "recursive" or (
        options.scheme == "auto" and options.objective != "volume" and options.parts <= 8
    )
    each = METIS_EDGE["recursive"] * levels if recursive else METIS_EDGE["kway"]
    return 0.4 + options.tries * each * graph.num_edges


def build_seconds(graph: Graph, options: AssignOptions) -> float:
    """Seconds that a build takes once the graph is read, assigning left out."""
    x = graph.x
    stored = 0 if x is None else x.nnz * 8 if isinstance(x, sp.csr_array) else math.prod(x.shape) * x.dtype.itemsize
    return (_LOOK_EDGE + _WRITE_EDGE) * graph.num_edges + _BYTE * stored + _PART * options.parts


@dataclass(frozen=True, kw_only=True)
class RankEstimate:
    """One rank of training."""

    part: int
    nodes: int
    edges: int
    halo: int
    tensors: dict[str, int]
    """Bytes of each at the peak of a step (`fullgraph.cost.memory_by_tensor`)."""
    loading: int
    """Bytes at the peak of loading and planning."""
    seconds: float
    """Of a step, this rank's own work and exchanges."""
    bytes_sent: int
    """Message rows in a step."""

    @property
    def memory(self) -> int:
        """Bytes of the rank's process at its peak."""
        return PROCESS_BYTES + max(sum(self.tensors.values()), self.loading)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    need: Need
    build_seconds: float
    """Once the graph is read, assigning left out."""
    assign_seconds: float
    """As told by the graph's sizes."""
    ranks: tuple[RankEstimate, ...]
    step_seconds: float

    @property
    def largest(self) -> RankEstimate:
        return max(self.ranks, key=lambda rank: rank.memory)


def training(
    graph: Graph, summary: Summary, assignment: Assignment, config: TrainConfig, machine: Machine
) -> tuple[tuple[RankEstimate, ...], float]:
    """Each rank's share, and the seconds of a step, of training ``config``'s model under an assignment."""
    part, parts = assignment.part, assignment.parts
    train = np.zeros(graph.num_nodes, np.bool_) if graph.splits is None else graph.splits.train[config.split]
    blocks = [(graph.src, graph.dst)]
    reach = label_reach(blocks, train, config.layers) if config.prune else None
    whole_layers = config.layers - 1 if config.norm == "batch" else 0
    counts = layer_counts(blocks, part, parts, config.layers, reach=reach, whole_layers=whole_layers)
    whole = layer_counts(blocks, part, parts, 1)[0]
    density = summary.feature_density
    sparse = density is not None and density < SPARSE_BELOW
    features = summary.num_features or summary.learned_features
    shape = ModelShape(
        model=config.model,
        features=max(1, features),
        outputs=max(1, summary.num_classes),
        hidden=config.hidden,
        layers=config.layers,
        heads=config.heads,
        norm=config.norm,
        out_heads=config.out_heads,
        dropped_input=config.input_dropout > 0,
        sparse_input=sparse,
        learned_input=summary.learned_features > 0,
        plan=config.plan,
    )
    cost = step_cost(counts, shape, machine, whole=whole)
    stored = None if density is None else density * features
    ranks = []
    for q in range(parts):
        rank = rank_rows(
            counts,
            shape,
            whole,
            q,
            train=int(np.count_nonzero(train & (part == q))),
            stored_features=round((stored or 0.0) * int(whole.rows[q])) if sparse else None,
            weighted=graph.edge_weight is not None,
            edge_features=summary.num_edge_features if config.model == "gat" and config.edge_features else 0,
        )
        held = memory_by_tensor(
            config,
            rank,
            features=shape.features,
            outputs=shape.outputs,
            layer0=cost.layer0,
            learned=shape.learned_input,
        )
        ranks.append(
            RankEstimate(
                part=q,
                nodes=rank.owned,
                edges=rank.edges,
                halo=rank.halo,
                tensors=held,
                loading=loading_bytes(rank, held, _shard_bytes(graph, summary, rank)),
                seconds=float((cost.compute + cost.exchange)[:, q].sum()),
                bytes_sent=int(cost.bytes_sent[q].sum()),
            )
        )
    return tuple(ranks), cost.seconds


def estimate(
    graph: Graph,
    summary: Summary,
    assignment: Assignment,
    options: AssignOptions,
    config: TrainConfig,
    machine: Machine,
) -> Estimate:
    """All of it, for a graph and an assignment of its nodes."""
    ranks, seconds = training(graph, summary, assignment, config, machine)
    return Estimate(
        need=build_need(graph, options),
        build_seconds=build_seconds(graph, options),
        assign_seconds=assign_seconds(graph, options),
        ranks=ranks,
        step_seconds=seconds,
    )


def _shard_bytes(graph: Graph, summary: Summary, rank: RankRows) -> int:
    """Bytes of a rank's shard."""
    size = 0 if graph.x is None else graph.x.dtype.itemsize
    values = rank.owned * summary.num_features if rank.stored_features is None else 2 * rank.stored_features
    weight = 0 if graph.edge_weight is None else graph.edge_weight.dtype.itemsize
    return values * size + rank.edges * (12 + weight) + rank.owned * 48 + rank.halo * 44


def show(found: Estimate, partitioned: float, config: TrainConfig, console: Console) -> None:
    """Print it; ``partitioned`` are the seconds that assigning took."""
    console.print(
        f"build: {found.build_seconds:.1f} s once the graph is read, and {partitioned:.1f} s to partition it "
        f"({found.assign_seconds:.1f} s by its size)"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "nodes", "edges", "halo", "MB sent", "step s", "MiB"):
        table.add_column(name, justify="right")
    for rank in found.ranks:
        table.add_row(
            str(rank.part),
            f"{rank.nodes:,}",
            f"{rank.edges:,}",
            f"{rank.halo:,}",
            f"{rank.bytes_sent / 1e6:,.2f}",
            f"{rank.seconds:.3g}",
            f"{rank.memory / 2**20:,.0f}",
        )
    console.print(table)
    largest = found.largest
    tensors = sorted(largest.tensors.items(), key=lambda item: -item[1])
    console.print(
        f"rank {largest.part}: Python and torch {PROCESS_BYTES / 2**20:,.0f} MiB, "
        + ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in tensors)
        + f"; while loading {largest.loading / 2**20:,.1f} on top of the process",
        soft_wrap=True,
    )
    console.print(
        f"training {config.model}, {config.layers} layers, hidden {config.hidden}: {found.step_seconds:.3g} s an "
        f"epoch, {largest.memory / 2**20:,.0f} MiB at the peak of rank {largest.part}"
    )


def to_json(found: Estimate, partitioned: float) -> str:
    """One object: the fields of `Estimate`, and ``partition_seconds`` as they were."""
    ranks = [asdict(rank) | {"memory": rank.memory} for rank in found.ranks]
    content = asdict(found) | {"ranks": ranks, "partition_seconds": partitioned}
    return json.dumps(content | {"need": asdict(found.need) | {"most": found.need.most}})
