"""Shards on disk: the format, its writer and its reader.

A build is one folder::

    manifest.json               facts of the graph and the partition, and the list of files
    part-00000-of-00002.h5      everything one rank needs
    part-00001-of-00002.h5

This docstring is the contract of format version 1. N nodes and E edges in the graph, P parts; a shard owns n nodes,
has h halo nodes (owned elsewhere, source of an in-edge of an owned node) and stores e edges.

The folder
----------
- ``manifest.json`` MUST be one JSON object with ``format`` = "fullgraph-shards", ``format_version`` = 1 and the fields
  of `Manifest`. It MUST be written last: a folder without it is not a build.
- ``files`` MUST list one file a part, in order of part, each by its plain name in the folder (no separator), its size
  in bytes and the hex xxh3-64 of its content; and MAY give the numbers of owned ``nodes`` and stored ``edges``.
- A file MUST appear under its name complete, by rename. A build MUST NOT be changed afterwards.
- ``build_id`` MUST be the same in the manifest and in every shard, and MUST differ between builds whose content,
  partition or options differ.
- ``sums`` maps a dataset to integers below 2^53, one a block of global ids (see partition_tools.sums), taken from the
  source graph. A reader that does not verify MAY ignore them.

A shard
-------
Attributes of the root: ``format``, ``format_version``, ``build_id``, ``part``, ``parts``, ``graph`` (name),
``num_nodes_global``, ``num_edges_global``, ``num_classes``, ``task`` (absent where there are no labels), and
``learned_features`` (columns of a feature table that training learns in place of features; absent where there is none).

Datasets; those marked ? are absent where the graph has no such data::

    owned/global_id    int64 [n]      ascending
    halo/global_id     int64 [h]      sorted by (owner, global id)
    halo/owner         int32 [h]      part that owns the node; never this part
    halo/index         int64 [h]      index of the node in owned/global_id of its owner
    edges/indptr       int64 [n+1]    CSR offsets of in-edges; one row an owned destination
    edges/indices      int32 [e]      local ids of sources: owned 0..n-1, halo n..n+h-1; int64 where n+h >= 2^31
    edges/global_id    int64 [e]      global edge ids: an edge's place in the source graph
    edges/weight    ?  f4|f8 [e]
    edges/x         ?  real  [e, K]   edge features
    degrees/in         int64 [n+h]    in-edges in the whole graph, loops and duplicates counted
    degrees/in_weight  f8    [n+h]    sum of in-edge weights, added in order of edge id; in-edges where none are given
    degrees/loops      int64 [n+h]    loops of the node
    features/x      ?  real  [n, F]   dense, or CSR as the next three with the attribute ``shape`` on ``features``
    features/data   ?  real  [z]
    features/indices ? int32 [z]      int64 where F >= 2^31
    features/indptr ?  int64 [n+1]
    labels/y        ?  int64 [n] classes, -1 for none; uint8 [n, C] of 0 and 1; f4|f8 [n] or [n, T], NaN for none
    splits/train       uint8 [k, n]   0 or 1, one row a split; k is 0 where the graph has no splits
    splits/val, splits/test           likewise
    ids/original    ?  int64 or utf-8 variable-length string [n]: the user's own ids

- Every node MUST be owned by one part, and every edge MUST be stored once, with the owner of its destination.
- Sources MUST ascend within a row, ties ordered by global edge id.
- Every halo node MUST be the source of a stored edge.
- Datasets MUST be contiguous, unfiltered and inside the file, reached through hard links only, in native byte order.
  A reader MUST check the claimed sizes against the size of the file before it allocates.
- A reader MUST refuse another ``format_version`` by its number, and MUST ignore datasets and attributes not named here.
- A reader MUST check a file's size and checksum before HDF5 opens it, unless it was told not to.

Nothing in a build is ever unpickled or executed.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np
import scipy.sparse as sp
import xxhash
from numpy.typing import NDArray

from fullgraph.files import FileEntry, appears_by_rename, checksum, sync
from fullgraph.hdf5 import (
    FormatError,
    check_heaps,
    dtype_names,
    find_dataset,
    open_to_read,
    read_attribute,
    read_dataset,
    read_strings,
    require,
    require_each,
)

Array: TypeAlias = NDArray[Any]

FORMAT = "fullgraph-shards"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
BUILDING = ".building"
"""How the name of a folder ends while it is built: ``.NAME.xxxxxxxx.building`` beside NAME."""

_REMEDY = "copy the file again from where it was built, or build the folder again"
_MAX_MANIFEST_BYTES = 1 << 28
_MASKS = ("train", "val", "test")
_REAL = tuple(np.dtype(code) for code in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"))
_A_REAL = "a real number of at most 8 bytes"
_FLOATS = (np.dtype("f4"), np.dtype("f8"))
_IDS = (np.dtype("i8"),)
_LOCAL_IDS = (np.dtype("i4"), np.dtype("i8"))
_BYTES = (np.dtype("u1"),)

# field of Shard -> (dataset, dtypes, dimensions); features and ids are written and read on their own
_DATASETS: dict[str, tuple[str, tuple[np.dtype[Any], ...], tuple[int, ...]]] = {
    "owned_global": ("owned/global_id", _IDS, (1,)),
    "cluster": ("owned/cluster", (np.dtype("i4"),), (1,)),
    "halo_global": ("halo/global_id", _IDS, (1,)),
    "halo_owner": ("halo/owner", (np.dtype("i4"),), (1,)),
    "halo_index": ("halo/index", _IDS, (1,)),
    "indptr": ("edges/indptr", _IDS, (1,)),
    "indices": ("edges/indices", _LOCAL_IDS, (1,)),
    "edge_global": ("edges/global_id", _IDS, (1,)),
    "edge_weight": ("edges/weight", _FLOATS, (1,)),
    "edge_x": ("edges/x", _REAL, (2,)),
    "in_degree": ("degrees/in", _IDS, (1,)),
    "in_weight": ("degrees/in_weight", (np.dtype("f8"),), (1,)),
    "loop_count": ("degrees/loops", _IDS, (1,)),
    "y": ("labels/y", (*_IDS, *_BYTES, *_FLOATS), (1, 2)),
    "train": ("splits/train", _BYTES, (2,)),
    "val": ("splits/val", _BYTES, (2,)),
    "test": ("splits/test", _BYTES, (2,)),
}
_OPTIONAL = ("cluster", "edge_weight", "edge_x", "y")
_FEATURES = ("x", "edge_x")


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """Everything one rank needs: n owned nodes, h halo nodes, e in-edges of the owned nodes.

    Local ids: owned nodes are 0..n-1, halo nodes n..n+h-1. Construction checks shapes, dtypes, ranges and orders (in
    time linear in the shard) and raises `FormatError` naming dataset, index, value and what was expected.
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
    edge_x: Array | None = None
    """[e, K] edge features, any real dtype."""
    in_degree: NDArray[np.int64]
    """[n+h] whole-graph number of in-edges, loops and duplicates counted."""
    in_weight: NDArray[np.float64]
    """[n+h] whole-graph sum of in-edge weights; equals in_degree where the graph has no weights."""
    loop_count: NDArray[np.int64]
    """[n+h] loops a node has."""
    x: Array | sp.csr_array | None
    """[n, F] features of owned nodes; CSR when sparser than 0.1."""
    learned_features: int = 0
    """Columns of a feature table that training learns in place of x; 0 for none."""
    y: Array | None
    """[n] or [n, C]; see partition_tools.graph.Graph.y."""
    train: NDArray[np.bool_]
    """[k, n] masks, one row a split; k is 0 where the graph has no splits."""
    val: NDArray[np.bool_]
    test: NDArray[np.bool_]
    node_ids: Array | None
    """[n] the user's own ids (int64 or str)."""
    cluster: NDArray[np.int32] | None = None
    """[n] number of the neighbourhood that a node lies in: training keeps the nodes of one together."""

    @property
    def num_owned(self) -> int:
        return int(self.owned_global.shape[0])

    @property
    def num_halo(self) -> int:
        return int(self.halo_global.shape[0])

    @property
    def num_edges(self) -> int:
        return int(self.indices.shape[0])

    @property
    def num_features(self) -> int:
        """Columns of the features, given or learned; 0 for none."""
        return self.learned_features if self.x is None else int(self.x.shape[1])

    @property
    def num_edge_features(self) -> int:
        return 0 if self.edge_x is None else int(self.edge_x.shape[1])

    def __post_init__(self) -> None:
        require(0 <= self.part < self.parts, "", f"part {self.part} of {self.parts}; expected 0 to {self.parts - 1}")
        self._check_shapes()
        self._check_nodes()
        self._check_edges()
        self._check_features()
        self._check_labels()

    def _check_shapes(self) -> None:
        n, h, e = self.num_owned, self.num_halo, self.num_edges
        lengths = dict.fromkeys(("halo_global", "halo_owner", "halo_index"), h)
        lengths |= dict.fromkeys(("indices", "edge_global", "edge_weight"), e)
        lengths |= dict.fromkeys(("in_degree", "in_weight", "loop_count"), n + h)
        lengths |= {"owned_global": n, "cluster": n, "indptr": n + 1}
        for field, length in lengths.items():
            dataset, dtypes, _ = _DATASETS[field]
            value = getattr(self, field)
            if value is not None:
                require(value.shape == (length,), dataset, f"shape {list(value.shape)}; expected [{length}]")
                require(value.dtype in dtypes, dataset, f"dtype {value.dtype}; expected {dtype_names(dtypes)}")
        local = local_id_dtype(n + h)
        require(self.indices.dtype == local, "edges/indices", f"dtype {self.indices.dtype}; expected {local}")
        for field in _MASKS:
            mask, shape = getattr(self, field), (self.train.shape[0], n)
            good = mask.shape == shape and mask.dtype == np.bool_
            require(good, f"splits/{field}", f"{mask.dtype} {list(mask.shape)}; expected bool {list(shape)}")
        if (ids := self.node_ids) is not None:
            good = ids.shape == (n,) and (ids.dtype == np.int64 or ids.dtype.kind in "UO")
            require(good, "ids/original", f"{ids.dtype} {list(ids.shape)}; expected int64 or str [{n}]")

    def _check_nodes(self) -> None:
        total, owned, halo, owner = self.num_nodes_global, self.owned_global, self.halo_global, self.halo_owner
        inside = f"a node id in 0..{total - 1}"
        require_each((owned >= 0) & (owned < total), "owned/global_id", owned, inside)
        require_each(_ascending(owned), "owned/global_id", owned, "more than the id before it")
        require_each((halo >= 0) & (halo < total), "halo/global_id", halo, inside)
        elsewhere = (owner >= 0) & (owner < self.parts) & (owner != self.part)
        require_each(elsewhere, "halo/owner", owner, f"a part in 0..{self.parts - 1} other than {self.part}")
        first = np.diff(owner, prepend=np.int32(-1)) != 0
        require_each(first <= _ascending(owner), "halo/owner", owner, "no less than the part before it")
        require_each(first | _ascending(halo), "halo/global_id", halo, "more than the id before it, of the same owner")
        require_each(self.halo_index >= 0, "halo/index", self.halo_index, "0 or more")
        ascending = first | _ascending(self.halo_index)
        require_each(ascending, "halo/index", self.halo_index, "more than the index before it, of the same owner")
        foreign = ~np.isin(halo, owned, assume_unique=True)
        require_each(foreign, "halo/global_id", halo, "a node that this part does not own")

    def _check_edges(self) -> None:
        n, h, e, indices, ids = self.num_owned, self.num_halo, self.num_edges, self.indices, self.edge_global
        _check_offsets(self.indptr, e, "edges/indptr")
        require_each((indices >= 0) & (indices < n + h), "edges/indices", indices, f"a local id in 0..{n + h - 1}")
        inside = (ids >= 0) & (ids < self.num_edges_global)
        require_each(inside, "edges/global_id", ids, f"an edge id in 0..{self.num_edges_global - 1}")
        self._check_degrees()
        first = np.zeros(e + 1, np.bool_)
        first[self.indptr] = True
        step = np.diff(indices, prepend=indices[:1])
        require_each(first[:-1] | (step >= 0), "edges/indices", indices, "sources that ascend within a row")
        in_order = first[:-1] | (step > 0) | _ascending(ids)
        require_each(in_order, "edges/global_id", ids, "more than the id before it, whose source and row are the same")
        used = np.zeros(n + h, np.bool_)
        used[indices] = True
        require_each(used[n:], "halo/global_id", self.halo_global, "the source of a stored edge")

    def _check_degrees(self) -> None:
        """Rows hold every in-edge. A moved offset keeps the sum of their lengths; a changed degree does not."""
        degree, rows = self.in_degree[: self.num_owned], np.diff(self.indptr)
        if np.array_equal(degree, rows):
            return
        index = int(np.argmax(degree != rows))
        found = f"row {index} holds {rows[index]} edges; expected the {degree[index]} that degrees/in says"
        if int(degree.sum()) == self.num_edges:
            raise FormatError(found, dataset="edges/indptr", index=index + 1)
        require_each(degree == rows, "degrees/in", degree, f"the {rows[index]} edges that the row holds")

    def _check_features(self) -> None:
        x, edge_x, n, e = self.x, self.edge_x, self.num_owned, self.num_edges
        if edge_x is not None:
            good = edge_x.ndim == 2 and edge_x.shape[0] == e
            require(good, "edges/x", f"shape {list(edge_x.shape)}; expected [{e}, K]")
            require(edge_x.dtype in _REAL, "edges/x", f"dtype {edge_x.dtype}; expected {_A_REAL}")
        learned = self.learned_features
        found = f"attribute learned_features is {learned}; expected 0, or more where there are no features/x"
        require(learned >= 0 and not (learned and x is not None), "", found)
        if x is None:
            return
        dataset = "features/data" if isinstance(x, sp.csr_array) else "features/x"
        require(len(x.shape) == 2 and x.shape[0] == n, dataset, f"shape {list(x.shape)}; expected [{n}, F]")
        require(x.dtype in _REAL, dataset, f"dtype {x.dtype}; expected {_A_REAL}")
        if isinstance(x, sp.csr_array):
            _check_csr(x.indptr, x.indices, x.data, x.shape)

    def _check_labels(self) -> None:
        y, n, c, task = self.y, self.num_owned, self.num_classes, self.task
        if y is None:
            require(task is None and c == 0, "labels/y", f"missing, but the task is {task} with {c} classes")
            return
        forms: dict[str | None, tuple[tuple[np.dtype[Any], ...], list[tuple[int, ...]]]] = {
            "single-label": (_IDS, [(n,)]),
            "multi-label": (_BYTES, [(n, c)]),
            "regression": (_FLOATS, [(n, c), (n,)] if c == 1 else [(n, c)]),
        }
        dtypes, shapes = forms.get(task, ((), []))
        found = f"{y.dtype} {list(y.shape)} for the task {task} with {c} classes and {n} nodes"
        require(y.dtype in dtypes and y.shape in shapes, "labels/y", f"{found}; see Graph.y for what is expected")
        if task == "single-label":
            require_each((y >= -1) & (y < c), "labels/y", y, f"a class in 0..{c - 1}, or -1 for no label")
        elif task == "multi-label":
            require_each(np.all(y <= 1, axis=1), "labels/y", y, "0 and 1 only")


