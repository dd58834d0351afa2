"""Planetoid's raw files (cora, citeseer, pubmed): ``ind.NAME.x, .y, .tx, .ty, .allx, .ally, .graph, .test.index``.

Nodes 0.. are the rows of ``allx``; row j of ``tx`` is node ``test.index[j]``. A node that neither names (citeseer has
some) gets zero features and no label. The public split: the rows of ``y`` train, the next 500 validate,
``test.index`` tests. ``graph`` maps a node to its neighbours; as the usual loaders do, it is read as a simple
undirected graph: loops are dropped, repeated pairs merged, both directions stored, ordered by (src, dst).

All but ``test.index`` are pickles of the Python 2 era. They are taken apart by an unpickler that knows arrays, CSR
matrices, lists and dicts by name and makes plain records of them: it imports nothing and calls nothing of the file's.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from fullgraph.wording import counted
from partition_tools.graph import Array, Graph, Splits
from partition_tools.sources import arrays
from partition_tools.sources.reader import Reader, Request

_PICKLES = ("x", "y", "tx", "ty", "allx", "ally", "graph")
_PARTS = (*_PICKLES, "test.index")
_VALIDATION = 500


def _prefix(spec: str) -> str | None:
    """``.../ind.NAME`` of the set that ``spec`` names: by its prefix, by one of its files, or by its folder alone."""
    path = Path(spec)
    if path.is_dir():
        found = sorted(path.glob("ind.*.graph"))
        if len(found) > 1:
            names = ", ".join(str(file).removesuffix(".graph") for file in found)
            raise ValueError(f"{spec}: the folder holds several Planetoid sets; name one of them: {names}")
        return str(found[0]).removesuffix(".graph") if found else None
    match = re.fullmatch(r"(ind\..+?)\.?(?:\.(?:x|y|tx|ty|allx|ally|graph|test\.index))?", path.name)
    if match is None:
        return None
    prefix = str(path.with_name(match[1]))
    return prefix if any(os.path.exists(f"{prefix}.{part}") for part in _PARTS) else None


def _matches(spec: str) -> bool:
    return _prefix(spec) is not None


def _read(spec: str, request: Request) -> Graph:
    prefix = _prefix(spec)
    assert prefix is not None
    missing = [part for part in _PARTS if not os.path.isfile(f"{prefix}.{part}")]
    if missing:
        raise ValueError(
            f"{prefix}: a Planetoid set is the files {', '.join(_PARTS)} of one prefix; missing: {', '.join(missing)}"
        )
    x, tx, allx = (_features(f"{prefix}.{part}") for part in ("x", "tx", "allx"))
    y, ty, ally = (_one_hot(f"{prefix}.{part}") for part in ("y", "ty", "ally"))
    test = _test_index(f"{prefix}.test.index")
    for part, rows, expected in (
        ("x", x.shape, (y.shape[0], allx.shape[1])),
        ("tx", tx.shape, (test.size, allx.shape[1])),
        ("ty", ty.shape, (test.size, ally.shape[1])),
        ("ally", ally.shape, (allx.shape[0], ally.shape[1])),
        ("y", y.shape, (min(y.shape[0], ally.shape[0]), ally.shape[1])),
    ):
        if rows != expected:
            raise ValueError(f"{prefix}.{part} has shape {list(rows)}; the other files ask for {list(expected)}")
    known, num_train = allx.shape[0], y.shape[0]
    if test.size and int(test.min()) < known:
        raise ValueError(
            f"{prefix}.test.index names node {int(test.min())}, but nodes 0 to {known - 1} are rows of allx"
        )
    num_nodes = max(known, int(test.max(initial=-1)) + 1)
    changes: list[str] = []

    # Row of the stacked [allx; tx; zeros] that each node takes.
    row = np.full(num_nodes, known + test.size)
    row[:known] = np.arange(known)
    row[test] = known + np.arange(test.size)
    nowhere = int((row == known + test.size).sum())
    if nowhere:
        changes.append(f"{nowhere} nodes are in neither allx nor test.index: zero features, no label, in no split")
    blocks: list[sp.csr_array] = [allx, tx, sp.csr_array(np.zeros((1, allx.shape[1]), np.float32))]
    features = sp.csr_array(sp.vstack(blocks, format="csr"))[row]
    stacked = np.concatenate([ally, ty, np.zeros((1, ally.shape[1]), ally.dtype)])
    labels = np.where(stacked.any(axis=1), stacked.argmax(axis=1), -1)[row].astype(np.int64)

    num_val = min(_VALIDATION, known - num_train)
    changes.append(f"public split: nodes 0 to {num_train - 1} train, the next {num_val} validate, test.index tests")
    node = np.arange(num_nodes)
    test_mask = np.zeros((1, num_nodes), np.bool_)
    test_mask[0, test] = True
    src, dst = _edges(f"{prefix}.graph", num_nodes, changes)
    return Graph(
        name=Path(prefix).name.removeprefix("ind."),
        num_nodes=num_nodes,
        src=src,
        dst=dst,
        x=features,
        y=labels,
        splits=Splits(
            train=(node < num_train)[None, :],
            val=((node >= num_train) & (node < num_train + num_val))[None, :],
            test=test_mask,
        ),
        changes=tuple(changes),
    )


def _edges(path: str, num_nodes: int, changes: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    neighbours = _load(path)
    if not (isinstance(neighbours, dict) and all(isinstance(row, list) for row in neighbours.values())):
        raise ValueError(f"{path}: expected a dict of lists: a node to its neighbours")
    counts = np.fromiter(map(len, neighbours.values()), np.int64, len(neighbours))
    listed = int(counts.sum())
    if listed > os.path.getsize(path):  # a list that stands for many nodes may still be short in the file
        raise ValueError(f"{path}: {listed} neighbours in {os.path.getsize(path)} bytes; the file is damaged")
    ids = list(chain(neighbours, chain.from_iterable(neighbours.values())))
    if not set(map(type, ids)) <= {int}:
        raise ValueError(f"{path}: expected whole numbers as nodes and neighbours")
    try:
        flat = np.array(ids, np.int64)
    except OverflowError as error:
        raise ValueError(f"{path}: a node id does not fit into int64; nodes are numbered from 0") from error
    src, dst = np.repeat(flat[: len(neighbours)], counts), flat[len(neighbours) :]
    arrays.check_ends(src, dst, num_nodes, path, "rows of allx and the largest of test.index")
    loops = src == dst
    src_both, dst_both = arrays.both_ways(src[~loops], dst[~loops], num_nodes)
    changes.append(
        f"{listed} listed neighbours became {src_both.size} directed entries, both directions of "
        f"{counted(src_both.size // 2, 'pair')}: {counted(int(loops.sum()), 'loop')} dropped, repeated pairs merged"
    )
    return src_both, dst_both


def _features(path: str) -> sp.csr_array:
    value = _load(path)
    if isinstance(value, _Csr):
        matrix = value.matrix(path)
    elif isinstance(value, _Ndarray):
        matrix = sp.csr_array(_real(value.array(path), path))
    else:
        raise ValueError(f"{path}: holds a {type(value).__name__}; expected a CSR matrix of features")
    matrix.sum_duplicates()
    return sp.csr_array(matrix.astype(np.float32))


def _one_hot(path: str) -> Array:
    value = _load(path)
    if not isinstance(value, _Ndarray):
        raise ValueError(f"{path}: holds a {type(value).__name__}; expected an array of one-hot labels")
    rows = _real(value.array(path), path)
    bad = ((rows != 0) & (rows != 1)).any(axis=1) | ((rows != 0).sum(axis=1) > 1)
    if rows.shape[1] == 0 or bad.any():
        where = f"row {int(np.argmax(bad))}" if bad.any() else f"shape {list(rows.shape)}"
        raise ValueError(f"{path}: {where} is not one-hot; expected one 1 for the class, or zeros for no label")
    return rows


def _real(values: Array, path: str) -> Array:
    if values.ndim != 2 or values.dtype.kind not in "fiub":
        raise ValueError(f"{path}: holds {values.dtype} {list(values.shape)}; expected numbers [nodes, columns]")
    return values


def _test_index(path: str) -> NDArray[np.int64]:
    lines = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if not re.fullmatch(r"\s*([0-9]{1,18})?\s*", line):
            raise ValueError(f"{path}, line {number}: {line[:40]!r} is not a node id; expected one whole number a line")
    index = np.array([line for line in lines if line.strip()], np.int64)
    if np.unique(index).size != index.size:
        raise ValueError(f"{path}: a node is listed twice; expected each test node once")
    if index.size and int(index.max()) > 10 * (index.size + 1_000_000):
        raise ValueError(f"{path}: node {int(index.max())} is out of all proportion to {index.size} test nodes")
    return index


class _Record:
    """What a pickle may build: it stores what it is given, and acts only when this module asks."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Any:
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype(_Record):
    def dtype(self, path: str) -> np.dtype[Any]:
        code = self.args[0] if self.args else None
        if not (isinstance(code, str) and re.fullmatch(r"f[248]|[iu][1248]|b1", code)):
            raise ValueError(f"{path}: an array of {code!r}; expected real numbers")
        big = isinstance(self.state, tuple) and self.state[1:2] == (">",)
        return np.dtype(code).newbyteorder(">" if big else "<")


