"""Faults of every kind, done to real runs, and what became of each: the table of ``benchmarks.bench_faults``."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import psutil
import torch

from fullgraph.checkpoint import CheckpointWriter, Snapshot, checkpoints_of, read_checkpoint
from fullgraph.loading import Placement
from fullgraph.shards import MANIFEST, part_name, read_manifest, read_shard
from fullgraph.world import World
from partition_tools.builder import build
from tests.builds import assignment
from tests.fault_runs import (
    ROOT,
    TIMEOUT,
    Outcome,
    Place,
    faulty,
    message_of,
    small_disk,
    small_graph,
    train,
    wait_for,
    wait_for_epochs,
    watch,
)

STAGES = ("load", "plan", "forward", "backward", "gradient sum", "evaluation", "checkpoint", "save")

# --------------------------------------------------------------------------------------------------- ranks that fail


def at_stage(place: Place, stage: str, kind: str, rank: int) -> Outcome:
    """A rank gets SIGKILL, SIGSTOP or no more memory as it comes to a stage."""
    run, mark = place.fresh("run"), place.folder / "mark"
    mark.unlink(missing_ok=True)
    fault = {"stage": stage, "kind": kind, "rank": rank, "mark": str(mark)}
    names = {"kill": "SIGKILL", "stop": "SIGSTOP for good", "memory": "out of memory"}
    flags = ("--eval-every", "3") + (("--epochs", "4") if stage == "save" else ())
    flags += ("--checkpoint-every", "1") if stage == "checkpoint" else ()
    says = {
        "kill": "rank {} was ended by SIGKILL.*" + ("--resume" if stage == "checkpoint" else "start again"),
        "stop": "rank {} did not answer.*start again",
        "memory": "rank {}.*out of memory",
    }
    outcome = watch(
        f"{names[kind]}: rank {rank} at {stage}",
        train(place.shards, run, *flags),
        looked_at=(place.shards, run),
        env=faulty(fault),
        mark=mark,
        says=says[kind].format(rank),
    )
    return _with_resume(outcome, place, run) if stage == "checkpoint" else outcome


def _with_resume(outcome: Outcome, place: Place, run: Path, *more: str) -> Outcome:
    """The same, where the run then goes on from a checkpoint to its end; otherwise that it did not is left."""
    if not more:
        done = max((read_checkpoint(path).facts.epoch for path in checkpoints_of(run)), default=0)
        more = ("--epochs", str(done + 3))
    after = watch("", train(place.shards, run, "--resume", "latest", *more), looked_at=(run,))
    at = re.search(r"goes on from .*epoch-0*(\d+), after", after.output)
    if after.code == 0 and not after.left and at:
        return replace(outcome, message=f"{outcome.message} / then --resume latest: goes on from epoch {at[1]}")
    return replace(outcome, left=(*outcome.left, f"what cannot be resumed: {after.message}"))


def straggler(place: Place) -> Outcome:
    """A rank stops, and goes on before the others give up."""
    run, mark = place.fresh("run"), place.folder / "mark"
    mark.unlink(missing_ok=True)
    fault = {"stage": "forward", "kind": "stop", "rank": 1, "mark": str(mark)}

    def wake(process: subprocess.Popen[str]) -> None:
        wait_for(mark.exists)
        time.sleep(TIMEOUT / 2)
        for rank in psutil.Process(process.pid).children(recursive=True):
            rank.send_signal(signal.SIGCONT)

    return watch(
        f"SIGSTOP: rank 1 for {TIMEOUT / 2:g} s",
        train(place.shards, run, "--epochs", "6"),
        env=faulty(fault),
        looked_at=(place.shards, run),
        mark=mark,
        during=wake,
        ends="goes on",
    )


def restarted(place: Place) -> Outcome:
    """A rank is killed, and all go on from the last checkpoint with no hand on it."""
    run, mark = place.fresh("run"), place.folder / "mark"
    mark.unlink(missing_ok=True)
    fault = {"stage": "forward", "kind": "kill", "rank": 1, "mark": str(mark)}
    return watch(
        "SIGKILL: rank 1 at forward, with --max-restarts 1",
        train(place.shards, run, "--epochs", "6", "--checkpoint-every", "1", "--max-restarts", "1"),
        looked_at=(place.shards, run),
        env=faulty(fault),
        mark=mark,
        ends="goes on",
    )


def launcher_killed(place: Place) -> Outcome:
    run = place.fresh("run")

    def kill(process: subprocess.Popen[str]) -> float:
        wait_for_epochs(run)
        process.kill()
        time.sleep(1)  # the kernel tells the ranks
        return time.time()

    outcome = watch("SIGKILL: the launcher", train(place.shards, run), looked_at=(run,), during=kill)
    # Nobody is left to speak; that no rank trains on is what is asked.
    return Outcome(**vars(outcome) | {"message": outcome.message or "(nobody is left to say anything)"})


# ------------------------------------------------------------------------------------------------ disks and folders


def disk_full_while_building(place: Place) -> Outcome:
    """It fills up on the way, though what was free at the start was enough."""
    with small_disk(place.folder / "disk", "250k") as disk:
        command = [sys.executable, "-m", "partition_tools", "build", "demo:communities?nodes=500", "--parts", "2"]
        outcome = watch(
            "disk full: shards",
            [*command, "--out", str(disk / "s")],
            env=faulty({"stage": "space", "rank": None}),
            says="No space left on device|cannot be written",
        )
        return replace(outcome, left=tuple(sorted(path.name for path in disk.iterdir())))


def disk_full_while_logging(place: Place) -> Outcome:
    with small_disk(place.folder / "disk", "64k") as disk:
        return watch(
            "disk full: metrics.jsonl",
            train(place.shards, disk / "run"),
            looked_at=(disk,),
            says="metrics.jsonl.*No space",
        )


def disk_full_while_saving(place: Place) -> Outcome:
    with small_disk(place.folder / "disk", "256k") as disk:
        flags = ("--epochs", "3", "--hidden", "4096")
        return watch(
            "disk full: state",
            train(place.shards, disk / "run", *flags),
            looked_at=(disk,),
            says="cannot be written.*make room",
        )


def read_only_run_folder(place: Place) -> Outcome:
    with small_disk(place.folder / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        return watch("read-only: run folder", train(place.shards, disk / "run"), says="Read-only file system.*--run")


def disk_full_at_a_checkpoint(place: Place) -> Outcome:
    """The first has room, the second has not."""
    with small_disk(place.folder / "disk", "3m") as disk:
        flags = ("--checkpoint-every", "20", "--hidden", "4096", "--threads", "1")
        run = disk / "run"
        outcome = watch(
            "disk full: checkpoint",
            train(place.shards, run, *flags),
            looked_at=(disk,),
            says="checkpoint .*cannot be written.*make room.*epoch-00000020 is as it was",
        )
        subprocess.run(["mount", "-o", "remount,size=30m", str(disk)], check=True)
        return _with_resume(outcome, place, run, "--epochs", "21", "--hidden", "4096")


def read_only_checkpoints(place: Place) -> Outcome:
    with small_disk(place.folder / "disk", "3m") as disk:
        run = disk / "run"

        def lock(_: subprocess.Popen[str]) -> float:
            wait_for(lambda: any((run / "checkpoints").glob("epoch-*")))
            folder = str(run / "checkpoints")
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
            return time.time()

        return watch(
            "read-only: checkpoints, during a run",
            train(place.shards, run, "--checkpoint-every", "200"),
            looked_at=(disk,),
            during=lock,
            says="checkpoint .*Read-only file system.*let it be written.*--run.*is as it was",
        )


def vanished_checkpoints(place: Place) -> Outcome:
    """They are made anew."""
    run = place.fresh("run")

    def remove(process: subprocess.Popen[str]) -> float:
        wait_for(lambda: any((run / "checkpoints").glob("epoch-*")))
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        now = time.time()
        wait_for(lambda: any((run / "checkpoints").glob("epoch-*")))
        process.send_signal(signal.SIGTERM)
        return now

    outcome = watch(
        "vanished: checkpoints, during a run",
        train(place.shards, run, "--checkpoint-every", "100"),
        looked_at=(run,),
        during=remove,
        says="",
    )
    text = "(they are made anew; then it was asked to stop)"
    return _with_resume(replace(outcome, message=outcome.message or text), place, run)


def vanished_run_folder(place: Place) -> Outcome:
    run = place.fresh("run")

    def remove(_: subprocess.Popen[str]) -> float:
        wait_for_epochs(run)
        shutil.rmtree(run)
        return time.time()

    return watch(
        "vanished: run folder, during a run",
        train(place.shards, run),
        looked_at=(place.shards,),
        during=remove,
        says="metrics.jsonl: was removed.*--run",
    )


def read_only_shards(place: Place) -> Outcome:
    with small_disk(place.folder / "disk", "3m") as disk:
        shutil.copytree(place.shards, disk / "s")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        command = train(disk / "s", place.fresh("run"), "--epochs", "3")
        return watch("read-only: shards", command, looked_at=(disk,), ends="goes on")


def read_only_build(place: Place) -> Outcome:
    with small_disk(place.folder / "disk", "3m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        command = [sys.executable, "-m", "partition_tools", "build", "demo:communities?nodes=500", "--parts", "2"]
        return watch("read-only: --out of a build", [*command, "--out", str(disk / "s")], says="--out")


def vanished_shards_folder(place: Place) -> Outcome:
    """A run has read them when it begins."""
    shards, run = place.copy("copy"), place.fresh("run")

    def remove(process: subprocess.Popen[str]) -> float:
        wait_for_epochs(run)
        shutil.rmtree(shards)
        return time.time()

    command = train(shards, run, "--epochs", "2000", "--eval-every", "2000")
    return watch("vanished: shards, during a run", command, looked_at=(run,), during=remove, ends="goes on")


def vanished_shards(place: Place) -> Outcome:
    shards = place.copy("copy")
    (shards / part_name(1, 2)).unlink()
    return watch("vanished: a shard", train(shards, place.fresh("run")), says="part-00001.*not there")


# --------------------------------------------------------------------------------------- hosts that share no disk

_BOTH = "; ".join(["$0 0 & a=$!", "$0 1 & b=$!", "wait $a; x=$?", "wait $b; y=$?", "exit $((x > y ? x : y))"])


def _on_two_hosts(place: Place, fault: str, parts: tuple[int, int], *flags: str, **expected: str) -> Outcome:
    """Two ranks that see one folder as two hosts do, each with its own content and one part of the shards."""
    at, script = place.folder / "host", place.folder / "rank.sh"
    at.mkdir(exist_ok=True)
    for host, part in enumerate(parts):
        own = place.folder / f"host-{host}"
        if not own.exists():
            shutil.copytree(place.shards, own / "shards")
            (own / "shards" / part_name(1 - part, 2)).unlink()
    command = shlex.join(train(at / "shards", at / "run", *flags))
    script.write_text(
        f"#!/bin/sh\nexec unshare -m sh -c 'mount --bind {place.folder}/host-$0 {at} && RANK=$0 exec {command}' $1\n"
    )
    script.chmod(0o700)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = _rank_env(0, free.getsockname()[1]) | {"LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    tops = tuple(place.folder / f"host-{host}" for host in (0, 1))
    return watch(fault, ["sh", "-c", _BOTH, str(script)], env=env, looked_at=tops, **expected)


def apart(place: Place) -> Outcome:
    """Each host's rank takes the part that is there, and keeps its own checkpoints."""
    for host in (0, 1):
        place.fresh(f"host-{host}")
    fault, parts = "hosts that share no disk, parts the other way round", (1, 0)
    flags = ("--checkpoint-every", "2", "--epochs")
    first = _on_two_hosts(place, fault, parts, *flags, "4", ends="goes on")
    if not first.good:
        return first
    again = _on_two_hosts(place, fault, parts, *flags, "6", "--resume", "latest", ends="goes on")
    at = re.search(r"goes on from .*epoch-0*(\d+), after", again.output)
    text = f"(ends; then --resume latest: goes on from epoch {at[1]})" if at else "it does not go on"
    return replace(again, message=again.message or text, code=again.code if at else 1)


