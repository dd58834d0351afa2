"""What checksums cost: their share of the time from the start of the process to the end of the first epoch.

One rank, in a process of its own, that imports the package, reads and checks its shard, plans, and takes a step; files
are in the page cache (warm) or dropped from it before (cold). The bound asked for is 10 %.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.report import deliver, machine, machine_line, say, table
from partition_tools import build, load, partition

BOUND = 0.10
_CHILD = """
import json, sys, time
start = time.time()
import psutil
start = psutil.Process().create_time()
import fullgraph.shards
from fullgraph import TrainConfig, World
spent, original = [0.0], fullgraph.shards.checksum
def timed(path):
    before = time.perf_counter()
    found = original(path)
    spent[0] += time.perf_counter() - before
    return found
fullgraph.shards.checksum = timed
from fullgraph.loading import load_shard
from fullgraph.trainer import make_trainer
from pathlib import Path
world, config = World(), TrainConfig(model="gcn")
shard = load_shard(Path(sys.argv[1]), world).shard
loaded = time.time()
trainer = make_trainer(shard, config, world)
trainer.step(0)
print(json.dumps({"seconds": time.time() - start, "checksum": spent[0], "loaded": loaded - start}))
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What checksums cost."""

    graphs: tuple[str, ...] = ("demo:communities?nodes=20000", "demo:arxiv-like", "demo:reddit-like?nodes=50000")
    """Graphs to build and start on."""
    rounds: int = 3
    """Starts of each kind; the median by seconds is shown."""
    json: bool = False
    """Print one JSON object."""
    save: bool = False
    """Keep the result under benchmarks/results."""


def main(options: Options) -> int:
    facts, found = machine(), []
    for spec in options.graphs:
        with tempfile.TemporaryDirectory(prefix="start-") as folder:
            graph = load(spec)
            build(graph, partition(graph, parts=1), Path(folder) / "s")
            del graph
            for state in ("warm", "cold"):
                runs = [_start(Path(folder) / "s", state == "cold") for _ in range(options.rounds)]
                run = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]
                size = sum(path.stat().st_size for path in (Path(folder) / "s").iterdir())
                found.append({"graph": spec, "cache": state, "bytes": size} | run)
                say(f"{spec}, {state}: {run['checksum']:.3f} of {run['seconds']:.2f} s")
    rows = [
        (
            f"{run['graph']}, {run['cache']}",
            f"{run['bytes'] / 1e6:,.1f}",
            f"{run['seconds']:.2f}",
            f"{run['loaded']:.2f}",
            f"{run['checksum']:.3f}",
            f"{run['checksum'] / run['seconds']:.1%}",
        )
        for run in found
    ]
    header = ("graph, page cache", "MB", "s to the first epoch's end", "s until loaded", "s of checksums", "share")
    text = "\n".join(["# What checksums cost", "", machine_line(facts), "", table(header, rows)])
    deliver("start", text, {"machine": facts, "runs": found}, as_json=options.json, save=options.save)
    return 0 if all(run["checksum"] <= BOUND * run["seconds"] for run in found) else 1


def _start(folder: Path, cold: bool) -> dict[str, Any]:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        if cold:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    done = subprocess.run([sys.executable, "-c", _CHILD, str(folder)], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))))
