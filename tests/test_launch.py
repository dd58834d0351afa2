"""How runs start and end: the launcher, signals, and ranks that fail, die or hang in the middle of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import fullgraph.__main__
import fullgraph.launch
import fullgraph.models
import fullgraph.world
from fullgraph.checkpoint import way_on
from fullgraph.config import TrainConfig
from fullgraph.host import under_torchrun
from fullgraph.launch import launch_local
from fullgraph.loop import train
from fullgraph.world import World, open_world
from partition_tools.builder import build
from tests.builds import assignment
from tests.graphs import at_random, random_graph, random_splits

GRAPH = dataclasses.replace(
    random_graph("any", nodes=60, undirected=True, edges=120, features=8, seed=22),
    splits=random_splits(np.random.default_rng(22), 60, count=1),
)
PATIENCE = 240.0
"""Seconds for what takes a few, on a machine that has other things to do."""
LONG = ("--epochs", "1000000", "--eval-every", "1000000", "--hidden", "8")
NO_WAY_ON = way_on(None)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of parts."""
    folders = {parts: tmp_path_factory.mktemp("launch") / f"in {parts} parts" for parts in (1, 2, 3)}
    for parts, folder in folders.items():
        build(GRAPH, assignment(at_random(GRAPH, parts), parts), folder)
    return folders


