"""What a partitioning costs: the cut, the rows that cross in every layer, how evenly the work is spread, and the bytes
and seconds that training should then take.

Everything is counted from the shards themselves; what a partitioner claimed plays no part. A shard is in memory at a
time. Predictions are those of ``fullgraph.cost``, for a stated model and machine; what a run measured stands beside
them. The forms of a report are in `partition_tools.forms` and `partition_tools.page`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullgraph.config import TrainConfig
from fullgraph.cost import ITEM_BYTES, Layer0, Machine
from fullgraph.cut import CutCounts, LayerCounts, cut_counts, cut_counts_of_shards, label_reach, layer_counts
from fullgraph.footprint import memory_by_tensor
from fullgraph.shards import Manifest, Shard, read_manifest, read_shard, stored_features
from fullgraph.step import ModelShape, StepCost, rank_rows, step_cost
from partition_tools.runs import Measured, Run

NO_BETTER = 0.95
"""A partitioning with at least this share of a random one's halo rows is no better than random."""


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """One part."""

    part: int
    nodes: int
    """Nodes owned."""
    edges: int
    """In-edges stored."""
    halo_rows: int
    """Halo nodes: rows received in one halo exchange."""
    rows_sent: int
    """Rows sent in one halo exchange."""
    cover_rows: int
    """Rows sent where each pair of parts sends a minimum cover."""
    neighbours: int
    """Other parts that rows are exchanged with."""
    train: int
    """Training nodes of the split."""
    val: int
    test: int
    feature_bytes: int
    """Features of the owned nodes as stored; 0 for a yardstick."""
    bytes: int
    """Size of the shard's file; 0 for a yardstick."""
    bytes_per_epoch: int
    """Message rows that the part sends in a training step, predicted."""
    memory_bytes: int
    """Tensors of its rank at the peak of a step or an evaluation, predicted."""


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One layer of a training step of the stated model. Rows are summed over parts, seconds of the slowest part."""

    layer: int
    nodes: int
    """Rows computed: all nodes, or those that a training node can feel."""
    pruned: bool
    halo_rows: int
    """Rows sent for these by halo exchange,"""
    max_halo_rows: int
    """and by the part that sends most."""
    cover_rows: int
    """Rows sent for these by minimum covers,"""
    max_cover_rows: int
    """and by the part that sends most."""
    rows_sent: int
    """Rows that cross forward; 0 where the layer needs no exchange."""
    width: int
    """Columns of a row that crosses."""
    bytes: int
    """Bytes that cross, forward and backward."""
    compute_seconds: float
    exchange_seconds: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """One partitioning. Its fields are the keys of the JSON form."""

    folder: str
    """Folder of shards; for a yardstick "random" or "contiguous"."""
    yardstick: bool
    """Whether this is no build but a partitioning to measure others by, of the same graph."""
    name: str
    """Name of the graph."""
    graph_id: str
    """Equal for equal edges, whatever the graph is called."""
    build_id: str
    method: str
    seed: int
    parts: int
    nodes: int
    edges: int
    """Directed entries."""
    features: int
    outputs: int
    """Classes, label columns or targets."""
    train: int
    """Training nodes of the split."""
    cut_edges: int
    cut_share: float
    """cut_edges / edges."""
    cut_pairs: int
    cut_weight: float | None
    """Sum of the cut edges' weights; null where the graph has none."""
    halo_rows: int
    """Halo nodes, summed over parts: rows received in one halo exchange, and as many sent."""
    max_halo_rows: int
    """Of the part that receives most."""
    max_rows_sent: int
    """Of the part that sends most."""
    halo_ratio: float
    """halo_rows / nodes."""
    replication: float
    """(nodes + halo_rows) / nodes."""
    cover_rows: int
    """Rows sent by all parts where each pair sends a minimum cover of its cut edges: what linear layers need."""
    max_cover_rows: int
    """The same by the part that sends most."""
    max_neighbours: int
    """Most other parts that one exchanges rows with."""
    mean_neighbours: float
    node_imbalance: float
    """Largest part over the mean."""
    edge_imbalance: float
    train_imbalance: float
    feature_bytes: int
    """Features as stored, all parts together."""
    max_feature_bytes: int
    """Of the part that holds most."""
    rows_per_epoch: int
    """Rows that the stated model sends in a training step, forward, all layers and parts together, predicted."""
    bytes_per_epoch: int
    """Bytes of them forward and backward, predicted."""
    max_bytes_per_epoch: int
    """By the part that sends most, predicted."""
    seconds_per_epoch: float
    """Predicted."""
    compute_seconds: float
    """Seconds of them that the slowest part of each layer computes, predicted."""
    exchange_seconds: float
    """Seconds of them that it exchanges rows, predicted."""
    memory_bytes: int
    """Of the rank that needs most, predicted; the process itself (Python, torch) is not in it."""
    layer0: str
    """How layer 0 gets its rows, predicted: once, keep or exchange."""
    random_ratio: float | None
    """halo_rows over those of a random partitioning into as many parts; null where none was asked for."""
    notes: tuple[str, ...]
    """Sentences on what the figures stand for."""
    measured: Measured | None
    layers: tuple[LayerReport, ...]
    per_part: tuple[PartReport, ...]
    rows: list[list[int]]
    """[P][P] rows that part p sends part q in one halo exchange."""
    cover: list[list[int]]
    """[P][P] the same by minimum covers."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of partitionings: the cost of training which model on which machines."""

    config: TrainConfig = field(default_factory=TrainConfig)
    """Of these options the ones that decide what is sent and computed."""
    machine: Machine = field(default_factory=Machine)
    runs: tuple[Run, ...] = ()
    """Runs whose measured figures are to stand beside the predicted ones."""
    yardsticks: bool = False
    """Also count random and contiguous partitionings, of all edges at once: about 100 bytes of memory an edge."""


