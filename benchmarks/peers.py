"""Full-batch training with PyG or DGL as a measured process: ``python -m benchmarks.peers JOB``.

The same model as ours: 3 layers, hidden 256, dropout 0.5 before each layer but the first, Adam. It needs torch, numpy
and the system that is named, so that another interpreter can run it.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.serve import open_replies, serve


class Stack(nn.Module):
    """Layers ``conv(x, graph)`` with an activation and dropout between."""

    def __init__(self, convs: list[nn.Module], call: Callable[..., Tensor], act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convs, self.call, self.act = nn.ModuleList(convs), call, act

    def forward(self, x: Tensor, graph: Any, dropout: float) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(self.act(self.call(conv, x, graph)), dropout)
        return self.call(self.convs[-1], x, graph)


def pyg(job: dict[str, Any], widths: list[int], src: Tensor, dst: Tensor) -> tuple[Stack, Any]:
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv

    pairs = list(itertools.pairwise(widths))
    heads, dropout = job["heads"], job["dropout"]
    if job["model"] == "gcn":
        convs: list[nn.Module] = [GCNConv(a, b, cached=True) for a, b in pairs]
    elif job["model"] == "sage":
        convs = [SAGEConv(a, b) for a, b in pairs]
    else:
        convs = [GATConv(a, b // heads, heads, dropout=dropout) for a, b in pairs[:-1]]
        convs.append(GATConv(*pairs[-1], 1, dropout=dropout))
    graph: Tensor = torch.stack([src, dst])
    if job["system"] == "pyg-csr":
        n = int(job["nodes"])
        ones = torch.ones(src.shape[0], device=src.device)
        graph = torch.sparse_coo_tensor(torch.stack([dst, src]), ones, (n, n)).to_sparse_csr()
    return Stack(convs, lambda conv, x, edges: conv(x, edges), F.elu if job["model"] == "gat" else F.relu), graph


def dgl(job: dict[str, Any], widths: list[int], src: Tensor, dst: Tensor) -> tuple[Stack, Any]:
    import dgl
    from dgl.nn import GATConv, GraphConv, SAGEConv

    graph = dgl.graph((src, dst), num_nodes=int(job["nodes"]))
    pairs = list(itertools.pairwise(widths))
    heads, dropout = job["heads"], job["dropout"]
    if job["model"] != "sage":
        graph = dgl.add_self_loop(dgl.remove_self_loop(graph))
    if job["model"] == "gcn":
        convs: list[nn.Module] = [GraphConv(a, b) for a, b in pairs]
    elif job["model"] == "sage":
        convs = [SAGEConv(a, b, "mean") for a, b in pairs]
    else:
        convs = [GATConv(a, b // heads, heads, attn_drop=dropout) for a, b in pairs[:-1]]
        convs.append(GATConv(*pairs[-1], 1, attn_drop=dropout))

    def call(conv: nn.Module, x: Tensor, graph: Any) -> Tensor:
        y: Tensor = conv(graph, x)
        return y.flatten(1) if y.dim() == 3 else y

    graph.create_formats_()
    return Stack(convs, call, F.elu if job["model"] == "gat" else F.relu), graph


def main() -> None:
    replies = open_replies()
    warnings.filterwarnings("ignore", message="Sparse ")
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    device = torch.device(job.get("device", "cpu"))
    with np.load(job["arrays"]) as file:
        src, dst, x, y = (torch.from_numpy(file[name]).to(device) for name in ("src", "dst", "x", "y"))
        train = torch.from_numpy(file["train"]).nonzero().squeeze(1).to(device)
    src, dst, y = src.long(), dst.long(), y.long()
    job["nodes"] = x.shape[0]
    widths = [x.shape[1]] + [job["hidden"]] * (job["layers"] - 1) + [int(y.max()) + 1]
    torch.manual_seed(1)
    model, graph = (dgl if job["system"] == "dgl" else pyg)(job, widths, src, dst)
    del src, dst
    model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    y_train = y[train]

    def step(epoch: int) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, graph, job["dropout"])[train], y_train)
        loss.backward()
        optimizer.step()
        return {"loss": float(loss.detach())}

    def facts() -> dict[str, Any]:
        return {"device_peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0}

    serve(replies, step, facts)


if __name__ == "__main__":
    main()
