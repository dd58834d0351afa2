"""Exact full-graph training: every rank takes the same steps on its own shard.

Order of collectives: those of start-up, then for each epoch the layers' exchanges forward and backward, the gradient
sum, one gather of statistics and flags, and on evaluated epochs those of evaluation. Whatever depends on a clock or a
value (time limit, a loss that is not finite) is a flag in that gather, so that all ranks act alike.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import os
import platform
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from fullgraph.config import TrainConfig
from fullgraph.cost import (
    InputShape,
    Layer0,
    Ledger,
    Machine,
    Tag,
    crossings,
    layer0_bytes,
    layer0_seconds,
    layer_ledger,
)
from fullgraph.kernels import SparseRows
from fullgraph.metrics import (
    LOWER_IS_BETTER,
    Scores,
    Target,
    balance_classes,
    choose_target,
    fit_labels,
    run_model,
    score,
)
from fullgraph.models import GNN, ModelFactory, build_model
from fullgraph.profile import profile, show_profile
from fullgraph.runlog import RunLog, create_run_folder, show, write_json, write_state
from fullgraph.shards import Manifest, Shard, read_manifest, read_shard
from fullgraph.view import GraphPart, Pass, make_part
from fullgraph.world import REST, WHOLE, RankError, World

LOSS: Tag = (WHOLE, "loss")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to; the same on every rank."""

    run: Path
    summary: dict[str, Any]
    losses: tuple[float, ...]
    """Training loss of each epoch."""


def load_shard(folder: Path, world: World) -> tuple[Manifest, Shard]:
    """This rank's shard, after proof that the folder fits the world and that all ranks read one build."""
    with world.stage("load"):
        manifest = read_manifest(folder)
        if manifest.parts != world.size:
            raise ValueError(
                f"{folder} holds {manifest.parts} parts but {world.size} ranks were started; start {manifest.parts} "
                f"ranks (torchrun --nproc-per-node {manifest.parts}), or build again with --parts {world.size}"
            )
        shard = read_shard(folder, world.rank)
    facts = world.gather_json([shard.build_id, shard.num_nodes_global, shard.num_edges_global])
    different = [rank for rank, other in enumerate(facts) if other != facts[0]]
    if different:
        raise RankError(
            f"load: rank 0 reads build {facts[0][0]} but rank {different[0]} reads build {facts[different[0]][0]}; "
            f"all ranks must read shards of one build: copy them again"
        )
    return manifest, shard


def load(
    folder: str | Path,
    *,
    world: World | None = None,
    split: int = 0,
    dtype: torch.dtype = torch.float32,
    num_layers: int | None = None,
) -> GraphPart:
    """This rank's part of the graph in ``folder``, for a training loop of one's own (a collective).

    ``part.run(model, Pass(training=True, seed=..., step=...))`` is one forward pass; loss is a local sum over
    ``part.masks["train"]`` divided by the global count, and parameter gradients are to be summed over ranks. A model
    of ``num_layers`` layers is pruned in training.
    """
    world = world or World()
    _, shard = load_shard(Path(folder), world)
    return make_part(shard, world, split=split, dtype=dtype, num_layers=num_layers)


