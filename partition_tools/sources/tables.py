"""Features, labels and splits that lie beside a graph in files of their own, and how their rows find their nodes.

A row is the node of its number, or the node of the id in its column of ids: the one that ``--id-column`` says, or
that is named id, node or node_id; in a file of features without names of columns, a first column that is no number.

features   .npy [N, F]; .npz as scipy.sparse.save_npz writes it; or text, a column a feature
labels     .npy, or text: as ``arrays.labels`` takes them; names become classes in their order; empty is no label
splits     text or .npy of the words train, val (valid, validation) and test, a column a split, anything empty or
           none for nodes in none; or three columns train, val, test of 0 and 1; or .npz with masks or index lists
           named train, val, test (also train_mask, train_idx, ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from partition_tools.graph import Array, Graph, Splits
from partition_tools.sources import arrays
from partition_tools.sources.archive import Archive, read_npy
from partition_tools.sources.options import LoadOptions
from partition_tools.sources.text import Text

ID_NAMES = ("id", "node", "node_id", "nodeid")
_VALUE_NAMES = ("label", "labels", "class", "y", "target", "split", "splits", "fold", "subset")
"""With ID_NAMES, words in a first row that tell it from data."""
MISSING = ("", "NA", "N/A", "nan", "NaN", "null", "None")
"""What stands in a text for no value."""

_WORDS = {
    0: ("", "none", "unlabeled", "unlabelled", "na", "nan", "-", "-1"),
    1: ("train", "training"),
    2: ("val", "valid", "validation", "dev"),
    3: ("test", "testing"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """M rows of something, of the nodes 0..M-1 or of those that ``ids`` names."""

    path: str
    values: Array | sp.csr_array
    ids: Array | None = None
    """[M] int64 or str, all different."""
    text: Text | None = None

    def fail(self, row: int, problem: str) -> NoReturn:
        if self.text is not None:
            self.text.fail(row, problem)
        raise ValueError(f"{self.path}, row {row}: {problem}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """The files that the options name, read and not yet joined to a graph."""

    features: Table | None = None
    labels: Table | None = None
    splits: Table | Archive | None = None
    """A table of codes uint8 [M, k]: 0 none, 1 train, 2 val, 3 test."""
    said: tuple[str, ...] = ()

    @classmethod
    def read(cls, options: LoadOptions) -> Tables:
        said: list[str] = []
        found: dict[str, Any] = {}
        for name, path, read in (
            ("features", options.features_file, _read_features),
            ("labels", options.labels, _read_labels),
            ("splits", options.splits, _read_splits),
        ):
            if path is None:
                continue
            if not Path(path).is_file():
                kinds = ", or degree, onehot, random:K or learned:K" if name == "features" else ""
                raise ValueError(f"--{name} {path}: no such file; expected a file{kinds}")
            found[name] = read(path, options, said)
        return cls(**found, said=tuple(said))

    @property
    def num_rows(self) -> tuple[int, str] | None:
        """Nodes there must be, where a file has a row a node, and which file that is."""
        for table in (self.features, self.labels, self.splits):
            if isinstance(table, Table) and table.ids is None:
                return int(table.values.shape[0]), f"rows of {table.path}"
        return None


# ---------------------------------------------------------------------------------------------------------- reading


def _read_features(path: str, options: LoadOptions, said: list[str]) -> Table:
    if path.endswith(".npy"):
        return Table(path=path, values=arrays.dense_features(read_npy(path), path))
    if path.endswith(".npz"):
        matrix = arrays.sparse_matrix(Archive(path)).tocsr()
        return Table(path=path, values=arrays.sparse_features(sp.csr_array(matrix), path, said))
    text, ids, columns = _columns(path, options)
    if not columns:
        raise ValueError(f"{path}: one column, the ids; expected features beside it")
    values = _numbers(text, columns, said)
    small = values.astype(np.float32)
    exact = bool(((small == values) | np.isnan(values)).all())
    return Table(path=path, values=small if exact else values, ids=ids, text=text)


def _numbers(text: Text, columns: Sequence[int], said: list[str]) -> Array:
    """[M, C] float64; what stands for no value becomes NaN."""
    try:
        return text.parse(np.float64, columns)
    except ValueError:
        fields = np.strings.strip(text.parse(str, columns))
        missing = np.isin(fields, MISSING)
        if not missing.any():
            raise
    try:
        values = np.where(missing, "nan", fields).astype(np.float64)
    except ValueError:
        return text.parse(np.float64, columns)  # raises, naming the line; an empty field may be what it names
    said.append(f"{text.path}: {int(missing.sum())} empty fields were read as NaN")
    return values


def _read_labels(path: str, options: LoadOptions, said: list[str]) -> Table:
    if path.endswith(".npy"):
        values = read_npy(path)
        return Table(path=path, values=_classes(values, path, said) if values.dtype.kind == "U" else values)
    text, ids, columns = _columns(path, options, at_most_one=True)
    values = _values(text, columns)
    values = values[:, 0] if values.shape[1] == 1 else values
    if values.dtype.kind == "U":
        if values.ndim == 2:
            raise ValueError(f"{path}: {values.shape[1]} columns of names; expected one column of classes")
        values = _classes(values, path, said)
    return Table(path=path, values=values, ids=ids, text=text)


def _values(text: Text, columns: Sequence[int]) -> Array:
    """[M, C] int64, float64 (NaN for no value) or, where some field is no number, str."""
    for dtype in (np.int64, np.float64):
        try:
            return text.parse(dtype, columns)
        except ValueError:
            continue
    fields = np.strings.strip(text.parse(str, columns))
    missing = np.isin(fields, MISSING)
    try:
        return np.where(missing, "nan", fields).astype(np.float64)
    except ValueError:
        return np.where(missing, "", fields)


def _classes(values: Array, path: str, said: list[str]) -> NDArray[np.int64]:
    """[M] classes of names in their order; -1 for empty ones."""
    if values.ndim != 1:
        raise ValueError(f"{path} has shape {list(values.shape)}; expected [N] names of classes")
    names, classes = np.unique(values, return_inverse=True)
    empty = names.size > 0 and names[0] == ""
    shown = ", ".join(names[empty : empty + 10].tolist()) + (", ..." if names.size - empty > 10 else "")
    said.append(f"{path}: {names.size - empty} names became classes in their order: {shown}")
    return (classes.reshape(values.shape) - empty).astype(np.int64)


def _read_splits(path: str, options: LoadOptions, said: list[str]) -> Table | Archive:
    if path.endswith(".npz"):
        return Archive(path)
    if path.endswith(".npy"):
        values = read_npy(path)
        if values.dtype.kind == "U":
            table = Table(path=path, values=values.reshape(values.shape[0], -1))
            return replace(table, values=_word_codes(table))
        return Table(path=path, values=_mask_codes(values, path))
    text, ids, columns = _columns(path, options, at_most_one=True)
    names = [arrays.part_of(text.header[c]) for c in columns] if text.header is not None else []
    if len(columns) == len(arrays.PARTS) and set(names) == set(arrays.PARTS):
        ordered = [columns[names.index(part)] for part in arrays.PARTS]
        return Table(path=path, values=_mask_codes(text.parse(np.int64, ordered), path), ids=ids, text=text)
    table = Table(path=path, values=np.strings.strip(text.parse(str, columns)), ids=ids, text=text)
    return replace(table, values=_word_codes(table))


def _word_codes(table: Table) -> NDArray[np.uint8]:
    words, inverse = np.unique(np.asarray(table.values), return_inverse=True)
    code = {word: number for number, names in _WORDS.items() for word in names}
    codes = np.array([code.get(str(word).strip().lower(), 255) for word in words], np.uint8)
    found = codes[inverse.reshape(table.values.shape)] if words.size else np.zeros(table.values.shape, np.uint8)
    if (found == 255).any():
        row, column = (int(i) for i in np.argwhere(found == 255)[0])
        word = str(np.asarray(table.values)[row, column])[:40]
        table.fail(row, f"{word!r} is no split; expected train, val, test, or none (or nothing) for a node in none")
    return found


def _mask_codes(values: Array, path: str) -> NDArray[np.uint8]:
    if values.ndim != 2 or values.shape[1] != 3 or values.dtype.kind not in "iub" or not np.isin(values, (0, 1)).all():
        raise ValueError(
            f"{path} is {values.dtype} {list(values.shape)}; expected words train, val, test, or [N, 3] of 0 and 1 in "
            f"columns train, val, test"
        )
    if (values.sum(axis=1) > 1).any():
        row = int(np.argmax(values.sum(axis=1) > 1))
        raise ValueError(f"{path}: row {row} is in more than one of train, val and test; put each node in one")
    return np.asarray(values @ np.array([1, 2, 3], np.uint8)).astype(np.uint8)[:, None]


def _columns(path: str, options: LoadOptions, *, at_most_one: bool = False) -> tuple[Text, Array | None, list[int]]:
    """The file, its ids if it has a column of them, and the places of its other columns."""
    text = Text.read(path)
    first = text.row(0)
    if first is None:
        raise ValueError(f"{path}: no rows; expected a row a node")
    wanted = options.id_column
    number = int(wanted) if wanted is not None and wanted.isdecimal() else None
    named = any(name.lower() in (*ID_NAMES, *_VALUE_NAMES) or (name == wanted and number is None) for name in first)
    if named or _is_header(first, text.row(1), number):
        text = text.with_header()
    text.check_width()
    if text.num_rows == 0:
        raise ValueError(f"{path}: no rows below the names of columns; expected a row a node")
    place = _id_place(text, wanted, number)
    columns = [c for c in range(text.width) if c != place]
    if place is None and at_most_one and text.header is None and len(columns) > 1:
        raise ValueError(
            f"{path}: {len(columns)} columns without names, so that ids cannot be told from values; add "
            f"--id-column 1 if the first holds ids, or a first line of names"
        )
    return text, None if place is None else _ids(text, place), columns


def _is_header(first: tuple[str, ...], second: tuple[str, ...] | None, id_number: int | None) -> bool:
    """Whether a number stands under a word in some column, leaving that of ids out."""
    if second is None or len(second) != len(first):
        return False
    return any(
        not _is_number(a) and a not in MISSING and _is_number(b)
        for column, (a, b) in enumerate(zip(first, second, strict=True))
        if column + 1 != id_number
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _id_place(text: Text, wanted: str | None, number: int | None) -> int | None:
    if wanted is None:
        if text.header is not None:
            return next((i for i, name in enumerate(text.header) if name.lower() in ID_NAMES), None)
        row = text.row(0)
        assert row is not None
        words = [not _is_number(field) for field in row]
        return 0 if len(row) > 1 and words[0] and not any(words[1:]) else None
    if number is not None and 1 <= number <= text.width:
        return number - 1
    if number is None and text.header is not None and wanted in text.header:
        return text.header.index(wanted)
    names = ", ".join(text.header or ()) or f"none; its columns have the numbers 1 to {text.width}"
    raise ValueError(f"--id-column {wanted}: {text.path} has no such column; its names are {names}")


def _ids(text: Text, place: int) -> Array:
    try:
        ids = text.parse(np.int64, [place])[:, 0]
    except ValueError:
        ids = np.strings.strip(text.parse(str, [place])[:, 0])
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if again.size:
        row = int(order[again + 1].min())
        text.fail(row, f"id {ids[row]} stands here for the second time; expected a row a node")
    return ids


# ---------------------------------------------------------------------------------------------------------- joining


def join(graph: Graph, tables: Tables) -> Graph:
    """The graph with the tables' features, labels and splits in place of its own, said."""
    changes = [*graph.changes, *tables.said]
    fields: dict[str, Any] = {}
    if tables.features is not None:
        rows = _rows(graph, tables.features, "features")
        values = tables.features.values
        fields["x"] = arrays.some_features(values if rows is None else values[rows], tables.features.path, changes)
        _say(graph.x is not None, "features", tables.features, changes)
    if tables.labels is not None:
        rows = _rows(graph, tables.labels, "labels")
        values = np.asarray(tables.labels.values)
        fields["y"] = arrays.labels(_spread(values, rows, tables.labels, changes), tables.labels.path, changes)
        _say(graph.y is not None, "labels", tables.labels, changes)
    if tables.splits is not None:
        fields["splits"] = _splits(graph, tables.splits, changes)
        _say(graph.splits is not None, "splits", tables.splits, changes)
    return replace(graph, **fields, changes=tuple(changes)) if fields else graph