def wait_for(what: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


# ------------------------------------------------------------------------------------------- ranks without a launcher


@dataclass(frozen=True)
class Job:
    """Ranks as torchrun starts them, forked so that they need not import torch again."""

    processes: list[BaseProcess]
    folder: Path
    store: Any

    def text(self, rank: int, stream: str) -> str:
        return (self.folder / f"{rank}.{stream}").read_text()

    def codes(self) -> list[int | None]:
        for process in self.processes:
            process.join(PATIENCE)
        return [process.exitcode for process in self.processes]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``start(size, work, *args)`` runs ``work(rank, *args)`` in ``size`` processes."""
    jobs: list[Job] = []

    def start_job(size: int, work: Callable[..., None], *args: Any) -> Job:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.ranks", "fullgraph.trainer", "torch._dynamo"])  # which optimisers load
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        processes = [
            context.Process(target=_be_rank, args=(rank, size, store.port, folder, work, args)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        jobs.append(Job(processes, folder, store))
        return jobs[-1]

    yield start_job
    for job in jobs:
        for process in job.processes:
            process.kill()
            process.join()


def _be_rank(rank: int, size: int, port: int, folder: Path, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))  # noqa: SIM115
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    fullgraph.world._LINGER_SECONDS = 0.5
    work(rank, *args)


def command(rank: int, arguments: list[str], fault: Fault | None = None) -> None:
    """``fullgraph ARGUMENTS``, with ``fault`` in the second layer's forward of its epoch on its rank."""
    if fault is not None and rank == fault.rank:
        forward, calls = fullgraph.models.GCNConv.forward, 0

        def faulty(self: Any, x: Any, view: Any, *rest: Any) -> Any:
            nonlocal calls
            calls += view.training and view.layer == 1
            if calls == fault.epoch and view.training and view.layer == 1:
                view._enter()
                fault.happen()
            return forward(self, x, view, *rest)

        fullgraph.models.GCNConv.forward = faulty  # type: ignore[method-assign]
    sys.argv = ["fullgraph", *arguments]
    fullgraph.__main__.main()


@dataclass(frozen=True)
class Fault:
    kind: str
    mark: Path
    """Made when it happens."""
    rank: int = 1
    epoch: int = 3

    def happen(self) -> None:
        self.mark.touch()
        if self.kind == "raise":
            raise LookupError("no luck")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


def train_arguments(shards: Path, run: Path, *flags: str) -> list[str]:
    return ["train", str(shards), "--model", "gcn", "--layers", "2", "--run", str(run), *LONG, *flags]


def seconds_since(mark: Path) -> float:
    return time.time() - mark.stat().st_mtime


def test_an_error_on_one_rank_ends_all_with_its_message_once(
    start: Callable[..., Job], shards: dict[int, Path], tmp_path: Path
) -> None:
    fault = Fault("raise", tmp_path / "mark")
    job = start(3, command, train_arguments(shards[3], tmp_path / "run"), fault)
    assert job.codes() == [1, 1, 1]
    assert seconds_since(fault.mark) < 30
    text = "fullgraph: error: rank 1 (epoch 3, layer 1 forward): LookupError: no luck\n"
    assert [job.text(rank, "err") for rank in (0, 2)] == ["", ""]
    assert job.text(1, "err").startswith("Traceback (most recent call last):\n")
    assert "in happen\n" in job.text(1, "err")
    assert job.text(1, "err").endswith(text)
    assert job.text(1, "err").count("no luck") == 3  # in the traceback's line of code and its end, and in the message


def test_a_rank_that_dies_is_named_by_one_of_the_others(
    start: Callable[..., Job], shards: dict[int, Path], tmp_path: Path
) -> None:
    fault = Fault("kill", tmp_path / "mark")
    job = start(3, command, train_arguments(shards[3], tmp_path / "run"), fault)
    assert job.codes() == [1, -signal.SIGKILL, 1]
    assert seconds_since(fault.mark) < 30
    said = job.text(0, "err") + job.text(2, "err")
    assert said == (
        "fullgraph: error: rank 1 ended or cannot be reached; ranks 0 and 2 waited at epoch 3, layer 1 forward; "
        f"{NO_WAY_ON}\n"
    )


def test_a_rank_that_does_not_answer_is_named_after_the_timeout(
    start: Callable[..., Job], shards: dict[int, Path], tmp_path: Path
) -> None:
    fault = Fault("sleep", tmp_path / "mark")
    job = start(3, command, train_arguments(shards[3], tmp_path / "run", "--timeout", "3"), fault)
    for rank in (0, 2):
        job.processes[rank].join(PATIENCE)
    # Once another rank has failed, the signal of a launcher ends the sleeping one at once, not after its epoch.
    job.processes[1].terminate()
    assert job.codes() == [1, -signal.SIGTERM, 1]
    assert seconds_since(fault.mark) < 30
    said = job.text(0, "err") + job.text(2, "err")
    assert said == (
        f"fullgraph: error: rank 1 did not answer within 3 s (--timeout) (process {job.processes[1].pid}, which prints "
        f"its stack); ranks 0 and 2 waited at epoch 3, layer 1 forward; raise --timeout if it is only slow, or "
        f"{NO_WAY_ON}\n"
    )
    assert re.search(r"most recent call first.*\n.* in happen\n", job.text(1, "err"))


def test_an_error_that_all_ranks_know_is_shown_once(
    start: Callable[..., Job], shards: dict[int, Path], tmp_path: Path
) -> None:
    """A wrong number of ranks, a folder that is none, and flags that are wrong."""
    jobs = [
        (start(2, command, train_arguments(shards[1], tmp_path / "a")), 1, "holds 1 part but 2 ranks were started"),
        (start(2, command, train_arguments(tmp_path / "none", tmp_path / "b")), 1, "none: no such folder; build it"),
        (start(2, command, train_arguments(shards[2], tmp_path / "c", "--lr", "-1")), 2, "--lr is -1.0; expected a"),
    ]
    for job, code, text in jobs:
        assert job.codes() == [code] * 2
        assert text in job.text(0, "err")
        assert "Traceback" not in job.text(0, "err")
        assert [job.text(1, "err"), job.text(0, "out"), job.text(1, "out")] == [""] * 3


def script(rank: int) -> None:
    """A user's own script: rank 2 raises, the others wait for it."""
    with open_world(threads=1) as world:
        if world.rank == 2:
            raise LookupError("no luck in a script")
        world.barrier()


def test_an_error_in_a_script_is_shown_once(start: Callable[..., Job]) -> None:
    job = start(3, script)
    assert job.codes() == [1, 1, 1]
    assert [job.text(rank, "err") for rank in (0, 1)] == ["", ""]
    shown = job.text(2, "err")
    assert 'raise LookupError("no luck in a script")' in shown
    assert shown.endswith("fullgraph.world.RankError: rank 2 (start): LookupError: no luck in a script\n")


def quiet_script(rank: int) -> None:
    with open_world(timeout=60) as world:
        print(world.rank, world.size, world.timeout, torch.get_num_threads(), int(world.sum_(torch.ones(1))))


def test_threads_are_the_cores_over_the_local_ranks(start: Callable[..., Job]) -> None:
    job = start(2, quiet_script)
    assert job.codes() == [0, 0]
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [job.text(rank, "out") for rank in range(2)] == [f"{rank} 2 60 {threads} 2\n" for rank in range(2)]


def test_one_process_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    try:
        with open_world(threads=3) as world:
            assert (world.rank, world.size, torch.get_num_threads()) == (0, 1, 3)
        with open_world():
            assert torch.get_num_threads() == len(os.sched_getaffinity(0))
    finally:
        torch.set_num_threads(before)
    assert not under_torchrun()
    assert under_torchrun({"RANK": "0", "WORLD_SIZE": "1"})


def test_ranks_that_do_not_come_are_waited_for_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**places, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    text = f"rank 0 of 2 could not join the others at 127.0.0.1:{store.port} within 0.5 s: "
    with pytest.raises(ValueError, match=re.escape(text) + ".*; check that all ranks were started"):
        open_world(timeout=0.5, threads=torch.get_num_threads()).__enter__()
    assert not dist.is_initialized()


def test_one_rank_under_a_launcher_is_one_process(
    start: Callable[..., Job], shards: dict[int, Path], tmp_path: Path
) -> None:
    flags = ["--model", "gcn", "--hidden", "8", "--epochs", "4", "--threads", "1", "--run"]
    job = start(1, command, ["train", str(shards[1]), *flags, str(tmp_path / "launched")])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(
            shards[1], TrainConfig(model="gcn", hidden=8, epochs=4), run=tmp_path / "alone", console=Console(quiet=True)
        )
    finally:
        torch.set_num_threads(before)
    assert job.codes() == [0], job.text(0, "err")
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("launched", "alone")]
    losses = [[json.loads(line)["loss"] for line in run] for run in lines]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


