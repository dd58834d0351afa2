import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition_tools import metis
from partition_tools.adjacency import symmetric_adjacency
from partition_tools.assign import Assignment, AssignOptions, assign, partition, read_parts
from partition_tools.graph import Graph
from partition_tools.sources import load

RNG = np.random.default_rng(0)


def make_graph(num_nodes: int, edges: Any, **fields: Any) -> Graph:
    src, dst = np.array(edges, dtype=np.int64).reshape(-1, 2).T.copy()
    return Graph(name="toy.graph", num_nodes=num_nodes, src=src, dst=dst, **fields)


def ring(n: int, **fields: Any) -> Graph:
    return make_graph(n, [(i, (i + 1) % n) for i in range(n)], **fields)


def path(n: int, **fields: Any) -> Graph:
    return make_graph(n, [(i, i + 1) for i in range(n - 1)], **fields)


def random_graph(n: int, edges: int, seed: int = 0) -> Graph:
    """Directed, with loops and duplicates."""
    return make_graph(n, np.random.default_rng(seed).integers(0, n, (edges, 2)))


def sizes(assignment: Assignment) -> list[int]:
    return np.bincount(assignment.part, minlength=assignment.parts).tolist()


def said(assignment: Assignment) -> str:
    return " | ".join(assignment.notes)


# Options


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parts": 0}, "--parts 0: expected at least 1"),
        ({"parts": -3}, "--parts -3"),
        ({"parts": 2.0}, "--parts is 2.0; expected a whole number"),
        ({"method": "mitis"}, "--method mitis: expected metis, best, fennel, random, contiguous, bfs, supernode:C"),
        ({"method": "file:"}, "--method file:"),
        ({"seed": 0}, "--seed 0: expected 1 to 2147483647"),
        ({"seed": 2**31 - 1, "tries": 2}, "--seed 2147483647: expected 1 to 2147483646"),
        ({"tries": 0}, "--tries 0"),
        ({"objective": "rows"}, "--objective rows with --method metis: expected auto, cut, volume"),
        ({"scheme": "flat"}, "--scheme flat: expected auto, kway, recursive"),
        ({"balance": ("halo",)}, "--balance halo: expected one or several of nodes, edges, train, cost"),
        ({"imbalance": 3.0}, "--imbalance 3.0: expected a fraction"),
        ({"imbalance": float("nan")}, "--imbalance nan"),
        ({"timeout": 0.0}, "--timeout 0.0"),
        ({"objective": "volume", "scheme": "recursive"}, "only by kway"),
        ({"objective": "volume", "use_edge_weights": True}, "--use-edge-weights"),
        ({"method": "random", "tries": 2}, "--tries has no effect with --method random"),
        ({"method": "fennel", "locality": False}, "--no-locality has no effect with --method fennel"),
        ({"method": "bfs", "use_edge_weights": True}, "--use-edge-weights has no effect with --method bfs"),
    ],
)
def test_options_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AssignOptions(**{"parts": 2, **fields})


def test_an_assignment_checks_itself() -> None:
    fields: dict[str, Any] = {"method": "x", "seed": 1, "options": {}, "versions": {}, "notes": ()}
    with pytest.raises(ValueError, match="node 1 is in part 2; parts go from 0 to 1"):
        Assignment(part=np.array([0, 2], dtype=np.int32), parts=2, **fields)
    with pytest.raises(ValueError, match=r"part is int64 \[1\]"):
        Assignment(part=np.zeros(1, dtype=np.int64), parts=2, **fields)


# Any method


@pytest.mark.parametrize("method", ["metis", "random", "contiguous", "bfs"])
def test_more_parts_than_nodes_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match=r"toy.graph: --parts 8 for 5 nodes; expected at most 5"):
        assign(path(5), AssignOptions(parts=8, method=method))


@pytest.mark.parametrize("method", ["metis", "random", "contiguous", "bfs"])
def test_one_part_needs_no_partitioner(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis, "laid_out", None)
    assignment = assign(path(6), AssignOptions(parts=1, method=method))
    assert assignment.part.tolist() == [0] * 6
    assert assignment.table == ()
    assert "no partitioner was needed" in said(assignment)


@pytest.mark.parametrize("method", ["metis", "random", "contiguous", "bfs"])
def test_what_is_recorded_is_plain(method: str) -> None:
    assignment = assign(random_graph(60, 200), AssignOptions(parts=3, method=method, seed=5))
    assert assignment.part.dtype == np.int32
    assert (assignment.method, assignment.seed, assignment.parts) == (method, 5, 3)
    options = json.loads(json.dumps(assignment.options))
    assert AssignOptions(**options) == AssignOptions(parts=3, method=method, seed=5)
    json.dumps([assignment.versions, assignment.notes, [dataclasses.asdict(run) for run in assignment.table]])
    assert ("pymetis" in assignment.versions) == (method == "metis")


