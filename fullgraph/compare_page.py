"""A comparison as files: JSON, a figure (PNG) and a page for a browser. The last two need the extra ``report``."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

from fullgraph.files import appears_by_rename
from fullgraph.runlog import plain, show

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Exchange recipes on {{ found.graph }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse } td, th { padding: .3em .8em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } img { max-width: 100% } .note { color: #666 }
</style></head><body>
<h1>Exchange recipes on {{ found.graph }}</h1>
<p>{{ found.config.model }} on {{ found.ranks }} ranks, {{ found.seeds | length }} seeds,
{{ found.config.epochs }} epochs; test {{ found.metric }} of the epoch best by validation. Evaluation is exact.</p>
<table><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
<p class="note">{{ note }}</p>
<img alt="Accuracy against bytes, and over epochs" src="data:image/png;base64,{{ figure }}">
</body></html>
"""


def check_extra() -> None:
    """``ValueError`` where what draws is not installed."""
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"--out needs {' and '.join(missing)}: pip install 'fullgraph[report]', or leave it out")


def write_comparison(found: dict[str, Any], folder: Path) -> None:
    """compare.json, compare.png and compare.html in ``folder``."""
    import jinja2

    folder.mkdir(parents=True, exist_ok=True)
    figure = _figure(found)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    heads, rows, note = _cells(found)
    page = environment.from_string(_PAGE).render(
        found=found, heads=heads, rows=rows, note=note, figure=base64.b64encode(figure).decode()
    )
    files = {"compare.json": json.dumps(plain(found), indent=1).encode() + b"\n", "compare.png": figure}
    for name, content in (files | {"compare.html": page.encode()}).items():
        with appears_by_rename(folder / name) as temporary:
            temporary.write_bytes(content)


def _cells(found: dict[str, Any]) -> tuple[list[str], list[list[str]], str]:
    metric, link = found["metric"], found["link"]
    heads = ["recipe", metric, "against exact", "MB an epoch", "s an epoch", "waited s", "drift by layer"]
    note = "Seconds are those of this machine; drift is the relative error of the rows in use."
    if link is not None:
        heads.append(f"s an epoch over {link['name']}, predicted")
        note += " What is predicted comes from bytes and compute counted here, not from such a link."
    rows = []
    for line in found["recipes"]:
        half = line["difference_interval"]
        row = [
            line["name"],
            show(metric, line["score"]),
            f"{100 * line['difference']:+.2f}" + ("" if half is None else f" ± {100 * half:.2f}"),
            f"{line['bytes'] / 1e6:.3g}",
            f"{line['seconds']:.3g}",
            f"{line['exposed_seconds']:.3g}",
            ", ".join(f"{layer['relative_error']:.2g}" for layer in line["drift"]),
        ]
        rows.append(row if link is None else [*row, f"{line['link_seconds']:.3g}"])
    return heads, rows, note


def _figure(found: dict[str, Any]) -> bytes:
    """Left, score against bytes, with its interval; right, validation over epochs, the mean over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for line in found["recipes"]:
        half = line["score_interval"] or 0.0
        left.errorbar([line["bytes"] / 1e6], [line["score"]], yerr=[half], fmt="o", capsize=3, label=line["name"])
        curves = [[point[1] for point in run["curve"]] for run in line["runs"]]
        epochs = [point[0] + 1 for point in line["runs"][0]["curve"]]
        right.plot(epochs, [sum(each) / len(each) for each in zip(*curves, strict=True)], linewidth=1.2)
    left.set(xlabel="MB of message rows an epoch", ylabel=f"test {found['metric']}")
    right.set(xlabel="epoch", ylabel=f"validation {found['metric']}")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()