@dataclass(frozen=True, kw_only=True)
class ShardFile(FileEntry):
    """A shard in the manifest."""

    nodes: int | None = None
    """Owned nodes; None in manifests of old."""
    edges: int | None = None
    """In-edges stored."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """manifest.json, written last."""

    format_version: int
    build_id: str
    parts: int
    graph: dict[str, Any]
    """Facts: name, num_nodes, num_edges, undirected_pairs, loops, duplicates, isolated, components, weighted, directed,
    num_features, feature_dtype, learned_features, num_edge_features, edge_feature_dtype, task, num_classes, num_splits,
    split_counts."""
    partition: dict[str, Any]
    """method, seed, options, versions."""
    changes: tuple[str, ...]
    files: tuple[ShardFile, ...]
    """One a part, in order of part."""
    sums: dict[str, list[int]]
    """Order-independent sums by block of global id, taken while reading the source; `verify` recomputes them."""

    def __post_init__(self) -> None:
        _check_version(self.format_version)
        if self.parts < 1 or len(self.files) != self.parts:
            raise ValueError(f"{len(self.files)} files are listed for {self.parts} parts; expected one a part")
        if len({file.path for file in self.files}) != self.parts:
            raise ValueError("a file is listed twice; expected one file a part")
        for key, least in (("num_nodes", 1), ("num_edges", 0)):
            if not _is_int(self.graph.get(key)) or self.graph[key] < least:
                raise ValueError(f"graph.{key} is {self.graph.get(key)!r}; expected a number of at least {least}")
        for name, blocks in self.sums.items():
            if not isinstance(blocks, list) or not all(_is_int(block) and 0 <= block < 1 << 53 for block in blocks):
                raise ValueError(f"sums.{name} holds something else than integers in 0..2^53-1")

    @property
    def graph_id(self) -> str:
        """Equal for equal nodes and edges, whatever the graph is called and however it is partitioned."""
        edges = [self.graph["num_nodes"], self.sums.get("src"), self.sums.get("dst")]
        return xxhash.xxh3_64(json.dumps(edges).encode()).hexdigest()

    @property
    def content_id(self) -> str:
        """Equal for graphs that are equal in every number that training sees, however they are partitioned."""
        content = [self.graph["num_nodes"], self.graph["num_edges"], sorted(self.sums.items())]
        return xxhash.xxh3_64(json.dumps(content).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------- writing


def part_name(part: int, parts: int) -> str:
    return f"part-{part:05d}-of-{parts:05d}.h5"


def local_id_dtype(count: int) -> np.dtype[Any]:
    """dtype of ids below ``count``: int32 where they fit."""
    return np.dtype(np.int32 if count < 2**31 else np.int64)


def write_shard(path: str | Path, shard: Shard) -> ShardFile:
    """Write a shard; the file appears at ``path`` complete and on disk, or not at all. Returns its manifest entry."""
    path = Path(path)
    with appears_by_rename(path) as temporary:
        try:
            # libver: the earliest layout, which every HDF5 library reads.
            with h5py.File(temporary, "w", libver=("earliest", "v110"), locking=False) as file:
                _write(file, shard)
        except RuntimeError as error:  # what h5py makes of a disk that fills up while it closes a file
            raise OSError(f"{path}: cannot be written ({error})") from None
        return ShardFile(
            path=path.name,
            bytes=temporary.stat().st_size,
            xxh3=checksum(temporary),
            nodes=shard.num_owned,
            edges=shard.num_edges,
        )


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """Dense features [n, F] that come later: their place in a shard's file is kept for them."""

    shape: tuple[int, int]
    dtype: np.dtype[Any]


