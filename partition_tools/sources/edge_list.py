"""Edge lists: text with an edge a row, ``.csv .tsv .txt .edges .edgelist .el .wel``, packed by gzip or not.

The first two columns are the ends, source -> destination; a third, if any, is the edge's weight and taken on request.
Where the first line names its columns (source, target, from, to, weight, ...), ends and weight are found by name and
there may be more columns. Edges, their order, loops and duplicates are kept as given.

What ids are. Where a row of --features or --labels is a node, or --num-nodes is given, ids are rows, counted from
--index-base. Otherwise ids are names, of numbers or of text: N is the number of distinct ones, in their order, or those
of the files' own columns of ids; they stay with the nodes as ``node_ids``. So gaps, huge numbers and a first node 1 do
no harm. The first row tells whether ids are numbers; a row that disagrees is an error, not another kind of id.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from fullgraph.wording import counted
from partition_tools.graph import EDGE_BLOCK, Array, Graph, release
from partition_tools.mapped import Growing, blocks, extent, too_large
from partition_tools.sources import arrays
from partition_tools.sources.options import LoadOptions
from partition_tools.sources.reader import Reader, Request
from partition_tools.sources.tables import Table, names_no_index
from partition_tools.sources.text import Text, leading_zero

_ENDINGS = ("csv", "tsv", "txt", "edges", "edgelist", "el", "wel")
_NAME = re.compile(rf"(.+)\.({'|'.join(_ENDINGS)})(\.gz)?", re.IGNORECASE)
_SOURCE = ("source", "src", "from", "u", "head", "node1", "id1", "fromnodeid", "from_node_id", "source_id")
_TARGET = ("target", "dst", "destination", "to", "v", "tail", "node2", "id2", "tonodeid", "to_node_id", "target_id")
_WEIGHT = ("weight", "weights", "w", "value", "edge_weight")
_PIECE = 1 << 24
"""Bytes of a piece of a file that is too large to be taken whole."""
_SPREAD = 4
"""Bytes of memory that a byte of the file takes, at least, where it is."""
_DENSE_SPAN = 8
"""Ids up to this many times their number are counted in a table; a wider range is sorted."""


def _matches(spec: str) -> bool:
    return _NAME.fullmatch(Path(spec).name) is not None and Path(spec).is_file()


def _read(spec: str, request: Request) -> Graph:
    options = request.options
    ends = _Ends.read(spec, options)
    changes = list(ends.said)
    weight = None
    if ends.weight is not None:
        weight = arrays.edge_weights(ends.weight, ends.src.shape[0], f"{spec}: weights")
    if request.num_nodes is not None:
        num_nodes, because = request.num_nodes
        arrays.require_memory(num_nodes, 16, f"{because}: {num_nodes:,} nodes", "give the number of nodes")
        src, dst = _by_row(ends, num_nodes, because, options.index_base or 0)
        node_ids = np.arange(1, num_nodes + 1) if options.index_base == 1 else None
    else:
        src, dst, node_ids = _by_id(ends, request, changes)
        num_nodes = node_ids.shape[0]
        if node_ids.dtype == np.int64 and np.array_equal(node_ids, np.arange(num_nodes)):
            node_ids = None
    match = _NAME.fullmatch(Path(spec).name)
    assert match is not None
    return Graph(
        name=match[1],
        num_nodes=num_nodes,
        src=src,
        dst=dst,
        edge_weight=weight,
        node_ids=node_ids,
        changes=tuple(changes),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ends:
    """The ends of E edges as the file names them."""

    text: Text
    src: Array
    """[E] int64, or str where ids are text."""
    dst: Array
    weight: NDArray[np.float64] | None
    said: tuple[str, ...]

    @classmethod
    def read(cls, path: str, options: LoadOptions) -> _Ends:
        if too_large(_SPREAD * os.path.getsize(path)):
            ends = cls._in_pieces(Text.first_of(path, _PIECE), options)
            if ends is not None:
                return ends
        said: list[str] = []
        text, source, target, weight = _opened(Text.read(path), options, said)
        _say_skipped(text.num_rows, text.comments, said)
        ids = _ids(text, [source, target], options, said)
        if ids.dtype.kind == "U":
            _refuse_triples(text, weight)
        return cls(
            text=text,
            src=np.ascontiguousarray(ids[:, 0]),
            dst=np.ascontiguousarray(ids[:, 1]),
            weight=None if weight is None or not options.weights else text.parse(np.float64, [weight])[:, 0],
            said=tuple(said),
        )

    @classmethod
    def _in_pieces(cls, first: Text, options: LoadOptions) -> _Ends | None:
        """The same, piece by piece and laid on disk; None where ids are names, which are held in memory."""
        said: list[str] = []
        first, source, target, weight = _opened(first, options, said)
        src, dst, weights = Growing(np.int64), Growing(np.int64), Growing(np.float64)
        rows = comments = 0
        about_ids: list[str] = []
        for piece in first.all_of(_PIECE):
            if rows == 0 or piece.num_rows:
                ids = _ids(piece, [source, target], options, about_ids := [])
                if ids.dtype.kind == "U":
                    return None
                src.add(ids[:, 0])
                dst.add(ids[:, 1])
            if weight is not None and options.weights:
                weights.add(piece.parse(np.float64, [weight])[:, 0])
            rows, comments = rows + piece.num_rows, comments + piece.comments
        _say_skipped(rows, comments, said)
        given = weight is not None and options.weights
        return cls(
            text=first,
            src=src.array(),
            dst=dst.array(),
            weight=weights.array() if given else None,
            said=(*said, *about_ids),
        )

    def fail(self, edge: int, problem: str) -> NoReturn:
        self.text.fail(edge, f"edge {self.src[edge]} -> {self.dst[edge]}: {problem}")


def _opened(text: Text, options: LoadOptions, said: list[str]) -> tuple[Text, int, int, int | None]:
    """The text under its header, and its columns of source, destination and weight."""
    _refuse_others(text)
    if text.row(0) is None:
        raise ValueError(f"{text.path}: holds no edges; expected a row an edge: source, destination")
    text = _named(text, options, said)
    text.check_width()
    return text, *_places(text, options, said)


def _say_skipped(rows: int, comments: int, said: list[str]) -> None:
    if comments:
        said.append(
            f"{counted(rows, 'edge')} read, {counted(comments, 'line of comments', 'lines of comments')} skipped"
        )


def _refuse_others(text: Text) -> None:
    """Formats whose text would pass for an edge list, with other edges than they hold."""
    head = text.head.lstrip()
    first = head.split(b"\n", 1)[0].decode("utf-8", "replace")
    if re.match(r"%%?MatrixMarket", first, re.IGNORECASE):
        raise ValueError(f"{text.path}: a MatrixMarket file; name it .mtx")
    if head[:1] in (b"{", b"[", b"<"):
        raise ValueError(f"{text.path}: begins with {first[:30]!r}: JSON, XML, HTML or RDF; write its edges as rows")
    if re.fullmatch(r"\*(vertices|network)\b.*", first, re.IGNORECASE):
        raise ValueError(f"{text.path}: a Pajek file; write its arcs or edges as rows: source, destination")
    if re.search(rb"^p\s+(sp|edges?|col)\s+[0-9]+\s+[0-9]+\s*$", head, re.MULTILINE):
        raise ValueError(
            f"{text.path}: a DIMACS file; keep the columns of its edges' ends: lines e or a without that letter"
        )


def _named(text: Text, options: LoadOptions, said: list[str]) -> Text:
    """The text with its first row as names of columns, where it is that."""
    first, second = text.row(0), text.row(1)
    assert first is not None
    known = _place(first, _SOURCE) is not None and _place(first, _TARGET) is not None
    names = not any(map(_whole, first[:2])) or names_no_index(first)
    under = second is not None and names and all(map(_whole, second[:2]))
    if options.header == "no" or (options.header is None and not known and not under):
        return text
    if options.header is None:
        said.append(f"the first line ({', '.join(first)[:60]}) names the columns; --header no makes it an edge")
    return text.with_header()


def _places(text: Text, options: LoadOptions, said: list[str]) -> tuple[int, int, int | None]:
    """Columns of source, destination and weight."""
    header, width = text.header or (), text.width
    source, target = _place(header, _SOURCE), _place(header, _TARGET)
    if source is not None and target is not None:
        weight = _place(header, _WEIGHT)
    elif width - (index := names_no_index(header)) in (2, 3):
        source, target, weight = index, index + 1, (index + 2 if width - index == 3 else None)
    else:
        first = ", ".join(text.header or text.row(0) or ())[:60]
        what = "one column" if width == 1 else f"{width} columns"
        raise ValueError(
            f"{text.path}: the first row ({first}) has {what}; expected 2 or 3: source, destination, weight; or names "
            f"of columns with source and target. {_ADVICE[min(width, 4)]}"
        )
    if options.weights and weight is None:
        raise ValueError(f"{text.path}: --weights: there is no third column, or none of the names {', '.join(_WEIGHT)}")
    left = [c for c in range(width) if c not in (source, target) and not (c == weight and options.weights)]
    if left:
        names = ", ".join((header[c] if header else "") or str(c + 1) for c in left)
        hint = (
            f"; --weights takes {'it' if len(left) == 1 else header[weight]} as edge weights" if weight in left else ""
        )
        said.append(f"column {names} was left out{hint}" if len(left) == 1 else f"columns {names} were left out{hint}")
    return source, target, weight


_ADVICE = {
    1: "Are the columns separated by something else than tabs, semicolons, commas or blanks?",
    4: "A matrix? Save it with scipy.sparse.save_npz. Lines of neighbours? Write a row an edge. From networkx? "
    "write_edgelist(..., data=False)",
}


def _place(header: tuple[str, ...], names: tuple[str, ...]) -> int | None:
    return next((i for i, name in enumerate(header) if name.lower() in names), None)


def _whole(text: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9]+", text) is not None


def _ids(text: Text, columns: list[int], options: LoadOptions, said: list[str]) -> Array:
    """[E, 2] int64, or str."""
    row = text.row(0)
    if row is None:
        return np.empty((0, 2), np.int64)
    first = [row[c] for c in columns if c < len(row)]
    zeros = not options.text_ids and all(map(_whole, first)) and leading_zero(text.body, text.delimiter)
    if zeros:
        said.append("ids are text, because some begin with 0")
    if options.text_ids or zeros:
        return _names(text, columns)
    if all(map(_whole, first)) and not all(abs(int(field)) >= 2**63 for field in first):
        ids = _parsed(text, columns)
        if (ids < 0).any():
            bad = int(np.argmax((ids < 0).any(axis=1)))
            text.fail(
                bad,
                f"id {int(ids[bad].min())} is negative, as one too large for its integer type becomes; "
                f"--text-ids takes ids as names",
            )
        return ids
    if all(re.fullmatch(r"[0-9]+(\.[0-9]*)?(e[+]?[0-9]+)?", field, re.IGNORECASE) for field in first):
        return _from_floats(text, columns, said)
    if text.header is None and options.header is None:
        said.append(f"the first line ({', '.join(row)[:60]}) is an edge; --header yes makes it names of columns")
    return _names(text, columns)


def _parsed(text: Text, columns: list[int]) -> NDArray[np.int64]:
    try:
        return text.parse(np.int64, columns)
    except ValueError as error:
        raise ValueError(f"{error}, as those in the first row are; --text-ids takes ids as names") from error


def _from_floats(text: Text, columns: list[int], said: list[str]) -> NDArray[np.int64]:
    values = text.parse(np.float64, columns)
    bad = ~((values >= 0) & (values < 2**53) & (values == np.floor(values))).all(axis=1)
    if bad.any():
        text.fail(int(np.argmax(bad)), "an id that is no whole number, as those in the first row are")
    said.append("ids are written as floats and were read as whole numbers")
    return values.astype(np.int64)


def _names(text: Text, columns: list[int]) -> Array:
    ids = np.strings.strip(text.parse(str, columns))
    empty = (ids == "").any(axis=1)
    if empty.any():
        text.fail(int(np.argmax(empty)), "an empty id; expected source and destination")
    return ids


def _refuse_triples(text: Text, weight: int | None) -> None:
    row = text.row(0)
    if weight is None or row is None:
        return
    try:
        float(row[weight])
    except ValueError:
        raise ValueError(
            f"{text.path}: three columns of text ({', '.join(row)[:60]}), like triples head, relation, tail; this "
            f"reads graphs of one kind of edge: keep the two columns of ends"
        ) from None


# -------------------------------------------------------------------------------------------------------- numbering


def _by_row(ends: _Ends, num_nodes: int, because: str, base: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if ends.src.dtype != np.int64:
        raise ValueError(
            f"{ends.text.path}: ids are text ({ends.src[0]}), so they cannot be numbers of nodes, which {because} asks "
            f"for; give the files of features and labels a column of ids (--id-column)"
        )
    if ends.src.size:
        low, high = extent(ends.src, ends.dst)
        if low < base or high - base >= num_nodes:
            _refuse_row(ends, low - base, high - base, num_nodes, because, base)
    return (_less(ends.src, base), _less(ends.dst, base)) if base else (ends.src, ends.dst)


def _less(ids: NDArray[np.int64], base: int) -> NDArray[np.int64]:
    return _changed(ids, lambda some: some - base)


def _changed(ids: Array, change: Callable[[Array], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Ids changed one by one; in their place where they are on disk."""
    if not isinstance(ids, np.memmap):
        return change(ids)
    for block in blocks(ids.shape[0]):
        ids[block] = change(ids[block])
        release(ids)
    return ids


