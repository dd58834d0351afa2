"""The same questions on CUDA devices, one and several (NCCL): are the numbers right, and how fast is a step.

Correct: the losses of the first steps in float64 are those of one rank on the CPU, to a part in 10^9. Fast: seconds of
a step and memory of the devices, on 1, 2, 4, ... devices, beside PyG full batch on one. Without a device it says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from benchmarks import graphs
from benchmarks.report import deliver, machine, machine_line, say, table
from benchmarks.systems import MODEL, SAME_WORK, System, ours, peer

TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Options:
    """Correctness and speed on CUDA devices."""

    graph: str = "arxiv-like"
    """To be fast on: name, NAME/10 for a tenth of the nodes, file or demo: spec."""
    models: tuple[Literal["sage", "gcn", "gat"], ...] = ("sage", "gcn", "gat")
    epochs: int = 10
    work: Path | None = None
    """Folder where shards are kept between runs."""
    quick: bool = False
    """A tiny graph, one epoch: to see that it works."""
    json: bool = False
    """Print one JSON object."""
    save: bool = False
    """Keep the result under benchmarks/results."""


def losses(system: System, steps: int = 3) -> list[float]:
    with system:
        system.ready()
        return [epoch["ranks"][0]["loss"] for epoch in system.run(steps)]


def correct(model: str, counts: list[int], work: Path) -> list[dict[str, Any]]:
    """For each number of devices, how far its losses are from the CPU's."""
    config = {"model": model, **MODEL, "dtype": "float64"}
    one = graphs.shards(graphs.TINY, 1, work)
    expected = losses(ours("ours on the CPU", one, config, env={"CUDA_VISIBLE_DEVICES": ""}))
    found = []
    for ranks in counts:
        seen = losses(ours("ours", graphs.shards(graphs.TINY, ranks, work), config, ranks=ranks))
        far = max(abs(a - b) / abs(b) for a, b in zip(seen, expected, strict=True))
        found.append({"model": model, "ranks": ranks, "difference": far, "right": far < TOLERANCE})
    return found


def fast(model: str, graph: str, counts: list[int], options: Options, work: Path) -> list[dict[str, Any]]:
    config = {"model": model, **MODEL}
    shared = {"graph": graph, "model": model}
    systems = [
        ours(name, graphs.shards(graph, ranks, work), config | changes, ranks=ranks, **shared)
        for ranks in counts
        for name, changes in (("ours", {}), ("ours, same work", SAME_WORK))
    ]
    others = ["pyg-edge_index"] if model == "gat" else ["pyg-edge_index", "pyg-csr"]
    systems += [peer(name, graphs.arrays(graph, work), model, threads=1, device="cuda", graph=graph) for name in others]
    found = []
    for system in systems:
        with system:
            try:
                system.ready()
                system.run(3, keep=False)
                system.run(1 if options.quick else options.epochs)
                summary = system.summary()
            except RuntimeError as error:  # out of the device's memory, say
                say(f"{model} {system.name}: {error}")
                continue
        found.append(summary | {"device_bytes": sum(rank["device_peak_bytes"] for rank in summary["ranks_told"])})
        say(f"{model} {system.name} on {summary['ranks']}: {summary['seconds']:.4f} s")
    return found


def main(options: Options) -> int:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices:
        say("skipped: there is no CUDA device here")
        return 0
    counts = [count for count in (1, 2, 4, 8) if count <= devices]
    graph = graphs.TINY if options.quick else options.graph
    facts, checks, found = machine(), [], []
    facts["devices"] = [torch.cuda.get_device_name(device) for device in range(devices)]
    with graphs.work_folder(options.work) as work:
        for model in options.models:
            checks += correct(model, counts, work)
            found += fast(model, graph, counts, options, work)
    right = [(c["model"], c["ranks"], f"{c['difference']:.1e}", "yes" if c["right"] else "NO") for c in checks]
    speed = [
        (
            f"{f['model']}, {f['system']}",
            f["ranks"],
            f"{f['seconds']:.4f}",
            f"{f['least_seconds']:.4f} to {f['most_seconds']:.4f}",
            f"{f['device_bytes'] / 2**30:.2f}",
        )
        for f in found
    ]
    text = (
        f"# On CUDA devices\n\n{machine_line(facts)} {', '.join(facts['devices'])}.\n\n"
        f"{table(('model', 'devices', 'losses off by', 'right'), right)}\n\n"
        f"{graph}:\n\n{table(('model, system', 'devices', 'median s', 'least to most s', 'device GiB'), speed)}"
    )
    record = {"machine": facts, "model": MODEL, "checks": checks, "results": found}
    deliver("gpu", text, record, as_json=options.json, save=options.save)
    return int(not all(c["right"] for c in checks))


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options)))
