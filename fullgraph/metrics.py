"""Targets, losses and exact scores: sums over each rank's nodes over global counts."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullgraph.checks import METRICS, GraphFacts, check_target
from fullgraph.config import Metric, Task
from fullgraph.view import GraphPart, Pass

Scores = dict[str, dict[str, float]]
"""split -> metric -> value"""

LOWER_IS_BETTER: frozenset[str] = frozenset({"mae", "loss"})


@dataclass(frozen=True, eq=False)
class Target:
    """What is learnt: the task, its number of outputs, and the metric that picks the best epoch."""

    task: Task
    outputs: int
    metric: Metric
    class_weight: Tensor | None = None
    """[C] weight of each class in the loss."""

    def per_node(self, logits: Tensor, y: Tensor) -> Tensor:
        """Summed loss of rows ``logits`` [m, C] against labels ``y``; divide by the sum over ranks of ``weight(y)``."""
        if self.task == "single-label":
            return F.cross_entropy(logits, y, weight=self.class_weight, reduction="sum")
        if self.task == "multi-label":
            return F.binary_cross_entropy_with_logits(logits, y, reduction="sum")
        return F.mse_loss(logits, y, reduction="sum")

    def weight(self, y: Tensor) -> float:
        """The weight of labels ``y`` in the loss's mean: their number (times columns), or their classes' weights."""
        if self.task != "single-label":
            return float(y.numel())
        return float(y.numel()) if self.class_weight is None else float(self.class_weight[y].sum())


def choose_target(
    facts: GraphFacts, task: Task | None = None, metric: Metric | None = None, balanced: bool = False
) -> Target:
    """The target that the labels and the options ask for; ``balanced`` says that class weights will be asked for.

    Raises ``ValueError`` where an option does not fit the labels.
    """
    check_target(facts, task, metric, balanced)
    assert facts.task is not None
    labels, num_classes = facts.task, facts.num_classes
    task = task or labels
    outputs = 1 if task == "regression" and labels == "single-label" else num_classes
    return Target(task, outputs, metric or METRICS[task][0])


def balance_classes(target: Target, part: GraphPart) -> Target:
    """``target`` with class weights N_train / (classes * training nodes of the class) (a collective)."""
    assert part.y is not None
    counts = torch.bincount(part.y[part.masks["train"]], minlength=target.outputs).to(torch.float64)
    counts = part.world.gather_vector(counts.tolist()).sum(0)
    weight = torch.where(counts > 0, counts.sum() / (target.outputs * counts.clamp(min=1)), 0.0)
    return dataclasses.replace(target, class_weight=weight.to(part.degrees.in_weight))


def fit_labels(part: GraphPart, target: Target) -> Tensor:
    """``part.y`` as the target's loss takes it: regression on integer labels gets a floating column."""
    assert part.y is not None
    if target.task == "regression" and part.y.ndim == 1:
        return part.y.to(part.degrees.in_weight.dtype)[:, None]
    return part.y


def run_model(model: nn.Module, part: GraphPart) -> Tensor:
    """Exact outputs [n, C] of the owned nodes, without dropout (a collective)."""
    model.eval()
    with torch.no_grad():
        return part.run(model, Pass(training=False))


def score(part: GraphPart, target: Target, y: Tensor, logits: Tensor) -> Scores:
    """Loss and metrics of each split from global sums (a collective); a split without nodes has no entry.

    ROC-AUC is computed for two classes, and for multi-label targets where it is the chosen metric, from the gathered
    outputs and labels of the split alone; classes of one kind only are left out of its mean.
    """
    splits = list(part.masks)
    rows: list[float] = []
    for name in splits:
        mask = part.masks[name]
        rows += _sums(target, logits[mask], y[mask])
    totals = part.world.gather_vector(rows).sum(0).view(len(splits), -1).tolist()
    out: Scores = {}
    for name, (nodes, weight, loss, a, b) in zip(splits, totals, strict=True):
        if nodes == 0:
            continue
        values = {"loss": loss / weight if weight else math.nan}
        if target.task == "single-label":
            values |= {"accuracy": a / nodes, "micro_f1": a / nodes}
        elif target.task == "multi-label":
            values["micro_f1"] = 2 * a / (2 * a + b) if a + b else 0.0
        else:
            values["mae"] = a / weight
        out[name] = values
    if target.metric == "roc_auc" or (target.task == "single-label" and target.outputs == 2):
        for name in out:
            out[name]["roc_auc"] = _roc_auc(part, target, logits[part.masks[name]], y[part.masks[name]])
    return out


def _sums(target: Target, logits: Tensor, y: Tensor) -> list[float]:
    """[nodes, weight, loss, a, b]: right ones; true positives and false ones; or absolute errors."""
    a = b = 0.0
    if target.task == "single-label":
        a = float((logits.argmax(1) == y).sum())
    elif target.task == "multi-label":
        positive, true = logits > 0, y > 0.5
        a, b = float((positive & true).sum()), float((positive ^ true).sum())
    else:
        a = float((logits - y).abs().sum())
    return [float(logits.shape[0]), target.weight(y), float(target.per_node(logits, y)), a, b]


def _roc_auc(part: GraphPart, target: Target, logits: Tensor, y: Tensor) -> float:
    if target.task == "single-label":
        logits, y = logits[:, 1:] - logits[:, :1], y[:, None]
    gathered = part.world.gather_rows(torch.cat([logits.double(), y.double()], dim=1))
    value = math.nan
    if part.world.rank == 0 and bool(gathered.isfinite().all()):
        from sklearn.metrics import roc_auc_score  # here: it takes as long to import as torch

        width = gathered.shape[1] // 2
        columns = [(gathered[:, i].numpy(), gathered[:, width + i].numpy()) for i in range(width)]
        areas = [float(roc_auc_score(true, guess)) for guess, true in columns if 0 < true.sum() < len(true)]
        value = sum(areas) / len(areas) if areas else math.nan
    return float(part.world.gather_vector([value])[0, 0])
