"""Our layers and the oracle's compute what PyG's layers of the same name compute with the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fullgraph import models
from fullgraph.view import Pass, make_part
from fullgraph.world import World
from partition_tools.graph import Graph
from tests import reference
from tests.graphs import random_graph, shard_of

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed (extra pyg)")

Layers = tuple[nn.Module, nn.Module, nn.Module]
"""(PyG's, ours, the oracle's)"""
WIDTH, OUT = 10, 6
TOLERANCE = 1e-5


def single_loops(weighted: bool) -> Graph:
    """Directed, with duplicates, isolated nodes, and one loop on some nodes: of several, PyG's GCN keeps one."""
    graph = random_graph("single loops", edges=120, weighted=weighted, isolated=6, features=WIDTH, seed=21)
    nodes = np.arange(0, 30, 3)
    src, dst = (np.concatenate([ends, ends[:25], nodes]) for ends in (graph.src, graph.dst))
    weight = np.random.default_rng(21).uniform(0.1, 2.0, src.shape[0]) if weighted else None
    return dataclasses.replace(graph, src=src, dst=dst, edge_weight=weight)


def several_loops() -> Graph:
    return random_graph("several loops", loops=60, isolated=6, features=WIDTH, seed=22)


def compare(graph: Graph, layers: Layers, weights: dict[str, str | Callable[[nn.Module], Tensor]]) -> None:
    """Outputs and all gradients agree; ``weights`` names PyG's parameter for each of ours."""
    theirs, ours, oracle = layers
    named = dict(theirs.named_parameters())
    assert sorted(weights.values()) == sorted(named), "a parameter of PyG's layer has no counterpart"
    copied = {mine: named[their] for mine, their in weights.items()}
    for layer in (ours, oracle):
        with torch.no_grad():
            own = dict(layer.named_parameters())
            assert own.keys() == copied.keys()
            for name, parameter in own.items():
                parameter.copy_(copied[name].view_as(parameter))

    part = make_part(shard_of(graph, np.zeros(graph.num_nodes, np.int32), 0, 1), World())
    view = part.views(Pass(training=False))[0]
    whole = reference.WholeGraph.of(graph, torch.float32)
    edges = torch.stack([whole.src, whole.dst])
    weight: dict[str, Any] = {} if graph.edge_weight is None else {"edge_weight": whole.weight}
    weight |= {} if whole.edge_x is None else {"edge_attr": whole.edge_x}
    inputs = [whole.x.clone().requires_grad_() for _ in range(3)]
    outputs = [
        theirs(inputs[0], edges, **weight),
        ours(inputs[1], view),
        oracle(inputs[2], whole, reference.Dropout(False)),
    ]
    direction = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(0))
    for output in outputs:
        (output * direction).sum().backward()
    for who, layer, output, x in zip(("ours", "oracle"), (ours, oracle), outputs[1:], inputs[1:], strict=True):
        close(output, outputs[0], f"output, {who}")
        close(x.grad, inputs[0].grad, f"gradient of x, {who}")
        for name, parameter in layer.named_parameters():
            close(parameter.grad, copied[name].grad.view_as(parameter), f"gradient of {name}, {who}")


def close(found: Tensor, expected: Tensor, what: str) -> None:
    found, expected = found.detach(), expected.detach()
    error = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    assert error <= TOLERANCE, f"{what} is off by {error:.2g}"


def randomised(layer: nn.Module) -> nn.Module:
    """PyG starts biases at zero, which would hide them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return layer


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("d_out", [OUT, 2 * WIDTH])
def test_gcn(weighted: bool, d_out: int) -> None:
    layers = (
        randomised(pyg.GCNConv(WIDTH, d_out)),
        models.GCNConv(WIDTH, d_out),
        reference.GCN(WIDTH, d_out),
    )
    compare(single_loops(weighted), layers, {"weight": "lin.weight", "bias": "bias"})


@pytest.mark.parametrize("root_weight", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("d_out", [OUT, 2 * WIDTH])
def test_sage(root_weight: bool, normalize: bool, d_out: int) -> None:
    options = {"root_weight": root_weight, "normalize": normalize}
    layers = (
        randomised(pyg.SAGEConv(WIDTH, d_out, **options)),
        models.SAGEConv(WIDTH, d_out, **options),
        reference.SAGE(WIDTH, d_out, **options),
    )
    weights = {"neighbor.weight": "lin_l.weight", "neighbor.bias": "lin_l.bias"}
    compare(several_loops(), layers, weights | ({"root.weight": "lin_r.weight"} if root_weight else {}))


@pytest.mark.parametrize(("eps", "train_eps"), [(0.0, False), (0.3, False), (0.3, True)])
def test_gin(eps: float, train_eps: bool) -> None:
    mlp = nn.Sequential(nn.Linear(WIDTH, OUT), nn.ReLU(), nn.Linear(OUT, OUT))
    layers = (
        randomised(pyg.GINConv(mlp, eps=eps, train_eps=train_eps)),
        models.GINConv(WIDTH, OUT, eps=eps, train_eps=train_eps),
        reference.GIN(WIDTH, OUT, eps=eps, train_eps=train_eps),
    )
    weights = {"first.weight": "nn.0.weight", "first.bias": "nn.0.bias"}
    weights |= {"second.weight": "nn.2.weight", "second.bias": "nn.2.bias"}
    compare(several_loops(), layers, weights | ({"eps": "eps"} if train_eps else {}))


@pytest.mark.parametrize(("heads", "concat"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("negative_slope", [0.2, 0.0])
@pytest.mark.parametrize("edge_dim", [None, 1, 4])
def test_gat(heads: int, concat: bool, negative_slope: float, edge_dim: int | None) -> None:
    """With features of edges too, of which some are loops, several to a node, and some nodes have none."""
    graph = several_loops()
    if edge_dim is not None:
        edge_x = np.random.default_rng(23).standard_normal((graph.num_edges, edge_dim))
        graph = dataclasses.replace(graph, edge_x=edge_x)
    options: dict[str, Any] = {"heads": heads, "concat": concat, "negative_slope": negative_slope, "dropout": 0.0}
    layers = (
        randomised(pyg.GATConv(WIDTH, OUT, edge_dim=edge_dim, **options)),
        models.GATConv(WIDTH, OUT, edge_dim=edge_dim, **options),
        reference.GAT(WIDTH, OUT, edge_dim=edge_dim or 0, **options),
    )
    weights = {"weight": "lin.weight", "att_source": "att_src", "att_target": "att_dst", "bias": "bias"}
    compare(graph, layers, weights | ({"lin_edge": "lin_edge.weight", "att_edge": "att_edge"} if edge_dim else {}))


def test_batch_norm_counts_as_torch_does() -> None:
    """Over all nodes at once, with the running statistics of ``nn.BatchNorm1d``."""
    graph = several_loops()
    part = make_part(shard_of(graph, np.zeros(graph.num_nodes, np.int32), 0, 1), World())
    view = part.views(Pass(training=True))[0]
    ours, theirs = models.BatchNorm(WIDTH), nn.BatchNorm1d(WIDTH)
    for step in range(3):
        x = torch.randn(graph.num_nodes, WIDTH, generator=torch.Generator().manual_seed(step))
        close(ours(x, view), theirs(x), "output")
    close(ours.running_mean, theirs.running_mean, "running mean")
    close(ours.running_var, theirs.running_var, "running variance")