@given(st.integers(1, 60), st.data(), st.sampled_from(["random", "contiguous", "bfs"]))
@settings(max_examples=60, deadline=None)
def test_simple_methods_balance_to_within_one_node(n: int, data: st.DataObject, method: str) -> None:
    parts = data.draw(st.integers(1, n))
    graph = random_graph(n, data.draw(st.integers(0, 80)))
    assignment = assign(graph, AssignOptions(parts=parts, method=method))
    assert max(sizes(assignment)) - min(sizes(assignment)) <= 1
    again = np.random.default_rng(1).permutation(graph.num_edges)
    shuffled = dataclasses.replace(graph, src=graph.src[again], dst=graph.dst[again])
    assert np.array_equal(assign(shuffled, AssignOptions(parts=parts, method=method)).part, assignment.part)


def test_random_follows_its_seed() -> None:
    one, two = (assign(path(50), AssignOptions(parts=4, method="random", seed=seed)).part for seed in (1, 2))
    assert not np.array_equal(one, two)
    assert np.array_equal(one, assign(path(50), AssignOptions(parts=4, method="random", seed=1)).part)


def test_contiguous_and_bfs_are_blocks_of_their_order() -> None:
    graph = make_graph(8, [(0, 4), (4, 1), (1, 5), (5, 2), (2, 6), (6, 3), (3, 7)])
    assert assign(graph, AssignOptions(parts=4, method="contiguous")).part.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert assign(graph, AssignOptions(parts=4, method="bfs")).part.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_neighbours_in_one_cluster() -> None:
    graph = load("demo:communities?nodes=16385")
    found = partition(graph, 2)
    assert found.cluster is not None
    assert found.cluster.dtype == np.int32
    assert np.bincount(found.cluster).shape == (16,)
    assert np.bincount(found.cluster).max() < 1.5 * 1024
    inside = np.mean(found.cluster[graph.src] == found.cluster[graph.dst])
    assert inside > 2 / 16  # by chance 1 / 16
    assert "in 16 clusters of neighbours" in found.notes[-1]
    assert np.array_equal(found.cluster, partition(graph, 1).cluster)
    for other in (
        partition(graph, 2, locality=False),
        partition(graph, 2, "contiguous"),
        partition(load("demo:communities?nodes=16384"), 2),
    ):
        assert other.cluster is None


def test_unused_weights_are_said() -> None:
    graph = path(6, edge_weight=np.ones(5), node_weight=np.ones((6, 1), dtype=np.int64))
    for method in ("random", "contiguous", "bfs"):
        notes = assign(graph, AssignOptions(parts=2, method=method)).notes
        assert notes == (
            f"edge weights play no part in --method {method}",
            f"node weights play no part in --method {method}",
        )
    assert "edge weights were not used" in said(assign(graph, AssignOptions(parts=2)))
    assert "node weights were not used" in said(assign(graph, AssignOptions(parts=2, balance="edges")))


# Files


@pytest.mark.parametrize(
    "text", [b"0\n2\n1\n2\n", b"0\r\n2\r\n1\r\n2\r\n\r\n", b"\xef\xbb\xbf0\n 2\n1\t\n2", b"00\n2\n1\n2\n\n\n"]
)
def test_text_file_of_parts(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "p.txt").write_bytes(text)
    assert assign(path(4), AssignOptions(parts=3, method=f"file:{tmp_path}/p.txt")).part.tolist() == [0, 2, 1, 2]


@pytest.mark.parametrize("dtype", ["<i8", ">i4", "u1", "<u8"])
def test_npy_file_of_parts(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "p.npy", np.array([0, 2, 1, 2], dtype=dtype))
    part = read_parts(tmp_path / "p.npy", num_nodes=4, parts=3)
    assert (part.dtype, part.tolist()) == (np.int32, [0, 2, 1, 2])


