"""Raw folders of OGB's node property data sets (ogbn-arxiv, -products, -proteins, -papers100M and their like).

    raw/edge.csv.gz, num-node-list.csv.gz   a row an edge; the number of nodes
    raw/node-feat.csv.gz, edge-feat.csv.gz, node-label.csv.gz   optional, a row a node or an edge
    raw/data.npz, node-label.npz            the same in binary: edge_index, num_nodes_list, node_feat, edge_feat
    split/NAME/train.csv.gz, valid.csv.gz, test.csv.gz   lists of node ids; a folder a split; or split_dict.pt

Whether the edges stand there once a pair is not in the folder but in OGB's table of its data sets. As OGB's loader
does, both directions are stored for those listed there as such (each edge followed by its reverse, with its features);
others are kept as given. Decimal features become float32 as in OGB's loader, whole ones int64.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partition_tools.graph import Array, Graph, Splits
from partition_tools.sources import arrays
from partition_tools.sources.archive import Archive
from partition_tools.sources.reader import Reader, Request
from partition_tools.sources.tensors import load_dict
from partition_tools.sources.text import Text

_ONCE_A_PAIR = ("ogbn_products", "ogbn_proteins")
_SPLIT_FILES = {"train": "train", "val": "valid", "test": "test"}


def _root(spec: str) -> Path | None:
    """The folder of the data set that ``spec`` names, itself or by its folder raw."""
    for root in (Path(spec), Path(spec).parent) if Path(spec).name == "raw" else (Path(spec),):
        if (root / "raw" / "edge.csv.gz").is_file() or (root / "raw" / "data.npz").is_file():
            return root
    return None


def _matches(spec: str) -> bool:
    return _root(spec) is not None


def _read(spec: str, request: Request) -> Graph:
    root = _root(spec)
    assert root is not None
    changes: list[str] = []
    where, found = _from_text(root) if (root / "raw" / "edge.csv.gz").is_file() else _from_npz(root, changes)
    num_nodes = _one_graph(found["num_nodes_list"], f"{where}: number of nodes")
    edges = arrays.integers(found["edge_index"], f"{where}: edges")
    if edges.ndim != 2 or edges.shape[0] != 2:
        raise ValueError(f"{where}: edges have shape {list(edges.shape)}; expected two ends a row")
    src, dst, edge_x = edges[0], edges[1], found.get("edge_feat")
    arrays.check_ends(src, dst, num_nodes, f"{where}: edges", "its number of nodes")
    if edge_x is not None:
        edge_x = arrays.edge_features(edge_x, src.size, f"{where}: edge features")
    name = root.resolve().name
    if name in _ONCE_A_PAIR and "binary" not in found:
        src, dst = _interleave(src, dst), _interleave(dst, src)
        edge_x = None if edge_x is None else np.repeat(edge_x, 2, axis=0)
        changes.append(
            f"{name} lists an edge once a pair: {src.size // 2} rows became {src.size} entries, both directions"
        )
    else:
        changes.append("edges are kept as given, one direction a row; --undirected adds the other")
    x, y = found.get("node_feat"), found.get("node_label")
    for what, value in (("features", x), ("labels", y)):
        if value is not None and value.shape[:1] != (num_nodes,):
            raise ValueError(f"{where}: {value.shape[0]} rows of {what} for {num_nodes} nodes")
    return Graph(
        name=name,
        num_nodes=num_nodes,
        src=src,
        dst=dst,
        x=None if x is None else arrays.dense_features(x, f"{where}: node features"),
        y=None if y is None else arrays.labels(y, f"{where}: node labels", changes),
        splits=_splits(root, num_nodes, changes),
        edge_x=edge_x,
        changes=tuple(changes),
    )


def _one_graph(values: Array, where: str) -> int:
    if values.size != 1:
        raise ValueError(f"{where}: {values.size} graphs; this reads one large graph, not sets of many")
    count = int(arrays.integers(values, where).item())
    if count < 1:
        raise ValueError(f"{where}: {count}; expected at least 1")
    return count


def _interleave(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([one, other], axis=1).reshape(-1)


def _from_text(root: Path) -> tuple[str, dict[str, Any]]:
    raw = root / "raw"
    if not (raw / "num-node-list.csv.gz").is_file():
        raise ValueError(f"{root}: raw/num-node-list.csv.gz is missing, which says how many nodes there are")
    edge = Text.read(str(raw / "edge.csv.gz"))
    found: dict[str, Any] = {
        "edge_index": np.ascontiguousarray(_rows(edge, np.int64).T),
        "num_nodes_list": _rows(Text.read(str(raw / "num-node-list.csv.gz")), np.int64),
    }
    for name in ("node-feat", "edge-feat", "node-label"):
        if (raw / f"{name}.csv.gz").is_file():
            found[name.replace("-", "_")] = _numbers(Text.read(str(raw / f"{name}.csv.gz")))
    return str(raw), found


def _rows(text: Text, dtype: Any) -> Array:
    return text.parse(dtype) if text.row(0) is not None else np.empty((0, 2), dtype)


def _numbers(text: Text) -> Array:
    row = text.row(0)
    if row is None:
        raise ValueError(f"{text.path}: no rows; expected a row a node or an edge")
    if all(re.fullmatch(r"-?[0-9]+", field) for field in row):
        try:
            return text.parse(np.int64)
        except ValueError:
            pass
    return text.parse(np.float32)


def _from_npz(root: Path, changes: list[str]) -> tuple[str, dict[str, Any]]:
    archive = Archive(str(root / "raw" / "data.npz"))
    found: dict[str, Any] = {name: archive.read(name) for name in ("edge_index", "num_nodes_list")}
    found |= {name: archive.read(name) for name in ("node_feat", "edge_feat") if name in archive}
    known = (*found, "num_edges_list")
    others = [name for name in archive.names if name not in known]
    if others:
        changes.append(f"{', '.join(others)} of raw/data.npz were left out")
    path = root / "raw" / "node-label.npz"
    if path.is_file():
        found["node_label"] = Archive(str(path)).read("node_label")
    return str(root / "raw"), found | {"binary": True}


def _splits(root: Path, num_nodes: int, changes: list[str]) -> Splits | None:
    folders = sorted(path for path in (root / "split").glob("*") if path.is_dir())
    found = [(folder.name, masks) for folder in folders if (masks := _masks(folder, num_nodes)) is not None]
    if not found:
        return None
    changes.append(f"split{'s' if len(found) > 1 else ''} of the data set: {', '.join(name for name, _ in found)}")
    return Splits(**{part: np.concatenate([masks[part] for _, masks in found]) for part in _SPLIT_FILES})


def _masks(folder: Path, num_nodes: int) -> dict[str, NDArray[np.bool_]] | None:
    if (folder / "split_dict.pt").is_file():
        path = str(folder / "split_dict.pt")
        given = load_dict(path)
        if not all(name in given and hasattr(given[name], "numpy") for name in _SPLIT_FILES.values()):
            raise ValueError(f"{path}: expected tensors train, valid and test")
        lists = {part: (f"{path}: {name}", given[name].numpy()) for part, name in _SPLIT_FILES.items()}
    else:
        paths = {part: folder / f"{name}.csv.gz" for part, name in _SPLIT_FILES.items()}
        if not any(path.is_file() for path in paths.values()):
            return None
        absent = [str(path) for path in paths.values() if not path.is_file()]
        if absent:
            raise ValueError(f"{', '.join(absent)}: missing; a split is train, valid and test")
        lists = {part: (str(path), _rows(Text.read(str(path)), np.int64)[:, 0]) for part, path in paths.items()}
    return {part: arrays.index_masks(values, num_nodes, where) for part, (where, values) in lists.items()}


READER = Reader(
    name="ogb",
    description="folder of an OGB node property data set: raw/edge.csv.gz (or raw/data.npz), split/*",
    matches=_matches,
    read=_read,
)
