"""The command line as a person meets it: the demo, and a launcher that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from partition_tools import build, load, partition

COMMAND = [sys.executable, "-m", "fullgraph"]
ENV = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def test_the_demo_shows_it_all_in_one_folder(tmp_path: Path) -> None:
    demo = [*COMMAND, "demo", "--nodes", "500", "--epochs", "3", "--ranks", "2", "--out", "d"]
    done = subprocess.run(demo, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in ("cut pairs", "metis", "random", "equal but for rounding", "test accuracy", "partition-tools build"):
        assert shown in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert "everything the demo wrote lies in d/" in done.stdout


def test_the_demo_leaves_a_folder_of_someone_else_alone(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine").touch()
    demo = [*COMMAND, "demo", "--out", "d"]
    done = subprocess.run(demo, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == "fullgraph: error: d exists and was not made by the demo; name another folder with --out\n"
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["mine"]


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    graph = load("demo:communities?nodes=300")
    build(graph, partition(graph, 2), tmp_path / "s")
    train = [*COMMAND, "train", "s", "--run", "r", "--epochs", "1000000"]
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen(train, cwd=tmp_path, env=ENV, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            while not (tmp_path / "r" / "metrics.jsonl").exists():
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
            ranks = psutil.Process(launcher.pid).children(recursive=True)
            assert len(ranks) >= 2
        finally:
            launcher.send_signal(signal.SIGKILL)
            launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert not alive