def _find(ends: _Ends, test: Callable[[Array, Array], NDArray[np.bool_]]) -> tuple[int, int]:
    """(The first edge that passes, how many do)."""
    first, count = -1, 0
    for block in blocks(ends.src.shape[0]):
        found = test(ends.src[block], ends.dst[block])
        if found.any():
            first = block.start + int(np.argmax(found)) if first < 0 else first
            count += int(np.count_nonzero(found))
        release(ends.src)
        release(ends.dst)
    return first, count


def _refuse_row(ends: _Ends, low: int, high: int, num_nodes: int, because: str, base: int) -> NoReturn:
    remedy = ""
    if base == 0 and low >= 1 and high == num_nodes:
        remedy = "; ids seem to start at 1: add --index-base 1"
    elif base == 1 and low == -1:
        remedy = "; ids start at 0: leave out --index-base 1"

    def outside(src: Array, dst: Array) -> NDArray[np.bool_]:
        return np.asarray((np.minimum(src, dst) < base) | (np.maximum(src, dst) - base >= num_nodes))

    edge, count = _find(ends, outside)
    ends.fail(
        edge,
        f"{counted(num_nodes, 'node')} ({because}), so ids go from {base} to {num_nodes - 1 + base}; "
        f"{counted(count, 'such edge')}, the largest id is {high + base}{remedy}",
    )


