"""How nodes are to be given to parts: the options, checked before any work is done."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fullgraph.cost import Machine
from fullgraph.records import check_types
from partition_tools import metis
from partition_tools.loads import even_shares

_FILE, _SUPERNODE, _PACKED = "file:", "supernode:", ":packed"
_METHODS = ("metis", "best", "fennel", "random", "contiguous", "bfs")
_EXPECTED = f"{', '.join(_METHODS)}, supernode:C, supernode:C:packed or file:PATH"
_CHOICES = {
    "objective": ("auto", "cut", "volume", "time", "rows"),
    "scheme": ("auto", "kway", "recursive"),
    "model": ("gcn", "sage", "gin", "gat"),
}
_BALANCES = ("nodes", "edges", "train", "cost")
_STATED = ("model", "layers", "hidden", "bandwidth", "latency", "flops", "gather")
_USED_BY: dict[str, tuple[str, ...]] = {
    "objective": ("metis", "best"),
    "scheme": ("metis",),
    "tries": ("metis", "best"),
    "imbalance": ("metis", "best", "fennel", "supernode"),
    "use_edge_weights": ("metis",),
    "balance": ("metis", "best", "supernode"),
    "timeout": ("metis", "supernode"),
    "time_limit": ("best",),
    "passes": ("fennel",),
    "locality": ("metis", "best", "supernode"),
    "capacities": ("metis", "best", "fennel", "supernode", "random", "contiguous", "bfs"),
}
_OBJECTIVES = {"metis": ("auto", "cut", "volume"), "best": ("auto", "time", "rows")}


_NEIGHBORHOOD = 1024
"""Nodes of a cluster of neighbours: sparse products ran faster than with 4,096 (``benchmarks.bench_kernels``)."""
_CACHED = 16 * 1024
"""Nodes whose rows a cache holds in any order."""


@dataclass(frozen=True, kw_only=True)
class AssignOptions:
    """How nodes are given to parts. Construction raises ``ValueError`` naming the flag and the value."""

    parts: int
    """Number of parts, one for each process that may train."""
    method: str = "metis"
    """metis; best: a portfolio of METIS runs (and Mt-KaHyPar where installed), costed and refined; fennel: streaming
    with little memory; supernode:C: METIS into C clusters, dealt to parts at random, or supernode:C:packed; random,
    contiguous (by id) or bfs (blocks of a breadth-first order), each balanced to within one node; or file:PATH, one
    part id a line or a .npy of integers."""
    seed: int = 1
    """Seed of every method that draws, at least 1 (METIS takes 0 for 1)."""
    objective: Literal["auto", "cut", "volume", "time", "rows"] = "auto"
    """What is made small. metis: pairs of neighbours in two parts (cut, the default), or message rows sent (volume).
    best: the predicted time of a training step and an evaluation of the stated model (time, the default), or the rows
    that an exchange of all nodes sends (rows)."""
    scheme: Literal["auto", "kway", "recursive"] = "auto"
    """Direct k-way or recursive bisection; auto takes bisection up to 8 parts or below 50 nodes a part."""
    tries: int = 1
    """Seeds to run metis with, from --seed upwards; the best by objective is kept. best takes three unless more are
    asked for."""
    imbalance: float = 0.03
    """Fraction by which the heaviest part may exceed the mean."""
    use_edge_weights: bool = False
    """Cut light edges rather than heavy ones; in a graph without weights a pair weighs as much as it has edges."""
    balance: tuple[Literal["nodes", "edges", "train", "cost"], ...] = ("nodes",)
    """What is spread evenly, one or several: nodes (by their weights where the graph has them), edges by destination,
    training nodes of the first split, or the compute that a node costs in a step of the stated model."""
    capacities: tuple[float, ...] = ()
    """For unequal machines: the share of each part, in any unit, one for each part."""
    timeout: float | None = None
    """Seconds one METIS run may take; no limit by default."""
    time_limit: float = 120.0
    """Seconds after which best stops making and refining partitions and takes what it has."""
    locality: bool = True
    """Keep neighbours together within a part, where METIS is run anyway and the graph is too large for a cache: one
    more run of it, which makes the sparse products of training faster."""
    passes: int = 5
    """Times that fennel goes through the nodes."""
    model: Literal["gcn", "sage", "gin", "gat"] = "sage"
    """The stated model, for best and --balance cost."""
    layers: int = 2
    """Its layers."""
    hidden: int = 128
    """Width of its hidden layers."""
    bandwidth: float = Machine.bandwidth
    """The stated machine: bytes a second that a rank sends."""
    latency: float = Machine.latency
    """Seconds that an exchange takes at least."""
    flops: float = Machine.flops
    """Floating-point operations a second of a rank's matrix products."""
    gather: float = Machine.gather
    """Bytes a second of rows that its sparse kernel reads."""

    def __post_init__(self) -> None:
        one = (self.balance,) if isinstance(self.balance, str) else tuple(self.balance)
        object.__setattr__(self, "balance", one)  # as JSON or a single word has it
        object.__setattr__(self, "capacities", tuple(self.capacities))
        check_types(self)
        if self.method not in _METHODS and not self._names_a_file:
            _check_supernode(self.method)
        for name in ("parts", "seed", "tries", "passes", "layers", "hidden"):
            value = getattr(self, name)
            if value < 1 and name != "seed":
                raise ValueError(f"--{name} {value}: expected at least 1")
        if not 1 <= self.seed <= metis.MAX_SEED - self.tries + 1:
            raise ValueError(f"--seed {self.seed}: expected 1 to {metis.MAX_SEED - self.tries + 1}")
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                raise ValueError(f"--{name} {getattr(self, name)}: expected {', '.join(values)}")
        self._check_balance()
        if not 0.001 <= self.imbalance <= 1:
            raise ValueError(f"--imbalance {self.imbalance}: expected a fraction from 0.001 to 1, as 0.03 for 3 %")
        for name in ("timeout", "time_limit", "bandwidth", "flops", "gather"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected more than 0")
        if not 0 <= self.latency < float("inf"):
            raise ValueError(f"--latency {self.latency}: expected seconds, 0 or more")
        self._check_used()
        if self.objective == "volume" and self.scheme == "recursive":
            raise ValueError("--objective volume --scheme recursive: METIS lowers volume only by kway")
        if self.objective == "volume" and self.use_edge_weights:
            raise ValueError(
                "--objective volume --use-edge-weights: a row sent costs the same whatever its edges weigh"
            )

    def _check_balance(self) -> None:
        for name in self.balance:
            if name not in _BALANCES:
                raise ValueError(f"--balance {name}: expected one or several of {', '.join(_BALANCES)}")
        if not self.balance or len(set(self.balance)) < len(self.balance):
            raise ValueError(f"--balance {' '.join(self.balance)}: expected one or several, each once")
        if self.capacities:
            if len(self.capacities) != self.parts:
                raise ValueError(
                    f"--capacities has {len(self.capacities)} numbers for --parts {self.parts}; expected one a part"
                )
            for value in self.capacities:
                if not 0 < value < float("inf"):
                    raise ValueError(f"--capacities {value}: expected numbers above 0")

    def _check_used(self) -> None:
        kind = self._kind
        used = dict(_USED_BY)
        stated = ("best", "metis", "supernode") if "cost" in self.balance else ("best",)
        used |= dict.fromkeys(_STATED, stated)
        for field in dataclasses.fields(self):
            if field.name in used and kind not in used[field.name] and getattr(self, field.name) != field.default:
                flag = ("--no-" if field.default is True else "--") + field.name.replace("_", "-")
                also = " and without --balance cost" if field.name in _STATED and kind in ("metis", "supernode") else ""
                raise ValueError(f"{flag} has no effect with --method {self.method}{also}: leave it out")
        if kind in _OBJECTIVES and self.objective not in _OBJECTIVES[kind]:
            expected = ", ".join(_OBJECTIVES[kind])
            raise ValueError(f"--objective {self.objective} with --method {self.method}: expected {expected}")

    @property
    def _names_a_file(self) -> bool:
        return self.method.startswith(_FILE) and len(self.method) > len(_FILE)

    @property
    def _kind(self) -> str:
        return self.method.partition(":")[0]

    @property
    def clusters(self) -> int:
        """Clusters of supernode:C; 0 for other methods."""
        if self._kind != "supernode":
            return 0
        return int(self.method.removeprefix(_SUPERNODE).removesuffix(_PACKED))

    def neighborhoods(self, num_nodes: int) -> int:
        """How many clusters of neighbours a graph of so many nodes is kept in; 0 for none."""
        runs = self._kind in ("metis", "best", "supernode")
        return num_nodes // _NEIGHBORHOOD if self.locality and runs and num_nodes > _CACHED else 0

    @property
    def packed(self) -> bool:
        """Whether clusters are packed, not dealt at random."""
        return self.clusters > 0 and self.method.endswith(_PACKED)

    @property
    def weighs(self) -> bool:
        """Whether node and edge weights can play a part, of which the method then speaks itself."""
        return self._kind == "metis"

    @property
    def renumbers(self) -> bool:
        """Whether parts have no numbers of their own, so that they may be numbered anew."""
        return self._kind in ("metis", "best", "fennel", "supernode") and not self.capacities

    @property
    def shares(self) -> NDArray[np.float64]:
        """[P] what each part is to carry of the whole."""
        return even_shares(self.parts, self.capacities)

    @property
    def machine(self) -> Machine:
        return Machine(flops=self.flops, gather=self.gather, bandwidth=self.bandwidth, latency=self.latency)


def _check_supernode(method: str) -> None:
    given = method.removeprefix(_SUPERNODE).removesuffix(_PACKED)
    if not method.startswith(_SUPERNODE):
        raise ValueError(f"--method {method}: expected {_EXPECTED}")
    if not (given.isascii() and given.isdigit() and 0 < len(given) < 10 and int(given) > 0):
        raise ValueError(f"--method {method}: expected supernode:C with a number of clusters, as supernode:64")
