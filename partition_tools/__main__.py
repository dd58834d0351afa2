"""The command line: ``partition-tools build | verify | report | compare | estimate | formats``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from fullgraph.cost import Machine
from fullgraph.wording import counted
from partition_tools import estimate as estimates
from partition_tools import forms, probe, sources
from partition_tools import report as reports
from partition_tools.assign import Assignment, AssignOptions, assign
from partition_tools.builder import build, check_target
from partition_tools.costs import MOST_COMPARED, Winner, check_comparable, winners
from partition_tools.estimate import assign_seconds
from partition_tools.memory import peak_memory, require_memory
from partition_tools.metis import MetisError
from partition_tools.page import check_page, write_page
from partition_tools.prepare import check_masks, parse_fractions, random_split
from partition_tools.progress import Stages
from partition_tools.report import Question
from partition_tools.runs import read_run, stated_model
from partition_tools.summary import Summary, render, summarise, warnings
from partition_tools.verify import verify

DEFAULT_SPLIT = "0.6/0.2/0.2"

Folders = Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="DIR [DIR ...]")]


@dataclass(frozen=True, kw_only=True)
class Build:
    """Partition a graph and write one shard a part."""

    graph: Annotated[Positional[str], tyro.conf.arg(metavar="GRAPH")]
    """Graph file or folder, or demo:NAME; `partition-tools formats` lists what is read."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder to write; it appears when the build is complete."""
    options: Annotated[AssignOptions, tyro.conf.arg(name="")]
    load: Annotated[sources.LoadOptions, tyro.conf.arg(name="")]
    random_split: Annotated[str | None, tyro.conf.arg(metavar="TRAIN/VAL/TEST")] = None
    """Split the labelled nodes at random by --seed, class by class, instead of taking the graph's own splits; a graph
    without any is split 0.6/0.2/0.2."""
    probe: bool = False
    """For best and --balance cost: measure this machine's --bandwidth, --latency, --flops and --gather."""
    force: bool = False
    """Replace the build that is in DIR."""
    memory_check: bool = True
    """Refuse a build that needs more memory than is free."""

    def run(self) -> int:
        fractions = parse_fractions(self.random_split or DEFAULT_SPLIT)
        if self.probe:
            dataclasses.replace(self.options, bandwidth=1.0)  # refused before any work where it has no effect
        check_target(self.out, force=self.force)
        stages, console = Stages(), _console()
        with stages.stage(f"reading {self.graph}"):
            graph = sources.load(self.graph, self.load)
        if self.random_split is not None or (graph.splits is None and graph.labelled.any()):
            graph = random_split(graph, fractions, self.options.seed)
        memory = require_memory(graph, self.options, refuse=self.memory_check)
        with stages.stage("looking over the graph"):
            check_masks(graph)
            summary = summarise(graph)
        console.print(render(summary))
        console.print(memory)
        for warning in warnings(summary):
            console.print(f"warning: {warning}")
        options = self.options
        if self.probe:
            with stages.stage("measuring this machine"):
                found = dataclasses.asdict(probe.measured())
                stated = {field.name for field in dataclasses.fields(options)}
                options = dataclasses.replace(options, **{k: v for k, v in found.items() if k in stated})
        partitioning = f"partitioning into {self.options.parts} parts by {self.options.method}"
        with stages.stage(partitioning, expected=assign_seconds(graph, self.options)):
            assignment = assign(graph, options)
        for note in assignment.notes:
            console.print(f"note: {note}")
        if len(assignment.table) > 1:
            console.print(_candidates(assignment))
        with stages.stage("writing shards") as report:
            manifest = build(
                graph,
                assignment,
                self.out,
                summary=summary,
                force=self.force,
                progress=report,
            )
        size = sum(file.bytes for file in manifest.files)
        shards = counted(manifest.parts, "shard")
        console.print(
            f"wrote {shards} to {self.out}: {size / 1e6:,.1f} MB, build {manifest.build_id}, peak memory "
            f"{peak_memory() / 2**20:,.0f} MiB"
        )
        console.print(_next(summary, self.out))
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check that the files of a folder of shards are as they were written, or with --deep that they are the graph that
    they were built from; exit code 1 if not."""

    folder: Annotated[Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Folder of shards."""
    deep: bool = False
    """Look into every dataset, too: every node and edge stored once and in its place, and every value as in the source
    graph, by sums that were taken when it was read."""

    def run(self) -> int:
        with _line(f"reading {self.folder}"):
            faults = verify(self.folder, deep=self.deep)
        for fault in faults:
            _console().print(str(fault))
        if faults:
            _console().print(f"{self.folder}: {len(faults)} fault{'s' if len(faults) > 1 else ''}")
            return 1
        whole = "node, edge and value is where it was built" if self.deep else "file is as it was written"
        _console().print(f"{self.folder}: whole: every {whole}")
        return 0


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What `report` and `compare` have in common."""

    folders: Folders
    """Folders of shards."""
    model: Literal["gcn", "sage", "gin", "gat"] | None = None
    """Model that the costs are predicted for; by default that of --run, else sage."""
    layers: int | None = None
    """Its layers; by default those of --run, else 2."""
    hidden: int | None = None
    """Width of its hidden layers; by default that of --run, else 128."""
    machine: Annotated[Machine, tyro.conf.arg(name="")] = field(default_factory=Machine)
    run_folders: Annotated[tuple[Path, ...], tyro.conf.arg(name="run", metavar="RUN [RUN ...]")] = ()
    """Run folders of fullgraph train on these shards: what they measured is put beside what is predicted."""
    yardsticks: bool = False
    """Put a random and a contiguous partitioning of the same graph beside them."""
    json: bool = False
    """Print one JSON object (partition_tools/forms.py says what is in it)."""
    csv: bool = False
    """Print a header and one line a folder."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write one page for a browser, with figures; needs matplotlib and jinja2."""

    def __post_init__(self) -> None:
        if self.json and self.csv:
            raise ValueError("--json and --csv exclude each other")

    def question(self) -> Question:
        """What is asked, after every check that needs no shard."""
        if self.html is not None:
            check_page(self.html)
        runs = tuple(read_run(folder) for folder in self.run_folders)
        given = {name: getattr(self, name) for name in ("model", "layers", "hidden")}
        config = stated_model({name: value for name, value in given.items() if value is not None}, runs)
        return Question(config=config, machine=self.machine, runs=runs, yardsticks=self.yardsticks)

    def put_out(self, found: Sequence[reports.Report], question: Question, won: Sequence[Winner] | None = None) -> None:
        if self.html is not None:
            write_page(self.html, found, question, won)
        if self.json:
            print(forms.to_json(found, question, won))
        elif self.csv:
            print(forms.to_csv(found), end="")
        else:
            forms.show(found, question, _console(), won)
            if self.html is not None:
                print(f"wrote {self.html}")