def test_parts_that_a_file_leaves_empty_are_said(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("0\n3\n0\n3\n1\n")
    assignment = assign(path(5), AssignOptions(parts=5, method=f"file:{tmp_path}/p.txt"))
    assert sizes(assignment) == [2, 1, 0, 2, 0]
    assert assignment.notes == (f"parts 2, 4 of 5 own no node in {tmp_path}/p.txt",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"0\n1\n", "has 2 lines for 4 nodes"),
        (b"0\n1\n0\n1\n0\n", "has 5 lines for 4 nodes"),
        (b"0\n1\n2\n1\n", r"line 3 holds part 2; expected 0 to 1 \(--parts 2\)$"),
        (b"1\n2\n2\n1\n", "line 2 holds part 2; .*count from 1"),
        (b"0\n1\n-1\n1\n", "line 3 holds '-1'"),
        (b"0\n1.0\n0\n1\n", "line 2 holds '1.0'"),
        (b"0\n\n0\n1\n", "line 2 holds ''"),
        (b"0 1\n0 1\n", "line 1 holds '0 1'"),
        (b"part\n0\n1\n", "line 1 holds 'part'"),
        (b"0\n99999999999999999999\n", "line 2 holds '99999999999999999999'"),
        (b"PK\x03\x04\xff", "line 1 holds"),
    ],
)
def test_faults_in_a_text_file_are_named(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "p.txt").write_bytes(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_parts(tmp_path / "p.txt", num_nodes=4, parts=2)
    assert str(tmp_path / "p.txt") in str(caught.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([0.0, 1.0, 0.0, 1.0]), r"holds float64 \[4\]; expected integers"),
        (np.array([[0, 1], [0, 1]]), r"holds int64 \[2, 2\]"),
        (np.array([True, False, True, False]), r"holds bool \[4\]"),
        (np.array([0, 1, 0]), "has 3 rows for 4 nodes"),
        (np.array([0, 1, -1, 0]), "row 2 holds part -1"),
        (np.array([0, 1, 1, 2**63], dtype=np.uint64), "row 3 holds part 9223372036854775808"),
        (np.array([0, 1, 1, None]), "no readable .npy"),
    ],
)
def test_faults_in_an_npy_file_are_named(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "p.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        read_parts(tmp_path / "p.npy", num_nodes=4, parts=2)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.txt: does not exist"):
        read_parts(tmp_path / "none.txt", num_nodes=4, parts=2)
    with pytest.raises(ValueError, match="is not a file"):
        read_parts(tmp_path, num_nodes=4, parts=2)
    whole = tmp_path / "whole.npy"
    np.save(whole, np.zeros(1000, dtype=np.int64))
    (tmp_path / "short.npy").write_bytes(whole.read_bytes()[:-8])
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("short.npy", "empty.npy"):
        with pytest.raises(ValueError, match=f"{name}: is no readable .npy"):
            read_parts(tmp_path / name, num_nodes=1000, parts=2)


# METIS


@pytest.mark.parametrize("case", range(15))
def test_small_graphs_into_many_parts(case: int, capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(case)
    n = int(rng.integers(2, 41))
    parts = int(rng.integers(2, min(n, 16) + 1))
    graph = random_graph(n, int(rng.integers(0, 4 * n)), seed=case)
    fields: dict[str, Any] = ({}, {"scheme": "kway"}, {"scheme": "kway", "objective": "volume"})[case % 3]
    assignment = assign(graph, AssignOptions(parts=parts, seed=case + 1, **fields))
    assert min(sizes(assignment)) >= 1
    assert assignment.table[0].cut == symmetric_adjacency(graph).cut(assignment.part)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("graph", "parts"),
    [
        pytest.param(ring(35), 20, id="35-ring"),
        pytest.param(path(5), 5, id="5-path"),
        pytest.param(path(2), 2, id="2 nodes"),
        pytest.param(path(3), 2, id="3-path"),
        pytest.param(path(2, node_weight=np.array([[1], [2]])), 2, id="weighted 2 nodes"),
        pytest.param(path(3, node_weight=np.array([[1], [2], [1]])), 2, id="weighted 3-path"),
        pytest.param(ring(4), 2, id="4-cycle"),
        pytest.param(make_graph(14, [(0, 1), (1, 2), (2, 3)]), 3, id="10 of 14 isolated"),
        pytest.param(make_graph(10, []), 4, id="no edges"),
        pytest.param(make_graph(30, [(i, j) for i in range(30) for j in range(i)]), 4, id="clique"),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"scheme": "kway", "objective": "volume"}], ids=["auto", "volume"])
def test_every_part_gets_a_node(graph: Graph, parts: int, fields: dict[str, Any]) -> None:
    assignment = assign(graph, AssignOptions(parts=parts, **fields))
    assert min(sizes(assignment)) >= 1
    assert (assignment.table[0].refilled > 0) == ("empty" in said(assignment))


def test_a_refill_is_said() -> None:
    assignment = assign(ring(35), AssignOptions(parts=20, scheme="kway"))
    assert assignment.table[0].refilled > 0
    assert "nodes were moved there from the heaviest parts" in said(assignment)


