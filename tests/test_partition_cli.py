"""The command line as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from fullgraph.shards import read_manifest, read_shard
from partition_tools.__main__ import main
from partition_tools.sources import save_npz
from tests.builds import change, put, rich_graph, two_triangles
from tests.data import SHARED, needs_data

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in an empty folder that holds the graph g.npz; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    save_npz(Path("g.npz"), two_triangles(y=np.array([0, 0, 0, 1, 1, 1]), x=np.ones((6, 2), np.float32)))

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_build_verify_report(run: Run) -> None:
    code, out, _ = run("build", "g.npz", "--parts", "2", "--out", "s", "--method", "contiguous")
    assert code == 0
    lines = out.splitlines()
    assert any(line.startswith("nodes") and "6" in line for line in lines)
    assert any("random split 0.6/0.2/0.2 with seed 1" in line for line in lines)
    assert lines[-1] == "next: fullgraph train s, or partition-tools report s"
    assert run("verify", "s")[:2] == (0, "s: whole: every file is as it was written\n")
    assert run("verify", "s", "--deep")[:2] == (0, "s: whole: every node, edge and value is where it was built\n")
    code, out, err = run("report", "s", "--json", "--model", "gat", "--layers", "3", "--hidden", "16", "--latency", "1")
    assert (code, err) == (0, "")
    content = json.loads(out)
    (found,) = content["partitionings"]
    assert (found["folder"], found["name"], found["method"], found["seed"]) == ("s", "g", "contiguous", 1)
    assert (found["cut_edges"], found["cut_pairs"], len(found["layers"])) == (2, 1, 3)
    assert (content["model"]["model"], content["model"]["hidden"], content["machine"]["latency"]) == ("gat", 16, 1.0)
    code, out, _ = run("report", "s", "s", "--csv")
    assert code == 0
    assert len(out.splitlines()) == 3
    code, out, _ = run("report", "s")
    assert code == 0
    assert "cut pairs" in out


def test_metis_and_its_notes(run: Run) -> None:
    code, out, _ = run("build", "g.npz", "--parts", "2", "--out", "s")
    assert code == 0
    assert "note: METIS saw 7 undirected pairs for 14 edges" in out
    assert json.loads(run("report", "s", "--json")[1])["partitionings"][0]["cut_pairs"] == 1


def test_options_reach_the_build(run: Run) -> None:
    save_npz(Path("one-way.npz"), rich_graph(edges=40, y=np.arange(30) % 4))
    Path("parts.txt").write_text("0\n1\n2\n" * 10)
    code, _, err = run(
        *("build", "one-way.npz", "--parts", "3", "--out", "s", "--method", "file:parts.txt"),
        *("--undirected", "--random-split", "0.5/0.25/0.25", "--seed", "3"),
    )
    assert (code, err) == (0, "")
    manifest = read_manifest("s")
    assert manifest.graph["directed"] is False
    assert manifest.graph["num_splits"] == 1
    assert any("made undirected" in text for text in manifest.changes)
    assert any("random split 0.5/0.25/0.25 with seed 3" in text for text in manifest.changes)
    assert read_shard("s", 1).owned_global.tolist() == list(range(1, 30, 3))
    # The graph's own splits are kept unless asked, all of them.
    assert run("build", "one-way.npz", "--parts", "2", "--out", "t", "--method", "random")[0] == 0
    assert read_manifest("t").graph["num_splits"] == 2


def test_a_graph_without_labels_has_no_splits(run: Run) -> None:
    save_npz(Path("bare.npz"), two_triangles())
    assert run("build", "bare.npz", "--parts", "2", "--out", "s")[0] == 0
    assert read_manifest("s").graph["num_splits"] == 0
    code, _, err = run("build", "bare.npz", "--parts", "2", "--out", "t", "--random-split", "0.6/0.2/0.2")
    assert code == 2
    assert "no node has a label" in err


def test_verify_names_the_fault_and_exits_1(run: Run) -> None:
    run("build", "g.npz", "--parts", "2", "--out", "s", "--method", "contiguous")
    name = change(Path("s"), 1, put("features/x", (1, 0), 2.0))
    assert run("verify", "s")[0] == 0  # the manifest was made to agree with the file
    code, out, _ = run("verify", "s", "--deep")
    assert code == 1
    assert f"{name}: features/x[1]: differs from the source graph at global id 4" in out
    assert "s: 1 fault" in out
    with Path("s", name).open("r+b") as file:
        file.write(b"x")
    code, out, _ = run("verify", "s")
    assert code == 1
    assert f"{name}: checksum is" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("report nowhere", "nowhere: no such folder; build it: partition-tools build GRAPH --parts P --out nowhere"),
        ("report g.npz", "g.npz: a file, but a folder of shards is expected"),
        ("verify .", "not a folder of shards"),
        ("build nowhere.npz --parts 2 --out s", "nowhere.npz: no such file"),
        ("build g.npz --parts 7 --out s", "--parts 7 for 6 nodes"),
        ("build g.npz --parts 0 --out s", "--parts 0: expected at least 1"),
        ("build g.npz --parts 2 --out s --method nice", "--method nice: expected metis"),
        ("build g.npz --parts 2 --out s --method random --tries 3", "--tries has no effect with --method random"),
        (
            "build g.npz --parts 2 --out s --random-split 0.9/0.9/0.9",
            "--random-split 0.9/0.9/0.9: expected three shares",
        ),
        ("build g.npz --parts 2 --out g.npz", "g.npz: is a file; expected a folder"),
        ("build g.npz --parts 2 --out . --force", "holds files that no build wrote (g.npz)"),
    ],
)
def test_a_users_error_is_one_line(arguments: str, message: str, run: Run) -> None:
    code, out, err = run(*arguments.split())
    assert code == 2
    assert err.startswith("partition-tools: error: ")
    assert err.count("\n") == 1
    assert message in err
    assert out == "" or "--parts 7" in arguments
    assert not Path("s").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "nonsense",
        "build g.npz --out s",
        "build g.npz --parts x --out s",
        "build g.npz --parts 2 --out s --bogus",
        "build g.npz --parts 2 --out s --objective speed",
        "report",
        "report s --json --csv",
        "report s --model transformer",
        "report s --layers 0",
        "report s --bandwidth 0",
        "report s --run nothing",
        "report s --html no/such/folder/page.html",
        "compare s",
        "compare 1 2 3 4 5 6 7 8 9",
    ],
)
def test_wrong_flags_exit_2_and_do_nothing(arguments: str, run: Run) -> None:
    code, out, err = run(*arguments.split())
    assert code == 2
    assert "Traceback" not in err
    assert out == ""
    assert not Path("s").exists()


def test_a_build_is_refused_before_work_starts(run: Run) -> None:
    build = ("build", "g.npz", "--parts", "2", "--out", "s", "--method", "contiguous")
    assert run(*build)[0] == 0
    code, out, err = run(*build)
    assert (code, out) == (2, "")
    assert "--force replaces it" in err
    assert run(*build, "--force")[0] == 0


def test_formats_lists_every_reader(run: Run) -> None:
    code, out, _ = run("formats")
    assert code == 0
    for name in ("metis", "planetoid", "gnn-benchmark", "demo"):
        assert name in out


def test_a_name_in_brackets_is_not_markup(run: Run) -> None:
    Path("g.npz").rename("g[red].npz")
    code, out, _ = run("build", "g[red].npz", "--parts", "2", "--out", "s[bold]", "--method", "random")
    assert code == 0
    assert "g[red]" in out
    assert "s[bold]" in out
    assert "s[bold]" in run("report", "s[bold]")[1]


def test_a_reader_that_leaves_early_is_no_error(run: Run) -> None:
    run("build", "g.npz", "--parts", "2", "--out", "s", "--method", "contiguous")
    command = f"{sys.executable} -m partition_tools report {'s ' * 100} --json | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_data
def test_a_real_graph(run: Run) -> None:
    graph = str(SHARED / "planetoid" / "ind.cora")
    assert run("build", graph, "--parts", "4", "--out", "s")[0] == 0
    (found,) = json.loads(run("report", "s", "--json")[1])["partitionings"]
    assert (found["nodes"], found["parts"]) == (2708, 4)
    assert 0 < found["cut_pairs"] < 1000
    with h5py.File("s/part-00000-of-00004.h5") as file:
        assert file["features"].attrs["shape"][1] == 1433
    assert run("verify", "s", "--deep")[0] == 0


def test_what_a_graph_lacks_for_training_is_said_at_once(run: Run) -> None:
    Path("e.csv").write_text("a,b\nb,a\n")
    code, out, _ = run("build", "e.csv", "--parts", "1", "--out", "s")
    assert code == 0
    assert "wrote 1 shard to s" in out
    lacks = "features (--features), labels (--labels), training nodes (--splits or --random-split)"
    assert out.splitlines()[-1] == f"next: partition-tools report s; to train on it, build it with {lacks}"


def test_a_node_in_two_masks_is_warned_of(run: Run) -> None:
    masks = {"train_mask": [1, 1, 0, 0, 0, 0], "test_mask": [0, 1, 1, 0, 0, 0]}
    np.savez("m.npz", edge_index=[[0, 1], [1, 0]], y=[0, 1, 0, 1, 0, 1], **masks)
    code, out, _ = run("build", "m.npz", "--parts", "1", "--out", "s")
    assert code == 0
    assert "warning: split 0: 1 node is in train and test; the test score is of nodes trained on" in out
    counts = read_manifest(Path("s")).graph["split_counts"][0]
    assert (counts["train_val"], counts["train_test"], counts["val_test"]) == (0, 1, 0)


def test_a_folder_below_a_file_is_refused_by_name(run: Run) -> None:
    code, _, err = run("build", "g.npz", "--parts", "1", "--out", "g.npz/s")
    assert code == 2
    assert "g.npz is a file, so no folder can be in it" in err


def test_one_empty_part_and_several_are_said(run: Run) -> None:
    Path("p.txt").write_text("0\n" * 6)
    for parts, note in (("2", "note: part 1 of 2 owns no node in p.txt"), ("3", "note: parts 1, 2 of 3 own no node")):
        assert note in run("build", "g.npz", "--parts", parts, "--out", parts, "--method", "file:p.txt")[1]
    Path("p.txt").write_text("0\n" * 5 + "99999999999999999999\n")
    code, _, err = run("build", "g.npz", "--parts", "2", "--out", "c", "--method", "file:p.txt")
    assert code == 2
    assert "p.txt: line 6 holds '99999999999999999999'; expected one part id, 0 to 1" in err
