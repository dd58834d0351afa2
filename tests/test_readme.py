"""What the README shows runs as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from partition_tools import sources
from partition_tools.assign import AssignOptions, assign
from partition_tools.builder import build

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def losses(folder: Path) -> list[float]:
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def test_the_model_of_ones_own_has_the_same_losses_alone_and_on_two_ranks(tmp_path: Path) -> None:
    (script,) = (block for block in BLOCKS if "class GatedConv" in block)
    assert script.count("TrainConfig(epochs=30, eval_every=5)") == 1
    # In single precision rounding grows with the steps; a few of them in double leave no doubt.
    script = script.replace("TrainConfig(epochs=30, eval_every=5)", 'TrainConfig(epochs=4, dtype="float64")')
    graph, found = sources.load("demo:communities?nodes=600"), []
    for parts in (1, 2):
        folder = tmp_path / str(parts)
        folder.mkdir()
        build(graph, assign(graph, AssignOptions(parts=parts)), folder / "shards")
        (folder / "my_model.py").write_text(script)
        launch = [sys.executable, "my_model.py", "shards"]
        if parts > 1:
            launch[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(parts)]
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        done = subprocess.run(launch, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        found.append(losses(folder))
    assert found[0] == pytest.approx(found[1], rel=1e-10)
    assert len(found[0]) == 4


def test_the_steps_from_python_run(tmp_path: Path) -> None:
    (script,) = (block for block in BLOCKS if "partition_tools.load" in block)
    launch = [sys.executable, "-c", script]
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "labels.npy", allow_pickle=False).shape == (2000,)
    *_, accuracy, shape = done.stdout.splitlines()
    assert float(accuracy) > 0.2
    assert shape == "(2000, 64) 200"


def test_it_opens_with_two_commands() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("&& .venv/bin/fullgraph demo")
    assert commands[1].endswith("&& .venv/bin/pytest")
    assert all("-c .ci/constraints.txt" in command for command in commands)
