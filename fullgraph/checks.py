"""What a command asks of a graph and of a run, checked against their facts: before any rank starts by the manifest,
and again by each rank's shard.

Every function raises ``ValueError`` naming flag or file, value, what was expected and the remedy.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from fullgraph.config import Metric, Task, TrainConfig
from fullgraph.shards import Manifest, Shard
from fullgraph.wording import counted

METRICS: dict[Task, tuple[Metric, ...]] = {
    "single-label": ("accuracy", "micro_f1", "roc_auc"),
    "multi-label": ("micro_f1", "roc_auc"),
    "regression": ("mae",),
}
"""Scores of a task; the first picks the best epoch unless another is asked for."""
OUTPUTS = (".npy", ".h5", ".csv")
"""Endings of files of predictions."""
Kind = Literal["labels", "probabilities", "embeddings"]
"""What is predicted."""
State = Literal["best", "last"]
"""Whose weights: of the best epoch by validation, or of the last."""


@dataclass(frozen=True, kw_only=True)
class GraphFacts:
    """What is known of a graph without its rows."""

    name: str
    task: Task | None
    num_classes: int
    num_splits: int
    num_features: int
    """Columns, learned ones counted."""
    learned_features: int
    num_edge_features: int
    split_counts: tuple[dict[str, Any], ...] = ()
    """Nodes in train, val and test of each split; empty where not known."""

    @classmethod
    def of_shard(cls, shard: Shard) -> GraphFacts:
        return cls(
            name=shard.graph,
            task=shard.task,  # type: ignore[arg-type]
            num_classes=shard.num_classes,
            num_splits=int(shard.train.shape[0]),
            num_features=shard.num_features,
            learned_features=shard.learned_features,
            num_edge_features=shard.num_edge_features,
        )

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> GraphFacts:
        facts = manifest.graph
        return cls(
            name=str(facts.get("name", "graph")),
            task=facts.get("task"),
            num_classes=facts.get("num_classes", 0),
            num_splits=facts.get("num_splits", 0),
            num_features=facts.get("num_features", 0) or facts.get("learned_features", 0),
            learned_features=facts.get("learned_features", 0),
            num_edge_features=facts.get("num_edge_features", 0),
            split_counts=tuple(facts.get("split_counts", ())),
        )


# --------------------------------------------------------------------------------------------------------- training


def check_training(facts: GraphFacts, config: TrainConfig) -> None:
    """Training with these options on this graph is possible as far as its facts tell."""
    check_target(facts, config.task, config.metric, config.class_weights == "balanced")
    check_split(facts, config.split)
    check_features(facts, config)
    if not facts.split_counts:
        return
    nodes = facts.split_counts[config.split]
    if not nodes.get("train"):
        raise ValueError(no_training_nodes(facts, config.split))
    if not nodes.get("val"):
        check_validation(config)


def check_split_named(facts: GraphFacts, named: bool) -> None:
    """Of several splits the command line must name the one to train on."""
    if not named and facts.num_splits > 1:
        raise ValueError(
            f"graph {facts.name} has {facts.num_splits} splits; say which one to train on: --split 0 to "
            f"{facts.num_splits - 1}"
        )


def no_training_nodes(facts: GraphFacts, split: int) -> str:
    remedy = "take another --split, or build it again" if facts.num_splits > 1 else "build it again"
    return f"split {split} of graph {facts.name} has no training nodes; {remedy} with --random-split"


def check_validation(config: TrainConfig) -> None:
    """No option needs validation nodes, of which the split has none."""
    if config.patience is not None or config.scheduler == "plateau":
        flag = f"--patience {config.patience}" if config.patience is not None else "--scheduler plateau"
        raise ValueError(f"{flag} needs validation nodes, and split {config.split} has none; leave it out")


def check_split(facts: GraphFacts, split: int) -> None:
    if not isinstance(split, int) or isinstance(split, bool):
        raise ValueError(f"--split {split!r}: expected a whole number")
    if not 0 <= split < max(facts.num_splits, 1):
        there = counted(facts.num_splits, "split")
        expected = "0" if facts.num_splits == 1 else f"0 to {facts.num_splits - 1}"
        raise ValueError(f"--split {split}: graph {facts.name} has {there}; expected {expected}")


def check_target(facts: GraphFacts, task: Task | None, metric: Metric | None, balanced: bool = False) -> None:
    """The labels can be the task's target, scored by the metric."""
    labels = facts.task
    if labels is None:
        raise ValueError(
            f"graph {facts.name} has no labels, which training and scores need; build it again with some: --labels FILE"
        )
    if not facts.num_splits:
        raise ValueError(
            f"graph {facts.name} has no split into train, val and test; build it again with --random-split or --splits"
        )
    task = task or labels
    if task != labels and not (task == "regression" and labels == "single-label"):
        raise ValueError(f"--task {task} does not fit the graph's labels, which are {labels}")
    if metric is not None and metric not in METRICS[task]:
        raise ValueError(f"--metric {metric} does not fit a {task} task; it has {', '.join(METRICS[task])}")
    if metric == "roc_auc" and task == "single-label" and facts.num_classes != 2:
        raise ValueError(
            f"--metric roc_auc needs 2 classes or multi-label targets; the graph has {facts.num_classes} classes"
        )
    if balanced and task != "single-label":
        raise ValueError(f"--class-weights balanced is for single-label targets; these are {task}")


