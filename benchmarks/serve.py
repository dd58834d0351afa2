"""A measured process: takes orders on its standard input, a line of JSON each, and answers with a line of JSON.

``{"run": n}`` takes n epochs and answers with their list; ``{"facts": true}`` answers with what the system says of
itself; the end of the input ends it. Nothing but the standard library: other interpreters run this, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


def open_replies() -> TextIO:
    """The standard output, for answers alone: what libraries print goes to the standard error. The process offers
    itself first where memory runs out."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    return replies


def peak_memory() -> int:
    """Most bytes that this process held since `serve` began to count."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(replies: TextIO, step: Callable[[int], dict[str, Any]], facts: Callable[[], dict[str, Any]] = dict) -> None:
    """Answer orders until there are no more. ``step(epoch)`` is timed and gives what else is to be told of it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: without loading
    epoch = 0
    _answer(replies, {"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        if "facts" in order:
            _answer(replies, {**facts(), "peak_memory_bytes": peak_memory()})
            continue
        found = []
        for _ in range(order["run"]):
            before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            record = step(epoch)
            seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
            user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
            found.append({**record, "seconds": seconds, "user": user, "system": system})
            epoch += 1
        _answer(replies, found)


def _answer(replies: TextIO, value: Any) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()