def _by_id(ends: _Ends, request: Request, changes: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """Sources, destinations and the [N] ids."""
    base = request.options.index_base
    if base is not None:
        if ends.src.dtype != np.int64:
            raise ValueError(f"{ends.text.path}: --index-base {base}: ids are text ({ends.src[0]}), not numbers")
        edge, _ = _find(ends, lambda src, dst: np.asarray(np.minimum(src, dst) < base))
        if edge >= 0:
            ends.fail(edge, f"--index-base {base} says that ids start at {base}")
    features, labels = request.tables.features, request.tables.labels
    if features is not None and features.ids is not None:
        return _among(ends, features, changes)
    extra = labels.ids if labels is not None else None
    ids, src, dst = _numbered(ends, extra)
    if ids.size == 0:
        raise ValueError(f"{ends.text.path}: no edges, and nothing tells the number of nodes; add --num-nodes")
    first, last = ids[0], ids[-1]
    said = f"N is {ids.size}, the distinct ids from {first} to {last}"
    if extra is not None:
        assert labels is not None
        said += _without_edges(ids, src, dst, labels)
    if ids.dtype == np.int64 and int(first) == 1 and int(last) == ids.size:
        said += "; they start at 1 and stay the nodes' own ids"
        if base is None:
            said += "; files with a row a node would ask for --index-base 1"
    elif ids.dtype == np.int64 and ids.size <= int(last) < 2 * ids.size:
        start = int(first == 1) if base is None else base
        gaps = int(last) + 1 - start - ids.size
        if gaps:
            said += (
                f"; {counted(gaps, 'number', 'numbers')} from {start} to the last {'is' if gaps == 1 else 'are'} no "
                f"node's; if nodes without edges are meant, add --num-nodes {int(last) + 1 - start}"
                + (f" --index-base {start}" if start and base is None else "")
            )
    changes.append(said)
    return src, dst, ids


def _among(ends: _Ends, table: Table, changes: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    assert table.ids is not None
    ids = table.ids

    def strange(src: Array, dst: Array) -> NDArray[np.bool_]:
        return np.asarray((arrays.lookup(ids, src) < 0) | (arrays.lookup(ids, dst) < 0))

    edge, count = _find(ends, strange)
    if edge >= 0:
        stranger = ends.src[edge] if arrays.lookup(ids, ends.src[edge : edge + 1])[0] < 0 else ends.dst[edge]
        ends.fail(
            edge,
            f"{stranger} is not among the {counted(ids.shape[0], 'id')} of {table.path}; {counted(count, 'such edge')}",
        )
    src, dst = (_changed(end, lambda some: arrays.lookup(ids, some)) for end in (ends.src, ends.dst))
    changes.append(f"N is {ids.size}, the ids of {table.path}{_without_edges(ids, src, dst, table)}")
    return src, dst, ids


def _numbered(ends: _Ends, extra: Array | None) -> tuple[Array, NDArray[np.int64], NDArray[np.int64]]:
    """The distinct ids of all edges and of ``extra`` in their order, and sources and destinations as places there."""
    if isinstance(ends.src, np.memmap) and (extra is None or extra.dtype == np.int64):
        ids = _distinct_on_disk(ends.src, ends.dst, np.empty(0, np.int64) if extra is None else extra)
        src, dst = (_changed(end, lambda some: np.searchsorted(ids, some)) for end in (ends.src, ends.dst))
        return ids, src, dst
    flat = np.concatenate([ends.src, ends.dst])
    if extra is not None and extra.dtype.kind != flat.dtype.kind:
        extra, flat = extra.astype(str), flat.astype(str)
    ids, place = _distinct(flat if extra is None else np.concatenate([flat, extra]))
    e = ends.src.shape[0]
    return ids, place[:e], place[e : 2 * e]


def _distinct_on_disk(src: NDArray[np.int64], dst: NDArray[np.int64], extra: NDArray[np.int64]) -> NDArray[np.int64]:
    ids, waiting, count = np.unique(extra), list[NDArray[np.int64]](), 0
    for end in (src, dst):
        for block in blocks(end.shape[0]):
            waiting.append(np.unique(end[block]))
            count += waiting[-1].shape[0]
            release(end)
            if count > max(ids.shape[0], EDGE_BLOCK):
                ids, waiting, count = np.unique(np.concatenate([ids, *waiting])), [], 0
    return np.unique(np.concatenate([ids, *waiting]))


def _without_edges(ids: Array, src: NDArray[np.int64], dst: NDArray[np.int64], table: Table) -> str:
    """How many of the ids only the table knows, and the first."""
    alone = np.ones(ids.size, np.bool_)
    for end in (src, dst):
        for block in blocks(end.shape[0]):
            alone[end[block]] = False
            release(end)
    count = int(alone.sum())
    if not count:
        return ""
    occur = counted(count, "of them occurs", "of them occur")
    return f"; {occur} in {table.path} only, {ids[np.argmax(alone)]} first: nodes without edges"


def _distinct(values: Array) -> tuple[Array, NDArray[np.int64]]:
    """The distinct values in order, and the place of each value among them."""
    if values.dtype != np.int64 or values.size == 0 or int(values.max()) > _DENSE_SPAN * values.size:
        ids, place = np.unique(values, return_inverse=True)
        return ids, place.reshape(-1).astype(np.int64, copy=False)
    there = np.zeros(int(values.max()) + 1, np.bool_)
    there[values] = True
    place = np.cumsum(there) - 1
    return np.flatnonzero(there), place[values]


READER = Reader(
    name="edge-list",
    description=f"NAME.{', .'.join(_ENDINGS)} (also .gz): an edge a row, source and destination, perhaps weight; "
    "ids of any kind",
    matches=_matches,
    read=_read,
    takes=frozenset({"header", "index_base", "text_ids"}),
)