class Trainer:
    """Model, optimiser and part of one rank; ``step`` is one exact pass over the whole graph."""

    def __init__(self, config: TrainConfig, part: GraphPart, target: Target, model: nn.Module) -> None:
        self.config, self.part, self.target, self.model = config, part, target, model
        self.world = part.world
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = _optimizer(config, self.parameters)
        self.scheduler = _scheduler(config, self.optimizer, target)
        self.y = fit_labels(part, target)
        train = part.masks["train"]
        self.y_train = self.y[train]
        self.train_rows = torch.nonzero(train).squeeze(1)
        self.total_weight = float(self.world.gather_vector([target.weight(self.y_train)]).sum())
        if self.total_weight == 0:
            raise RankError(f"load: split {config.split} has no training nodes on any rank")

    @property
    def model_name(self) -> str:
        return self.config.model if isinstance(self.model, GNN) else type(self.model).__name__

    def gradients(self, step: int) -> float:
        """Forward and backward of one step; leaves the whole graph's gradient in every rank's parameters and
        returns this rank's share of the loss."""
        self.model.train()
        this_pass = Pass(training=True, seed=self.config.seed, step=step)
        logits = self.part.run(self.model, this_pass)
        self.world.meter.enter(LOSS)
        loss = self.target.per_node(logits[self.train_rows], self.y_train) / self.total_weight
        for p in self.parameters:
            p.grad = None
        loss.backward()
        self.world.meter.enter(REST)
        self._sum_gradients()
        return float(loss.detach())

    def _sum_gradients(self) -> None:
        if self.world.size == 1:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = self.world.sum_(torch.cat([g.reshape(-1) for g in grads]))
        for p, piece in zip(self.parameters, flat.split([g.numel() for g in grads]), strict=True):
            p.grad = piece.view_as(p)

    def step(self, epoch: int, stop: bool) -> tuple[dict[str, Any], bool]:
        """One epoch: (its record for the log, whether any rank asked to stop after it)."""
        start = time.perf_counter()
        meter = self.world.meter
        sent, waited = meter.bytes_sent, meter.seconds
        share = self.gradients(epoch)
        stats = self.world.gather_vector([share, meter.bytes_sent - sent, float(stop)])
        loss = float(stats[:, 0].sum())
        if not math.isfinite(loss):
            raise RankError(
                f"train: the loss of epoch {epoch} is {loss}; the weights are those of the epoch before. Try a smaller "
                f"--lr (now {self.config.lr:g}) or --clip 1"
            )
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        self.optimizer.step()
        if self.part.degrees.in_weight.is_cuda:
            torch.cuda.synchronize()
        record = {
            "epoch": epoch,
            "loss": loss,
            "seconds": time.perf_counter() - start,
            "comm_seconds": meter.seconds - waited,
            "bytes_sent": int(stats[:, 1].sum()),
        }
        return record, bool(stats[:, 2].any())

    def evaluate(self) -> Scores:
        scores = score(self.part, self.target, self.y, run_model(self.model, self.part))
        self.world.meter.enter(REST)
        return scores

    def predicted_ledger(self) -> Ledger | None:
        """Bytes of message rows that a step sends from this rank, by layer, direction and rank, from the plans alone;
        None for a model whose widths are not known."""
        model, part = self.model, self.part
        if not isinstance(model, GNN) or part.training is None:
            return None
        dropped = self.config.input_dropout > 0
        layer0 = "exchange" if part.input.mode == "once" and (dropped or model.uses == "halo") else part.input.mode
        crossing = crossings(
            self.config.model,
            model.widths,
            out_heads=self.config.out_heads,
            layer0=layer0,
            sparse_input=isinstance(part.x, SparseRows),
        )
        ledger: Ledger = {}
        for layer, (plan, _) in enumerate(part.training):
            if crossing[layer].width:
                counts = getattr(plan, model.uses).route.counts
                itemsize = part.degrees.in_weight.element_size()
                ledger |= layer_ledger(layer, crossing[layer], counts.sent, counts.received, itemsize)
        return ledger


def make_trainer(shard: Shard, config: TrainConfig, world: World, model: ModelFactory | None = None) -> Trainer:
    """The trainer of this rank's shard, after every check that can be made before the first step (a collective).

    Raises ``RankError`` on all ranks where an option does not fit the shard or two ranks do not fit each other.
    """
    with world.stage("options"):
        num_splits = shard.train.shape[0]
        if num_splits and config.split >= num_splits:
            raise ValueError(f"--split {config.split}, but the shards hold {num_splits} splits: 0 to {num_splits - 1}")
        target = choose_target(shard, config.task, config.metric, config.class_weights == "balanced")
        if shard.x is None:
            raise ValueError(f"graph {shard.graph} has no node features; training needs some")
        net = build_model(config, shard.x.shape[1], target.outputs, model).to(world.device)
    _check_same_weights(net, world)
    part = make_part(
        shard,
        world,
        split=config.split,
        dtype=getattr(torch, config.dtype),
        feature_norm=config.feature_norm,
        kind=config.plan,
        num_layers=getattr(net, "num_layers", None),
        whole_layers=getattr(net, "whole_layers", 0),
        prune=config.prune,
        dense=not isinstance(net, GNN),
    )
    if config.class_weights == "balanced":
        target = balance_classes(target, part)
    if isinstance(net, GNN):
        part.prepare(net.uses)
    part = part.with_layer0(_choose_layer0(config, net, part))
    return Trainer(config, part, target, net)


def train(
    folder: str | Path,
    config: TrainConfig | None = None,
    *,
    run: str | Path | None = None,
    world: World | None = None,
    model: ModelFactory | None = None,
    console: Console | None = None,
) -> Result:
    """Train on the shards in ``folder`` and leave a run folder; every rank of ``world`` calls this alike.

    ``model`` makes a model of the user's own from (features, outputs); by default it is ``config.model``.
    Raises ``RankError``, the same on every rank, for whatever is wrong before or during training.
    """
    config, world, folder = config or TrainConfig(), world or World(), Path(folder)
    console = console or Console(stderr=False, quiet=world.rank != 0)
    manifest, shard = load_shard(folder, world)
    trainer = make_trainer(shard, config, world, model)
    del shard
    run_folder = _agree_run_folder(run, manifest, trainer)
    console.print(_headline(trainer, manifest), highlight=False, soft_wrap=True)
    if world.rank == 0:
        write_json(run_folder / "config.json", _config_record(folder, manifest, trainer))
    summary, losses = _run(trainer, run_folder, manifest, console)
    return Result(run=run_folder, summary=summary, losses=tuple(losses))