def reserve_shard(path: str | Path, shard: Shard, features: Reserved) -> int:
    """Write a shard without x, keep the place of its dense features, and return where in the file they begin.

    Their rows are to be written there in native byte order, and the file then to be taken with `seal_shard`: in a
    folder that appears when the build is complete, as the file under its name is not.
    """
    assert shard.x is None
    assert features.shape[0] == shard.num_owned
    try:
        with h5py.File(path, "w", libver=("earliest", "v110"), locking=False) as file:
            _write(file, shard)
            place = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            place.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            place.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            place.set_obj_track_times(False)
            space, kind = h5py.h5s.create_simple(features.shape), h5py.h5t.py_create(features.dtype, logical=True)
            group = file.require_group("features")
            offset = h5py.h5d.create(group.id, b"x", kind, space, place).get_offset()
    except RuntimeError as error:
        raise OSError(f"{path}: cannot be written ({error})") from None
    return 0 if offset is None else int(offset)  # None where there is no byte to write


def seal_shard(path: str | Path, nodes: int, edges: int) -> ShardFile:
    """Put a shard of so many nodes and edges that was filled in on disk. Returns its manifest entry."""
    path = Path(path)
    sync(path)
    return ShardFile(path=path.name, bytes=path.stat().st_size, xxh3=checksum(path), nodes=nodes, edges=edges)


