"""What the doctor finds on a host that is well, and on one where something is wrong."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from rich.console import Console
from torch import Tensor

import fullgraph.__main__
import fullgraph.doctor
import fullgraph.selftest
from fullgraph.doctor import Finding, examine, examine_exchange, show
from fullgraph.host import available_memory, file_system
from fullgraph.kernels import SparseMatrix
from fullgraph.selftest import check_kernels
from fullgraph.shards import part_name, read_shard
from fullgraph.world import World
from partition_tools import assign
from partition_tools.builder import build
from tests.builds import assignment, rich_graph
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor") / "s"
    build(rich_graph(), assignment([0, 1, 2] * 10, 3), folder)
    return folder


def wrong(folder: Path | None) -> dict[str, str]:
    return {finding.what: finding.text for finding in examine(folder) if finding.level == "wrong"}


def test_a_host_that_is_well(shards: Path) -> None:
    found = list(examine(shards))
    assert {f.text for f in found if f.level == "wrong"} == set()
    names = {finding.what for finding in found}
    assert names >= {"python", "processors", "memory", "backends", "network", "METIS", "kernels", "shards", "room"}
    assert names >= {"file system", "writing", "locks", "HDF5"}
    text = "\n".join(finding.text for finding in found)
    assert f"torch {torch.__version__}" in text
    assert "all 3 as they were written" in text
    assert sorted(path.name for path in shards.iterdir()) == ["manifest.json", *(part_name(q, 3) for q in range(3))]


def test_shards_that_are_not_whole(shards: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shards, tmp_path / "s")
    with (folder / part_name(1, 3)).open("r+b") as file:
        file.write(b"x")
    assert list(wrong(folder)) == ["shards"]
    assert f"{folder / part_name(1, 3)}: checksum is" in wrong(folder)["shards"]
    assert "no such folder; build it" in wrong(tmp_path / "none")["shards"]


def test_what_is_broken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "TRUE")
    monkeypatch.setattr(fullgraph.selftest, "spmm_transposed", lambda a, x: 0 * x[:1].expand(a.shape[1], -1))
    monkeypatch.setattr(fullgraph.doctor, "backends", lambda: ["mpi"])
    monkeypatch.setattr(assign, "assign", lambda graph, options: assignment([0, 1] * 3 + [0], 2))
    found = wrong(None)
    assert set(found) == {"locks", "kernels", "backends", "METIS"}
    assert "unset it" in found["locks"]
    assert "the sparse kernel spmm_transposed is wrong on cpu in torch.float32: off by" in found["kernels"]
    assert "gloo is needed" in found["backends"]
    assert "cuts 6 pairs of a graph of 7 nodes that falls apart at 1" in found["METIS"]


def test_packages_that_are_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["torch>=99.1", "no-such-package>=1", "numpy>=2.0", 'jinja2>=99; extra == "report"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    found = [f.text for f in fullgraph.doctor._installation() if f.level == "wrong"]
    assert [text.split(":")[0] for text in found] == [
        f"torch is {torch.__version__}; expected at least 99.1",
        "no-such-package is not installed",
    ]


def test_a_folder_that_cannot_be_written_is_no_fault(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    found = {f.what: f for f in fullgraph.doctor._file_system(shards)}
    assert found["writing"].level == "note"
    assert "cannot be written (Read-only file system)" in found["writing"].text


def test_forced_locks_are_named_where_a_shard_cannot_be_read(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Unable to synchronously open file (unable to lock file, errno = 11)")

    monkeypatch.setattr(h5py, "File", refuse)
    with pytest.raises(ValueError, match=r"unable to lock file.*unset HDF5_USE_FILE_LOCKING"):
        read_shard(shards, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_are_equal_to_dense_products(dtype: torch.dtype) -> None:
    check_kernels(torch.device("cpu"), dtype)


def test_a_kernel_that_gives_zeros_for_large_sums_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fullgraph.selftest.spmm

    def faulty(a: SparseMatrix, x: Tensor, values: Tensor | None = None) -> Tensor:
        return original(a, x, values) * (a.nnz < 1000)

    monkeypatch.setattr(fullgraph.selftest, "spmm", faulty)
    with pytest.raises(RuntimeError, match="the sparse kernel a sum of many ones is wrong on cpu"):
        check_kernels(torch.device("cpu"), torch.float32)


def test_the_host_says_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory() <= total
    for name, text in {
        "limit": "1000000\n",
        "used": "400000\n",
        "mounts": f"a / ext4 rw\nb {tmp_path} nfs4 rw\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("fullgraph.host._CGROUPS", ((tmp_path / "limit", tmp_path / "used"), (tmp_path, tmp_path)))
    monkeypatch.setattr("fullgraph.host._MOUNTS", tmp_path / "mounts")
    assert available_memory() == 600_000
    assert file_system(tmp_path / "a" / "b") == "nfs4"
    assert file_system(tmp_path.parent) == "ext4"


# -------------------------------------------------------------------------------------------------------- exchange


def exchanged(world: World, damage: bool) -> list[Finding]:
    if damage and world.rank == 1:
        original = world.exchange

        def faulty(rows: Tensor, *args: Any) -> Any:
            return original(torch.zeros_like(rows), *args)

        object.__setattr__(world, "exchange", faulty)
    return list(examine_exchange(world))


@pytest.mark.parametrize("size", [2, 3])
def test_an_exchange_is_tried_and_measured(ranks: RankPool, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ranks.run(size, exchanged, False):
        assert [finding.what for finding in found] == ["exchange", "latency", "bandwidth"]
        assert f"{size} ranks on 1 host, cpu" in found[0].text
    for (finding,) in ranks.run(size, exchanged, True):
        assert finding.level == "wrong"
        assert "rank 0 got wrong numbers in: uneven exchange" in finding.text


def test_findings_are_shown_as_lines_and_decide() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60)
    good = [Finding(what="a", text="[b] " + "x" * 80), Finding(what="c", text="d", level="note")]
    assert show(iter(good), console)
    assert not show(iter([*good, Finding(what="e", text="f", level="wrong")]), console)
    assert out.getvalue().splitlines()[2:] == [
        f"  a             [b] {'x' * 80}",
        "- c             d",
        "! e             f",
    ]


def test_the_command_ends_with_a_verdict(
    shards: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["fullgraph", "doctor", *arguments])
        with pytest.raises(SystemExit) as end:
            fullgraph.__main__.main()
        return int(end.value.code or 0), capfd.readouterr().out

    code, text = run(str(shards))
    assert (code, text.splitlines()[-1]) == (0, "nothing is wrong")
    assert "\n  bandwidth " in text
    monkeypatch.setattr("fullgraph.launch.launch_local", lambda arguments, ranks: 0)
    code, text = run(str(tmp_path / "none"))
    assert (code, text.splitlines()[-1]) == (1, "something is wrong: see the lines that begin with !")
