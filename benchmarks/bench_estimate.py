"""What ``partition-tools estimate`` tells beside what is then measured: memory and seconds of builds and of training.

A graph like ogbn-arxiv in 2 parts. The estimate of a build's memory is what it should take at most; all others should
lie within 20 % of what is measured. Training runs 6 epochs on 2 ranks of this machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import deliver, machine, machine_line, say, table

SPEC = "demo:arxiv-like?nodes=100000"
MODELS: dict[str, tuple[str, ...]] = {
    "gcn": (),
    "sage": (),
    "gin": (),
    "gat": (),
    "sage, 3 layers of 256": ("--layers", "3", "--hidden", "256"),
    "gcn, 3 layers, batch norm": ("--layers", "3", "--norm", "batch"),
}
PARTS = 2


def command(*arguments: str) -> str:
    return subprocess.run([sys.executable, "-m", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default=SPEC)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args()
    facts, found = machine(), []
    with tempfile.TemporaryDirectory(prefix="bench-estimate-") as name:
        folder = Path(name)
        shards, parts = folder / "shards", ("--parts", str(PARTS))
        start = time.perf_counter()
        said = command("partition_tools", "build", args.graph, *parts, "--out", str(shards))
        seconds = time.perf_counter() - start
        measured = float(said.split("peak memory ")[1].split(" MiB")[0].replace(",", ""))
        for label, options in MODELS.items():
            model = ("--model", label.split(",")[0], *options)
            told = json.loads(command("partition_tools", "estimate", args.graph, *parts, *model, "--probe", "--json"))
            run = folder / label.replace(" ", "-").replace(",", "")
            command("fullgraph", "train", str(shards), *model, "--epochs", "6", "--eval-every", "3", "--run", str(run))
            summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
            memory = max(rank["memory"] for rank in told["ranks"])
            if not found:
                found.append({"what": "build, MiB at most", "told": told["need"]["most"] / 2**20, "measured": measured})
                both = told["build_seconds"] + told["partition_seconds"]
                found.append({"what": "build, s (with reading)", "told": both, "measured": seconds})
            mib = summary["peak_memory_bytes"] / 2**20
            found.append({"what": f"{label}, MiB a rank", "told": memory / 2**20, "measured": mib})
            epoch = summary["seconds_per_epoch"]
            found.append({"what": f"{label}, s an epoch", "told": told["step_seconds"], "measured": epoch})
            say(f"{label}: {memory / 2**20:,.0f} of {mib:,.0f} MiB, {told['step_seconds']:.3f} of {epoch:.3f} s")
    rows = [(f["what"], f"{f['told']:.4g}", f"{f['measured']:.4g}", f"{f['told'] / f['measured']:.2f}") for f in found]
    text = f"# Estimates\n\n{machine_line(facts)}\n\n{table(('', 'told', 'measured', 'told over measured'), rows)}"
    deliver("estimate", text, {"machine": facts, "results": found}, as_json=args.json, save=args.save)


if __name__ == "__main__":
    main()
