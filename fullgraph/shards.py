"""Shards on disk: the format, its reader and its writer.

(Format rules with MUST lines stand here.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

FORMAT = "fullgraph-shards"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Everything one rank needs: n owned nodes, h halo nodes, e in-edges of the owned nodes.

    Local ids: owned nodes are 0..n-1, halo nodes n..n+h-1.
    """

    part: int
    parts: int
    build_id: str
    graph: str
    """Name of the graph."""
    num_nodes_global: int
    num_edges_global: int
    task: str | None
    """single-label, multi-label, regression or None (no labels)."""
    num_classes: int
    """Classes (single-label), label columns (multi-label), targets (regression); 0 without labels."""
    owned_global: NDArray[np.int64]
    """[n] ascending."""
    halo_global: NDArray[np.int64]
    """[h] sorted by (owner, global id)."""
    halo_owner: NDArray[np.int32]
    """[h] part that owns each halo node."""
    halo_index: NDArray[np.int64]
    """[h] index of each halo node in its owner's owned list."""
    indptr: NDArray[np.int64]
    """[n+1] CSR offsets of in-edges, a row an owned destination."""
    indices: NDArray[np.int32] | NDArray[np.int64]
    """[e] local source ids in 0..n+h-1; ascending in a row, ties by global edge id."""
    edge_global: NDArray[np.int64]
    """[e] global edge ids."""
    edge_weight: NDArray[np.floating[Any]] | None
    in_degree: NDArray[np.int64]
    """[n+h] whole-graph number of in-edges, loops and duplicates counted."""
    in_weight: NDArray[np.float64]
    """[n+h] whole-graph sum of in-edge weights; equals in_degree where the graph has no weights."""
    loop_count: NDArray[np.int64]
    """[n+h] loops a node has."""
    x: Array | sp.csr_array | None
    """[n, F] features of owned nodes; CSR when sparser than 0.1."""
    y: Array | None
    """[n] or [n, C]; see partition_tools.graph.Graph.y."""
    train: NDArray[np.bool_]
    """[k, n] masks, one row a split; k is 0 where the graph has no splits."""
    val: NDArray[np.bool_]
    test: NDArray[np.bool_]
    node_ids: Array | None
    """[n] the user's own ids (int64 or str)."""


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    path: str
    """File name inside the folder; MUST NOT hold a separator."""
    bytes: int
    xxh3: str
    """Hex xxh3-64 of the whole file."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """manifest.json, written last."""

    format_version: int
    build_id: str
    parts: int
    graph: dict[str, Any]
    """Facts: name, num_nodes, num_edges, undirected_pairs, loops, duplicates, isolated, components, weighted, directed,
    num_features, feature_dtype, task, num_classes, num_splits, split_counts."""
    partition: dict[str, Any]
    """method, seed, options, versions."""
    changes: tuple[str, ...]
    files: tuple[ShardFile, ...]
    """One a part, in order of part."""
    sums: dict[str, list[int]]
    """Order-independent sums by block of global id, taken while reading the source; `verify` recomputes them."""
