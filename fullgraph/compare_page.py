"""A comparison as files: JSON, a figure (PNG) and a page for a browser. The last two need the extra ``report``."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fullgraph.compare import WORDS, table_of
from fullgraph.files import appears_by_rename
from fullgraph.metrics import LOWER_IS_BETTER
from fullgraph.runlog import plain

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Exchange recipes on {{ found.graph }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 76em; margin: 2em auto; padding: 0 1em; color: #222 }
.wide { overflow-x: auto } table { border-collapse: collapse }
td, th { padding: .3em .8em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
td:first-child, th:first-child { text-align: left } img { max-width: 100% } .note { color: #666 }
</style></head><body>
<h1>Exchange recipes on {{ found.graph }}</h1>
<p>{{ title }}. Evaluation is exact.</p>
<div class="wide"><table><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% for note in notes %}<p class="note">{{ note }}</p>
{% endfor %}
<div class="wide"><img alt="The same as bars and curves" src="data:image/png;base64,{{ figure }}"></div>
<h2>Recipes</h2>
<ul>{% for line in found.recipes %}<li>{{ line.name }}: {% if line.changes %}
{%- for name, value in line.changes.items() %}{{ name }} {{ value }}{{ ", " if not loop.last }}{% endfor %}
{%- else %}every row, every step, as it is{% endif %}; cache on rank 0:
{{ "%.3g" | format((line.cache_bytes or 0) / 1e6) }} MB</li>
{% endfor %}</ul>
</body></html>
"""


def check_extra() -> None:
    """``ValueError`` where what draws is not installed."""
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"--out needs {' and '.join(missing)}: pip install 'fullgraph[report]', or leave it out")


def make_folder(folder: Path) -> None:
    """``OSError`` where results could not be written, before they are there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with appears_by_rename(folder / "compare.json") as temporary:
            temporary.write_bytes(b"{}\n")
    except OSError as error:
        raise OSError(f"{folder} cannot be written to ({error.strerror}); name another folder with --out") from None


def write_comparison(found: dict[str, Any], folder: Path) -> None:
    """compare.json, compare.png and compare.html in ``folder``."""
    import jinja2

    figure = _figure(found)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    title, heads, rows, notes = table_of(found)
    page = environment.from_string(_PAGE).render(
        found=found, title=title, heads=heads, rows=rows, notes=notes, figure=base64.b64encode(figure).decode()
    )
    files = {"compare.json": json.dumps(plain(found), indent=1).encode() + b"\n", "compare.png": figure}
    for name, content in (files | {"compare.html": page.encode()}).items():
        with appears_by_rename(folder / name) as temporary:
            temporary.write_bytes(content)


def _figure(found: dict[str, Any]) -> bytes:
    """A row a recipe in each panel, the exact run on top; below to the right, validation over epochs (the mean over
    seeds) and the target."""
    from matplotlib.figure import Figure

    recipes, metric, link = found["recipes"], found["metric"], found["link"]
    names, places = [line["name"] for line in recipes], range(len(recipes))
    colours = [f"C{place % 10}" for place in places]
    figure = Figure(figsize=(15, 3 + 0.5 * len(recipes)), layout="constrained")
    panels = figure.subplot_mosaic([["score", "gap", "bytes", "drift"], ["seconds", "target", "curve", "curve"]])
    for name, panel in panels.items():
        if name != "curve":
            panel.set_yticks(places, names if name in ("score", "seconds") else [""] * len(names))
            panel.set_ylim(len(recipes) - 0.5, -0.5)
            panel.grid(axis="x", alpha=0.3)

    def dots(panel: Any, values: Sequence[float], halves: Sequence[float | None]) -> None:
        for place, value, half in zip(places, values, halves, strict=True):
            panel.errorbar([value], [place], xerr=[half or 0.0], fmt="o", capsize=3, color=colours[place])

    dots(panels["score"], [line["score"] for line in recipes], [line["score_interval"] for line in recipes])
    panels["score"].set_xlabel(f"{WORDS[found['scored_on']]} {metric}")
    scale, unit = (1.0, "") if metric in LOWER_IS_BETTER else (100.0, ", points")
    halves = [None if line["difference_interval"] is None else scale * line["difference_interval"] for line in recipes]
    panels["gap"].axvline(0.0, color="#888", linewidth=1)
    dots(panels["gap"], [scale * line["difference"] for line in recipes], halves)
    panels["gap"].set_xlabel(f"against exact, paired{unit}")
    panels["bytes"].barh(places, [line["bytes"] / 1e6 for line in recipes], color=colours)
    panels["bytes"].set_xlabel("MB of message rows an epoch")
    for place, line in zip(places, recipes, strict=True):
        errors = [layer["relative_error"] for layer in line["drift"]]
        panels["drift"].plot(errors, [place] * len(errors), "|", markersize=14, color=colours[place])
    panels["drift"].set_xlabel("relative error of the rows in use, a mark a layer")

    kinds = [("", "here")] if link is None else [("", "here"), ("link_", f"{link['name']}, predicted")]
    height = 0.8 / len(kinds)
    for kind, (prefix, what) in enumerate(kinds):
        at = [place + height * (kind - (len(kinds) - 1) / 2) for place in places]
        seconds = [line[f"{prefix}seconds"] for line in recipes]
        waited = [line[f"{prefix}exposed_seconds"] for line in recipes]
        style: dict[str, Any] = {"height": 0.9 * height, "alpha": 1.0 if kind == 0 else 0.55}
        panels["seconds"].barh(at, seconds, color="C0", label=what, **style)
        panels["seconds"].barh(
            at, waited, left=[s - w for s, w in zip(seconds, waited, strict=True)], color="C1", **style
        )
        panels["target"].barh(at, [line[f"{prefix}seconds_to_target"] or 0.0 for line in recipes], color="C0", **style)
    panels["seconds"].set_xlabel("seconds an epoch; orange: waited for ranks")
    panels["target"].set_xlabel("seconds to the target")
    if link is not None:
        panels["seconds"].legend(fontsize=8)
    for place, line in zip(places, recipes, strict=True):
        if not line["reached"]:
            panels["target"].text(0.0, place, " not reached", va="center", fontsize=8)
        curves = [[point[1] for point in run["curve"]] for run in line["runs"]]
        epochs = [point[0] + 1 for point in line["runs"][0]["curve"]]
        means = [fmean(each) for each in zip(*curves, strict=True)]
        panels["curve"].plot(epochs, means, linewidth=1.2, color=colours[place], label=line["name"])
    panels["curve"].axhline(found["target"], color="#888", linewidth=1, linestyle="--", label="target")
    panels["curve"].set(xlabel="epoch", ylabel=f"validation {metric}")
    panels["curve"].legend(fontsize=8, ncols=2)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()
