"""Methods of partitioning: seconds, peak memory, cut, rows that cross, the most of one part, balance.

Whole graphs, undirected, nothing pruned. ``halo`` are the rows of one halo exchange, ``cover`` the fewest rows that
carry the same sums, which linear layers send; ``ratio`` is cover rows over METIS k-way's halo rows for as many parts,
and its bounds for ``best`` are stated below the table. Rows, cuts and balance are counts and repeat exactly for a seed;
seconds and memory are of a process that does nothing else, children included (memory: the largest of them).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.report import deliver, machine, machine_line, say, table
from fullgraph.cut import crossing_rows
from partition_tools import kahypar, load
from partition_tools.adjacency import symmetric_adjacency
from partition_tools.assign import AssignOptions, assign
from partition_tools.prepare import make_undirected

GRAPHS = {
    "amazon-computers": ("gnn-benchmark/amazon_electronics_computers.npz", 0.60),
    "amazon-photo": ("gnn-benchmark/amazon_electronics_photo.npz", 0.60),
    "PGPgiantcompo": ("graphs/PGPgiantcompo.graph", 0.60),
    "chameleon": ("heterophilous/chameleon_filtered.npz", 0.60),
    "dblp": ("gnn-benchmark/dblp.npz", 0.66),
    "cora_ml": ("gnn-benchmark/cora_ml.npz", 0.66),
    "coauthor-cs": ("gnn-benchmark/ms_academic_cs.npz", 0.66),
    "4elt": ("graphs/4elt.graph", None),
    "delaunay_n15": ("graphs/delaunay_n15.graph", None),
    "minesweeper": ("heterophilous/minesweeper.npz", None),
}
"""File, and the most that best's ratio should be; None for meshes, where it is METIS's best of three by cover rows."""
_ALONE = "without the extra quality"
METHODS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "bfs": {"method": "bfs"},
    "fennel": {"method": "fennel"},
    "supernode:64 packed": {"method": "supernode:64:packed"},
    "metis k-way": {"scheme": "kway"},
    "metis recursive": {"scheme": "recursive"},
    "metis volume": {"scheme": "kway", "objective": "volume"},
    "best": {"method": "best", "time_limit": 600.0},
    "best by METIS alone": {"method": "best", "time_limit": 600.0, _ALONE: True},
}
_METIS = ("metis k-way", "metis recursive", "metis volume")


def measure(path: str, parts: int, options: dict[str, Any]) -> dict[str, Any]:
    """One partition and its counts."""
    graph = dataclasses.replace(make_undirected(load(path)), splits=None)
    before, alone = _peak(), options.pop(_ALONE, False)
    start = time.perf_counter()
    with mock.patch.object(kahypar, "installed", return_value=False) if alone else contextlib.nullcontext():
        found = assign(graph, AssignOptions(parts=parts, **options))
    seconds, peak = time.perf_counter() - start, _peak()
    part, adjacency = found.part, symmetric_adjacency(graph)
    node = np.repeat(np.arange(graph.num_nodes), np.diff(adjacency.xadj))
    cut = part[node] != part[adjacency.adjncy]
    halo, cover = crossing_rows(node[cut], adjacency.adjncy[cut], part, parts)
    kept = [row for row in found.table if row.kept]
    return {
        "seconds": seconds,
        "peak_bytes": peak,
        "loaded_bytes": before,
        "cut": int(cut.sum()) // 2,
        "halo": int(halo.sum()),
        "cover": int(cover.sum()),
        "most": int(max(cover.sum(axis=0).max(), cover.sum(axis=1).max())),
        "balance": float(np.bincount(part, minlength=parts).max()) * parts / graph.num_nodes,
        "kept": getattr(kept[0], "name", "") if kept else "",
        "notes": list(found.notes),
    }


def _peak() -> int:
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(w).ru_maxrss for w in who) * 1024


def in_child(path: str, parts: int, options: dict[str, Any]) -> dict[str, Any]:
    code = (
        "import json, sys; from benchmarks.bench_partition import measure; "
        "print(json.dumps(measure(*json.loads(sys.argv[1]))))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, json.dumps([path, parts, options])], capture_output=True, text=True
    )
    if run.returncode:
        raise SystemExit(f"{path} in {parts} by {options}: {run.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with the real graphs")
    parser.add_argument("--graphs", nargs="+", choices=list(GRAPHS), default=list(GRAPHS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--quick", action="store_true", help="one small graph, to see that it works")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args()
    graphs = {name: (str(args.data / GRAPHS[name][0]), GRAPHS[name][1]) for name in args.graphs}
    if args.quick:
        graphs, args.parts = {"communities": ("demo:communities?nodes=1000", None)}, [4]
    facts, found = machine(), []
    for name, (path, _) in graphs.items():
        for parts in args.parts:
            for method in args.methods:
                one = in_child(path, parts, METHODS[method])
                found.append({"graph": name, "parts": parts, "method": method} | one)
                say(f"{name} in {parts} by {method}: {one['cover']} rows, {one['seconds']:.1f} s")
    text = f"# Methods of partitioning\n\n{machine_line(facts)}\n\n{_table(found)}\n\n{_targets(graphs, found)}"
    deliver("partition", text, {"machine": facts, "results": found}, as_json=args.json, save=args.save)


def _kway(found: list[dict[str, Any]], graph: str, parts: int) -> int:
    """METIS k-way's halo rows; 0 where that was not run."""
    rows = (f["halo"] for f in found if (f["graph"], f["parts"], f["method"]) == (graph, parts, "metis k-way"))
    return next(rows, 0)


def _table(found: list[dict[str, Any]]) -> str:
    header = ("graph", "P", "method", "s", "peak MB", "cut pairs", "halo", "cover", "ratio", "most", "balance", "kept")
    rows = []
    for f in found:
        kway = _kway(found, f["graph"], f["parts"])
        rows.append(
            (
                f["graph"],
                f["parts"],
                f["method"],
                f"{f['seconds']:.2f}",
                f"{f['peak_bytes'] / 1e6:.0f}",
                f"{f['cut']:,}",
                f"{f['halo']:,}",
                f"{f['cover']:,}",
                f"{f['cover'] / kway:.3f}" if kway else "",
                f"{f['most']:,}",
                f"{f['balance']:.3f}",
                f["kept"] if f["method"].startswith("best") else "",
            )
        )
    return table(header, rows)


def _targets(graphs: dict[str, tuple[str, float | None]], found: list[dict[str, Any]]) -> str:
    """What best should reach and does, a row a graph and number of parts."""
    rows = []
    for f in found:
        if not f["method"].startswith("best") or not (kway := _kway(found, f["graph"], f["parts"])):
            continue
        most = graphs[f["graph"]][1]
        if most is None:
            same = [g for g in found if (g["graph"], g["parts"]) == (f["graph"], f["parts"]) and g["method"] in _METIS]
            most = min(g["cover"] for g in same) / kway
        ratio = f["cover"] / kway
        rows.append(
            (f["graph"], f["parts"], f["method"], f"{ratio:.3f}", f"{most:.3f}", "yes" if ratio <= most else "NO")
        )
    return table(("graph", "P", "method", "ratio", "at most", "reached"), rows)


if __name__ == "__main__":
    main()
