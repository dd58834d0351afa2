"""What a trained model says: predictions of every node in the user's order, and scores with a confusion table.

Rows reach rank 0, which alone writes, in blocks of bounded size.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from fullgraph.checks import (
    OUTPUTS,
    GraphFacts,
    Kind,
    State,
    check_confusion,
    check_fits,
    check_kind,
    check_output,
    check_split,
    class_names,
    match_classes,
    read_config,
    state_path,
)
from fullgraph.config import TrainConfig
from fullgraph.files import appears_by_rename
from fullgraph.gather import blocks_in_order
from fullgraph.kernels import SparseRows, at_least_float32
from fullgraph.loading import load_shard
from fullgraph.metrics import Scores, Target, choose_target, fit_labels, run_model, score
from fullgraph.models import GNN, build_model
from fullgraph.runlog import plain, read_state, show
from fullgraph.shards import Manifest, Shard
from fullgraph.view import GraphPart, Pass, make_part
from fullgraph.world import World


@dataclass(frozen=True, eq=False)
class Trained:
    """A run's model on this rank's part of a graph."""

    config: TrainConfig
    model: GNN
    part: GraphPart
    manifest: Manifest
    shard: Shard
    task: str
    outputs: int
    classes: list[int | str] | None
    """The user's own labels of the classes, where they are not 0..C-1."""
    columns: list[int] | None = None
    """Of several labels a node, the outputs that are this graph's labels, where they are not all in their order."""


def load_trained(
    run: str | Path, folder: str | Path, world: World, *, state: State = "best", split: int | None = None
) -> Trained:
    """The model that ``run`` left, on the shards in ``folder``, which may be another graph of the same features unless
    these were learned (a collective). Labels and masks of ``split`` are read only where one is named.

    Raises ``RankError`` on all ranks where the run folder is not whole or its model does not fit the graph.
    """
    run, folder = Path(run), Path(folder)
    with world.stage("run"):
        config, record = read_config(run)
        path = state_path(run, state)
        saved = read_state(path)
    matched: list[int] | None = None
    loaded = load_shard(folder, world)
    manifest, shard = loaded.manifest, loaded.shard
    with world.stage("run"):
        learned, edge_dim = record["learned_features"], record["edge_features_used"]
        check_fits(run, folder, record, GraphFacts.of_shard(shard), manifest.graph_id)
        model = build_model(config, record["features"], record["outputs"], edge_dim=edge_dim)
        assert isinstance(model, GNN)
        try:
            model.load_state_dict(saved["model"])
        except RuntimeError as e:
            raise ValueError(f"{path} does not hold the weights of the model in config.json: {e}") from e
        model.to(world.device).eval()
        if split is not None:
            check_split(GraphFacts.of_shard(shard), split)
            matched = match_classes(run, folder, record, manifest.graph)
    world = dataclasses.replace(world, exchange_bytes=config.exchange_bytes)
    if split is None:
        shard = dataclasses.replace(shard, y=None, task=None, num_classes=0)
    elif matched is not None and record["task"] == "single-label":
        assert shard.y is not None
        y = np.array([*matched, -1])[shard.y]  # the last stands for no label
        shard, matched = dataclasses.replace(shard, y=y, num_classes=record["outputs"]), None
    part = make_part(
        shard,
        world,
        split=split or 0,
        dtype=getattr(torch, config.dtype),
        feature_norm=config.feature_norm,
        kind=config.plan,
        num_layers=config.layers,
        prune=False,
    )
    if part.table is not None:
        with world.stage("run"), torch.no_grad():
            part.table.copy_(_saved_features(saved, path, manifest, learned)[part.whole.owned_global.cpu()])
    return Trained(
        config, model, part, manifest, shard, record["task"], record["outputs"], class_names(record), matched
    )


def _saved_features(saved: dict[str, Any], path: Path, manifest: Manifest, columns: int) -> Tensor:
    """[N, columns] learned features of a state."""
    features, shape = saved.get("features"), (manifest.graph["num_nodes"], columns)
    if not isinstance(features, Tensor) or features.shape != shape:
        found = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"{path}: features is {found}; expected the learned features {list(shape)} of every node")
    return features


# ------------------------------------------------------------------------------------------------------ predictions


def outputs(trained: Trained, kind: Kind = "labels") -> Tensor:
    """This rank's rows, in the order of ``trained.part`` (a collective): class ids int64 [n] (single-label), 0/1 uint8
    [n, C] (multi-label) or values [n, T] (regression); probabilities [n, C]; or the last layer's input [n, hidden]."""
    part, model = trained.part, trained.model
    if kind == "embeddings":
        model.eval()
        with torch.no_grad():
            this_pass = Pass(training=False)
            rows = model.embed(part.rows(part.whole.n_in), part.views(this_pass))
        return at_least_float32(rows.to_dense() if isinstance(rows, SparseRows) else rows.detach())
    logits = run_model(model, part)
    if trained.task == "regression":
        if kind == "probabilities":
            raise ValueError("a regression model has no probabilities")
        return logits
    if trained.task == "multi-label":
        return torch.sigmoid(logits) if kind == "probabilities" else (logits > 0).to(torch.uint8)
    return torch.softmax(logits, 1) if kind == "probabilities" else logits.argmax(1)