def _write(file: h5py.File, shard: Shard) -> None:
    file.attrs.update(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        build_id=shard.build_id,
        part=shard.part,
        parts=shard.parts,
        graph=shard.graph,
        num_nodes_global=shard.num_nodes_global,
        num_edges_global=shard.num_edges_global,
        num_classes=shard.num_classes,
    )
    if shard.task is not None:
        file.attrs["task"] = shard.task
    if shard.learned_features:
        file.attrs["learned_features"] = shard.learned_features
    for field, (dataset, _, _) in _DATASETS.items():
        value = getattr(shard, field)
        if value is not None:
            file.create_dataset(dataset, data=value.view(np.uint8) if value.dtype == np.bool_ else value)
    if isinstance(shard.x, sp.csr_array):
        features = file.create_group("features")
        features.attrs["shape"] = np.asarray(shard.x.shape, np.int64)
        features.create_dataset("data", data=shard.x.data)
        features.create_dataset("indices", data=shard.x.indices.astype(local_id_dtype(shard.x.shape[1]), copy=False))
        features.create_dataset("indptr", data=shard.x.indptr.astype(np.int64, copy=False))
    elif shard.x is not None:
        file.create_dataset("features/x", data=shard.x)
    if shard.node_ids is not None:
        text = shard.node_ids.dtype != np.int64
        ids = shard.node_ids.astype(object) if text else shard.node_ids
        file.create_dataset("ids/original", data=ids, dtype=h5py.string_dtype() if text else np.int64)


