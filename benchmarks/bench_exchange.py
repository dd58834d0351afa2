"""Halo rows against minimum-cover rows: how many cross in one linear layer, and how long the plan takes to make.

METIS parts of real and generated graphs, P in {2, 4, 8, 16}. Rows and bytes are counts and repeat exactly; seconds are
those of the covers of all receivers, one after the other on one core. The bound: no factorisation by sources and
destinations has fewer rows than the cover (Koenig's theorem), so ``ratio`` cannot be bettered for these parts.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import deliver, machine, machine_line, say, table
from fullgraph.cut import cover_factors, selecting_factors
from partition_tools import Graph, load, partition
from partition_tools.prepare import make_undirected

WIDTH = 256
REAL = (
    "planetoid/ind.cora",
    "gnn-benchmark/amazon_electronics_computers.npz",
    "gnn-benchmark/amazon_electronics_photo.npz",
    "gnn-benchmark/dblp.npz",
    "gnn-benchmark/ms_academic_cs.npz",
    "heterophilous/minesweeper.npz",
    "heterophilous/chameleon_filtered.npz",
    "graphs/4elt.graph",
    "graphs/PGPgiantcompo.graph",
)
GENERATED = ("demo:arxiv-like?nodes=56448", "demo:reddit-like?nodes=16667")


def measure(graph: Graph, parts: int) -> dict[str, Any]:
    """Rows of both plans over all pairs of parts."""
    part = partition(graph, parts).part
    cut = part[graph.src] != part[graph.dst]
    src, dst = graph.src[cut], graph.dst[cut]
    halo_rows, cover_rows, seconds = 0, 0, 0.0
    for q in range(parts):
        mine = part[dst] == q
        halo, index = np.unique(src[mine], return_inverse=True)
        order = np.argsort(part[halo], kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(order.shape[0])
        row, column, owner = dst[mine], place[index], part[halo[order]]
        halo_rows += selecting_factors(row, column, owner, parts).rows
        start = time.perf_counter()
        cover_rows += cover_factors(row, column, owner, parts).rows
        seconds += time.perf_counter() - start
    return {
        "graph": graph.name,
        "parts": parts,
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "cut_edges": int(cut.sum()),
        "halo_rows": halo_rows,
        "cover_rows": cover_rows,
        "ratio": cover_rows / halo_rows if halo_rows else 1.0,
        "cover_megabytes": cover_rows * WIDTH * 4 / 1e6,
        "plan_seconds": seconds,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with the real graphs")
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--quick", action="store_true", help="one small graph, to see that it works")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args()
    specs = [str(args.data / name) for name in REAL if args.data.is_dir()] + list(GENERATED)
    if args.quick:
        specs = ["demo:communities?nodes=2000"]
    facts, found = machine(), []
    for spec in specs:
        graph = make_undirected(load(spec))
        for parts in args.parts:
            found.append(measure(graph, parts))
            say(f"{graph.name} in {parts}: {found[-1]['ratio']:.2f}")
    rows = [
        (
            f["graph"],
            f["parts"],
            f"{f['cut_edges']:,}",
            f"{f['halo_rows']:,}",
            f"{f['cover_rows']:,}",
            f"{f['ratio']:.2f}",
            f"{f['cover_megabytes']:.2f}",
            f"{f['plan_seconds']:.3f}",
        )
        for f in found
    ]
    header = ("graph", "P", "cut edges", "halo rows", "cover rows", "ratio", f"MB at width {WIDTH}", "plan s")
    text = f"# Halo and minimum-cover rows\n\n{machine_line(facts)}\n\n{table(header, rows)}"
    deliver("exchange", text, {"machine": facts, "results": found}, as_json=args.json, save=args.save)


if __name__ == "__main__":
    main()
