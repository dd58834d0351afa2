"""Runs functions on P ranks that stay alive over the whole test session.

Ranks are forked from a server process that has imported torch once, so a pool starts in about a second and a broken one
is replaced by a fresh one. A test asks for the ``ranks`` fixture and calls ``ranks.run(size, function, *args)``; the
function is a top-level one, takes a ``World`` first, and its results come back in order of rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullgraph.world import World

MAX_RANKS = 4
_START_SECONDS = 120.0
_GRACE_SECONDS = 3.0  # for the other ranks to end by themselves, once one has failed
_COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=300)


class RankFailure(Exception):
    """A job failed; ``failures`` has the traceback, or what else happened, of each rank that brought no result."""

    def __init__(self, job: str, failures: dict[int, str]) -> None:
        super().__init__("\n".join([f"{job} failed", *(f"--- rank {r}: {text}" for r, text in failures.items())]))
        self.failures = failures


@dataclass(frozen=True, eq=False)
class _Rank:
    process: BaseProcess
    pipe: Connection
    stacks: Path
    """Where the rank writes the stacks of its threads when it gets SIGUSR1."""

    def where(self) -> str:
        """What the rank is doing."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return self.stacks.read_text() or "(it did not say where it stands)"


class RankPool:
    """At most ``most`` ranks; they start with the first job, and anew with the first after a failed one."""

    def __init__(self, most: int = MAX_RANKS) -> None:
        self._most = most
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: dist.TCPStore | None = None

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """``function(world, *args)`` on ranks 0..size-1 of a world of that size; results in order of rank.

        Raises ``RankFailure`` where a rank raises, dies, or has no result within ``timeout`` seconds.
        """
        if not 1 <= size <= self._most:
            raise ValueError(f"{size} ranks; expected 1 to {self._most}")
        if not self._ranks:
            self._start()
        name = f"{function.__module__}:{function.__qualname__}"
        job = pickle.dumps((name, size, args))
        for rank in self._ranks[:size]:
            rank.pipe.send_bytes(job)
        return self._collect(f"{name} on {size} rank{'s' if size > 1 else ''}", size, timeout)

    def _collect(self, job: str, size: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        rank_of = {rank.pipe: r for r, rank in enumerate(self._ranks[:size])}
        deadline = time.monotonic() + timeout
        while rank_of and (ready := wait(list(rank_of), max(deadline - time.monotonic(), 0.0))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                r = rank_of.pop(pipe)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self._ranks[r].process.join(_GRACE_SECONDS)
                    good, value = False, f"died with exit code {self._ranks[r].process.exitcode}"
                if good:
                    results[r] = value
                else:
                    failures[r] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if not rank_of and not failures:
            return [results[r] for r in range(size)]
        waited = "after another rank had failed" if failures else f"after {timeout:g} s"
        for r in rank_of.values():
            failures[r] = f"still running {waited}\n{self._ranks[r].where()}"
        self.close()  # who knows what state its collectives are in
        raise RankFailure(job, failures)

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "fullgraph.loop"])
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for r in range(self._most):
            stacks = Path(self._folder.name) / f"rank-{r}"
            ours, theirs = context.Pipe()
            args = (r, self._most, self._store.port, theirs, str(stacks))
            process = context.Process(target=_serve, args=args, name=f"rank-{r}", daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, stacks))
        self._collect("start of the pool", self._most, _START_SECONDS)

    def close(self) -> None:
        """End the ranks; the next job starts new ones."""
        for rank in self._ranks:
            rank.pipe.close()
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
        self._ranks, self._store = [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(rank: int, most: int, port: int, pipe: Connection, stacks: str) -> None:
    """The life of a rank: join the others, then answer each job with (good, result or traceback)."""
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        torch.set_num_threads(1)
        try:
            worlds = _join(rank, most, port)
            pipe.send_bytes(pickle.dumps((True, None)))
        except Exception:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            return
        while job := _next_job(pipe):
            name, size, args = pickle.loads(job)
            try:
                world = worlds(size)
                world.barrier()
                answer = pickle.dumps((True, _find(name)(world, *args)))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    return
                answer = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(answer)


def _join(rank: int, most: int, port: int) -> Callable[[int], World]:
    """Meet the other ranks over loopback; gives this rank's world of each size, with a fresh meter."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=most, timeout=_COLLECTIVE_TIMEOUT)
    sizes = range(2, most + 1)
    groups = {size: dist.new_group(list(range(size)), timeout=_COLLECTIVE_TIMEOUT) for size in sizes}
    apart = {size: dist.new_group(list(range(size)), timeout=_COLLECTIVE_TIMEOUT) for size in sizes}

    def world(size: int) -> World:
        if size == 1:
            return World()
        group = groups[size]
        world = World(rank, size, rank, size, torch.device("cpu"), group, group, store)
        return dataclasses.replace(world, apart_groups=[apart[size]] * 2)

    return world


def _next_job(pipe: Connection) -> bytes | None:
    try:
        return pipe.recv_bytes()
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return None


def _find(name: str) -> Callable[..., Any]:
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


@contextlib.contextmanager
def rank_pool(most: int = MAX_RANKS) -> Iterator[RankPool]:
    """A pool that ends with the block."""
    pool = RankPool(most)
    try:
        yield pool
    finally:
        pool.close()
