"""``fullgraph doctor``: whether this host can train, and on a folder of shards; each finding is one line.

Local checks need no other rank; ``examine_exchange`` is run by all ranks of a world.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
import torch
from rich.console import Console

from fullgraph.host import NETWORK_FILE_SYSTEMS, available_memory, file_system
from fullgraph.selftest import check_kernels
from fullgraph.shards import MANIFEST, Manifest, read_manifest, read_shard
from fullgraph.world import World, backends

Level = Literal["ok", "note", "wrong"]
_COLUMN = 14
_SPEED_BYTES = 32 << 20
_EXCHANGE_ROWS, _WIDTH = 1 << 14, 256
_ROUNDS = 30
_MANY_EDGES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Finding:
    what: str
    text: str
    level: Level = "ok"


def show(findings: Iterator[Finding], console: Console) -> bool:
    """Print each finding as it is made; whether nothing is wrong."""
    good = True
    for finding in findings:
        mark = {"ok": "  ", "note": "- ", "wrong": "! "}[finding.level]
        console.print(f"{mark}{finding.what:<{_COLUMN}}{finding.text}", highlight=False, markup=False, soft_wrap=True)
        good = good and finding.level != "wrong"
    return good


def examine(folder: Path | None) -> Iterator[Finding]:
    """What this host has, whether its parts work, and whether ``folder`` is a whole build."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("installation", _installation),
        ("devices", _devices),
        ("network", _network),
        ("METIS", _metis),
        ("kernels", _kernels),
        ("file system", lambda: _file_system(folder)),
    ]
    if folder is not None:
        checks.append(("shards", lambda: _shards(folder)))
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:  # whatever it is, it is a finding, and the other checks are still to be made
            text = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
            yield Finding(what=name, text=" ".join(text.split()), level="wrong")


# ------------------------------------------------------------------------------------------------------ installation


