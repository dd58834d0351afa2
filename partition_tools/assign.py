"""Which part owns which node: METIS, simple orders to compare it with, or a file of the user's own.

Whatever the method, a node has one part, parts are numbered 0..P-1, and what was chosen, repaired or left aside on
the way is said in the assignment's notes. Nothing here depends on the order of the graph's edges.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fullgraph.wording import counted
from partition_tools import metis
from partition_tools.adjacency import rows_sent, symmetric_adjacency
from partition_tools.graph import Graph
from partition_tools.sources.archive import read_npy

_RECURSIVE_UP_TO = 8
"""Parts for recursive bisection, whose cuts are as good there and whose parts are of nearly equal size."""
_NODES_A_PART_FOR_KWAY = 50
"""Below this k-way leaves parts empty."""
_LOAD_SCALE = 1024
"""Integer load of a mean node where several loads are combined."""
_FILE = "file:"
_METHODS = ("metis", "random", "contiguous", "bfs")
_CHOICES = {
    "objective": ("cut", "volume"),
    "scheme": ("auto", "kway", "recursive"),
    "balance": ("nodes", "edges", "mixed"),
}
_ONLY_METIS = ("objective", "scheme", "tries", "imbalance", "use_edge_weights", "balance", "timeout")


@dataclass(frozen=True, kw_only=True)
class AssignOptions:
    """How nodes are given to parts. Construction raises ``ValueError`` naming the flag and the value."""

    parts: int
    """Number of parts, one for each process that may train."""
    method: str = "metis"
    """metis; random, contiguous (by id) or bfs (blocks of a breadth-first order), each balanced to within one node;
    or file:PATH, one part id a line or a .npy of integers."""
    seed: int = 1
    """Seed of metis and random, at least 1 (METIS takes 0 for 1)."""
    objective: Literal["cut", "volume"] = "cut"
    """What metis makes small: pairs of neighbours in two parts, or message rows sent."""
    scheme: Literal["auto", "kway", "recursive"] = "auto"
    """Direct k-way or recursive bisection; auto takes bisection up to 8 parts or below 50 nodes a part."""
    tries: int = 1
    """Seeds to run metis with, from --seed upwards; the best by objective is kept."""
    imbalance: float = 0.03
    """Fraction by which the heaviest part may exceed the mean."""
    use_edge_weights: bool = False
    """Cut light edges rather than heavy ones; in a graph without weights a pair weighs as much as it has edges."""
    balance: Literal["nodes", "edges", "mixed"] = "nodes"
    """What metis spreads evenly: nodes (by their weights where the graph has them), edges by destination, or the sum
    of both shares."""
    timeout: float | None = None
    """Seconds one METIS run may take; no limit by default."""

    def __post_init__(self) -> None:
        if self.method not in _METHODS and not (self.method.startswith(_FILE) and len(self.method) > len(_FILE)):
            raise ValueError(f"--method {self.method}: expected {', '.join(_METHODS)} or file:PATH")
        for name in ("parts", "seed", "tries"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"--{name} {getattr(self, name)!r}: expected an int")
        if self.parts < 1:
            raise ValueError(f"--parts {self.parts}: expected at least 1")
        if self.tries < 1:
            raise ValueError(f"--tries {self.tries}: expected at least 1")
        if not 1 <= self.seed <= metis.MAX_SEED - self.tries + 1:
            raise ValueError(f"--seed {self.seed}: expected 1 to {metis.MAX_SEED - self.tries + 1}")
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                raise ValueError(f"--{name} {getattr(self, name)}: expected {', '.join(values)}")
        if not 0.001 <= self.imbalance <= 1:
            raise ValueError(f"--imbalance {self.imbalance}: expected a fraction from 0.001 to 1, as 0.03 for 3 %")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"--timeout {self.timeout}: expected more than 0 seconds")
        if self.objective == "volume" and self.scheme == "recursive":
            raise ValueError("--objective volume --scheme recursive: METIS lowers volume only by kway")
        if self.objective == "volume" and self.use_edge_weights:
            raise ValueError(
                "--objective volume --use-edge-weights: a row sent costs the same whatever its edges weigh"
            )
        if self.method != "metis":
            for field in dataclasses.fields(self):
                if field.name in _ONLY_METIS and getattr(self, field.name) != field.default:
                    flag = "--" + field.name.replace("_", "-")
                    raise ValueError(f"{flag} has no effect with --method {self.method}: leave it out")


@dataclass(frozen=True, kw_only=True)
class Try:
    """What one run of METIS came to, after repair."""

    seed: int
    scheme: str
    """kway or recursive."""
    objective: str
    """cut or volume."""
    cut: int
    """Undirected pairs cut, or their summed integer weight where edge weights are used."""
    rows: int
    """Rows sent in one halo exchange along the graph's own edges, all parts together."""
    max_rows: int
    """Rows the busiest part sends."""
    imbalance: float
    """Heaviest part's load over the mean, less 1."""
    beyond: bool
    """Whether that is more than was allowed, granted that one node cannot be split."""
    refilled: int
    """Parts that METIS left empty."""
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One part for each node, and how it came about."""

    part: NDArray[np.int32]
    """[N] in 0..parts-1."""
    parts: int
    method: str
    seed: int
    """Seed of the partition kept."""
    options: dict[str, Any]
    """The options asked for, as plain values."""
    versions: dict[str, str]
    """Libraries whose version the partition depends on."""
    notes: tuple[str, ...]
    """One sentence for each thing the user should know."""
    table: tuple[Try, ...] = ()
    """The runs of METIS, in order of seed."""

    def __post_init__(self) -> None:
        part = self.part
        if part.dtype != np.int32 or part.ndim != 1 or part.shape[0] < 1:
            raise ValueError(f"part is {part.dtype} {list(part.shape)}; expected int32 [N]")
        if int(part.min()) < 0 or int(part.max()) >= self.parts:
            node = int(np.flatnonzero((part < 0) | (part >= self.parts))[0])
            raise ValueError(f"node {node} is in part {int(part[node])}; parts go from 0 to {self.parts - 1}")


def assign(graph: Graph, options: AssignOptions) -> Assignment:
    """Gives each of the N nodes one part.

    Every part owns a node, except with ``file:``. Raises ``ValueError`` for what the user can mend, naming file or
    flag, value and remedy, and ``partition_tools.metis.MetisError`` (a ``RuntimeError``) where METIS fails.
    """
    n, parts, method = graph.num_nodes, options.parts, options.method
    if parts > n:
        raise ValueError(
            f"{graph.origin.get('', graph.name)}: --parts {parts} for {counted(n, 'node')}; expected at most {n}, a "
            f"node for each part"
        )
    notes: list[str] = []
    seed = options.seed
    versions: dict[str, str] = {}
    table: tuple[Try, ...] = ()
    if method.startswith(_FILE):
        part = read_parts(Path(method.removeprefix(_FILE)), num_nodes=n, parts=parts)
        empty = np.flatnonzero(np.bincount(part, minlength=parts) == 0)
        if empty.size:
            own = "owns" if empty.size == 1 else "own"
            notes.append(f"{_some('part', empty)} of {parts} {own} no node in {method.removeprefix(_FILE)}")
    elif parts == 1:
        part = np.zeros(n, dtype=np.int32)
        notes.append("one part owns every node; no partitioner was needed")
    elif method == "metis":
        part, table = _by_metis(graph, options, notes)
        seed, versions = next(run.seed for run in table if run.kept), metis.versions()
    else:
        part = _blocks(n, parts)
        if method == "random":
            np.random.default_rng(seed).shuffle(part)
            versions = {"numpy": np.__version__}
        elif method == "bfs":
            in_order, part = part, np.empty_like(part)
            part[symmetric_adjacency(graph).breadth_first_order()] = in_order
        for name, value in (("edge", graph.edge_weight), ("node", graph.node_weight)):
            if value is not None:
                notes.append(f"{name} weights play no part in --method {method}")
    return Assignment(
        part=part,
        parts=parts,
        method=method,
        seed=seed,
        options=dataclasses.asdict(options),
        versions=versions,
        notes=tuple(notes),
        table=table,
    )


def partition(graph: Graph, parts: int, method: str = "metis", **options: Any) -> Assignment:
    """`assign` with the fields of `AssignOptions` as keywords."""
    return assign(graph, AssignOptions(parts=parts, method=method, **options))


def read_parts(path: Path, *, num_nodes: int, parts: int) -> NDArray[np.int32]:
    """[N] part of each node from a file: text with one id a line, as METIS's programs write it, or ``.npy``.

    Raises ``ValueError`` naming the file, the line or row, and its value.
    """
    if not path.is_file():
        raise ValueError(f"{path}: {'is not a file' if path.exists() else 'does not exist'} (--method file:PATH)")
    try:
        ids, place, first = (*_read_npy(path), 0) if path.suffix.lower() == ".npy" else (*_read_lines(path, parts), 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if ids.shape[0] != num_nodes:
        raise ValueError(
            f"{path}: has {counted(ids.shape[0], place)} for {counted(num_nodes, 'node')}; expected one part id a node"
        )
    bad = np.flatnonzero((ids < 0) | (ids >= parts))
    if bad.size:
        hint = "; its ids count from 1" if int(ids.min()) == 1 and int(ids.max()) == parts else ""
        raise ValueError(
            f"{path}: {place} {int(bad[0]) + first} holds part {int(ids[bad[0]])}; expected 0 to {parts - 1} "
            f"(--parts {parts}){hint}"
        )
    return ids.astype(np.int32)


def _read_npy(path: Path) -> tuple[NDArray[np.integer[Any]], str]:
    try:
        ids = read_npy(str(path))
    except ValueError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path}: is no readable .npy of integers: {reason}") from error
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 1:
        raise ValueError(f"{path}: holds {ids.dtype} {list(ids.shape)}; expected integers [N]")
    return ids, "row"


def _read_lines(path: Path, parts: int) -> tuple[NDArray[np.int64], str]:
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf").rstrip()
    if not text:
        raise ValueError(f"{path}: is empty; expected one part id a line")
    odd = re.search(rb"^(?![ \t]*[0-9]{1,18}[ \t]*\r?$)[^\n]*", text, re.MULTILINE)
    if odd:
        line = text.count(b"\n", 0, odd.start()) + 1
        held = odd.group()[:40].decode(errors="replace").strip()
        raise ValueError(f"{path}: line {line} holds {held!r}; expected one part id, 0 to {parts - 1}")
    return np.fromstring(text, dtype=np.int64, sep="\n"), "line"


def _blocks(n: int, parts: int) -> NDArray[np.int32]:
    """[N] ascending parts, balanced to within one node."""
    return (np.arange(n, dtype=np.int64) * parts // n).astype(np.int32)


def _by_metis(graph: Graph, options: AssignOptions, notes: list[str]) -> tuple[NDArray[np.int32], tuple[Try, ...]]:
    parts = options.parts
    load = _load(graph, options.balance, notes)
    scheme, objective = _scheme(options, graph.num_nodes, notes)
    entry_weight = _entry_weight(graph, notes) if options.use_edge_weights else None
    if graph.edge_weight is not None and not options.use_edge_weights:
        notes.append("edge weights were not used for the partition (--use-edge-weights uses them)")
    with metis.laid_out(graph.name, symmetric_adjacency(graph, entry_weight), load) as layout:
        del entry_weight
        pair_weight = layout.adjacency.weight
        if graph.edge_weight is None and pair_weight is not None and np.unique(pair_weight).size <= 1:
            raise ValueError(
                f"{graph.name}: --use-edge-weights has no effect: the graph has no edge weights (--weights takes them, "
                "where the file has some), and every pair has as many edges; leave it out"
            )
        loops = int(np.count_nonzero(graph.src == graph.dst))
        notes.append(
            f"METIS saw {counted(layout.adjacency.num_pairs, 'undirected pair')} for "
            f"{counted(graph.num_edges, 'edge')}: direction left out, duplicates merged, "
            f"{counted(loops, 'loop')} dropped"
        )
        runs: list[Try] = []
        kept: tuple[int, NDArray[np.int32], list[str]] | None = None
        for seed in range(options.seed, options.seed + options.tries):
            part = layout.partition(
                parts=parts,
                seed=seed,
                scheme=scheme,
                objective=objective,
                imbalance=options.imbalance,
                timeout=options.timeout,
            )
            empty, moved = metis.refill_empty(part, parts, layout.adjacency, load)
            sent = rows_sent(graph.src, graph.dst, part, parts)
            heaviest, allowed = _heaviest(part, parts, load, options.imbalance)
            run = Try(
                seed=seed,
                scheme=scheme,
                objective=objective,
                cut=layout.adjacency.cut(part),
                rows=int(sent.sum()),
                max_rows=int(sent.max()),
                imbalance=heaviest - 1,
                beyond=heaviest > allowed,
                refilled=empty.size,
            )
            runs.append(run)
            if kept is None or _rank(run, options) < _rank(runs[kept[0]], options):
                kept = len(runs) - 1, part, _shortcomings(run, empty, moved, options.imbalance)
    assert kept is not None
    index, part, shortcomings = kept
    notes.extend(shortcomings)
    runs[index] = dataclasses.replace(runs[index], kept=True)
    return part, tuple(runs)


def _rank(run: Try, options: AssignOptions) -> tuple[int, ...]:
    """Smaller is better."""
    if options.objective == "volume":
        return run.beyond, run.rows, run.max_rows, run.cut
    return run.beyond, run.cut, run.rows, run.max_rows


def _scheme(options: AssignOptions, num_nodes: int, notes: list[str]) -> tuple[metis.Scheme, metis.Objective]:
    if options.scheme != "auto":
        return options.scheme, options.objective
    if num_nodes < _NODES_A_PART_FOR_KWAY * options.parts:
        if options.objective == "volume":
            notes.append(
                f"recursive bisection by cut in place of --objective volume: below {_NODES_A_PART_FOR_KWAY} nodes a "
                "part METIS leaves parts empty (--scheme kway insists)"
            )
        return "recursive", "cut"
    if options.objective == "volume" or options.parts > _RECURSIVE_UP_TO:
        return "kway", options.objective
    return "recursive", "cut"


def _load(graph: Graph, balance: str, notes: list[str]) -> NDArray[np.int64] | None:
    """[N] what a node adds to the load of its part; None where each adds 1."""
    given = graph.node_weight
    loads: list[NDArray[np.int64]] = []
    if given is not None and balance == "edges":
        notes.append("node weights were not used for the partition (--balance nodes or mixed uses them)")
    elif given is not None:
        loads.extend(_checked(graph.name, given))
        notes.append(
            "parts are balanced by the graph's node weights"
            + (f", {len(loads)} columns summed after dividing each by its mean" if len(loads) > 1 else "")
        )
    elif balance == "mixed":
        loads.append(np.ones(graph.num_nodes, dtype=np.int64))
    if balance != "nodes":
        # A node without in-edges counts as one, so that such nodes are spread, too.
        loads.append(np.maximum(np.bincount(graph.dst, minlength=graph.num_nodes), 1))
    if len(loads) <= 1:
        return loads[0] if loads else None
    combined = np.zeros(graph.num_nodes)
    for column in loads:
        combined += column / column.mean()
    return np.rint(combined * _LOAD_SCALE).astype(np.int64)


def _checked(name: str, weights: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The columns of node weights [N, c], c >= 1."""
    if weights.ndim != 2 or weights.shape[1] < 1 or not np.issubdtype(weights.dtype, np.integer):
        raise ValueError(f"{name}: node weights are {weights.dtype} {list(weights.shape)}; expected integers [N, c]")
    columns = []
    for index, column in enumerate(weights.T):
        if int(column.min()) < 0:
            node = int(np.flatnonzero(column < 0)[0])
            raise ValueError(f"{name}: node {node} has weight {int(column[node])} in column {index}; expected >= 0")
        total = column.sum(dtype=np.float64)
        if not 0 < total < metis.MAX_TOTAL_WEIGHT:
            raise ValueError(
                f"{name}: node weights in column {index} sum to {total:.0f}; expected more than 0 and less than "
                f"{metis.MAX_TOTAL_WEIGHT} (scale them down)"
            )
        columns.append(np.ascontiguousarray(column, dtype=np.int64))
    return columns