def _say(replaced: bool, what: str, table: Table | Archive, changes: list[str]) -> None:
    by_id = isinstance(table, Table) and table.ids is not None
    how = " by id" if by_id else " by row" if isinstance(table, Table) else ""
    changes.append(f"{what} of {table.path}{how}" + (", in place of the graph's own" if replaced else ""))


def _rows(graph: Graph, table: Table, what: str) -> NDArray[np.int64] | None:
    """[N] the table's row of each node, -1 for none; None where row i is node i."""
    n, m = graph.num_nodes, int(table.values.shape[0])
    if table.ids is None:
        if m != n:
            remedy = "" if graph.node_ids is None else "; a column of ids would say which row is whose (--id-column)"
            raise ValueError(f"{table.path}: {m} rows of {what} for {n} nodes of {graph.name}{remedy}")
        return None
    own = np.arange(n) if graph.node_ids is None else graph.node_ids
    node = lookup(own, table.ids)
    if (node < 0).any():
        row = int(np.argmax(node < 0))
        table.fail(
            row,
            f"id {table.ids[row]} is no node of {graph.name}; {int((node < 0).sum())} of {m} ids are unknown (its ids "
            f"are like {own[0]}, {own[-1]})",
        )
    rows = np.full(n, -1, np.int64)
    rows[node] = np.arange(m)
    if what == "features" and m < n:
        absent = int(np.argmax(rows < 0))
        raise ValueError(
            f"{table.path}: {m} rows of features for {n} nodes; {n - m} nodes have none, {own[absent]} first"
        )
    return rows


