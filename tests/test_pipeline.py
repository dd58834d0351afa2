"""Any graph through every offline step: a file is loaded, assigned, built, verified and read back, and each count is
that of a loop in plain Python."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fullgraph.shards import Shard, read_manifest, read_shard
from partition_tools import build, load, partition
from partition_tools.report import report
from partition_tools.sources import LoadOptions
from partition_tools.verify import verify

Edges = list[tuple[int, int]]


@st.composite
def multigraphs(draw: st.DrawFn) -> tuple[int, Edges]:
    """(N, edges): directed, with loops, copies and isolated nodes, connected or not, of 1 to 40 nodes."""
    n = draw(st.integers(1, 40))
    linked = draw(st.integers(1, n))  # nodes from there on have no edge
    node = st.integers(0, linked - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=60))
    copied = draw(st.lists(st.sampled_from(edges), max_size=10)) if edges else []
    loops = [(u, u) for u in draw(st.lists(node, max_size=3))]
    edges = edges + copied + loops
    return n, edges + [(v, u) for u, v in edges] if draw(st.booleans()) else edges


def write(folder: Path, kind: str, n: int, edges: Edges, labels: list[int]) -> tuple[Path, LoadOptions]:
    """The same graph as a file of some format."""
    names = [f"n{(7 * i) % 41}" for i in range(n)]  # their order is not that of the nodes
    if kind == "npz":
        ends = np.array(edges, np.int64).reshape(-1, 2).T
        np.savez(folder / "g.npz", edge_index=ends, num_nodes=n, y=labels, x=np.arange(1.0, n + 1)[:, None])
        return folder / "g.npz", LoadOptions()
    if kind == "one-based":
        ends = np.array(edges, np.int64).reshape(-1, 2).T + 1
        np.savez(folder / "g.npz", edge_index=ends, num_nodes=n, y=labels, x=np.arange(1.0, n + 1)[:, None])
        return folder / "g.npz", LoadOptions(index_base=1)
    lines = "".join(f"{names[u]},{names[v]}\n" for u, v in edges)
    (folder / "g.csv").write_text("source,target\n" + lines)
    order = np.random.default_rng(n).permutation(n)
    (folder / "x.csv").write_text("id,place\n" + "".join(f"{names[i]},{i + 1}\n" for i in order))
    (folder / "y.csv").write_text("id,label\n" + "".join(f"{names[i]},{labels[i]}\n" for i in order[::-1]))
    options = LoadOptions(features=str(folder / "x.csv"), labels=str(folder / "y.csv"))
    return folder / "g.csv", options


def original(shard: Shard) -> list[Any]:
    ids = shard.owned_global if shard.node_ids is None else shard.node_ids
    return [str(node) for node in ids.tolist()]


@settings(max_examples=40, deadline=None)
@given(multigraphs(), st.data())
def test_every_node_edge_id_and_label_comes_through(case: tuple[int, Edges], data: st.DataObject) -> None:
    n, edges = case
    labels = [i % 3 for i in range(n)]
    kind = data.draw(st.sampled_from(["npz", "one-based", "csv"]))
    parts = data.draw(st.one_of(st.integers(1, min(n, 4)), st.integers(1, n)))
    method = data.draw(st.sampled_from(["random", "contiguous", "bfs", "file"]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, options = write(folder, kind, n, edges, labels)
        if kind == "csv" and not edges:
            return  # an edge list without an edge is refused
        graph = load(path, options)
        if method == "file":
            given_parts = data.draw(st.lists(st.integers(0, parts - 1), min_size=n, max_size=n))
            (folder / "p.txt").write_text("".join(f"{part}\n" for part in given_parts))
            method = f"file:{folder / 'p.txt'}"
        assignment = partition(graph, parts, method)
        build(graph, assignment, folder / "s")
        assert verify(folder / "s") == []
        shards = [read_shard(folder / "s", q) for q in range(parts)]
        manifest = read_manifest(folder / "s")

        # place[node of the case] = its row in the built graph, told by the feature that holds it
        assert graph.x is not None
        place = {int(value) - 1: row for row, value in enumerate(np.asarray(graph.x)[:, 0])}
        built = [(place[u], place[v]) for u, v in edges]
        owner = assignment.part.tolist()

        owned = [node for shard in shards for node in shard.owned_global.tolist()]
        assert sorted(owned) == list(range(n))
        stored: Counter[tuple[int, int]] = Counter()
        for q, shard in enumerate(shards):
            known = [*shard.owned_global.tolist(), *shard.halo_global.tolist()]
            rows = np.repeat(shard.owned_global, np.diff(shard.indptr)).tolist()
            stored.update(zip((known[i] for i in shard.indices.tolist()), rows, strict=True))
            assert all(owner[node] == q for node in shard.owned_global.tolist())
            halo = {u for u, v in built if owner[v] == q and owner[u] != q}
            assert set(shard.halo_global.tolist()) == halo
            assert shard.y is not None
            assert shard.x is not None
            mine = [int(value) - 1 for value in np.asarray(shard.x)[:, 0]]
            assert shard.y.tolist() == [labels[i] for i in mine]
            assert [place[i] for i in mine] == shard.owned_global.tolist()
            expected = {"npz": [str(i) for i in mine], "one-based": [str(i + 1) for i in mine]}
            assert original(shard) == expected.get(kind, [f"n{(7 * i) % 41}" for i in mine])
        assert stored == Counter(built)

        facts, found = manifest.graph, report([folder / "s"])[0]
        assert facts["num_edges"] == len(edges)
        assert facts["loops"] == sum(u == v for u, v in edges)
        assert facts["duplicates"] == len(edges) - len(set(edges))
        assert facts["undirected_pairs"] == len({frozenset(edge) for edge in edges if edge[0] != edge[1]})
        touched = {node for u, v in edges if u != v for node in (u, v)}
        assert facts["isolated"] == n - len(touched)
        cut = [(u, v) for u, v in built if owner[u] != owner[v]]
        assert found.cut_edges == len(cut)
        assert found.cut_pairs == len({frozenset(edge) for edge in cut})
        assert found.halo_rows == len({(u, owner[v]) for u, v in cut})
