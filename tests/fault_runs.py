"""One run with a fault, watched to its end: what the faults of ``tests/faults.py`` are made of.

A run is one command in a process group of its own. It must end within a stated time, with a code that is not 0 (or
with a resume), one message that says who and why, no process left and no file that is half written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from partition_tools.builder import build
from partition_tools.graph import Graph, Splits
from tests.builds import assignment

ROOT = Path(__file__).parents[1]
TIMEOUT = 10
"""Seconds, as ``--timeout`` of the runs."""
LIMIT = 90.0
"""Seconds from the fault to the end of the run, at most: the timeout, and the launcher's 30 s for a stopped rank."""
_MARK = "FAULT_RUN"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one fault."""

    fault: str
    seconds: float
    """From the fault to the end of the run."""
    code: int | None
    """Exit code; None where the run had to be ended."""
    message: str
    """The lines of standard error that are ours, or its last."""
    orphans: int
    left: tuple[str, ...]
    """Names of files that should not be there."""
    says: str = "."
    """What the message must say, as a regular expression."""
    ends: str = "error"
    """"error": with a message and a code; "goes on": as if nothing had been."""
    output: str = ""

    @property
    def good(self) -> bool:
        told = re.search(self.says, self.message) is not None
        ended = self.code == 0 if self.ends == "goes on" else self.code not in (0, None) and told
        return ended and self.seconds <= LIMIT and not self.orphans and not self.left


@dataclass(frozen=True)
class Place:
    """Where faults happen: a folder with shards for two ranks."""

    folder: Path

    @property
    def shards(self) -> Path:
        return self.folder / "shards"

    def fresh(self, name: str) -> Path:
        path = self.folder / name
        if path.exists():
            shutil.rmtree(path)
        return path

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.shards, self.fresh(name)))

    @classmethod
    def make(cls, folder: Path) -> Place:
        place = cls(folder)
        build(small_graph(), assignment(np.arange(400) % 2, 2), place.shards)
        return place


def small_graph(seed: int = 0) -> Graph:
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 3, (1, 400))
    return Graph(
        name="faults",
        num_nodes=400,
        src=rng.integers(0, 400, 2000),
        dst=rng.integers(0, 400, 2000),
        x=rng.standard_normal((400, 16), dtype=np.float32),
        y=rng.integers(0, 4, 400),
        splits=Splits(train=kind == 0, val=kind == 1, test=kind == 2),
    )


# ------------------------------------------------------------------------------------------------------------- a run


def faulty(fault: dict[str, object]) -> dict[str, str]:
    """The environment of a process in which ``tests/faulty`` makes this happen."""
    path = os.pathsep.join([str(ROOT / "tests" / "faulty"), str(ROOT)])
    return {"PYTHONPATH": path, "FAULT": json.dumps(fault)}


def train(shards: Path, run: Path, *flags: str) -> list[str]:
    """A run that would take hours."""
    flags = ("--model", "gcn", "--hidden", "8", "--epochs", "1000000", "--timeout", str(TIMEOUT), *flags)
    return [sys.executable, "-m", "fullgraph", "train", str(shards), "--run", str(run), *flags]


def watch(
    fault: str,
    command: list[str],
    *,
    looked_at: tuple[Path, ...] = (),
    env: dict[str, str] | None = None,
    mark: Path | None = None,
    during: Callable[[subprocess.Popen[str]], float | None] | None = None,
    says: str = ".",
    ends: str = "error",
) -> Outcome:
    """Run a command to its end. The fault is there from the start, or happens when ``mark`` is made, or is done by
    ``during``, which returns its time."""
    name = uuid.uuid4().hex
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), _MARK: name, **(env or {})}
    start = time.time()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    lines: list[str] = []
    output: list[str] = []
    readers = [
        threading.Thread(target=lambda: lines.extend(process.stderr or ())),
        threading.Thread(target=lambda: output.extend(process.stdout or ())),
    ]
    for reader in readers:
        reader.start()
    try:
        at = None if during is None else during(process)
    except TimeoutError:
        process.kill()
        at = None
    code: int | None
    try:
        code = process.wait(LIMIT + 60)
    except subprocess.TimeoutExpired:
        code = None
    end = time.time()
    if mark is not None and mark.exists():
        at = mark.stat().st_mtime
    time.sleep(0.2)
    orphans = _marked(name)
    for orphan in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()
    for reader in readers:
        reader.join(10)
    return Outcome(
        fault=fault,
        seconds=round(end - (at or start), 1),
        code=code,
        message=message_of(lines),
        orphans=len(orphans),
        left=tuple(sorted(str(path.relative_to(top)) for top in looked_at for path in _half_written(top))),
        says=says,
        ends=ends,
        output="".join(output),
    )


def _marked(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def message_of(lines: list[str]) -> str:
    """The lines of ours, with what ranks add to them."""
    ours = [line.strip() for line in lines if ": error: " in line or line.startswith("  rank ")]
    rest = [line.strip() for line in lines if line.strip()]
    return " / ".join(ours) if ours else rest[-1] if rest else ""


def _half_written(top: Path) -> Iterator[Path]:
    """Files under their own names that do not read, and temporary ones."""
    for path in top.rglob("*") if top.is_dir() else ():
        if path.name.endswith((".tmp", ".saving", ".removed")) or ".building" in path.name:
            yield path
        elif path.suffix == ".pt":
            try:
                with zipfile.ZipFile(path) as archive:
                    whole = archive.testzip() is None
            except zipfile.BadZipFile:
                whole = False
            if not whole:
                yield path


def wait_for(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError("the run did not come so far")
        time.sleep(0.05)


def wait_for_epochs(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)


# ---------------------------------------------------------------------------------------------------------- disks


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own; needs root."""
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True, capture_output=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def is_root() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None and shutil.which("unshare") is not None and _mounts()


def _mounts() -> bool:
    return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True).returncode == 0
