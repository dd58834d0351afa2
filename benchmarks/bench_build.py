"""Seconds and peak memory of building shards, stage by stage, beside METIS k-way's own.

Each graph is generated (a power law with communities, 20 edges a node, 32 float32 features), saved as ``.npz`` and
built into 8 shards by a process of its own. The bounds: all but the partitioner should take no longer than METIS k-way
does and grow linearly; peak memory should stay within 1.5 times the graph's own arrays plus what METIS needs.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import deliver, machine, machine_line, say, table

SIZES = (1, 3, 10, 30)
PARTS = 8
STAGES = ("read", "prepare", "adjacency", "METIS", "buckets", "write")
DEGREE, FEATURES = 20, 32


def spec(millions: float) -> str:
    nodes = round(millions * 1e6 / DEGREE)
    return f"demo:products-like?nodes={nodes}&degree={DEGREE}&features={FEATURES}"


def _status(field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def measure(path: Path, out: Path) -> dict[str, Any]:
    """One build of the graph at ``path``: run in a process of its own."""
    from partition_tools import builder, memory, metis, sources
    from partition_tools.adjacency import symmetric_adjacency
    from partition_tools.assign import Assignment, AssignOptions
    from partition_tools.cutter import Cutter
    from partition_tools.prepare import check
    from partition_tools.summary import summarise

    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    base = _status("VmRSS")

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        yield
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        peaks[name] = max(peaks.get(name, 0), _status("VmHWM") - base)

    with stage("read"):
        graph = sources.load(str(path))
    need = memory.build_need(graph, AssignOptions(parts=PARTS, scheme="kway"))
    with stage("prepare"):
        check(graph)
        summary = summarise(graph)
    with stage("adjacency"):
        adjacency = symmetric_adjacency(graph)
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    with metis.laid_out(graph.name, adjacency, None) as layout:
        del adjacency
        with stage("METIS"):
            part = layout.partition(parts=PARTS, seed=1, scheme="kway", objective="cut", imbalance=0.03)
    children = max(children, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
    with stage("buckets"):
        cutter = Cutter.make(graph, part, PARTS, summary.num_classes)
        edges = cutter.edges_by_part(out.with_name("scratch"))
        del cutter, edges
    assignment = Assignment(part=part, parts=PARTS, method="metis", seed=1, options={}, versions={}, notes=())
    with stage("write"):
        builder.build(graph, assignment, out, summary=summary)
    seconds["write"] = max(0.0, seconds["write"] - seconds["buckets"])  # which it does again
    own = sum(seconds[name] for name in STAGES if name != "METIS")
    return {
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "graph_bytes": memory.graph_bytes(graph),
        "seconds": seconds,
        "own_seconds": own,
        "ratio": own / seconds["METIS"],
        "peak_bytes": peaks,
        "metis_bytes": children,
        "peak": max(max(peaks.values()), peaks["METIS"] + children),
        "bound": 1.5 * memory.graph_bytes(graph) + children,
        "stated": need.most - base,
    }


def run(millions: float, folder: Path) -> dict[str, Any]:
    from partition_tools import sources

    path = folder / "graph.npz"
    graph = sources.load(spec(millions))
    sources.save_npz(path, graph)
    del graph
    code = (
        "import json, sys; from pathlib import Path; from benchmarks.bench_build import measure; "
        "print(json.dumps(measure(Path(sys.argv[1]), Path(sys.argv[2]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(folder / "out")], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=list(SIZES), help="millions of directed edges")
    parser.add_argument("--full", action="store_true", help="100 million edges, too")
    parser.add_argument("--after", type=Path, nargs="*", default=[], help="results (--json) to put before these")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args()
    facts = machine()
    found: list[dict[str, Any]] = [result for path in args.after for result in json.loads(path.read_text())["results"]]
    for millions in [*args.sizes, *([100.0] if args.full else [])]:
        with tempfile.TemporaryDirectory(prefix="bench-build-") as folder:
            found.append(run(millions, Path(folder)))
        f = found[-1]
        say(f"{f['edges']:,} edges: {f['own_seconds']:.2f} s beside METIS's {f['seconds']['METIS']:.2f} s")
    rows = [
        (
            f"{f['edges']:,}",
            *(f"{f['seconds'][name]:.2f}" for name in STAGES),
            f"{f['own_seconds']:.2f}",
            f"{f['ratio']:.2f}",
            f"{1e9 * f['own_seconds'] / f['edges']:.0f}",
            f"{f['graph_bytes'] / 2**20:,.0f}",
            f"{f['metis_bytes'] / 2**20:,.0f}",
            f"{f['peak'] / 2**20:,.0f}",
            f"{f['peak'] / f['bound']:.2f}",
            f"{f['stated'] / 2**20:,.0f}",
        )
        for f in found
    ]
    header = (
        "edges",
        *(f"{name} s" for name in STAGES),
        "all but METIS s",
        "over METIS",
        "ns an edge",
        "graph MiB",
        "METIS MiB",
        "peak MiB",
        "over 1.5 graph + METIS",
        "stated MiB",
    )
    text = f"# Building shards\n\n{machine_line(facts)}\n\n{table(header, rows)}"
    deliver("build", text, {"machine": facts, "results": found}, as_json=args.json, save=args.save)


if __name__ == "__main__":
    main()