def predict(
    folder: str | Path,
    run: str | Path,
    out: str | Path,
    *,
    kind: Kind = "labels",
    state: State = "best",
    world: World | None = None,
) -> Path:
    """Predict every node of the shards in ``folder`` with the model of ``run`` and write them to ``out``.

    Row i is node i of the graph that the shards were built from, and a class is called as the user's labels call it.
    ``.npy`` holds the array alone (the user's ids, where the graph has some, go to ``NAME.ids.npy``); ``.h5`` holds
    ``predictions``, ``ids`` and, where columns are classes that have names, ``classes``; ``.csv`` a line a node, its id
    first. The file appears when it is complete. A collective; rank 0 writes.
    """
    world, out = world or World(), Path(out)
    with world.stage("options"):
        check_kind(kind)
        if world.rank == 0:
            check_output(out)
    trained = load_trained(run, folder, world, state=state)
    with world.stage("options"):
        check_kind(kind, trained.task)
    rows = outputs(trained, kind).cpu()
    if rows.ndim == 1:
        rows = rows[:, None]
    squeeze = kind == "labels" and trained.task == "single-label"
    names = None if trained.classes is None or kind == "embeddings" else np.array(trained.classes)
    dtype = rows.numpy().dtype if names is None or not squeeze else names.dtype
    shard = trained.shard
    stack = contextlib.ExitStack()
    with world.stage("write"):
        if world.rank == 0:
            shape = (shard.num_nodes_global,) if squeeze else (shard.num_nodes_global, rows.shape[1])
            columns = None if squeeze or names is None else names[: rows.shape[1]]
            write = stack.enter_context(_WRITERS[out.suffix](out, shape, dtype, shard.node_ids, columns))
    failure: Exception | None = None
    with stack:
        for start, ids, block in _blocks_in_order(rows, trained, world):
            if world.rank == 0 and failure is None:
                try:
                    values = block[:, 0] if squeeze else block
                    write(start, ids, names[values] if names is not None and squeeze else values)
                except Exception as e:  # rank 0 goes on taking part in the blocks, and tells the others at the end
                    failure = e
        with world.stage("write"):
            if failure is not None:
                raise failure
    return out


def _blocks_in_order(
    rows: Tensor, trained: Trained, world: World
) -> Iterator[tuple[int, NDArray[Any] | None, NDArray[Any]]]:
    """(first node, the user's ids or None, rows) of all nodes in order of global id, on rank 0; on others the same
    number of empty ones."""
    node_ids, ids = trained.shard.node_ids, trained.part.whole.owned_global
    for block in blocks_in_order(rows, ids, trained.shard.num_nodes_global, world):
        names = None if node_ids is None else _exchange_ids(node_ids[block.own], world)
        if names is not None and world.rank == 0:
            by_place = np.empty(names.shape[0], names.dtype)
            by_place[block.places] = names
            names = by_place
        yield block.first, names, block.rows


def _exchange_ids(ids: NDArray[Any], world: World) -> NDArray[Any]:
    """The user's ids of all ranks, in order of rank: small beside the rows."""
    values = [value if isinstance(value, str) else int(value) for value in ids.tolist()]
    gathered = [value for rank in world.gather_json(values) for value in rank]
    return np.array(gathered, dtype=object if any(isinstance(v, str) for v in gathered) else np.int64)


Write = Callable[[int, NDArray[Any] | None, NDArray[Any]], None]
"""(first node, the user's ids or None, rows)"""


@contextlib.contextmanager
def _write_npy(
    out: Path, shape: tuple[int, ...], dtype: np.dtype[Any], node_ids: NDArray[Any] | None, _: NDArray[Any] | None
) -> Iterator[Write]:
    names: list[NDArray[Any]] = []
    with appears_by_rename(out) as temporary, temporary.open("w+b") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)

        def write(start: int, ids: NDArray[Any] | None, block: NDArray[Any]) -> None:
            file.write(np.ascontiguousarray(block).tobytes())
            if ids is not None:
                names.append(ids)

        yield write
    if not names:
        ids_path(out).unlink(missing_ok=True)  # those of other predictions under this name
    else:
        ids = np.concatenate(names)
        with appears_by_rename(ids_path(out)) as temporary, temporary.open("wb") as id_file:
            np.save(id_file, ids.astype(str) if ids.dtype == object else ids, allow_pickle=False)