def write_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Write manifest.json; it appears complete or not at all. Everything it lists must be there already."""
    content = {"format": FORMAT, **asdict(manifest)}
    # One line a field; a line a block of sums would be thousands.
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items())
    with appears_by_rename(Path(folder) / MANIFEST) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- reading


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a build. ``ValueError`` says what is wrong with the folder and what to do."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(_why_no_build(Path(folder)))
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes; no manifest is that long; build the folder again")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); build the folder again") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path}: format is {found!r}; expected {FORMAT!r}: this is not a folder of shards")
    try:
        _check_version(content.get("format_version"))
        return _parse_manifest(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; build the folder again") from None


def _parse_manifest(content: dict[str, Any]) -> Manifest:
    kinds: dict[str, type] = {"build_id": str, "parts": int, "changes": list, "files": list}
    kinds |= dict.fromkeys(("graph", "partition", "sums"), dict)
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind) or isinstance(content[key], bool):
            raise ValueError(f"{key} is {content.get(key)!r}; expected {kind.__name__}")
    for place, file in enumerate(content["files"]):
        fields = {"path": str, "bytes": int, "xxh3": str}
        if not isinstance(file, dict) or not all(isinstance(file.get(key), kind) for key, kind in fields.items()):
            raise ValueError(f"files[{place}] is {file!r}; expected path, bytes and xxh3")
        counts: list[Any] = [file.get(key) for key in ("nodes", "edges")]
        if counts != [None, None] and not all(_is_int(count) and count >= 0 for count in counts):
            raise ValueError(f"files[{place}]: nodes and edges are {counts}; expected two numbers of 0 or more")
    return Manifest(
        format_version=content["format_version"],
        changes=tuple(map(str, content["changes"])),
        files=tuple(
            ShardFile(**{key: file.get(key) for key in ("path", "bytes", "xxh3", "nodes", "edges")})
            for file in content["files"]
        ),
        **{key: content[key] for key in ("build_id", "parts", "graph", "partition", "sums")},
    )


def read_shard(
    folder: str | Path, part: int, *, manifest: Manifest | None = None, verify: bool = True, features: bool = True
) -> Shard:
    """Read one part into memory; no file stays open.

    ``verify=False`` leaves the checksum out (the size is always compared), ``features=False`` leaves x and edge_x None.
    A fault is a `FormatError` (a ``ValueError``) that names file, dataset and index.
    """
    folder = Path(folder)
    manifest = manifest or read_manifest(folder)
    if not 0 <= part < manifest.parts:
        raise ValueError(f"{folder}: part {part} was asked for, but the build has parts 0 to {manifest.parts - 1}")
    check_file(folder, manifest.files[part], verify=verify, build_id=manifest.build_id)
    path = folder / manifest.files[part].path
    try:
        shard = _read(path, features)
        _check_belongs(shard, part, manifest, features)
    except FormatError as fault:
        raise FormatError(
            f"{fault.message}; {_REMEDY}", dataset=fault.dataset, index=fault.index, file=str(path)
        ) from None
    return shard


def stored_features(folder: str | Path, part: int, *, manifest: Manifest) -> tuple[int, int | None]:
    """Bytes that a part's features take in its file, and the number of values where they are sparse (CSR), else None;
    no value is read."""
    entry = manifest.files[part]
    check_file(folder, entry, verify=False)
    path = Path(folder) / entry.path
    names = ("features/x", "features/data", "features/indices", "features/indptr")
    try:
        with open_to_read(path) as file:
            found = {name: find_dataset(file, name) for name in names}
            there = {name: dataset for name, dataset in found.items() if dataset is not None}
            size = sum(int(dataset.size) * int(dataset.dtype.itemsize) for dataset in there.values())
            values = int(there["features/data"].size) if "features/data" in there else None
    except FormatError as fault:
        raise FormatError(f"{fault.message}; {_REMEDY}", dataset=fault.dataset, file=str(path)) from None
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise FormatError(f"HDF5 cannot read it ({error}); {_REMEDY}", file=str(path)) from None
    return size, values


def check_file(folder: str | Path, entry: FileEntry, *, verify: bool = True, build_id: str = "") -> None:
    """Raise `FormatError` where a listed file is missing or differs in size or, with ``verify``, in checksum."""
    path = Path(folder) / entry.path
    if not path.is_file():
        raise FormatError(f"the manifest lists this file, but it is not there; {_REMEDY}", file=str(path))
    size = path.stat().st_size
    message = None
    if size != entry.bytes:
        message = f"{size} bytes; the manifest says {entry.bytes}; {_REMEDY}"
    elif verify and (found := checksum(path)) != entry.xxh3:
        message = f"checksum is {found}; the manifest says {entry.xxh3}; {_REMEDY}"
    if message is None:
        return
    if build_id and (other := _other_build(path, build_id)):
        message = f"the file is of build {other}; the manifest is of build {build_id}; {_REMEDY}"
    raise FormatError(message, file=str(path))


def _other_build(path: Path, build_id: str) -> str | None:
    """The build id that a file, not to be opened as HDF5, seems to carry in its head, if it is not ``build_id``."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    ids = [found.decode() for found in re.findall(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", head)]
    return ids[0] if len(set(ids)) == 1 and ids[0] != build_id else None


