"""The plain ``.npz`` layout of this package, and its writer.

edge_index   [2, E] integers; column i is an edge edge_index[0, i] -> edge_index[1, i], kept as given
num_nodes    optional; else N is the number of rows of whatever has a row a node, else the largest id + 1
x            optional [N, F]; or CSR features as x_data, x_indices, x_indptr, x_shape
y            optional; [N] or [N, 1] classes, [N, C] zeros and ones, [N] or [N, T] float targets
task         optional string: single-label, multi-label or regression, where y alone would be read otherwise
train_mask, val_mask, test_mask   optional; [N], [N, 1], [k, N] or [N, k]
edge_weight  optional [E];  node_weight  optional [N, c] integers;  node_ids  optional [N] integers or strings
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from partition_tools.graph import Array, Graph, Splits
from partition_tools.sources import arrays
from partition_tools.sources.archive import Archive, unread
from partition_tools.sources.reader import Reader

_CSR = ("x_data", "x_indices", "x_indptr", "x_shape")
_MASKS = ("train_mask", "val_mask", "test_mask")
_KNOWN = {"edge_index", "num_nodes", "x", *_CSR, "y", "task", *_MASKS, "edge_weight", "node_weight", "node_ids"}


def _matches(spec: str) -> bool:
    return spec.endswith(".npz") and Path(spec).is_file()


def _read(spec: str) -> Graph:
    archive = Archive(spec)
    if "edge_index" not in archive:
        raise ValueError(
            f"{spec}: this .npz holds {', '.join(archive.names) or 'no arrays'}; expected edge_index [2, E] (plain), "
            f"adj_data, adj_indices, adj_indptr, adj_shape (gnn-benchmark) or edges, node_features (heterophilous)"
        )
    changes = unread(archive, _KNOWN)
    src, dst = _edges(archive, changes)
    x = _features(archive, changes)
    y = archive.get("y")
    mask = {name: archive.get(name) for name in _MASKS}
    node_ids = _node_ids(archive)
    node_weight = archive.get("node_weight")
    rows = {"x": x, "y": y, "node_weight": node_weight, "node_ids": node_ids}
    num_nodes, because = _num_nodes(archive, rows, mask, src, dst, changes)
    arrays.check_ends(src, dst, num_nodes, archive.where("edge_index"), because)
    weight = archive.get("edge_weight")
    task = archive.get("task")
    if task is not None and (task.size != 1 or task.dtype.kind != "U"):
        raise ValueError(f"{archive.where('task')} is {task.dtype} {list(task.shape)}; expected one string")
    return Graph(
        name=Path(spec).stem,
        num_nodes=num_nodes,
        src=src,
        dst=dst,
        x=arrays.some_features(x, archive.where("x"), changes),
        y=None
        if y is None
        else arrays.labels(y, archive.where("y"), changes, None if task is None else str(task.item())),
        splits=arrays.splits(
            {name.removesuffix("_mask"): (name, value) for name, value in mask.items()}, num_nodes, changes, spec
        ),
        edge_weight=None if weight is None else arrays.edge_weights(weight, src.size, archive.where("edge_weight")),
        node_weight=None if node_weight is None else _node_weight(node_weight, archive.where("node_weight")),
        node_ids=node_ids,
        changes=tuple(changes),
    )


def _edges(archive: Archive, changes: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    where = archive.where("edge_index")
    edges = arrays.integers(archive.read("edge_index"), where)
    if edges.ndim != 2 or edges.shape[0] != 2:
        turned = edges.ndim == 2 and edges.shape[1] == 2
        remedy = "; an edge a row? save edge_index.T" if turned else ""
        raise ValueError(f"{where} has shape {list(edges.shape)}; expected [2, E]: sources, then destinations{remedy}")
    if edges.shape == (2, 2):
        changes.append(
            "edge_index is [2, 2] and was taken as [2, E]: sources in its first row, destinations in its second"
        )
    return edges[0], edges[1]


def _features(archive: Archive, changes: list[str]) -> arrays.Features | None:
    where = archive.where("x")
    if any(name in archive for name in _CSR):
        if "x" in archive:
            raise ValueError(f"{where} is given dense and as CSR ({', '.join(_CSR)}); keep one of them")
        return arrays.sparse_features(arrays.csr([archive.read(name) for name in _CSR], where), where, changes)
    values = archive.get("x")
    return None if values is None else arrays.dense_features(values, where)


def _node_ids(archive: Archive) -> Array | None:
    ids = archive.get("node_ids")
    if ids is None:
        return None
    where = archive.where("node_ids")
    ids = ids if ids.dtype.kind == "U" else arrays.integers(ids, where)
    if ids.ndim != 1:
        raise ValueError(f"{where} has shape {list(ids.shape)}; expected [N], one id a node")
    distinct, counts = np.unique(ids, return_counts=True)
    if distinct.size != ids.size:
        raise ValueError(f"{where} holds {distinct[counts > 1][0]!s} more than once; expected one id a node")
    return ids


def _node_weight(values: Array, where: str) -> NDArray[np.int64]:
    weights = arrays.integers(values, where)
    if weights.ndim not in (1, 2):
        raise ValueError(f"{where} has shape {list(weights.shape)}; expected [N] or [N, c]")
    return weights.reshape(weights.shape[0], -1)


def _num_nodes(
    archive: Archive,
    rows: dict[str, Any],
    mask: dict[str, Array | None],
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    changes: list[str],
) -> tuple[int, str]:
    """N and, for messages, where it comes from. Sources that contradict each other raise ``ValueError``."""
    claims = {f"rows of {name}": value.shape[0] for name, value in rows.items() if value is not None and value.ndim}
    given = archive.get("num_nodes")
    if given is not None:
        if given.size != 1:
            raise ValueError(f"{archive.where('num_nodes')} has shape {list(given.shape)}; expected one number")
        claims = {"num_nodes": int(arrays.integers(given, archive.where("num_nodes")).item()), **claims}
    if not claims:
        # A 2-D mask does not tell which side is N, so the longer one is taken: there are fewer splits than nodes.
        claims = {
            f"length of {name}": max(value.shape) for name, value in mask.items() if value is not None and value.ndim
        }
    if len(set(claims.values())) > 1:
        counts = ", ".join(f"{name}: {count}" for name, count in claims.items())
        raise ValueError(f"{archive.path}: the number of nodes is contradictory ({counts}); expected one number")
    if claims:
        because, num_nodes = next(iter(claims.items()))
        if num_nodes < 1:
            raise ValueError(f"{archive.path}: {num_nodes} nodes ({because}); expected at least 1")
        return num_nodes, because
    if src.size == 0:
        raise ValueError(f"{archive.path}: no edges, and nothing tells the number of nodes; add num_nodes")
    num_nodes, lowest = int(max(src.max(), dst.max())) + 1, int(min(src.min(), dst.min()))
    if num_nodes > 16 * src.size + 1_000_000:
        raise ValueError(
            f"{archive.where('edge_index')}: the largest id is {num_nodes - 1} for {src.size} edges, and nothing else "
            f"tells the number of nodes; number the nodes from 0, or add num_nodes"
        )
    changes.append(
        f"nothing in the file tells the number of nodes: the largest id + 1 = {num_nodes} was taken"
        + (f" (no edge names a node below {lowest}; if ids start at 1, subtract 1)" if lowest == 1 else "")
    )
    return num_nodes, "largest id + 1"


def save_npz(path: str | Path, graph: Graph) -> None:
    """Write ``graph`` in the plain layout (all of it but its name and its changes); ``path`` must end in ``.npz``."""
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"{path}: the file's name must end in .npz")
    fields: dict[str, Any] = {
        "edge_index": np.stack([graph.src, graph.dst]),
        "num_nodes": np.int64(graph.num_nodes),
        "y": graph.y,
        "task": graph.task,
        "edge_weight": graph.edge_weight,
        "node_weight": graph.node_weight,
        "node_ids": graph.node_ids,
    }
    if sp.issparse(graph.x):
        fields |= dict(zip(_CSR, (graph.x.data, graph.x.indices, graph.x.indptr, np.array(graph.x.shape)), strict=True))
    else:
        fields["x"] = graph.x
    fields |= _mask_fields(graph.splits, path)
    np.savez(path, **{name: value for name, value in fields.items() if value is not None})


def _mask_fields(splits: Splits | None, path: Path) -> dict[str, NDArray[np.bool_]]:
    if splits is None:
        return {}
    if splits.count == splits.train.shape[1] > 1:
        raise ValueError(
            f"{path}: {splits.count} splits of as many nodes cannot be told apart in this layout; save fewer"
        )
    return {"train_mask": splits.train, "val_mask": splits.val, "test_mask": splits.test}


READER = Reader(
    name="plain",
    description="NAME.npz with edge_index [2, E] and optional num_nodes, x, y, *_mask, edge_weight, node_weight, "
    "node_ids",
    matches=_matches,
    read=_read,
)
