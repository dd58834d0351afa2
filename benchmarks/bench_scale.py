"""How a step's seconds, the start and the memory grow: with the graph from a tenth to the whole, and with the ranks.

Start is from the first process to the last rank that can take a step: imports, reading, plans. Peak memory counts from
then on. Ranks beyond the cores share them, so that seconds show what more parts cost, not what more cores would give.
``--products`` trains the graph of 2.45 M nodes and 124 M entries on 2 ranks, which must fit 20 GiB together.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks import graphs
from benchmarks.report import deliver, machine, machine_line, say, table
from benchmarks.systems import MODEL, ours

LIMIT = 20 * 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """How seconds, start and memory grow with the graph and the ranks."""

    graphs: tuple[str, ...] = ("arxiv-like/10", "arxiv-like/3", "arxiv-like")
    """Names, NAME/10 for a tenth of the nodes, files or demo: specs."""
    ranks: tuple[int, ...] = (1, 2, 4, 8)
    model: Literal["sage", "gcn", "gat"] = "sage"
    epochs: int = 3
    products: bool = False
    """Only the graph of 124 M entries on 2 ranks; exits with 1 where they need more than 20 GiB."""
    work: Path | None = None
    """Folder where shards are kept between runs."""
    note: str = ""
    """A sentence for the result: what bounds what is left."""
    name: str = "scale"
    """Of the saved result."""
    quick: bool = False
    """Tiny graphs, one epoch: to see that it works."""
    json: bool = False
    """Print one JSON object."""
    save: bool = False
    """Keep the result under benchmarks/results."""


def measure(graph: str, ranks: int, options: Options, work: Path) -> dict[str, Any]:
    folder = graphs.shards(graph, ranks, work)
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    config = {"model": options.model, **MODEL}
    with ours("ours", folder, config, ranks=ranks, threads=threads, graph=graph, model=options.model) as system:
        start = system.ready()
        system.run(1, keep=False)
        system.run(1 if options.quick else options.epochs)
        found = system.summary() | {"start_seconds": start}
    each = [rank["peak_memory_bytes"] for rank in found["ranks_told"]]
    sent = sum(sum(rank["sent_bytes"]) for rank in found["ranks_told"])
    say(f"{graph} on {ranks}: {found['seconds']:.3f} s an epoch, {start:.1f} s to start")
    return found | {"most_memory_bytes": max(each), "sent_bytes": sent}


def row(f: dict[str, Any]) -> tuple[object, ...]:
    return (
        f["graph"],
        f["ranks"],
        f"{f['seconds']:.3f}",
        f"{f['user_seconds'] + f['system_seconds']:.2f}",
        f"{f['start_seconds']:.1f}",
        f"{f['most_memory_bytes'] / 2**30:.2f}",
        f"{f['peak_memory_bytes'] / 2**30:.2f}",
        f"{f['sent_bytes'] / 1e6:.1f}",
    )


HEADER = ("graph", "ranks", "epoch s", "processor s", "start s", "GiB of the largest", "GiB of all", "MB sent an epoch")


def main(options: Options) -> int:
    facts, found = machine(), []
    names, ranks = options.graphs, options.ranks
    if options.quick:
        names = (graphs.TINY, f"{graphs.TINY}0")
    if options.products:
        names, ranks = ("products-like",), (2,)
    with graphs.work_folder(options.work) as work:
        for graph in names:
            for count in ranks:
                found.append(measure(graph, count, options, work))
    shown = table(HEADER, [row(f) for f in found])
    text = f"# Growth with graph and ranks\n\n{machine_line(facts)} {options.model}.\n\n{shown}"
    text += f"\n\n{options.note}" if options.note else ""
    record = {"machine": facts, "model": MODEL, "note": options.note, "results": found}
    name = "scale-products" if options.products else options.name
    deliver(name, text, record, as_json=options.json, save=options.save)
    over = options.products and found[0]["peak_memory_bytes"] > LIMIT
    if over:
        say("more than 20 GiB")
    return int(over)


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options)))
