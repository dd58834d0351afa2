"""METIS ``.graph`` files (METIS manual, section 4.1.1; also KaHIP, DIMACS10 and networkit).

The first line that is no comment: ``N M [fmt [ncon]]``; then one line a node. ``fmt`` is up to three digits of 0 and
1: vertex sizes, vertex weights, edge weights. A line holds ``[size] [weight]*ncon (neighbour [edge weight])*``, with
neighbours from 1; a blank line is a node without edges; lines that begin with ``%`` are comments.

The format is undirected: every edge stands in the lines of both its ends, with one weight, and the header counts it
once. That is checked; both entries are kept, src being the node of the line, in the file's order. Loops (one entry
each) and repeated edges are kept as given.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from partition_tools.graph import Graph, entry_keys
from partition_tools.sources import arrays
from partition_tools.sources.reader import Reader, Request

_COMMENT = re.compile(rb"^[ \t]*%[^\n]*(?:\n|\Z)", re.MULTILINE)
_HEADER = re.compile(rb"[ \t\r\n]*([^\n]*)(?:\n|\Z)")
_BAD_TOKEN = re.compile(rb"[0-9]*[^0-9\s]\S*|[0-9]{19,}")


def _matches(spec: str) -> bool:
    return spec.endswith(".graph") and Path(spec).is_file()


@dataclass(frozen=True)
class _Text:
    """The file without its comments, and the way from a place in it to a line number of the file."""

    path: str
    raw: bytes
    clean: bytes

    def hint(self, counts: NDArray[np.int64]) -> str:
        """What lines of as many numbers each might be instead of lines of neighbours."""
        corners = int(counts[0]) if counts.size else 0
        if corners < 3 or (counts != corners).any():
            return ""
        return f"; every line has {corners} numbers: a METIS mesh (elements and their corners)? convert it by m2gmetis"

    def fail(self, offset: int, problem: str) -> NoReturn:
        """Raise for the line at ``offset`` of ``clean``."""
        index = self.clean.count(b"\n", 0, offset)
        lines = self.raw.split(b"\n")
        kept = [number for number, line in enumerate(lines, 1) if not line.lstrip(b" \t").startswith(b"%")]
        raise ValueError(f"{self.path}, line {kept[index]}: {problem}")


def _read(spec: str, request: Request) -> Graph:
    raw = Path(spec).read_bytes()
    text = _Text(spec, raw, _COMMENT.sub(b"", raw))
    if not text.clean.strip():
        raise ValueError(
            f"{spec}: the file holds no graph; expected a line 'N M [fmt [ncon]]' and a line for each node"
        )
    header = _HEADER.match(text.clean)
    assert header is not None
    num_nodes, num_edges, fmt, ncon = _header(text, header)
    body = header.end()
    bad = _BAD_TOKEN.search(text.clean, body)
    if bad is not None:
        text.fail(bad.start(), f"{bad[0][:40].decode(errors='replace')!r} is not a whole number from 0 to 10^18")

    starts, counts, tokens = _lines(text, body)
    if counts.size < num_nodes:
        raise ValueError(
            f"{spec}: the header declares {num_nodes} nodes, but {counts.size} lines follow; every node has a line, a "
            f"blank one if it has no edges"
        )
    if counts[num_nodes:].any():
        extra = num_nodes + int(np.argmax(counts[num_nodes:] > 0))
        text.fail(int(starts[extra]), f"one line more than the {num_nodes} nodes that the header declares")
    starts, counts = starts[:num_nodes], counts[:num_nodes]

    sizes, weights, edge_weighted = (digit == "1" for digit in fmt)
    before = int(sizes) + ncon
    rest = counts - before
    if (rest < 0).any():
        line = int(np.argmax(rest < 0))
        text.fail(
            int(starts[line]), f"{int(counts[line])} numbers; fmt {fmt} with ncon {ncon} asks for at least {before}"
        )
    if edge_weighted and (rest % 2).any():
        line = int(np.argmax(rest % 2))
        text.fail(
            int(starts[line]), f"fmt {fmt} asks for pairs of neighbour and edge weight, but one number is left over"
        )

    first = np.cumsum(counts) - counts
    place = np.arange(tokens.size) - np.repeat(first, counts) - before
    step = 2 if edge_weighted else 1
    at = np.flatnonzero((place >= 0) & (place % step == 0))
    src = np.repeat(np.arange(num_nodes), rest // step)
    neighbour = tokens[at]
    bad_end = (neighbour < 1) | (neighbour > num_nodes)
    if bad_end.any():
        edge = int(np.argmax(bad_end))
        text.fail(
            int(starts[src[edge]]),
            f"neighbour {int(neighbour[edge])}; expected 1 to {num_nodes}, the header's nodes" + text.hint(counts),
        )
    dst = neighbour - 1
    edge_weight = tokens[at + 1] if edge_weighted else None
    if edge_weight is not None and (edge_weight < 1).any():
        line = int(src[np.argmax(edge_weight < 1)])
        text.fail(int(starts[line]), "an edge weight of 0; expected whole numbers from 1")

    loops = int((src == dst).sum())
    if num_edges not in ((src.size + loops) / 2, src.size / 2):
        hint = "; the header counts an edge once, not once for each direction" if num_edges == src.size else ""
        raise ValueError(
            f"{spec}: the header declares {num_edges} edges = {2 * num_edges} entries, but the lines hold {src.size} "
            f"entries{hint or text.hint(counts)}"
        )
    _check_symmetric(text, starts, counts, src, dst, edge_weight, num_nodes)

    changes = ["both entries of each edge are kept, as the lines give them"]
    if loops:
        changes.append(f"{loops} loops, which the format does not foresee, are kept as one entry each")
    if sizes:
        changes.append("vertex sizes were left out")
    return Graph(
        name=Path(spec).stem,
        num_nodes=num_nodes,
        src=src,
        dst=dst,
        edge_weight=None if edge_weight is None else arrays.edge_weights(edge_weight, src.size, spec),
        node_weight=tokens[(first + int(sizes))[:, None] + np.arange(ncon)] if weights else None,
        changes=tuple(changes),
    )


def _header(text: _Text, header: re.Match[bytes]) -> tuple[int, int, str, int]:
    """(nodes, edges, fmt as three digits, weights a node)."""
    line, at = header[1].decode(errors="replace").strip(), header.start(1)
    fields = line.split()
    expected = "expected 'N M [fmt [ncon]]': nodes, edges, format of weights, weights a node"
    if not 2 <= len(fields) <= 4 or not all(re.fullmatch("[0-9]{1,18}", field) for field in fields):
        mesh = "; a METIS mesh? convert it to a graph with m2gmetis" if len(fields) == 1 else ""
        text.fail(at, f"the header is {line[:60]!r}; {expected}{mesh}")
    num_nodes, num_edges = int(fields[0]), int(fields[1])
    fmt = fields[2].zfill(3) if len(fields) > 2 else "000"
    if not re.fullmatch("[01]{3}", fmt):
        text.fail(
            at,
            f"fmt is {fields[2]}; expected up to three digits of 0 and 1: vertex sizes, vertex weights, edge weights",
        )
    ncon = int(fields[3]) if len(fields) > 3 else int(fmt[1])
    if (ncon > 0) != (fmt[1] == "1"):
        text.fail(at, f"ncon is {ncon}, but fmt {fmt} says {'' if fmt[1] == '1' else 'no '}vertex weights; {expected}")
    if num_nodes < 1:
        text.fail(at, "the header declares 0 nodes; at least 1 is needed")
    return num_nodes, num_edges, fmt, ncon


def _lines(text: _Text, body: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of each line from ``body`` on, the offset and how many numbers it holds; and all the numbers.

    What follows the last line feed is a line too, blank or not: so a file joined by line feeds is whole.
    """
    data = np.frombuffer(text.clean, np.uint8)[body:]
    newline = np.flatnonzero(data == ord("\n"))
    starts = np.concatenate([[0], newline + 1])
    digit = data >= ord("0")
    begins = np.flatnonzero(digit & ~np.concatenate([[False], digit[:-1]]))
    counts = np.diff(np.append(np.searchsorted(begins, starts), begins.size))
    if begins.size == 0:
        return starts + body, counts, np.empty(0, np.int64)
    return starts + body, counts, np.fromstring(text.clean[body:].decode("ascii"), np.int64, sep=" ")


