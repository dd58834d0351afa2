"""``.npz`` files in the layout of this package (``layout.py``), as numpy.savez writes them, and their writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from partition_tools.graph import Graph
from partition_tools.sources import layout
from partition_tools.sources.archive import Archive
from partition_tools.sources.reader import Reader, Request


def _matches(spec: str) -> bool:
    return spec.endswith(".npz") and Path(spec).is_file()


def _read(spec: str, request: Request) -> Graph:
    archive = Archive(spec)
    if "edge_index" not in archive:
        raise ValueError(
            f"{spec}: this .npz holds {', '.join(archive.names) or 'no arrays'}; expected edge_index [2, E] (plain), "
            f"adj_data, adj_indices, adj_indptr, adj_shape (gnn-benchmark), edges, node_features (heterophilous) or "
            f"what scipy.sparse.save_npz writes"
        )
    return layout.graph_of(archive, request)


def save_npz(path: str | Path, graph: Graph) -> None:
    """Write ``graph`` in the plain layout (all of it but its name and its changes); ``path`` must end in ``.npz``."""
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"{path}: the file's name must end in .npz")
    fields: dict[str, Any] = layout.fields_of(graph, path)
    np.savez(path, **fields)


READER = Reader(
    name="plain",
    description="NAME.npz with edge_index [2, E] and optional num_nodes, x, y, *_mask or *_idx, edge_weight, edge_x, "
    "node_weight, node_ids",
    matches=_matches,
    read=_read,
    takes=frozenset({"index_base"}),
)
