"""Predictions come back in the user's order on any number of ranks, and scores are those of the run."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.metrics import confusion_matrix

import fullgraph
from fullgraph.config import TrainConfig
from fullgraph.inference import Evaluation, evaluate, load_trained, predict, show_evaluation
from fullgraph.loop import train
from fullgraph.shards import read_manifest
from fullgraph.world import RankError, World
from partition_tools import Graph, Splits, build, load, partition
from tests.ranks import RankPool

NODES = 90
CONFIG = TrainConfig(layers=2, hidden=8, epochs=6, dropout=0.2, dtype="float64", lr=0.05)


@pytest.fixture(scope="module")
def graph() -> Graph:
    graph = load(f"demo:communities?nodes={NODES}&classes=3&features=5&degree=6")
    return dataclasses.replace(graph, node_ids=np.array([f"knoten-{(i * 37) % NODES}ä" for i in range(NODES)]))


@pytest.fixture(scope="module")
def folder(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds in 1, 2 and 3 parts, and a run on the first."""
    out = tmp_path_factory.mktemp("inference")
    for parts in (1, 2, 3):
        build(graph, partition(graph, parts, "random"), out / str(parts))
    train(out / "1", CONFIG, run=out / "run")
    return out


def predict_on_ranks(world: World, folder: Path, out: Path, kind: Any) -> None:
    predict(folder, folder.parent / "run", out, kind=kind, world=world)


def score_on_ranks(world: World, folder: Path) -> dict[str, Any]:
    return dataclasses.asdict(evaluate(folder, folder.parent / "run", confusion=True, world=world))


@pytest.mark.parametrize("kind", ["labels", "probabilities", "embeddings"])
def test_predictions_are_in_order_on_any_number_of_ranks(ranks: RankPool, folder: Path, kind: str) -> None:
    found = []
    for parts in (1, 2, 3):
        out = folder / f"{kind}-{parts}.npy"
        ranks.run(parts, predict_on_ranks, folder / str(parts), out, kind)
        found.append(np.load(out, allow_pickle=False))
    shape = {"labels": (NODES,), "probabilities": (NODES, 3), "embeddings": (NODES, 8)}[kind]
    assert found[0].shape == shape
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, rtol=1e-10)
    if kind == "probabilities":
        np.testing.assert_allclose(found[0].sum(1), 1.0)
        labels = np.load(folder / "labels-1.npy") if (folder / "labels-1.npy").exists() else found[0].argmax(1)
        np.testing.assert_array_equal(found[0].argmax(1), labels)


def test_every_form_says_the_same_under_the_users_ids(ranks: RankPool, folder: Path, graph: Graph) -> None:
    assert graph.node_ids is not None
    for suffix in ("npy", "h5", "csv"):
        ranks.run(2, predict_on_ranks, folder / "2", folder / f"out.{suffix}", "labels")
    labels = np.load(folder / "out.npy", allow_pickle=False)
    assert np.load(folder / "out.ids.npy", allow_pickle=False).tolist() == graph.node_ids.tolist()
    with h5py.File(folder / "out.h5") as file:
        np.testing.assert_array_equal(file["predictions"][:], labels)
        assert file["ids"].asstr()[:].tolist() == graph.node_ids.tolist()
    with (folder / "out.csv").open(encoding="utf-8") as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["id", "prediction"]
    assert lines[1:] == [[name, str(label)] for name, label in zip(graph.node_ids, labels.tolist(), strict=True)]


def test_small_blocks_write_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict(folder / "1", folder / "run", folder / "whole.npy", kind="probabilities")
    module = next(m for m in ("fullgraph.gather", "fullgraph.inference") if _has_block(m))
    monkeypatch.setattr(f"{module}._BLOCK_BYTES", 100)
    predict(folder / "1", folder / "run", folder / "blocks.npy", kind="probabilities")
    assert (folder / "whole.npy").read_bytes() == (folder / "blocks.npy").read_bytes()


def _has_block(name: str) -> bool:
    import importlib

    try:
        return hasattr(importlib.import_module(name), "_BLOCK_BYTES")
    except ModuleNotFoundError:
        return False