def _check_symmetric(
    text: _Text,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    weight: NDArray[np.int64] | None,
    num_nodes: int,
) -> None:
    """Every entry has its way back, as often and with the same weight."""
    there, back = entry_keys(src, dst, num_nodes), entry_keys(dst, src, num_nodes)
    sorted_there = np.sort(there)
    if not np.array_equal(sorted_there, np.sort(back)):
        times = np.searchsorted(sorted_there, there, "right") - np.searchsorted(sorted_there, there, "left")
        times_back = np.searchsorted(sorted_there, back, "right") - np.searchsorted(sorted_there, back, "left")
        edge = int(np.argmax(times > times_back))
        u, v = int(src[edge]) + 1, int(dst[edge]) + 1
        text.fail(
            int(starts[src[edge]]),
            f"node {u} names neighbour {v}, but the line of node {v} does not name {u}"
            + (" as often" if times_back[edge] else "")
            + "; an edge stands in the lines of both its ends"
            + text.hint(counts),
        )
    if weight is None:
        return
    order, order_back = np.lexsort((weight, there)), np.lexsort((weight, back))
    unlike = np.sort(order[weight[order] != weight[order_back]])
    if unlike.size:
        edge = int(unlike[0])
        u, v = int(src[edge]) + 1, int(dst[edge]) + 1
        text.fail(
            int(starts[src[edge]]),
            f"the edge from {u} to {v} weighs {int(weight[edge])} here and otherwise in the line of node {v}",
        )


READER = Reader(
    name="metis",
    description="NAME.graph in METIS's format: a header 'N M [fmt [ncon]]', then for each node a line of neighbours "
    "from 1",
    matches=_matches,
    read=_read,
)
