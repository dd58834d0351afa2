"""What every benchmark says besides its numbers: the machine, a Markdown table, and a dated file of the result."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

_PACKAGES = ("torch", "numpy", "scipy", "h5py", "pymetis", "torch-geometric")


def machine() -> dict[str, Any]:
    """Facts of this machine that a number depends on: processor, cores, memory, load, versions, date and commit."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 1),
        "system": platform.platform(),
        "versions": {"python": platform.python_version()} | _versions(),
    }


def machine_line(facts: dict[str, Any]) -> str:
    """The facts as a Markdown sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"{facts['date']}, commit {facts['commit']}; {facts['processor']}, {facts['cores']} cores, "
        f"{facts['memory_bytes'] / 2**30:.0f} GiB, load average {facts['load_average']} at the start; "
        f"{facts['system']}; {versions}."
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in (aligned[0], rule, *aligned[1:]))


def deliver(
    name: str, markdown: str, record: dict[str, Any], *, as_json: bool, save: bool, lines: bool = False
) -> None:
    """Print a result as Markdown or JSON; ``save`` also leaves both as ``results/DATE-NAME.md`` and ``.json``.

    With ``lines``, JSON is printed as one object a line for each of ``record["results"]``.
    """
    text = json.dumps(record, indent=1)
    as_lines = "\n".join(json.dumps(result) for result in record["results"]) if lines else text
    print(as_lines if as_json else markdown)
    if save:
        stem = RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{name}"
        RESULTS.mkdir(exist_ok=True)
        stem.with_suffix(".md").write_text(markdown + "\n")
        stem.with_suffix(".json").write_text(text + "\n")
        say(f"saved {stem}.md and .json")


def say(line: str) -> None:
    """Progress, beside the result and not in it."""
    print(line, file=sys.stderr, flush=True)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str:
    """The commit's short name, with ``+`` where the tree differs from it."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=RESULTS.parent, capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return run.stdout.strip() or "unknown"
