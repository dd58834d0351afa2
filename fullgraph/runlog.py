"""What a run leaves and shows: the run folder's files, and the line a person watches. Rank 0 alone has one."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fullgraph.checks import check_run_folder, check_state
from fullgraph.files import appears_by_rename
from fullgraph.metrics import Scores

METRICS = "metrics.jsonl"


def write_json(path: Path, value: Any) -> None:
    """A file that appears whole or not at all."""
    with writes(path), appears_by_rename(path) as temporary:
        temporary.write_text(json.dumps(plain(value), indent=2) + "\n")


def plain(value: Any) -> Any:
    """JSON has no NaN: an undefined number is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Tensors and plain values, to be read with ``torch.load(path, weights_only=True)``."""
    with writes(path), appears_by_rename(path) as temporary:
        torch.save(state, temporary)


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` wrote of a model; ``ValueError`` names the file where it is not whole. Tensors are mapped, not
    read: of the features of all nodes a rank takes its own."""
    check_state(path)
    try:
        with zipfile.ZipFile(path) as archive:  # torch writes checksums, and does not look at them
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"{damaged} differs from its checksum")
            if any(member.external_attr & 0x10 for member in archive.infolist()):
                raise ValueError("a tensor is marked as a folder")  # torch would give whatever is in memory
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:
        reason = next(iter(str(e).splitlines()), type(e).__name__)
        raise ValueError(f"{path} cannot be read as a state: {reason}") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise ValueError(f"{path} holds no model's weights")
    return state


@contextlib.contextmanager
def writes(path: Path) -> Iterator[None]:
    """For a block that writes ``path``: an error names it and what to do. Of a full disk torch tells in its own way."""
    try:
        yield
    except (OSError, RuntimeError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else next(iter(str(e).splitlines()), "no reason")
        raise OSError(f"{path}: cannot be written ({reason}); {_remedy(path, e)}") from e


def _remedy(path: Path, error: Exception) -> str:
    folder = path.parent
    free = shutil.disk_usage(folder).free if folder.is_dir() else None
    if free is None:
        return f"{folder} is gone: start again, and leave the run's folder alone"
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "let it be written, or name another folder with --run"
    return f"{free / 1e6:,.1f} MB are free there: make room, or name another folder with --run"


def create_run_folder(path: Path, *, again: bool = False) -> Path:
    """Make the folder; ``ValueError`` where it already holds a run, or anything else.

    ``again`` lets a run begin anew that came neither to its end nor to a checkpoint.
    """
    begun = {METRICS, "config.json", "checkpoints"}
    if again and path.is_dir() and {entry.name for entry in path.iterdir() if entry.name[0] != "."} <= begun:
        return path
    check_run_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OSError(f"{path} cannot be made ({e.strerror}); name another folder with --run") from None
    return path


class RunLog:
    """A context that takes one record an epoch: a line of metrics.jsonl, and the live (or plain) progress line."""

    def __init__(
        self, folder: Path, epochs: int, metric: str, console: Console, *, done: int = 0, before: bytes = b""
    ) -> None:
        """``before`` are the lines of the ``done`` epochs before."""
        self.folder, self.epochs, self.metric, self.console = folder, epochs, metric, console
        self._done, self._before = done, before
        self._scores: Scores = {}
        self._last_line = -math.inf

    def __enter__(self) -> RunLog:
        if self._done:
            path = self.folder / METRICS
            with writes(path), appears_by_rename(path) as temporary:
                temporary.write_bytes(self._before)
        self._file = (self.folder / METRICS).open("a" if self._done else "w", buffering=1)
        self._progress = Progress(
            _LiveLine(self.console),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=self.epochs, completed=self._done, facts={})
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        with contextlib.suppress(OSError):  # what could not be written was told when it was written
            self._file.close()

    def epoch(self, record: dict[str, Any], scores: Scores | None) -> None:
        """``record`` has epoch, loss, seconds, comm_seconds, bytes_sent; ``scores`` on evaluated epochs."""
        path = Path(self._file.name)
        try:
            self._file.write(json.dumps(plain(record | (scores or {}))) + "\n")
        except OSError as e:
            raise OSError(f"{path}: cannot be written ({e.strerror}); {_remedy(path, e)}") from e
        if not self._is_there():
            raise OSError(
                f"{path}: was removed, moved or replaced while the run wrote to it; start again, in a folder that is "
                f"left alone (--run)"
            )
        self._scores = scores or self._scores
        done, now = record["epoch"] + 1, time.monotonic()
        self._progress.update(self._task, completed=done, facts=self.facts(record))
        if not self.console.is_terminal and (done in (1, self.epochs) or now - self._last_line >= 5.0):
            self._last_line = now
            self.console.print(f"epoch {done}/{self.epochs}  {self.line(record)}", highlight=False, soft_wrap=True)

    def _is_there(self) -> bool:
        """Whether the open file still has its name: to one that was removed a system writes without a word."""
        try:
            return os.path.samestat(os.stat(self._file.name), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def sync(self) -> int:
        """Put the lines on disk; how many bytes they take."""
        with writes(Path(self._file.name)):
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def line(self, record: dict[str, Any]) -> str:
        """The one line a person reads."""
        return "  ".join(self.facts(record).values())

    def facts(self, record: dict[str, Any]) -> dict[str, str]:
        """What the line says, by name, in its order."""
        out = {"loss": f"loss {record['loss']:.4f}"}
        for split in ("train", "val", "test"):
            if split in self._scores:
                out[split] = f"{split} {show(self.metric, self._scores[split][self.metric])}"
        share = record["comm_seconds"] / record["seconds"] if record["seconds"] else 0.0
        out["seconds"] = f"{record['seconds']:.3g} s/epoch"
        out["comm"] = f"comm {share:.0%}"
        out["sent"] = f"{record['bytes_sent'] / 1e6:.3g} MB sent"
        return out


class _LiveLine(ProgressColumn):
    """Epoch, bar, facts and time left; what does not fit the terminal is left out, least important first."""

    max_refresh = 0.1
    _BAR = 20
    _LEFT_OUT = ("train", "test", "sent", "comm", "seconds", "eta", "val", "loss")

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def render(self, task: Task) -> RenderableType:
        epoch = f"epoch {task.completed:.0f}/{task.total:.0f}"
        left = "-:--:--" if task.time_remaining is None else str(timedelta(seconds=int(task.time_remaining)))
        facts = {**task.fields["facts"], "eta": f"ETA {left}"}
        for name in self._LEFT_OUT:
            if len("  ".join([epoch, *facts.values()])) < self._console.width:
                break
            facts.pop(name, None)
        text = "  ".join(facts.values())
        if len(epoch) + len(text) + self._BAR + 3 >= self._console.width:
            return Text(f"{epoch}  {text}", no_wrap=True)
        line = Table.grid(padding=(0, 1))
        line.add_row(epoch, ProgressBar(total=task.total, completed=task.completed, width=self._BAR), text)
        return line


def show(metric: str, value: float) -> str:
    """A metric's value for a person: shares in percent."""
    return f"{value:.4g}" if metric in ("mae", "loss") else f"{100 * value:.2f} %"