class _Ndarray(_Record):
    def array(self, path: str) -> Array:
        match self.state:
            case (int(), tuple() as shape, _Dtype() as kind, bool() | int() as fortran, raw):
                dtype = kind.dtype(path)
            case _:
                raise ValueError(f"{path}: an array without its state; the file is damaged")
        data = raw.encode("latin1") if isinstance(raw, str) else raw
        if not isinstance(data, bytes):
            raise ValueError(f"{path}: an array without its bytes; the file is damaged")
        if not all(isinstance(size, int) and 0 <= size < 2**40 for size in shape):
            raise ValueError(f"{path}: an array of shape {shape}; the file is damaged")
        cells = 1
        for size in shape:
            cells *= size
        if cells * dtype.itemsize != len(data):
            raise ValueError(f"{path}: an array of {dtype} {list(shape)} with {len(data)} bytes; the file is damaged")
        values = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
        return values.astype(dtype.newbyteorder("="))


class _Csr(_Record):
    def matrix(self, path: str) -> sp.csr_array:
        state = self.state if isinstance(self.state, dict) else {}
        parts = [state.get(name) for name in ("data", "indices", "indptr")]
        shape = state.get("_shape", state.get("shape"))
        if not all(isinstance(part, _Ndarray) for part in parts):
            raise ValueError(f"{path}: a CSR matrix without its arrays; the file is damaged")
        if not (isinstance(shape, tuple) and all(isinstance(size, int) and 0 <= size < 2**40 for size in shape)):
            raise ValueError(f"{path}: a CSR matrix of shape {shape}; the file is damaged")
        data, indices, indptr = (part.array(path) for part in parts if isinstance(part, _Ndarray))
        return arrays.csr([data, indices, indptr, np.array(shape, np.int64)], f"{path}: csr_matrix ")