def report(folders: Sequence[str | Path], question: Question | None = None) -> tuple[Report, ...]:
    """Count the builds in ``folders``; yardsticks follow, one pair for each graph and number of parts.

    Reads all shards but their features, once a layer and twice more. Raises ``ValueError`` where a folder is damaged,
    or a run belongs to none of them.
    """
    question = question or Question()
    manifests = {str(folder): read_manifest(folder) for folder in folders}
    builds = {manifest.build_id: folder for folder, manifest in manifests.items()}
    for at, run in enumerate(question.runs):
        for before in question.runs[:at]:
            if before.build_id == run.build_id:
                raise ValueError(
                    f"--run {before.folder} and {run.folder} trained on the same build; name one run a build"
                )
        if run.build_id not in builds:
            raise ValueError(
                f"--run {run.folder}: it trained on build {run.build_id} ({run.shards}), which is in none of "
                f"{', '.join(manifests)}; name that folder too, or leave the run out"
            )
    counted = {folder: _report(_Build(folder, manifest, question)) for folder, manifest in manifests.items()}
    found = [counted[str(folder)] for folder in folders]
    if not question.yardsticks:
        return tuple(found)
    wanted = {(one.graph_id, one.parts): one.folder for one in reversed(found)}
    drawn: list[Report] = []
    for folder in reversed(wanted.values()):
        drawn += yardsticks(_Build(folder, manifests[folder], question))
    random = {(one.graph_id, one.parts): one.halo_rows for one in drawn if one.folder == "random"}
    for at, one in enumerate(found):
        ratio = one.halo_rows / max(1, random[one.graph_id, one.parts])
        notes = one.notes
        if one.parts > 1 and ratio >= NO_BETTER:
            notes = (*notes, f"no better than random: {ratio:.2f} of the halo rows of a random partitioning")
        found[at] = replace(one, random_ratio=ratio, notes=notes)
    return (*found, *drawn)


# ----------------------------------------------------------------------------------------------------------- counting


