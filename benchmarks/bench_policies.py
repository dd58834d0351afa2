"""What each exchange policy costs in accuracy and saves in time, beside the exact run, on P = 4 ranks.

Accuracy comes from runs of ``fullgraph compare`` at loopback speed, over paired seeds. Seconds an epoch are those of
steady epochs over links that are shaped: each rank in a network namespace of its own, where this process is root and
has iproute2; otherwise they are predicted, as ``compare --link`` does, and marked so. Time to accuracy is the product
of the epochs to the target, which no link changes, and the seconds of one.

What is done is kept piece by piece in ``--work``, so that a long run can be cut short and taken up again.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.graphs import work_folder
from benchmarks.network import LINK, address, network, why_not
from benchmarks.report import deliver, machine, machine_line, say, table
from benchmarks.systems import ours
from fullgraph.compare import link_seconds, summarise, typical
from fullgraph.config import Refresh, TrainConfig
from fullgraph.recipes import EXACT, Link

PARTS = 4
STEADY = 10
LINKS = {"1gbit": 1000.0, "100mbit": 100.0}
"""Megabits a second."""
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "pipelined": {"refresh": "pipelined"},
    "pipelined, average 0.5": {"refresh": "pipelined", "pipeline_average": 0.5},
    "pipelined, frozen masks": {"refresh": "pipelined", "freeze_masks": True},
    "every:2": {"refresh": "every:2"},
    "int8": {"codec": "int8"},
    "int8 pipelined": {"refresh": "pipelined", "codec": "int8"},
    "sample 0.5": {"boundary_sample": 0.5},
}
LARGE = ("pipelined", "pipelined, frozen masks", "every:2", "int8")
SMALL = tuple(RECIPES)
"""What is tried on every graph, and timed, and what else is tried on the smaller ones."""
ALONE = "no rows"
_ALONE = {"refresh": "every:1000"}
"""The work of a pipelined step without its rows, once the first epoch has filled the cache."""
GRAPHS: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "coauthor-cs": (
        "gnn-benchmark/ms_academic_cs.npz",
        {"model": "gcn", "hidden": 64, "epochs": 100, "scheduler": "cosine"},
        SMALL,
    ),
    "amazon-computers": (
        "gnn-benchmark/amazon_electronics_computers.npz",
        {
            "model": "gcn",
            "hidden": 64,
            "norm": "batch",
            "weight_decay": 0.0,
            "epochs": 100,
            "scheduler": "cosine",
        },
        SMALL,
    ),
    "arxiv-like at 1/3": (
        "demo:arxiv-like?nodes=56448",
        {"model": "sage", "hidden": 128, "layers": 3, "epochs": 40, "scheduler": "cosine"},
        LARGE,
    ),
}
"""Source, options and recipes. The rate falls to zero, so that scores are those of weights that have settled: at a
constant one the scores of an exact run differ from one epoch to the next by as much as those of two recipes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Accuracy, seconds over slow links and time to accuracy of each exchange policy."""

    data: Path = Path("../shared/data")
    """Folder with the real graphs."""
    graphs: tuple[str, ...] = tuple(GRAPHS)
    seeds: int = 5
    only: Literal["all", "accuracy", "seconds"] = "all"
    """Which pieces to do; of the others the result holds those that are kept in --work."""
    pieces: int | None = None
    """Do at most so many this time."""
    work: Path | None = None
    """Folder where shards and finished pieces are kept between runs."""
    note: str = ""
    """A paragraph for the result."""
    full: bool = False
    """200 epochs and 10 seeds."""
    quick: bool = False
    """A tiny graph, two epochs: to see that it works."""
    json: bool = False
    """Print one JSON object."""
    save: bool = False
    """Keep the result under benchmarks/results."""


def prepare(spec: str, out: Path) -> None:
    """Build shards of a graph; one without splits gets one of 60, 20 and 20 % by seed 1."""
    from partition_tools import build, load, partition
    from partition_tools.prepare import make_undirected, random_split

    graph = make_undirected(load(spec))
    if graph.splits is None:
        graph = random_split(graph, (0.6, 0.2, 0.2), 1)
    build(graph, partition(graph, PARTS), out)


def trained(shards: Path, config: Mapping[str, Any], recipes: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """By recipe, what a run with a seed came to on ranks of this host."""
    file = shards.with_suffix(".toml")
    file.write_text("".join(f'["{name}"]\n{_toml(how)}\n' for name, how in recipes.items()))
    flags = [text for name, value in config.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = ["compare", str(shards), "--recipes", str(file), "--seed", str(seed), "--seeds", "1", *flags]
    done = subprocess.run(
        [sys.executable, "-m", "fullgraph", *command, "--eval-every", "5", "--json"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return {line["name"]: line["runs"][0] for line in found["recipes"]}


_LONG = ("losses", "curve", "drift")
"""What is left out of the result for its length."""


def accuracy(config: Mapping[str, Any], recipes: Mapping[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs of all seeds together."""
    configs = {name: TrainConfig(**{**config, **how}) for name, how in {EXACT: {}, **recipes}.items()}
    found = summarise(configs, {name: [run[name] for run in runs] for name in configs}, ranks=PARTS)
    for line in found["recipes"]:
        line["runs"] = [{key: run[key] for key in run if key not in _LONG} for run in line["runs"]]
    return found


