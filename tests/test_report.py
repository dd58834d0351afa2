"""The report of a six-node graph counted by hand, yardsticks, runs beside predictions, and the forms for programs."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fullgraph.config import TrainConfig
from fullgraph.cost import Machine
from fullgraph.shards import read_manifest
from partition_tools import forms
from partition_tools.builder import build
from partition_tools.costs import FIGURES, labels, winners
from partition_tools.graph import Graph, Splits
from partition_tools.report import Question, Report, imbalance, report
from partition_tools.runs import read_run, stated_model
from tests.builds import assignment, change, rich_graph, two_triangles

SMALL = Question(config=TrainConfig(model="sage", layers=2, hidden=8))


def masks(train: list[int], val: list[int], test: list[int]) -> Splits:
    return Splits(
        **{name: np.isin(np.arange(6), nodes)[None] for name, nodes in (("train", train), ("val", val), ("test", test))}
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two triangles with four features and two classes, cut at their bridge and cut badly."""
    base = tmp_path_factory.mktemp("builds")
    x = np.ones((6, 4), np.float32)
    graph = two_triangles(x=x, y=np.array([0, 1, 0, 1, 0, 1]), splits=masks([0, 1, 3], [2], [4]))
    build(graph, assignment([0, 0, 0, 1, 1, 1], 2), base / "good")
    build(graph, assignment([0, 1, 0, 1, 0, 1], 2), base / "bad")
    return {"good": base / "good", "bad": base / "bad"}


def test_the_golden_report(folders: dict[str, Path]) -> None:
    """Nodes 0, 1 and 3 train. The other three are next to them, so that layer 0 computes all and layer 1 these three,
    for which one row crosses, from node 2 to node 3: 2 floats (the narrower side of 8 x 2) there and back."""
    content = json.loads(forms.to_json(report([folders["good"]], SMALL), SMALL))
    assert (content["format"], content["format_version"]) == ("partition-tools report", 1)
    assert content["model"] == {
        "model": "sage",
        "layers": 2,
        "hidden": 8,
        "out_heads": 1,
        "norm": "none",
        "plan": "cover",
        "prune": True,
        "layer0": "auto",
        "input_dropout": 0.0,
        "dtype": "float32",
        "split": 0,
    }
    assert content["machine"] == {
        "flops": 55e9,
        "gather": 8e9,
        "bandwidth": 0.6e9,
        "latency": 5e-4,
        "elements": 2.5e8,
        "overhead": 2e-3,
    }
    (found,) = content["partitionings"]
    manifest = read_manifest(folders["good"])
    assert (found.pop("graph_id"), found.pop("build_id")) == (manifest.graph_id, manifest.build_id)
    # Seconds and memory are predicted by fullgraph.step and fullgraph.cost, whose tests count them by hand.
    seconds = {name: found.pop(f"{name}_seconds") for name in ("compute", "exchange")}
    assert found.pop("seconds_per_epoch") == pytest.approx(sum(seconds.values()))
    by_layer = [{name: layer.pop(f"{name}_seconds") for name in seconds} for layer in found["layers"]]
    assert {name: sum(layer[name] for layer in by_layer) for name in seconds} == pytest.approx(seconds)
    assert min(seconds.values()) > 0
    assert found.pop("memory_bytes") == max(part.pop("memory_bytes") for part in found["per_part"])
    part = {"nodes": 3, "edges": 7, "halo_rows": 1, "rows_sent": 1, "cover_rows": 1, "neighbours": 1}
    part |= {"feature_bytes": 48, "bytes_per_epoch": 8}
    assert found == {
        "folder": str(folders["good"]),
        "yardstick": False,
        "name": "two triangles",
        "method": "by hand",
        "seed": 7,
        "parts": 2,
        "nodes": 6,
        "edges": 14,
        "features": 4,
        "outputs": 2,
        "train": 3,
        "cut_edges": 2,
        "cut_share": 2 / 14,
        "cut_pairs": 1,
        "cut_weight": None,
        "halo_rows": 2,
        "max_halo_rows": 1,
        "max_rows_sent": 1,
        "halo_ratio": 2 / 6,
        "replication": 8 / 6,
        "cover_rows": 2,
        "max_cover_rows": 1,
        "max_neighbours": 1,
        "mean_neighbours": 1.0,
        "node_imbalance": 1.0,
        "edge_imbalance": 1.0,
        "train_imbalance": 4 / 3,
        "feature_bytes": 96,
        "max_feature_bytes": 48,
        "rows_per_epoch": 1,
        "bytes_per_epoch": 16,
        "max_bytes_per_epoch": 8,
        "layer0": "once",
        "random_ratio": None,
        "notes": [],
        "measured": None,
        "layers": [
            {"layer": 0, "nodes": 6, "pruned": False, "halo_rows": 2, "max_halo_rows": 1, "cover_rows": 2}
            | {"max_cover_rows": 1, "rows_sent": 0, "width": 0, "bytes": 0},
            {"layer": 1, "nodes": 3, "pruned": True, "halo_rows": 1, "max_halo_rows": 1, "cover_rows": 1}
            | {"max_cover_rows": 1, "rows_sent": 1, "width": 2, "bytes": 16},
        ],
        "per_part": [
            {"part": 0, "train": 2, "val": 1, "test": 0, "bytes": manifest.files[0].bytes} | part,
            {"part": 1, "train": 1, "val": 0, "test": 1, "bytes": manifest.files[1].bytes} | part,
        ],
        "rows": [[0, 1], [1, 0]],
        "cover": [[0, 1], [1, 0]],
    }