def test_one_heavy_node_cannot_empty_the_other_parts() -> None:
    weight = np.array([[1000]] + [[1]] * 39)
    assignment = assign(ring(40, node_weight=weight), AssignOptions(parts=4))
    assert sorted(sizes(assignment))[0] == 1
    assert min(sizes(assignment)[part] for part in range(4) if part != assignment.part[0]) >= 10
    assert "balanced by the graph's node weights" in said(assignment)
    assert "METIS left parts" in said(assignment)
    assert "beyond" not in said(assignment)  # The heavy node alone is over the mean.


def test_directed_input_is_symmetrised() -> None:
    chain = assign(path(4), AssignOptions(parts=2))
    assert (sizes(chain), chain.table[0].cut) == ([2, 2], 1)
    graph = random_graph(2000, 10_000)
    run = assign(graph, AssignOptions(parts=8)).table[0]
    assert 0 < run.cut < 10_000
    assert 0 < run.rows < 10_000  # Rows follow the graph's own directions.


def test_loops_duplicates_direction_and_order_change_nothing() -> None:
    edges = np.unique(np.sort(RNG.integers(0, 500, (1500, 2)), axis=1), axis=0)
    edges = edges[edges[:, 0] != edges[:, 1]]
    loops = np.repeat(np.arange(500), 2).reshape(-1, 2)
    forms = [
        edges,
        RNG.permutation(np.concatenate([edges, edges[:, ::-1]])),
        RNG.permutation(np.concatenate([edges, edges, edges, loops])),
    ]
    found = [assign(make_graph(500, form), AssignOptions(parts=10)) for form in forms]
    for other in found[1:]:
        assert np.array_equal(other.part, found[0].part)
        assert other.table[0].cut == found[0].table[0].cut
    assert "500 loops dropped" in said(found[-1])


def test_another_seed_gives_another_partition() -> None:
    graph = random_graph(500, 1500)
    one, same, two = (assign(graph, AssignOptions(parts=4, seed=seed)).part for seed in (1, 1, 3))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, two)


@pytest.mark.parametrize(
    ("n", "fields", "scheme"),
    [
        (600, {"parts": 8}, "recursive"),
        (600, {"parts": 9}, "kway"),
        (400, {"parts": 9}, "recursive"),
        (400, {"parts": 9, "scheme": "kway"}, "kway"),
        (600, {"parts": 2, "objective": "volume"}, "kway"),
        (600, {"parts": 13, "objective": "volume"}, "recursive"),
    ],
)
def test_scheme(n: int, fields: dict[str, Any], scheme: str) -> None:
    assignment = assign(random_graph(n, 3 * n), AssignOptions(**fields))
    assert assignment.table[0].scheme == scheme
    assert ("in place of --objective volume" in said(assignment)) == (n == 600 and fields["parts"] == 13)


@pytest.mark.parametrize("objective", ["cut", "volume"])
def test_the_best_of_several_seeds_is_kept(objective: str) -> None:
    graph = random_graph(600, 2400)
    assignment = assign(graph, AssignOptions(parts=4, seed=7, tries=3, objective=objective))  # type: ignore[arg-type]
    assert [run.seed for run in assignment.table] == [7, 8, 9]
    (kept,) = (run for run in assignment.table if run.kept)
    assert assignment.seed == kept.seed
    if objective == "cut":
        assert kept.cut == min(run.cut for run in assignment.table)
    else:
        assert kept.rows == min(run.rows for run in assignment.table)
    assert len({(run.cut, run.rows) for run in assignment.table}) > 1
    once = assign(graph, AssignOptions(parts=4, seed=kept.seed, objective=objective))  # type: ignore[arg-type]
    assert np.array_equal(once.part, assignment.part)


def test_balance_by_edges_and_by_both() -> None:
    targets = (2000 * RNG.random(12_000) ** 3).astype(np.int64)  # In-degrees are skewed.
    graph = make_graph(2000, np.stack([RNG.integers(0, 2000, 12_000), targets], axis=1))

    def imbalance(*balance: str) -> tuple[float, float]:
        part = assign(graph, AssignOptions(parts=4, balance=balance)).part  # type: ignore[arg-type]
        nodes, edges = np.bincount(part), np.bincount(part[graph.dst])
        return nodes.max() / nodes.mean(), edges.max() / edges.mean()

    nodes, edges, both = imbalance("nodes"), imbalance("edges"), imbalance("nodes", "edges")
    assert nodes[0] <= 1.03
    assert edges[1] <= 1.05 < nodes[1]
    assert max(both) <= 1.03