def _read(path: Path, features: bool) -> Shard:
    try:
        with open_to_read(path) as file:
            check_heaps(file)
            values = _read_attributes(file)
            for field, (dataset, dtypes, dimensions) in _DATASETS.items():
                missing = field in _OPTIONAL and find_dataset(file, dataset) is None
                missing = missing or (field in _FEATURES and not features)
                values[field] = None if missing else read_dataset(file, dataset, dtypes, dimensions)
            for field in _MASKS:
                mask = values[field]
                require_each((mask <= 1).all(axis=0), f"splits/{field}", mask.T, "0 and 1 only")
                values[field] = mask.view(np.bool_)
            values["x"] = _read_features(file, values["owned_global"].shape[0]) if features else None
            values["node_ids"] = _read_ids(file)
    except FormatError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError) as error:
        # The variable overrides what a program asks for.
        locked = "; unset HDF5_USE_FILE_LOCKING, reading needs no locks" if "lock file" in str(error) else ""
        raise FormatError(f"HDF5 cannot read it ({error}){locked}") from None
    return Shard(**values)


def _read_attributes(file: h5py.File) -> dict[str, Any]:
    found = read_attribute(file, "format", str)
    require(found == FORMAT, "", f"attribute format is {found!r}; expected {FORMAT!r}")
    _check_version(read_attribute(file, "format_version", int))
    numbers = ("part", "parts", "num_nodes_global", "num_edges_global", "num_classes")
    kinds = dict.fromkeys(("build_id", "graph"), str) | dict.fromkeys(numbers, int)
    values = {name: read_attribute(file, name, kind) for name, kind in kinds.items()}
    values["task"] = read_attribute(file, "task", str) if "task" in file.attrs else None
    values["learned_features"] = (
        read_attribute(file, "learned_features", int) if "learned_features" in file.attrs else 0
    )
    return values


