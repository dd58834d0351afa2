"""``fullgraph demo``: the whole product on a generated graph, in one folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fullgraph.config import TrainConfig
from fullgraph.launch import launch_local
from fullgraph.runlog import show

_PROOF_EPOCHS = 5
_MODEL: dict[str, Any] = {"model": "sage", "layers": 3, "hidden": 64, "dropout": 0.3, "eval_every": 5}


def run_demo(out: Path, *, nodes: int, ranks: int | None, epochs: int) -> int:
    """Generate, partition twice, compare, train with P ranks and with one, and compare the losses.

    Returns an exit code. Everything is written below ``out``, which must not hold anything else.
    """
    from partition_tools import forms, sources
    from partition_tools.assign import AssignOptions, assign
    from partition_tools.builder import build
    from partition_tools.report import Question, report
    from partition_tools.summary import render, summarise

    console = Console(soft_wrap=True, highlight=False)
    parts = ranks or max(2, len(os.sched_getaffinity(0)))
    if parts < 2:
        raise ValueError(f"--ranks is {parts}; the demo compares one rank with several, so at least 2")
    _claim(out)
    console.rule(f"1. A graph ({out}/)")
    graph = sources.load(f"demo:communities?nodes={nodes}")
    console.print(render(summarise(graph)))

    console.rule(f"2. Two partitionings into {parts} parts")
    folders = {}
    for name, method, count in (("metis", "metis", parts), ("random", "random", parts), ("one", "contiguous", 1)):
        folders[name] = out / "shards" / name
        build(graph, assign(graph, AssignOptions(method=method, parts=count)), folders[name], force=True)
    question = Question(config=TrainConfig(**_MODEL))
    forms.show(report([folders["metis"], folders["random"]], question), question, console)

    console.rule(f"3. Train GraphSAGE on {parts} ranks")
    trained = out / "runs" / "train"
    if code := launch_local(["train", str(folders["metis"]), *_flags(trained, epochs, "float32")], parts):
        return code

    console.rule(f"4. The same losses on {parts} ranks and on one?")
    console.print(f"{_PROOF_EPOCHS} epochs in float64, where rounding leaves 15 digits, with dropout on:")
    runs = {}
    for name, count in (("metis", parts), ("one", 1)):
        runs[count] = out / "runs" / f"proof-{count}"
        arguments = ["train", str(folders[name]), *_flags(runs[count], _PROOF_EPOCHS, "float64")]
        if code := launch_local(arguments, count):
            return code
    agree = _compare(runs[parts], runs[1], parts, console)

    summary = json.loads((trained / "summary.json").read_text())
    console.print(f"test accuracy of the trained model: {show('accuracy', summary['test']['accuracy'])}")
    console.rule("Next: your own graph")
    console.print(
        "  partition-tools formats                               what can be read\n"
        f"  partition-tools build GRAPH --parts {parts} --out shards    your graph into {parts} shards\n"
        "  partition-tools report shards                         what its exchange costs\n"
        "  fullgraph train shards --model gcn                    train on them\n"
        f"everything the demo wrote lies in {out}/"
    )
    return 0 if agree else 1


def _claim(out: Path) -> None:
    """Make ``out`` ours: new, or a demo's folder from before, whose runs are removed."""
    mark = out / ".fullgraph-demo"
    if out.exists() and not mark.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and was not made by the demo; name another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    mark.touch()
    for old in (out / "runs").glob("*/*"):
        old.unlink()


def _flags(run: Path, epochs: int, dtype: str) -> list[str]:
    options = {"run": run, "epochs": epochs, "dtype": dtype, **_MODEL}
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _compare(several: Path, one: Path, parts: int, console: Console) -> bool:
    """Print losses side by side; whether they agree to float64 rounding."""
    losses = [[record["loss"] for record in _records(run)] for run in (several, one)]
    table = Table("epoch", f"loss, {parts} ranks", "loss, 1 rank", "relative difference")
    differences = [abs(a - b) / abs(b) for a, b in zip(*losses, strict=True)]
    for i, difference in enumerate(differences):
        table.add_row(str(i + 1), f"{losses[0][i]:.12f}", f"{losses[1][i]:.12f}", f"{difference:.1e}")
    console.print(table)
    agree = bool(max(differences) <= 1e-10)
    verdict = "equal but for rounding" if agree else "NOT EQUAL: please report this"
    console.print(f"largest relative difference: {max(differences):.1e} ({verdict})")
    return agree


def _records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
