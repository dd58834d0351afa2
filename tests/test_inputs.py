"""What a graph may bring beside features of nodes: features of edges, features that are learned, odd weights; and
training on the training nodes alone."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import torch
import tyro
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullgraph import gather, models
from fullgraph.__main__ import Train
from fullgraph.config import TrainConfig
from fullgraph.dropout import MaskKey, uniform
from fullgraph.hdf5 import FormatError
from fullgraph.induced import induced_shard
from fullgraph.inference import evaluate, load_trained, predict
from fullgraph.learned import initial_table
from fullgraph.loading import load_shard
from fullgraph.loop import train
from fullgraph.shards import Shard, part_name, read_manifest, read_shard
from fullgraph.trainer import make_trainer
from fullgraph.view import LayerView, Pass, make_part
from fullgraph.world import RankError, World
from partition_tools.builder import build
from partition_tools.graph import Graph, Splits
from partition_tools.sources import load, save_npz
from partition_tools.summary import render, summarise
from partition_tools.verify import verify
from tests.builds import assignment, two_triangles
from tests.graphs import CASES, random_graph, shard_of
from tests.ranks import RankPool
from tests.test_shards import assert_same

HALVES = np.array([0, 0, 0, 1, 1, 1], np.int32)
EDGES, LEARNED = CASES["edge features"], CASES["learned features"]


def build_in(folder: Path, graph: Graph, parts: int, part: NDArray[np.int32] | None = None) -> Path:
    part = np.arange(graph.num_nodes, dtype=np.int32) % parts if part is None else part
    build(graph, assignment(part, parts), folder)
    return folder


def in_one(graph: Graph) -> Shard:
    return shard_of(graph, np.zeros(graph.num_nodes, np.int32), 0, 1)


def options(**fields: Any) -> TrainConfig:
    return TrainConfig(**{"hidden": 8, "heads": 2, "epochs": 3, "dtype": "float64", "layer0": "auto"} | fields)


def said(world: World, folder: Path, run: Path, config: TrainConfig) -> list[str]:
    """The lines that a run prints before its first epoch."""
    console = Console(file=io.StringIO(), width=1000)
    train(folder, config, run=run, world=world, console=console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return lines[
        : next(
            i
            for i, line in enumerate(lines)
            if line.startswith(("epoch ", "best epoch", "last epoch", "initial weights"))
        )
    ]


# ---------------------------------------------------------------------------------------------------- edge features


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float64"])
def test_edge_features_keep_their_dtype(dtype: str, tmp_path: Path) -> None:
    edge_x = (np.arange(28).reshape(14, 2) % 3).astype(dtype)
    build_in(tmp_path / "s", two_triangles(edge_x=edge_x), 2, HALVES)
    stored = np.uint8 if dtype == "bool" else np.dtype(dtype)
    for q in range(2):
        shard = read_shard(tmp_path / "s", q)
        assert shard.edge_x is not None
        assert shard.edge_x.dtype == stored
        np.testing.assert_array_equal(shard.edge_x, edge_x[shard.edge_global])
        assert read_shard(tmp_path / "s", q, features=False).edge_x is None
    facts = read_manifest(tmp_path / "s").graph
    assert (facts["num_edge_features"], facts["edge_feature_dtype"]) == (2, np.dtype(stored).name)
    assert verify(tmp_path / "s") == []
    assert "edge features     2 " in render(summarise(two_triangles(edge_x=edge_x)))


def test_builds_without_edge_features_say_so(tmp_path: Path) -> None:
    build_in(tmp_path / "s", two_triangles(), 2, HALVES)
    facts = read_manifest(tmp_path / "s").graph
    assert (facts["num_edge_features"], facts["edge_feature_dtype"], facts["learned_features"]) == (0, None, 0)
    with h5py.File(tmp_path / "s" / part_name(0, 2)) as file:
        assert "x" not in file["edges"]
        assert "learned_features" not in file.attrs


def test_edge_features_that_no_shard_can_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="edge_x is complex128; expected a real number"):
        build_in(tmp_path / "s", two_triangles(edge_x=np.zeros((14, 1), complex)), 2)
    shard = in_one(EDGES.graph)
    with pytest.raises(FormatError, match=r"edges/x: shape \[3, 2\]; expected \[\d+, K\]"):
        dataclasses.replace(shard, edge_x=np.zeros((3, 2)))
    with pytest.raises(FormatError, match="edges/x: dtype complex128; expected a real number"):
        dataclasses.replace(shard, edge_x=np.zeros((shard.num_edges, 2), complex))


def edges_seen(world: World, graph: Graph, part: NDArray[np.int32]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(source, destination, features) by global ids of every edge that a layer sees: of all, and of pruned ones."""
    data = make_part(shard_of(graph, part, world.rank, world.size), world, dtype=torch.float64, num_layers=2)
    out = []
    for training in (False, True):
        for view in data.views(Pass(training=training)):
            ids = view.with_halo(view.ids.to(torch.float64)[:, None])[:, 0].to(torch.int64)
            source, target = view.edge_index
            assert view.edge_x is not None
            np.testing.assert_array_equal(ids[source], graph.src[view.edge_ids])
            np.testing.assert_array_equal(ids[target], graph.dst[view.edge_ids])
            np.testing.assert_array_equal(view.edge_x, graph.edge_x[view.edge_ids].astype(np.float64))  # type: ignore[index]
            out.append((source, target, view.edge_ids))
    return out


