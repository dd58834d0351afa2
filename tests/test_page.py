"""The page of a report: whole in one file, complete, and inert whatever the files' names say."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partition_tools import plots
from partition_tools.__main__ import main
from partition_tools.builder import build
from partition_tools.costs import FIGURES, GLOSSARY, labels, winners
from partition_tools.graph import Graph, Splits
from partition_tools.page import page, write_page
from partition_tools.report import Question, Report, report
from partition_tools.sources import load
from tests.builds import assignment

HOSTILE = "<script>alert('x')</script>\"&{{ 7*7 }}$\\frac{-->]]>\x1b[31m"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, ...]:
    """Three partitionings of one graph, with yardsticks."""
    base, graph = tmp_path_factory.mktemp("builds"), load("demo:communities?nodes=400")
    for name, parts in (("three", 3), ("ten", 10), ("one", 1)):
        build(graph, assignment(np.arange(400) % parts, parts), base / name)
    return report([base / "three", base / "ten", base / "one"], Question(yardsticks=True))


class Parsed(HTMLParser):
    """Elements, ids and text of a page; fails where an element is not closed in order."""

    _VOID = ("meta", "link", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, *each) for each in attrs]
        if tag not in self._VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, *each) for each in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_shows_everything(found: tuple[Report, ...]) -> None:
    text = page(found, Question(), winners(found))
    parsed = Parsed(text)
    # Summary and winners; layers and parts of each of the three builds.
    assert parsed.elements["table"] == 2 + 2 * 3
    # Where time goes; bars of each; two matrices of those with several parts.
    assert parsed.elements["svg"] == 1 + 3 + 2 * 2
    for word, meaning in GLOSSARY:
        assert word in parsed.text
        assert meaning in " ".join(parsed.text.split())
    for label in labels(found):
        assert label in parsed.text
    for figure in FIGURES:
        if any(figure.value(one) is not None for one in found):
            assert figure.label in parsed.text
            assert all(figure.text(one) in parsed.text for one in found)
    assert text.count('class="best"') >= 10
    assert "measured</th>" not in text


def test_it_needs_nothing_else(found: tuple[Report, ...]) -> None:
    text = page(found, Question())
    parsed = Parsed(text)
    assert parsed.elements["script"] == 0
    assert "default-src 'none'" in text
    names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)  # names of formats, which nothing follows
    assert re.findall(r"https?:|//\w|@import|url\((?!#)", names) == []
    for tag, name, value in parsed.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value is not None
            assert value.startswith(("#", "data:")), (tag, name, value)
        assert not name.startswith("on"), (tag, name)
    ids = [value for _, name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = [value for _, name, value in parsed.attributes if name in ("href", "xlink:href")]
    assert {value[1:] for value in targets if value and value.startswith("#")} <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)
    # Every colour that the figures ask for is given, on a light ground and on a dark one.
    for ink in set(re.findall(r"var\(--([\w-]+)\)", text)):
        assert text.count(f"--{ink}:") == 2, ink
    assert "0e01" not in text


def test_names_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    graph = Graph(
        name=HOSTILE,
        num_nodes=4,
        src=np.array([0, 1, 2, 3]),
        dst=np.array([1, 2, 3, 0]),
        y=np.array([0, 1, 0, 1]),
        splits=Splits(train=np.eye(4)[:1] > 0, val=np.eye(4)[1:2] > 0, test=np.eye(4)[2:3] > 0),
    )
    folder = tmp_path / HOSTILE.replace("/", "|")
    build(graph, assignment([0, 0, 1, 1], 2), folder)
    named = report([folder])
    text = page(named, Question())
    parsed = Parsed(text)
    assert parsed.elements["script"] == 0
    assert "{{ 7*7 }}" in parsed.text
    assert "<script>alert" in parsed.text
    assert "\x1b" not in text
    assert "�[31m" in parsed.text
    write_page(tmp_path / "p.html", named, Question())
    assert (tmp_path / "p.html").read_text(encoding="utf-8") == text


def test_a_name_that_is_not_text_is_written(tmp_path: Path) -> None:
    """A folder's name may be bytes that are not UTF-8."""
    folder = tmp_path / "a\udcff"
    build(load("demo:communities?nodes=200"), assignment(np.arange(200) % 2, 2), folder)
    write_page(tmp_path / "p.html", report([folder]), Question())
    assert "a�" in (tmp_path / "p.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("parts", "values"), [(9, True), (plots.MOST_VALUES, True), (plots.MOST_VALUES + 1, False)])
def test_the_matrix_has_its_values_up_to_so_many_parts(parts: int, values: bool) -> None:
    rows = (1000 * np.arange(parts)[:, None] + np.arange(parts)).tolist()
    text = plots.rows_matrix(rows)
    assert ("8001" in text) == values
    assert ("data:image/png;base64," in text) != values
    assert 'class="large"' in text


def test_short_numbers() -> None:
    assert [plots.short(n) for n in (0, 950, 9_999, 12_345, 2_500_000, 3e9)] == [
        *("0", "950", "9999", "12.3k", "2.5M", "3G"),
    ]


def test_a_page_is_the_same_each_time(found: tuple[Report, ...]) -> None:
    assert page(found[:1], Question()) == page(found[:1], Question())


@pytest.mark.parametrize("missing", [("matplotlib",), ("jinja2",), ("matplotlib", "jinja2")])
def test_without_the_extra_the_line_that_installs_it_is_said(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    real = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name in missing else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "p.html")]) == 2
    names = " ".join(missing)
    assert f"--html needs {' and '.join(missing)}: pip install {names}\n" in capsys.readouterr().err
    assert not (tmp_path / "p.html").exists()


@pytest.mark.parametrize("path", ["", "no/p.html"])
def test_where_a_page_cannot_be_written_is_said_first(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "nothing"), "--html", str(tmp_path / path)]) == 2
    assert "expected the name of a file to write" in capsys.readouterr().err