def test_the_other_partition_is_worse_and_the_graph_the_same(folders: dict[str, Path]) -> None:
    """Even and odd nodes: 0-1, 1-2, 2-3, 3-4 and 4-5 are cut."""
    good, bad = report([folders["good"], folders["bad"]])
    assert (bad.cut_edges, bad.cut_pairs, bad.halo_rows, bad.max_rows_sent) == (10, 5, 6, 3)
    assert good.graph_id == bad.graph_id


def test_weights_of_the_cut(tmp_path: Path) -> None:
    """The bridge weighs 2 one way and 0.5 the other, every other edge 1."""
    graph = two_triangles()
    bridge = (graph.src == 2) & (graph.dst == 3), (graph.src == 3) & (graph.dst == 2)
    build(two_triangles(edge_weight=1 + bridge[0] - 0.5 * bridge[1]), assignment([0, 0, 0, 1, 1, 1], 2), tmp_path / "s")
    (found,) = report([tmp_path / "s"])
    assert found.cut_weight == 2.5


def test_a_graph_without_features_labels_or_splits_is_predicted_unpruned(tmp_path: Path) -> None:
    build(two_triangles(), assignment([0, 0, 0, 1, 1, 1], 2), tmp_path / "s")
    (found,) = report([tmp_path / "s"], SMALL)
    assert [layer.rows_sent for layer in found.layers] == [0, 2]
    assert found.bytes_per_epoch == 2 * 2 * 8 * 4
    assert found.notes == (
        "the graph has no features; predicted as if features were 8 columns wide",
        "the graph has no labels; predicted as if labels were 8 columns wide",
        "no training nodes, so every layer is taken to compute every node",
    )


def test_a_directed_graph_with_an_empty_part_and_no_splits(tmp_path: Path) -> None:
    """0 -> 2 twice, 1 -> 2, 3 -> 3; part 1 is empty."""
    graph = Graph(name="g", num_nodes=4, src=np.array([0, 0, 1, 3]), dst=np.array([2, 2, 2, 3]))
    build(graph, assignment([0, 0, 2, 2], 3), tmp_path / "s")
    (found,) = report([tmp_path / "s"])
    assert (found.cut_edges, found.cut_pairs, found.halo_rows, found.cover_rows) == (3, 2, 2, 1)
    assert found.rows == [[0, 0, 2], [0, 0, 0], [0, 0, 0]]
    assert [part.nodes for part in found.per_part] == [2, 0, 2]
    assert (found.node_imbalance, found.edge_imbalance, found.train_imbalance) == (1.5, 3.0, 1.0)
    assert (found.max_rows_sent, found.max_halo_rows) == (2, 2)