@dataclass(frozen=True, kw_only=True)
class Report(_Asked):
    """Show what partitionings cost, side by side."""

    def run(self) -> int:
        if not self.folders:
            raise ValueError("report: name at least one folder of shards")
        question = self.question()
        with _line("counting"):
            found = reports.report(self.folders, question)
        self.put_out(found, question)
        return 0


@dataclass(frozen=True, kw_only=True)
class Compare(_Asked):
    """Line up 2 to 8 partitionings of one graph, and name the winner of each cost and by how much."""

    def run(self) -> int:
        if not 2 <= len(self.folders) <= MOST_COMPARED:
            raise ValueError(f"compare: {len(self.folders)} folders; expected 2 to {MOST_COMPARED} folders of shards")
        check_comparable(self.folders)
        question = self.question()
        with _line("counting"):
            found = reports.report(self.folders, question)
        self.put_out(found, question, winners(found))
        return 0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Tell time and memory of a build and of each rank's training, before either; nothing is written."""

    graph: Annotated[Positional[str], tyro.conf.arg(metavar="GRAPH")]
    """Graph file or folder, or demo:NAME."""
    parts: int
    """Number of parts."""
    load: Annotated[sources.LoadOptions, tyro.conf.arg(name="")]
    method: str = AssignOptions.method
    """Who assigns the nodes: a --method of build."""
    seed: int = AssignOptions.seed
    """Its seed."""
    model: Literal["gcn", "sage", "gin", "gat"] = "sage"
    """Model to be trained."""
    layers: int = 2
    """Its layers."""
    hidden: int = 128
    """Width of its hidden layers."""
    norm: Literal["none", "layer", "batch"] = "none"
    """Its normalisation; batch keeps every node."""
    machine: Annotated[Machine, tyro.conf.arg(name="")] = field(default_factory=Machine)
    probe: bool = False
    """Measure this machine, with as many ranks, in place of its --flops, --gather, --bandwidth and so on."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        if self.probe and self.machine != Machine():
            raise ValueError("--probe measures the machine, so --flops, --gather and the like have no effect beside it")
        given = {"model": self.model, "layers": self.layers, "hidden": self.hidden, "norm": self.norm}
        config, stages, console = stated_model(given, ()), Stages(), _console()
        decides: dict[str, Any] = (
            {} if self.method != "best" else {"model": self.model, "layers": self.layers, "hidden": self.hidden}
        )
        options = AssignOptions(parts=self.parts, method=self.method, seed=self.seed, **decides)
        with stages.stage(f"reading {self.graph}"):
            graph = sources.load(self.graph, self.load)
        if graph.splits is None and graph.labelled.any():
            graph = random_split(graph, parse_fractions(DEFAULT_SPLIT), self.seed)
        memory = require_memory(graph, options)
        with stages.stage("looking over the graph"):
            summary = summarise(graph)
        partitioning = f"partitioning into {self.parts} parts by {self.method}"
        with stages.stage(partitioning, expected=assign_seconds(graph, options)):
            assignment = assign(graph, options)
        machine = self.machine
        if self.probe:
            with stages.stage("measuring this machine"):
                machine = probe.measured(self.parts)
        with stages.stage("counting"):
            found = estimates.estimate(graph, summary, assignment, options, config, machine)
        if self.json:
            print(estimates.to_json(found, stages.seconds[partitioning]))
            return 0
        console.print(f"build: {memory}")
        estimates.show(found, stages.seconds[partitioning], config, console)
        return 0


@dataclass(frozen=True, kw_only=True)
class Formats:
    """List the graph formats that can be read."""

    def run(self) -> int:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, description in sources.formats():
            table.add_row(Text(name), Text(description))
        _console().print(table)
        return 0


COMMANDS: dict[str, Callable[..., Any]] = {
    "build": Build,
    "verify": Verify,
    "report": Report,
    "compare": Compare,
    "estimate": Estimate,
    "formats": Formats,
}


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            args=arguments,
            prog="partition-tools",
            description="Partition a graph for full-graph training: one HDF5 shard a part, and what the cut costs.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        code: int = command.run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, a pager or head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, MetisError, MemoryError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"partition-tools: error: {text}", file=sys.stderr)
        return 2
    return code


def _next(summary: Summary, out: Path) -> str:
    """What to do with a build."""
    has = {
        "features (--features)": summary.num_features or summary.learned_features,
        "labels (--labels)": summary.num_labelled,
        "training nodes (--splits or --random-split)": any(count.train for count in summary.split_counts),
    }
    missing = [name for name, there in has.items() if not there]
    if missing:
        return f"next: partition-tools report {out}; to train on it, build it with {', '.join(missing)}"
    return f"next: fullgraph train {out}, or partition-tools report {out}"


_COLUMNS = {
    "name": "partition",
    "scheme": "scheme",
    "seed": "seed",
    "cut": "cut",
    "halo_rows": "halo",
    "rows": "rows",
    "max_rows": "most",
    "step_seconds": "step s",
    "imbalance": "over",
    "rounds": "rounds",
    "kept": "kept",
}


def _candidates(assignment: Assignment) -> Table:
    """Every partition that was tried, and which was kept; all of it is in the manifest."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    names = [name for name in _COLUMNS if hasattr(assignment.table[0], name)]
    for name in names:
        table.add_column(_COLUMNS[name], justify="left" if name in ("name", "scheme") else "right", no_wrap=True)
    for row in assignment.table:
        table.add_row(*(_cell(getattr(row, name)) for name in names))
    return table


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _console() -> Console:
    return Console(soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False)


@contextlib.contextmanager
def _line(text: str) -> Iterator[Callable[[str], None]]:
    """One line of progress on a terminal's stderr while the block runs; yields a function that changes it."""
    console = Console(stderr=True, highlight=False, markup=False)
    with console.status(text) as status:
        yield status.update


if __name__ == "__main__":
    sys.exit(main())
