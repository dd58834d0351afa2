"""What a run leaves in its folder and shows to a person."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fullgraph.metrics import Scores
from fullgraph.runlog import RunLog, create_run_folder, read_state, show, write_json, write_state


def strict(text: str) -> Any:
    """JSON as the standard has it: without NaN and Infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def record(epoch: int, **changes: Any) -> dict[str, Any]:
    return {"epoch": epoch, "loss": 1.5, "seconds": 0.2, "comm_seconds": 0.05, "bytes_sent": 3_000_000} | changes


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)  # narrower than a line: it must not wrap


def shown(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


SCORES: Scores = {
    "train": {"accuracy": 0.9, "loss": 0.3},
    "val": {"accuracy": 0.8125, "loss": 0.5},
    "test": {"accuracy": math.nan, "loss": 0.6},
}


# --- files ---


def test_json_has_null_for_what_is_not_a_number(tmp_path: Path) -> None:
    value = {"a": math.nan, "b": [1.5, -math.inf, {"c": math.inf}], "d": (np.float64("nan"), 1), "e": None, "f": "NaN"}
    write_json(tmp_path / "summary.json", value)
    text = (tmp_path / "summary.json").read_text()
    assert strict(text) == {"a": None, "b": [1.5, None, {"c": None}], "d": [None, 1], "e": None, "f": "NaN"}
    assert text.endswith("}\n")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary, state = tmp_path / "summary.json", tmp_path / "best.pt"
    write_json(summary, {"epochs": 1})
    write_state(state, {"epoch": 1})
    with pytest.raises(TypeError):
        write_json(summary, {"epochs": object()})

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_json(summary, {"epochs": 2})
    with pytest.raises(OSError, match="No space left"):
        write_state(state, {"epoch": 2})
    assert strict(summary.read_text()) == {"epochs": 1}
    assert torch.load(state, weights_only=True) == {"epoch": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.pt", "summary.json"]


def test_state_is_tensors_and_plain_values(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4, "config": {"lr": 0.1}}
    write_state(tmp_path / "last.pt", state)
    found = torch.load(tmp_path / "last.pt", weights_only=True)
    assert torch.equal(found["model"]["weight"], model.weight)
    assert (found["epoch"], found["config"]) == (4, {"lr": 0.1})
    optimizer.load_state_dict(found["optimizer"])


def test_files_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_json(tmp_path / "config.json", {})
        write_state(tmp_path / "best.pt", {})
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("config.json", "best.pt")} == {0o644}


def test_a_folder_is_made_with_its_parents_and_may_exist(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    assert create_run_folder(folder) == folder
    assert create_run_folder(folder).is_dir()


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {})
    with pytest.raises(ValueError, match=r"already holds a run; name another folder with --run, or remove it first"):
        create_run_folder(tmp_path)


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="run is a file; name a folder with --run"):
        create_run_folder(tmp_path / "run")


# --- metrics.jsonl ---


def test_metrics_hold_a_line_an_epoch_as_soon_as_it_is_over(tmp_path: Path) -> None:
    with RunLog(tmp_path, 3, "accuracy", plain_console()) as log:
        for epoch in range(3):
            log.epoch(record(epoch), SCORES if epoch == 1 else None)
            assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == epoch + 1
    lines = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == record(0)
    assert lines[2] == record(2)
    assert lines[1] == record(1) | SCORES | {"test": {"accuracy": None, "loss": 0.6}}


def test_metrics_of_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    with RunLog(tmp_path, 1, "accuracy", plain_console()) as log:
        log.epoch(record(0, loss=math.inf), None)
    assert strict((tmp_path / "metrics.jsonl").read_text())["loss"] is None


def test_metrics_are_on_disk_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with RunLog(tmp_path, 2, "accuracy", plain_console()) as log:
            log.epoch(record(0), None)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert strict((tmp_path / "metrics.jsonl").read_text()) == record(0)


# --- lines ---


def test_plain_lines_where_nobody_watches(tmp_path: Path) -> None:
    console = plain_console()
    with RunLog(tmp_path, 3, "accuracy", console) as log:
        for epoch in range(3):
            log.epoch(record(epoch), SCORES if epoch == 0 else None)
    facts = "loss 1.5000  train 90.00 %  val 81.25 %  test nan %  0.2 s/epoch  comm 25%  3 MB sent"
    assert shown(console) == [f"epoch 1/3  {facts}", f"epoch 3/3  {facts}"]  # the last known scores stay


def test_a_plain_line_every_five_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 104.0, 105.0, 109.9, 110.0, 110.1])
    monkeypatch.setattr("fullgraph.runlog.time", SimpleNamespace(monotonic=lambda: next(now)))
    console = plain_console()
    with RunLog(tmp_path, 9, "accuracy", console) as log:
        for epoch in range(6):
            log.epoch(record(epoch), None)
    assert [line.split("  ")[0] for line in shown(console)] == ["epoch 1/9", "epoch 3/9", "epoch 5/9"]


def test_a_terminal_has_a_live_line_and_no_plain_ones(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with RunLog(tmp_path, 2, "accuracy", console) as log:
        for epoch in range(2):
            log.epoch(record(epoch, loss=0.25 + epoch), SCORES)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "loss 1.2500" in text
    assert "2/2" in text
    assert "epoch 1/2  " not in text


def test_a_quiet_console_shows_nothing_and_the_file_is_written(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), quiet=True)
    with RunLog(tmp_path, 1, "mae", console) as log:
        log.epoch(record(0), {"val": {"mae": 0.5}})
    assert shown(console) == []
    assert strict((tmp_path / "metrics.jsonl").read_text())["val"] == {"mae": 0.5}


def test_the_line_of_an_epoch_that_took_no_time(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 1, "mae", plain_console())
    line = log.line(record(0, seconds=0.0, comm_seconds=0.0, bytes_sent=0))
    assert line == "loss 1.5000  0 s/epoch  comm 0%  0 MB sent"


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("accuracy", 0.815, "81.50 %"),
        ("roc_auc", 1.0, "100.00 %"),
        ("micro_f1", 0.0, "0.00 %"),
        ("mae", 0.0123456, "0.01235"),
        ("loss", 12345.6, "1.235e+04"),
    ],
)
def test_shares_are_shown_in_percent_and_errors_as_numbers(metric: str, value: float, text: str) -> None:
    assert show(metric, value) == text


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert create_run_folder(tmp_path / "run") == tmp_path / "run"
    (tmp_path / "run" / "mine").touch()
    with pytest.raises(ValueError, match=r"run is not empty; name another folder with --run"):
        create_run_folder(tmp_path / "run")


def test_a_tensor_that_calls_itself_a_folder_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    write_state(path, {"model": {"w": torch.arange(6.0)}})
    raw = bytearray(path.read_bytes())
    name = raw.index(b"/data/0", raw.index(b"PK\x01\x02"))
    entry = raw.rindex(b"PK\x01\x02", 0, name)  # of the tensor, in the directory
    raw[entry + 38] = 0x10
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"best\.pt cannot be read as a state: a tensor is marked as a folder"):
        read_state(path)