def _run(trainer: Trainer, folder: Path, manifest: Manifest, console: Console) -> tuple[dict[str, Any], list[float]]:
    config, world, metric = trainer.config, trainer.world, trainer.target.metric
    log = RunLog(folder, config.epochs, metric, console) if world.rank == 0 else None
    best: dict[str, Any] | None = None
    best_state: dict[str, Any] | None = None
    records: list[dict[str, Any]] = []
    stop_signal = _StopSignal()
    started = time.monotonic()
    world.meter.enter(REST)
    with log or contextlib.nullcontext(), stop_signal:
        for epoch in range(config.epochs):
            late = config.time_limit is not None and time.monotonic() - started >= config.time_limit
            record, stopping = trainer.step(epoch, stop=late or stop_signal.received)
            records.append(record)
            scores = None
            last = stopping or epoch == config.epochs - 1
            if last or (epoch + 1) % config.eval_every == 0:
                scores = trainer.evaluate()
                if _better(scores, best, metric):
                    best = {"epoch": epoch, "scores": scores}
                    best_state = copy.deepcopy(trainer.model.state_dict())
            if trainer.scheduler is not None:
                _advance(trainer.scheduler, scores, metric)
            if log is not None:
                log.epoch(record, scores)
            waited = epoch - (best["epoch"] if best else -1)
            if stopping or (config.patience is not None and waited >= config.patience):
                break
        if best is None:  # no epoch, or no validation node: the last state is the best known
            best = {"epoch": len(records) - 1, "scores": trainer.evaluate()}
            best_state = trainer.model.state_dict()
    if config.profile:
        found = profile(world, trainer.predicted_ledger(), len(records))
        show_profile(found, console)
        if world.rank == 0:
            write_json(folder / "profile.json", found)
    peaks = world.gather_vector([_peak_memory(world)])
    seconds = [r["seconds"] for r in records]
    summary = {
        "best_epoch": best["epoch"],
        "val": best["scores"].get("val", {}),
        "test": best["scores"].get("test", {}),
        "epochs": len(records),
        "seconds_per_epoch": float(np.median(seconds)) if seconds else 0.0,
        "bytes_sent_per_epoch": int(np.median([r["bytes_sent"] for r in records])) if records else 0,
        "peak_memory_bytes": int(peaks.max()),
        "parts": manifest.parts,
        "ranks": world.size,
        "metric": metric,
        "total_seconds": time.monotonic() - started,
        "stopped_by": stop_signal.name,
    }
    if world.rank == 0:
        plain = {"config": config.as_dict(), "build_id": manifest.build_id}
        write_state(folder / "best.pt", {"model": best_state, "epoch": best["epoch"], **plain})
        write_state(
            folder / "last.pt",
            {
                "model": trainer.model.state_dict(),
                "optimizer": trainer.optimizer.state_dict(),
                "epoch": len(records) - 1,
                **plain,
            },
        )
        write_json(folder / "summary.json", summary)
    _print_summary(summary, folder, console)
    return summary, [r["loss"] for r in records]


class _StopSignal:
    """SIGTERM and SIGINT set a flag, on which all ranks stop together after the epoch."""

    received = False
    name: str | None = None

    def __enter__(self) -> None:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received, self.name = True, signal.Signals(number).name


def _better(scores: Scores, best: dict[str, Any] | None, metric: str) -> bool:
    if "val" not in scores or math.isnan(scores["val"][metric]):
        return False
    if best is None:
        return True
    new, old = scores["val"][metric], best["scores"]["val"][metric]
    return bool(new < old if metric in LOWER_IS_BETTER else new > old)


def _optimizer(config: TrainConfig, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, config.lr, momentum=0.9, weight_decay=config.weight_decay)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, config.lr, weight_decay=config.weight_decay)


def _scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer, target: Target) -> Any:
    if config.scheduler == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(config.epochs, 1))
    if config.scheduler == "plateau":
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="min" if target.metric in LOWER_IS_BETTER else "max", factor=0.5, patience=10
        )
    return None


def _advance(scheduler: Any, scores: Scores | None, metric: str) -> None:
    if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step()
    elif scores is not None and "val" in scores:
        scheduler.step(scores["val"][metric])