def check_features(facts: GraphFacts, config: TrainConfig) -> None:
    """There are features, and where they are learned no option asks for others."""
    if facts.num_features == 0:
        raise ValueError(
            f"graph {facts.name} has no node features; build it again with some: --features FILE, degree, onehot, "
            f"random:K or learned:K"
        )
    if not facts.learned_features:
        return
    learned = f"the {facts.learned_features} features of graph {facts.name} are learned"
    if config.inductive:
        raise ValueError(f"--inductive: {learned}, which only nodes that are trained on can have; build it with others")
    if config.feature_norm != "none":
        raise ValueError(f"--feature-norm {config.feature_norm}: {learned}; leave the option out")
    if config.layer0 not in ("auto", "exchange"):
        raise ValueError(f"--layer0 {config.layer0}: {learned} and change in every step; leave the option out")


_BFLOAT16_MAX = (2 - 2**-7) * 2.0**127
_IN_SHARDS = {"x": "features", "edge_x": "edge features", "edge_weight": "edge weights", "y": "targets"}


def check_range(shard: Shard, dtype: str) -> None:
    """No number of the shard, and no node's sum of edge weights, is beyond what the run's type holds."""
    if dtype == "float64":
        return
    end = float(np.finfo(np.float32).max) if dtype == "float32" else _BFLOAT16_MAX
    for field, what in (*_IN_SHARDS.items(), ("in_weight", "sums of edge weights into a node")):
        value = getattr(shard, field)
        values = value.data if isinstance(value, sp.csr_array) else value
        if values is None or values.dtype != np.float64 or not values.size:
            continue
        largest = _largest(values)
        if end < largest < np.inf:
            raise ValueError(
                f"{what} of graph {shard.graph} (part {shard.part}) go up to {largest:.3g}, and {dtype} ends at "
                f"{end:.3g}: --dtype float64 holds them, or scale them and build it again"
            )


def _largest(values: NDArray[Any]) -> float:
    """The largest magnitude among the numbers that are finite."""
    bounds = float(np.nanmax(values)), float(np.nanmin(values))
    if not np.isfinite(bounds).all():
        values = values[np.isfinite(values)]
        bounds = (float(values.max()), float(values.min())) if values.size else (0.0, 0.0)
    return max(abs(bound) for bound in bounds)


def check_run_folder(path: Path) -> None:
    """A run may be written to the folder: it is new or empty."""
    if (path / "config.json").exists():
        raise ValueError(f"{path} already holds a run; name another folder with --run, or remove it first")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty; name another folder with --run")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; name a folder with --run")


# ------------------------------------------------------------------------------------------------- a finished run


