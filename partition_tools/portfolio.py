"""The best of many partitions: METIS by scheme, objective and seed, Mt-KaHyPar, packed clusters; costed and refined.

Every candidate is made in a child process, brought within the balance, and costed by the objective. The four of least
traffic are refined for a quarter of the rounds and the best of these for all of them; of those within 1 % of the least
traffic the one of least cost is kept, and refined by cost. How many rounds these are depends on the graph's size; only
a time limit that is reached makes a difference from run to run, and then that is said.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partition_tools import kahypar, metis
from partition_tools.balance import cluster_count, pack, repair
from partition_tools.loads import Loads
from partition_tools.objective import Evaluation, Objective
from partition_tools.refine import refine

SEEDS = 3
"""Seeds of each kind where no number is asked for."""
NODES_A_PART_FOR_KWAY = 50
"""Below this k-way leaves parts empty."""
_FINALISTS = 4
_CLOSE = 1.01
"""Traffic over the least up to which the cost decides."""
_VOLUME_UP_TO = 50_000_000
"""Adjacency entries times parts; METIS's volume objective takes minutes beyond."""
_ROUND_WORK = 100_000_000
"""Edges that all rounds of a refinement may go through together."""
_ROUNDS = (30, 1500)
_KAHYPAR_SECONDS = 2.5e-5
"""A pin and doubling of parts, as measured at most."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One partition of the portfolio, as made and as refined."""

    name: str
    seed: int
    cut: int
    """Undirected pairs cut."""
    halo_rows: int
    """Rows sent in one halo exchange of all nodes."""
    rows: int
    """Message rows that the layers of a training step send forward, by the fewest and after pruning."""
    max_rows: int
    """The most of these that a part sends or receives."""
    step_seconds: float
    """Predicted, of a training step."""
    traffic: float
    """What is made small: seconds of exchanges in a step and an evaluation, or rows where these are asked for."""
    cost: float
    """The same with compute."""
    imbalance: float
    """The largest, over loads and parts, of what a part carries over its share, less 1."""
    beyond: bool
    """Whether that is more than was allowed."""
    rounds: int
    """Rounds of refinement."""
    kept: bool = False


@dataclass(frozen=True, eq=False)
class _Found:
    name: str
    seed: int
    part: NDArray[np.int32]
    evaluation: Evaluation
    beyond: int
    rounds: int = 0

    @property
    def rank(self) -> tuple[int, float]:
        return self.beyond, self.evaluation.traffic


