"""Fewer ranks than parts: their shards are those of a build in that many parts, and so is everything after."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fullgraph.config import TrainConfig
from fullgraph.inference import evaluate, predict
from fullgraph.loading import load_shard
from fullgraph.loop import train
from fullgraph.merge import choose_ranks, join
from fullgraph.shards import Shard, read_manifest
from fullgraph.trainer import make_trainer
from fullgraph.world import RankError, World
from partition_tools.builder import build
from partition_tools.graph import Graph
from tests.builds import assignment, change, put, rich_graph
from tests.graphs import CASES, shard_of
from tests.ranks import RankPool

# ------------------------------------------------------------------------------------------------- which rank, by cost


def largest(cost: NDArray[np.float64], ranks: NDArray[np.int32]) -> float:
    return float(np.bincount(ranks, cost).max())


def every_choice(cost: NDArray[np.float64], ranks: int) -> float:
    """The least largest cost of any runs."""
    parts = cost.shape[0]
    best = np.inf
    for ends in itertools.combinations(range(1, parts), ranks - 1):
        runs = np.split(cost, ends)
        best = min(best, max(run.sum() for run in runs))
    return float(best)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_runs_have_the_least_largest_cost(costs: list[int], data: st.DataObject) -> None:
    cost = np.array(costs, np.float64)
    ranks = data.draw(st.integers(1, len(costs)))
    found = choose_ranks(cost, np.ones((ranks, len(costs)), np.bool_))
    assert found.tolist() == sorted(found.tolist())
    assert set(found.tolist()) == set(range(ranks))
    assert largest(cost, found) == every_choice(cost, ranks)


def readable(*parts: str) -> NDArray[np.bool_]:
    """A row a rank: x where it can read the part."""
    return np.array([[mark == "x" for mark in row] for row in parts])


@pytest.mark.parametrize(
    ("can", "expected"),
    [
        (("xxx", "xxx", "xxx"), [0, 1, 2]),
        ((".x.", "x..", "..x"), [1, 0, 2]),
        ((".xx", "xxx", "x.."), [2, 0, 1]),  # or [2, 1, 0]
        (("xxxx", "xxxx"), [0, 0, 1, 1]),
        (("..xx", "xxxx"), [1, 1, 0, 0]),
        ((".xxx", "xxx."), [1, 1, 0, 0]),
        (("...x", "xxx.", "xxx."), [1, 1, 2, 0]),
    ],
)
def test_ranks_take_what_they_can_read(can: tuple[str, ...], expected: list[int]) -> None:
    table = readable(*can)
    found = choose_ranks(np.ones(table.shape[1]), table)
    assert all(table[rank, part] for part, rank in enumerate(found))
    assert set(found.tolist()) == set(range(len(can)))
    if len(can) == table.shape[1]:
        assert sorted(found.tolist()) == list(range(len(can)))
    else:
        assert largest(np.ones(table.shape[1]), found) == largest(np.ones(table.shape[1]), np.array(expected))


@pytest.mark.parametrize(("can", "each"), [(("xx.", "xx.", "xx."), "one part"), (("x.x.", ".x.x"), "a run")])
def test_where_no_choice_gives_all_what_they_can_read(can: tuple[str, ...], each: str) -> None:
    with pytest.raises(ValueError, match=f"each has {each}.*rank 1 reads .*copy the missing files"):
        choose_ranks(np.ones(len(can[0])), readable(*can))


# ------------------------------------------------------------------------------------------------------- merged shards


def merged(graph: Graph, part: NDArray[np.int32], ranks: NDArray[np.int32]) -> list[Shard]:
    """The shards of all ranks; what they ask each other is answered here."""
    shards = [shard_of(graph, part, q, ranks.shape[0]) for q in range(ranks.shape[0])]
    joined = [join([shards[q] for q in np.flatnonzero(ranks == r)], ranks, r) for r in range(int(ranks.max()) + 1)]
    out = []
    for j in joined:
        index = np.zeros(j.halo_global.shape[0], np.int64)
        for r, other in enumerate(joined):
            of = j.halo_rank == r
            index[of] = other.places(j.halo_part[of], j.halo_index[of], j.halo_global[of])
        out.append(j.shard(index))
        assert part[out[-1].owned_global].tolist() == j.owned_part.tolist()
    return out


def assert_same(found: Shard, expected: Shard, but: tuple[str, ...] = ()) -> None:
    for field in dataclasses.fields(Shard):
        if field.name in but:
            continue
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(b, sp.csr_array):
            assert isinstance(a, sp.csr_array)
            assert (a != b).nnz == 0, field.name
            assert (a.indices.dtype, a.data.dtype, a.shape) == (b.indices.dtype, b.data.dtype, b.shape)
        elif isinstance(b, np.ndarray):
            assert a.dtype == b.dtype, field.name
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            assert a == b, field.name


@pytest.mark.parametrize("ranks", [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 2], [1, 1, 0, 2], [2, 0, 3, 1]])
@pytest.mark.parametrize("name", CASES)
def test_merged_shards_are_those_of_the_merged_parts(name: str, ranks: list[int]) -> None:
    case, of = CASES[name], np.array(ranks, np.int32)
    part = case.part(4)
    for r, found in enumerate(merged(case.graph, part, of)):
        assert_same(found, shard_of(case.graph, of[part], r, int(of.max()) + 1))


@st.composite
def merged_multigraphs(draw: st.DrawFn) -> tuple[Graph, NDArray[np.int32], NDArray[np.int32]]:
    n, parts = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    ends = st.integers(0, n - 1)
    edges = np.array(draw(st.lists(st.tuples(ends, ends), max_size=25)), np.int64).reshape(-1, 2)
    part = np.array(draw(st.lists(st.integers(0, parts - 1), min_size=n, max_size=n)), np.int32)
    size = draw(st.integers(1, parts))
    others = draw(st.lists(st.integers(0, size - 1), min_size=parts - size, max_size=parts - size))
    ranks = np.array(draw(st.permutations([*range(size), *others])), np.int32)
    graph = Graph(name="any", num_nodes=n, src=edges[:, 0], dst=edges[:, 1], x=np.arange(n, dtype=np.float64)[:, None])
    return graph, part, ranks


@settings(max_examples=80, deadline=None)
@given(merged_multigraphs())
def test_any_multigraph_in_any_parts_on_any_ranks(drawn: tuple[Graph, NDArray[np.int32], NDArray[np.int32]]) -> None:
    graph, part, ranks = drawn
    size = int(ranks.max()) + 1
    for r, found in enumerate(merged(graph, part, ranks)):
        assert_same(found, shard_of(graph, ranks[part], r, size))


def test_shards_that_do_not_fit_are_refused() -> None:
    case = CASES["undirected"]
    a, b = (shard_of(case.graph, case.part(2), q, 2) for q in range(2))
    moved = a.halo_index.copy()
    moved[-1] += 1
    with pytest.raises(ValueError, match=r"node \d+ is expected at index \d+ of part 1 \(rank 0\).*build them again"):
        join([dataclasses.replace(a, halo_index=moved), b], np.array([0, 0], np.int32), 0)
    joined = join([a], np.array([0, 1], np.int32), 0)
    with pytest.raises(ValueError, match="node 0 is expected at index 99 of part 0"):
        joined.places(*(np.array([value]) for value in (0, 99, 0)))


# ----------------------------------------------------------------------------------------------------------- on ranks

PARTS = 4
QUICK = TrainConfig(model="gcn", hidden=8, epochs=5, lr=0.05, dtype="float64", seed=3, norm="batch")


CLUSTER = np.arange(60) * 7 % 5


@pytest.fixture(scope="module")
def graph() -> Graph:
    rng = np.random.default_rng(5)
    return rich_graph(60, 400, seed=4, y=rng.integers(0, 4, 60))


@pytest.fixture(scope="module")
def folder(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    part = np.random.default_rng(0).permutation(graph.num_nodes) % PARTS
    out = tmp_path_factory.mktemp("merge") / "shards"
    build(graph, assignment(part, PARTS, CLUSTER), out)
    return out


def load_here(world: World, folders: list[Path]) -> tuple[Shard, tuple[int, ...], tuple[int, ...]] | str:
    try:
        loaded = load_shard(folders[world.rank % len(folders)], world)
    except RankError as error:
        return str(error)
    return loaded.shard, loaded.placement.mine, loaded.placement.ranks


def rows_of(world: World, folder: Path) -> list[list[tuple[int, ...]]]:
    """Rows sent and received by each plan of training."""
    trainer = make_trainer(load_shard(folder, world).shard, QUICK, world)
    plans = [plan for plan, _ in trainer.part.training or ()]
    return [[plan.linear.route.counts.sent, plan.linear.route.counts.received] for plan in plans if plan.linear.route]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fewer_ranks_have_the_shards_and_rows_of_a_direct_partition(
    ranks: RankPool, graph: Graph, folder: Path, tmp_path: Path, size: int
) -> None:
    found = ranks.run(size, load_here, [folder])
    of = np.array(found[0][2], np.int32)
    assert [mine for _, mine, _ in found] == [tuple(np.flatnonzero(of == r).tolist()) for r in range(size)]
    part = np.random.default_rng(0).permutation(graph.num_nodes) % PARTS
    direct = tmp_path / "direct"
    build(graph, assignment(of[part], size, CLUSTER), direct)
    expected = ranks.run(size, load_here, [direct])
    for (shard, *_), (same, *_) in zip(found, expected, strict=True):
        assert_same(shard, same, but=("build_id",))
    assert ranks.run(size, rows_of, folder) == ranks.run(size, rows_of, direct)


def results_on(world: World, folder: Path, run: Path, options: list[TrainConfig]) -> list[Any]:
    out: list[Any] = []
    for i, config in enumerate(options):
        result = train(folder, config, run=run / str(i), world=world)
        out.append([*result.losses, *result.summary["test"].values()])
        out.append(evaluate(folder, run / str(i), world=world).scores["test"]["loss"])
        predict(folder, run / str(i), run / f"{i}.npy", kind="probabilities", world=world)
    return out


def test_any_number_of_ranks_gives_the_same_losses_scores_and_predictions(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    options = [QUICK, dataclasses.replace(QUICK, model="gat", hidden=8, heads=2, input_dropout=0.2, layers=3)]
    found, rows = {}, {}
    for size in (1, 2, 3, 4):
        run = tmp_path / str(size)
        run.mkdir()
        found[size] = ranks.run(size, results_on, folder, run, options)[0]
        rows[size] = [np.load(run / f"{i}.npy") for i in range(len(options))]
        summary = json.loads((run / "0" / "summary.json").read_text())
        assert (summary["parts"], summary["ranks"]) == (PARTS, size)
    for size in (2, 3, 4):
        for a, b in zip(found[size], found[1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)
        for a, b in zip(rows[size], rows[1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)


def test_learned_features_are_those_of_the_nodes(ranks: RankPool, tmp_path: Path) -> None:
    case = CASES["learned features"]
    build(case.graph, assignment(case.part(3), 3), tmp_path / "shards")
    found = []
    for size in (1, 2, 3):
        (tmp_path / str(size)).mkdir()
        found.append(ranks.run(size, results_on, tmp_path / "shards", tmp_path / str(size), [QUICK])[0])
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)


def test_parts_go_to_the_ranks_that_can_read_them(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    """Two hosts: the first holds the last parts."""
    names = [file.path for file in read_manifest(folder).files]
    hosts = []
    for name, held in (("a", names[2:]), ("b", names[:2])):
        hosts.append(shutil.copytree(folder, tmp_path / name))
        for path in set(names) - set(held):
            (hosts[-1] / path).unlink()
    found = ranks.run(2, load_here, hosts)
    assert [mine for _, mine, _ in found] == [(2, 3), (0, 1)]
    found = ranks.run(4, load_here, [hosts[0], hosts[0], hosts[1], hosts[1]])
    assert sorted(mine for _, mine, _ in found) == [(0,), (1,), (2,), (3,)]
    assert {mine[0] for _, mine, _ in found[:2]} == {2, 3}
    assert (found[0][0].parts, found[0][0].part, len(found[0][0].halo_owner)) == (4, 0, found[0][0].num_halo)

    (hosts[1] / names[1]).unlink()
    found = ranks.run(2, load_here, hosts)
    assert len(set(found)) == 1
    assert f"{names[1]}: the manifest lists this file, but it is not there" in found[0]


def test_more_ranks_than_parts_is_one_message(ranks: RankPool, graph: Graph, tmp_path: Path) -> None:
    build(graph, assignment(np.arange(graph.num_nodes) % 2, 2), tmp_path / "two")
    (text,) = set(ranks.run(3, load_here, [tmp_path / "two"]))
    assert "holds 2 parts but 3 ranks were started" in text
    assert "torchrun --nproc-per-node 2" in text
    assert "build again with --parts 3" in text


def test_a_halo_list_that_does_not_fit_another_rank(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(folder, tmp_path / "bad")
    change(bad, 0, put("halo/index", -1, lambda index: index + 1))
    (text,) = set(ranks.run(2, load_here, [bad]))
    assert "load (rank 0): halo/index: parts of rank 0 differ on node" in text