def _installation() -> Iterator[Finding]:
    hdf5 = ".".join(map(str, h5py.h5.get_libversion()))
    yield Finding(what="python", text=f"{platform.python_version()} on {platform.platform()}")
    try:
        required = importlib.metadata.requires("fullgraph") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
        yield Finding(
            what="installation", text="fullgraph is imported from a folder, so versions are not checked", level="note"
        )
    found, wrong = [], []
    for requirement in required:
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)(?:>=([0-9.]+))?", requirement.partition(";")[0].strip())
        if match is None or "extra ==" in requirement:
            continue
        name, least = match.groups()
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is not installed: pip install '{requirement}'")
            continue
        found.append(f"{name} {version}")
        if least and _numbers(version) < _numbers(least):
            wrong.append(f"{name} is {version}; expected at least {least}: pip install '{requirement}'")
    if found:
        yield Finding(what="packages", text=f"{', '.join(found)}; HDF5 {hdf5}")
    yield from (Finding(what="packages", text=text, level="wrong") for text in wrong)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def _devices() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS")
    says = "OMP_NUM_THREADS is not set" if threads is None else f"OMP_NUM_THREADS={threads}"
    yield Finding(
        what="processors",
        text=f"{cores} for this process ({says}; each rank takes its share of the cores, or --threads)",
    )
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding(what="memory", text=f"{_gib(available_memory())} available of {_gib(total)}")
    names = backends()
    gloo = "gloo" in names
    yield Finding(
        what="backends",
        text=", ".join(names) + ("" if gloo else "; gloo is needed for control: take a build of torch that has it"),
        level="ok" if gloo else "wrong",
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(gpus):
        free, size = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {_gib(free)} free of {_gib(size)}"
        yield Finding(what=f"GPU {index}", text=text)
    if not gpus:
        yield Finding(what="GPUs", text="none; training runs on the processors")
    elif "nccl" not in names:
        yield Finding(what="GPUs", text="torch has no nccl here; rows go through the processors' memory", level="note")


def _network() -> Iterator[Finding]:
    names = [name for _, name in socket.if_nameindex()]
    host = socket.gethostname()
    try:
        at = f"{host} is {socket.gethostbyname(host)}"
    except OSError:
        at = f"the name {host} does not resolve: runs on several hosts need GLOO_SOCKET_IFNAME"
    yield Finding(what="network", text=f"{', '.join(names)}; {at}; ranks of one host meet on loopback")


def _metis() -> Iterator[Finding]:
    from partition_tools.assign import AssignOptions, assign
    from partition_tools.graph import Graph

    # Two triangles and a seventh node, joined by one pair each: the best cut into two parts is known.
    pairs = np.array([[0, 1], [1, 2], [0, 2], [2, 3], [3, 4], [4, 5], [3, 5], [5, 6]])
    edges = np.concatenate([pairs, pairs[:, ::-1]])
    graph = Graph(name="7 nodes", num_nodes=7, src=edges[:, 0].copy(), dst=edges[:, 1].copy())
    part = assign(graph, AssignOptions(parts=2)).part
    cut = int(np.count_nonzero(part[pairs[:, 0]] != part[pairs[:, 1]]))
    versions = f"pymetis {importlib.metadata.version('pymetis')}"
    text = f"splits a graph of 7 nodes where it should ({versions})"
    if cut != 1:
        text = f"cuts {cut} pairs of a graph of 7 nodes that falls apart at 1 ({versions}); try another version"
    yield Finding(what="METIS", text=text, level="ok" if cut == 1 else "wrong")


def _kernels() -> Iterator[Finding]:
    devices = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
    for device in devices:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            check_kernels(device, dtype, edges=_MANY_EDGES)
    names = " and ".join(device.type for device in devices)
    yield Finding(what="kernels", text=f"equal to dense products on {names}; {_MANY_EDGES:,} ones sum to as many")


# ------------------------------------------------------------------------------------------------------- file system


def _file_system(folder: Path | None) -> Iterator[Finding]:
    place = folder if folder is not None and folder.is_dir() else Path.cwd()
    kind, usage = file_system(place), shutil.disk_usage(place)
    yield Finding(
        what="file system",
        text=f"{place}: {kind}, {_gib(usage.free)} free of {_gib(usage.total)}",
        level="ok" if usage.free > _SPEED_BYTES else "wrong",
    )
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".fullgraph-doctor-", dir=place)
    except OSError as error:
        text = f"{place} cannot be written ({error.strerror}); shards are read from there all the same"
        yield Finding(what="writing", text=text, level="note")
        return
    with scratch as name:
        path = Path(name) / "file"
        content = memoryview(os.urandom(1 << 20))
        start = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(_SPEED_BYTES >> 20):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        yield Finding(what="writing", text=f"{_SPEED_BYTES / 1e6 / seconds:,.0f} MB/s to disk")
        yield _locking(path, kind)
        with h5py.File(Path(name) / "file.h5", "w", locking=False) as file:
            file["x"] = np.arange(3)
        with contextlib.ExitStack() as stack:  # as many ranks do
            files = [stack.enter_context(h5py.File(Path(name) / "file.h5", "r", locking=False)) for _ in range(2)]
            same = all(np.array_equal(file["x"][...], np.arange(3)) for file in files)
        text = "written, and read twice at once without locks" if same else "does not read back what it wrote"
        yield Finding(what="HDF5", text=text, level="ok" if same else "wrong")


def _locking(path: Path, kind: str) -> Finding:
    forced = os.environ.get("HDF5_USE_FILE_LOCKING", "").upper()
    if forced in ("TRUE", "1"):
        text = (
            f"HDF5_USE_FILE_LOCKING={forced} makes HDF5 lock files that are only read; unset it, or many ranks may be "
            f"refused at once"
        )
        return Finding(what="locks", text=text, level="wrong")
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        text = f"refused on {kind} ({error.strerror}); shards are read without them, so only builds cannot wait in line"
        return Finding(what="locks", text=text, level="note")
    shared = f"; {kind} is shared by hosts" if kind in NETWORK_FILE_SYSTEMS else ""
    return Finding(what="locks", text=f"given, though reading shards needs none{shared}")