def best(
    layout: metis.Metis,
    objective: Objective,
    loads: Loads,
    *,
    seed: int,
    tries: int,
    imbalance: float,
    shares: NDArray[np.float64] | None,
    time_limit: float,
    notes: list[str],
) -> tuple[NDArray[np.int32], tuple[Candidate, ...]]:
    """The partition that costs least, and the table of all. Raises ``metis.MetisError`` where none could be made."""
    deadline = time.monotonic() + time_limit
    found: list[_Found] = []
    for name, used_seed, part in _candidates(
        layout, objective, loads, seed, tries, imbalance, shares, time_limit, notes
    ):
        metis.refill_empty(part, objective.parts, layout.adjacency, _weight(loads))
        if loads.beyond(part):
            part = repair(part, layout.adjacency, loads)
        if not any(np.array_equal(part, other.part) for other in found):
            found.append(_Found(name, used_seed, part, objective(part), len(loads.beyond(part))))
    if not found:
        raise metis.MetisError(f"{layout.name}: no partition was made within {time_limit:g} s (--time-limit)")
    edges = sum(edges.src.shape[0] for edges in objective.edges)
    rounds = int(np.clip(_ROUND_WORK // max(edges, 1), *_ROUNDS))
    late = False

    def improve(i: int, rounds: int, *, compute: bool = False) -> None:
        nonlocal late
        one = found[i]
        refined = refine(objective, loads, one.part, rounds=rounds, seed=seed + i, deadline=deadline, compute=compute)
        late |= refined.late
        found[i] = dataclasses.replace(
            one,
            part=refined.part,
            evaluation=refined.evaluation,
            beyond=len(loads.beyond(refined.part)),
            rounds=one.rounds + refined.rounds,
        )

    first = sorted(range(len(found)), key=lambda i: found[i].rank)[:_FINALISTS]
    for i in first:
        improve(i, rounds // _FINALISTS)
    improve(min(first, key=lambda i: found[i].rank), rounds)
    beyond, traffic = min(one.rank for one in found)
    close = [i for i, one in enumerate(found) if one.rank <= (beyond, traffic * _CLOSE)]
    winner = min(close, key=lambda i: found[i].evaluation.cost)
    if not objective.only_rows:
        improve(winner, rounds // _FINALISTS, compute=True)
    if late:
        notes.append(
            f"refinement ended at --time-limit {time_limit:g}, so another run may give another partition; a higher "
            f"limit lets it end by itself"
        )
    table = tuple(_row(one, layout, objective, loads, kept=i == winner) for i, one in enumerate(found))
    return found[winner].part, table


def _candidates(
    layout: metis.Metis,
    objective: Objective,
    loads: Loads,
    seed: int,
    tries: int,
    imbalance: float,
    shares: NDArray[np.float64] | None,
    time_limit: float,
    notes: list[str],
) -> Iterator[tuple[str, int, NDArray[np.int32]]]:
    """(name, seed, part); what fails or is left out is noted."""
    n, parts = layout.adjacency.num_nodes, objective.parts
    kinds: list[tuple[metis.Scheme, metis.Objective]] = [("recursive", "cut")]
    if n >= NODES_A_PART_FOR_KWAY * parts:
        kinds.append(("kway", "cut"))
        if layout.adjacency.adjncy.shape[0] * parts <= _VOLUME_UP_TO:
            kinds.append(("kway", "volume"))
    deadline = time.monotonic() + time_limit
    first_error: Exception | None = None
    made = skipped = 0
    for s in range(seed, seed + (tries if tries > 1 else SEEDS)):
        for scheme, what in kinds:
            left = deadline - time.monotonic()
            if left <= 0 or (s > seed and left < time_limit / 2):
                skipped += 1
                continue
            try:
                part = layout.partition(
                    parts=parts, seed=s, scheme=scheme, objective=what, imbalance=imbalance, timeout=left, shares=shares
                )
            except metis.MetisError as error:
                first_error = first_error or error
                notes.append(f"METIS {scheme} by {what}, seed {s}, was left out: {error}")
                continue
            made += 1
            yield f"metis {scheme} {what}", s, part
        if len(loads.names) > 1 and parts > 1 and (left := deadline - time.monotonic()) > 0:
            yield "packed clusters", s, packed(layout, loads, seed=s, timeout=left)
    if skipped:
        notes.append(f"{skipped} runs of METIS were left out: half of --time-limit {time_limit:g} had passed")
    yield from _by_kahypar(layout, objective, loads, seed, imbalance, shares, deadline, notes)
    if not made and first_error is not None:
        raise first_error


def packed(layout: metis.Metis, loads: Loads, *, seed: int, timeout: float | None) -> NDArray[np.int32]:
    """[N] many METIS clusters packed into parts under every load."""
    n = layout.adjacency.num_nodes
    clusters = cluster_count(n, loads.parts)
    return pack(make_clusters(layout, clusters, seed=seed, timeout=timeout), layout.adjacency, loads)


def make_clusters(layout: metis.Metis, clusters: int, *, seed: int, timeout: float | None) -> NDArray[np.int32]:
    """[N] METIS parts of which there may be many; none is empty."""
    n = layout.adjacency.num_nodes
    if clusters == 1:
        return np.zeros(n, np.int32)
    scheme: metis.Scheme = "kway" if n >= NODES_A_PART_FOR_KWAY * clusters else "recursive"
    part = layout.partition(parts=clusters, seed=seed, scheme=scheme, objective="cut", imbalance=0.1, timeout=timeout)
    metis.refill_empty(part, clusters, layout.adjacency, None)
    return part


def _by_kahypar(
    layout: metis.Metis,
    objective: Objective,
    loads: Loads,
    seed: int,
    imbalance: float,
    shares: NDArray[np.float64] | None,
    deadline: float,
    notes: list[str],
) -> Iterator[tuple[str, int, NDArray[np.int32]]]:
    if not kahypar.installed() or not objective.edges or shares is not None or objective.parts < 2:
        return
    edges, n = objective.edges[0], objective.num_nodes
    pins = edges.src.shape[0] + n
    left = deadline - time.monotonic()
    expected = _KAHYPAR_SECONDS * pins * np.log2(objective.parts)
    if pins > kahypar.MAX_PINS or expected > left / 2:
        notes.append(f"Mt-KaHyPar was left out: {pins} pins may take {expected:.0f} s (--time-limit allows it longer)")
        return
    try:
        part = kahypar.partition(
            layout.name,
            edges.src,
            edges.dst,
            n,
            objective.parts,
            seed=seed,
            imbalance=imbalance,
            timeout=left,
            weight=_weight(loads),
        )
    except metis.MetisError as error:
        notes.append(f"Mt-KaHyPar was left out: {error}")
        return
    yield "mtkahypar km1", seed, part


def _weight(loads: Loads) -> NDArray[np.int64] | None:
    """The load that a partitioner with room for one is given; None where each node counts 1."""
    return None if "nodes" in loads.names else loads.load[0]


def _row(one: _Found, layout: metis.Metis, objective: Objective, loads: Loads, *, kept: bool) -> Candidate:
    return Candidate(
        name=one.name,
        seed=one.seed,
        cut=layout.adjacency.cut(one.part),
        halo_rows=objective.halo_rows(one.part),
        rows=one.evaluation.total_rows,
        max_rows=one.evaluation.max_rows,
        step_seconds=one.evaluation.step.seconds,
        traffic=one.evaluation.traffic,
        cost=one.evaluation.cost,
        imbalance=max(loads.imbalance(one.part).values()),
        beyond=one.beyond > 0,
        rounds=one.rounds,
        kept=kept,
    )
