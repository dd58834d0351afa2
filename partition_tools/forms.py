"""Forms of a report for terminals and programs. A page for browsers is made by `partition_tools.page`.

This docstring is the contract of version 1 of the JSON form: one object, with

- ``format`` = "partition-tools report" and ``format_version`` = 1;
- ``model``: model, layers, hidden, out_heads, norm, plan, prune, layer0, input_dropout, dtype and split as asked about;
- ``machine``: flops, gather, bandwidth, latency, elements and overhead of a rank, as asked about;
- ``partitionings``: one object a folder in the order given, then the yardsticks; its keys are the fields of
  `partition_tools.report.Report`, those of ``layers`` and ``per_part`` of `LayerReport` and `PartReport` there, those
  of ``measured`` of `partition_tools.runs.Measured`;
- ``winners``, where ``compare`` was asked: the fields of `partition_tools.costs.Winner`, without the texts.

All numbers are counts, bytes, seconds or ratios, never rounded. A key MUST NOT change its meaning within a version;
a reader MUST ignore keys that it does not know.

The CSV form has a header and one line a folder: the keys of `partition_tools.costs.FIGURES` after folder, graph_id and
build_id, empty where there is no value.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from partition_tools.costs import (
    FIGURES,
    GLOSSARY,
    TEXTS,
    Figure,
    Winner,
    best,
    labels,
    megabytes,
    printable,
    remarks,
    seconds,
    shown,
)
from partition_tools.report import Question, Report

FORMAT = "partition-tools report"
FORMAT_VERSION = 1
_NAME = 16  # characters of a partitioning's name that are not broken
_MODEL = (
    *("model", "layers", "hidden", "out_heads", "norm", "plan", "prune", "layer0", "input_dropout", "dtype", "split"),
)


def to_json(reports: Sequence[Report], question: Question, winners: Sequence[Winner] | None = None) -> str:
    content: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": {name: getattr(question.config, name) for name in _MODEL},
        "machine": asdict(question.machine),
        "partitionings": [asdict(report) for report in reports],
    }
    if winners is not None:
        content["winners"] = [
            {name: value for name, value in asdict(winner).items() if not name.endswith("text")} for winner in winners
        ]
    heads = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in content.items())
    return "{\n" + heads + "\n}"


def _lines(value: Any) -> str:
    """A line an item of a list."""
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)


def to_csv(reports: Sequence[Report]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["folder", "graph_id", "build_id", *(figure.key for figure in FIGURES)])
    for report in reports:
        values = [figure.value(report) for figure in FIGURES]
        writer.writerow(
            [report.folder, report.graph_id, report.build_id, *("" if value is None else value for value in values)]
        )
    return text.getvalue()


# ----------------------------------------------------------------------------------------------------------- terminal


def show(
    reports: Sequence[Report], question: Question, console: Console, winners: Sequence[Winner] | None = None
) -> None:
    """Print partitionings side by side, who wins each cost, each layer by layer and part by part, and what the words
    mean."""
    names = labels(reports)
    for columns in _columns_that_fit(reports, names, console.width):
        console.print(_side_by_side(reports, names, columns))
    if winners is not None:
        label_of = {report.folder: name for report, name in zip(reports, names, strict=True)}
        console.print(_winners(winners, label_of))
    notes = [f"{name}: {printable(note)}" for r, name in zip(reports, names, strict=True) for note in r.notes]
    for note in (*remarks(reports), *notes):
        console.print(Text(note), style="yellow", highlight=False)
    for line in stated(question):
        console.print(Text(line), highlight=False)
    for report, name in zip(reports, names, strict=True):
        if not report.yardstick:
            console.print(_layer_table(report, name))
            console.print(_part_table(report, name))
    for word, meaning in GLOSSARY:
        console.print(Text(f"{word}: {meaning}"), style="dim", highlight=False)


def stated(question: Question) -> list[str]:
    """What the predictions stand for."""
    c, m = question.config, question.machine
    model = [f"{c.model}, {c.layers} layer{'s' if c.layers > 1 else ''}, hidden width {c.hidden}, {c.dtype}"]
    model += [f"{c.norm} norm"] if c.norm != "none" else []
    model += ["halo rows"] if c.plan == "halo" and c.model != "gat" else []
    model += ["not pruned"] if not c.prune else []
    return [
        f"predicted for {', '.join(model)}",
        f"on ranks of {_round(m.flops / 1e9)} Gflop/s and {_round(m.gather / 1e9)} GB/s of gathered rows, joined by "
        f"{_round(m.bandwidth / 1e9)} GB/s and {_round(m.latency * 1e3)} ms",
    ]


def _round(value: float) -> str:
    return f"{value:,.4g}" if math.isfinite(value) else str(value)


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, name in enumerate(names):
        # A number is never cut short, and a line's name never broken.
        table.add_column(Text(name), justify="right" if i else "left", overflow="fold", no_wrap=i == 0)
    return table


def _columns_that_fit(reports: Sequence[Report], names: Sequence[str], width: int) -> list[list[int]]:
    """Partitionings by table, so that no number is broken: as many as fit the width, and at least one."""
    figures = shown(reports)
    left = max(len(figure.label) + 2 * figure.part_of for figure in figures)
    numbers = [figure for figure in figures if figure.key not in TEXTS]
    tables: list[list[int]] = [[]]
    used = left
    for i, report in enumerate(reports):
        column = 2 + max(len(figure.text(report)) for figure in numbers)
        column = max(column, 1 + min(len(names[i]), _NAME))
        if tables[-1] and used + column > width:
            tables.append([])
            used = left
        tables[-1].append(i)
        used += column
    return tables


def _side_by_side(reports: Sequence[Report], names: Sequence[str], columns: Sequence[int]) -> Table:
    table = _table("Partitionings", ["", *(names[i] for i in columns)])
    for figure in shown(reports):
        least = best(figure, reports)
        table.add_row(
            Text(("  " if figure.part_of else "") + figure.label),
            *(_value(figure, reports[i], i in least) for i in columns),
        )
    return table


def _value(figure: Figure, report: Report, best: bool) -> Text:
    text = printable(figure.text(report))
    return Text(f"{text}*", style="bold") if best else Text(text + " " * figure.cost)


def _winners(winners: Sequence[Winner], label_of: Mapping[str, str]) -> Table:
    table = _table("Least of each cost (*)", ["", "winner", "value", "next", "less by"])
    for winner in winners:
        names = ", ".join(label_of[folder] for folder in winner.winners) if winner.runner_up else "all equal"
        saved = f"{100 * winner.saved:.1f} %" if winner.runner_up else ""
        table.add_row(*map(Text, (winner.label, names, winner.text, winner.runner_up_text, saved)))
    return table


def _layer_table(report: Report, label: str) -> Table:
    names = ["layer", "nodes", "halo", "most", "cover", "most", "sent", "width", "MB", "s"]
    table = _table(f"{label}: layer by layer", names)
    for layer in report.layers:
        counts = (layer.nodes, layer.halo_rows, layer.max_halo_rows, layer.cover_rows, layer.max_cover_rows)
        time = layer.compute_seconds + layer.exchange_seconds
        table.add_row(
            str(layer.layer),
            *(f"{count:,}" for count in (*counts, layer.rows_sent, layer.width)),
            megabytes(layer.bytes),
            seconds(time),
        )
    return table


def _part_table(report: Report, label: str) -> Table:
    names = ["part", "nodes", "edges", "halo", "sent", "cover", "peers", "train", "val", "test", "MB"]
    table = _table(f"{label}: part by part", names)
    for part in report.per_part:
        work = (part.nodes, part.edges, part.halo_rows, part.rows_sent, part.cover_rows, part.neighbours)
        counts = (*work, part.train, part.val, part.test)
        table.add_row(str(part.part), *(f"{count:,}" for count in counts), f"{part.bytes / 1e6:,.2f}")
    return table