def _entry_weight(graph: Graph, notes: list[str]) -> NDArray[np.int64]:
    """[E] positive integers. Each entry is rounded by itself, so that the sum of a pair depends on no order."""
    weight = graph.edge_weight
    if weight is None:
        notes.append("the graph has no edge weights: a pair weighs as much as it has edges, both ways")
        return np.ones(graph.num_edges, dtype=np.int64)
    bad = np.flatnonzero(~(np.isfinite(weight) & (weight > 0)))
    if bad.size:
        edge = int(bad[0])
        raise ValueError(
            f"{graph.name}: edge {edge} ({int(graph.src[edge])} -> {int(graph.dst[edge])}) has weight {weight[edge]}; "
            f"--use-edge-weights takes finite weights above 0, and {bad.size} are not"
        )
    if not weight.size:
        return np.empty(0, dtype=np.int64)
    if bool((weight == np.rint(weight)).all()) and weight.sum(dtype=np.float64) < metis.MAX_TOTAL_WEIGHT / 2:
        return weight.astype(np.int64)
    # The largest becomes 2^19 to 2^20, less where so many edges would overflow a sum.
    bits = min(20, metis.MAX_TOTAL_WEIGHT.bit_length() - 2 - graph.num_edges.bit_length())
    exponent = bits - math.frexp(float(weight.max()))[1]
    scaled = np.rint(np.ldexp(weight.astype(np.float64), exponent)).astype(np.int64)
    raised = int(np.count_nonzero(scaled < 1))
    notes.append(
        f"edge weights were multiplied by 2^{exponent} and rounded to integers for METIS"
        + (f"; {raised} came out as 0 and count as 1" if raised else "")
    )
    return np.maximum(scaled, 1, out=scaled)