def part_on_no_host(place: Place) -> Outcome:
    for host in (0, 1):
        place.fresh(f"host-{host}")
    says = r"part-00000-of-00002.h5.* not there"
    return _on_two_hosts(place, "a part that no host has", (1, 1), says=says)


# ------------------------------------------------------------------------------------------------------ wrong builds


def stale_manifest(place: Place) -> Outcome:
    shards = place.copy("copy")
    build(small_graph(1), assignment(np.arange(400) % 2, 2), place.fresh("other"))
    shutil.copy(place.folder / "other" / MANIFEST, shards)
    return watch("stale manifest", train(shards, place.fresh("run")), says="of build .* the manifest is of build")


def leftovers(place: Place) -> Outcome:
    """A folder that a killed build left is no build; the next one takes its place."""
    shards = place.copy("copy")
    (shards / MANIFEST).unlink()
    return watch("leftovers of an older build", train(shards, place.fresh("run")), says="not finished.*--force")


def damaged_shard(place: Place) -> Outcome:
    shards = place.copy("copy")
    path = shards / part_name(1, 2)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    return watch(
        "a flipped bit: shard", train(shards, place.fresh("run")), says="part-00001.*checksum is.*copy the file again"
    )


def two_builds(place: Place) -> Outcome:
    """Two builds into one folder at once: one is whole, the other says so."""
    out = place.fresh("twice")
    command = [sys.executable, "-m", "partition_tools", "build", "demo:communities?nodes=3000", "--parts", "2"]
    others: list[subprocess.Popen[bytes]] = []

    def second(_: subprocess.Popen[str]) -> None:
        others.append(
            subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)
        )

    outcome = watch("two builds into one folder", [*command, "--out", str(out)], during=second)
    _, said = others[0].communicate(timeout=120)
    codes = sorted([outcome.code or 0, others[0].returncode])
    left = tuple(path.name for path in place.folder.iterdir() if ".building" in path.name)
    text = outcome.message or message_of(said.decode().splitlines())
    facts = {"code": 2 if codes == [0, 2] else codes[1], "message": text, "left": left}
    return Outcome(**vars(outcome) | facts)


