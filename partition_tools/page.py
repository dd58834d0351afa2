"""A report as one page for a browser: it needs no network, no script and no other file.

The page is made by jinja2, which escapes everything that is put into it; only the figures of `partition_tools.plots`
go in as they are. matplotlib and jinja2 come with the extra ``report``.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from fullgraph.files import appears_by_rename
from partition_tools.costs import (
    GLOSSARY,
    TEXTS,
    Winner,
    best,
    labels,
    megabytes,
    printable,
    remarks,
    same_graph,
    seconds,
    shortened,
    shown,
)
from partition_tools.forms import stated
from partition_tools.report import Question, Report

_NEEDS = ("matplotlib", "jinja2")


def check_page(path: Path) -> None:
    """Raise ``ValueError`` where a page cannot be made, or not be written to ``path``."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"--html needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"--html {path}: {what}; expected the name of a file to write")


def write_page(
    path: Path, reports: Sequence[Report], question: Question, winners: Sequence[Winner] | None = None
) -> None:
    """Write the page; it appears whole or not at all."""
    check_page(path)
    text = page(reports, question, winners)
    with appears_by_rename(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def page(reports: Sequence[Report], question: Question, winners: Sequence[Winner] | None = None) -> str:
    """The page's text."""
    import jinja2
    from markupsafe import Markup

    numbers = itertools.count()

    def inline(svg: str) -> Markup:
        """An element whose ids no other one on the page has."""
        number = next(numbers)
        return Markup(re.sub(r'( id="|url\(#|href="#)', rf"\g<1>f{number}-", svg))

    from partition_tools import plots

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("partition_tools"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"printable": printable, "megabytes": megabytes, "seconds": seconds, "shortened": shortened}
    names = labels(reports)
    sections = [
        {
            "report": report,
            "label": label,
            "bars": inline(plots.part_bars(report)),
            "rows": inline(plots.rows_matrix(report.rows)) if report.parts > 1 else None,
            "cover": inline(plots.rows_matrix(report.cover)) if report.parts > 1 else None,
        }
        for report, label in zip(reports, names, strict=True)
        if not report.yardstick
    ]
    return environment.get_template("report.html").render(
        title=_title(reports),
        reports=reports,
        labels=names,
        label_of={report.folder: label for report, label in zip(reports, names, strict=True)},
        remarks=remarks(reports),
        sections=sections,
        time_split=inline(plots.time_split(reports)),
        table=[(figure, best(figure, reports)) for figure in shown(reports)],
        winners=winners,
        same_graph=same_graph(reports),
        stated=stated(question),
        glossary=GLOSSARY,
        texts=TEXTS,
        most_values=plots.MOST_VALUES,
        parts_across=plots.PARTS_ACROSS,
    )


def _title(reports: Sequence[Report]) -> str:
    names = dict.fromkeys(printable(report.name) for report in reports)
    return f"Partitionings of {', '.join(names)}"
