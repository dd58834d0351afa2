"""The layout of this package, the same in ``.npz``, ``.h5`` and ``.pt`` files: which array means what.

edge_index   [2, E] integers; column i is an edge edge_index[0, i] -> edge_index[1, i], kept as given. Nodes are
             numbered from 0, or from 1 by --index-base 1, here and in lists of nodes
num_nodes    optional; else N is the number of rows of whatever has a row a node, else the largest id + 1
x            optional [N, F]; or CSR features as x_data, x_indices, x_indptr, x_shape
y            optional; [N] or [N, 1] classes or their names, [N, C] zeros and ones, [N] or [N, T] float targets
class_names  optional [C] integers or strings, the user's own labels of classes 0..C-1
task         optional string: single-label, multi-label or regression, where y alone would be read otherwise
train_mask, val_mask, test_mask   optional; [N], [N, 1], [k, N] or [N, k]; or lists of node ids as train_idx, val_idx,
             test_idx [m] or [k, m]
edge_weight  optional [E];  edge_x (or edge_attr, PyG's name) optional [E, K] edge features
node_weight  optional [N, c] integers;  node_ids  optional [N] integers or strings
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from fullgraph.wording import counted
from partition_tools.graph import Array, Graph, Splits
from partition_tools.mapped import columns_of, ends_of, extent, too_large
from partition_tools.sources import arrays
from partition_tools.sources.fields import Fields, unread
from partition_tools.sources.reader import Request
from partition_tools.stored import StoredRows

CSR = ("x_data", "x_indices", "x_indptr", "x_shape")
_EDGE_FEATURES = ("edge_x", "edge_attr")
_MASKS = arrays.mask_names()
NAMES = ("edge_index", "num_nodes", "x", *CSR, "y", "task", *_MASKS, "edge_weight", *_EDGE_FEATURES, "node_weight")
NAMES = (*NAMES, "node_ids", "class_names")


def graph_of(fields: Fields, request: Request, *, turned: bool = False) -> Graph:
    """The graph that the fields hold. Raises ``ValueError`` naming file and array. ``turned``: edges may be [E, 2]."""
    changes = unread(fields, NAMES)
    base = request.options.index_base
    src, dst = _edges(fields, base or 0, changes, turned)
    x = _features(fields, changes)
    y = fields.get("y")
    node_ids = _node_ids(fields)
    node_weight = fields.get("node_weight")
    rows = {"x": x, "y": y, "node_weight": node_weight, "node_ids": node_ids}
    num_nodes, because = _num_nodes(fields, request, rows, src, dst, changes)
    arrays.require_memory(num_nodes, 16, f"{fields.path}: {num_nodes:,} nodes ({because})", "give the number of nodes")
    arrays.check_ends(src, dst, num_nodes, fields.where("edge_index"), because, base or 0)
    if base == 1 and node_ids is None:
        node_ids = np.arange(1, num_nodes + 1)
    weight = _on_edges(fields, "edge_weight", src)
    task = fields.get("task")
    if task is not None and (task.size != 1 or task.dtype.kind != "U"):
        raise ValueError(f"{fields.where('task')} is {task.dtype} {list(task.shape)}; expected one string")
    class_names = _class_names(fields)
    if y is not None and y.dtype.kind == "U":
        y, class_names = arrays.named_classes(y, fields.where("y"), changes)
    return Graph(
        name=Path(fields.path).stem,
        num_nodes=num_nodes,
        src=src,
        dst=dst,
        x=arrays.some_features(x, fields.where("x"), changes),
        y=None
        if y is None
        else arrays.labels(y, fields.where("y"), changes, None if task is None else str(task.item())),
        splits=arrays.field_splits(fields, num_nodes, changes, base=base or 0),
        edge_weight=None if weight is None else arrays.edge_weights(weight, src.size, fields.where("edge_weight")),
        edge_x=_edge_features(fields, src),
        node_weight=None if node_weight is None else _node_weight(node_weight, fields.where("node_weight")),
        node_ids=node_ids,
        class_names=class_names,
        changes=tuple(changes),
    )


def _edges(fields: Fields, base: int, changes: list[str], turned: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    where = fields.where("edge_index")
    edges = fields.rows("edge_index")
    if edges.nbytes and edges.dtype.kind not in "iu":
        arrays.integers(np.empty(1, edges.dtype), where)
    by_rows = edges.ndim == 2 and edges.shape[1] == 2
    if (edges.ndim != 2 or edges.shape[0] != 2) and not (turned and by_rows):
        remedy = "; an edge a row? save edge_index.T" if by_rows else ""
        either = " or [E, 2], an edge a row" if turned else ""
        raise ValueError(
            f"{where} has shape {list(edges.shape)}; expected [2, E]: sources, then destinations{either}{remedy}"
        )
    if edges.shape == (2, 2):
        changes.append(
            "edge_index is [2, 2] and was taken as [2, E]: sources in its first row, destinations in its second"
        )
    return edge_ends(edges, base, where)


def edge_ends(edges: Array | StoredRows, base: int, where: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sources and destinations of [2, E] integers; of [E, 2], where E is not 2. They stay on disk where they are too
    large for memory."""
    if isinstance(edges, StoredRows) and too_large(16 * math.prod(edges.shape) // 2):
        return ends_of(edges, base, where)
    ids = arrays.integers(np.asarray(edges), where)
    src, dst = (ids[0], ids[1]) if ids.shape[0] == 2 else (np.ascontiguousarray(ids[:, i]) for i in (0, 1))
    return (src - base, dst - base) if base else (src, dst)


def _features(fields: Fields, changes: list[str]) -> arrays.Features | None:
    where = fields.where("x")
    if any(name in fields for name in CSR):
        if "x" in fields:
            raise ValueError(f"{where} is given dense and as CSR ({', '.join(CSR)}); keep one of them")
        matrix = arrays.csr([fields.read(name) for name in CSR], f"{where}_")
        return arrays.sparse_features(matrix, where, changes)
    return arrays.dense_features(fields.rows("x"), where) if "x" in fields else None


def _edge_features(fields: Fields, src: NDArray[np.int64]) -> Array | None:
    found = [name for name in _EDGE_FEATURES if name in fields]
    if len(found) > 1:
        raise ValueError(f"{fields.path}: {' and '.join(found)} say the same thing; keep one of them")
    values = _on_edges(fields, found[0], src) if found else None
    return None if values is None else arrays.edge_features(values, src.size, fields.where(found[0]))


def _on_edges(fields: Fields, name: str, src: NDArray[np.int64]) -> Array | None:
    """An array with a row an edge, left on disk where the edges are."""
    if name not in fields or not isinstance(src, np.memmap):
        return fields.get(name)
    rows = fields.rows(name)
    return columns_of(rows) if isinstance(rows, StoredRows) else rows


def _node_ids(fields: Fields) -> Array | None:
    ids = fields.get("node_ids")
    if ids is None:
        return None
    where = fields.where("node_ids")
    ids = ids if ids.dtype.kind == "U" else arrays.integers(ids, where)
    if ids.ndim != 1:
        raise ValueError(f"{where} has shape {list(ids.shape)}; expected [N], one id a node")
    distinct, counts = np.unique(ids, return_counts=True)
    if distinct.size != ids.size:
        raise ValueError(f"{where} holds {distinct[counts > 1][0]!s} more than once; expected one id a node")
    return ids


def _class_names(fields: Fields) -> Array | None:
    names = fields.get("class_names")
    if names is None:
        return None
    where = fields.where("class_names")
    names = names if names.dtype.kind == "U" else arrays.integers(names, where)
    if names.ndim != 1 or np.unique(names).size != names.size:
        raise ValueError(f"{where} is {names.dtype} {list(names.shape)}; expected [C] labels of classes, all different")
    return names


def _node_weight(values: Array, where: str) -> NDArray[np.int64]:
    weights = arrays.integers(values, where)
    if weights.ndim not in (1, 2):
        raise ValueError(f"{where} has shape {list(weights.shape)}; expected [N] or [N, c]")
    return weights.reshape(weights.shape[0], -1)


def _num_nodes(
    fields: Fields,
    request: Request,
    rows: dict[str, Any],
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    changes: list[str],
) -> tuple[int, str]:
    """N and, for messages, where it comes from. Sources that contradict each other raise ``ValueError``."""
    claims = {f"rows of {name}": value.shape[0] for name, value in rows.items() if value is not None and value.ndim}
    given = fields.get("num_nodes")
    if given is not None:
        if given.size != 1:
            raise ValueError(f"{fields.where('num_nodes')} has shape {list(given.shape)}; expected one number")
        claims = {"num_nodes": int(arrays.integers(given, fields.where("num_nodes")).item()), **claims}
    if request.num_nodes is not None:
        claims[request.num_nodes[1]] = request.num_nodes[0]
    if not claims:
        # A 2-D mask does not tell which side is N, so the longer one is taken: there are fewer splits than nodes.
        mask = {name: fields.get(name) for name in _MASKS if name.endswith("_mask")}
        claims = {
            f"length of {name}": max(value.shape) for name, value in mask.items() if value is not None and value.ndim
        }
    if len(set(claims.values())) > 1:
        counts = ", ".join(f"{name}: {count}" for name, count in claims.items())
        raise ValueError(f"{fields.path}: the number of nodes is contradictory ({counts}); expected one number")
    if claims:
        because, num_nodes = next(iter(claims.items()))
        if num_nodes < 1:
            raise ValueError(f"{fields.path}: N is {num_nodes} ({because}); expected at least 1")
        return num_nodes, because
    if src.size == 0:
        raise ValueError(f"{fields.path}: no edges, and nothing tells the number of nodes; add num_nodes (--num-nodes)")
    base = request.options.index_base
    lowest, highest = extent(src, dst)
    num_nodes = highest + 1
    if num_nodes > arrays.most_nodes(src.size):
        raise ValueError(
            f"{fields.where('edge_index')}: the largest id is {num_nodes - 1 + (base or 0)} for "
            f"{counted(src.size, 'edge')}, and nothing else tells the number of nodes; number the nodes from 0, or add "
            f"num_nodes (--num-nodes)"
        )
    changes.append(
        f"nothing in the file tells the number of nodes: N is {num_nodes}, so that the largest id is the last"
        + ("; no edge names node 0: if ids start at 1, add --index-base 1" if lowest == 1 and base is None else "")
    )
    return num_nodes, "by the largest id"


def fields_of(graph: Graph, path: Path) -> dict[str, Array]:
    """``graph`` in the layout: all of it but its name and its changes."""
    if graph.learned_features:
        raise ValueError(
            f"{path}: learned_features are no data, so no file holds them; ask for them again when loading"
        )
    fields: dict[str, Any] = {
        "edge_index": np.stack([graph.src, graph.dst]),
        "num_nodes": np.int64(graph.num_nodes),
        "y": graph.y,
        "task": graph.task,
        "edge_weight": graph.edge_weight,
        "edge_x": graph.edge_x,
        "node_weight": graph.node_weight,
        "node_ids": graph.node_ids,
        "class_names": graph.class_names,
    }
    if sp.issparse(graph.x):
        fields |= dict(zip(CSR, (graph.x.data, graph.x.indices, graph.x.indptr, np.array(graph.x.shape)), strict=True))
    else:
        fields["x"] = graph.x
    fields |= _mask_fields(graph.splits, path)
    return {name: np.asarray(value) for name, value in fields.items() if value is not None}


def _mask_fields(splits: Splits | None, path: Path) -> dict[str, NDArray[np.bool_]]:
    if splits is None:
        return {}
    if splits.count == splits.train.shape[1] > 1:
        raise ValueError(
            f"{path}: {splits.count} splits of as many nodes cannot be told apart in this layout; save fewer"
        )
    return {"train_mask": splits.train, "val_mask": splits.val, "test_mask": splits.test}