def _choose_layer0(config: TrainConfig, model: nn.Module, part: GraphPart) -> Layer0:
    """What ``--layer0`` says, or what should cost the slowest rank least and fits its memory (a collective)."""
    if config.layer0 != "auto":
        return config.layer0
    if not isinstance(model, GNN) or isinstance(part.x, SparseRows):
        return "exchange"
    plan = part.training[0][0] if part.training else part.whole
    route = getattr(part.whole, model.uses).route
    counts = [plan.n_out, sum(route.counts.received), route.most_rows, plan.num_edges]
    rows, halo, messages, edges = part.world.gather_vector(counts).amax(0).to(torch.int64).tolist()
    shape = InputShape(
        rows=rows,
        halo=halo,
        messages=messages,
        edges=edges,
        features=model.widths[0],
        hidden=model.widths[1],
        itemsize=part.x.element_size(),
    )
    spare = float(part.world.gather_vector([_free_memory()]).amin()) / (4 * part.world.local_size)
    seconds = layer0_seconds(shape, attention=model.uses == "halo", dropped=config.input_dropout > 0, machine=Machine())
    fits = {mode: cost for mode, cost in seconds.items() if layer0_bytes(shape)[mode] <= spare}
    return min(fits, key=lambda mode: fits[mode])


def _free_memory() -> int:
    """Bytes of this host's memory that nothing uses."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_same_weights(model: nn.Module, world: World) -> None:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    digests = world.gather_json(digest.hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise RankError(
            f"model: ranks 0 and {different[0]} start from different weights; a model must draw its initial weights "
            f"from torch's generator alone"
        )


def _agree_run_folder(run: str | Path | None, manifest: Manifest, trainer: Trainer) -> Path:
    world, started = trainer.world, time.strftime("%Y%m%d-%H%M%S")
    name = Path(run) if run else Path("runs") / f"{_slug(manifest)}-{trainer.model_name}-{started}"
    path = Path(world.gather_json(str(name))[0])
    with world.stage("run folder"):
        if world.rank == 0:
            create_run_folder(path)
    return path


def _slug(manifest: Manifest) -> str:
    name = str(manifest.graph.get("name", "graph"))
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-") or "graph"


def _headline(trainer: Trainer, manifest: Manifest) -> str:
    model, world, target = trainer.model, trainer.world, trainer.target
    count = sum(p.numel() for p in model.parameters())
    facts = manifest.graph
    return (
        f"{facts.get('name')}: {facts.get('num_nodes'):,} nodes, {facts.get('num_edges'):,} edges in {manifest.parts} "
        f"parts by {manifest.partition.get('method')}\n"
        f"{trainer.model_name} of {count:,} parameters, {target.task}, best epoch by validation {target.metric}\n"
        f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}, {torch.get_num_threads()} compute "
        f"thread{'s' if torch.get_num_threads() > 1 else ''} each\n"
        f"{_plan_line(trainer)}"
    )


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


def _config_record(folder: Path, manifest: Manifest, trainer: Trainer) -> dict[str, Any]:
    config, world = trainer.config, trainer.world
    return config.as_dict() | {
        "shards": str(folder.resolve()),
        "build_id": manifest.build_id,
        "graph": manifest.graph,
        "partition": manifest.partition,
        "model_name": trainer.model_name,
        "features": trainer.part.x.shape[1],
        "outputs": trainer.target.outputs,
        "task": trainer.target.task,
        "metric": trainer.target.metric,
        "layer0": trainer.part.input.mode,
        "ranks": world.size,
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }


def _peak_memory(world: World) -> int:
    """Bytes: the device's peak on a GPU, the process's peak resident set otherwise."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _print_summary(summary: dict[str, Any], folder: Path, console: Console) -> None:
    metric = summary["metric"]
    scores = ", ".join(
        f"{split} {metric} {show(metric, summary[split][metric])}" for split in ("val", "test") if summary[split]
    )
    if summary["stopped_by"]:
        console.print(f"stopped by {summary['stopped_by']} after {summary['epochs']} epochs", highlight=False)
    console.print(
        f"best epoch {summary['best_epoch'] + 1} of {summary['epochs']}: {scores}\n"
        f"{summary['seconds_per_epoch']:.3g} s an epoch (median), {summary['bytes_sent_per_epoch'] / 1e6:.3g} MB of "
        f"boundary rows sent an epoch, peak memory {summary['peak_memory_bytes'] / 2**20:,.0f} MiB a rank\n"
        f"run folder: {folder}",
        highlight=False,
        soft_wrap=True,
    )
