"""Systems under measurement: processes that wait for orders, so that several can take turns in one run."""

from __future__ import annotations

import contextlib
import ctypes.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = {"layers": 3, "hidden": 256, "dropout": 0.5, "heads": 4}
"""Of every system."""
SAME_WORK = {"prune": False, "layer0": "exchange"}
"""Options with which a step of ours does what the others do: every node in every layer, layer 0 each step."""


class System:
    """The processes of one system, one a rank; a context that ends them."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], **facts: Any):
        """Start them; ``ready`` waits for them. ``facts`` are told with every result."""
        self.name, self.facts, self._started = name, {"system": name, **facts}, time.perf_counter()
        self.epochs: list[dict[str, Any]] = []
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for command, env in zip(commands, envs, strict=True):
                self._processes.append(_start(command, env))
        except OSError:
            self.close()
            raise

    def __enter__(self) -> System:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> float:
        """Seconds from the start of its processes until all can take the first step."""
        self._answers()
        return time.perf_counter() - self._started

    def run(self, epochs: int, *, keep: bool = True) -> list[dict[str, Any]]:
        """Take epochs: for each the slowest rank's seconds, processor time of all, and ``ranks`` one by one."""
        by_rank = self._ask({"run": epochs})
        found = [_joined(records) for records in zip(*by_rank, strict=True)]
        if keep:
            self.epochs += found
        return found

    def ask_facts(self) -> list[dict[str, Any]]:
        """What each rank says of itself."""
        return self._ask({"facts": True})

    def _ask(self, order: dict[str, Any]) -> list[Any]:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its answer tells
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[Any]:
        found = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                code = process.wait()
                raise RuntimeError(f"{self.name}: process {rank} ended with status {code}; its words stand above")
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def summary(self) -> dict[str, Any]:
        """Medians over the epochs that were kept, their spread, and the peak memory of all ranks together."""
        told = self.ask_facts()
        seconds = [epoch["seconds"] for epoch in self.epochs]
        return self.facts | {
            "seconds": median(seconds),
            "least_seconds": min(seconds),
            "most_seconds": max(seconds),
            "epochs": len(seconds),
            "user_seconds": median(epoch["user"] for epoch in self.epochs),
            "system_seconds": median(epoch["system"] for epoch in self.epochs),
            "peak_memory_bytes": sum(rank["peak_memory_bytes"] for rank in told),
            "ranks_told": told,
        }


def ours(
    name: str,
    folder: Path,
    config: Mapping[str, Any],
    *,
    ranks: int = 1,
    threads: int = 1,
    allocator: str = "system",
    env: Mapping[str, str] | None = None,
    within: Callable[[int], Sequence[str]] = lambda rank: (),
    host: str = "127.0.0.1",
    hosts: int = 1,
    **facts: Any,
) -> System:
    """Our trainer on shards. ``within(rank)`` is what its command is run by, for ranks that are ``hosts`` apart."""
    job = json.dumps({"folder": str(folder), "config": dict(config), "threads": threads})
    common = _preload(allocator) | dict(env or {})
    port = str(_free_port()) if ranks > 1 else "0"
    local = ranks // hosts
    envs = [
        common
        | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
        }
        for rank in range(ranks)
    ]
    commands = [[*within(rank), sys.executable, "-m", "benchmarks.rank", job] for rank in range(ranks)]
    return System(name, commands, envs, ranks=ranks, threads=threads, allocator=allocator, **facts)


def peer(
    name: str,
    arrays: Path,
    model: str,
    *,
    threads: int,
    allocator: str = "system",
    python: str = sys.executable,
    device: str = "cpu",
    **facts: Any,
) -> System:
    """``pyg-edge_index``, ``pyg-csr`` or ``dgl`` on plain arrays."""
    job = {"system": name, "arrays": str(arrays), "model": model, "threads": threads, "device": device, **MODEL}
    command = [python, "-m", "benchmarks.peers", json.dumps(job)]
    env = _preload(allocator)
    return System(name, [command], [env], ranks=1, threads=threads, allocator=allocator, model=model, **facts)


def take_turns(systems: Sequence[System], *, warm: int, rounds: int, epochs: int) -> None:
    """Warm each up, then let each take ``epochs`` in every round."""
    for system in systems:
        system.run(warm, keep=False)
    for _ in range(rounds):
        for system in systems:
            system.run(epochs)


@contextlib.contextmanager
def started(systems: Sequence[Callable[[], System]]) -> Iterator[list[System]]:
    """Start them one after the other, each waited for, and end them all."""
    with contextlib.ExitStack() as stack:
        found = []
        for start in systems:
            found.append(stack.enter_context(start()))
            found[-1].ready()
        yield found


def allocators() -> list[str]:
    """``system``, and ``tcmalloc`` where it is installed."""
    return ["system", *(["tcmalloc"] if _tcmalloc() else [])]


def _tcmalloc() -> str | None:
    return ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")


def _preload(allocator: str) -> dict[str, str]:
    library = _tcmalloc() if allocator == "tcmalloc" else None
    return {"LD_PRELOAD": library} if library else {}


def _start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path} | env,
    )


def _joined(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sums = {key: sum(record[key] for record in records) for key in ("user", "system")}
    return sums | {"seconds": max(record["seconds"] for record in records), "ranks": list(records)}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
