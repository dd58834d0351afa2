"""Recipes and their comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fullgraph.compare import compare, interval, link_seconds, show_comparison, typical
from fullgraph.compare_page import write_comparison
from fullgraph.config import TrainConfig
from fullgraph.recipes import Link, recipes
from fullgraph.world import World
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
    write_comparison(found, tmp_path / "out")
    assert json.loads((tmp_path / "out/compare.json").read_text())["recipes"][0]["name"] == "exact"
    assert (tmp_path / "out/compare.png").read_bytes().startswith(b"\x89PNG")
    assert "<td>every:2</td>" in (tmp_path / "out/compare.html").read_text()


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
    found = recipes(TrainConfig(codec="int8"), path)
    assert list(found) == ["exact", "slow", "half rows"]
    assert found["exact"] == TrainConfig()
    assert found["slow"] == TrainConfig(refresh="every:4", stagger=True)
    assert found["half rows"] == TrainConfig(boundary_sample=0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a", "not a TOML file"),
        ("", "no recipe"),
        ('codec = "int8"', "codec outside a table"),
        ("[exact]", "a recipe named exact"),
        ('[a]\ncodex = "int8"', "recipe a: codex is not an option"),
        ("[a]\nseed = 4", "seed is not an option"),
        ("[a]\nstagger = 1", "stagger is 1"),
        ('[a]\ncodec = "int4"', "recipe a: --codec is int4"),
    ],
)
def test_a_file_that_holds_no_recipes_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "recipes.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        recipes(TrainConfig(), path)