class _Build:
    """One folder and what is asked of it. Goes through the shards once, noting on the way what is global."""

    def __init__(self, folder: str, manifest: Manifest, question: Question) -> None:
        self.folder, self.manifest, self.question = folder, manifest, question
        facts, config = manifest.graph, question.config
        self.nodes = int(facts["num_nodes"])
        self.part = np.zeros(self.nodes, np.int32)
        self.masks = np.zeros((3, self.nodes), np.bool_)
        self.cut_weight: float | None = 0.0 if facts.get("weighted") else None
        stored = [stored_features(folder, q, manifest=manifest) for q in range(manifest.parts)]
        self.feature_bytes = [size for size, _ in stored]
        self.sparse_values = [values for _, values in stored if values is not None]
        self.counts = cut_counts_of_shards(self._shards())
        self.run = next((run for run in question.runs if run.build_id == manifest.build_id), None)
        self.notes: list[str] = [] if self.run is None else list(self.run.notes)
        learned = int(facts.get("learned_features") or 0)
        self.features = int(facts.get("num_features") or 0) or learned
        self.outputs = (self.run.outputs if self.run else 0) or int(facts.get("num_classes") or 0)
        for what, count in (("features", self.features), ("labels", self.outputs)):
            if not count:
                self.notes.append(f"the graph has no {what}; predicted as if {what} were {config.hidden} columns wide")
        self.shape = ModelShape(
            model=config.model,
            features=self.features or config.hidden,
            outputs=self.outputs or config.hidden,
            hidden=config.hidden,
            layers=config.layers,
            heads=config.heads,
            norm=config.norm,
            out_heads=config.out_heads,
            dropped_input=config.input_dropout > 0,
            sparse_input=bool(self.sparse_values),
            learned_input=bool(learned),
            plan=config.plan,
            layer0=None if config.layer0 == "auto" else config.layer0,
            itemsize=ITEM_BYTES[config.dtype],
        )

    def _shards(self) -> Iterator[Shard]:
        """All shards without features."""
        split = self.question.config.split
        for q in range(self.manifest.parts):
            shard = self._read(q)
            self.part[shard.owned_global] = q
            if shard.train.shape[0] and split >= shard.train.shape[0]:
                raise ValueError(f"--split {split}: {self.folder} holds {shard.train.shape[0]} splits, counted from 0")
            if shard.train.shape[0]:
                for mask, of_part in zip(self.masks, (shard.train, shard.val, shard.test), strict=True):
                    mask[shard.owned_global] = of_part[split]
            if shard.edge_weight is not None and self.cut_weight is not None:
                self.cut_weight += float(shard.edge_weight[shard.indices >= shard.num_owned].sum(dtype=np.float64))
            yield shard

    def _read(self, q: int) -> Shard:
        return read_shard(self.folder, q, manifest=self.manifest, verify=False, features=False)

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """(sources, destinations) of the edges of one part after the other, by global id."""
        for q in range(self.manifest.parts):
            shard = self._read(q)
            ids = np.concatenate([shard.owned_global, shard.halo_global])
            yield ids[shard.indices], np.repeat(shard.owned_global, np.diff(shard.indptr))

    def layers(self, blocks: Any, part: NDArray[np.int32]) -> tuple[LayerCounts, ...]:
        """Counts of the stated model's layers under ``part`` [N], of edges given in ``blocks``."""
        config, parts = self.question.config, self.manifest.parts
        reach = None
        if config.prune and self.masks[0].any():
            reach = label_reach(self, self.masks[0], config.layers)
        whole = config.layers - 1 if config.norm == "batch" else 0
        return layer_counts(blocks, part, parts, config.layers, reach=reach, whole_layers=whole)


def _report(build: _Build) -> Report:
    manifest = build.manifest
    counts = build.counts
    assert counts.cover is not None
    layers = build.layers(build, build.part)
    notes = list(build.notes)
    if build.question.config.prune and not build.masks[0].any():
        notes.append("no training nodes, so every layer is taken to compute every node")
    return _put_together(
        build,
        counts,
        counts.cover,
        layers,
        build.part,
        folder=build.folder,
        yardstick=False,
        build_id=manifest.build_id,
        method=str(manifest.partition.get("method", "")),
        seed=int(manifest.partition.get("seed") or 0),
        cut_weight=build.cut_weight,
        notes=tuple(notes),
        measured=build.run.measured if build.run else None,
    )


