"""What a run says of itself: the lines at its start and end, and config.json."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from fullgraph.models import GNN
from fullgraph.runlog import show
from fullgraph.shards import Manifest
from fullgraph.trainer import Trainer
from fullgraph.wording import counted
from fullgraph.world import World


def headline(trainer: Trainer, manifest: Manifest) -> str:
    model, world, target = trainer.model, trainer.world, trainer.target
    count = sum(p.numel() for p in model.parameters())
    facts = manifest.graph
    table = (
        "" if trainer.table is None else f" and a learned table of {facts['num_nodes']:,} x {trainer.table.shape[1]}"
    )
    return (
        f"{facts.get('name')}: {counted(facts['num_nodes'], 'node')}, {counted(facts['num_edges'], 'edge')} in "
        f"{counted(manifest.parts, 'part')} by {manifest.partition.get('method')}\n"
        f"{trainer.model_name} of {count:,} parameters{table}, {target.task}, {_choice(trainer, manifest)}\n"
        f"{counted(world.size, 'rank')} on {world.device.type}, {counted(torch.get_num_threads(), 'compute thread')} "
        f"each\n" + "\n".join([_plan_line(trainer), *_narrowed(trainer, facts), *_notes(trainer)])
    )


def _narrowed(trainer: Trainer, facts: dict[str, Any]) -> list[str]:
    """The line, if one is due, on numbers of the shards that the run's type may not hold exactly."""
    wide = ("float64", "int32", "int64", "uint32", "uint64")
    types = {"features": facts.get("feature_dtype")}
    if isinstance(trainer.model, GNN) and trainer.model.edge_dim:
        types["edge features"] = facts.get("edge_feature_dtype")
    found = [f"{what} are {dtype}" for what, dtype in types.items() if dtype in wide]
    if trainer.config.dtype == "bfloat16":
        return ["bfloat16: rows are rounded to 8 bits (--dtype); sums, weights, optimiser and loss are float32"]
    if trainer.config.dtype == "float64" or not found:
        return []
    return [f"{' and '.join(found)} in the shards and computed with as float32 (--dtype float64 keeps them)"]


def _choice(trainer: Trainer, manifest: Manifest) -> str:
    """Which epoch's weights are kept as the best, and of several splits which is trained on."""
    splits = manifest.graph.get("num_splits", 1)
    split = f"; split {trainer.config.split} of {splits} (--split)" if splits > 1 else ""
    if trainer.num_validation:
        return f"best epoch by validation {trainer.target.metric}{split}"
    return f"no validation nodes, so the last epoch counts as the best{split}"


def _notes(trainer: Trainer) -> list[str]:
    """Lines on what is not as usual (a collective)."""
    config, part, model, world = trainer.config, trainer.part, trainer.model, trainer.world
    graph, lines = part.whole.graph, _policy_notes(trainer)
    if config.recompute:
        lines.append(_recompute_line(model))
    if config.inductive:
        nodes, edges = world.gather_vector([graph.n, part.whole.num_edges]).sum(0).to(torch.int64).tolist()
        lines.append(
            f"inductive: trains on the {nodes:,} training nodes and the {edges:,} edges between them, evaluates on the "
            f"whole graph"
        )
    if graph.edge_x is not None:
        if not isinstance(model, GNN):
            use = "for the model's layers to take (view.edge_x)"
        elif model.edge_dim:
            use = "used by attention"
        else:
            use = f"not used {'(--no-edge-features)' if config.model == 'gat' else f'by {config.model}'}"
        lines.append(f"edge features: {graph.edge_x.shape[1]} an edge, {use}")
    if graph.edge_weight is not None and isinstance(model, GNN):
        lines += _weight_notes(trainer)
    return lines


def _recompute_line(model: nn.Module) -> str:
    if not isinstance(model, GNN):
        return "recompute: in the layers that the model gives to view.recomputed"
    if not model.recomputed:
        return "recompute: saves nothing here, for no hidden layer keeps more than its input; nothing is computed again"
    layers = ", ".join(map(str, sorted(model.recomputed)))
    return (
        f"recompute: layer{'s' if len(model.recomputed) > 1 else ''} {layers}, whose rows cross once more in backward"
    )