def _heaviest(
    part: NDArray[np.int32], parts: int, load: NDArray[np.int64] | None, imbalance: float
) -> tuple[float, float]:
    """Load of the heaviest part, and the load that is within the tolerance or cannot be avoided; over the mean."""
    total = np.bincount(part, weights=None if load is None else load.astype(np.float64), minlength=parts)
    mean = float(total.sum()) / parts
    indivisible = max(math.ceil(mean), 1 if load is None else int(load.max()))
    return float(total.max()) / mean, max(1 + imbalance, indivisible / mean)


def _shortcomings(run: Try, empty: NDArray[np.int64], moved: int, imbalance: float) -> list[str]:
    said = []
    if empty.size:
        said.append(
            f"METIS left {_some('part', empty)} empty: {counted(moved, 'node was', 'nodes were')} moved there from the "
            f"heaviest parts"
        )
    if run.beyond:
        said.append(
            f"the heaviest part has {1 + run.imbalance:.2f} times the mean load, beyond --imbalance {imbalance:g}"
        )
    return said


def _some(noun: str, ids: NDArray[np.int64], shown: int = 10) -> str:
    more = f" and {ids.size - shown} more" if ids.size > shown else ""
    return f"{noun}{'s' if ids.size > 1 else ''} {', '.join(map(str, ids[:shown].tolist()))}{more}"
