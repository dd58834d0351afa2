"""Start the ranks of a run on this host with torchrun's own machinery, when the user has not."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullgraph.world import RESTARTS

_HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """A launcher that is killed must not leave its ranks training on: have the kernel end this one with it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def launch_local(
    arguments: Sequence[str],
    ranks: int,
    restarts: int = 0,
    *,
    launch: str = "",
    remedy: Callable[[], str] = lambda: "start again",
) -> int:
    """Run ``python -m fullgraph ARGUMENTS`` as ``ranks`` local ranks that meet on the loopback interface, and start
    all of them again, ``restarts`` times at most, where one is ended by a signal.

    Returns the exit code: 0, that of a rank that failed, or 128 + the number of the signal that ended the launcher or
    a rank. The ranks have said what went wrong; nothing is added here but for a rank that died without a word, with
    the ``remedy``. ``launch`` names all starts of these ranks; ``World.launch`` says it.
    """
    _silence_launcher()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own share of the cores
    launch = launch or uuid.uuid4().hex
    try:
        for start in range(restarts + 1):
            os.environ[RESTARTS] = str(start)
            try:
                return _launch(arguments, ranks, launch)
            except ChildFailedError as e:
                codes = {rank: failure.exitcode for rank, failure in e.failures.items()}
                last = start == restarts or any(code > 0 for code in codes.values())  # what a rank says will not pass
                code = _exit_code(codes, remedy() if last else "all ranks are started again")
                if last:
                    return code
            print(f"fullgraph: start {start + 2} of {restarts + 1}", file=sys.stderr, flush=True)
    finally:
        os.environ.pop(RESTARTS, None)
    raise AssertionError


def _launch(arguments: Sequence[str], ranks: int, launch: str) -> int:
    with _signals_restored(), tempfile.TemporaryDirectory(prefix="fullgraph-") as scratch, _store() as port:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=launch,
            rdzv_backend="static",
            rdzv_endpoint=f"{_HOST}:{port}",
            rdzv_configs={"rank": 0},
            local_addr=_HOST,
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        signal.signal(signal.SIGUSR1, _pass_on)
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "fullgraph", *arguments)
        except SignalException as e:
            return 128 + int(e.sigval)
    return 0


def _pass_on(number: int, _: FrameType | None) -> None:
    """Send a signal on to the ranks."""
    for listed in Path("/proc/self/task").glob("*/children"):
        for child in listed.read_text().split():
            with contextlib.suppress(OSError):
                if b"\0RANK=" in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
                    os.kill(int(child), number)


def _exit_code(codes: dict[int, int], remedy: str) -> int:
    """The exit code of a run whose ranks ended with ``codes``; says which rank was killed, and what to do, where none
    said anything."""
    said = [code for code in codes.values() if code > 0]
    if said:
        return said[0]
    # The launcher ends the other ranks by SIGTERM, so another signal is the cause.
    rank, code = min(codes.items(), key=lambda item: item[1] == -signal.SIGTERM)
    hint = " (this host may be out of memory)" if code == -signal.SIGKILL else ""
    text = f"rank {rank} was ended by {signal.Signals(-code).name}{hint}; {remedy}"
    print(f"fullgraph: error: {text}", file=sys.stderr, flush=True)
    return 128 - code


@contextlib.contextmanager
def _store() -> Iterator[int]:
    """The port of a store on the loopback interface; torch's launcher, left alone, listens on every interface."""
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        # multi_tenant: the launcher's own store, on the same port of the same process, is this one.
        store = TCPStore(
            _HOST, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )
    yield port
    del store


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """The launcher's signal handlers would outlive it."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _silence_launcher() -> None:
    """It logs a report of many lines for each failed rank and each signal; the rank's own message says more."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