def _weight_notes(trainer: Trainer) -> list[str]:
    """What the model does with edge weights that it may not take as others do (a collective)."""
    config, part, world = trainer.config, trainer.part, trainer.world
    graph, weight = part.whole.graph, part.whole.graph.edge_weight
    assert weight is not None
    if config.model == "gat":
        return [
            "edge weights: not used by gat, whose attention weighs edges itself; partition-tools build "
            "--weights-as-features lets it see them"
        ]
    in_weight, scale = part.degrees.in_weight.cpu().numpy()[:, 0], part.degrees.gcn_scale.cpu().numpy()[:, 0]
    has_edges = np.diff(graph.indptr) > 0
    found = (weight < 0, weight == 0, scale == 0, (in_weight == 0) & has_edges, in_weight < 0)
    counts = world.gather_vector([int(np.count_nonzero(each)) for each in found]).sum(0)
    negative, nothing, cut_off, zero, below = counts.to(torch.int64).tolist()
    odd = {"gcn": cut_off, "sage": zero + below, "gin": 0}[config.model]
    effect = {
        "gcn": f"gcn leaves out the messages from and to the {cut_off:,} nodes whose in-weights, with the added "
        f"loop, sum to 0 or less",
        "sage": f"sage divides by the sum of a node's in-weights, which is 0 at {zero:,} nodes (their mean is 0) "
        f"and negative at {below:,}",
        "gin": "gin sums the rows times their weights, so those of negative ones are subtracted",
    }[config.model]
    if negative:
        return [f"warning: {negative:,} edge weights are negative; {effect}"]
    zeros = counted(nothing, "edge weight is", "edge weights are")
    if odd:
        return [f"warning: {zeros} 0; {effect}"]
    return [f"edge weights: {zeros} 0, so those edges bring nothing"] if nothing else []


def _policy_notes(trainer: Trainer) -> list[str]:
    """What crosses in another way than exactly, and what its caches take (a collective)."""
    recipe, world = trainer.policy.recipe, trainer.world
    if not trainer.policy.active:
        return []
    lines = [recipe.sentence()]
    if recipe.stale:
        stated = trainer.cache_bytes()
        if stated is None:
            lines.append("cache: as large as the model's layers make it")
        else:
            most = float(world.gather_vector([stated]).max())
            lines.append(f"cache: {most / 2**20:,.2f} MiB a rank at most")
    return lines


def _plan_line(trainer: Trainer) -> str:
    config, part, model = trainer.config, trainer.part, trainer.model
    if not isinstance(model, GNN):
        rows = "as the model's layers ask"
    else:
        rows = "halo rows" if config.plan == "halo" or model.uses == "halo" else "minimum-cover rows"
    if not config.prune:
        pruned = "not pruned (--no-prune)"
    elif part.training is None:
        pruned = "not pruned: the model does not declare num_layers"
    else:
        whole = [layer for layer, (_, complete) in enumerate(part.training) if complete]
        shares = part.world.gather_vector([plan.n_out for plan, _ in part.training]).sum(0) / part.num_nodes_global
        pruned = "nodes computed by layer " + ", ".join(f"{share:.0%}" for share in shares.tolist())
        if config.norm == "batch" and len(whole) > 1:
            pruned += " (batch norm needs every node below it)"
    return f"exchange: {rows}; layer 0 {part.input.mode}; {pruned}"


def config_record(folder: Path, manifest: Manifest, trainer: Trainer) -> dict[str, Any]:
    config, world = trainer.config, trainer.world
    return config.as_dict() | {
        "shards": str(folder.resolve()),
        "build_id": manifest.build_id,
        "graph": manifest.graph,
        "partition": manifest.partition,
        "model_name": trainer.model_name,
        "features": trainer.part.x.shape[1],
        "learned_features": 0 if trainer.table is None else trainer.table.shape[1],
        "edge_features_used": trainer.model.edge_dim if isinstance(trainer.model, GNN) else 0,
        "graph_id": manifest.graph_id,
        "outputs": trainer.target.outputs,
        "task": trainer.target.task,
        "metric": trainer.target.metric,
        "layer0": trainer.part.input.mode,
        "ranks": world.size,
        "launch": world.launch,
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }


def peak_memory(world: World) -> int:
    """Bytes: the device's peak on a GPU, the process's peak resident set otherwise."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def print_summary(summary: dict[str, Any], folder: Path, console: Console) -> None:
    metric = summary["metric"]
    scores = ", ".join(
        f"{split} {metric} {show(metric, summary[split][metric])}" for split in ("val", "test") if summary[split]
    )
    if summary["stopped_by"]:
        console.print(
            f"stopped after {counted(summary['epochs'], 'epoch')}: {summary['stopped_by']}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"{_best(summary)}{f': {scores}' if scores else ''}\n"
        f"{summary['seconds_per_epoch']:.3g} s an epoch (median), {summary['bytes_sent_per_epoch'] / 1e6:.3g} MB of "
        f"boundary rows sent an epoch, peak memory {summary['peak_memory_bytes'] / 2**20:,.0f} MiB a rank\n"
        f"run folder: {folder}",
        highlight=False,
        soft_wrap=True,
    )


def _best(summary: dict[str, Any]) -> str:
    if not summary["epochs"]:
        return "initial weights, no epoch was trained"
    if not summary["val"]:
        return f"last epoch {summary['epochs']}, without validation nodes to choose another"
    return f"best epoch {summary['best_epoch'] + 1} of {summary['epochs']}"
