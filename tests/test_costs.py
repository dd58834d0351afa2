"""Who pays least, by how much, and what may be compared."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from partition_tools.__main__ import main
from partition_tools.builder import build
from partition_tools.costs import FIGURES, best, check_comparable, labels, remarks, shortened, winners
from partition_tools.report import Report, report
from tests.builds import assignment, two_triangles


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two triangles cut at their bridge, cut badly, and cut as badly with even and odd exchanged."""
    base = tmp_path_factory.mktemp("builds")
    for name, part in (("good", [0, 0, 0, 1, 1, 1]), ("bad", [0, 1, 0, 1, 0, 1]), ("too", [1, 0, 1, 0, 1, 0])):
        build(two_triangles(), assignment(part, 2), base / name)
    build(two_triangles(x=np.ones((6, 2))), assignment([0, 0, 0, 1, 1, 1], 2), base / "features")
    build(two_triangles(src=two_triangles().dst[::-1].copy()), assignment([0, 0, 0, 1, 1, 1], 2), base / "other")
    return base


@pytest.fixture(scope="module")
def found(base: Path) -> tuple[Report, ...]:
    return report([base / "bad", base / "good", base / "too"])


def test_the_winner_of_each_cost_and_by_how_much(found: tuple[Report, ...], base: Path) -> None:
    won = {winner.cost: winner for winner in winners(found)}
    cut = won["cut_edges"]
    assert (cut.winners, cut.value) == ((str(base / "good"),), 2)
    assert (cut.runner_up, cut.runner_up_value, cut.saved) == (str(base / "bad"), 10, 0.8)
    assert won["halo_rows"].saved == 1 - 2 / 6
    even = won["node_imbalance"]
    assert even.winners == tuple(str(base / name) for name in ("bad", "good", "too"))
    assert (even.runner_up, even.runner_up_value, even.saved) == (None, None, 0.0)
    # Costs that not every partitioning has have no winner.
    assert "cut_weight" not in won
    assert "measured_seconds_per_epoch" not in won


def test_the_least_is_marked_where_there_is_a_choice(found: tuple[Report, ...]) -> None:
    by_key = {figure.key: figure for figure in FIGURES}
    assert best(by_key["cut_edges"], found) == [1]
    assert best(by_key["cut_edges"], [found[0], found[2]]) == []
    assert best(by_key["node_imbalance"], found) == []
    assert best(by_key["nodes"], found) == []
    assert best(by_key["cut_edges"], found[:1]) == []


def test_costs_that_are_written_alike_are_equal(found: tuple[Report, ...]) -> None:
    values = (1.00001, 1.00002, 2.0)
    close = [dataclasses.replace(one, replication=value) for one, value in zip(found, values, strict=True)]
    (figure,) = (figure for figure in FIGURES if figure.key == "replication")
    assert best(figure, close) == [0, 1]
    (won,) = (winner for winner in winners(close) if winner.cost == "replication")
    assert len(won.winners) == 2


def test_folders_are_called_by_where_they_differ(found: tuple[Report, ...]) -> None:
    def called(*folders: str) -> list[str]:
        return labels([dataclasses.replace(found[0], folder=folder) for folder in folders])

    assert called("/data/runs/a", "/data/runs/b/c") == ["a", "b/c"]
    assert called("/data/a", "shards") == ["/data/a", "shards"]
    assert called("../a/x", "../b/x") == ["a/x", "b/x"]
    assert called("/data/a") == called("/data/a", "/data/a")[:1] == ["/data/a"]
    assert shortened("a" * 40) == "a" * 40
    assert shortened("a" * 30 + "b" * 30) == "a" * 19 + "…" + "b" * 20


def test_other_numbers_of_parts_are_remarked(found: tuple[Report, ...]) -> None:
    assert remarks(found) == []
    (said,) = remarks([found[0], dataclasses.replace(found[1], parts=4)])
    assert said == "These are in different numbers of parts (2, 4): fewer parts always cut less."


def test_different_graphs_are_refused_with_both_names(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(base / "good"), str(base / "other")]) == 2
    error = capsys.readouterr().err
    assert f"{base / 'good'} holds the graph two triangles (6 nodes, 14 edges), {base / 'other'} holds" in error
    assert "only partitionings of one graph can be compared" in error


def test_a_partitioning_is_compared_once(base: Path) -> None:
    check_comparable([base / "good", base / "bad"])
    with pytest.raises(ValueError, match=r"good and .*good are the same build; name each partitioning once"):
        check_comparable([base / "bad", base / "good", base / "good"])


def test_compare_in_all_its_forms(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = [str(base / name) for name in ("good", "bad")]
    assert main(["compare", *named]) == 0
    text = capsys.readouterr().out
    assert "80.0 %" in text
    assert "all equal" in text
    assert main(["compare", *named, "--json", "--html", str(tmp_path / "p.html")]) == 0
    won = json.loads(capsys.readouterr().out)["winners"]
    assert won[0] == {
        "cost": "cut_edges",
        "label": "cut edges",
        "winners": [named[0]],
        "value": 2,
        "runner_up": named[1],
        "runner_up_value": 10,
        "saved": 0.8,
    }
    assert 'id="winners"' in (tmp_path / "p.html").read_text()
    assert main(["compare", *named, "--csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