def test_imbalance_is_largest_over_mean() -> None:
    assert imbalance(np.array([4, 1, 1])) == 2.0
    assert imbalance(np.array([5])) == 1.0
    assert imbalance(np.array([0, 0])) == 1.0


def test_features_are_not_read(folders: dict[str, Path], tmp_path: Path) -> None:
    """A report does not need them, so their loss does not show."""
    build(two_triangles(x=np.ones((6, 3))), assignment([0, 0, 0, 1, 1, 1], 2), tmp_path / "s")
    change(tmp_path / "s", 0, lambda file: file.__delitem__("features"))
    assert report([tmp_path / "s"])[0].cut_edges == 2


def test_a_damaged_build_is_an_error(tmp_path: Path) -> None:
    build(two_triangles(), assignment([0, 0, 0, 1, 1, 1], 2), tmp_path / "s")
    (tmp_path / "s" / "part-00001-of-00002.h5").unlink()
    with pytest.raises(ValueError, match=r"part-00001-of-00002.h5: the manifest lists this file"):
        report([tmp_path / "s"])


# ----------------------------------------------------------------------------------------------------------- yardsticks


def clique(nodes: int) -> Graph:
    u, v = np.nonzero(~np.eye(nodes, dtype=bool))
    return Graph(name="clique", num_nodes=nodes, src=u, dst=v)


def test_a_clique_is_no_better_than_random(tmp_path: Path) -> None:
    """Every node is halo in each of the other three parts, however it is cut."""
    build(clique(30), assignment(np.arange(30) % 4, 4), tmp_path / "s")
    question = Question(yardsticks=True)
    found = report([tmp_path / "s"], question)
    assert labels(found) == [str(tmp_path / "s"), "random (4)", "contiguous (4)"]
    assert [one.halo_rows for one in found] == [90, 90, 90]
    assert found[0].halo_ratio == 3.0
    assert found[0].random_ratio == 1.0
    assert "no better than random: 1.00 of the halo rows of a random partitioning" in found[0].notes
    assert "no better than random" in " ".join(text_of(found, question).split())