def lookup(own: Array, asked: Array) -> NDArray[np.int64]:
    """[M] the place of each asked id among ``own``, -1 where it is not there. Ids of two kinds meet as text."""
    if own.dtype.kind != asked.dtype.kind:
        own, asked = own.astype(str), asked.astype(str)
    if own.size == 0:
        return np.full(asked.shape, -1)
    order = np.argsort(own, kind="stable")
    place = order[np.minimum(np.searchsorted(own[order], asked), own.size - 1)]
    return np.where(own[place] == asked, place, -1)


def _spread(values: Array, rows: NDArray[np.int64] | None, table: Table, changes: list[str]) -> Array:
    """Labels a node of labels a row; no label for nodes without a row."""
    if rows is None:
        return values
    absent = rows < 0
    if not absent.any():
        return np.asarray(values[rows])
    if values.ndim == 2 and values.dtype.kind != "f":
        node = int(np.argmax(absent))
        raise ValueError(
            f"{table.path}: {int(absent.sum())} nodes have no row, node {node} first; several labels a node are 0 or 1 "
            f"each, and none says that they are unknown: give every node its row"
        )
    if values.dtype.kind not in "fi":
        values = values.astype(np.int64)
    spread = values[rows]
    spread[absent] = np.nan if values.dtype.kind == "f" else -1
    changes.append(f"{table.path}: {int(absent.sum())} nodes have no row there and are without a label")
    return spread


def _splits(graph: Graph, table: Table | Archive, changes: list[str]) -> Splits | None:
    if isinstance(table, Table):
        rows = _rows(graph, table, "splits")
        codes = np.asarray(table.values)
        if rows is not None:
            codes = np.where((rows < 0)[:, None], np.uint8(0), codes[rows])
        train, val, test = (np.ascontiguousarray((codes == number).T) for number in (1, 2, 3))
        return Splits(train=train, val=val, test=test)
    found = arrays.field_splits(table, graph.num_nodes, changes, bare=True)
    if found is None:
        raise ValueError(
            f"{table.path}: holds {', '.join(table.names)}; expected train, val and test, masks or indices"
        )
    return found
