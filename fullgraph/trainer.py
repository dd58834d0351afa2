"""Exact full-graph training: every rank takes the same steps on its own shard.

Order of collectives: those of start-up, then for each epoch the layers' exchanges forward and backward, the gradient
sum, one gather of statistics and flags, and on evaluated epochs those of evaluation. Whatever depends on a clock or a
value (time limit, a loss that is not finite) is a flag in that gather, so that all ranks act alike.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullgraph.checkpoint import Snapshot
from fullgraph.checks import GraphFacts, check_training, check_validation
from fullgraph.config import TrainConfig
from fullgraph.cost import (
    Crossing,
    InputShape,
    Layer0,
    Ledger,
    Machine,
    Tag,
    crossings,
    layer0_bytes,
    layer0_seconds,
)
from fullgraph.exchange import column_blocks
from fullgraph.finite import FEATURES, first_gradient_not_finite, first_not_finite
from fullgraph.footprint import learnt_bytes, recomputed_layers
from fullgraph.gather import gather_in_order
from fullgraph.host import available_memory
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
from fullgraph.plan import Route
from fullgraph.policy import Policy, Recipe
from fullgraph.selftest import check_kernels
from fullgraph.shards import Shard
from fullgraph.view import GraphPart, Pass, make_part
from fullgraph.world import REST, WHOLE, RankError, World

LOSS: Tag = (WHOLE, "loss")


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
        self.policy = Policy(Recipe.of(config), self.world, config.seed)
        self.learnt = self.parameters if self.table is None else [*self.parameters, self.table]
        self.optimizer = _optimizer(config, self.learnt)
        self.scheduler = _scheduler(config, self.optimizer, target)
        self.y = fit_labels(self.whole, target)
        train = part.masks["train"]
        self.y_train = fit_labels(part, target)[train]
        self.train_rows = torch.nonzero(train).squeeze(1)
        counts = [target.weight(self.y_train), float(self.whole.masks["val"].sum())]
        self.total_weight, self.num_validation = self.world.gather_vector(counts).sum(0).tolist()
        if self.total_weight == 0:
            raise RankError(f"load: split {config.split} has no training nodes; take another, or build it again")
        with self.world.stage("options"):
            if self.num_validation == 0:
                check_validation(config)

    @property
    def model_name(self) -> str:
        return self.config.model if isinstance(self.model, GNN) else type(self.model).__name__

    def gradients(self, step: int) -> float:
        """Forward and backward of one step; leaves the whole graph's gradient in every rank's parameters and in the
        table's rows, and returns this rank's share of the loss."""
        self.model.train()
        this_pass = Pass(training=True, seed=self.config.seed, step=step, policy=self.policy.at(step))
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

    def step(self, epoch: int, flags: Sequence[float] = ()) -> tuple[dict[str, Any], list[float]]:
        """One epoch: (its record for the log, the largest of all ranks' value of each of the ``flags``)."""
        start = time.perf_counter()
        meter = self.world.meter
        meter.step = epoch
        sent, waited = meter.bytes_sent, meter.seconds
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        share = self.gradients(epoch)
        finite = all(bool(p.grad.isfinite().all()) for p in self.learnt if p.grad is not None)
        stats = self.world.gather_vector([share, meter.bytes_sent - sent, finite, *flags])
        loss = float(stats[:, 0].sum())
        if not math.isfinite(loss) or not stats[:, 2].all():
            why = self._why_not_finite(epoch, loss)
            for buffer, kept in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(kept)
            raise RankError(why)  # with the state as it was before the step
        if self.config.clip is not None:
            self._clip(self.config.clip)
        self.optimizer.step()
        if self.part.degrees.in_weight.is_cuda:
            torch.cuda.synchronize()
        if self.world.debug:
            _check_same_weights(self.model, self.world, f"after epoch {epoch + 1} have")
        record: dict[str, Any] = {
            "epoch": epoch,
            "loss": loss,
            "seconds": time.perf_counter() - start,
            "comm_seconds": meter.seconds - waited,
            "bytes_sent": int(stats[:, 1].sum()),
        }
        if drift := self.policy.drift():
            record["drift"] = drift
        return record, stats[:, 3:].amax(0).tolist()

    def _why_not_finite(self, epoch: int, loss: float) -> str:
        remedy = f"try a smaller --lr (now {self.config.lr:g}), or --clip 1"
        if math.isfinite(loss):
            place = first_gradient_not_finite(self.model)
            return f"train: a gradient of epoch {epoch + 1} is not finite; {place}; {remedy}"
        place = first_not_finite(self.model, self.part, Pass(training=True, seed=self.config.seed, step=epoch))
        if FEATURES in place:
            remedy = "build the shards again from features that are finite, or with --nan zero"
        return f"train: the loss of epoch {epoch + 1} is {loss}; {place}; {remedy}"

    def evaluate(self) -> Scores:
        scores = score(self.whole, self.target, self.y, run_model(self.model, self.whole))
        self.world.meter.enter(REST)
        return scores

    def advance(self, scores: Scores | None) -> None:
        """Let the scheduler take an epoch's scores, None where it was not evaluated."""
        if self.scheduler is None:
            return
        if not isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step()
        elif scores is not None and "val" in scores:
            self.scheduler.step(scores["val"][self.target.metric])

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

    def snapshot(self) -> Snapshot:
        """Everything that the next step hangs on (a collective where rows are under way)."""
        optimizer = self.optimizer.state_dict()
        rows: dict[str, Tensor] = {}
        if self.table is not None:
            place, shape = len(self.parameters), self.table.shape
            kept = optimizer["state"].get(place, {})
            rows = {f"optimizer.{name}": value for name, value in kept.items() if value.shape == shape}
            rest = {name: value for name, value in kept.items() if value.shape != shape}
            optimizer = optimizer | {"state": optimizer["state"] | {place: rest}}
            rows["features"] = self.table.detach()
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        local = {"random": torch.get_rng_state(), "policy": self.policy.state(), "policy_first": self.policy.first}
        return Snapshot(
            replicated={"model": self.model.state_dict(), "optimizer": optimizer, "scheduler": scheduler},
            rows=rows,
            ids=self.part.whole.owned_global,
            local=local,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Take what ``snapshot`` gave. Raises ``ValueError`` where it is not that of such a trainer."""
        state, rows, local = snapshot.replicated, snapshot.rows, snapshot.local
        try:
            self.model.load_state_dict(state["model"])
            optimizer = state["optimizer"]
            if self.table is not None:
                place = len(self.parameters)
                name = "optimizer."
                kept = {key.removeprefix(name): value for key, value in rows.items() if key.startswith(name)}
                optimizer = optimizer | {"state": optimizer["state"] | {place: optimizer["state"][place] | kept}}
                with torch.no_grad():
                    self.table.copy_(rows["features"])
            self.optimizer.load_state_dict(optimizer)
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
            if local:
                torch.set_rng_state(local["random"])
                self.policy.load_state(local["policy"])
                self.policy.first = local["policy_first"]
        except (RuntimeError, KeyError, TypeError, AttributeError, IndexError) as e:
            raise ValueError(f"the checkpoint does not fit the model: {e}") from None

    def _every_row(self, rows: Tensor) -> Tensor | None:
        return gather_in_order(rows, self.part.whole.owned_global, self.part.num_nodes_global, self.world)

    def predicted_ledger(self, steps: Sequence[int] = (0,)) -> Ledger | None:
        """Bytes of message rows that ``steps`` send from this rank, by layer, direction and rank, from the plans alone.
        None for a model whose widths are not known, and where it hangs on the rows
        themselves."""
        exchanges = self._exchanges()
        if exchanges is None:
            return None
        recomputed = self.model.recomputed if isinstance(self.model, GNN) else frozenset()
        first, recipe, itemsize = self.policy.first or 0, self.policy.recipe, self._itemsize
        total: Ledger = {}
        for step in steps:
            for layer, (crossing, route) in exchanges.items():
                found = recipe.layer_ledger(
                    layer,
                    crossing,
                    route.counts,
                    step=step,
                    fills=step == first,
                    itemsize=itemsize,
                    blocks=column_blocks(crossing.width, itemsize, route.most_rows, self.world.exchange_bytes),
                )
                if found is None:
                    return None
                if layer in recomputed and (layer, "forward") in found:
                    found[layer, "recompute"] = found[layer, "forward"]
                for tag, line in found.items():
                    before = total.get(tag, [0] * len(line))
                    total[tag] = [a + b for a, b in zip(before, line, strict=True)]
        return total

    def cache_bytes(self) -> int | None:
        """Memory that the exchange policy's caches will hold on this rank; None where the model's widths are not
        known."""
        exchanges, recipe = self._exchanges(), self.policy.recipe
        if exchanges is None or self.world.size == 1:
            return None if exchanges is None else 0
        return sum(recipe.cache_bytes(crossing, route.counts, self._itemsize) for crossing, route in exchanges.values())

    @property
    def _itemsize(self) -> int:
        return self.part.whole.dtype.itemsize

    def _exchanges(self) -> dict[int, tuple[Crossing, Route]] | None:
        """By layer, what crosses in a training step, and by which route; None where the model's widths are not known.

        Rows that are cached before dropout cross raw and as wide as the layer's input.
        """
        model, part = self.model, self.part
        if not isinstance(model, GNN) or part.training is None:
            return None
        learned = self.table is not None
        layer0 = _layer0_used(model, part, self.config)
        found = crossings(
            self.config.model,
            model.widths,
            out_heads=self.config.out_heads,
            layer0=layer0,
            sparse_input=isinstance(part.x, SparseRows),
            learned_input=learned,
        )
        out = {}
        for layer, ((plan, _), crossing) in enumerate(zip(part.training, found, strict=True)):
            if not crossing.width:
                continue
            uses: str = model.uses
            if self.policy.recipe.masks_at_receiver and (self.config.dropout if layer else self.config.input_dropout):
                uses, crossing = "halo", Crossing(width=model.widths[layer], backward=layer > 0 or learned)
            out[layer] = crossing, getattr(plan, uses).route
        return out


def _layer0_used(model: GNN, part: GraphPart, config: TrainConfig) -> Layer0:
    """How layer 0 gets its rows in training: their aggregate serves linear layers of undropped features only."""
    once_serves = not config.input_dropout and model.uses == "linear"
    return "exchange" if part.input.mode == "once" and not once_serves else part.input.mode


def make_trainer(
    shard: Shard,
    config: TrainConfig,
    world: World,
    model: ModelFactory | None = None,
    *,
    layer0: Layer0 | None = None,
) -> Trainer:
    """The trainer of this rank's shard, after every check that can be made before the first step (a collective).

    ``layer0`` is what ``--layer0 auto`` chose when the run began, for one that goes on.
    Raises ``RankError`` on all ranks where an option does not fit the shard or two ranks do not fit each other.
    """
    with world.stage("options"):
        facts = GraphFacts.of_shard(shard)
        check_training(facts, config)
        target = choose_target(facts, config.task, config.metric, config.class_weights == "balanced")
        edge_dim = edge_features_used(config, shard)
        if model is None and config.memory_check:
            _check_room(config, shard, target.outputs, edge_dim)
        net = build_model(config, shard.num_features, target.outputs, model, edge_dim=edge_dim).to(world.device)
    with world.stage("kernels"):
        check_kernels(world.device, getattr(torch, config.dtype))
    _check_same_weights(net, world)
    world = dataclasses.replace(world, exchange_bytes=config.exchange_bytes, debug=config.debug)
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
    part = part.with_layer0(layer0 if layer0 and config.layer0 == "auto" else _choose_layer0(config, net, part))
    if whole is not None and part.input.mode == "once":
        whole = whole.with_layer0("once")
    if isinstance(net, GNN):
        sparse = isinstance(part.x, SparseRows)
        net.recomputed = recomputed_layers(config, net.widths, layer0=_layer0_used(net, part, config), sparse=sparse)
    trainer = Trainer(config, part, target, net, whole)
    _check_policy(trainer)
    return trainer


def _check_room(config: TrainConfig, shard: Shard, outputs: int, edge_dim: int) -> None:
    """Raise ``ValueError`` where what is learnt cannot be in memory, before any of it is there."""
    rows, features = shard.num_owned if shard.learned_features else 0, shard.num_features
    need = learnt_bytes(config, features=features, outputs=outputs, edge_features=edge_dim, table_rows=rows)
    room = available_memory()
    if need > room:
        raise ValueError(
            f"a {config.model} of {features:,} features, {outputs:,} outputs and --hidden {config.hidden} takes "
            f"{need / 2**30:,.1f} GiB a rank for its weights{' and its table' if rows else ''}, gradients and "
            f"optimiser state, and {room / 2**30:,.1f} GiB are available; take fewer features or a smaller --hidden, "
            f"or start anyway with --no-memory-check"
        )


def _check_policy(trainer: Trainer) -> None:
    """Make the plans that the exchange policy uses besides, and refuse what it cannot do (a collective)."""
    config = trainer.config
    if trainer.policy.recipe.masks_at_receiver and config.input_dropout and isinstance(trainer.part.x, SparseRows):
        raise RankError(
            f"options: --refresh {config.refresh} with --input-dropout {config.input_dropout:g}: sparse features "
            f"cross as mapped rows, to which dropout cannot be applied later; leave it 0, or add --freeze-masks"
        )
    trainer.cache_bytes()


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


def _check_same_weights(model: nn.Module, world: World, have: str = "start from") -> None:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    digests = world.gather_json(digest.hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise RankError(
            f"model: ranks 0 and {different[0]} {have} different weights; a model must draw its initial weights from "
            f"torch's generator alone, and keep nothing that only one rank has"
        )