def _read_features(file: h5py.File, n: int) -> Array | sp.csr_array | None:
    if find_dataset(file, "features/data") is None:
        return None if find_dataset(file, "features/x") is None else read_dataset(file, "features/x", _REAL, (2,))
    data = read_dataset(file, "features/data", _REAL)
    indices = read_dataset(file, "features/indices", _LOCAL_IDS)
    indptr = read_dataset(file, "features/indptr", _IDS)
    shape = np.asarray(file["features"].attrs.get("shape", ()))
    good = shape.dtype == np.int64 and shape.shape == (2,) and shape[0] == n and 0 <= shape[1] < 2**62
    require(bool(good), "features", f"attribute shape is {shape.tolist()}; expected [{n}, F]")
    _check_csr(indptr, indices, data, (n, int(shape[1])))
    # scipy keeps both in one dtype, and would choose int64 here.
    dtype = local_id_dtype(max(int(shape[1]), data.shape[0] + 1))
    offsets, columns = indptr.astype(dtype, copy=False), indices.astype(dtype, copy=False)
    return sp.csr_array((data, columns, offsets), shape=(n, int(shape[1])))


def _read_ids(file: h5py.File) -> Array | None:
    dataset = find_dataset(file, "ids/original")
    if dataset is None:
        return None
    return read_dataset(file, "ids/original", _IDS) if dataset.dtype == np.int64 else read_strings(file, "ids/original")