def yardsticks(build: _Build) -> tuple[Report, Report]:
    """A random (seed 1) and a contiguous partitioning of the same graph into as many parts, equal to within a node."""
    blocks = list(build)
    edges = (np.concatenate([src for src, _ in blocks]), np.concatenate([dst for _, dst in blocks]))
    del blocks
    parts = build.manifest.parts
    contiguous = (np.arange(build.nodes, dtype=np.int64) * parts // build.nodes).astype(np.int32)
    random = np.random.default_rng(1).permutation(contiguous)
    return _yardstick(build, "random", edges, random), _yardstick(build, "contiguous", edges, contiguous)


def _yardstick(
    build: _Build, method: str, edges: tuple[NDArray[np.int64], NDArray[np.int64]], part: NDArray[np.int32]
) -> Report:
    (unpruned,) = layer_counts([edges], part, build.manifest.parts, 1)
    return _put_together(
        build,
        cut_counts(*edges, part, build.manifest.parts),
        unpruned.cover,
        build.layers([edges], part),
        part,
        folder=method,
        yardstick=True,
        build_id="",
        method=method,
        seed=1,
        cut_weight=None,
        notes=(),
        measured=None,
    )


def _put_together(
    build: _Build,
    counts: CutCounts,
    cover: NDArray[np.int64],
    layers: Sequence[LayerCounts],
    part: NDArray[np.int32],
    *,
    yardstick: bool,
    **facts: Any,
) -> Report:
    manifest, parts = build.manifest, build.manifest.parts
    whole = LayerCounts(inputs=counts.nodes, rows=counts.nodes, edges=counts.edges, halo=counts.rows, cover=cover)
    cost = step_cost(layers, build.shape, build.question.machine, whole=whole)
    masks = [np.bincount(part[mask], minlength=parts) for mask in build.masks]
    nodes, edges, halo = int(counts.nodes.sum()), int(counts.edges.sum()), counts.total_rows
    features = [0] * parts if yardstick else build.feature_bytes
    memory = _memory(build, whole, layers, masks[0], cost.layer0)
    sent, neighbours = cost.bytes_sent.sum(axis=1), counts.neighbours
    per_part = tuple(
        PartReport(
            part=q,
            nodes=int(counts.nodes[q]),
            edges=int(counts.edges[q]),
            halo_rows=int(counts.halo_rows[q]),
            rows_sent=int(counts.rows_sent[q]),
            cover_rows=int(cover[q].sum()),
            neighbours=int(neighbours[q]),
            train=int(masks[0][q]),
            val=int(masks[1][q]),
            test=int(masks[2][q]),
            feature_bytes=features[q],
            bytes=0 if yardstick else manifest.files[q].bytes,
            bytes_per_epoch=int(sent[q]),
            memory_bytes=memory[q],
        )
        for q in range(parts)
    )
    by_layer = tuple(_layer_reports(layers, build.shape, cost, nodes))
    return Report(
        yardstick=yardstick,
        name=str(manifest.graph.get("name", "")),
        graph_id=manifest.graph_id,
        parts=parts,
        nodes=nodes,
        edges=edges,
        features=build.features,
        outputs=build.outputs,
        train=int(build.masks[0].sum()),
        cut_edges=counts.cut_edges,
        cut_share=counts.cut_edges / max(1, edges),
        cut_pairs=counts.cut_pairs,
        halo_rows=halo,
        max_halo_rows=int(counts.halo_rows.max()),
        max_rows_sent=counts.max_rows_sent,
        halo_ratio=halo / nodes,
        replication=(nodes + halo) / nodes,
        cover_rows=int(cover.sum()),
        max_cover_rows=int(cover.sum(axis=1).max()),
        max_neighbours=int(neighbours.max()),
        mean_neighbours=float(neighbours.mean()),
        node_imbalance=imbalance(counts.nodes),
        edge_imbalance=imbalance(counts.edges),
        train_imbalance=imbalance(masks[0]),
        feature_bytes=sum(features),
        max_feature_bytes=max(features),
        rows_per_epoch=sum(layer.rows_sent for layer in by_layer),
        bytes_per_epoch=int(sent.sum()),
        max_bytes_per_epoch=int(sent.max()),
        seconds_per_epoch=cost.seconds,
        compute_seconds=sum(layer.compute_seconds for layer in by_layer),
        exchange_seconds=sum(layer.exchange_seconds for layer in by_layer),
        memory_bytes=max(memory),
        layer0=cost.layer0,
        random_ratio=None,
        layers=by_layer,
        per_part=per_part,
        rows=counts.rows.tolist(),
        cover=cover.tolist(),
        **facts,
    )


def _memory(
    build: _Build, whole: LayerCounts, layers: Sequence[LayerCounts], train: NDArray[np.int64], layer0: Layer0
) -> list[int]:
    """Bytes of each part's rank."""
    facts, shape, parts, values = build.manifest.graph, build.shape, build.manifest.parts, build.sparse_values
    config = build.question.config
    out = []
    for q in range(parts):
        rank = rank_rows(
            layers,
            shape,
            whole,
            q,
            train=int(train[q]),
            # Values are taken to be spread as nodes are.
            stored_features=round(sum(values) * int(whole.rows[q]) / build.nodes) if shape.sparse_input else None,
            weighted=bool(facts.get("weighted")),
            edge_features=int(facts.get("num_edge_features") or 0)
            if config.model == "gat" and config.edge_features
            else 0,
        )
        held = memory_by_tensor(
            config,
            rank,
            features=shape.features,
            outputs=shape.outputs,
            layer0=layer0,
            learned=shape.learned_input,
        )
        out.append(sum(held.values()))
    return out


def _layer_reports(
    layers: Sequence[LayerCounts], shape: ModelShape, cost: StepCost, nodes: int
) -> Iterator[LayerReport]:
    for layer, (count, crossing) in enumerate(zip(layers, cost.crossings, strict=True)):
        rows = int(shape.rows_sent(count).sum()) if crossing.width else 0
        slowest = int(np.argmax(cost.compute[layer] + cost.exchange[layer]))
        computed = int(count.rows.sum())
        yield LayerReport(
            layer=layer,
            nodes=computed,
            pruned=computed < nodes,
            halo_rows=int(count.halo.sum()),
            max_halo_rows=int(count.halo.sum(axis=1).max()),
            cover_rows=int(count.cover.sum()),
            max_cover_rows=int(count.cover.sum(axis=1).max()),
            rows_sent=rows,
            width=crossing.width if rows else 0,
            bytes=rows * crossing.width * shape.itemsize * (1 + crossing.backward),
            compute_seconds=float(cost.compute[layer, slowest]),
            exchange_seconds=float(cost.exchange[layer, slowest]),
        )


def imbalance(loads: NDArray[np.integer[Any]]) -> float:
    """Largest load over the mean; 1.0 where all are zero."""
    total = int(loads.sum())
    return float(loads.max()) * loads.shape[0] / total if total else 1.0
