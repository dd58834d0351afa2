"""Exact full-graph training: every rank takes the same steps on its own shard.

Order of collectives: those of start-up, then for each epoch the layers' exchanges forward and backward, the gradient
sum, one gather of statistics and flags, and on evaluated epochs those of evaluation. Whatever depends on a clock or a
value (time limit, a loss that is not finite) is a flag in that gather, so that all ranks act alike.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
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
from fullgraph.gather import gather_in_order
from fullgraph.induced import induced_shard
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
from fullgraph.models import GNN, ModelFactory, build_model, edge_features_used
from fullgraph.profile import profile, show_profile
from fullgraph.runlog import RunLog, create_run_folder, show, write_json, write_state
from fullgraph.shards import Manifest, Shard, read_manifest, read_shard
from fullgraph.view import GraphPart, Pass, make_part
from fullgraph.world import REST, WHOLE, RankError, World, is_lost_rank

LOSS: Tag = (WHOLE, "loss")
_LATE = 0.5  # a reason to stop, below the numbers of signals


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
    seed: int = 1,
) -> GraphPart:
    """This rank's part of the graph in ``folder``, for a training loop of one's own (a collective).

    ``part.run(model, Pass(training=True, seed=..., step=...))`` is one forward pass; loss is a local sum over
    ``part.masks["train"]`` divided by the global count, and parameter gradients are to be summed over ranks. A model
    of ``num_layers`` layers is pruned in training. Where features are learned, ``part.table`` are this rank's rows of
    them, drawn by ``seed``: for its optimiser, but not for the sum over ranks.
    """
    world = world or World()
    _, shard = load_shard(Path(folder), world)
    return make_part(shard, world, split=split, dtype=dtype, num_layers=num_layers, seed=seed)


class Trainer:
    """Model, optimiser and part of one rank; ``step`` is one exact pass over the whole graph.

    ``part`` is what is trained on, ``whole`` what is evaluated on: the same but for inductive training. ``parameters``
    are the model's, alike on all ranks; ``table`` are this rank's rows of learned features, where there are some.
    """

    def __init__(
        self, config: TrainConfig, part: GraphPart, target: Target, model: nn.Module, whole: GraphPart | None = None
    ) -> None:
        self.config, self.part, self.target, self.model, self.whole = config, part, target, model, whole or part
        self.world = part.world
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.table = part.table
        self.learnt = self.parameters if self.table is None else [*self.parameters, self.table]
        self.optimizer = _optimizer(config, self.learnt)
        self.scheduler = _scheduler(config, self.optimizer, target)
        self.y = fit_labels(self.whole, target)
        train = part.masks["train"]
        self.y_train = fit_labels(part, target)[train]
        self.train_rows = torch.nonzero(train).squeeze(1)
        counts = [target.weight(self.y_train), float(self.whole.masks["val"].sum())]
        self.total_weight, validation = self.world.gather_vector(counts).sum(0).tolist()
        if self.total_weight == 0:
            raise RankError(f"load: split {config.split} has no training nodes on any rank; take another --split")
        if validation == 0 and (config.patience is not None or config.scheduler == "plateau"):
            flag = "--patience" if config.patience is not None else "--scheduler plateau"
            raise RankError(f"options: {flag} needs validation nodes, and split {config.split} has none; leave it out")

    @property
    def model_name(self) -> str:
        return self.config.model if isinstance(self.model, GNN) else type(self.model).__name__

    def gradients(self, step: int) -> float:
        """Forward and backward of one step; leaves the whole graph's gradient in every rank's parameters and in the
        table's rows, and returns this rank's share of the loss."""
        self.model.train()
        this_pass = Pass(training=True, seed=self.config.seed, step=step)
        logits = self.part.run(self.model, this_pass)
        self.world.meter.enter(LOSS)
        loss = self.target.per_node(logits[self.train_rows], self.y_train) / self.total_weight
        for p in self.learnt:
            p.grad = None
        loss.backward()
        if self.table is not None and self.table.grad is None:
            self.table.grad = torch.zeros_like(self.table)
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

    def _clip(self, largest: float) -> None:
        """Scale the gradient of all that is learnt down to this norm, each number counted once."""
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.table is not None and self.table.grad is not None:
            own = float(self.table.grad.square().sum(dtype=torch.float64))
            norm = (norm.square() + self.world.gather_vector([own]).sum().to(norm)).sqrt()
        nn.utils.clip_grads_with_norm_(self.learnt, largest, norm)

    def step(self, epoch: int, stop: float = 0) -> tuple[dict[str, Any], float]:
        """One epoch: (its record for the log, the largest of all ranks' ``stop``: why to stop after it, 0 to go on)."""
        start = time.perf_counter()
        meter = self.world.meter
        meter.step = epoch
        sent, waited = meter.bytes_sent, meter.seconds
        share = self.gradients(epoch)
        stats = self.world.gather_vector([share, meter.bytes_sent - sent, stop])
        loss = float(stats[:, 0].sum())
        if not math.isfinite(loss):
            raise RankError(
                f"train: the loss of epoch {epoch + 1} is {loss}; try a smaller --lr (now {self.config.lr:g}), or "
                f"--clip 1"
            )
        if self.config.clip is not None:
            self._clip(self.config.clip)
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
        return record, float(stats[:, 2].max())

    def evaluate(self) -> Scores:
        scores = score(self.whole, self.target, self.y, run_model(self.model, self.whole))
        self.world.meter.enter(REST)
        return scores

    def state(self) -> dict[str, Any]:
        """A copy of what is learnt as this rank has it: weights, and its own nodes' rows of learned features."""
        state: dict[str, Any] = {"model": copy.deepcopy(self.model.state_dict())}
        return state if self.table is None else state | {"features": self.table.detach().clone()}

    def of_all_ranks(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` with every node's rows of learned features, in order of global id, on rank 0 (a collective)."""
        return state if self.table is None else state | {"features": self._every_row(state["features"])}

    def optimizer_state(self) -> dict[str, Any]:
        """The optimiser's, with what it keeps for the table's rows as in ``of_all_ranks`` (a collective)."""
        state = self.optimizer.state_dict()
        if self.table is None:
            return state
        place, shape = len(self.parameters), self.table.shape
        kept = state["state"].get(place, {})
        kept = {name: self._every_row(value) if value.shape == shape else value for name, value in kept.items()}
        return state | {"state": state["state"] | {place: kept}}

    def _every_row(self, rows: Tensor) -> Tensor | None:
        return gather_in_order(rows, self.part.whole.owned_global, self.part.num_nodes_global, self.world)

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
            learned_input=self.table is not None,
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
        _check_features(shard, config)
        edge_dim = edge_features_used(config, shard)
        net = build_model(config, shard.num_features, target.outputs, model, edge_dim=edge_dim).to(world.device)
    _check_same_weights(net, world)
    world = dataclasses.replace(world, exchange_bytes=config.exchange_bytes)
    put = functools.partial(
        make_part,
        world=world,
        split=config.split,
        dtype=getattr(torch, config.dtype),
        feature_norm=config.feature_norm,
        kind=config.plan,
        num_layers=getattr(net, "num_layers", None),
        whole_layers=getattr(net, "whole_layers", 0),
        dense=not isinstance(net, GNN),
        seed=config.seed,
    )
    whole = None
    if config.inductive:
        whole = put(shard, prune=False)
        shard = induced_shard(shard, shard.train[config.split], world)
    part = put(shard, prune=config.prune)
    if config.class_weights == "balanced":
        target = balance_classes(target, part)
    if isinstance(net, GNN):
        part.prepare(net.uses)
        if whole is not None:
            whole.prepare(net.uses)
    part = part.with_layer0(_choose_layer0(config, net, part))
    if whole is not None and part.input.mode == "once":
        whole = whole.with_layer0("once")
    return Trainer(config, part, target, net, whole)


def _check_features(shard: Shard, config: TrainConfig) -> None:
    if shard.num_features == 0:
        raise ValueError(
            f"graph {shard.graph} has no node features; build it again with some: --features FILE, degree, onehot, "
            f"random:K or learned:K"
        )
    if shard.x is not None:
        return
    learned = f"the {shard.learned_features} features of graph {shard.graph} are learned"
    if config.inductive:
        raise ValueError(f"--inductive: {learned}, which only nodes that are trained on can have; build it with others")
    if config.feature_norm != "none":
        raise ValueError(f"--feature-norm {config.feature_norm}: {learned}; leave the option out")
    if config.layer0 not in ("auto", "exchange"):
        raise ValueError(f"--layer0 {config.layer0}: {learned} and change in every step; leave the option out")


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
    Raises ``RankError``, the same on every rank, for whatever is wrong before training and for a loss that is not
    finite. Another error in the middle is raised where it arises; ``open_world`` tells the other ranks.
    """
    config, world, folder = config or TrainConfig(), world or World(), Path(folder)
    _check_same_options(config, world)
    console = console or Console(stderr=False, quiet=world.rank != 0)
    with world.stage("options"):
        told = TrainConfig.timeout
        if world.size > 1 and config.timeout not in (told, world.timeout):
            raise ValueError(
                f"timeout is {config.timeout:g} s in the options but the ranks were joined with {world.timeout:g} s; "
                f"say open_world(timeout={config.timeout:g})"
            )
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
    best_state: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    stop_signal = _StopSignal(world)
    stopped_by: str | None = None
    failure: RankError | None = None
    started = time.monotonic()
    world.meter.enter(REST)
    with log or contextlib.nullcontext(), stop_signal:
        for epoch in range(config.epochs):
            late = config.time_limit is not None and time.monotonic() - started >= config.time_limit
            try:
                record, stop = trainer.step(epoch, stop_signal.number or _LATE * late)
            except RankError as error:  # every rank has it, so what was learnt before can be kept
                failure = error
                break
            records.append(record)
            scores = None
            last = stop or epoch == config.epochs - 1
            if last or (epoch + 1) % config.eval_every == 0:
                scores = trainer.evaluate()
                if _better(scores, best, metric):
                    best = {"epoch": epoch, "scores": scores}
                    best_state = trainer.state()
            if trainer.scheduler is not None:
                _advance(trainer.scheduler, scores, metric)
            if log is not None:
                log.epoch(record, scores)
            waited = epoch - (best["epoch"] if best else -1)
            if stop:
                stopped_by = "time limit" if stop == _LATE else signal.Signals(int(stop)).name
            elif scores is not None and config.patience is not None and waited >= config.patience:
                stopped_by = "patience"
            if stopped_by is not None:
                break
        if failure is not None and best is None:
            raise failure
        if best is None:  # no epoch, or no validation node: the last state is the best known
            best = {"epoch": len(records) - 1, "scores": trainer.evaluate()}
            best_state = trainer.state()
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
        "stopped_by": str(failure) if failure else stopped_by,
    }
    _save(trainer, folder / "best.pt", manifest, best_state, epoch=best["epoch"])
    optimizer = trainer.optimizer_state()
    _save(trainer, folder / "last.pt", manifest, trainer.state(), epoch=len(records) - 1, optimizer=optimizer)
    with world.stage("save"):  # the run folder is whole when any rank goes on
        if world.rank == 0:
            write_json(folder / "summary.json", summary)
    _print_summary(summary, folder, console)
    if failure is not None:
        raise failure
    return summary, [r["loss"] for r in records]


def _save(trainer: Trainer, path: Path, manifest: Manifest, state: dict[str, Any], **facts: Any) -> None:
    """Write a state of all ranks (a collective)."""
    state = trainer.of_all_ranks(state)
    with trainer.world.stage("save"):
        if trainer.world.rank == 0:
            write_state(path, state | facts | {"config": trainer.config.as_dict(), "build_id": manifest.build_id})


class _StopSignal:
    """SIGTERM and SIGINT set a number, on which all ranks stop together after the epoch.

    A second signal, or one after another rank has failed, does what it did before.
    """

    number = 0

    def __init__(self, world: World) -> None:
        self._world = world
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._restore()
        if self.number and error is not None and is_lost_rank(error):  # a launcher ends what is left of the run
            signal.raise_signal(self.number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.number or self._world.failed:
            self._restore()
            signal.raise_signal(number)
        self.number = number


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
    if not isinstance(model, GNN) or isinstance(part.x, SparseRows) or part.table is not None:
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


def _check_same_options(config: TrainConfig, world: World) -> None:
    """Ranks on other hosts are started by other commands."""
    options = world.gather_json(config.as_dict())
    for rank, other in enumerate(options):
        for name, value in options[0].items():
            if other[name] != value and name != "threads":
                flag = f"--{name.replace('_', '-')}"
                raise RankError(
                    f"options: rank 0 was started with {flag} {value}, rank {rank} with {flag} {other[name]}; start "
                    f"all ranks with the same options"
                )


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
    table = (
        "" if trainer.table is None else f" and a learned table of {facts['num_nodes']:,} x {trainer.table.shape[1]}"
    )
    return (
        f"{facts.get('name')}: {facts.get('num_nodes'):,} nodes, {facts.get('num_edges'):,} edges in {manifest.parts} "
        f"part{'s' if manifest.parts > 1 else ''} by {manifest.partition.get('method')}\n"
        f"{trainer.model_name} of {count:,} parameters{table}, {target.task}, best epoch by validation "
        f"{target.metric}\n"
        f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}, {torch.get_num_threads()} compute "
        f"thread{'s' if torch.get_num_threads() > 1 else ''} each\n"
        + "\n".join([_plan_line(trainer), *_notes(trainer)])
    )


def _notes(trainer: Trainer) -> list[str]:
    """Lines on what is not as usual (a collective)."""
    config, part, model, world = trainer.config, trainer.part, trainer.model, trainer.world
    graph, lines = part.whole.graph, []
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
    if graph.edge_weight is not None and isinstance(model, GNN) and config.model in ("gcn", "sage"):
        in_weight, scale = part.degrees.in_weight.cpu().numpy()[:, 0], part.degrees.gcn_scale.cpu().numpy()[:, 0]
        found = (
            graph.edge_weight < 0,
            scale == 0,
            (in_weight == 0) & (np.diff(graph.indptr) > 0),
            in_weight < 0,
        )
        counts = world.gather_vector([int(np.count_nonzero(each)) for each in found]).sum(0)
        negative, cut_off, zero, below = counts.to(torch.int64).tolist()
        effect = {
            "gcn": f"gcn leaves out the messages from and to the {cut_off:,} nodes whose in-weights, with the added "
            f"loop, sum to 0 or less",
            "sage": f"sage divides by the sum of a node's in-weights, which is 0 at {zero:,} nodes (their mean is 0) "
            f"and negative at {below:,}",
        }
        if negative:
            lines.append(f"warning: {negative:,} edge weights are negative; {effect[config.model]}")
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


def _config_record(folder: Path, manifest: Manifest, trainer: Trainer) -> dict[str, Any]:
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
        console.print(
            f"stopped after {summary['epochs']} epochs: {summary['stopped_by']}", highlight=False, soft_wrap=True
        )
    console.print(
        f"best epoch {summary['best_epoch'] + 1} of {summary['epochs']}: {scores}\n"
        f"{summary['seconds_per_epoch']:.3g} s an epoch (median), {summary['bytes_sent_per_epoch'] / 1e6:.3g} MB of "
        f"boundary rows sent an epoch, peak memory {summary['peak_memory_bytes'] / 2**20:,.0f} MiB a rank\n"
        f"run folder: {folder}",
        highlight=False,
        soft_wrap=True,
    )