class Store:
    """A store of one process, in which other ranks may have written."""

    def __init__(self, **values: str) -> None:
        self.values = values

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.values.setdefault(key, value).encode()


GONE = RuntimeError("[gloo/pair.cc:537] Read error [127.0.0.1]:24751: Connection reset by peer. GLHF!\nmore")


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([], "ranks 0, 2 and 3 ended or cannot be reached; rank 1 waited at start; start again"),
        ([0, 3], "rank 2 ended or cannot be reached; ranks 0, 1 and 3 waited at start; start again"),
        (
            [0, 2, 3],
            "the connection between ranks broke at start: RuntimeError: [gloo/pair.cc:537] Read error "
            "[127.0.0.1]:24751: Connection reset by peer. GLHF!; start again",
        ),
    ],
)
def test_ranks_that_say_that_they_wait_are_not_lost(
    monkeypatch: pytest.MonkeyPatch, others: list[int], text: str
) -> None:
    monkeypatch.setattr(fullgraph.world, "_GATHER_SECONDS", 0.0)
    store = Store(**{fullgraph.world._LOST_KEY.format(rank=rank): "loss" for rank in others})
    error = World(1, 4, store=store).report_failure(GONE)
    assert (str(error), error.shown_by, error.__cause__) == (text, 1, None)
    # Whoever comes later, for whatever reason, has the same error.
    later = World(2, 4, store=store).report_failure(LookupError("no luck"))
    assert (str(later), later.shown_by, later.__cause__) == (text, 1, None)