def seconds(shards: Path, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of an epoch at full speed and over each shaped link, slowest rank, and how much of it is outside collectives."""
    interval, found = Refresh.parse(config.get("refresh", "always")).interval, {}
    period = interval if interval < STEADY else 1  # the row without rows has no refresh among its steady epochs
    with network(PARTS) as hosts:
        system = ours(
            name,
            shards,
            config,
            ranks=PARTS,
            hosts=PARTS,
            host=address(0),
            within=hosts.within,
            env={"GLOO_SOCKET_IFNAME": LINK},
        )
        with system:
            system.ready()
            system.run(2)
            for link, megabits in {"unshaped": None, **LINKS}.items():
                hosts.shape(megabits)
                system.run(2)  # the bucket is empty, and no rows of a faster link are on their way, when it counts
                epochs = system.run(STEADY)
                outside = [max(r["seconds"] - r["comm_seconds"] for r in epoch["ranks"]) for epoch in epochs]
                found[link] = {
                    "seconds": typical({at: epoch["seconds"] for at, epoch in enumerate(epochs)}, period),
                    "compute_seconds": typical(dict(enumerate(outside)), period),
                    "epochs": [epoch["seconds"] for epoch in epochs],
                }
    return found


def main(options: Options) -> int:
    if unknown := set(options.graphs) - set(GRAPHS):
        raise ValueError(f"--graphs: {', '.join(sorted(unknown))}; expected some of {', '.join(GRAPHS)}")
    reason, facts, found = why_not(), machine(), []
    graphs = {name: GRAPHS[name] for name in options.graphs}
    seeds = 10 if options.full else options.seeds
    if options.quick:
        tiny = {"model": "gcn", "hidden": 16, "epochs": 2}
        graphs, seeds = {"communities": ("demo:communities?nodes=2000", tiny, ("pipelined",))}, 1
    if options.full:
        graphs = {name: (spec, {**config, "epochs": 200}, SMALL) for name, (spec, config, _) in graphs.items()}
    with work_folder(options.work) as work:
        keeper = Pieces(work, options.pieces)
        for name, (spec, config, chosen) in graphs.items():
            recipes = {recipe: RECIPES[recipe] for recipe in chosen}
            timed = {EXACT: {}, ALONE: _ALONE} | {recipe: RECIPES[recipe] for recipe in chosen if recipe in LARGE}
            shards = work / name.replace(" ", "-").replace("/", "-")
            if not shards.exists():
                prepare(spec if spec.startswith("demo:") else str(options.data / spec), shards)
            line: dict[str, Any] = {"graph": name, "config": config, "seconds": {}}
            runs = [
                keeper.piece(
                    f"{shards.name}.seed {seed}",
                    {"config": config, "recipes": recipes},
                    functools.partial(trained, shards, config, recipes, seed),
                    wanted=options.only != "seconds",
                )
                for seed in range(1, seeds + 1)
            ]
            for recipe, how in timed.items() if reason is None else ():
                one = {**config, **how}
                piece = keeper.piece(
                    f"{shards.name}.{recipe}",
                    {"config": one},
                    functools.partial(seconds, shards, recipe, one),
                    wanted=options.only != "accuracy",
                )
                if piece is not None:
                    line["seconds"][recipe] = piece
            if None in runs:
                keeper.missing.append(f"accuracy on {name}")
            else:
                found.append(line | {"accuracy": accuracy(config, recipes, runs)})
                if reason is not None:
                    found[-1]["seconds"] = {each["name"]: _predicted(each) for each in found[-1]["accuracy"]["recipes"]}
    if keeper.missing:
        say(f"still to do: {', '.join(keeper.missing)}")
        return 0
    how = "measured, each rank in a network namespace" if reason is None else f"predicted: {reason}"
    text = f"# Exchange policies against the exact run\n\n{machine_line(facts)}\n\n"
    text += f"{PARTS} ranks, {seeds} paired seeds on one split. Seconds over links are {how}.\n\n## Accuracy\n\n"
    text += table(_ACCURACY, [row for line in found for row in _accuracy_rows(line)])
    text += "\n\n## Time\n\n" + table(_TIME, [row for line in found for row in _time_rows(line)])
    options_of = (f"- {line['graph']}: {', '.join(f'{k} {v}' for k, v in line['config'].items())}" for line in found)
    text += "\n\nOptions:\n\n" + "\n".join(options_of) + f"\n\n{_NOTE}"
    text += f"\n\n{options.note}" if options.note else ""
    deliver("policies", text, {"machine": facts, "results": found}, as_json=options.json, save=options.save)
    return 0


class Pieces:
    """Finished pieces as files, each with what it was made from."""

    def __init__(self, folder: Path, most: int | None) -> None:
        self._folder, self._left = folder, most
        self.missing: list[str] = []

    def piece(self, name: str, made_from: Mapping[str, Any], do: Callable[[], Any], *, wanted: bool) -> Any:
        """The one of that name, done now where it is not there; None where it is not wanted or left for later."""
        path = self._folder / f"{name.replace(' ', '-').replace(':', '-')}.json"
        key = json.loads(json.dumps(made_from))
        if path.exists() and (kept := json.loads(path.read_text()))["from"] == key:
            return kept["found"]
        if not wanted:
            return None
        if self._left == 0:
            self.missing.append(name)
            return None
        self._left = None if self._left is None else self._left - 1
        say(name)
        found = do()
        path.write_text(json.dumps({"from": key, "found": found}))
        return found


_ACCURACY = ("graph, recipe", "accuracy %", "against exact", "MB an epoch", "epochs to target", "drift by layer")
_TIME = (
    "graph, recipe",
    "compute s",
    "unshaped s",
    *(f"{link} s" for link in LINKS),
    "over compute alone, 1gbit",
    *(f"to target, {link} s" for link in LINKS),
)
_NOTE = """Accuracy: test, at the epoch best by validation; against exact: mean of the paired differences in points,
with its 95 % interval by Student's t. A policy is known to lose at most 0.3 points where the whole interval lies
above -0.3. Epochs to target: mean over the seeds until validation first reaches 99 % of the exact run's best. Compute:
the slowest rank's seconds outside collectives, unshaped. Compute alone: an unshaped epoch of the row `no rows`, which
does the work of a pipelined step and the gradient sum, and sends no rows. Seconds are medians of steady epochs (of
every:2, the mean of those of its two kinds of epoch)."""


def _toml(options: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())


def _accuracy_rows(graph: Mapping[str, Any]) -> list[Sequence[object]]:
    rows = []
    for line in graph["accuracy"]["recipes"]:
        half, epochs = line["difference_interval"], line["epochs_to_target"]
        rows.append(
            (
                f"{graph['graph']}, {line['name']}",
                f"{100 * line['score']:.2f}",
                f"{100 * line['difference']:+.2f}" + ("" if half is None else f" ± {100 * half:.2f}"),
                f"{line['bytes'] / 1e6:.3g}",
                "not reached" if epochs is None else f"{epochs:.0f}",
                ", ".join(f"{layer['relative_error']:.2g}" for layer in line["drift"]),
            )
        )
    return rows


def _time_rows(graph: Mapping[str, Any]) -> list[Sequence[object]]:
    rows = []
    recipes = {line["name"]: line for line in graph["accuracy"]["recipes"]}
    alone = graph["seconds"].get(ALONE)
    for name, found in graph["seconds"].items():
        epochs = recipes.get(name, {}).get("epochs_to_target")
        over = [found[link]["seconds"] for link in LINKS]
        rows.append(
            (
                f"{graph['graph']}, {name}",
                f"{found['unshaped']['compute_seconds']:.3f}",
                f"{found['unshaped']['seconds']:.3f}",
                *(f"{each:.3f}" for each in over),
                "" if alone is None else f"{over[0] / alone['unshaped']['seconds']:.2f}",
                *("" if epochs is None else f"{epochs * each:.1f}" for each in over),
            )
        )
    return rows


def _predicted(line: Mapping[str, Any]) -> dict[str, Any]:
    """What the runs over loopback say of other links."""
    pipelined = line["changes"].get("refresh") == "pipelined"
    found = {"unshaped": {"seconds": line["seconds"], "compute_seconds": line["compute_seconds"]}}
    for name in LINKS:
        run, link = line["runs"][0], Link.parse(f"{name},0.2ms")
        found[name] = {"seconds": link_seconds(run, link, PARTS, pipelined=pipelined)[0]}
    return found


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options)))
