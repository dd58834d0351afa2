"""Damages files and reads them, in a process of its own with little memory and little time.

A ``Target`` names the files of one format and how they are read. What a damaged file may come to is a ``ValueError``
or a result; a crash, a hang, a huge allocation and any other error are faults, and come back with the seed that shows
them again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SPARE_BYTES = 768 << 20
"""Beyond what the process has when it starts."""
_SECONDS_EACH = 20
_WORDS = (
    *(b"0", b"-1", b"1e999", b"nan", b"99999999999999999999", b"9223372036854775807", b"4294967296"),
    *(b"", b"\x00", b"\xff\xfe", b"{", b"[[[[", b'"', b"../../etc/passwd", b"\n", b"1 " * 4000),
)


@dataclass(frozen=True)
class Target:
    """One format: ``make(folder)`` writes sound files and returns those to be damaged; ``read(folder)`` reads them."""

    make: Callable[[Path], list[Path]]
    read: Callable[[Path], Any]
    reseal: Callable[[Path], None] | None = None
    """Makes checksums agree with a damaged file, as somebody hostile would."""
    same: Callable[[Any, Any], bool] | None = None
    """Whether a result equals that of the sound files, where nothing else will do."""


def damaged(raw: bytes, rng: np.random.Generator) -> bytes:
    """``raw`` with one to four of: a bit or a byte changed, a number of 8 bytes set, a piece cut out, doubled, zeroed
    or replaced by a word; or with its end cut off."""
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(0, len(raw) + 1))
        length = int(rng.integers(1, 65))
        kind = int(rng.integers(0, 9))
        before, after = raw[:at], raw[at:]
        if kind == 0:
            raw = before + bytes([after[0] ^ (1 << int(rng.integers(8)))]) + after[1:] if after else raw
        elif kind == 1:
            raw = before + rng.bytes(1) + after[1:]
        elif kind == 2:
            number = rng.choice([0, 1, 2**31 - 1, 2**32, 2**62, -1, -(2**63), 2**40])
            raw = before + int(number).to_bytes(8, "little", signed=True) + after[8:]
        elif kind == 3:
            raw = before + after[length:]
        elif kind == 4:
            raw = before + after[:length] + after
        elif kind == 5:
            raw = before + bytes(min(length, len(after))) + after[length:]
        elif kind == 6:
            raw = before + _WORDS[int(rng.integers(len(_WORDS)))] + after
        elif kind == 7:
            word = _WORDS[int(rng.integers(len(_WORDS)))]
            raw = before + word + after[len(word) :]
        else:
            raw = before
    return raw


def faults(module: str, name: str, folder: Path, seed: int, count: int) -> list[str]:
    """Every fault of ``count`` damages of the module's ``TARGETS[name]``; each is shown again by its number and the
    seed."""
    notes = folder / "notes"
    out: list[str] = []
    first = 0
    while first < count:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.ranks", "fullgraph.trainer"])
        notes.write_text("[]")
        process = context.Process(target=_read_damaged, args=(module, name, folder, seed, first, count, notes))
        process.start()
        process.join()
        done, found = json.loads(notes.read_text())
        out += found
        first = done + 1
        if process.exitcode:
            code = process.exitcode
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            out.append(f"seed {seed}, number {done}: {'took too long' if end == 'SIGALRM' else end}")
        else:
            break
    return out


def _read_damaged(module: str, name: str, folder: Path, seed: int, first: int, count: int, notes: Path) -> None:
    target: Target = importlib.import_module(module).TARGETS[name]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    place = folder / f"files-{first}"
    place.mkdir()
    files = target.make(place)
    sound = {path: path.read_bytes() for path in files}
    right = target.read(place)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _SPARE_BYTES, used + _SPARE_BYTES))
    found: list[str] = []
    for number in range(first, count):
        notes.write_text(json.dumps([number, found]))
        rng = np.random.default_rng([seed, number])
        path = files[int(rng.integers(len(files)))]
        path.write_bytes(damaged(sound[path], rng))
        if target.reseal is not None:
            with contextlib.suppress(ValueError):
                target.reseal(place)
        signal.setitimer(signal.ITIMER_REAL, _SECONDS_EACH)
        text = None
        try:
            result = target.read(place)
        except ValueError:
            pass
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        else:
            if target.same is not None and path.read_bytes() != sound[path] and not target.same(right, result):
                text = "another result, and no error"
        signal.setitimer(signal.ITIMER_REAL, 0)
        if text is not None:
            found.append(f"seed {seed}, number {number}, {path.name}: {text}")
        for other, raw in sound.items():
            other.write_bytes(raw)
    notes.write_text(json.dumps([count, found]))
