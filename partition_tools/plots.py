"""Figures of a report as SVG for a page: drawn by matplotlib, in colours that the page's style sheet gives.

Only numbers and fixed words are drawn, and names as plain text. Every figure is as wide as a phone shows.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from partition_tools.costs import labels, shortened
from partition_tools.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_VALUES = 32
"""Parts up to which the matrix of rows has a number in each cell."""
_WIDTH = 4.4  # inches
PARTS_ACROSS = 8
"""Parts up to which the matrix of rows fits a phone's width."""

_MANY = (0.85, 0.54, 0.2)  # of cells too many to be drawn one by one: a colour for both grounds

# A colour that stands for each name of the style sheet.
_INKS = {
    name: f"#0e01{i:02x}"
    for i, name in enumerate(
        ("ink", "faint", "ground", "owned", "halo", "edges", "train", "val", "test", "compute", "exchange", "heat")
    )
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.family": "sans-serif",
    "font.size": 9.2,
    "text.parse_math": False,
    "text.color": _INKS["ink"],
    "axes.edgecolor": _INKS["faint"],
    "axes.labelcolor": _INKS["ink"],
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INKS["ink"],
    "ytick.color": _INKS["ink"],
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
}


def part_bars(report: Report) -> str:
    """Part by part: nodes owned and halo, edges, and labelled nodes of each mask."""
    rows: list[tuple[str, list[tuple[str, list[int]]]]] = [
        ("nodes", [("owned", [p.nodes for p in report.per_part]), ("halo", [p.halo_rows for p in report.per_part])]),
        ("edges", [("edges", [p.edges for p in report.per_part])]),
    ]
    masks = [(name, [getattr(p, name) for p in report.per_part]) for name in ("train", "val", "test")]
    if any(any(values) for _, values in masks):
        rows.append(("labels", masks))
    with _figure(len(rows) * 1.35, len(rows)) as (figure, axes):
        at = np.arange(report.parts)
        for axis, (title, stacks) in zip(axes, rows, strict=True):
            bottom = np.zeros(report.parts)
            for name, values in stacks:
                axis.bar(at, values, 0.8, bottom, color=_INKS[name], label=name)
                bottom += values
            axis.set_title(title)
            axis.yaxis.set_major_formatter(lambda value, _: short(value))
            axis.locator_params(axis="y", nbins=4)
            axis.set_xticks(at if report.parts <= 16 else at[:: -(-report.parts // 16)])
            if len(stacks) > 1:
                axis.legend(loc="lower right", bbox_to_anchor=(1.02, 0.98), ncol=3, handlelength=1, columnspacing=1)
        axes[-1].set_xlabel("part")
        return _svg(figure)


def rows_matrix(rows: Sequence[Sequence[int]]) -> str:
    """[P][P] rows that each part sends each other, as a heat map with the values."""
    matrix = np.asarray(rows, np.int64)
    parts = matrix.shape[0]
    side = _WIDTH * max(1.0, min(parts, MOST_VALUES) / PARTS_ACROSS)
    with _figure(side * (0.72 if parts < 4 else 0.9), 1, width=side) as (figure, (axis,)):
        # Shares are opacities, not colours: so that they stand on a light ground and on a dark one.
        share = 0.06 + 0.94 * matrix / max(1, int(matrix.max()))
        if parts <= MOST_VALUES:
            for p, q in itertools.product(range(parts), repeat=2):
                axis.add_patch(_cell(q, p, share[p, q]))
                text = "·" if p == q else short(int(matrix[p, q]))
                axis.text(q, p, text, ha="center", va="center", color=_INKS["ink"])
        else:
            image = np.empty((parts, parts, 4))
            image[...] = (*_MANY, 1.0)
            image[..., 3] = share
            axis.imshow(image, interpolation="nearest", aspect="auto")
        axis.set(xlim=(-0.5, parts - 0.5), ylim=(parts - 0.5, -0.5), xlabel="to part", ylabel="from part")
        ticks = np.arange(parts) if parts <= MOST_VALUES else np.arange(0, parts, -(-parts // 16))
        axis.set_xticks(ticks)
        axis.set_yticks(ticks)
        axis.tick_params(length=0)
        return _svg(figure, large=parts > PARTS_ACROSS)


def _cell(x: int, y: int, share: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, facecolor=_INKS["heat"], alpha=share, linewidth=0)


def time_split(reports: Sequence[Report]) -> str:
    """Predicted seconds of a step, layer by layer: computing, then exchanging; with what a run measured."""
    with _figure(0.55 + 0.52 * len(reports), 1) as (figure, (axis,)):
        for y, (report, label) in enumerate(zip(reports, labels(reports), strict=True)):
            left = 0.0
            for layer in report.layers:
                for name, value in (("compute", layer.compute_seconds), ("exchange", layer.exchange_seconds)):
                    key = name if y == layer.layer == 0 else None
                    axis.barh(y, value, 0.42, left, color=_INKS[name], edgecolor=_INKS["ground"], label=key)
                    left += value
            axis.text(0, y - 0.27, shortened(label), va="bottom", ha="left")
            if report.measured:
                here = report.measured.seconds_per_epoch
                axis.plot([here], [y], "D", color=_INKS["ink"], markersize=5)
        axis.set(ylim=(len(reports) - 0.6, -0.75), yticks=[], xlabel="seconds an epoch", xlim=(0, None))
        axis.spines["left"].set_visible(False)
        axis.locator_params(axis="x", nbins=5)
        axis.legend(loc="lower right", bbox_to_anchor=(1.02, 0.97), ncol=2, handlelength=1, columnspacing=1)
        return _svg(figure)


def short(value: float) -> str:
    """A count in at most four characters or so: 950, 12.3k, 4.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * (10 if unit == "k" else 1):
            return f"{value / size:.3g}{unit}"
    return f"{value:.6g}"


@contextmanager
def _figure(height: float, rows: int, width: float = _WIDTH) -> Iterator[tuple[Figure, list[Axes]]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, list(figure.subplots(rows, 1, squeeze=False)[:, 0])


def _svg(figure: Figure, *, large: bool = False) -> str:
    """The <svg> element, of class ``large`` where it is to keep its size; without what a page must not hold twice."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: found.group() if found[1] in used else "", text)
    for name, colour in _INKS.items():
        text = text.replace(colour, f"var(--{name})")
    return text.replace("<svg", '<svg class="large"', 1) if large else text
