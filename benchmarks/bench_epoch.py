"""Seconds of a training step: ours against PyG and DGL full batch, and against the bound of the least work known.

Systems are processes that take turns in one run, warm. ``ours`` is the default, ``ours, same work`` computes every node
in every layer and aggregates layer 0 in each step, as the others do. Peak memory counts from when the graph is loaded.
The bound of a rank: flops over the rate of matrix products, bytes that sparse products gather over the sparse kernel's
rate on this graph, and bytes sent over the exchange's rate, each rate measured in the same process; the slowest rank's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks import graphs
from benchmarks.report import deliver, machine, machine_line, say, table
from benchmarks.systems import MODEL, SAME_WORK, System, allocators, ours, peer, started, take_turns

DEFAULT = "ours"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Seconds of a training step, beside those of PyG and DGL and the bound."""

    graphs: tuple[str, ...] = ("arxiv-like", "reddit-like")
    """Names, NAME/10 for a tenth of the nodes, files or demo: specs."""
    models: tuple[Literal["sage", "gcn", "gat"], ...] = ("sage", "gcn", "gat")
    epochs: int = 1
    """Epochs that a system takes when it is its turn."""
    rounds: int = 5
    """Turns of each system."""
    warm: int = 1
    """Epochs before, not counted."""
    without: tuple[str, ...] = ()
    """Systems to leave out (pyg-edge_index, pyg-csr)."""
    dgl_python: str | None = None
    """An interpreter that has DGL; without one DGL is left out."""
    work: Path | None = None
    """Folder where shards are kept between runs."""
    note: str = ""
    """A sentence for the result: what bounds what is left."""
    name: str = "epoch"
    """Of the saved result."""
    quick: bool = False
    """One tiny graph, one epoch: to see that it works."""
    json: bool = False
    """Print JSON, an object a line for each system."""
    save: bool = False
    """Keep the result under benchmarks/results."""


def systems_of(options: Options, graph: str, model: str, allocator: str, work: Path) -> list[Callable[[], System]]:
    cores = len(os.sched_getaffinity(0))
    config = {"model": model, **MODEL}
    same = {"model": model, "graph": graph, "allocator": allocator}
    found: list[Callable[[], System]] = []
    for ranks in (1, 2):
        folder = graphs.shards(graph, ranks, work)
        split = {"ranks": ranks, "threads": max(1, min(2, cores) // ranks), **same}
        found.append(functools.partial(ours, DEFAULT, folder, config, **split))
        found.append(functools.partial(ours, "ours, same work", folder, config | SAME_WORK, **split))
    arrays = graphs.arrays(graph, work)
    others = ["pyg-edge_index", *(["pyg-csr"] if model != "gat" else [])]
    rest = {"threads": min(2, cores), "allocator": allocator, "graph": graph}
    found += [functools.partial(peer, name, arrays, model, **rest) for name in others if name not in options.without]
    if options.dgl_python:
        found.append(functools.partial(peer, "dgl", arrays, model, python=options.dgl_python, **rest))
    return found


def bound(told: list[dict[str, Any]]) -> float | None:
    """Seconds below which these ranks cannot stay by what they measured."""
    if "flops_rate" not in told[0]:
        return None
    return max(
        rank["flops"] / rank["flops_rate"]
        + rank["gathered_bytes"] / rank["gather_rate"]
        + (sum(rank["sent_bytes"]) / rank["exchange_rate"] if len(told) > 1 else 0.0)
        for rank in told
    )


def measure(options: Options, graph: str, model: str, allocator: str, work: Path) -> list[dict[str, Any]]:
    with started(systems_of(options, graph, model, allocator, work)) as systems:
        take_turns(systems, warm=options.warm, rounds=options.rounds, epochs=options.epochs)
        found = [system.summary() for system in systems]
    ours_default = next(f for f in found if f["system"] == DEFAULT and f["ranks"] == 1)
    for f in found:
        f["ratio"] = f["seconds"] / ours_default["seconds"]
        f["bound_seconds"] = bound(f["ranks_told"])
        say(f"{graph} {model} {f['system']} {f['ranks']}x{f['threads']}: {f['seconds']:.3f} s, {f['ratio']:.2f}")
    return found


def row(f: dict[str, Any]) -> tuple[object, ...]:
    least = f["bound_seconds"]
    return (
        f"{f['graph']}, {f['model']}, {f['system']}",
        f"{f['ranks']} x {f['threads']}",
        f["allocator"],
        f"{f['seconds']:.3f}",
        f"{f['least_seconds']:.3f} to {f['most_seconds']:.3f}",
        f"{f['ratio']:.2f}",
        f"{f['user_seconds']:.2f}",
        f"{f['system_seconds']:.2f}",
        f"{f['peak_memory_bytes'] / 2**30:.2f}",
        "" if least is None else f"{least:.3f}",
        "" if least is None else f"{f['seconds'] / least:.2f}",
    )


HEADER = (
    "graph, model, system",
    "ranks x threads",
    "malloc",
    "median s",
    "least to most s",
    "over ours",
    "user s",
    "system s",
    "peak GiB",
    "bound s",
    "over bound",
)


def main(options: Options) -> int:
    facts, found = machine(), []
    names, rounds = options.graphs, options.rounds
    if options.quick:
        names, rounds = (graphs.TINY,), 1
    tried = Options(**{**vars(options), "rounds": rounds})
    with graphs.work_folder(options.work) as work:
        for graph in names:
            for model in options.models:
                for allocator in allocators():
                    found += measure(tried, graph, model, allocator, work)
    about = ", ".join(f"{key} {value}" for key, value in MODEL.items())
    shown = table(HEADER, [row(f) for f in found])
    text = f"# Seconds of a training step\n\n{machine_line(facts)} {about}, Adam.\n\n{shown}"
    text += f"\n\n{options.note}" if options.note else ""
    for f in found:
        f["commit"], f["processor"] = facts["commit"], facts["processor"]
    record = {"machine": facts, "model": MODEL, "note": options.note, "results": found}
    deliver(options.name, text, record, as_json=options.json, save=options.save, lines=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options)))
