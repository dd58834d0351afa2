"""The page of a report in headless Chromium: nothing goes wrong, everything is there, and it fits a phone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from partition_tools.builder import build
from partition_tools.costs import winners
from partition_tools.page import write_page
from partition_tools.report import Question, report
from partition_tools.sources import load
from tests.builds import assignment

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    *("--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--no-first-run", "--no-sandbox"),
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of three partitionings, the largest too wide for a phone, with long names."""
    base, graph = tmp_path_factory.mktemp("builds"), load("demo:communities?nodes=600")
    names = {"a": 2, "the-second-of-them-with-a-name-longer-than-a-phone-is-wide-" + 60 * "x": 12, "c": 1}
    for name, parts in names.items():
        build(graph, assignment(np.arange(600) * 7 % parts, parts), base / name)
    question = Question(yardsticks=True)
    found = report([base / name for name in names], question)
    write_page(base / "page.html", found, question, winners(found))
    return base / "page.html"


LOOK = """() => {
  const shown = e => e.getBoundingClientRect().width > 0 && e.getBoundingClientRect().height > 0;
  const style = getComputedStyle(document.body);
  return {
    width: [document.documentElement.scrollWidth, document.documentElement.clientWidth],
    tables: [...document.querySelectorAll('table')].filter(shown).length,
    figures: [...document.querySelectorAll('figure svg')].filter(shown).length,
    texts: [...document.querySelectorAll('svg text')].filter(e => getComputedStyle(e).fill !== style.color).length,
    unstyled: [...document.querySelectorAll('svg [style*="var("]')].filter(
      e => ['rgb(0, 0, 0)', ''].includes(getComputedStyle(e).fill) && getComputedStyle(e).stroke === 'none').length,
    ground: style.backgroundColor,
    best: document.querySelectorAll('td.best').length,
  };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(width: int, scheme: Any, written: Path, browser: Browser) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(written.as_uri())
    looked = page.evaluate(LOOK)
    if folder := os.environ.get("REPORT_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/page-{width}-{scheme}.png", full_page=True)
    context.close()
    assert said == []
    assert {url for url in asked if not url.startswith("data:")} == {written.as_uri()}
    assert looked["width"] == [width, width]  # wide tables and figures scroll by themselves
    assert looked["tables"] == 2 + 2 * 3
    assert looked["figures"] == 1 + 3 + 2 * 2
    assert looked["best"] > 5
    assert (looked["texts"], looked["unstyled"]) == (0, 0)
    assert looked["ground"] == {"light": "rgb(252, 252, 250)", "dark": "rgb(20, 23, 28)"}[scheme]
