"""Graphs of every kind for tests of readers, and what loading a file comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from hypothesis import strategies as st

from partition_tools.graph import Graph, Splits
from partition_tools.sources import LoadOptions, load


@st.composite
def rich_graphs(draw: st.DrawFn) -> Graph:
    """Random multigraphs, directed, with loops, duplicates and isolated nodes, and with every field or none."""
    n, e = draw(st.integers(1, 9)), draw(st.integers(0, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x: Any = None
    kind = draw(st.sampled_from(["none", "float16", "float32", "float64", "int16", "uint8", "int64", "csr"]))
    if kind == "csr":
        x = sp.random_array((n, 4), density=0.4, format="csr", rng=rng, dtype=np.float64)
        x.sort_indices()
    elif kind != "none":
        x = rng.integers(0, 9, (n, 3)).astype(kind)
    labels = {
        "none": None,
        "single": rng.integers(-1, 4, n),
        "multi": rng.integers(0, 2, (n, draw(st.integers(1, 3)))).astype(np.uint8),
        "target": np.where(rng.random(n) < 0.2, np.nan, rng.integers(0, 3, n)).astype(np.float32),
        "targets": rng.integers(0, 2, (n, 2)).astype(np.float64),
    }
    k = draw(st.integers(0, 3))
    masks = rng.integers(0, 2, (3, k, n)).astype(np.bool_)
    names = np.array([f"ä{'b' * (i % 3)}{i}" for i in range(n)])
    return Graph(
        name="g",
        num_nodes=n,
        src=rng.integers(0, n, e),
        dst=rng.integers(0, n, e),
        x=x,
        y=labels[draw(st.sampled_from(sorted(labels)))],
        splits=Splits(train=masks[0], val=masks[1], test=masks[2]) if k and (k != n or n == 1) else None,
        edge_weight=draw(st.sampled_from([None, rng.random(e), rng.random(e).astype(np.float32)])),
        edge_x=draw(st.sampled_from([None, rng.random((e, 2)), rng.integers(0, 9, (e, 1)).astype(np.int8)])),
        node_weight=draw(st.sampled_from([None, rng.integers(0, 9, (n, 2))])),
        node_ids=draw(st.sampled_from([None, names, np.arange(n) + 2**60])),
    )


def assert_same(after: Graph, before: Graph) -> None:
    """Equal but for their changes, dtypes included."""
    assert (after.name, after.num_nodes, after.task) == (before.name, before.num_nodes, before.task)
    for field in ("src", "dst", "y", "edge_weight", "edge_x", "node_weight", "node_ids", "x"):
        old, new = getattr(before, field), getattr(after, field)
        assert (old is None) == (new is None), field
        if old is None:
            continue
        assert sp.issparse(old) == sp.issparse(new), field
        if sp.issparse(old):
            old, new = old.toarray(), new.toarray()
        assert new.dtype == old.dtype or new.dtype.kind == old.dtype.kind == "U", field
        np.testing.assert_array_equal(new, old)
    assert (after.splits is None) == (before.splits is None)
    if before.splits is not None and after.splits is not None:
        for part in ("train", "val", "test"):
            np.testing.assert_array_equal(getattr(after.splits, part), getattr(before.splits, part))


def load_or_message(path: str | Path, options: LoadOptions | None = None) -> Graph | str:
    """The graph, or what the ``ValueError`` says; any other exception is a failed test."""
    try:
        return load(path, options)
    except ValueError as error:
        return str(error)
