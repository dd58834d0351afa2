"""What each exchange policy costs in accuracy and saves in time, beside the exact run, on P = 4 ranks.

Accuracy over paired seeds at loopback speed; then seconds an epoch of steady epochs over shaped links: two network
namespaces of two ranks each, their link shaped by ``tc tbf``, where this process is root and has iproute2.
Otherwise seconds are those that ``fullgraph compare --link`` predicts, and are marked so. Time to accuracy is the
product of epochs to the target and seconds an epoch. The reference for a shaped link is compute alone: the exact
epoch at loopback without what it waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.network import LINK, address, network, why_not
from benchmarks.report import deliver, machine, machine_line, say, table
from partition_tools import build, load, partition
from partition_tools.prepare import make_undirected, random_split

PARTS = 4
LINKS = {"1gbit": 1000.0, "100mbit": 100.0}
"""Megabits a second."""
STEADY = 10
RECIPES = """
[pipelined]
refresh = "pipelined"
["pipelined, frozen masks"]
refresh = "pipelined"
freeze-masks = true
["every:2"]
refresh = "every:2"
[int8]
codec = "int8"
["int8 pipelined"]
refresh = "pipelined"
codec = "int8"
["sample 0.5"]
boundary-sample = 0.5
"""
GRAPHS: dict[str, tuple[str, str]] = {
    "amazon-computers": (
        "gnn-benchmark/amazon_electronics_computers.npz",
        "--model gcn --hidden 64 --norm batch --weight-decay 0 --epochs 60",
    ),
    "coauthor-cs": ("gnn-benchmark/ms_academic_cs.npz", "--model gcn --hidden 64 --epochs 50"),
    "arxiv-like at 1/3": ("demo:arxiv-like?nodes=56448", "--model sage --hidden 128 --layers 3 --epochs 40"),
}
"""Source and options; the first two as in bench_accuracy, whose exact runs are known to converge under them."""


def prepare(spec: str, out: Path) -> None:
    """Build shards of a graph; one without splits gets one of 60, 20 and 20 % by seed 1."""
    graph = make_undirected(load(spec))
    if graph.splits is None:
        graph = random_split(graph, (0.6, 0.2, 0.2), 1)
    build(graph, partition(graph, PARTS), out)


def arguments(shards: Path, recipes: Path, options: str, epochs: int | None, seeds: int) -> list[str]:
    """Of ``fullgraph``; ``epochs`` in place of those of the options."""
    run = ["compare", str(shards), "--recipes", str(recipes), "--eval-every", "5", "--seeds", str(seeds), "--json"]
    return [*run, *options.split(), *([] if epochs is None else ["--epochs", str(epochs)])]


def local(command: list[str], link: str | None = None) -> dict[str, Any]:
    """A comparison on the ranks of this host at loopback speed."""
    more = [] if link is None else ["--link", f"{link},0.2ms"]
    done = subprocess.run(
        [sys.executable, "-m", "fullgraph", *command, *more], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def over(link: str, command: list[str]) -> dict[str, Any]:
    """The comparison with two ranks in each of two namespaces."""
    with network(2) as hosts:
        hosts.shape(LINKS[link])
        ranks = []
        for number in range(2):
            launch = [*hosts.within(number), sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            launch += ["--node-rank", str(number), "--nproc-per-node", str(PARTS // 2), "--master-addr", address(0)]
            launch += ["--master-port", "29577", "-m", "fullgraph", *command]
            env = os.environ | {"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(launch, stdout=subprocess.PIPE, text=True, env=env))
        printed, _ = ranks[0].communicate()
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"a comparison over {link} ended with {codes}")
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with the real graphs")
    parser.add_argument("--graphs", nargs="+", choices=list(GRAPHS), default=list(GRAPHS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="by default each graph's own")
    parser.add_argument("--full", action="store_true", help="200 epochs and 10 seeds")
    parser.add_argument("--quick", action="store_true", help="one small graph, to see that it works")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args()
    epochs, seeds = (200, 10) if args.full else (2, 1) if args.quick else (args.epochs, args.seeds)
    chosen = {"communities": ("demo:communities?nodes=2000", "--model gcn --hidden 16")} if args.quick else {}
    chosen |= {} if args.quick else {name: GRAPHS[name] for name in args.graphs}
    facts, found, shaping = machine(), [], why_not() is None
    with tempfile.TemporaryDirectory(prefix="policies-") as scratch:
        recipes = Path(scratch) / "recipes.toml"
        recipes.write_text(RECIPES)
        for name, (spec, options) in chosen.items():
            say(f"{name}: {socket.gethostname()}, {'shaped links' if shaping else 'predicted seconds'}")
            shards = Path(scratch) / name.replace(" ", "-").replace("/", "-")
            prepare(spec if spec.startswith("demo:") else str(args.data / spec), shards)
            accuracy = local(arguments(shards, recipes, options, epochs, seeds))
            timing = arguments(shards, recipes, options, (2 if args.quick else STEADY) + 1, 1)
            links = {link: over(link, timing) if shaping else local(timing, link) for link in LINKS}
            found.append({"graph": name, "accuracy": accuracy, "links": links})
    text = f"# Exchange policies against the exact run\n\n{machine_line(facts)}\n\n"
    text += f"{PARTS} ranks, {seeds} paired seeds on one split. Seconds over a link are "
    text += "measured in shaped namespaces.\n\n" if shaping else "predicted, not measured.\n\n"
    text += table(
        ("graph, recipe", "accuracy %", "against exact", "MB an epoch", "compute s", *LINKS), _rows(found, shaping)
    )
    text += "\n\nOptions:\n\n" + "\n".join(f"- {name}: `{options}`" for name, (_, options) in chosen.items())
    text += f"\n\n{_NOTE}"
    deliver("policies", text, {"machine": facts, "results": found}, as_json=args.json, save=args.save)


_NOTE = """Accuracy: test, at the epoch best by validation; against exact: mean of the paired differences in points,
with its 95 % interval by Student's t. A policy is known to lose at most 0.3 points only where the whole interval lies
above -0.3. Compute is the slowest rank's, at loopback, outside collectives."""


def _rows(found: list[dict[str, Any]], shaping: bool) -> list[list[object]]:
    rows: list[list[object]] = []
    key = "seconds" if shaping else "link_seconds"
    for graph in found:
        for number, line in enumerate(graph["accuracy"]["recipes"]):
            half = line["difference_interval"]
            rows.append(
                [
                    f"{graph['graph']}, {line['name']}",
                    f"{100 * line['score']:.2f}",
                    f"{100 * line['difference']:+.2f}" + ("" if half is None else f" ± {100 * half:.2f}"),
                    f"{line['bytes'] / 1e6:.3g}",
                    f"{line['compute_seconds']:.3g}",
                    *(f"{graph['links'][link]['recipes'][number][key]:.3g}" for link in LINKS),
                ]
            )
    return rows


if __name__ == "__main__":
    main()
