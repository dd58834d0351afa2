"""What a long command is at: a bar with rate and time left on a terminal, plain lines elsewhere, both on stderr.

A terminal's bars go when their stage ends. Elsewhere a stage that takes more than a second says so when it ends, and
every ten seconds meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

Report: TypeAlias = Callable[[str, int, int], None]
"""(what is done, how much of it is, of how much)"""

_QUIET_SECONDS = 1.0
_BETWEEN_LINES = 10.0


class _Rate(ProgressColumn):
    """Done of all, how fast, and how long the rest takes."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        return Text(_figures(int(task.completed), int(task.total), task.fields["unit"], task.elapsed or 0.0))


def _figures(done: int, total: int, unit: str, seconds: float) -> str:
    text = f"{done:,} of {total:,} {unit}"
    if done and seconds > 0:
        rate = done / seconds
        text += f", {_short(rate)} {unit}/s"
        if done < total:
            text += f", {_clock((total - done) / rate)} left"
    return text


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Stages:
    """The stages of one command, one at a time."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
        self.seconds: dict[str, float] = {}
        """What each stage took, by its text."""

    @contextmanager
    def stage(self, text: str, *, unit: str = "", expected: float | None = None) -> Iterator[Report]:
        """A stage of the command; what it yields takes reports of its steps, each of which may have a text of its own.

        ``expected`` are the seconds that a stage without reports should take.
        """
        start = time.monotonic()
        try:
            if self._console.is_terminal:
                with self._bar(text, unit, expected) as report:
                    yield report
            else:
                yield self._lines(start, unit)
        finally:
            took = self.seconds[text] = time.monotonic() - start
        if took > _QUIET_SECONDS and not self._console.is_terminal:
            self._console.print(f"{text}: {took:.1f} s")

    @contextmanager
    def _bar(self, text: str, unit: str, expected: float | None) -> Iterator[Report]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), _Rate(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            shown = text
            if expected is not None and expected > _QUIET_SECONDS:
                shown += f" (about {_clock(expected)})"
            task = progress.add_task(shown, total=None, unit=unit)
            step = text

            def report(what: str, done: int, total: int) -> None:
                nonlocal task, step
                if what != step:
                    progress.remove_task(task)
                    task, step = progress.add_task(what, total=total, unit=unit), what
                progress.update(task, completed=done, total=total)

            yield report

    def _lines(self, start: float, unit: str) -> Report:
        step, began, last = "", start, start

        def report(what: str, done: int, total: int) -> None:
            nonlocal step, began, last
            now = time.monotonic()
            if what != step:
                step, began = what, now if step else start
            if now - last >= _BETWEEN_LINES:
                last = now
                self._console.print(f"{what}: {_figures(done, total, unit, now - began)}")

        return report