def test_several_node_weights_are_each_balanced() -> None:
    weight = np.stack([np.ones(400, dtype=np.int64), np.arange(400) < 80], axis=1).astype(np.int64)
    assignment = assign(path(400, node_weight=weight), AssignOptions(parts=4))
    assert "node weights, 2 columns" in said(assignment)
    for column in weight.T:
        assert np.bincount(assignment.part, weights=column).max() <= 1.03 * column.sum() / 4


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([[1], [-1], [1], [1]], "node 1 has weight -1 in column 0"),
        ([[1, 0], [1, 0], [1, 0], [1, 0]], "column 1 sum to 0"),
        ([[2**60]] * 4, "column 0 sum to 4611686018427387904"),
        ([[2**62]] * 4, "column 0 sum to 18446744073709551616"),
        ([1, 1, 1, 1], r"node weights are int64 \[4\]; expected integers"),
        ([[1.5], [1.0], [1.0], [1.0]], "node weights are float64"),
    ],
)
def test_node_weights_are_checked(weight: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"toy.graph: .*{message}"):
        assign(ring(4, node_weight=np.array(weight)), AssignOptions(parts=2))


def test_edge_weights_keep_the_heavy_edge_inside() -> None:
    """Two triangles joined by one heavy edge, each with a light tail."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)]
    graph = make_graph(6, edges, edge_weight=np.array([0.9, 0.9, 0.001, 0.9, 0.9, 0.001]))
    assignment = assign(graph, AssignOptions(parts=2, use_edge_weights=True))
    assert {tuple(np.flatnonzero(assignment.part == p)) for p in range(2)} == {(0, 1, 2), (3, 4, 5)}
    assert "multiplied by 2^20" in said(assignment)
    assert assignment.table[0].cut == 2 * round(0.001 * 2**20)


def test_integer_edge_weights_are_taken_as_they_are_and_summed_over_a_pair() -> None:
    graph = make_graph(4, [(0, 1), (1, 0), (1, 2), (2, 3)], edge_weight=np.array([4.0, 5.0, 2.0, 9.0]))
    assignment = assign(graph, AssignOptions(parts=2, use_edge_weights=True))
    assert assignment.table[0].cut == 2
    assert "multiplied" not in said(assignment)


def test_edge_weights_of_any_scale_give_the_same_partition() -> None:
    graph = random_graph(100, 400)
    weight = np.random.default_rng(1).random(400) + 0.5
    one, large, small = (
        assign(dataclasses.replace(graph, edge_weight=w), AssignOptions(parts=4, use_edge_weights=True)).part
        for w in (weight, np.ldexp(weight, 1000), np.ldexp(weight, -1000))
    )
    assert np.array_equal(one, large)
    assert np.array_equal(one, small)


def test_tiny_edge_weights_count_as_one() -> None:
    graph = path(4, edge_weight=np.array([1e-30, 0.7, 0.7]))
    assert "1 came out as 0 and count as 1" in said(assign(graph, AssignOptions(parts=2, use_edge_weights=True)))


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_edge_weights_are_checked(bad: float) -> None:
    graph = path(4, edge_weight=np.array([1.0, bad, 1.0]))
    with pytest.raises(ValueError, match=r"toy.graph: edge 1 \(1 -> 2\) has weight"):
        assign(graph, AssignOptions(parts=2, use_edge_weights=True))


def test_edge_weights_of_a_graph_without_any() -> None:
    doubled = make_graph(4, [(0, 1), (1, 2), (2, 3), (1, 2), (2, 1)])
    assignment = assign(doubled, AssignOptions(parts=3, use_edge_weights=True))
    assert "as it has edges" in said(assignment)
    assert assignment.part[1] == assignment.part[2]
    with pytest.raises(ValueError, match="--use-edge-weights has no effect"):
        assign(path(4), AssignOptions(parts=2, use_edge_weights=True))


def test_imbalance_beyond_the_tolerance_is_said() -> None:
    graph = path(4, node_weight=np.array([[3], [3], [3], [2]]))
    assignment = assign(graph, AssignOptions(parts=3))
    assert "times the mean load, beyond --imbalance 0.03" in said(assignment)


def test_a_failure_of_metis_reaches_the_caller_as_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stub = tmp_path / "stub.py"
    stub.write_text("import os; os.abort()")
    monkeypatch.setattr(metis, "_CHILD", stub)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(metis.MetisError, match=r"toy\.graph: METIS was ended by SIGABRT"):
        assign(ring(9), AssignOptions(parts=2))
    assert capfd.readouterr() == ("", "")
    assert os.listdir(tmp_path) == ["stub.py"]