def _shards(folder: Path) -> Iterator[Finding]:
    manifest = read_manifest(folder)
    size = sum(file.bytes for file in manifest.files)
    facts = manifest.graph
    yield Finding(
        what="shards",
        text=f"{folder / MANIFEST}: {facts.get('name')}, {facts['num_nodes']:,} nodes, {facts['num_edges']:,} edges in "
        f"{manifest.parts} parts, {size / 1e6:,.1f} MB, build {manifest.build_id}",
    )
    start, whole = time.perf_counter(), 0
    for part in range(manifest.parts):
        try:
            read_shard(folder, part, manifest=manifest)
            whole += 1
        except ValueError as error:
            yield Finding(what="shards", text=str(error), level="wrong")
    seconds = time.perf_counter() - start
    if whole == manifest.parts:
        yield Finding(
            what="shards",
            text=f"all {whole} as they were written, read and checked at {size / 1e6 / seconds:,.0f} MB/s",
        )
    yield _fits(manifest)


def _fits(manifest: Manifest) -> Finding:
    size, available = sum(file.bytes for file in manifest.files), available_memory()
    text = f"{_gib(size)} of shards, {_gib(available)} of memory available on this host"
    return Finding(what="room", text=text, level="ok" if size < available else "note")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


# ---------------------------------------------------------------------------------------------------------- exchange


def examine_exchange(world: World) -> Iterator[Finding]:
    """An exchange between all ranks, its latency and its bandwidth (a collective; every rank takes every step)."""
    wrong = _wrong_rows(world)
    hosts = len(set(world.gather_json(platform.node())))
    between = f"{world.size} ranks on {hosts} host{'s' if hosts > 1 else ''}, {world.device.type}"
    if wrong:
        yield Finding(what="exchange", text=f"{between}: {wrong}", level="wrong")
        return
    yield Finding(what="exchange", text=f"{between}: uneven and empty exchanges, and sums, bring what they should")
    one = torch.ones(world.size, 1, device=world.device)
    latency = _median_seconds(world, one, [1] * world.size)
    rows = torch.ones(_EXCHANGE_ROWS * world.size, _WIDTH, device=world.device)
    seconds = _median_seconds(world, rows, [_EXCHANGE_ROWS] * world.size, rounds=max(3, _ROUNDS // 6))
    sent = (world.size - 1) * _EXCHANGE_ROWS * _WIDTH * rows.element_size()
    yield Finding(what="latency", text=f"{latency * 1e3:.2f} ms an exchange")
    yield Finding(what="bandwidth", text=f"{sent / 1e6 / seconds:,.0f} MB/s sent a rank, as many received")


def _wrong_rows(world: World) -> str:
    """What was not right in exchanges whose every number is known, on any rank."""
    bad = []
    for name, count in (("uneven", lambda p, q: (p + 2 * q) % 3), ("empty", lambda p, q: 0)):
        sent = [count(world.rank, q) for q in range(world.size)]
        received = [count(p, world.rank) for p in range(world.size)]
        rows = torch.cat([torch.full((n, 3), 100.0 * world.rank + q) for q, n in enumerate(sent)]).to(world.device)
        expected = torch.cat([torch.full((n, 3), 100.0 * p + world.rank) for p, n in enumerate(received)])
        if not torch.equal(world.exchange(rows, sent, received).wait().cpu(), expected):
            bad.append(f"{name} exchange")
    total = world.sum_(torch.full((1000,), world.rank + 1.0, device=world.device))
    if not bool((total == world.size * (world.size + 1) / 2).all()):
        bad.append("sum")
    every = world.gather_json(bad)
    return "; ".join(
        f"rank {rank} got wrong numbers in: {', '.join(names)}" for rank, names in enumerate(every) if names
    )


def _median_seconds(world: World, rows: torch.Tensor, counts: list[int], rounds: int = _ROUNDS) -> float:
    """Median over rounds of the slowest rank's time."""
    seconds = []
    for _ in range(rounds):
        world.barrier()
        start = time.perf_counter()
        world.exchange(rows, counts, counts).wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return float(world.gather_vector([statistics.median(seconds)]).max())
