"""The generated graphs that speed is measured on, and their shards and arrays in a folder kept for a run or longer."""

from __future__ import annotations

import multiprocessing
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("arxiv-like", "reddit-like", "products-like")
"""169,343 nodes and 2.33 M entries, 128 features; 50,000 and 5 M, 602; 2.45 M and 124 M, 100 (``partition_tools``)."""
TINY = "demo:communities?nodes=2000"
"""For ``--quick``."""


def spec(name: str) -> str:
    """What ``partition_tools`` reads for ``arxiv-like``, or for ``arxiv-like/10``: the same with a tenth of the
    nodes. Any other name stands for itself: a file or a ``demo:`` spec."""
    from partition_tools.sources.demo import RECIPES

    base, _, share = name.partition("/")
    if base not in NAMES:
        return name
    return f"demo:{base}" if not share else f"demo:{base}?nodes={round(RECIPES[base].nodes / int(share))}"


@contextmanager
def work_folder(kept: Path | None) -> Iterator[Path]:
    """``kept``, or a folder that goes with the run."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        yield Path(folder)


def shards(name: str, parts: int, work: Path) -> Path:
    """The folder of the graph's shards, built where it is not there."""
    folder = work / f"{_slug(name)}-{parts}"
    if not folder.exists():
        _apart(_build, spec(name), parts, folder)
    return folder


def arrays(name: str, work: Path) -> Path:
    """The graph as a file of plain arrays ``src, dst, x, y, train``, for systems that know nothing of shards."""
    path = work / f"{_slug(name)}.npz"
    if not path.exists():
        _apart(_save, spec(name), path)
    return path


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


def _apart(function: Callable[..., None], *arguments: Any) -> None:
    """In a process of its own, so that its memory is gone before anything is measured."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(function, *arguments).result()


def _build(graph_spec: str, parts: int, folder: Path) -> None:
    from partition_tools import build, load, partition

    graph = load(graph_spec)
    build(graph, partition(graph, parts), folder)


def _save(graph_spec: str, path: Path) -> None:
    import numpy as np

    from partition_tools import load

    graph = load(graph_spec)
    assert graph.x is not None
    np.savez(path, src=graph.src, dst=graph.dst, x=graph.x, y=graph.y, train=graph.splits.train[0])
