"""Features, labels and splits that lie beside a graph in files of their own, and how their rows find their nodes.

A row is the node of its number, or the node of the id in its column of ids: the one that ``--id-column`` says, or
that is named id, node or node_id, or first and without a name, as pandas writes an index (one that but counts the rows
is left out); in a file of features without names of columns, a first column that is no number.

features   .npy [N, F]; .npz as scipy.sparse.save_npz writes it; or text, a column a feature
labels     .npy, or text: as ``arrays.labels`` takes them; names become classes in their order and come back with
           predictions; empty is no label
splits     text or .npy of the words train, val (valid, validation) and test, a column a split, anything empty or
           none for nodes in none; or three columns train, val, test of 0 and 1; or .npz with masks by row, or lists
           of the graph's own ids, named train, val, test (also train_mask, train_idx, ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from fullgraph.wording import counted
from partition_tools.graph import Array, Graph, Splits
from partition_tools.sources import arrays
from partition_tools.sources.archive import Archive, npy_rows, read_npy
from partition_tools.sources.options import LoadOptions
from partition_tools.sources.text import Text
from partition_tools.stored import StoredRows

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
    values: arrays.Features
    ids: Array | None = None
    """[M] int64 or str, all different."""
    text: Text | None = None
    names: Array | None = None
    """[C] names of classes, or of columns of labels."""

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
    mask_rows: tuple[int, str] | None = None
    """Length of a mask among the splits, and its name."""

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
                problem = (
                    "no such file" if not Path(path).exists() else "is a folder" if Path(path).is_dir() else "no file"
                )
                raise ValueError(f"--{name} {path}: {problem}; expected a file{kinds}")
            found[name] = read(path, options, said)
        splits = found.get("splits")
        return cls(**found, said=tuple(said), mask_rows=_mask_rows(splits) if isinstance(splits, Archive) else None)

    @property
    def num_rows(self) -> tuple[int, str] | None:
        """Nodes there must be, where a file has a row a node, and which file that is."""
        for table in (self.features, self.labels, self.splits):
            if isinstance(table, Table) and table.ids is None:
                return int(table.values.shape[0]), f"rows of {table.path}"
        return self.mask_rows


# ---------------------------------------------------------------------------------------------------------- reading


def _read_features(path: str, options: LoadOptions, said: list[str]) -> Table:
    if path.endswith(".npy"):
        return Table(path=path, values=arrays.dense_features(npy_rows(path), path))
    if path.endswith(".npz"):
        return Table(path=path, values=arrays.sparse_features(arrays.sparse_matrix(Archive(path)), path, said))
    text, ids, columns = _columns(path, options, said)
    if not columns:
        raise ValueError(f"{path}: one column, the ids; expected features beside it")
    values = _numbers(text, columns, said)
    if ids is None and len(columns) > 1 and values.shape[0] > 1:
        counts = values[:, 0] - np.arange(values.shape[0])
        if counts[0] in (0, 1) and (counts == counts[0]).all():
            said.append(
                f"{path}: the first column counts the rows and was taken as a feature; if it holds ids, add "
                f"--id-column 1"
            )
    with np.errstate(over="ignore"):  # a value beyond float32's range stays in float64
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
    said.append(f"{text.path}: {counted(int(missing.sum()), 'empty field was', 'empty fields were')} read as NaN")
    return values


def _read_labels(path: str, options: LoadOptions, said: list[str]) -> Table:
    if path.endswith(".npy"):
        return _label_table(read_npy(path), path, said)
    text, ids, columns = _columns(path, options, said, at_most_one=True)
    values = _values(text, columns)
    if values.shape[1] > 1 and values.dtype.kind == "U":
        raise ValueError(f"{path}: {values.shape[1]} columns of names; expected one column of classes")
    names = None if text.header is None else np.array([text.header[c] for c in columns])
    return _label_table(values, path, said, ids=ids, text=text, names=names if values.shape[1] > 1 else None)


def _label_table(values: Array, path: str, said: list[str], **fields: Any) -> Table:
    if values.dtype.kind == "U":
        values, fields["names"] = arrays.named_classes(values, path, said)
    elif values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    return Table(path=path, values=values, **fields)


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


def _read_splits(path: str, options: LoadOptions, said: list[str]) -> Table | Archive:
    if path.endswith(".npz"):
        return Archive(path)
    if path.endswith(".npy"):
        values = read_npy(path)
        if values.dtype.kind == "U":
            table = Table(path=path, values=values.reshape(values.shape[0], -1))
            return replace(table, values=_word_codes(table))
        table = Table(path=path, values=values)
        return replace(table, values=_mask_codes(table))
    text, ids, columns = _columns(path, options, said, at_most_one=True)
    names = [arrays.part_of(text.header[c]) for c in columns] if text.header is not None else []
    if len(columns) == len(arrays.PARTS) and set(names) == set(arrays.PARTS):
        ordered = [columns[names.index(part)] for part in arrays.PARTS]
        table = Table(path=path, values=text.parse(np.int64, ordered), ids=ids, text=text)
        return replace(table, values=_mask_codes(table))
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


def _mask_codes(table: Table) -> NDArray[np.uint8]:
    values = np.asarray(table.values)
    if values.ndim != 2 or values.shape[1] != 3 or values.dtype.kind not in "iubf" or not np.isin(values, (0, 1)).all():
        raise ValueError(
            f"{table.path} is {values.dtype} {list(values.shape)}; expected words train, val, test, or [N, 3] of 0 and "
            f"1 in columns train, val, test"
        )
    masks = values.astype(np.uint8)
    several = masks.sum(axis=1) > 1
    if several.any():
        table.fail(int(np.argmax(several)), "a node in more than one of train, val and test; put each node in one")
    return np.asarray(masks @ np.array([1, 2, 3], np.uint8)).astype(np.uint8)[:, None]


def _mask_rows(archive: Archive) -> tuple[int, str] | None:
    """The length of a mask [N] in a file of splits: a row of it is a node."""
    for name in arrays.mask_names(bare=True):
        values = archive.get(name)
        if values is not None and values.ndim == 1 and (name.endswith("_mask") or values.dtype == np.bool_):
            return int(values.shape[0]), f"length of {archive.where(name)}"
    return None


def _columns(
    path: str, options: LoadOptions, said: list[str], *, at_most_one: bool = False
) -> tuple[Text, Array | None, list[int]]:
    """The file, its ids if it has a column of them, and the places of its other columns."""
    text = Text.read(path)
    first = text.row(0)
    if first is None:
        raise ValueError(f"{path}: no rows; expected a row a node")
    wanted = options.id_column
    number = int(wanted) if wanted is not None and wanted.isdecimal() else None
    named = any(name.lower() in (*ID_NAMES, *_VALUE_NAMES) or (name == wanted and number is None) for name in first)
    if named or names_no_index(first) or _is_header(first, text.row(1), number):
        text = text.with_header()
    text.check_width()
    if text.num_rows == 0:
        raise ValueError(f"{path}: no rows below the names of columns; expected a row a node")
    if text.comments:
        said.append(f"{path}: {counted(text.comments, 'line of comments was', 'lines of comments were')} skipped")
    place = _id_place(text, wanted, number)
    if place is None and text.width == 1 and (line := text.blank_inside()) is not None:
        raise ValueError(
            f"{path}, line {line}: blank between rows, of which each is a node; write none, or take the line out"
        )
    columns = [c for c in range(text.width) if c != place]
    if place is None and wanted is None and text.header is not None and names_no_index(text.header):
        ids = _ids(text, 0)
        counts = ids.dtype == np.int64 and np.array_equal(ids, np.arange(ids.size))
        what = "left out: it counts the rows (--id-column 1 takes it as ids)" if counts else "taken as ids"
        said.append(f"{path}: the first column has no name, as pandas writes an index, and was {what}")
        return text, None if counts else ids, columns[1:]
    if place is None and at_most_one and text.header is None and len(columns) > 1:
        raise ValueError(
            f"{path}: {len(columns)} columns without names, so that ids cannot be told from values; add "
            f"--id-column 1 if the first holds ids, or a first line of names"
        )
    return text, None if place is None else _ids(text, place), columns


def names_no_index(first: tuple[str, ...]) -> bool:
    """Whether a row names all columns but the first, by words or, as pandas does by itself, by their numbers."""
    others = first[1:]
    return (
        bool(others)
        and first[0] == ""
        and (not any(map(_is_number, others)) or others == tuple(map(str, range(len(others)))))
    )


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
    origin = dict(graph.origin)
    if tables.features is not None:
        rows = _rows(graph, tables.features, "features")
        values = tables.features.values
        origin["x"] = tables.features.path
        if rows is not None:
            values = (np.asarray(values) if isinstance(values, StoredRows) else values)[rows]
        fields["x"] = arrays.some_features(values, tables.features.path, changes)
        _say(graph.x is not None, "features", tables.features, changes)
    if tables.labels is not None:
        rows = _rows(graph, tables.labels, "labels")
        values = np.asarray(tables.labels.values)
        origin["y"] = tables.labels.path
        fields["class_names"] = tables.labels.names
        fields["y"] = arrays.labels(_spread(graph, values, rows, tables.labels, changes), tables.labels.path, changes)
        _say(graph.y is not None, "labels", tables.labels, changes)
    if tables.splits is not None:
        origin["splits"] = tables.splits.path
        fields["splits"] = _splits(graph, tables.splits, changes)
        _say(graph.splits is not None, "splits", tables.splits, changes)
    return replace(graph, **fields, origin=origin, changes=tuple(changes)) if fields else graph


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
            raise ValueError(
                f"{table.path}: {counted(m, 'row')} of {what} for {counted(n, 'node')} of {graph.name}{remedy}"
            )
        return None
    own = np.arange(n) if graph.node_ids is None else graph.node_ids
    node = arrays.lookup(own, table.ids)
    if (node < 0).any():
        row = int(np.argmax(node < 0))
        table.fail(
            row,
            f"id {table.ids[row]} is no node of {graph.name}; {int((node < 0).sum())} of {counted(m, 'id')} unknown "
            f"(its ids are like {own[0]}, {own[-1]})",
        )
    rows = np.full(n, -1, np.int64)
    rows[node] = np.arange(m)
    if what == "features" and m < n:
        absent = int(np.argmax(rows < 0))
        raise ValueError(
            f"{table.path}: {counted(m, 'row')} of features for {counted(n, 'node')}; "
            f"{counted(n - m, 'node has', 'nodes have')} none, {own[absent]} first"
        )
    return rows


def _spread(graph: Graph, values: Array, rows: NDArray[np.int64] | None, table: Table, changes: list[str]) -> Array:
    """Labels a node of labels a row; no label for nodes without a row."""
    if rows is None:
        return values
    absent = rows < 0
    if not absent.any():
        return np.asarray(values[rows])
    if values.ndim == 2 and values.dtype.kind != "f":
        node = int(np.argmax(absent))
        raise ValueError(
            f"{table.path}: {counted(int(absent.sum()), 'node has', 'nodes have')} no row, {graph.node(node)} first; "
            f"several labels a node are 0 or 1 each, and none says that they are unknown: give every node its row"
        )
    if values.dtype.kind not in "fi":
        values = values.astype(np.int64)
    spread = values[rows]
    spread[absent] = np.nan if values.dtype.kind == "f" else -1
    none = counted(int(absent.sum()), "node has no row there and is", "nodes have no row there and are")
    changes.append(f"{table.path}: {none} without a label")
    return spread


def _splits(graph: Graph, table: Table | Archive, changes: list[str]) -> Splits | None:
    if isinstance(table, Table):
        rows = _rows(graph, table, "splits")
        codes = np.asarray(table.values)
        if rows is not None:
            codes = np.where((rows < 0)[:, None], np.uint8(0), codes[rows])
        train, val, test = (np.ascontiguousarray((codes == number).T) for number in (1, 2, 3))
        return Splits(train=train, val=val, test=test)
    found = arrays.field_splits(table, graph.num_nodes, changes, bare=True, ids=graph.node_ids)
    if found is None:
        raise ValueError(
            f"{table.path}: holds {', '.join(table.names)}; expected train, val and test, masks or indices"
        )
    return found
