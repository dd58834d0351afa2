"""Targets, losses and scores on one rank, against scikit-learn and torch's own means."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss, mean_absolute_error, mean_squared_error, roc_auc_score
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn
from torch.nn import functional as F

from fullgraph.checks import GraphFacts
from fullgraph.config import Metric, Task
from fullgraph.metrics import LOWER_IS_BETTER, Target, balance_classes, choose_target, fit_labels, run_model, score
from fullgraph.view import Degrees, GraphPart, Input, LayerView
from fullgraph.world import World

N = 200
SPLITS = ("train", "val", "test")


def part(y: Tensor | None, *, masks: dict[str, Tensor] | None = None, x: Tensor | None = None) -> GraphPart:
    """A part whose scores can be taken; its plan is never used."""
    n = N if y is None else y.shape[0]
    column = torch.ones(n, 1, dtype=torch.float64)
    if masks is None:
        masks = {name: torch.arange(n) % 3 == i for i, name in enumerate(SPLITS)}
    never = cast(Any, None)
    degrees = Degrees(column, 0 * column)
    features = Input(column if x is None else x, "exchange", never, degrees, degrees, never)
    whole = cast(Any, Whole(n))
    return GraphPart(World(), features, y, masks, whole, ((whole, True),) * 2, n)


@dataclasses.dataclass(frozen=True)
class Whole:
    """Stands for the plan of a part."""

    n_in: int
    dtype: torch.dtype = torch.float64


def labelled(task: Task | None, *, splits: int = 1) -> GraphFacts:
    """A graph of which little is known but the kind of its labels."""
    return GraphFacts(
        name="g",
        task=task,
        num_classes=4,
        num_splits=splits,
        num_features=1,
        learned_features=0,
        num_edge_features=0,
    )


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def classes(count: int, seed: int = 1) -> Tensor:
    return torch.randint(0, count, (N,), generator=torch.Generator().manual_seed(seed))


SINGLE = Target("single-label", 4, "accuracy")
MULTI = Target("multi-label", 5, "micro_f1")
REGRESSION = Target("regression", 2, "mae")


# --- losses ---


@pytest.mark.parametrize("class_weight", [None, torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)])
def test_loss_over_weight_is_torchs_mean(class_weight: Tensor | None) -> None:
    target, y = dataclasses.replace(SINGLE, class_weight=class_weight), classes(4)
    logits = draw(N, 4)
    found = target.per_node(logits, y) / target.weight(y)
    torch.testing.assert_close(found, F.cross_entropy(logits, y, weight=class_weight))


def test_loss_of_columns_over_weight_is_torchs_mean() -> None:
    y = (draw(N, 5, seed=2) > 0.5).double()
    found = MULTI.per_node(draw(N, 5), y) / MULTI.weight(y)
    torch.testing.assert_close(found, F.binary_cross_entropy_with_logits(draw(N, 5), y))
    y = draw(N, 2, seed=3)
    found = REGRESSION.per_node(draw(N, 2), y) / REGRESSION.weight(y)
    torch.testing.assert_close(found, F.mse_loss(draw(N, 2), y))


@pytest.mark.parametrize("target", [SINGLE, MULTI, REGRESSION], ids=lambda target: target.task)
def test_a_rank_without_nodes_adds_nothing_and_has_a_gradient(target: Target) -> None:
    logits = draw(0, target.outputs).requires_grad_()
    y = classes(4)[:0] if target is SINGLE else draw(0, target.outputs)
    loss = target.per_node(logits, y)
    loss.backward()
    assert (float(loss.detach()), target.weight(y)) == (0.0, 0.0)
    assert logits.grad is not None


# --- which target ---

LABELS: dict[Task, Tensor] = {
    "single-label": classes(4),
    "multi-label": (draw(N, 4) > 0).double(),
    "regression": draw(N, 4),
}


@pytest.mark.parametrize(
    ("labels", "task", "metric", "expected"),
    [
        ("single-label", None, None, ("single-label", 4, "accuracy")),
        ("single-label", "single-label", "micro_f1", ("single-label", 4, "micro_f1")),
        ("single-label", "regression", None, ("regression", 1, "mae")),
        ("multi-label", None, None, ("multi-label", 4, "micro_f1")),
        ("multi-label", None, "roc_auc", ("multi-label", 4, "roc_auc")),
        ("regression", None, None, ("regression", 4, "mae")),
    ],
)
def test_target_follows_labels_and_options(
    labels: Task, task: Task | None, metric: Metric | None, expected: tuple[str, int, str]
) -> None:
    target = choose_target(labelled(labels), task, metric, False)
    assert (target.task, target.outputs, target.metric) == expected
    assert target.class_weight is None


@pytest.mark.parametrize(
    ("labels", "task", "metric", "balanced", "message"),
    [
        (None, None, None, False, "has no labels, which training and scores need"),
        ("single-label", "multi-label", None, False, "--task multi-label does not fit the graph's labels"),
        ("regression", "single-label", None, False, "--task single-label does not fit .* which are regression"),
        ("multi-label", None, "accuracy", False, "--metric accuracy does not fit a multi-label task; it has micro_f1"),
        ("regression", None, "roc_auc", False, "--metric roc_auc does not fit a regression task; it has mae"),
        ("single-label", None, "mae", False, "--metric mae does not fit a single-label task"),
        ("single-label", None, "roc_auc", False, "--metric roc_auc needs 2 classes .* the graph has 4 classes"),
        ("multi-label", None, None, True, "--class-weights balanced is for single-label targets; these are multi"),
    ],
)
def test_an_option_that_does_not_fit_the_labels_is_refused(
    labels: Task | None, task: Task | None, metric: Metric | None, balanced: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose_target(labelled(labels), task, metric, balanced)


def test_a_graph_without_a_split_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="has no split into train, val and test; build it again with"):
        choose_target(labelled("single-label", splits=0))


def test_integer_labels_become_a_column_for_regression_only() -> None:
    here = part(classes(4))
    column = fit_labels(here, Target("regression", 1, "mae"))
    assert column.dtype == torch.float64
    assert torch.equal(column[:, 0].long(), classes(4))
    assert fit_labels(here, SINGLE) is here.y


def test_balanced_class_weights_are_those_of_scikit_learn() -> None:
    here = part(classes(4) * classes(2, seed=5))  # class 0 most often
    assert here.y is not None
    found = balance_classes(SINGLE, here).class_weight
    assert found is not None
    y = here.y[here.masks["train"]].numpy()
    np.testing.assert_allclose(found.numpy(), compute_class_weight("balanced", classes=np.arange(4), y=y), rtol=1e-12)


def test_a_class_without_training_nodes_weighs_nothing() -> None:
    y = torch.tensor([0, 0, 0, 2])
    masks = {"train": torch.tensor([True] * 4)}
    target = balance_classes(Target("single-label", 3, "accuracy"), part(y, masks=masks))
    assert target.class_weight is not None
    torch.testing.assert_close(target.class_weight.double(), torch.tensor([4 / 9, 0.0, 4 / 3], dtype=torch.float64))


# --- scores ---


def of_split(name: str, *tensors: Tensor) -> list[np.ndarray]:  # type: ignore[type-arg]
    return [t[torch.arange(t.shape[0]) % 3 == SPLITS.index(name)].numpy() for t in tensors]


@pytest.mark.parametrize("name", SPLITS)
def test_single_label_scores(name: str) -> None:
    y, logits = classes(4), draw(N, 4)
    found = score(part(y), SINGLE, y, logits)[name]
    true, guess = of_split(name, y, logits)
    assert found["accuracy"] == pytest.approx(accuracy_score(true, guess.argmax(1)))
    assert found["micro_f1"] == pytest.approx(f1_score(true, guess.argmax(1), average="micro"))
    assert found["loss"] == pytest.approx(log_loss(true, torch.from_numpy(guess).softmax(1).numpy(), labels=range(4)))
    assert set(found) == {"accuracy", "micro_f1", "loss"}


@pytest.mark.parametrize("name", SPLITS)
def test_multi_label_scores(name: str) -> None:
    y, logits = (draw(N, 5, seed=2) > 0.8).double(), draw(N, 5)
    target = dataclasses.replace(MULTI, metric="roc_auc")
    found = score(part(y), target, y, logits)[name]
    true, guess = of_split(name, y, logits)
    assert found["micro_f1"] == pytest.approx(f1_score(true, guess > 0, average="micro"))
    assert found["roc_auc"] == pytest.approx(roc_auc_score(true, guess, average="macro"))
    assert found["loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(*map(torch.tensor, (guess, true)))))
    assert "roc_auc" not in score(part(y), MULTI, y, logits)[name]


@pytest.mark.parametrize("name", SPLITS)
def test_regression_scores(name: str) -> None:
    y, logits = draw(N, 2, seed=3), draw(N, 2)
    found = score(part(y), REGRESSION, y, logits)[name]
    true, guess = of_split(name, y, logits)
    assert found == {
        "loss": pytest.approx(mean_squared_error(true, guess)),
        "mae": pytest.approx(mean_absolute_error(true, guess)),
    }


@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_two_classes_have_the_exact_roc_auc_ties_counted_half(levels: int) -> None:
    y = classes(2)
    logits = torch.stack([torch.zeros(N), (draw(N) * levels / 5).round() * 0.125], dim=1).double() + 0.5
    found = score(part(y), Target("single-label", 2, "accuracy"), y, logits)
    for name in SPLITS:
        true, guess = of_split(name, y, logits[:, 1] - logits[:, 0])
        assert found[name]["roc_auc"] == pytest.approx(roc_auc_score(true, guess), abs=1e-12)
        positive, negative = guess[true == 1], guess[true == 0]
        pairs = np.sign(positive[:, None] - negative[None]) / 2 + 0.5
        assert found[name]["roc_auc"] == pytest.approx(pairs.mean(), abs=1e-12)


def test_scores_of_constant_outputs() -> None:
    y = classes(2)
    found = score(part(y), Target("single-label", 2, "roc_auc"), y, torch.zeros(N, 2))["val"]
    assert found["roc_auc"] == 0.5
    assert found["loss"] == pytest.approx(math.log(2))


def test_roc_auc_leaves_out_columns_of_one_kind() -> None:
    y, logits = (draw(N, 3, seed=2) > 0).double(), draw(N, 3)
    y[:, 1] = 0
    target = Target("multi-label", 3, "roc_auc")
    found = score(part(y), target, y, logits)["test"]["roc_auc"]
    true, guess = of_split("test", y, logits)
    assert found == pytest.approx(roc_auc_score(true[:, [0, 2]], guess[:, [0, 2]]))
    assert math.isnan(score(part(0 * y), target, 0 * y, logits)["test"]["roc_auc"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_roc_auc_of_outputs_that_are_not_finite_is_undefined(value: float) -> None:
    y, logits = classes(2), draw(N, 2)
    logits[2, 1] = value
    found = score(part(y), Target("single-label", 2, "roc_auc"), y, logits)
    assert math.isnan(found["test"]["roc_auc"])
    assert math.isfinite(found["val"]["roc_auc"])


def test_micro_f1_without_any_positive_is_zero() -> None:
    y, logits = torch.zeros(N, 5, dtype=torch.float64), torch.full((N, 5), -1.0, dtype=torch.float64)
    assert score(part(y), MULTI, y, logits)["val"]["micro_f1"] == 0.0


def test_a_split_without_nodes_has_no_entry() -> None:
    y, none = classes(4), torch.zeros(N, dtype=torch.bool)
    masks = {"train": ~none, "val": none, "test": none}
    found = score(part(y, masks=masks), SINGLE, y, draw(N, 4))
    assert set(found) == {"train"}
    assert score(part(y, masks=dict.fromkeys(SPLITS, none)), Target("single-label", 2, "roc_auc"), y, draw(N, 2)) == {}


def test_loss_is_weighted_by_class_and_the_metric_is_not() -> None:
    weight = torch.tensor([0.0, 3.0, 1.0, 0.5], dtype=torch.float64)
    y, logits = classes(4), draw(N, 4)
    found = score(part(y), dataclasses.replace(SINGLE, class_weight=weight), y, logits)["val"]
    true, guess = (torch.from_numpy(a) for a in of_split("val", y, logits))
    assert found["loss"] == pytest.approx(float(F.cross_entropy(guess, true, weight=weight)))
    assert found["accuracy"] == pytest.approx(float((guess.argmax(1) == true).double().mean()))


def test_loss_of_a_split_whose_classes_all_weigh_nothing_is_undefined() -> None:
    y = torch.zeros(N, dtype=torch.int64)
    weightless = dataclasses.replace(SINGLE, class_weight=torch.tensor([0.0, 1.0, 1.0, 1.0]))
    found = score(part(y), weightless, y, torch.zeros(N, 4))["val"]
    assert math.isnan(found["loss"])
    assert found["accuracy"] == 1.0


def test_errors_and_losses_are_better_low() -> None:
    assert {"mae", "loss"} == LOWER_IS_BETTER


# --- prediction ---


class Watcher(nn.Module):
    """Notes in which mode it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 3, dtype=torch.float64)
        self.seen: list[tuple[bool, int, list[bool]]] = []

    def forward(self, x: Tensor, views: list[LayerView]) -> Tensor:
        self.seen.append((self.training, len(views), [view.training for view in views]))
        return views[0].dropout(self.linear(x), 0.9)


def test_the_model_runs_without_dropout_or_gradients() -> None:
    model, here = Watcher(), part(classes(3), x=draw(N, 1))
    out = run_model(model, here)
    assert model.seen == [(False, 2, [False, False])]
    assert not out.requires_grad
    assert torch.equal(out, model.linear(here.x).detach())