def test_a_failure_without_a_store_is_still_told() -> None:
    error = World(1, 2, store=None).report_failure(cause := LookupError("no luck"))
    assert (str(error), error.shown_by) == ("rank 1 (start): LookupError: no luck", 1)
    assert error.__cause__ is cause
    assert not World(1, 2, store=None).failed


# ------------------------------------------------------------------------------------------------------ the launcher


@dataclass(frozen=True)
class Launched:
    process: subprocess.Popen[str]
    run: Path
    log: Path

    def wait_for_epochs(self) -> None:
        metrics = self.run / "metrics.jsonl"
        wait_for(lambda: self.process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 2))
        assert self.process.poll() is None, self.log.read_text()

    def ranks(self) -> list[psutil.Process]:
        """In order of rank."""
        ranks = psutil.Process(self.process.pid).children(recursive=True)
        ranks = [rank for rank in ranks if "RANK" in rank.environ()]
        return sorted(ranks, key=lambda rank: int(rank.environ()["RANK"]))


@pytest.fixture
def launched(shards: dict[int, Path], tmp_path: Path) -> Iterator[Launched]:
    """A long run on two ranks that ``fullgraph train`` starts, in folders whose names have blanks and more."""
    run, log = tmp_path / 'a run; $HOME "é"', tmp_path / "log"
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    arguments = [sys.executable, "-m", "fullgraph", *train_arguments(shards[2], run, "--seed", "17")]
    with log.open("w") as file:
        process = subprocess.Popen(arguments, stdout=file, stderr=file, text=True, env=environment)
    try:
        yield Launched(process, run, log)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


def test_ctrl_c_ends_ranks_that_meet_on_loopback_with_a_summary(launched: Launched, shards: dict[int, Path]) -> None:
    launched.wait_for_epochs()
    ranks = launched.ranks()
    assert len(ranks) == 2
    sockets = [s for p in (psutil.Process(launched.process.pid), *ranks) for s in p.net_connections()]
    listening = [s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN]
    assert len(listening) >= 3  # the launcher's store, and each rank's for the others
    assert set(listening) == {"127.0.0.1"}

    launched.process.send_signal(signal.SIGINT)
    assert launched.process.wait(PATIENCE) == 128 + signal.SIGINT
    assert not any(rank.is_running() for rank in ranks)
    log = launched.log.read_text()
    assert "Traceback" not in log
    assert "error" not in log
    assert "death signal" not in log
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"2 ranks on cpu, {threads} compute thread{'s' if threads > 1 else ''} each" in log
    assert f"run folder: {launched.run}" in log
    summary = json.loads((launched.run / "summary.json").read_text())
    assert summary["stopped_by"] == "SIGINT"
    assert summary["epochs"] == (launched.run / "metrics.jsonl").read_text().count("\n")
    assert f"stopped after {summary['epochs']} epochs: SIGINT" in log
    config = json.loads((launched.run / "config.json").read_text())
    assert (config["seed"], config["shards"], config["threads"]) == (17, str(shards[2]), threads)


def test_a_rank_that_is_killed_ends_the_run(launched: Launched) -> None:
    launched.wait_for_epochs()
    ranks = launched.ranks()
    ranks[1].kill()
    assert launched.process.wait(PATIENCE) == 128 + signal.SIGKILL
    assert not any(rank.is_running() for rank in ranks)
    log = launched.log.read_text()
    assert log.splitlines()[-1] == (
        f"fullgraph: error: rank 1 was ended by SIGKILL (this host may be out of memory); {NO_WAY_ON}"
    )
    assert log.count("rror") == 1
    assert not (launched.run / "summary.json").exists()