def _check_belongs(shard: Shard, part: int, manifest: Manifest, features: bool) -> None:
    """Refuse a shard of another build, of another part, or at odds with the facts in the manifest."""
    expected: dict[str, tuple[Any, Any]] = {
        "build_id": (shard.build_id, manifest.build_id),
        "part": (shard.part, part),
        "parts": (shard.parts, manifest.parts),
    }
    facts: dict[str, Any] = {
        "num_nodes": shard.num_nodes_global,
        "num_edges": shard.num_edges_global,
        "task": shard.task,
        "num_classes": shard.num_classes,
        "num_splits": shard.train.shape[0],
        "weighted": shard.edge_weight is not None,
        "learned_features": shard.learned_features,
    }
    if features:
        facts |= {
            "num_features": 0 if shard.x is None else shard.x.shape[1],
            "num_edge_features": shard.num_edge_features,
        }
    expected |= {key: (value, manifest.graph[key]) for key, value in facts.items() if key in manifest.graph}
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise FormatError(f"{name} is {found!r}, but the manifest says {wanted!r}: it belongs to another build")


def _why_no_build(folder: Path) -> str:
    build = "partition-tools build GRAPH --parts P --out DIR"
    if folder.is_file():
        return (
            f"{folder}: a file, but a folder of shards is expected; if it is a graph, partition it first: "
            f"partition-tools build {folder} --parts P --out DIR"
        )
    if not folder.exists():
        beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
        half = any(p.name.startswith(f".{folder.name}.") and p.name.endswith(BUILDING) for p in beside)
        state = "its build was not finished" if half else "no such folder"
        return f"{folder}: {state}; build it: {build.replace('DIR', str(folder))}"
    names = sorted(entry.name for entry in folder.iterdir())
    if any(name.lstrip(".").startswith("part-") for name in names):
        return (
            f"{folder}: has parts but no {MANIFEST}: a build or a copy of it that was not finished; build again "
            f"with --force, or copy the rest: {build.replace('DIR', f'{folder} --force')}"
        )
    inner = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    if inner:
        return f"{folder}: no {MANIFEST} here, but there is one in {', '.join(inner[:3])}; name that folder"
    return f"{folder}: no {MANIFEST}, so this is not a folder of shards; name another folder, or make one: {build}"


# ----------------------------------------------------------------------------------------------------------- checks


def _check_version(version: Any) -> None:
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ValueError(f"format version {version!r}, but this version of fullgraph reads version {FORMAT_VERSION}")


def _check_offsets(indptr: Array, stored: int, dataset: str) -> None:
    require(int(indptr[0]) == 0, dataset, f"starts at {indptr[0]}; expected 0")
    good = np.ones(indptr.shape[0], np.bool_)
    good[1:] = indptr[1:] >= indptr[:-1]
    require_each(good, dataset, indptr, "no less than the offset before it")
    require(int(indptr[-1]) == stored, dataset, f"ends at {indptr[-1]}; expected {stored}, the values stored")


def _check_csr(indptr: Array, indices: Array, data: Array, shape: tuple[int, ...]) -> None:
    stored, (n, width) = data.shape[0], shape
    require(indptr.shape == (n + 1,), "features/indptr", f"shape {list(indptr.shape)}; expected [{n + 1}]")
    _check_offsets(indptr, stored, "features/indptr")
    require(indices.shape == (stored,), "features/indices", f"shape {list(indices.shape)}; expected [{stored}]")
    inside = (indices >= 0) & (indices < width)
    require_each(inside, "features/indices", indices, f"a column in 0..{width - 1}")


def _ascending(values: Array) -> Array:
    """Whether each value exceeds the one before it; True for the first."""
    good = np.ones(values.shape[0], np.bool_)
    good[1:] = values[1:] > values[:-1]
    return good


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