class _Latin1(_Record):
    """How Python 3 writes bytes in an old pickle."""

    def __new__(cls, *args: Any) -> Any:
        match args:
            case (str() as text, "latin1"):
                return text.encode("latin1")
        raise pickle.UnpicklingError("bytes in an unknown encoding")


_NAMES: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Ndarray,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Ndarray,
    ("numpy._core.multiarray", "_reconstruct"): _Ndarray,
    ("scipy.sparse.csr", "csr_matrix"): _Csr,
    ("scipy.sparse._csr", "csr_matrix"): _Csr,
    ("collections", "defaultdict"): defaultdict,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("__builtin__", "list"): list,
    ("__builtin__", "dict"): dict,
    ("_codecs", "encode"): _Latin1,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _NAMES.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no Planetoid file needs; only numpy arrays, scipy CSR matrices, "
                f"dicts and lists are read, and nothing in a file is ever run"
            )
        return found


def _load(path: str) -> Any:
    with open(path, "rb") as stream:
        size = os.path.getsize(path)
        try:
            for opcode, argument, _ in pickletools.genops(stream):
                # A memo slot far out makes the C unpickler allocate a table up to it.
                if "PUT" in opcode.name and isinstance(argument, int) and argument > size:
                    raise pickle.UnpicklingError(f"memo slot {argument} in a file of {size} bytes")
            stream.seek(0)
            return _Unpickler(stream, fix_imports=False, encoding="latin1").load()
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise ValueError(f"{path}: not a pickle that can be read: {error}") from error


READER = Reader(
    name="planetoid",
    description=".../ind.NAME, the prefix of Planetoid's files ind.NAME.x, .y, .tx, .ty, .allx, .ally, .graph, "
    ".test.index",
    matches=_matches,
    read=_read,
)