def test_scores_are_those_of_the_run_and_confusion_counts_every_node(
    ranks: RankPool, folder: Path, graph: Graph
) -> None:
    summary = json.loads((folder / "run" / "summary.json").read_text())
    labels = None
    for parts in (1, 3):
        found = ranks.run(parts, score_on_ranks, folder / str(parts))[0]
        for split in ("val", "test"):
            assert found["scores"][split] == pytest.approx(summary[split], rel=1e-10)
        predict(folder / "1", folder / "run", folder / "l.npy")
        labels = np.load(folder / "l.npy")
        assert graph.splits is not None
        assert graph.y is not None
        test = graph.splits.test[0]
        expected = confusion_matrix(graph.y[test], labels[test], labels=range(3))
        np.testing.assert_array_equal(found["confusion"]["test"], expected)


def test_another_graph_of_the_same_features_is_predicted(folder: Path, tmp_path: Path) -> None:
    other = load("demo:communities?nodes=40&classes=3&features=5&degree=6&seed=9")
    build(other, partition(other, 1), tmp_path / "other")
    predict(tmp_path / "other", folder / "run", tmp_path / "out.npy")
    assert np.load(tmp_path / "out.npy").shape == (40,)
    narrow = load("demo:communities?nodes=40&classes=3&features=4&degree=6")
    build(narrow, partition(narrow, 1), tmp_path / "narrow")
    with pytest.raises(RankError, match=r"takes 5 features, but .*narrow holds 4"):
        predict(tmp_path / "narrow", folder / "run", tmp_path / "out2.npy")
    assert not (tmp_path / "out2.npy").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "config.json").unlink(), "is not a run folder: it has no config.json"),
        (lambda run: (run / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda run: (run / "config.json").write_text("[]"), "config.json holds list; expected an object"),
        (lambda run: edit(run, features="5"), "features is '5'; expected int"),
        (lambda run: edit(run, model="gcnn"), "model"),
        (lambda run: edit(run, hidden=9), "does not hold the weights of the model"),
        (lambda run: (run / "best.pt").unlink(), "best.pt does not exist; the run did not end"),
        (lambda run: (run / "best.pt").write_bytes(b"junk"), "best.pt cannot be read as a state"),
        (lambda run: torch.save({"model": print}, run / "best.pt"), "best.pt cannot be read as a state"),
        (lambda run: torch.save([1], run / "best.pt"), "holds no model's weights"),
    ],
)
def test_a_run_folder_that_is_not_whole_is_refused(folder: Path, tmp_path: Path, damage: Any, message: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for file in (folder / "run").iterdir():
        (run / file.name).write_bytes(file.read_bytes())
    damage(run)
    with pytest.raises(RankError, match=re.escape(message)):
        predict(folder / "1", run, tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


def edit(run: Path, **values: Any) -> None:
    record = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(record | values))


@pytest.mark.parametrize(
    ("out", "kind", "message"),
    [
        ("p.txt", "labels", "the name must end in .npy, .h5, .csv"),
        ("nowhere/p.npy", "labels", "the folder .*nowhere does not exist"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_first(
    folder: Path, tmp_path: Path, out: str, kind: Any, message: str
) -> None:
    with pytest.raises(RankError, match=message):
        predict(folder / "1", folder / "run", tmp_path / out, kind=kind)


def test_a_split_that_does_not_exist_is_refused(folder: Path) -> None:
    with pytest.raises(RankError, match=r"--split 3: graph .* has 1 split; expected 0"):
        evaluate(folder / "1", folder / "run", split=3)


# ------------------------------------------------------------------------------------------------ names and numbers


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph whose labels are names, one whose labels count from 1, one of several named labels; and runs."""
    out = tmp_path_factory.mktemp("pets")
    base = pets_graph()
    graphs = {
        "names": dataclasses.replace(base, class_names=np.array(["ape", "bee", "zebra finch"])),
        "others": dataclasses.replace(base, class_names=np.array(["ape", "bee", "cat"])),
        "numbers": dataclasses.replace(base, class_names=np.array([1, 2, 3])),
        "several": load_several(),
    }
    for name, graph in graphs.items():
        build(graph, partition(graph, 1), out / name)
        if name != "others":
            train(out / name, TrainConfig(epochs=2, hidden=4, layers=1), run=out / f"run-{name}")
    return out


def load_several() -> Graph:
    y = np.random.default_rng(1).integers(0, 2, (20, 2)).astype(np.uint8)
    return dataclasses.replace(pets_graph(), y=y, class_names=np.array(["red", "blue"]))


def pets_graph() -> Graph:
    rng = np.random.default_rng(0)
    return Graph(
        name="pets",
        num_nodes=20,
        src=rng.integers(0, 20, 60),
        dst=rng.integers(0, 20, 60),
        x=rng.standard_normal((20, 3)),
        y=np.arange(20) % 3,
        splits=Splits(train=np.ones((1, 20), bool), val=np.ones((1, 20), bool), test=np.zeros((1, 20), bool)),
    )


def test_predictions_are_called_as_the_labels_are(pets: Path) -> None:
    for name, kinds in (("names", "U"), ("numbers", "i")):
        run, classes = pets / f"run-{name}", read_manifest(pets / name).graph["class_names"]
        predict(pets / name, run, pets / "p.npy")
        labels = np.load(pets / "p.npy", allow_pickle=False)
        assert labels.dtype.kind == kinds
        assert set(labels.tolist()) <= set(classes)
        predict(pets / name, run, pets / "p.npy", kind="probabilities")
        assert labels.tolist() == [classes[i] for i in np.load(pets / "p.npy").argmax(1)]
        predict(pets / name, run, pets / "p.csv")
        with (pets / "p.csv").open() as file:
            assert [line[1] for line in csv.reader(file)] == ["prediction", *map(str, labels.tolist())]
        predict(pets / name, run, pets / "p.csv", kind="probabilities")
        assert (pets / "p.csv").read_text().split("\n")[0] == ",".join(map(str, ["id", *classes]))
        predict(pets / name, run, pets / "p.h5")
        with h5py.File(pets / "p.h5") as file:
            rows = file["predictions"]
            assert (rows.asstr()[:] if kinds == "U" else rows[:]).tolist() == labels.tolist()
        predict(pets / name, run, pets / "p.h5", kind="probabilities")
        with h5py.File(pets / "p.h5") as file:
            rows = file["classes"]
            assert (rows.asstr()[:] if kinds == "U" else rows[:]).tolist() == classes
        predict(pets / name, run, pets / "p.csv", kind="embeddings")
        assert "ape" not in (pets / "p.csv").read_text()


def test_label_columns_keep_their_names(pets: Path) -> None:
    predict(pets / "several", pets / "run-several", pets / "q.csv")
    assert (pets / "q.csv").read_text().split("\n")[0] == "id,red,blue"


def test_confusion_is_shown_by_name(pets: Path) -> None:
    found = evaluate(pets / "names", pets / "run-names", confusion=True)
    console = Console(file=io.StringIO(), width=100)
    show_evaluation(found, console)
    assert "ape          bee  zebra finch" in console.file.getvalue()  # type: ignore[attr-defined]


def test_classes_of_other_names_are_not_compared(pets: Path) -> None:
    with pytest.raises(RankError, match=r"1 class of .*others \(cat\) is none of .*which knows ape, bee, zebra finch"):
        evaluate(pets / "others", pets / "run-names")
    predict(pets / "others", pets / "run-names", pets / "r.npy")  # its labels play no part


def test_a_graph_with_some_of_the_classes_is_scored_by_their_names(pets: Path, tmp_path: Path) -> None:
    """The same nodes, of which those of the middle class have no label, under numbers of other classes."""
    whole = evaluate(pets / "names", pets / "run-names", confusion=True)
    graph = pets_graph()
    assert graph.y is not None
    y = np.array([1, -1, 0])[graph.y]
    masks = np.ones((1, 20), bool) & (y >= 0)
    fewer = dataclasses.replace(
        graph,
        y=y,
        class_names=np.array(["zebra finch", "ape"]),
        splits=Splits(train=masks, val=masks, test=~np.ones((1, 20), bool)),
    )
    build(fewer, partition(fewer, 1), tmp_path / "fewer")
    found = evaluate(tmp_path / "fewer", pets / "run-names", confusion=True)
    assert whole.confusion is not None
    assert found.confusion is not None
    expected = whole.confusion["val"]
    assert found.confusion["val"] == [expected[0], [0, 0, 0], expected[2]]
    numbers = dataclasses.replace(fewer, y=np.array([1, -1, 3])[graph.y], class_names=None)  # classes by number
    build(numbers, partition(numbers, 1), tmp_path / "numbers")
    found = evaluate(tmp_path / "numbers", pets / "run-numbers", confusion=True)
    assert found.confusion is not None
    assert np.array(found.confusion["val"]).sum(1).tolist() == [7, 0, 6]


def test_columns_of_labels_are_matched_by_their_names(pets: Path, tmp_path: Path) -> None:
    graph = load_several()
    assert graph.y is not None
    turned = dataclasses.replace(graph, y=graph.y[:, ::-1].copy(), class_names=np.array(["blue", "red"]))
    build(turned, partition(turned, 1), tmp_path / "turned")
    left, right = (evaluate(folder, pets / "run-several") for folder in (pets / "several", tmp_path / "turned"))
    assert left.scores["val"]["micro_f1"] == pytest.approx(right.scores["val"]["micro_f1"])
    with pytest.raises(RankError, match=r"predicts multi-label classes, but the labels of .* are single-label"):
        evaluate(pets / "names", pets / "run-several")


def test_a_name_of_two_lines_keeps_the_table(pets: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    table = {"val": [[1, 2], [3, 4]]}
    show_evaluation(Evaluation(scores={}, confusion=table, classes=("two\nlines", "b")), console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 4
    assert "two\\nlines" in lines[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: predict(f / "names", f / "run-names", f / "x.npy", kind="zzz"), "kind is 'zzz'; expected labels, "),
        (lambda f: predict(f / "names", f / "run-names", f / "x.npy", state="zzz"), "state is 'zzz'; expected best or"),
        (
            lambda f: evaluate(f / "names", f / "run-names", state="../best"),
            "state is '../best'; expected best or last",
        ),
        (lambda f: evaluate(f / "names", f / "run-names", split="0"), "--split '0': expected a whole number"),
        (lambda f: fullgraph.load(f / "names", split=7), "--split 7: graph pets has 1 split; expected 0"),
        (lambda f: fullgraph.load(f / "names", dtype=torch.int32), "dtype is torch.int32; expected torch.float32, "),
        (lambda f: fullgraph.load(f / "names", num_layers=0), "num_layers is 0; expected a whole number of at least 1"),
        (lambda f: fullgraph.load(f / "names", seed=-1), "seed is -1; expected a whole number from 0"),
    ],
)
def test_arguments_from_python_are_checked_as_flags_are(pets: Path, call: Any, message: str) -> None:
    with pytest.raises(RankError, match=re.escape(message)):
        call(pets)
    assert not (pets / "x.npy").exists()


def test_one_hot_features_are_those_of_one_graph(tmp_path: Path) -> None:
    spec = "demo:communities?nodes=40&classes=3&degree=6"
    graph, other = load(spec, features="onehot"), load(f"{spec}&seed=9", features="onehot")
    for name, each, parts in (("one", graph, 1), ("two", graph, 2), ("other", other, 1)):
        build(each, partition(each, parts, "random"), tmp_path / name)
    train(tmp_path / "one", dataclasses.replace(CONFIG, epochs=1), run=tmp_path / "run")
    predict(tmp_path / "one", tmp_path / "run", tmp_path / "p.npy")
    with pytest.raises(RankError, match=r"are one-hot, a column for each node of the graph it was trained on"):
        predict(tmp_path / "other", tmp_path / "run", tmp_path / "q.npy")


def test_ids_of_earlier_predictions_do_not_stay(pets: Path) -> None:
    (pets / "s.ids.npy").write_bytes(b"old")
    predict(pets / "names", pets / "run-names", pets / "s.npy")
    assert not (pets / "s.ids.npy").exists()


def test_prediction_keeps_the_runs_bound_on_exchanges(pets: Path) -> None:
    train(pets / "names", dataclasses.replace(CONFIG, exchange_bytes=1000), run=pets / "run-bound")
    trained = load_trained(pets / "run-bound", pets / "names", World())
    assert trained.part.world.exchange_bytes == 1000
