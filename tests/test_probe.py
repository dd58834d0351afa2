"""The constants of the machine are measured and recorded."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from fullgraph.cost import Machine
from fullgraph.probe import measure
from fullgraph.world import World
from partition_tools import __main__ as cli
from partition_tools import probe
from tests.ranks import RankPool


def test_a_machine_is_measured(ranks: RankPool) -> None:
    found = ranks.run(2, measure)
    assert found[0] == found[1]
    assert min(found[0].flops, found[0].gather, found[0].bandwidth, found[0].latency) > 0
    alone = measure(World())
    assert (alone.bandwidth, alone.latency) == (Machine().bandwidth, Machine().latency)


def test_what_was_measured_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    measured = Machine(flops=1e9, gather=2e9, bandwidth=3e8, latency=4e-4)
    monkeypatch.setattr(probe, "measured", lambda: measured)
    out = tmp_path / "s"
    build = ["build", "demo:communities?nodes=400", "--parts", "2", "--method", "best", "--tries", "2"]
    assert cli.main([*build, "--out", str(out), "--probe"]) == 0
    stored = json.loads((out / "manifest.json").read_text())["partition"]
    assert {name: stored["options"][name] for name in ("flops", "gather", "bandwidth", "latency")} == {
        "flops": 1e9,
        "gather": 2e9,
        "bandwidth": 3e8,
        "latency": 4e-4,
    }
    assert [row["kept"] for row in stored["table"]].count(True) == 1


def test_a_machine_that_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        return subprocess.CompletedProcess([], 1, "", "no gloo here")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(ValueError, match=r"--probe: the machine could not be measured \(no gloo here\)"):
        probe.measured()


def test_a_probe_without_effect_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build", "demo:communities", "--parts", "2", "--out", "never", "--probe"]) == 2
    assert "--bandwidth has no effect with --method metis" in capsys.readouterr().err
