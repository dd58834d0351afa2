"""Which part owns which node: METIS, simple orders to compare it with, or a file of the user's own.

Whatever the method, a node has one part, parts are numbered 0..P-1, and what was chosen, repaired or left aside on
the way is said in the assignment's notes. Nothing here depends on the order of the graph's edges.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from fullgraph.records import check_names
from fullgraph.wording import counted
from partition_tools import kahypar, metis, streaming
from partition_tools.adjacency import graph_rows_between, rows_sent, symmetric_adjacency
from partition_tools.balance import loads_of, pack, repair
from partition_tools.graph import Graph
from partition_tools.loads import Loads
from partition_tools.objective import Objective, model_shape
from partition_tools.options import AssignOptions
from partition_tools.order import numbering
from partition_tools.portfolio import NODES_A_PART_FOR_KWAY, Candidate, best, make_clusters, packed
from partition_tools.refine import refine
from partition_tools.sources.archive import read_npy

__all__ = ["AssignOptions", "Assignment", "Candidate", "Try", "assign", "partition", "read_parts"]

_FILE = "file:"
_RECURSIVE_UP_TO = 8
"""Parts for recursive bisection, whose cuts are as good there and whose parts are of nearly equal size."""
_BALANCING_ROUNDS = 200
"""Of refinement where several loads had to be met."""


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
    cluster: NDArray[np.int32] | None = None
    """[N] number of the neighbourhood that a node lies in, whatever its part; None where nodes stay in order of id."""
    table: tuple[Try, ...] | tuple[Candidate, ...] = ()
    """The runs of METIS in order of seed, or the candidates of best."""

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
    table: tuple[Try, ...] | tuple[Candidate, ...] = ()
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
        part, runs = _by_metis(graph, options, notes)
        table, seed, versions = runs, next(run.seed for run in runs if run.kept), metis.versions()
    elif method == "best":
        part, table = _best(graph, options, notes)
        versions = metis.versions() | (kahypar.versions() if kahypar.installed() else {})
        versions |= {"numpy": np.__version__, "scipy": scipy.__version__}
    elif method == "fennel":
        part, versions = _by_fennel(graph, options, notes), streaming.versions()
    elif options.clusters:
        part, versions = _by_clusters(graph, options, notes), metis.versions() | {"numpy": np.__version__}
    else:
        part = _blocks(n, options.shares)
        if method == "random":
            np.random.default_rng(seed).shuffle(part)
            versions = {"numpy": np.__version__}
        elif method == "bfs":
            in_order, part = part, np.empty_like(part)
            part[symmetric_adjacency(graph).breadth_first_order()] = in_order
    if not options.weighs:
        for name, value in (("edge", graph.edge_weight), ("node", graph.node_weight)):
            if value is not None and parts > 1 and not method.startswith(_FILE):
                notes.append(f"{name} weights play no part in --method {method}")
    if parts > 2 and options.renumbers:
        part = numbering(graph_rows_between(graph, part, parts))[part].astype(np.int32)
    cluster = _clusters(graph, options, notes)
    if cluster is not None:
        versions = versions | metis.versions()
    return Assignment(
        part=part,
        cluster=cluster,
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
    check_names("partition", options, AssignOptions)
    if not isinstance(graph, Graph):
        raise TypeError(f"partition: graph is {graph!r}; expected a Graph, as load gives it")
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


def _blocks(n: int, shares: NDArray[np.float64]) -> NDArray[np.int32]:
    """[N] ascending parts with their shares [P] of the nodes, to within one node; none is empty."""
    parts = shares.shape[0]
    bounds = np.floor(np.cumsum(shares) * n + 1e-9).astype(np.int64)
    bounds = np.maximum(bounds, np.arange(1, parts + 1))
    bounds = np.minimum(bounds, n - np.arange(parts - 1, -1, -1))
    return np.searchsorted(bounds, np.arange(n), side="right").astype(np.int32)


def _objective(graph: Graph, options: AssignOptions, *, only_rows: bool) -> Objective:
    shape = model_shape(graph, model=options.model, layers=options.layers, hidden=options.hidden)
    return Objective.make(
        graph, options.parts, shape, options.machine, tolerance=options.imbalance, only_rows=only_rows
    )


def _loads(graph: Graph, options: AssignOptions, notes: list[str]) -> Loads:
    cost = functools.partial(_objective, graph, options, only_rows=False)
    loads = loads_of(graph, options.balance, lambda: cost().compute_load(), notes)
    return Loads.make(loads, options.parts, tolerance=options.imbalance, shares=options.shares)


def _weight(loads: Loads) -> NDArray[np.int64] | None:
    """The load that METIS is given, which takes one; None where each node counts 1."""
    return None if "nodes" in loads.names else loads.load[0]


def _best(graph: Graph, options: AssignOptions, notes: list[str]) -> tuple[NDArray[np.int32], tuple[Candidate, ...]]:
    loads = _loads(graph, options, notes)
    objective = _objective(graph, options, only_rows=options.objective == "rows")
    with metis.laid_out(graph.name, symmetric_adjacency(graph), _weight(loads)) as layout:
        part, table = best(
            layout,
            objective,
            loads,
            seed=options.seed,
            tries=options.tries,
            imbalance=options.imbalance,
            shares=options.shares if options.capacities else None,
            time_limit=options.time_limit,
            notes=notes,
        )
    notes.extend(_balance_notes(loads, part, options.imbalance))
    return part, table


def _by_fennel(graph: Graph, options: AssignOptions, notes: list[str]) -> NDArray[np.int32]:
    nodes = {"nodes": np.ones(graph.num_nodes, np.int64)}
    loads = Loads.make(nodes, options.parts, tolerance=options.imbalance, shares=options.shares)
    part = streaming.fennel(graph, loads.allowed[0], passes=options.passes, seed=options.seed)
    empty = np.flatnonzero(np.bincount(part, minlength=options.parts) == 0)
    if empty.size:  # a node each, from the largest parts
        order = np.argsort(-np.bincount(part, minlength=options.parts)[part], kind="stable")
        part[order[: empty.size]] = empty
        notes.append(f"fennel left {_some('part', empty)} empty, which were given a node each")
    return part


def _clusters(graph: Graph, options: AssignOptions, notes: list[str]) -> NDArray[np.int32] | None:
    count = options.neighborhoods(graph.num_nodes)
    if not count:
        return None
    try:
        with metis.laid_out(graph.name, symmetric_adjacency(graph), None) as layout:
            cluster = make_clusters(layout, count, seed=options.seed, timeout=options.timeout)
    except metis.MetisError as error:
        notes.append(f"nodes stay in order of id: {error}")
        return None
    notes.append(f"the nodes of a part are kept in {count} clusters of neighbours, which lie close in memory")
    return cluster


def _by_clusters(graph: Graph, options: AssignOptions, notes: list[str]) -> NDArray[np.int32]:
    clusters, parts = options.clusters, options.parts
    if not parts <= clusters <= graph.num_nodes:
        raise ValueError(
            f"{graph.name}: --method {options.method}: expected {parts} clusters, one for each part, to "
            f"{graph.num_nodes}, the number of nodes"
        )
    loads = _loads(graph, options, notes)
    with metis.laid_out(graph.name, symmetric_adjacency(graph), None) as layout:
        cluster = make_clusters(layout, clusters, seed=options.seed, timeout=options.timeout)
        if options.packed:
            part = pack(cluster, layout.adjacency, loads)
            metis.refill_empty(part, parts, layout.adjacency, None)
        else:
            of_cluster = _blocks(clusters, options.shares)
            np.random.default_rng(options.seed).shuffle(of_cluster)
            part = of_cluster[cluster]
    notes.extend(_balance_notes(loads, part, options.imbalance))
    return part


def _by_metis(graph: Graph, options: AssignOptions, notes: list[str]) -> tuple[NDArray[np.int32], tuple[Try, ...]]:
    parts = options.parts
    loads = _loads(graph, options, notes)
    load, several = _weight(loads), len(loads.names) > 1
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

        def add(part: NDArray[np.int32], seed: int, made_by: str) -> None:
            nonlocal kept
            empty, moved = metis.refill_empty(part, parts, layout.adjacency, load)
            if rows_alone is not None:
                part = repair(part, layout.adjacency, loads)
                part = refine(rows_alone, loads, part, rounds=_BALANCING_ROUNDS, seed=seed).part
            sent = rows_sent(graph.src, graph.dst, part, parts)
            run = Try(
                seed=seed,
                scheme=made_by,
                objective=objective,
                cut=layout.adjacency.cut(part),
                rows=int(sent.sum()),
                max_rows=int(sent.max()),
                imbalance=max(loads.imbalance(part).values()),
                beyond=bool(loads.beyond(part)),
                refilled=empty.size,
            )
            runs.append(run)
            if kept is None or _rank(run, options) < _rank(runs[kept[0]], options):
                said = []
                if empty.size:
                    said.append(
                        f"METIS left {_some('part', empty)} empty: "
                        f"{counted(moved, 'node was', 'nodes were')} moved there from the heaviest parts"
                    )
                kept = len(runs) - 1, part, said + _balance_notes(loads, part, options.imbalance)

        rows_alone = _objective(graph, options, only_rows=True) if several else None
        for seed in range(options.seed, options.seed + options.tries):
            add(
                layout.partition(
                    parts=parts,
                    seed=seed,
                    scheme=scheme,
                    objective=objective,
                    imbalance=options.imbalance,
                    timeout=options.timeout,
                    shares=options.shares if options.capacities else None,
                ),
                seed,
                scheme,
            )
            if several:
                add(packed(layout, loads, seed=seed, timeout=options.timeout), seed, "packed clusters")
    assert kept is not None
    index, part, said = kept
    notes.extend(said)
    runs[index] = dataclasses.replace(runs[index], kept=True)
    return part, tuple(runs)


def _rank(run: Try, options: AssignOptions) -> tuple[int, ...]:
    """Smaller is better."""
    if options.objective == "volume":
        return run.beyond, run.rows, run.max_rows, run.cut
    return run.beyond, run.cut, run.rows, run.max_rows


def _scheme(options: AssignOptions, num_nodes: int, notes: list[str]) -> tuple[metis.Scheme, metis.Objective]:
    objective: metis.Objective = "volume" if options.objective == "volume" else "cut"
    if options.scheme != "auto":
        return options.scheme, objective
    if num_nodes < NODES_A_PART_FOR_KWAY * options.parts:
        if objective == "volume":
            notes.append(
                f"recursive bisection by cut in place of --objective volume: below {NODES_A_PART_FOR_KWAY} nodes a "
                "part METIS leaves parts empty (--scheme kway insists)"
            )
        return "recursive", "cut"
    if objective == "volume" or options.parts > _RECURSIVE_UP_TO:
        return "kway", objective
    return "recursive", "cut"


def _balance_notes(loads: Loads, part: NDArray[np.int32], imbalance: float) -> list[str]:
    """What was met where several loads were asked for, and by how much one was not."""
    beyond = loads.beyond(part)
    said = [
        f"the heaviest part has {1 + value:.2f} times the mean load, beyond --imbalance {imbalance:g}"
        + (f" (by {name})" if name != "nodes" else "")
        for name, value in beyond.items()
    ]
    if len(loads.names) > 1 and not beyond:
        found = ", ".join(f"{name} {1 + value:.3f}" for name, value in loads.imbalance(part).items())
        said.append(f"balanced by all of {', '.join(loads.names)}: heaviest part over its share {found}")
    return said


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


def _some(noun: str, ids: NDArray[np.int64], shown: int = 10) -> str:
    more = f" and {ids.size - shown} more" if ids.size > shown else ""
    return f"{noun}{'s' if ids.size > 1 else ''} {', '.join(map(str, ids[:shown].tolist()))}{more}"
