"""The command line: ``partition-tools build | verify | report | formats``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from partition_tools import report as reports
from partition_tools import sources
from partition_tools.assign import AssignOptions, assign
from partition_tools.builder import build, check_target
from partition_tools.metis import MetisError
from partition_tools.prepare import check, parse_fractions, random_split
from partition_tools.summary import render, summarise
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
    force: bool = False
    """Replace the build that is in DIR."""

    def run(self) -> int:
        fractions = parse_fractions(self.random_split or DEFAULT_SPLIT)
        check_target(self.out, force=self.force)
        graph = sources.load(self.graph, self.load)
        if self.random_split is not None or (graph.splits is None and graph.labelled.any()):
            graph = random_split(graph, fractions, self.options.seed)
        check(graph)
        summary = summarise(graph)
        console = _console()
        console.print(render(summary))
        with _line(f"partitioning into {self.options.parts} parts by {self.options.method}"):
            assignment = assign(graph, self.options)
        for note in assignment.notes:
            console.print(f"note: {note}")
        with _line("writing shards") as say:
            manifest = build(
                graph,
                assignment,
                self.out,
                summary=summary,
                force=self.force,
                progress=lambda done, parts: say(f"writing shards: {done} of {parts}"),
            )
        size = sum(file.bytes for file in manifest.files)
        console.print(f"wrote {manifest.parts} shards to {self.out}: {size / 1e6:,.1f} MB, build {manifest.build_id}")
        console.print(f"next: fullgraph train {self.out}, or partition-tools report {self.out}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check that a folder of shards is whole and equals the graph it was built from; exit code 1 if not."""

    folder: Annotated[Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Folder of shards."""

    def run(self) -> int:
        with _line(f"reading {self.folder}"):
            faults = verify(self.folder)
        for fault in faults:
            _console().print(str(fault))
        if faults:
            _console().print(f"{self.folder}: {len(faults)} fault{'s' if len(faults) > 1 else ''}")
            return 1
        _console().print(f"{self.folder}: whole: every node, edge and value is where it was built")
        return 0


@dataclass(frozen=True, kw_only=True)
class Report:
    """Show what partitionings cost, side by side."""

    folders: Folders
    """Folders of shards."""
    json: bool = False
    """A JSON list with one object a folder."""
    csv: bool = False
    """A header and one line a folder."""
    width: int = reports.WIDTH
    """Columns of a feature row, for bytes a layer."""

    def __post_init__(self) -> None:
        if not self.folders:
            raise ValueError("report: name at least one folder of shards")
        if self.json and self.csv:
            raise ValueError("report: --json and --csv exclude each other")
        if self.width < 1:
            raise ValueError(f"--width {self.width}: expected at least 1")

    def run(self) -> int:
        found = [reports.report(folder) for folder in self.folders]
        if self.json:
            print(reports.to_json(found, width=self.width))
        elif self.csv:
            print(reports.to_csv(found, width=self.width), end="")
        else:
            reports.show(found, _console(), width=self.width)
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


COMMANDS: dict[str, Callable[..., Any]] = {"build": Build, "verify": Verify, "report": Report, "formats": Formats}


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
