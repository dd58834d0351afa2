"""Faults end in one message that says who and why, in time, with nothing left behind; or do no harm."""

from __future__ import annotations

import datetime
import os
import random
import re
import shutil
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from fullgraph.runlog import read_state, write_state
from fullgraph.shards import part_name, read_shard
from partition_tools.builder import build
from tests.builds import assignment, rich_graph
from tests.fault_runs import Place, is_root
from tests.faults import NEED_ROOT, SCENARIOS

QUICK = sorted(name for name in SCENARIOS if not name.startswith("stop "))
"""A rank that stays stopped is ended by the launcher after 30 s."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place.make(tmp_path_factory.mktemp("faults"))


def check(name: str, place: Place) -> None:
    if name in NEED_ROOT and not is_root():
        pytest.skip("needs root, to mount a small file system or to rename the host")
    outcome = SCENARIOS[name](place)
    assert outcome.good, outcome


@pytest.mark.parametrize("name", random.Random(datetime.date.today().toordinal()).sample(QUICK, 4))
def test_a_sample_of_faults_that_changes_every_day(name: str, place: Place) -> None:
    check(name, place)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_fault(name: str, place: Place) -> None:
    check(name, place)


# ------------------------------------------------------------------------------------------ files, in this process


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage") / "s"
    build(rich_graph(), assignment(np.arange(30) % 2, 2), folder)
    return folder


def cuts(size: int) -> list[int]:
    """Every 5 % of a file, and all but its last byte."""
    return [*(size * share // 100 for share in range(0, 100, 5)), size - 1]


def test_a_shard_cut_short_anywhere_is_named(shards: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shards, tmp_path / "s")
    path = folder / part_name(1, 2)
    for size in cuts(path.stat().st_size):
        shutil.copy(shards / path.name, path)
        os.truncate(path, size)
        with pytest.raises(ValueError, match=rf"{path.name}: {size} bytes; the manifest says \d+; copy the file again"):
            read_shard(folder, 1)


def test_a_flipped_byte_in_each_dataset_is_named(shards: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shards, tmp_path / "s")
    path, places = folder / part_name(1, 2), dict[str, int]()

    def note(name: str, node: object) -> None:
        if isinstance(node, h5py.Dataset) and (at := node.id.get_offset()) is not None:
            places[name] = at

    with h5py.File(path) as file:
        file.visititems(note)
    assert len(places) > 12
    for name, at in places.items():
        raw = bytearray((shards / path.name).read_bytes())
        raw[at] ^= 0x10
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=rf"{path.name}: checksum is \w+; the manifest says"):
            read_shard(folder, 1)
        assert read_shard(folder, 0).part == 0, name


def test_a_state_that_is_cut_short_or_flipped_is_named(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    write_state(path, {"model": {"a": torch.arange(3000.0), "b": torch.ones(7, 5)}, "epoch": 3})
    raw = path.read_bytes()
    assert read_state(path)["epoch"] == 3
    for size in cuts(len(raw)):
        path.write_bytes(raw[:size])
        with pytest.raises(ValueError, match=r"best\.pt cannot be read as a state: .+"):
            read_state(path)
    for value in (torch.arange(3000.0)[1000:1004], torch.ones(4)):
        at = raw.index(value.numpy().tobytes())
        path.write_bytes(raw[:at] + b"\x01" + raw[at + 1 :])
        with pytest.raises(ValueError, match=r"best\.pt cannot be read as a state: \S+ differs from its checksum"):
            read_state(path)


def test_a_build_is_replaced_under_readers(tmp_path: Path) -> None:
    """Each reading gives one build or the other, or says what was met in between."""
    out, done = tmp_path / "s", threading.Event()
    graphs = [rich_graph(seed=seed) for seed in (0, 1)]
    right = []
    for graph in graphs:
        build(graph, assignment(np.arange(30) % 2, 2), out, force=True)
        right.append(read_shard(out, 1).x.tobytes())
    found: list[bytes | str] = []

    def read() -> None:
        while not done.is_set():
            try:
                found.append(read_shard(out, 1).x.tobytes())
            except (ValueError, FileNotFoundError) as error:
                found.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(40):
        build(graphs[turn % 2], assignment(np.arange(30) % 2, 2), out, force=True)
    done.set()
    reader.join()
    assert set(right) <= set(found)
    for text in set(found) - set(right):
        assert isinstance(text, str)
        assert re.search("of build|not there|[Nn]o such f|not finished|belongs to another build", text), text


def test_what_a_killed_process_left_half_written_goes_with_the_next_write(tmp_path: Path) -> None:
    dead = next(number for number in range(2**22 - 1, 1, -1) if not Path(f"/proc/{number}").exists())
    for name in (f".best.pt.{dead}.tmp", f".best.pt.{os.getppid()}.tmp", f".last.pt.{dead}.tmp", ".best.pt.x.tmp"):
        (tmp_path / name).touch()
    write_state(tmp_path / "best.pt", {"model": {}})
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([f".best.pt.{os.getppid()}.tmp", ".best.pt.x.tmp", f".last.pt.{dead}.tmp", "best.pt"])