def read_config(run: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """(options of the run, everything in its config.json)."""
    path = run / "config.json"
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{run} is not a run folder: it has no config.json; name one with --run") from None
    except ValueError as e:
        raise ValueError(f"{path} is not JSON: {e}") from None
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds {type(record).__name__}; expected an object")
    # What runs were without before there was such a thing.
    record = dict[str, Any](learned_features=0, edge_features_used=0, graph_id="", graph={}) | record
    kinds: dict[str, type] = dict.fromkeys(("features", "outputs", "learned_features", "edge_features_used"), int)
    kinds |= dict.fromkeys(("task", "model_name", "graph_id"), str) | {"graph": dict}
    for name, kind in kinds.items():
        if type(record.get(name)) is not kind:
            raise ValueError(f"{path}: {name} is {record.get(name)!r}; expected {kind.__name__}")
    try:
        config = TrainConfig(**{name: value for name, value in record.items() if name in fields})
    except (TypeError, ValueError) as e:
        raise ValueError(f"{path}: {e}") from None
    if record["model_name"] != config.model:
        raise ValueError(
            f"{run} holds a model of the user's own, {record['model_name']}; predict with it from Python: "
            f"fullgraph.load(DIR, world=world).run(model, ...)"
        )
    return config, record


def state_path(run: Path, state: str) -> Path:
    """Where a run keeps a state."""
    if state not in get_args(State):
        raise ValueError(f"state is {state!r}; expected {' or '.join(get_args(State))}")
    return run / f"{state}.pt"


def check_state(path: Path) -> None:
    if not path.exists():
        raise ValueError(f"{path} does not exist; the run did not end, or this is not its folder")


def check_fits(run: Path, folder: Path, record: dict[str, Any], facts: GraphFacts, graph_id: str) -> None:
    """The model of ``run`` can be applied to the graph in ``folder``."""
    if record["learned_features"] and record["graph_id"] != graph_id:
        raise ValueError(
            f"the model in {run} learned a row of features for each node of the graph it was trained on, so there is "
            f"none for the nodes of {folder}, which is another graph; predict on shards of the same graph (in any "
            f"number of parts), or train on one that has features of its own"
        )
    if record["graph"].get("onehot") and record["graph_id"] != graph_id:
        raise ValueError(
            f"the features that the model in {run} takes are one-hot, a column for each node of the graph it was "
            f"trained on, so they say nothing of the nodes of {folder}, which is another graph; predict on shards "
            f"of the same graph (in any number of parts), or train on features that both "
            f"graphs have (--features degree, or a file)"
        )
    taken = _features(record["features"], record["learned_features"])
    held = _features(facts.num_features, facts.learned_features)
    if taken != held:
        raise ValueError(
            f"the model in {run} takes {taken} features, but {folder} holds {held}; predict on a graph with the "
            f"features it was trained on"
        )
    if record["edge_features_used"] not in (0, facts.num_edge_features):
        raise ValueError(
            f"the model in {run} takes {record['edge_features_used']} edge features, but {folder} holds "
            f"{facts.num_edge_features or 'none'}; predict on a graph with the edge features it was trained on"
        )


def _features(count: int, learned: int) -> str:
    return f"{count} learned" if learned else str(count or "none")


def class_names(record: dict[str, Any]) -> list[int | str] | None:
    """The user's own labels of the classes of the graph that a run was trained on, where they are not 0..C-1."""
    names = record["graph"].get("class_names")
    well = isinstance(names, list) and len({type(name) for name in names}) == 1 and type(names[0]) in (int, str)
    return names if well and len(names) >= record["outputs"] and record["task"] != "regression" else None


def match_classes(run: Path, folder: Path, record: dict[str, Any], facts: dict[str, Any]) -> list[int] | None:
    """[C] the model's class for each class of the graph in ``folder``, of which these are the manifest's facts: the one
    of the same name, or number where it has none; -1 for a class without nodes that the model does not know. None where
    each is its own, and for a regression, which has none."""
    task, labels = record["task"], facts.get("task")
    if task == "regression" or labels is None:
        return None
    if task != labels:
        raise ValueError(
            f"the model in {run} predicts {task} classes, but the labels of {folder} are {labels}; build it with "
            f"labels of the same kind (--task)"
        )
    mine: list[Any] = class_names(record) or list(range(record["outputs"]))
    theirs: list[Any] = facts.get("class_names") or list(range(facts.get("num_classes", 0)))
    place = {str(name): index for index, name in enumerate(mine)}
    matched = [place.get(str(name), -1) for name in theirs[: facts.get("num_classes", 0)]]
    counts = facts.get("label_counts") if task == "single-label" else None
    strangers = [
        str(theirs[index])
        for index, to in enumerate(matched)
        if to < 0 and (not isinstance(counts, list) or index >= len(counts) or counts[index])
    ]
    if strangers:
        there = counted(len(strangers), "class", "classes")
        raise ValueError(
            f"{there} of {folder} ({_some(strangers)}) {'is' if len(strangers) == 1 else 'are'} none of the model in "
            f"{run}, which knows {_some(mine)}; build {folder} with labels of the same names, or without labels on "
            f"those nodes"
        )
    return None if matched == list(range(len(matched))) and len(matched) == record["outputs"] else matched


def _some(names: list[Any]) -> str:
    return ", ".join(map(str, names[:5])) + (", ..." if len(names) > 5 else "")


def check_kind(kind: str, task: str | None = None) -> None:
    """There is such a kind of predictions, and for the task, where that is known."""
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}; expected {', '.join(get_args(Kind))}")
    if kind == "probabilities" and task == "regression":
        raise ValueError("--probabilities: a regression model has none; leave it out")


def check_confusion(asked: bool, task: str) -> None:
    if asked and task != "single-label":
        raise ValueError(f"--confusion is for single-label targets; these are {task}")


def check_output(out: Path) -> None:
    if out.suffix not in OUTPUTS:
        raise ValueError(f"--out {out}: the name must end in {', '.join(OUTPUTS)}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: the folder {out.parent} does not exist")
    if out.is_dir():
        raise ValueError(f"--out {out}: is a folder; name a file")
    if not os.access(out.absolute().parent, os.W_OK):
        raise ValueError(f"--out {out}: the folder {out.parent} may not be written to")