@contextlib.contextmanager
def _write_h5(
    out: Path,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    node_ids: NDArray[Any] | None,
    columns: NDArray[Any] | None,
) -> Iterator[Write]:
    text = node_ids is not None and not np.issubdtype(node_ids.dtype, np.integer)
    with appears_by_rename(out) as temporary, h5py.File(temporary, "w") as file:
        rows = file.create_dataset("predictions", shape, h5py.string_dtype() if dtype.kind == "U" else dtype)
        if columns is not None:
            file["classes"] = columns.astype(object) if columns.dtype.kind == "U" else columns
        ids = file.create_dataset("ids", shape[:1], h5py.string_dtype() if text else np.int64)

        def write(start: int, names: NDArray[Any] | None, block: NDArray[Any]) -> None:
            rows[start : start + len(block)] = block.astype(object) if block.dtype.kind == "U" else block
            ids[start : start + len(block)] = np.arange(start, start + len(block)) if names is None else names

        yield write


@contextlib.contextmanager
def _write_csv(
    out: Path,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    node_ids: NDArray[Any] | None,
    columns: NDArray[Any] | None,
) -> Iterator[Write]:
    names = ["prediction"] if len(shape) == 1 else [f"column_{i}" for i in range(shape[1])]
    with appears_by_rename(out) as temporary, temporary.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["id", *(names if columns is None else columns.tolist())])

        def write(start: int, names: NDArray[Any] | None, block: NDArray[Any]) -> None:
            ids = range(start, start + len(block)) if names is None else names.tolist()
            values = block[:, None].tolist() if block.ndim == 1 else block.tolist()
            lines.writerows([name, *row] for name, row in zip(ids, values, strict=True))

        yield write


_WRITERS = {".npy": _write_npy, ".h5": _write_h5, ".csv": _write_csv}
assert tuple(_WRITERS) == OUTPUTS


def ids_path(out: Path) -> Path:
    """Where the user's ids of an ``.npy`` of predictions are."""
    return out.with_suffix(".ids.npy")


# ------------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores by split, and the confusion table of each: [C, C] counts, a row a true class; None unless asked for."""

    scores: Scores
    confusion: dict[str, list[list[int]]] | None = None
    classes: tuple[int | str, ...] | None = None
    """The user's own labels of the classes, where they are not 0..C-1."""


def evaluate(
    folder: str | Path,
    run: str | Path,
    *,
    split: int | None = None,
    confusion: bool = False,
    state: State = "best",
    world: World | None = None,
) -> Evaluation:
    """Exact scores of a run's model on the shards in ``folder``; ``split`` defaults to the run's (a collective)."""
    world = world or World()
    if split is None:
        with world.stage("run"):
            split = read_config(Path(run))[0].split
    trained = load_trained(run, folder, world, state=state, split=split)
    shard, config, part = trained.shard, trained.config, trained.part
    with world.stage("options"):
        target = choose_target(GraphFacts.of_shard(shard), config.task, config.metric)
        if target.outputs != (trained.outputs if trained.columns is None else len(trained.columns)):
            raise ValueError(
                f"the model in {run} gives {trained.outputs} outputs, but the labels in {folder} have {target.outputs}"
            )
        check_confusion(confusion, target.task)
    y = fit_labels(part, target)
    logits = run_model(trained.model, part)
    logits = logits if trained.columns is None else logits[:, trained.columns]
    scores = score(part, target, y, logits)
    classes = None if trained.classes is None else tuple(trained.classes)
    table = {name: _confusion(part, target, y, logits, name) for name in scores} if confusion else None
    return Evaluation(scores=scores, confusion=table, classes=classes)


def _confusion(part: GraphPart, target: Target, y: Tensor, logits: Tensor, split: str) -> list[list[int]]:
    mask, classes = part.masks[split], target.outputs
    pairs = y[mask] * classes + logits[mask].argmax(1)
    counts = torch.bincount(pairs, minlength=classes * classes).to(torch.float64)
    total = part.world.gather_vector(counts.tolist()).sum(0).to(torch.int64).view(classes, classes)
    return total.tolist()


def _one_line(name: str) -> str:
    """A name without characters that would break or hide a line of a table."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def show_evaluation(found: Evaluation, console: Console, *, as_json: bool = False) -> None:
    """Print scores and confusion tables for a person, or as one JSON object."""
    if as_json:
        print(json.dumps(plain(dataclasses.asdict(found))))
        return
    for split, metrics in found.scores.items():
        console.print(f"{split}: " + ", ".join(f"{name} {show(name, value)}" for name, value in metrics.items()))
    for split, counts in (found.confusion or {}).items():
        console.print(f"{split}: nodes of a true class (row) by predicted class (column)")
        names = [_one_line(str(name)) for name in found.classes or range(len(counts))][: len(counts)]
        lines = [["", *names], *([name, *map(str, row)] for name, row in zip(names, counts, strict=True))]
        width = max(len(cell) for line in lines for cell in line) + 2
        for line in lines:
            console.print("".join(cell.rjust(width) for cell in line), soft_wrap=True, highlight=False)