# --------------------------------------------------------------------------- damaged files, read in this process


def _cuts(raw: bytes) -> Iterator[bytes]:
    """Every 5 % of a file, and all but its last byte."""
    for size in (*(len(raw) * share // 100 for share in range(0, 100, 5)), len(raw) - 1):
        yield raw[:size]


def _flips(raw: bytes, places: Iterable[int]) -> Iterator[bytes]:
    for at in places:
        yield raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]


def _damaged(fault: str, path: Path, damages: Iterator[bytes], read: Callable[[], object]) -> Outcome:
    """Each damage must be an error that names the file."""
    raw, start = path.read_bytes(), time.time()
    messages, passed = [], []
    for number, damage in enumerate(damages):
        path.write_bytes(damage)
        try:
            read()
            passed.append(f"damage {number} is read")
        except ValueError as error:
            messages.append(str(error))
    path.write_bytes(raw)
    return Outcome(
        fault=f"{fault}, {len(messages)} times",
        seconds=round(time.time() - start, 1),
        code=None if passed else 2,
        message=messages[-1] if messages else "",
        orphans=0,
        left=tuple(passed),
        says=path.name,
    )


def shard_cut(place: Place) -> Outcome:
    path = place.copy("copy") / part_name(1, 2)
    damages = _cuts(path.read_bytes())
    return _damaged("a shard cut short at every 5 %", path, damages, lambda: read_shard(path.parent, 1))


def shard_flipped(place: Place) -> Outcome:
    path, places = place.copy("copy") / part_name(1, 2), list[int]()

    def note(_: str, node: object) -> None:
        if isinstance(node, h5py.Dataset) and (at := node.id.get_offset()) is not None:
            places.append(at)

    with h5py.File(path) as file:
        file.visititems(note)
    damages = _flips(path.read_bytes(), places)
    return _damaged("a flipped bit in each dataset of a shard", path, damages, lambda: read_shard(path.parent, 1))


def _saved(place: Place) -> tuple[Path, Callable[[], object]]:
    """A file of a checkpoint of two parts, and how it is read."""
    run, manifest = place.fresh("saved"), read_manifest(place.shards)
    here = Placement(
        ranks=(0, 0), mine=(0, 1), owned_global=np.arange(400), owned_part=(np.arange(400) % 2).astype("i4")
    )
    rows = {"features": torch.arange(4000.0).reshape(400, 10)}
    snapshot = Snapshot(replicated={"model": {"w": torch.arange(300.0)}}, rows=rows, ids=torch.arange(400))
    writer = CheckpointWriter(run, World(), here, manifest, 1)
    writer.save(snapshot, epoch=1, config={}, layer0="once", metrics_bytes=0, score=None)
    (folder,) = checkpoints_of(run)
    return folder / "replicated.pt", lambda: read_checkpoint(folder).check(here, manifest.build_id)


def checkpoint_cut(place: Place) -> Outcome:
    path, read = _saved(place)
    return _damaged("a checkpoint cut short at every 5 %", path, _cuts(path.read_bytes()), read)


def checkpoint_flipped(place: Place) -> Outcome:
    path, read = _saved(place)
    raw = path.read_bytes()
    places = range(0, len(raw), max(1, len(raw) // 20))
    return _damaged("a flipped bit at every 5 % of a checkpoint", path, _flips(raw, places), read)


# ----------------------------------------------------------------------------------------------------------- network


def _rank_env(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def port_in_use(place: Place) -> Outcome:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = _rank_env(0, taken.getsockname()[1])
        return watch(
            "a port in use", train(place.shards, place.fresh("run")), env=env, says="127.0.0.1:.* in use.*MASTER_PORT"
        )


def unreachable(place: Place) -> Outcome:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        env = _rank_env(1, closed.getsockname()[1])
        return watch(
            "an unreachable rendezvous", train(place.shards, place.fresh("run")), env=env, says="rank 1.*127.0.0.1:"
        )


def unresolvable_host(place: Place) -> Outcome:
    """Ranks of one host meet whatever it is called."""
    command = train(place.shards, place.fresh("run"), "--epochs", "3")
    renamed = ["unshare", "-u", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh", *command]
    return watch("a host name that does not resolve", renamed, ends="goes on")


def missing_rank(place: Place) -> Outcome:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return watch("a rank that never comes", train(place.shards, place.fresh("run")), env=_rank_env(0, port))


def not_finite(place: Place) -> Outcome:
    run = place.fresh("run")
    return watch(
        "a loss that is not finite",
        train(place.shards, run, "--lr", "1e30", "--optimizer", "sgd"),
        looked_at=(run,),
    )


def wrong_number_of_ranks(place: Place) -> Outcome:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m"]
    command = train(place.shards, place.fresh("run"))
    return watch("more ranks than parts", [*torchrun, *(f"{w}-dir" if w == "--run" else w for w in command[2:])])


Scenario = Callable[[Place], Outcome]


def _staged(stage: str, kind: str, rank: int) -> Scenario:
    return lambda place: at_stage(place, stage, kind, rank)


SCENARIOS: dict[str, Scenario] = {
    **{f"kill {rank} at {stage}": _staged(stage, "kill", rank) for stage in STAGES for rank in (0, 1)},
    **{f"stop 1 at {stage}": _staged(stage, "stop", 1) for stage in ("plan", "forward", "gradient sum")},
    "stop 0 at forward": _staged("forward", "stop", 0),
    "memory 1 at forward": _staged("forward", "memory", 1),
    "memory 0 at load": _staged("load", "memory", 0),
    "straggler": straggler,
    "restarted": restarted,
    "launcher": launcher_killed,
    "disk full: shards": disk_full_while_building,
    "disk full: logs": disk_full_while_logging,
    "disk full: state": disk_full_while_saving,
    "disk full: checkpoint": disk_full_at_a_checkpoint,
    "read-only run folder": read_only_run_folder,
    "read-only checkpoints": read_only_checkpoints,
    "read-only shards": read_only_shards,
    "read-only build": read_only_build,
    "vanished run folder": vanished_run_folder,
    "vanished checkpoints": vanished_checkpoints,
    "vanished shards": vanished_shards_folder,
    "vanished shard": vanished_shards,
    "apart": apart,
    "part on no host": part_on_no_host,
    "stale manifest": stale_manifest,
    "leftovers": leftovers,
    "damaged shard": damaged_shard,
    "shard cut": shard_cut,
    "shard flipped": shard_flipped,
    "checkpoint cut": checkpoint_cut,
    "checkpoint flipped": checkpoint_flipped,
    "two builds": two_builds,
    "port in use": port_in_use,
    "unreachable": unreachable,
    "missing rank": missing_rank,
    "unresolvable host": unresolvable_host,
    "not finite": not_finite,
    "more ranks than parts": wrong_number_of_ranks,
}
NEED_ROOT = frozenset(
    name for name in SCENARIOS if name.startswith(("disk full", "read-only", "unresolvable", "apart", "part on"))
)
del SCENARIOS["kill 1 at save"]  # rank 0 alone saves