@pytest.mark.parametrize("parts", [1, 3])
def test_a_view_has_the_features_of_its_edges(ranks: RankPool, parts: int) -> None:
    graph = dataclasses.replace(EDGES.graph, splits=few(EDGES.graph, 3))
    seen = ranks.run(parts, edges_seen, graph, EDGES.part(parts))
    counts = np.sum([[len(ids) for *_, ids in rank] for rank in seen], axis=0)
    assert counts[0] == counts[1] == graph.num_edges
    assert counts[3] < counts[2] < graph.num_edges  # fewer where a training node can feel them


def few(graph: Graph, count: int) -> Splits:
    assert graph.splits is not None
    mask = np.zeros_like(graph.splits.train)
    mask[:, :count] = True
    return Splits(train=mask, val=~mask, test=~mask)


def test_a_graph_without_edge_features_has_none_to_see() -> None:
    view = make_part(in_one(CASES["loops"].graph), World()).views(Pass(training=False))[0]
    assert view.edge_x is None
    with pytest.raises(ValueError, match="the graph has no edge features"):
        models.GATConv(10, 4, edge_dim=3)(torch.zeros(view.n_in, 10), view)


class Largest(TorchDispatchMode):
    """Notes the most values an edge that any tensor of ``edges`` rows or more has."""

    def __init__(self, edges: int) -> None:
        super().__init__()
        self.edges, self.width = edges, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.ndim >= 2 and self.edges in t.shape:
                self.width = max(self.width, t.numel() // self.edges)
        return out


def test_attention_forms_no_row_of_the_layers_width_for_an_edge() -> None:
    graph = random_graph("many", nodes=40, edges=700, features=6)
    graph = dataclasses.replace(graph, edge_x=np.ones((700, 5)))
    view = make_part(in_one(graph), World()).views(Pass(training=True))[0]
    layer, x = models.GATConv(6, 32, 2, edge_dim=5, dropout=0.5), torch.ones(40, 6)
    edges = view.plan.halo.one_loop[0].nnz
    with Largest(edges) as largest:
        layer(x, view).sum().backward()
    assert layer.lin_edge is not None
    assert layer.lin_edge.grad is not None
    assert 2 <= largest.width <= 5  # heads, and the features themselves


def gat_heads(world: World, folder: Path, run: Path) -> tuple[list[list[str]], list[int], bool]:
    heads, sizes = [], []
    for i, extra in enumerate(({"model": "gat"}, {"model": "gat", "edge_features": False}, {"model": "sage"})):
        config = options(epochs=1, **extra)
        heads.append(said(world, folder, run / str(i), config))
        trained = load_trained(run / str(i), folder, world)
        sizes.append(sum(p.numel() for p in trained.model.parameters()))
    predict(folder, run / "0", run / "out.npy", world=world)
    return heads, sizes, (run / "out.npy").exists() or world.rank > 0


def test_a_run_says_whether_it_uses_edge_features(ranks: RankPool, tmp_path: Path) -> None:
    folder = build_in(tmp_path / "s", EDGES.graph, 2)
    (heads, sizes, wrote), _ = ranks.run(2, gat_heads, folder, tmp_path)
    assert "edge features: 3 an edge, used by attention" in heads[0]
    assert "edge features: 3 an edge, not used (--no-edge-features)" in heads[1]
    assert "edge features: 3 an edge, not used by sage" in heads[2]
    assert sizes[0] - sizes[1] == (8 * 3 + 8) + (4 * 3 + 4)  # lin_edge and att_edge of two layers
    assert wrote


def test_edge_features_are_on_unless_asked() -> None:
    for arguments, expected in (([], True), (["--no-edge-features"], False), (["--edge-features"], True)):
        assert tyro.cli(Train, args=["DIR", *arguments]).config.edge_features == expected


def test_a_model_is_not_applied_to_other_edge_features(tmp_path: Path) -> None:
    folder = build_in(tmp_path / "s", EDGES.graph, 1)
    train(folder, options(model="gat", epochs=1), run=tmp_path / "run", console=Console(quiet=True))
    for edge_x, held in ((None, "none"), (np.zeros((EDGES.graph.num_edges, 2)), "2")):
        other = build_in(tmp_path / held, dataclasses.replace(EDGES.graph, edge_x=edge_x), 1)
        with pytest.raises(RankError, match=rf"takes 3 edge features, but .* holds {held}; predict on a graph"):
            predict(other, tmp_path / "run", tmp_path / "out.npy")


class GatedConv(nn.Module):
    """A layer of a user's own whose messages pass a gate that the edge opens."""

    def __init__(self, d_in: int, d_out: int, edge_dim: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(d_in, d_out), nn.Linear(edge_dim, d_out)

    def forward(self, x: Tensor, view: LayerView) -> Tensor:
        source, target = view.edge_index
        assert view.edge_x is not None
        messages = torch.sigmoid(self.gate(view.edge_x)) * self.value(view.with_halo(x))[source]
        return self.value(view.own(x)).index_add(0, target, messages)


class Gated(nn.Module):
    num_layers = 2

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = GatedConv(features, 6, 3), GatedConv(6, outputs, 3)

    def forward(self, x: Tensor, views: list[LayerView]) -> Tensor:
        return self.second(torch.tanh(self.first(x, views[0])), views[1])  # type: ignore[no-any-return]


def losses_of_own(world: World, folder: Path) -> list[float]:
    shard = load_shard(folder, world).shard
    trainer = make_trainer(shard, options(), world, Gated)
    return [trainer.step(step)[0]["loss"] for step in range(4)]


def test_a_layer_of_ones_own_with_edge_features_is_exact(ranks: RankPool, tmp_path: Path) -> None:
    found = {
        parts: ranks.run(parts, losses_of_own, build_in(tmp_path / str(parts), EDGES.graph, parts))[0]
        for parts in (1, 3)
    }
    assert found[3] == pytest.approx(found[1], rel=1e-12)
    assert found[1][3] < found[1][0]


# ------------------------------------------------------------------------------------------------- learned features


def test_first_rows_are_a_hash_of_seed_node_and_column() -> None:
    ids = torch.arange(4000)
    table = initial_table(ids, 7, 3, torch.float64)
    some = torch.tensor([3999, 5, 17])
    assert torch.equal(initial_table(some, 7, 3, torch.float64), table[some])
    assert torch.equal(initial_table(some, 4, 3, torch.float64), table[some, :4])
    assert not torch.equal(initial_table(some, 7, 4, torch.float64), table[some])
    assert table.requires_grad
    assert table.is_leaf
    values = table.detach()
    assert float(values.mean()) == pytest.approx(0, abs=0.02)
    assert float(values.var()) == pytest.approx(1, abs=0.02)
    assert float(values.abs().max()) <= 3**0.5
    assert values.unique().numel() == values.numel()
    # Neither columns nor rows go together.
    assert float((torch.corrcoef(values.T) - torch.eye(7)).abs().max()) < 0.06
    assert float((values[1:] * values[:-1]).mean()) == pytest.approx(0, abs=0.02)
    assert initial_table(ids[:0], 7, 3, torch.float32).shape == (0, 7)


def test_uniform_numbers_do_not_hang_on_the_block_they_are_made_in(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = uniform(torch.arange(50), 6, MaskKey(1, 2, 3))
    monkeypatch.setattr("fullgraph.dropout._BLOCK", 20)
    assert torch.equal(uniform(torch.arange(50), 6, MaskKey(1, 2, 3)), whole)
    assert bool(((whole >= 0) & (whole < 1)).all())


def test_learned_features_are_in_shard_manifest_and_summary(tmp_path: Path) -> None:
    folder = build_in(tmp_path / "s", LEARNED.graph, 3)
    shard = read_shard(folder, 1)
    assert (shard.learned_features, shard.num_features, shard.x) == (5, 5, None)
    assert read_manifest(folder).graph["learned_features"] == 5
    assert verify(folder) == []
    assert "features          5 that training learns, a row a node" in render(summarise(LEARNED.graph))
    with pytest.raises(FormatError, match="learned_features is 5; expected 0, or more where there are no features/x"):
        dataclasses.replace(shard, x=np.zeros((shard.num_owned, 2)))
    with pytest.raises(FormatError, match="learned_features is -1; expected 0"):
        dataclasses.replace(shard, learned_features=-1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inductive": True}, "--inductive: the 5 features of graph learned features are learned"),
        ({"feature_norm": "row"}, "--feature-norm row: the 5 features .* leave the option out"),
        ({"layer0": "once"}, "--layer0 once: the 5 features .* change in every step"),
        ({"layer0": "keep"}, "--layer0 keep: the 5 features"),
    ],
)
def test_options_that_learned_features_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError, match=message):
        make_trainer(in_one(LEARNED.graph), options(**fields), World())


def test_a_graph_without_features_is_refused_with_what_to_do() -> None:
    bare = dataclasses.replace(in_one(LEARNED.graph), learned_features=0)
    for make in (lambda: make_trainer(bare, options(), World()), lambda: make_part(bare, World())):
        with pytest.raises(RankError, match="no node features; build it again with some: --features FILE, degree, one"):
            make()


def look_into(world: World, folder: Path) -> dict[str, Any]:
    shard = load_shard(folder, world).shard
    trainer = make_trainer(shard, options(model="gcn", layers=2), world)
    assert trainer.table is not None
    assert trainer.part.training is not None
    trainer.gradients(0)
    assert trainer.table.grad is not None
    plan = trainer.part.training[0][0]
    felt = trainer.table.grad.abs().sum(1) > 0
    return {
        "ids": trainer.part.whole.owned_global,
        "rows": trainer.table.detach(),
        "n_in": plan.n_in,
        "felt": int(felt.sum()),
        "beyond": bool(felt[plan.n_in :].any()),
        "mode": trainer.part.input.mode,
        "ledger": trainer.predicted_ledger(),
        "sent": dict(world.meter.ledger),
    }


def test_a_rank_holds_the_rows_of_its_own_nodes_and_sends_what_is_predicted(ranks: RankPool, tmp_path: Path) -> None:
    folder = build_in(tmp_path / "s", LEARNED.graph, 3)
    found = ranks.run(3, look_into, folder)
    for rank in found:
        assert torch.equal(rank["rows"], initial_table(rank["ids"], 5, 1, torch.float64))
        assert 0 < rank["felt"] <= rank["n_in"]
        assert not rank["beyond"]
        assert rank["mode"] == "exchange"
        steps = {tag: counts for tag, counts in rank["sent"].items() if tag[1] in ("forward", "backward")}
        assert rank["ledger"] == steps
        assert (0, "backward") in steps
    assert sum(rank["n_in"] for rank in found) < LEARNED.graph.num_nodes  # pruned: some rows nobody can feel
    assert sorted(torch.cat([rank["ids"] for rank in found]).tolist()) == list(range(LEARNED.graph.num_nodes))


def train_and_apply(world: World, folder: Path, run: Path) -> tuple[list[str], Any, Any]:
    head = said(world, folder, run, options(model="gcn", epochs=4, clip=0.5))
    return head, *apply(world, folder, run)


def apply(world: World, folder: Path, run: Path) -> tuple[Any, Any]:
    out = run.parent / f"of-{world.size}.npy"
    predict(folder, run, out, kind="probabilities", world=world)
    return np.load(out) if world.rank == 0 else None, evaluate(folder, run, world=world).scores


def test_learned_features_are_saved_whole_and_serve_any_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    folders = {parts: build_in(tmp_path / f"s{parts}", LEARNED.graph, parts) for parts in (1, 2, 3)}
    run = tmp_path / "run"
    ranks.run(3, train_and_apply, folders[3], run)
    head, probabilities, scores = ranks.run(3, train_and_apply, folders[3], tmp_path / "again")[0]
    n = LEARNED.graph.num_nodes
    assert any(f" parameters and a learned table of {n} x 5, single-label" in line for line in head)

    one = tmp_path / "one"
    head, alone, alone_scores = ranks.run(1, train_and_apply, folders[1], one)[0]
    states = {name: torch.load(tmp_path / name / "best.pt", weights_only=True) for name in ("run", "one")}
    assert states["run"]["features"].shape == (n, 5)
    torch.testing.assert_close(states["run"]["features"], states["one"]["features"], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(probabilities, alone, rtol=1e-9)
    for parts in (1, 2):
        again, scores_again = ranks.run(parts, apply, folders[parts], run)[0]
        np.testing.assert_allclose(again, probabilities, rtol=1e-9)
        assert scores_again["test"] == pytest.approx(scores["test"])
    assert alone_scores["test"] == pytest.approx(scores["test"])

    last = torch.load(run / "last.pt", weights_only=True)
    kept = last["optimizer"]["state"][len(last["model"])]
    assert kept["exp_avg"].shape == kept["exp_avg_sq"].shape == last["features"].shape == (n, 5)
    lone = torch.load(one / "last.pt", weights_only=True)
    torch.testing.assert_close(
        kept["exp_avg"], lone["optimizer"]["state"][len(last["model"])]["exp_avg"], rtol=1e-8, atol=1e-12
    )


def gather_small(world: World, n: int, block_bytes: int) -> Any:
    owner = np.random.default_rng(0).integers(0, max(world.size - 1, 1), n)  # the last of several ranks has nothing
    ids = torch.from_numpy(np.random.default_rng(1).permutation(np.flatnonzero(owner == world.rank)))
    before, gather._BLOCK_BYTES = gather._BLOCK_BYTES, block_bytes
    try:
        return gather.gather_in_order(torch.stack([ids, -ids], 1).to(torch.float32), ids, n, world)
    finally:
        gather._BLOCK_BYTES = before


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("block_bytes", [1, 56, 1 << 20])
def test_rows_reach_rank_0_in_blocks_and_in_order(ranks: RankPool, parts: int, block_bytes: int) -> None:
    first, *others = ranks.run(parts, gather_small, 40, block_bytes)
    assert torch.equal(first, torch.stack([torch.arange(40), -torch.arange(40)], 1).to(torch.float32))
    assert others == [None] * (parts - 1)


def test_learned_features_fit_no_other_graph(tmp_path: Path) -> None:
    graph = LEARNED.graph
    folder, run = build_in(tmp_path / "s", graph, 1), tmp_path / "run"
    train(folder, options(epochs=1), run=run, console=Console(quiet=True))
    other = dataclasses.replace(graph, src=np.roll(graph.src, 1))
    with pytest.raises(RankError, match=r"learned a row of features for each node of the graph .* is another graph"):
        predict(build_in(tmp_path / "other", other, 1), run, tmp_path / "out.npy")
    given = dataclasses.replace(graph, x=np.zeros((graph.num_nodes, 5)), learned_features=0)
    with pytest.raises(RankError, match=r"takes 5 learned features, but .* holds 5; predict on a graph with the"):
        evaluate(build_in(tmp_path / "given", given, 1), run)
    state = torch.load(run / "best.pt", weights_only=True)
    for features in (None, state["features"][1:]):
        torch.save(state | {"features": features}, run / "best.pt")
        with pytest.raises(RankError, match=r"best.pt: features is .*; expected the learned features \[48, 5\]"):
            predict(folder, run, tmp_path / "out.npy")


# -------------------------------------------------------------------------------------------------------- inductive


def induce(graph: Graph, mask: NDArray[np.bool_]) -> Graph:
    """The subgraph of the nodes in ``mask`` [N], renumbered."""
    place, inside = np.cumsum(mask) - 1, mask[graph.src] & mask[graph.dst]
    splits = graph.splits
    assert splits is not None
    return dataclasses.replace(
        graph,
        num_nodes=int(mask.sum()),
        src=place[graph.src[inside]],
        dst=place[graph.dst[inside]],
        x=None if graph.x is None else graph.x[mask],
        y=None if graph.y is None else graph.y[mask],
        splits=Splits(train=splits.train[:, mask], val=splits.val[:, mask], test=splits.test[:, mask]),
        edge_weight=None if graph.edge_weight is None else graph.edge_weight[inside],
        edge_x=None if graph.edge_x is None else graph.edge_x[inside],
    )


def cut_out(world: World, graph: Graph, part: NDArray[np.int32], mask: NDArray[np.bool_]) -> Shard:
    shard = shard_of(graph, part, world.rank, world.size)
    return induced_shard(shard, mask[shard.owned_global], world)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(
    "name", ["directed", "weighted", "loops", "isolated", "empty part", "no halo", "one way", "sparse", "edge features"]
)
def test_the_subgraphs_shards_are_those_that_are_built_of_it(ranks: RankPool, name: str, parts: int) -> None:
    graph, part = CASES[name].graph, CASES[name].part(parts)
    assert graph.splits is not None
    for mask in (graph.splits.train[0], np.zeros(graph.num_nodes, np.bool_), np.ones(graph.num_nodes, np.bool_)):
        nodes, edges = np.flatnonzero(mask), np.flatnonzero(mask[graph.src] & mask[graph.dst])
        found = ranks.run(parts, cut_out, graph, part, mask)
        if not nodes.size:
            assert all(shard.num_owned == shard.num_edges == shard.num_halo == 0 for shard in found)
            continue
        sub = induce(graph, mask)
        for q, shard in enumerate(found):
            by_hand = shard_of(sub, part[mask], q, parts)
            numbered = dataclasses.replace(
                by_hand,
                num_nodes_global=graph.num_nodes,
                num_edges_global=graph.num_edges,
                num_classes=shard.num_classes,
                owned_global=nodes[by_hand.owned_global],
                halo_global=nodes[by_hand.halo_global],
                edge_global=edges[by_hand.edge_global],
            )
            assert_same(shard, numbered)


def inductive_losses(world: World, folder: Path, configs: list[TrainConfig]) -> list[list[float]]:
    out = []
    for config in configs:
        shard = load_shard(folder, world).shard
        trainer = make_trainer(shard, config, world)
        out.append([trainer.step(step)[0]["loss"] for step in range(4)])
        assert trainer.whole.num_nodes_global == shard.num_nodes_global
        if config.inductive:
            assert trainer.part.num_nodes_global == world.gather_vector([shard.train[0].sum()]).sum()
    return out


def test_losses_are_those_of_the_subgraph_that_was_built_offline(ranks: RankPool, tmp_path: Path) -> None:
    """Without dropout, whose masks hang on the ids of the whole graph."""
    graph = CASES["loops"].graph
    assert graph.splits is not None
    config = options(dropout=0.0, norm="batch", lr=0.05)
    configs = [dataclasses.replace(config, model=model) for model in ("gcn", "gat")]
    sub = build_in(tmp_path / "sub", induce(graph, graph.splits.train[0]), 1)
    expected = inductive_losses(World(), sub, configs)
    inductive = [dataclasses.replace(c, inductive=True) for c in configs]
    for parts in (1, 3):
        folder = build_in(tmp_path / str(parts), graph, parts)
        for found, wanted in zip(ranks.run(parts, inductive_losses, folder, inductive)[0], expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-11)
    others = inductive_losses(World(), tmp_path / "1", configs)  # on the whole graph
    assert all(abs(other[0] - wanted[0]) > 1e-3 for other, wanted in zip(others, expected, strict=True))


def test_an_inductive_run_says_what_it_does_and_scores_the_whole_graph(ranks: RankPool, tmp_path: Path) -> None:
    graph = CASES["undirected"].graph
    assert graph.splits is not None
    mask = graph.splits.train[0]
    folder = build_in(tmp_path / "s", graph, 2)
    heads = ranks.run(2, said, folder, tmp_path / "run", options(inductive=True))[0]
    inside = int((mask[graph.src] & mask[graph.dst]).sum())
    assert (
        f"inductive: trains on the {int(mask.sum())} training nodes and the {inside} edges between them, evaluates on "
        f"the whole graph"
    ) in heads
    assert any("nodes computed by layer 100%, 100%" in line for line in heads)
    scores = ranks.run(2, scores_of, folder, tmp_path / "run")[0]
    assert set(scores) == {"train", "val", "test"}


def scores_of(world: World, folder: Path, run: Path) -> Any:
    return evaluate(folder, run, world=world).scores


def test_a_split_without_training_nodes_is_an_error() -> None:
    graph = dataclasses.replace(CASES["undirected"].graph, splits=few(CASES["undirected"].graph, 0))
    with pytest.raises(RankError, match="split 0 has no training nodes"):
        make_trainer(in_one(graph), options(inductive=True), World())


# ----------------------------------------------------------------------------------------------------- odd weights


def odd_weights() -> Graph:
    """Four nodes. 1: weights 0 and 0. 2: 1 and -1, which cancel. 3: -2 and 0.5. 0: a loop of -3, and 1."""
    ends = np.array([[0, 1], [2, 1], [0, 2], [1, 2], [1, 3], [2, 3], [0, 0], [3, 0]])
    weight = np.array([0.0, 0.0, 1.0, -1.0, -2.0, 0.5, -3.0, 1.0])
    x = np.random.default_rng(5).standard_normal((4, 3))
    masks = np.ones((1, 4), np.bool_)
    return Graph(
        name="odd",
        num_nodes=4,
        src=ends[:, 0].copy(),
        dst=ends[:, 1].copy(),
        edge_weight=weight,
        x=x,
        y=np.array([0, 1, 0, 1]),
        splits=Splits(train=masks, val=masks, test=masks),
    )


def rows_by_hand(norm: str, graph: Graph) -> NDArray[np.float64]:
    assert graph.edge_weight is not None
    out = np.zeros((4, 3))
    loops = {int(u) for u, v in zip(graph.src, graph.dst, strict=True) if u == v}
    edges = list(zip(graph.src.tolist(), graph.dst.tolist(), graph.edge_weight.tolist(), strict=True))
    edges += [(v, v, 1.0) for v in range(4) if v not in loops] if norm == "gcn" else []
    total = [sum(w for _, v, w in edges if v == node) for node in range(4)]
    x = np.asarray(graph.x)
    for u, v, w in edges:
        if norm == "sum":
            out[v] += w * x[u]
        elif norm == "mean" and total[v] != 0:
            out[v] += w * x[u] / total[v]
        elif norm == "gcn" and total[u] > 0 and total[v] > 0:
            out[v] += w * x[u] / (total[u] * total[v]) ** 0.5
    return out


def propagate_odd(world: World, norm: Any, part: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
    graph = odd_weights()
    data = make_part(shard_of(graph, part, world.rank, world.size), world, dtype=torch.float64)
    view = data.views(Pass(training=False))[0]
    x = torch.as_tensor(graph.x)[view.ids].requires_grad_()
    y = view.propagate(x, norm)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert bool(grad.isfinite().all())
    return view.ids, y.detach()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("norm", ["sum", "mean", "gcn"])
def test_weights_of_zero_and_below_have_a_defined_result(ranks: RankPool, norm: str, parts: int) -> None:
    expected = rows_by_hand(norm, odd_weights())
    part = np.arange(4, dtype=np.int32) % parts
    for ids, rows in ranks.run(parts, propagate_odd, norm, part):
        np.testing.assert_allclose(rows, expected[ids], rtol=1e-12, atol=1e-15)
    zero_rows = {"sum": [1], "mean": [1, 2], "gcn": [0, 3]}[norm]
    assert np.flatnonzero(~expected.any(axis=1)).tolist() == zero_rows


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
def test_training_on_odd_weights_stays_finite(model: Any) -> None:
    trainer = make_trainer(in_one(odd_weights()), options(model=model), World())
    losses = [trainer.step(step)[0]["loss"] for step in range(5)]
    assert np.isfinite(losses).all()
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


def test_attention_does_not_look_at_weights() -> None:
    graph, layer = odd_weights(), models.GATConv(3, 4)
    rows = [
        layer(torch.as_tensor(g.x).float(), make_part(in_one(g), World()).views(Pass(training=False))[0])
        for g in (graph, dataclasses.replace(graph, edge_weight=None))
    ]
    assert torch.equal(rows[0], rows[1])


def test_the_summary_counts_odd_weights(tmp_path: Path) -> None:
    text = render(summarise(odd_weights()))
    assert (
        "edge weights      yes, 2 of them 0, 3 negative; into 2 nodes they sum to 0, into 2 to less (gcn and sage"
    ) in text
    assert "edge weights      yes\n" in render(summarise(random_graph("plain", weighted=True)))
    build_in(tmp_path / "s", odd_weights(), 2)
    assert read_manifest(tmp_path / "s").graph["weights"] == {
        "zero": 2,
        "negative": 3,
        "zero_sums": 2,
        "negative_sums": 2,
    }


def warnings_of(world: World, folder: Path, run: Path) -> dict[str, list[str]]:
    return {
        model: [line for line in said(world, folder, run / model, options(model=model, epochs=0)) if "weight" in line]
        for model in ("gcn", "sage", "gin", "gat")
    }


def test_negative_weights_are_said_where_a_layer_divides_by_their_sum(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, warnings_of, build_in(tmp_path / "odd", odd_weights(), 2), tmp_path)[0]
    assert found == {
        "gcn": [
            "warning: 3 edge weights are negative; gcn leaves out the messages from and to the 2 nodes whose "
            "in-weights, with the added loop, sum to 0 or less"
        ],
        "sage": [
            "warning: 3 edge weights are negative; sage divides by the sum of a node's in-weights, which is 0 at 2 "
            "nodes (their mean is 0) and negative at 2"
        ],
        "gin": [
            "warning: 3 edge weights are negative; gin sums the rows times their weights, so those of negative ones "
            "are subtracted"
        ],
        "gat": [
            unused := "edge weights: not used by gat, whose attention weighs edges itself; partition-tools build "
            "--weights-as-features lets it see them"
        ],
    }
    positive = build_in(tmp_path / "plain", CASES["loops"].graph, 2)
    found = ranks.run(2, warnings_of, positive, tmp_path / "other")[0]
    assert found == {"gcn": [], "sage": [], "gin": [], "gat": [unused]}


def test_weights_of_zero_are_said(tmp_path: Path) -> None:
    graph = random_graph("plain", weighted=True)
    assert graph.edge_weight is not None
    weight = graph.edge_weight.copy()
    weight[:3] = 0
    weight[graph.dst == 5] = 0
    zeros, alone = int((weight == 0).sum()), int((graph.dst == 5).any())
    folder = build_in(tmp_path / "zero", dataclasses.replace(graph, edge_weight=weight), 1)
    found = warnings_of(World(), folder, tmp_path)
    nothing = [f"edge weights: {zeros} edge weights are 0, so those edges bring nothing"]
    assert alone == 1
    assert found["gcn"] == found["gin"] == nothing
    assert found["sage"][0].startswith(f"warning: {zeros} edge weights are 0; sage divides by the sum")


def test_attention_sees_weights_that_are_features(tmp_path: Path) -> None:
    graph = dataclasses.replace(odd_weights(), edge_x=None)
    save_npz(tmp_path / "g.npz", graph)
    seen = load(tmp_path / "g.npz", weights_as_features=True)
    assert seen.edge_x is not None
    np.testing.assert_array_equal(seen.edge_x[:, 0], graph.edge_weight)
    assert "edge weights were added as column 0 of the edge features" in seen.changes[-1]
    folder = build_in(tmp_path / "s", seen, 1)
    losses = {
        use: train(folder, options(model="gat", epochs=3, edge_features=use), run=tmp_path / f"run-{use}").losses
        for use in (True, False)
    }
    assert losses[True] != losses[False]
    with pytest.raises(ValueError, match="--weights-as-features: the graph has no edge weights"):
        load("demo:communities?nodes=160", weights_as_features=True)


@pytest.mark.parametrize("fields", [{"x": 1e39}, {"edge_weight": 1e300}, {"edge_x": -1e200}, {"weights sum": 3e38}])
def test_numbers_beyond_float32_ask_for_float64(tmp_path: Path, fields: dict[str, float]) -> None:
    graph = random_graph("large", nodes=20, edges=60, weighted=True)
    graph = dataclasses.replace(graph, edge_x=np.ones((60, 2), np.float32))
    ((field, value),) = fields.items()
    field, everywhere = ("edge_weight", True) if field == "weights sum" else (field, False)
    values = np.asarray(getattr(graph, field), np.float64).copy()
    values[() if everywhere else 3] = value
    folder = build_in(tmp_path / "s", dataclasses.replace(graph, **{field: values}), 1)
    model = "gat" if field == "edge_x" else "gcn"
    with pytest.raises(RankError, match=r"float32 ends at 3.4e\+38: --dtype float64 holds them"):
        train(folder, options(model=model, epochs=1, dtype="float32"), run=tmp_path / "run")
    train(folder, options(model=model, epochs=0), run=tmp_path / "run64")


# ---------------------------------------------------------------------------------------------- what a run says of it


def test_what_a_run_takes_in_another_way_than_given_is_said(tmp_path: Path) -> None:
    graph = random_graph("wide", nodes=20, edges=40)
    assert graph.splits is not None
    heads = {}
    for name, fields, extra in (
        ("narrowed", {}, {"dtype": "float32"}),
        ("kept", {}, {}),
        ("narrow", {"x": np.ones((20, 2), np.float32)}, {"dtype": "float32"}),
        ("split 1", {}, {"split": 1}),
        ("no validation", {"splits": dataclasses.replace(graph.splits, val=np.zeros((2, 20), np.bool_))}, {}),
    ):
        build_in(tmp_path / name, dataclasses.replace(graph, **fields), 1)
        heads[name] = "\n".join(said(World(), tmp_path / name, tmp_path / f"run {name}", options(epochs=1, **extra)))
    note = "features are float64 in the shards and computed with as float32 (--dtype float64 keeps them)"
    assert [name for name, head in heads.items() if note in head] == ["narrowed"]
    assert "split 0 of 2 (--split)" in heads["kept"]
    assert "split 1 of 2 (--split)" in heads["split 1"]
    assert "no validation nodes, so the last epoch counts as the best" in heads["no validation"]


@pytest.mark.parametrize(
    ("epochs", "val", "line"),
    [
        (0, True, "initial weights, no epoch was trained: val "),
        (1, True, "best epoch 1 of 1: val "),
        (2, False, "last epoch 2, without validation nodes to choose another: test "),
    ],
)
def test_the_last_lines_say_whose_weights_are_kept(tmp_path: Path, epochs: int, val: bool, line: str) -> None:
    graph = random_graph("any", nodes=20, edges=40)
    assert graph.splits is not None
    if not val:
        empty = np.zeros((2, 20), np.bool_)
        graph = dataclasses.replace(graph, splits=dataclasses.replace(graph.splits, val=empty))
    console = Console(file=io.StringIO(), width=1000)
    train(build_in(tmp_path / "s", graph, 1), options(epochs=epochs), run=tmp_path / "run", console=console)
    assert isinstance(console.file, io.StringIO)
    assert line in console.file.getvalue()


def test_weights_that_no_memory_holds_are_refused_before_they_are_made(tmp_path: Path) -> None:
    graph = random_graph("wide", nodes=20, edges=40)
    wide = sp.csr_array((np.ones(20, np.float32), np.arange(20), np.arange(21)), shape=(20, 10**9))
    folder = build_in(tmp_path / "s", dataclasses.replace(graph, x=wide), 1)
    with pytest.raises(RankError, match=r"a gcn of 1,000,000,000 features, 4 outputs and --hidden 8 takes 23.* GiB"):
        train(folder, options(model="gcn"), run=tmp_path / "run")
    learned = dataclasses.replace(graph, x=None, learned_features=10**9)
    folder = build_in(tmp_path / "learned", learned, 1)
    with pytest.raises(RankError, match=r"for its weights and its table, gradients and optimiser state"):
        train(folder, options(model="gcn"), run=tmp_path / "run")
