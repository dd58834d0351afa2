"""Epochs over a slow network: halo rows, fewest rows, and fewest rows with pruning and layer 0 aggregated once.

Each rank is in a network namespace of its own, joined by veth pairs and a bridge whose links ``tc tbf`` slows in both
directions. ``predicted`` is the step's computation, measured with the links as fast as they are (seconds outside
collectives, the slowest rank's), plus the bytes that the plans say over the link's rate (the most that a rank sends or
receives, and its share of the gradient sum). ``travel`` is the time that message rows were on their way, ``waited``
the part of it that no computation hid.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import tyro

from benchmarks import graphs
from benchmarks.network import LINK, Network, address, network, why_not
from benchmarks.report import deliver, machine, machine_line, say, table
from benchmarks.systems import MODEL, SAME_WORK, System, ours

PLANS: Mapping[str, Mapping[str, Any]] = {
    "halo": {"plan": "halo", **SAME_WORK},
    "cover": {"plan": "cover", **SAME_WORK},
    "cover, pruned, layer 0 once": {},
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Epoch seconds over slow links, predicted and measured."""

    graph: str = "arxiv-like/3"
    """Name, NAME/10 for a tenth of the nodes, file or demo: spec."""
    model: Literal["sage", "gcn", "gat"] = "sage"
    ranks: tuple[int, ...] = (2, 4)
    megabits: tuple[float, ...] = (1000, 100)
    """Rates of the links."""
    epochs: int = 3
    """Epochs at each rate; the median is shown."""
    work: Path | None = None
    """Folder where shards are kept between runs."""
    note: str = ""
    """A sentence for the result: what bounds what is left."""
    name: str = "network"
    """Of the saved result."""
    quick: bool = False
    """A tiny graph, one epoch: to see that it works."""
    json: bool = False
    """Print one JSON object."""
    save: bool = False
    """Keep the result under benchmarks/results."""


def most_bytes(told: list[dict[str, Any]]) -> float:
    """Bytes of a step through the busiest link and direction: message rows, and the ring sum of the gradients."""
    ranks = len(told)
    sent = [sum(rank["sent_bytes"]) for rank in told]
    received = [sum(rank["sent_bytes"][to] for rank in told) for to in range(ranks)]
    return max(*sent, *received) + 2 * (ranks - 1) / ranks * told[0]["parameter_bytes"]


def figures(epochs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the epochs, of the slowest rank."""

    def slowest(key: str) -> float:
        return median(max(rank[key] for rank in epoch["ranks"]) for epoch in epochs)

    compute = median(max(rank["seconds"] - rank["comm_seconds"] for rank in epoch["ranks"]) for epoch in epochs)
    return {
        "seconds": median(epoch["seconds"] for epoch in epochs),
        "compute_seconds": compute,
        "travel_seconds": slowest("travel"),
        "waited_seconds": slowest("waited"),
        "comm_seconds": slowest("comm_seconds"),
    }


def measure(system: System, hosts: Network, options: Options) -> list[dict[str, Any]]:
    """One plan at all rates."""
    epochs = 1 if options.quick else options.epochs
    system.ready()
    hosts.shape(None)
    system.run(1)
    unshaped = figures(system.run(epochs))
    told = system.ask_facts()
    most = most_bytes(told)
    found = [system.facts | unshaped | {"megabits": None, "bytes": most, "predicted_seconds": None}]
    for megabits in options.megabits:
        hosts.shape(megabits)
        system.run(1)  # the bucket is empty when it counts
        predicted = unshaped["compute_seconds"] + most * 8 / (megabits * 1e6)
        shaped = figures(system.run(epochs))
        found.append(system.facts | shaped | {"megabits": megabits, "bytes": most, "predicted_seconds": predicted})
    hosts.shape(None)
    return found


def row(f: dict[str, Any]) -> tuple[object, ...]:
    predicted = f["predicted_seconds"]
    return (
        f"{f['ranks']} ranks, {f['system']}",
        "unshaped" if f["megabits"] is None else f"{f['megabits']:g}",
        f"{f['bytes'] / 1e6:.2f}",
        "" if predicted is None else f"{predicted:.3f}",
        f"{f['seconds']:.3f}",
        "" if predicted is None else f"{f['seconds'] / predicted:.2f}",
        f"{f['compute_seconds']:.3f}",
        f"{f['travel_seconds']:.3f}",
        f"{f['waited_seconds']:.3f}",
    )


HEADER = (
    "ranks, message rows",
    "Mbit/s",
    "MB busiest link",
    "predicted s",
    "measured s",
    "over predicted",
    "compute s",
    "travel s",
    "waited s",
)


def main(options: Options) -> int:
    if reason := why_not():
        say(f"skipped: network namespaces cannot be made here: {reason}")
        return 0
    facts, found = machine(), []
    graph = graphs.TINY if options.quick else options.graph
    with graphs.work_folder(options.work) as work:
        for ranks in options.ranks:
            folder = graphs.shards(graph, ranks, work)
            threads = max(1, len(os.sched_getaffinity(0)) // ranks)
            with network(ranks) as hosts:
                for name, plan in PLANS.items():
                    system = ours(
                        name,
                        folder,
                        {"model": options.model, **MODEL, **plan},
                        ranks=ranks,
                        threads=threads,
                        hosts=ranks,
                        host=address(0),
                        within=hosts.within,
                        env={"GLOO_SOCKET_IFNAME": LINK},
                        graph=graph,
                        model=options.model,
                    )
                    with system:
                        found += measure(system, hosts, options)
                    say(f"{ranks} ranks, {name}: " + ", ".join(f"{f['seconds']:.3f}" for f in found[-3:]) + " s")
    shown = table(HEADER, [row(f) for f in found])
    text = f"# Epochs over a slow network\n\n{machine_line(facts)} {graph}, {options.model}.\n\n{shown}"
    text += f"\n\n{options.note}" if options.note else ""
    record = {"machine": facts, "model": MODEL, "note": options.note, "results": found}
    deliver(options.name, text, record, as_json=options.json, save=options.save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options)))
