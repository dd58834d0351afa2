"""Every fault, done to a real run, and what became of it: seconds to the end, exit code, message, what was left.

Exits with 1 where one does not end as it should. See ``tests/faults.py``.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.report import deliver, machine, machine_line, say, table
from tests.fault_runs import LIMIT, TIMEOUT, Place, is_root
from tests.faults import NEED_ROOT, SCENARIOS


@dataclass(frozen=True, kw_only=True)
class Options:
    """Faults, and what became of each."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")] = ()
    """Faults to try; by default all."""
    json: bool = False
    """Print one JSON object."""
    save: bool = False
    """Keep the result under benchmarks/results."""


def main(options: Options) -> int:
    facts = machine()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        place = Place.make(Path(folder))
        for name, scenario in SCENARIOS.items():
            if options.only and name not in options.only:
                continue
            if name in NEED_ROOT and not is_root():
                say(f"{name}: left out, it needs root, to mount a small file system or to rename the host")
                continue
            outcome = scenario(place)
            say(f"{'  ' if outcome.good else '! '}{name}: {outcome.code}, {outcome.seconds} s: {outcome.message}")
            outcomes.append(outcome)
    rows = [
        (
            outcome.fault,
            f"{outcome.seconds:.1f}",
            outcome.code,
            outcome.message.replace("|", "/").replace(folder, "DIR") or "-",
            outcome.orphans,
            ", ".join(outcome.left) or "-",
            "yes" if outcome.good else "NO",
        )
        for outcome in outcomes
    ]
    header = ("fault", "seconds", "exit code", "message", "orphans", "half-written files", "as it should")
    text = "\n".join(
        [
            "# Faults, and what became of each",
            "",
            machine_line(facts),
            "",
            f"Two ranks on one host, `--timeout {TIMEOUT}`; seconds are from the fault to the end of the run, at most "
            f"{LIMIT:g}. A rank that stays stopped is ended by the launcher 30 s after the others.",
            "",
            table(header, rows),
        ]
    )
    record = {"machine": facts, "timeout": TIMEOUT, "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes]}
    deliver("faults", text, record, as_json=options.json, save=options.save)
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))))
