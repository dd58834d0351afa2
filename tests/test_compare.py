"""Recipes and their comparison."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fullgraph.compare import compare, interval, link_seconds, show_comparison, typical
from fullgraph.compare_page import make_folder, write_comparison
from fullgraph.config import TrainConfig
from fullgraph.recipes import Link, recipes
from fullgraph.world import RankError, World
from partition_tools.builder import build
from partition_tools.graph import Graph, Splits
from tests.builds import assignment
from tests.ranks import RankPool

BASE = TrainConfig(model="gcn", hidden=8, epochs=6, eval_every=2, layer0="exchange")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    kind, y = rng.permutation(60), rng.integers(0, 3, 60)
    graph = Graph(
        name="compared",
        num_nodes=60,
        src=rng.integers(0, 60, 240),
        dst=rng.integers(0, 60, 240),
        x=(np.eye(3)[y] + rng.normal(0, 0.3, (60, 3))).astype(np.float32),
        y=y,
        splits=Splits(train=kind[None] < 30, val=kind[None] >= 45, test=(kind[None] >= 30) & (kind[None] < 45)),
    )
    out = tmp_path_factory.mktemp("compare") / "shards"
    build(graph, assignment(rng.integers(0, 2, 60), 2), out)
    return out


def test_a_folder_that_cannot_be_written_to_is_told_before_the_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="name another folder with --out"):
        make_folder(tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("target", "base", "said"),
    [
        (90.0, BASE, "--target is 90; expected a share of 1 for accuracy"),
        (None, dataclasses.replace(BASE, lr=1e30), "recipe exact, seed 1: train: the loss of epoch 2"),
    ],
)
def test_what_ends_a_comparison_names_the_run(folder: Path, target: float | None, base: TrainConfig, said: str) -> None:
    with pytest.raises(RankError, match=re.escape(said)):
        compare(folder, {"exact": base}, World(), seeds=1, target=target)


def on_ranks(world: World, folder: Path, link: Link | None) -> dict[str, Any]:
    chosen = {"exact": BASE} | {k: v for k, v in recipes(BASE).items() if k in ("int8", "pipelined", "every:2")}
    return compare(folder, chosen, world, seeds=2, link=link)


def test_recipes_are_paired_with_the_exact_run(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    found, other = ranks.run(2, on_ranks, folder, Link.parse("100mbit,1ms"))
    lines = {line["name"]: line for line in found["recipes"]}
    assert list(lines) == ["exact", "pipelined", "every:2", "int8"]
    assert [line["score"] for line in other["recipes"]] == [line["score"] for line in found["recipes"]]
    exact, int8 = lines["exact"], lines["int8"]
    assert exact["difference"] == 0.0
    assert [run["seed"] for run in int8["runs"]] == [run["seed"] for run in exact["runs"]] == [1, 2]
    gaps = [a["test"] - b["test"] for a, b in zip(int8["runs"], exact["runs"], strict=True)]
    assert int8["difference"] == pytest.approx(sum(gaps) / 2)
    assert int8["bytes"] < exact["bytes"]
    assert exact["drift"] == []
    assert int8["drift"][0]["relative_error"] > 0
    assert lines["pipelined"]["link_exposed_seconds"] <= lines["pipelined"]["link_seconds"]

    console = Console(width=150, record=True, quiet=True)
    console.quiet = False
    with console.capture() as shown:
        show_comparison(found, console)
    assert "against exact" in shown.get()
    assert "predicted" in shown.get()

    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    make_folder(tmp_path / "out")
    write_comparison(found, tmp_path / "out")
    assert json.loads((tmp_path / "out/compare.json").read_text())["recipes"][0]["name"] == "exact"
    assert (tmp_path / "out/compare.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out/compare.html").read_text()
    assert "<td>every:2</td>" in page
    assert "s to target*" in page
    assert "codec int8" in page


def test_seconds_over_a_link_are_bytes_over_bandwidth_and_hide_under_compute() -> None:
    run = {"compute_seconds": 1.0, "busiest_bytes": 25e6, "exchanges": 4, "weight_bytes": 0}
    link = Link.parse("100mbit,0ms")
    assert link_seconds(run, link, 2, pipelined=False) == (3.0, 2.0)
    assert link_seconds(run, link, 2, pipelined=True) == (2.0, 1.0)
    assert link_seconds(run, Link.parse("1gbit,0ms"), 2, pipelined=True) == (1.0, 0.0)
    assert link_seconds(run, Link.parse("1gbit,10ms"), 1, pipelined=False) == (1.0, 0.0)


def test_seconds_of_an_epoch_are_those_of_a_whole_period() -> None:
    assert typical({1: 2.0, 2: 9.0, 3: 1.0}, 1) == 2.0
    refreshed = {step: 4.0 if step % 4 == 0 else 1.0 for step in range(1, 13)}
    assert typical(refreshed, 4) == 1.75  # a plain median says 1
    assert typical({1: 1.0, 4: 4.0}, 4) == 2.5


def test_the_interval_is_students() -> None:
    assert interval([1.0]) is None
    assert interval([1.0, 3.0]) == pytest.approx(12.706 * 2**0.5 / 2**0.5, rel=1e-4)


@pytest.mark.parametrize("text", ["", "1", "1gb", "gbit", "1gbit,", "1gbit,0.2", "0mbit,1ms", "1gbit 1ms"])
def test_a_link_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--link"):
        Link.parse(text)


def test_recipes_of_a_file_come_after_the_exact_run(tmp_path: Path) -> None:
    path = tmp_path / "recipes.toml"
    path.write_text('[slow]\nrefresh = "every:4"\nstagger = true\n\n["half rows"]\nboundary-sample = 0.5\n')
    found = recipes(TrainConfig(), path)
    assert list(found) == ["exact", "slow", "half rows"]
    assert found["exact"] == TrainConfig()
    assert found["slow"] == TrainConfig(refresh="every:4", stagger=True)
    assert found["half rows"] == TrainConfig(boundary_sample=0.5)


def test_every_built_in_recipe_fits_every_model() -> None:
    assert "sample 0.5" in recipes(TrainConfig(model="gcn"))
    assert "sample 0.5" not in recipes(TrainConfig(model="gat"))


def test_drift_is_measured_as_often_as_asked_and_never_in_the_exact_run() -> None:
    found = recipes(TrainConfig(measure_drift=7))
    assert [config.measure_drift for config in found.values()] == [None] + [7] * (len(found) - 1)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ({"refresh": "every:3"}, "--refresh is not an option of a comparison, but of a recipe"),
        ({"codec": "int8"}, "--codec is not"),
        ({"patience": 5}, "--patience is not an option of a comparison, but of fullgraph train"),
        ({"checkpoint_every": 5}, "--checkpoint-every is not"),
        ({"epochs": 0}, "--epochs is 0; expected at least 1"),
    ],
)
def test_options_that_a_comparison_would_not_heed_are_refused(base: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        recipes(TrainConfig(**base))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--recipes: .*none.toml cannot be read: No such file"):
        recipes(TrainConfig(), tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a", "not a TOML file"),
        ("", "no recipe"),
        ('codec = "int8"', "codec outside a table"),
        ("[exact]", "a recipe named exact"),
        ('[a]\ncodex = "int8"', "recipe a: codex is not an option"),
        ("[a]\nseed = 4", "seed is not an option"),
        ("[a]\npatience = 4", "patience is not an option"),
        ("[a]\nstagger = 1", "stagger is 1"),
        ('[a]\ncodec = "int4"', "recipe a: --codec is int4"),
    ],
)
def test_a_file_that_holds_no_recipes_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "recipes.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        recipes(TrainConfig(), path)
