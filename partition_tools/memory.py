"""What a build needs of memory, told before it starts; a build that cannot fit is refused with numbers and remedies.

The stages follow each other, so the most that one of them needs on top of the graph's own arrays counts. METIS runs in
a process of its own, which needs the adjacency and its coarser copies.
"""

from __future__ import annotations

import math
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from fullgraph.host import available_memory
from partition_tools.assign import AssignOptions
from partition_tools.graph import Graph
from partition_tools.stored import BLOCK_BYTES, StoredRows

_PREPARE_EDGE, _PREPARE_NODE = 8, 60
"""Bytes that counting pairs and components takes: a key an edge; labels, degrees and bounds a node."""
_BLOCKS = 128 << 20
"""Bytes of the blocks of edges that are looked at together, with what is made of them."""
_ADJACENCY_EDGE = 28
"""Bytes an edge while the symmetric adjacency is made: keys, and those of both directions."""
_METIS_ENTRY, _METIS_NODE = 136, 200
"""Bytes of METIS's process an adjacency entry and a node, as measured: its copies of the graph at every level."""
_METIS_BASE = 60 << 20
_CUT_EDGE, _CUT_NODE = 4, 61
"""Bytes an edge and a node while shards are cut: edge ids by part; order, position, degrees and local ids."""
_SHARD_EDGE = 76
"""Bytes an edge of the largest part while its shard is made."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of memory that a build takes at most."""

    held: int
    """That this process has now, the graph's arrays among them."""
    prepare: int
    """On top of it, while the graph is looked over,"""
    partition: int
    """while nodes are assigned, METIS's process included,"""
    build: int
    """and while shards are made."""

    @property
    def most(self) -> int:
        return self.held + max(self.prepare, self.partition, self.build)


def graph_bytes(graph: Graph) -> int:
    """Bytes of the graph's arrays that are in memory."""
    tables = [graph.y, graph.node_ids, graph.node_weight]
    if not graph.edges_on_disk:
        tables += [graph.src, graph.dst, graph.edge_weight, graph.edge_x]
    if graph.splits is not None:
        tables += [graph.splits.train, graph.splits.val, graph.splits.test]
    x = graph.x
    if isinstance(x, sp.csr_array):
        tables += [x.data, x.indices, x.indptr]
    elif not isinstance(x, StoredRows):
        tables.append(x)
    return sum(int(table.nbytes) for table in tables if table is not None)


def build_need(graph: Graph, options: AssignOptions) -> Need:
    """What a build of ``graph`` needs, from its sizes alone."""
    n, e, parts = graph.num_nodes, graph.num_edges, options.parts
    on_disk = graph.edges_on_disk
    edge_x = 0 if graph.edge_x is None else graph.edge_x.dtype.itemsize * int(np.prod(graph.edge_x.shape[1:]))
    row = edge_x + (0 if graph.edge_weight is None else graph.edge_weight.dtype.itemsize)
    partition = 4 * n
    if options.method == "fennel":
        partition = (0 if on_disk else 16 * e) + 40 * n + min(_BLOCKS, 80 * e)
    elif (options.parts > 1 and (options.method in ("metis", "best", "bfs") or options.clusters)) or (
        options.neighborhoods(n)
    ):
        entries = e if options.method != "bfs" else 2 * e
        partition = max(
            (_ADJACENCY_EDGE + (16 if options.use_edge_weights else 0)) * e,
            8 * e + _METIS_BASE + _METIS_ENTRY * entries + _METIS_NODE * n,
        )
        if options.method == "best":  # sorted edges, and covers of what is cut
            partition += 60 * e
    # Parts differ in edges by what METIS was not asked to balance.
    largest = min(e, math.ceil(1.5 * e / parts)) if parts > 1 else e
    build = (0 if on_disk else _CUT_EDGE * e) + _CUT_NODE * n + (_SHARD_EDGE + 2 * row) * largest
    return Need(
        held=_resident(),
        prepare=(0 if on_disk else _PREPARE_EDGE * e) + _PREPARE_NODE * n + min(_BLOCKS, 40 * e) + BLOCK_BYTES,
        partition=partition,
        build=build + min(_BLOCKS, 40 * e) + 3 * BLOCK_BYTES,
    )


def require_memory(graph: Graph, options: AssignOptions, *, refuse: bool = True) -> str:
    """A line that states what the build needs at most beside what is free.

    Raises ``ValueError`` with numbers and remedies where it cannot fit, unless told not to ``refuse``.
    """
    need, free = build_need(graph, options), available_memory()
    more = need.most - need.held
    if more <= free or not refuse:
        return f"memory: at most {_shown(need.most)}, now free {_shown(free)}"
    remedy = "build it on a machine with more memory"
    others = max(need.prepare, need.build)
    if need.partition > free >= others:
        remedy = (
            f"--method random, contiguous or file:PATH needs {_shown(others)} only, or build it on a machine with more"
        )
    elif need.build > free and options.parts < graph.num_nodes:
        remedy = f"more parts are made one after the other and need less (now --parts {options.parts}), or {remedy}"
    raise ValueError(
        f"{graph.name}: the build takes up to {_shown(more)} more of memory (looking over the graph "
        f"{_shown(need.prepare)}, --method {options.method} {_shown(need.partition)}, shards {_shown(need.build)}), "
        f"but {_shown(free)} are free; {remedy}, or try anyway with --no-memory-check"
    )


def peak_memory() -> int:
    """Bytes at the peak of this process and of the largest child that it waited for, together."""
    scale = 1 if sys.platform == "darwin" else 1024
    return scale * sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _resident() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


def _shown(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