def test_ranks_that_fail_at_once_give_their_exit_code(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, whose signals and files are left as they were."""
    before = signal.getsignal(signal.SIGINT)
    scratch = {path.name for path in Path("/tmp").glob("torchelastic_*")}
    assert launch_local(["train", "nowhere", "--layers", "none"], 2) == 2
    shown = capfd.readouterr()
    assert shown.err.count("Error parsing --layers") == 1
    assert "torch" not in shown.err
    assert signal.getsignal(signal.SIGINT) is before
    assert {path.name for path in Path("/tmp").glob("torchelastic_*")} <= scratch


@pytest.mark.parametrize(
    ("codes", "code", "text"),
    [
        ({0: -15, 1: 1}, 1, ""),
        ({0: 2, 1: -9}, 2, ""),  # a rank that did not end in time was killed by the launcher
        ({0: -15, 1: -9}, 137, "rank 1 was ended by SIGKILL (this host may be out of memory); try again"),
        ({0: -11, 1: -15, 2: -15}, 139, "rank 0 was ended by SIGSEGV; try again"),
        ({0: -15, 1: -15}, 143, "rank 0 was ended by SIGTERM; try again"),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], codes: dict[int, int], code: int, text: str) -> None:
    assert fullgraph.launch._exit_code(codes, "try again") == code
    assert capsys.readouterr().err == (f"fullgraph: error: {text}\n" if text else "")


# --------------------------------------------------------------------------------------------------------- the flags


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """(exit code, standard error) of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["fullgraph", *arguments])
    error = io.StringIO()
    with contextlib.redirect_stderr(error), pytest.raises(SystemExit) as end:
        fullgraph.__main__.main()
    assert isinstance(end.value.code, int)
    return end.value.code, error.getvalue()


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (["--layers", "0"], ["--layers is 0; expected at least 1"]),
        (["--model", "gcnn"], ["--model", "gcnn", "gcn", "sage", "gin", "gat"]),
        (["--lr", "fast"], ["--lr", "'fast'"]),
        (["--lr", "-0.1"], ["--lr is -0.1; expected a positive number"]),
        (["--dropout", "1"], ["--dropout is 1.0; expected a probability in [0, 1)"]),
        (["--epochs", "1.5"], ["--epochs", "'1.5'"]),
        (["--patience", "0"], ["--patience is 0; expected at least 1 epoch"]),
        (["--timeout", "inf"], ["--timeout is inf; expected a positive number"]),
        (["--model", "gat", "--hidden", "10", "--heads", "4"], ["--hidden 10", "--heads 4"]),
        (["--hiden", "10"], ["--hiden"]),
        (["--hidden"], ["--hidden"]),
    ],
)
def test_a_wrong_flag_is_named_with_its_value(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], texts: list[str]
) -> None:
    code, error = run_main(monkeypatch, "train", "shards", *flags)
    assert code == 2
    assert all(text in error for text in texts), error
    assert "Traceback" not in error


def test_a_folder_that_is_none_is_one_message_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, error = run_main(monkeypatch, "train", str(tmp_path / "none"))
    assert code == 2
    assert error.startswith(f"fullgraph: error: {tmp_path / 'none'}: no such folder; build it: partition-tools build")


def test_an_interrupt_before_any_rank_starts_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tyro.cli", interrupt)
    assert run_main(monkeypatch, "train", "shards") == (130, "")


def test_one_part_needs_no_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shards: dict[int, Path], tmp_path: Path
) -> None:
    """Ctrl-C stops after the epoch; a second one at once."""
    monkeypatch.delenv("RANK", raising=False)
    before, run = torch.get_num_threads(), tmp_path / "run"
    metrics = run / "metrics.jsonl"

    def interrupt() -> None:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert run_main(monkeypatch, *train_arguments(shards[1], run, "--threads", "1")) == (130, "")
    finally:
        thread.join()
        torch.set_num_threads(before)
    assert json.loads((run / "summary.json").read_text())["stopped_by"] == "SIGINT"
    assert "1 rank on cpu, 1 compute thread each" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