def test_yardsticks_count_as_builds_do(tmp_path: Path) -> None:
    """A contiguous yardstick equals a contiguous build, but for what only a build has; so does its random one."""
    graph = rich_graph()
    contiguous = (np.arange(30) * 3 // 30).astype(np.int32)
    build(graph, assignment(contiguous, 3), tmp_path / "c")
    build(graph, assignment(np.random.default_rng(1).permutation(contiguous), 3), tmp_path / "r")
    found = report([tmp_path / "c", tmp_path / "r"], Question(yardsticks=True))
    assert [one.folder for one in found[2:]] == ["random", "contiguous"]
    only = {"folder", "yardstick", "build_id", "method", "seed", "cut_weight", "notes", "random_ratio", "feature_bytes"}
    only |= {"max_feature_bytes", "per_part"}
    for built, drawn in ((found[0], found[3]), (found[1], found[2])):
        same = {name: value for name, value in vars(built).items() if name not in only}
        assert same == {name: value for name, value in vars(drawn).items() if name not in only}
        for one, other in zip(built.per_part, drawn.per_part, strict=True):
            assert vars(one) | {"feature_bytes": 0, "bytes": 0} == vars(other)
    ratio = found[0].halo_rows / found[1].halo_rows
    assert (found[0].random_ratio, found[1].random_ratio) == (ratio, 1.0)


def test_yardsticks_come_once_for_each_graph_and_number_of_parts(folders: dict[str, Path]) -> None:
    found = report([folders["good"], folders["bad"]], Question(yardsticks=True))
    assert labels(found)[2:] == ["random (2)", "contiguous (2)"]
    assert winners(found)[0].winners == (str(folders["good"]),)


# ----------------------------------------------------------------------------------------------------------------- runs


def write_run(folder: Path, shards: Path, config: dict[str, Any], summary: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    told = TrainConfig(**{"hidden": 8} | config).as_dict()
    record = told | {"build_id": read_manifest(shards).build_id, "shards": str(shards), "outputs": 2}
    (folder / "config.json").write_text(json.dumps(record | {"model_name": told["model"]}))
    measured = {"epochs": 5, "bytes_sent_per_epoch": 16, "seconds_per_epoch": 0.25, "peak_memory_bytes": 10**8}
    (folder / "summary.json").write_text(json.dumps(measured | {"parts": 2, "ranks": 2} | (summary or {})))
    return folder


def test_what_a_run_measured_stands_beside_what_is_predicted_for_it(folders: dict[str, Path], tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", folders["good"], {"model": "gcn", "layers": 3}))
    question = Question(config=stated_model({}, [run]), runs=(run,))
    good, bad = report([folders["good"], folders["bad"]], question)
    assert (question.config.model, len(good.layers)) == ("gcn", 3)
    assert bad.measured is None
    assert good.measured is not None
    assert vars(good.measured) == {
        "run": str(tmp_path / "run"),
        "epochs": 5,
        "bytes_per_epoch": 16,
        "seconds_per_epoch": 0.25,
        "memory_bytes": 10**8,
    }
    text = text_of((good, bad), question)
    assert "measured" in text
    assert "0.25" in text


def test_runs_that_do_not_fit_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", folders["good"], {}))
    with pytest.raises(ValueError, match=r"it trained on build \w+ \(.*good\), which is in none of .*bad; name that"):
        report([folders["bad"]], Question(runs=(run,)))
    with pytest.raises(ValueError, match=r"run and .*run trained on the same build; name one run a build"):
        report([folders["good"]], Question(runs=(run, run)))
    with pytest.raises(ValueError, match=r"--hidden 16: the run .*run trained with 8"):
        stated_model({"hidden": 16}, [run])
    other = read_run(write_run(tmp_path / "other", folders["bad"], {"layers": 4}))
    with pytest.raises(ValueError, match=r"run trained with --layers 2, .*other with 4; predictions are for one model"):
        stated_model({}, [run, other])


@pytest.mark.parametrize(
    ("config", "summary", "said"),
    [
        ({"inductive": True}, {}, "on its training nodes alone"),
        ({}, {"parts": 4, "ranks": 2}, "2 ranks for 4 parts"),
        ({"codec": "bfloat16"}, {}, "approximately (--codec bfloat16)"),
        ({"refresh": "every:4"}, {}, "approximately (--refresh every:4)"),
    ],
)
def test_why_a_run_may_differ_is_said(
    config: dict[str, Any], summary: dict[str, Any], said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    run = read_run(write_run(tmp_path / "run", folders["good"], config, summary))
    (found,) = report([folders["good"]], Question(config=run.config, runs=(run,)))
    assert any(said in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", None, "no summary.json; expected the folder of a run that has ended"),
        ("config.json", "{", "not JSON"),
        ("config.json", "[]", "holds a list; expected an object"),
        ("summary.json", "{}", "'epochs' is missing; expected a folder that fullgraph train wrote"),
        ("summary.json", '{"epochs": 1, "bytes_sent_per_epoch": true}', "bytes_sent_per_epoch is True"),
        ("summary.json", '{"epochs": 1, "bytes_sent_per_epoch": 1, "seconds_per_epoch": NaN}', "is nan"),
        ("config.json", '{"model": "rm -rf"}', "--model is rm -rf"),
    ],
)
def test_a_folder_that_is_no_run_is_named(
    name: str, content: str | None, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", folders["good"], {})
    (run / name).unlink() if content is None else (run / name).write_text(content)
    with pytest.raises(ValueError, match=r"run.*: .*" + message.replace("(", r"\(")):
        read_run(run)


# ---------------------------------------------------------------------------------------------------------------- forms


def test_a_key_of_the_json_form_is_a_field_with_its_meaning() -> None:
    """The contract points to the records' docstrings."""
    assert forms.__doc__ is not None
    for name in ("Report", "LayerReport", "PartReport", "Measured", "Winner"):
        assert name in forms.__doc__


def test_csv_has_one_line_a_folder(folders: dict[str, Path]) -> None:
    found = report([folders["good"], folders["bad"]], SMALL)
    rows = list(csv.DictReader(io.StringIO(forms.to_csv(found))))
    assert list(rows[0]) == ["folder", "graph_id", "build_id", *(figure.key for figure in FIGURES)]
    assert [row["cut_edges"] for row in rows] == ["2", "10"]
    assert rows[0]["bytes_per_epoch"] == "16"
    assert rows[0]["measured_seconds_per_epoch"] == ""
    for row, one in zip(rows, found, strict=True):
        for key in ("halo_ratio", "seconds_per_epoch", "train_imbalance"):
            assert float(row[key]) == getattr(one, key)


def text_of(reports: tuple[Report, ...], question: Question = SMALL, *, width: int = 80, compared: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width)
    forms.show(reports, question, console, winners(reports) if compared else None)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_shows_both_and_defines_its_words(folders: dict[str, Path]) -> None:
    text = text_of(report([folders["good"], folders["bad"]], SMALL))
    line = next(line for line in text.splitlines() if line.split()[:2] == ["cut", "edges"])
    assert line.split() == ["cut", "edges", "2*", "10"]
    assert "predicted for sage, 2 layers, hidden width 8, float32" in text
    for word in ("edge:", "cut pair", "halo rows:", "imbalance:", "replication:", "peers:", "measured:"):
        assert word in " ".join(text.split())
    assert "…" not in text
    assert "different graphs" not in text


def test_a_narrow_terminal_gets_more_tables_and_no_broken_number(folders: dict[str, Path]) -> None:
    found = report([folders["good"], folders["bad"]] * 4, SMALL)
    text = text_of(found, width=60)
    assert text.count("Partitionings") > 1
    lines = [line.split()[2:] for line in text.splitlines() if line.split()[:2] == ["cover", "rows"]]
    values = [value.strip("*") for line in lines for value in line if value.strip("*").isdigit()]
    assert values == [f"{one.cover_rows}" for one in found]


def test_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    graph = two_triangles()
    hostile = Graph(name="\x1b[2J\x9bevil\r\n[red]", num_nodes=6, src=graph.src, dst=graph.dst)
    build(hostile, assignment([0, 0, 0, 1, 1, 1], 2), tmp_path / "a\x1b[31mb")
    text = text_of(report([tmp_path / "a\x1b[31mb"], SMALL))
    assert not {"\x1b", "\x9b", "\r"} & set(text)
    assert "evil" in text


def test_different_graphs_are_said_to_be(folders: dict[str, Path], tmp_path: Path) -> None:
    graph = two_triangles()
    build(
        two_triangles(src=graph.dst.copy()[::-1].copy(), dst=graph.src[::-1].copy()),
        assignment([0, 0, 0, 1, 1, 1], 2),
        tmp_path / "s",
    )
    text = text_of(report([folders["good"], tmp_path / "s"], SMALL))
    assert "different graphs" in text
    assert "*" not in text


def test_the_machine_is_what_was_stated(folders: dict[str, Path]) -> None:
    slow = Question(config=SMALL.config, machine=Machine(bandwidth=1e3, latency=1.0))
    (fast,), (found,) = report([folders["good"]], SMALL), report([folders["good"]], slow)
    assert found.exchange_seconds == pytest.approx(2 * (1.0 + 8 / 1e3))
    assert found.compute_seconds == fast.compute_seconds
    assert "joined by 1e-06 GB/s and 1,000 ms" in " ".join(text_of((found,), slow).split())


@pytest.mark.parametrize("command", [["report"], ["report", "--yardsticks", "--html", "page.html"], ["compare"]])
def test_no_torch_is_loaded(command: list[str], folders: dict[str, Path], tmp_path: Path) -> None:
    named = [str(folder) for folder in folders.values()]
    code = (
        "import sys; from partition_tools.__main__ import main; "
        f"code = main([{command[0]!r}, *{named}, '--json', *{command[1:]}]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    content = json.loads(done.stdout)
    assert content["partitionings"][0]["cut_edges"] == 2
    assert ("winners" in content) == (command[0] == "compare")
