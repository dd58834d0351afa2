"""Files that hold a sparse matrix and nothing else: A[i, j] is an edge i -> j, every stored entry one, a stored 0 too.

``.npz`` as scipy.sparse.save_npz writes it (csr, csc, coo), and MatrixMarket ``.mtx`` (coordinate; pattern, real or
integer; general, symmetric or skew-symmetric), packed by gzip or not. Entries and their order are kept as given; of
a symmetric matrix, which the file holds the lower half of, both halves are stored. Values are edge weights only on
request: matrices often hold something else, and a layer that multiplies by it would not tell.

MatrixMarket is parsed here and not by ``scipy.io.mmread``, which ends the process on some damaged files.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from fullgraph.wording import counted
from partition_tools.graph import Array, Graph
from partition_tools.sources import arrays
from partition_tools.sources.archive import Archive
from partition_tools.sources.reader import Reader, Request
from partition_tools.sources.text import Text, unpacked

_BANNER = "%%MatrixMarket matrix coordinate pattern|real|integer general|symmetric|skew-symmetric"


def _matches_npz(spec: str) -> bool:
    if not (spec.endswith(".npz") and Path(spec).is_file()):
        return False
    archive = Archive(spec)
    return "format" in archive and "shape" in archive and "data" in archive


def _read_npz(spec: str, request: Request) -> Graph:
    return _graph(arrays.sparse_matrix(Archive(spec)), spec, request, [])


def _matches_mtx(spec: str) -> bool:
    return spec.endswith((".mtx", ".mtx.gz")) and Path(spec).is_file()


def _read_mtx(spec: str, request: Request) -> Graph:
    raw = unpacked(spec)
    field, symmetry = _banner(spec, raw)
    text = replace(Text.of(spec, raw), delimiter=None)
    rows, columns, entries = _sizes(text)
    _check_shape(spec, (rows, columns), entries, request)
    text = text.with_header()
    if text.num_rows != entries:
        raise ValueError(
            f"{spec}: the line of sizes declares {entries} entries, but "
            f"{counted(text.num_rows, 'line follows', 'lines follow')}"
        )
    if entries and text.width != (2 if field == "pattern" else 3):
        text.fail(0, f"{text.width} columns; expected row, column{'' if field == 'pattern' else ', value'} ({field})")
    row, col = text.parse(np.int64, [0, 1]).T
    _check_place(text, row, col, rows)
    if field == "pattern":
        if request.options.weights:
            raise ValueError(f"{spec}: --weights: a pattern matrix has no values")
        values: Array = np.ones(entries, np.uint8)
    else:
        values = text.parse(np.int64 if field.endswith("integer") else np.float64, [2])[:, 0]
    changes = []
    if symmetry != "general":
        half = np.flatnonzero(row != col)
        sign = -1 if symmetry == "skew-symmetric" else 1
        row, col = np.concatenate([row, col[half]]), np.concatenate([col, row[half]])
        values = np.concatenate([values, sign * values[half]])
        changes.append(f"{symmetry}: {entries} stored entries became {row.size}, both halves of the matrix")
    return _graph(sp.coo_array((values, (row - 1, col - 1)), shape=(rows, columns)), spec, request, changes)


def _banner(spec: str, raw: bytes) -> tuple[str, str]:
    """(field, symmetry) of a MatrixMarket file."""
    words = raw[:200].split(b"\n", 1)[0].decode("ascii", "replace").split()
    if len(words) != 5 or words[0].lower() not in ("%%matrixmarket", "%matrixmarket") or words[1].lower() != "matrix":
        raise ValueError(f"{spec}: the first line is {' '.join(words)[:60]!r}; expected {_BANNER}")
    layout, field, symmetry = (word.lower() for word in words[2:])
    if layout != "coordinate":
        raise ValueError(f"{spec}: {layout}, a dense matrix; expected the entries of a sparse one: {_BANNER}")
    if field not in ("pattern", "real", "double", "integer", "unsigned-integer"):
        raise ValueError(f"{spec}: {field} values; expected pattern, real or integer")
    if symmetry not in ("general", "symmetric", "skew-symmetric"):
        raise ValueError(f"{spec}: {symmetry}; expected general, symmetric or skew-symmetric")
    return field, symmetry


def _sizes(text: Text) -> tuple[int, int, int]:
    """Rows, columns and entries."""
    numbers = text.row(0) or ()
    if len(numbers) != 3 or not all(re.fullmatch(r"[0-9]{1,18}", number) for number in numbers):
        raise ValueError(f"{text.path}: the line of sizes is {' '.join(numbers)[:60]!r}; expected 'N N E'")
    rows, columns, entries = (int(number) for number in numbers)
    return rows, columns, entries


def _check_place(text: Text, row: NDArray[np.int64], col: NDArray[np.int64], size: int) -> None:
    bad = (row < 1) | (row > size) | (col < 1) | (col > size)
    if bad.any():
        entry = int(np.argmax(bad))
        text.fail(entry, f"row {int(row[entry])}, column {int(col[entry])}; expected 1 to {size}, the matrix's size")


def _check_shape(spec: str, shape: tuple[int, int], entries: int, request: Request) -> None:
    rows, columns = shape
    if rows != columns or rows < 1:
        raise ValueError(
            f"{spec}: a matrix of {rows} rows and {columns} columns; expected [N, N], a row and a column a node (of a "
            f"bipartite graph, number both kinds of nodes through)"
        )
    asked = request.num_nodes
    if asked is not None and asked[0] != rows:
        raise ValueError(f"{spec}: the matrix has {rows} rows, one a node, but {asked[1]} says {asked[0]}")
    if asked is None and rows > arrays.most_nodes(entries):
        raise ValueError(
            f"{spec}: {rows} nodes for {entries} entries; if that is right, confirm it with --num-nodes {rows}"
        )


def _graph(matrix: sp.coo_array, spec: str, request: Request, changes: list[str]) -> Graph:
    _check_shape(spec, matrix.shape, matrix.nnz, request)
    values, weights = matrix.data, None
    if request.options.weights:
        weights = arrays.edge_weights(values, matrix.nnz, f"{spec}: values")
    elif (values != 1).any():
        changes.append("the values of the matrix were left out; --weights takes them as edge weights")
    name = Path(spec).name
    return Graph(
        name=re.sub(r"\.(npz|mtx|mtx\.gz)$", "", name),
        num_nodes=int(matrix.shape[0]),
        src=matrix.coords[0].astype(np.int64),
        dst=matrix.coords[1].astype(np.int64),
        edge_weight=weights,
        changes=tuple(changes),
    )


SCIPY_READER = Reader(
    name="scipy",
    description="NAME.npz as scipy.sparse.save_npz writes it (csr, csc, coo): A[i, j] is an edge i -> j",
    matches=_matches_npz,
    read=_read_npz,
)
MATRIX_MARKET_READER = Reader(
    name="matrix-market",
    description="NAME.mtx (also .gz), MatrixMarket coordinates, pattern, real or integer: A[i, j] is an edge i -> j",
    matches=_matches_mtx,
    read=_read_mtx,
)
