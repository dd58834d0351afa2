"""``.npz`` files of shchur/gnn-benchmark and its relatives (amazon, coauthor, cora_ml, dblp, ...).

``adj_data, adj_indices, adj_indptr, adj_shape`` are a CSR matrix A: a stored A[i, j] is an edge i -> j. Direction,
loops and duplicates are kept as given, in the order of the file. Values are edge weights unless all are 1.
``attr_*`` are CSR features or ``attr_matrix`` dense ones; ``labels`` [N] are classes. There are no splits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from partition_tools.graph import Graph
from partition_tools.sources import arrays
from partition_tools.sources.archive import Archive
from partition_tools.sources.fields import unread
from partition_tools.sources.reader import Reader, Request

_ADJACENCY = ("adj_data", "adj_indices", "adj_indptr", "adj_shape")
_FEATURES = ("attr_data", "attr_indices", "attr_indptr", "attr_shape")


def _matches(spec: str) -> bool:
    return spec.endswith(".npz") and Path(spec).is_file() and "adj_indptr" in Archive(spec)


def _read(spec: str, request: Request) -> Graph:
    archive = Archive(spec)
    changes = unread(archive, {*_ADJACENCY, *_FEATURES, "attr_matrix", "labels"})
    adjacency = arrays.csr([archive.read(name) for name in _ADJACENCY], archive.where("adj_"))
    num_nodes, columns = adjacency.shape
    if num_nodes != columns or num_nodes == 0:
        raise ValueError(f"{archive.where('adj_shape')} is [{num_nodes}, {columns}]; expected [N, N], N at least 1")
    weights = arrays.edge_weights(adjacency.data, adjacency.nnz, archive.where("adj_data"))
    x: arrays.Features | None = None
    if "attr_data" in archive:
        matrix = arrays.csr([archive.read(name) for name in _FEATURES], archive.where("attr_"), num_nodes)
        x = arrays.sparse_features(matrix, archive.where("attr"), changes)
    elif "attr_matrix" in archive:
        x = arrays.dense_features(archive.read("attr_matrix"), archive.where("attr_matrix"))
    y = archive.get("labels")
    for name, value in (("attr_matrix", x), ("labels", y)):
        if value is not None and value.shape[:1] != (num_nodes,):
            raise ValueError(
                f"{archive.where(name)} has shape {list(value.shape)}; expected {num_nodes} rows (adj_shape)"
            )
    return Graph(
        name=Path(spec).stem,
        num_nodes=num_nodes,
        src=np.repeat(np.arange(num_nodes), np.diff(adjacency.indptr)),
        dst=adjacency.indices.astype(np.int64),
        x=arrays.some_features(x, archive.where("attr"), changes),
        y=None if y is None else arrays.labels(y, archive.where("labels"), changes),
        edge_weight=None if bool((weights == 1).all()) else weights,
        changes=tuple(changes),
    )


READER = Reader(
    name="gnn-benchmark",
    description="NAME.npz with adj_data, adj_indices, adj_indptr, adj_shape (CSR; A[i, j] is an edge i -> j), attr_*, "
    "labels",
    matches=_matches,
    read=_read,
)
