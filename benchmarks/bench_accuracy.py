"""Does training in parts reach the published accuracy, and the same accuracy on every number of ranks?

    python -m benchmarks.bench_accuracy [--json] [--quick] [--data DIR] [--dtype float64] [--save]

Cora's public split: GCN and GAT with the hyper-parameters of their papers on 1, 2 and 4 ranks, beside the published
81.5 % and 83.0 % and PyG on the same seeds. Then larger graphs on one rank beside PyG's own full-batch training of
the same architecture on the same splits. A run counts with its test score at the epoch of best validation, the
earliest of equals. Exit code 1 where a requirement is missed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
import torch
import tyro
from numpy.typing import NDArray
from rich.console import Console
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional as F

from benchmarks.report import deliver, machine, machine_line, say, table
from fullgraph.config import TrainConfig
from fullgraph.loop import train
from fullgraph.world import open_world
from partition_tools import sources
from partition_tools.assign import AssignOptions, assign
from partition_tools.builder import SPARSE_BELOW, build
from partition_tools.graph import Graph, Splits
from partition_tools.prepare import make_undirected, random_split

THREADS = 1
"""Compute threads a rank (and of PyG), on any number of ranks: more would fight over the cores at 4 ranks."""
FRACTIONS = (0.6, 0.2, 0.2)
"""Train, validation and test of a graph without splits: what partition-tools build takes by default."""

# Kipf and Welling 2017, section 5.2; Velickovic et al. 2018, section 3.3: 8 heads of 8 features.
GCN = TrainConfig(
    model="gcn",
    layers=2,
    hidden=16,
    dropout=0.5,
    input_dropout=0.5,
    feature_norm="row",
    lr=0.01,
    weight_decay=5e-4,
    epochs=200,
    threads=THREADS,
)
GAT = dataclasses.replace(GCN, model="gat", hidden=64, heads=8, dropout=0.6, input_dropout=0.6, lr=0.005)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Test accuracy on real graphs, beside published numbers and PyG."""

    json: bool = False
    """Print JSON in place of Markdown."""
    quick: bool = False
    """Two seeds, 1 and 2 ranks, and a fifth of the epochs on the larger graphs: a check of the script."""
    data: Path = Path(__file__).resolve().parents[2] / "shared" / "data"
    """Folder of the graphs: planetoid/, gnn-benchmark/, heterophilous/."""
    dtype: Literal["float32", "float64"] = "float32"
    """Floating-point type of our runs; PyG's are float32."""
    save: bool = False
    """Keep the result under benchmarks/results/ with its date."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One model on one graph with several seeds; seed s trains on split s where the graph has several."""

    graph: str
    source: str
    """Path below the data folder."""
    config: TrainConfig
    seeds: int
    ranks: tuple[int, ...] = (1,)
    published: float | None = None
    required: float | None = None
    """Least mean score."""

    @property
    def metric(self) -> str:
        return self.config.metric or "accuracy"


STUDIES = (
    Study(
        graph="Cora",
        source="planetoid/ind.cora",
        config=GCN,
        seeds=10,
        ranks=(1, 2, 4),
        published=0.815,
        required=0.81,
    ),
    Study(
        graph="Cora",
        source="planetoid/ind.cora",
        config=GAT,
        seeds=10,
        ranks=(1, 2, 4),
        published=0.830,
        required=0.82,
    ),
    Study(
        graph="amazon-computers",
        source="gnn-benchmark/amazon_electronics_computers.npz",
        config=TrainConfig(
            model="gcn",
            layers=2,
            hidden=64,
            norm="batch",
            weight_decay=0.0,
            epochs=60,
            eval_every=5,
            threads=THREADS,
        ),
        seeds=5,
    ),
    Study(
        graph="coauthor-cs",
        source="gnn-benchmark/ms_academic_cs.npz",
        config=TrainConfig(model="gcn", layers=2, hidden=64, epochs=50, eval_every=5, threads=THREADS),
        seeds=5,
    ),
    Study(
        graph="minesweeper",
        source="heterophilous/minesweeper.npz",
        config=TrainConfig(
            model="sage",
            layers=5,
            hidden=64,
            dropout=0.2,
            norm="batch",
            residual=True,
            weight_decay=0.0,
            metric="roc_auc",
            epochs=100,
            eval_every=5,
            threads=THREADS,
        ),
        seeds=5,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One training run: the test score at the best epoch, and every score on the way."""

    seed: int
    test: float
    best_epoch: int
    history: tuple[tuple[float, ...], ...] = ()
    """(train, val, test) of each evaluated epoch."""


# ------------------------------------------------------------------------------------------------------ our runs


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run for ranks that are up already."""

    shards: Path
    config: TrainConfig
    run: Path


def run_on(ranks: int, jobs: Sequence[Job]) -> None:
    """Do the jobs one after the other in one launch of ``ranks`` local ranks: they start once."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    elastic_launch(config, _rank)(jobs)


def _rank(jobs: Sequence[Job]) -> None:
    with open_world(threads=THREADS) as world:
        for job in jobs:
            train(job.shards, job.config, run=job.run, world=world, console=Console(quiet=True))


def read_run(seed: int, run: Path, metric: str) -> Outcome:
    """The outcome of a run folder."""
    summary = json.loads((run / "summary.json").read_text())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    history = tuple(
        tuple(record[split][metric] for split in ("train", "val", "test")) for record in records if "val" in record
    )
    return Outcome(seed=seed, test=summary["test"][metric], best_epoch=summary["best_epoch"], history=history)


def train_ours(study: Study, graph: Graph, folder: Path) -> dict[int, list[Outcome]]:
    """ranks -> one outcome a seed, from shards built for that number of ranks."""
    outcomes = {}
    for ranks in study.ranks:
        started = time.monotonic()
        shards = folder / f"shards-{ranks}"
        if not shards.exists():
            build(graph, assign(graph, AssignOptions(parts=ranks)), shards)
        jobs = [
            Job(shards=shards, config=config, run=folder / f"{config.model}-{ranks}-{config.seed}")
            for config in configs(study, graph)
        ]
        run_on(ranks, jobs)
        outcomes[ranks] = [read_run(job.config.seed, job.run, study.metric) for job in jobs]
        _progress(study, f"fullgraph on {ranks} rank{'s' if ranks > 1 else ''}", outcomes[ranks], started)
    return outcomes


def configs(study: Study, graph: Graph) -> list[TrainConfig]:
    """One a seed; seeds start at 1."""
    assert graph.splits is not None
    return [dataclasses.replace(study.config, seed=i + 1, split=i % graph.splits.count) for i in range(study.seeds)]


def load_graph(study: Study, data: Path) -> tuple[Graph, str]:
    """The graph with both directions of every edge, and what its splits are: its own, or a random one a seed."""
    graph = make_undirected(sources.load(str(data / study.source)))
    if graph.splits is not None:
        return graph, "public split" if graph.splits.count == 1 else f"the first {study.seeds} given"
    drawn = [random_split(graph, FRACTIONS, seed).splits for seed in range(1, study.seeds + 1)]
    masks = {name: np.concatenate([getattr(splits, name) for splits in drawn]) for name in ("train", "val", "test")}
    shares = "/".join(f"{100 * share:.0f}" for share in FRACTIONS)
    return dataclasses.replace(graph, splits=Splits(**masks)), f"random {shares} by seed, stratified"


# ---------------------------------------------------------------------------------------------------- PyG's runs


class PyGModel(nn.Module):
    """The architecture of ``fullgraph.models.GNN`` in PyG's layers."""

    def __init__(self, config: TrainConfig, d_in: int, d_out: int) -> None:
        super().__init__()
        self.config = config
        widths = [d_in] + [config.hidden] * (config.layers - 1) + [d_out]
        self.convs = nn.ModuleList(
            _pyg_conv(config, widths[layer], widths[layer + 1], last=layer == config.layers - 1)
            for layer in range(config.layers)
        )
        norms: dict[str, type[nn.Module]] = {"none": nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        self.norms = nn.ModuleList(norms[config.norm](config.hidden) for _ in range(config.layers - 1))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        config = self.config
        for layer, conv in enumerate(self.convs):
            p = config.dropout if layer else config.input_dropout
            x = _dropout(x, p, self.training)
            y = conv(x, edges)
            if layer < config.layers - 1:
                y = self.norms[layer](y)
                y = F.elu(y) if config.model == "gat" else F.relu(y)
                if config.residual and layer:
                    y = y + x
            x = y
        return x


def _dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """What is stored of a sparse tensor is dropped alike: the rest is zero before and after."""
    if not x.is_sparse:
        return F.dropout(x, p, training)
    values = F.dropout(x.values(), p, training)
    return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True)


def _pyg_conv(config: TrainConfig, d_in: int, d_out: int, *, last: bool) -> nn.Module:
    from torch_geometric import nn as pyg

    heads = config.out_heads if last else config.heads
    bias = last or config.norm != "batch"
    conv: nn.Module
    match config.model:
        case "gcn":
            conv = pyg.GCNConv(d_in, d_out, cached=True, bias=bias)
        case "sage":
            conv = pyg.SAGEConv(d_in, d_out, bias=bias)
        case "gat":
            width = d_out if last else d_out // heads
            conv = pyg.GATConv(d_in, width, heads, bias=bias, concat=not last, dropout=config.dropout)
        case _:
            raise ValueError(f"no study trains {config.model}")
    return conv


def train_pyg(study: Study, graph: Graph) -> list[Outcome]:
    """Full-batch training in one process: the optimiser, epochs, splits and choice of epoch of our runs."""
    started = time.monotonic()
    assert graph.splits is not None
    assert graph.y is not None
    torch.set_num_threads(THREADS)
    warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
    x, y = _pyg_features(study.config, graph), torch.from_numpy(graph.y)
    edges = _pyg_edges(study.config, graph)
    outcomes = []
    for config in configs(study, graph):
        torch.manual_seed(config.seed)
        masks = [
            torch.from_numpy(getattr(graph.splits, name)[config.split].copy()) for name in ("train", "val", "test")
        ]
        model = PyGModel(config, x.shape[1], int(y.max()) + 1)
        optimizer = torch.optim.Adam(model.parameters(), config.lr, weight_decay=config.weight_decay)
        best = Outcome(seed=config.seed, test=math.nan, best_epoch=-1)
        best_val = -math.inf
        for epoch in range(config.epochs):
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(x, edges)[masks[0]], y[masks[0]]).backward()
            optimizer.step()
            if epoch < config.epochs - 1 and (epoch + 1) % config.eval_every:
                continue
            model.eval()
            with torch.no_grad():
                logits = model(x, edges)
            val, test = (_score(study.metric, logits[mask], y[mask]) for mask in masks[1:])
            if val > best_val:
                best_val, best = val, Outcome(seed=config.seed, test=test, best_epoch=epoch)
        outcomes.append(best)
    _progress(study, "PyG", outcomes, started)
    return outcomes


def _pyg_edges(config: TrainConfig, graph: Graph) -> Tensor:
    """The transposed adjacency matrix, with which PyG's linear layers are several times faster; edge_index for GAT."""
    n, edge_index = graph.num_nodes, np.stack([graph.src, graph.dst])
    if config.model == "gat":
        return torch.from_numpy(edge_index)
    return _coo(edge_index[::-1], np.ones(graph.num_edges, np.float32), (n, n)).to_sparse_csr()


def _pyg_features(config: TrainConfig, graph: Graph) -> Tensor:
    """[N, F] in float32, sparse where our shards keep them sparse."""
    x: Any = sp.csr_array(graph.x, dtype=np.float32)
    if config.feature_norm == "row":
        total = x.sum(axis=1)
        x = sp.diags_array(1 / np.where(total != 0, total, 1)) @ x
    if x.nnz >= SPARSE_BELOW * math.prod(x.shape):
        return torch.from_numpy(x.toarray())
    coo = x.tocoo()
    return _coo(np.stack([coo.row, coo.col]), coo.data.astype(np.float32), x.shape)


def _coo(index: NDArray[Any], values: NDArray[Any], shape: tuple[int, int]) -> Tensor:
    places = torch.from_numpy(index.astype(np.int64))
    return torch.sparse_coo_tensor(places, torch.from_numpy(values), shape, check_invariants=True).coalesce()


def _score(metric: str, logits: Tensor, y: Tensor) -> float:
    if metric == "roc_auc":
        return float(roc_auc_score(y.numpy(), (logits[:, 1] - logits[:, 0]).numpy()))
    return float((logits.argmax(1) == y).double().mean())


# -------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How the runs on several ranks differ from those on one, seed by seed."""

    runs: int
    """Pairs of runs compared."""
    runs_differing: int
    """Those whose test accuracies differ."""
    most_nodes: int
    """Largest difference, in test nodes."""
    scores: int
    """Accuracies compared on the way: train, validation and test of each evaluated epoch of each pair."""
    scores_differing: int


def compare(outcomes: dict[int, list[Outcome]], test_nodes: int) -> Difference:
    base = outcomes[min(outcomes)]
    pairs = [pair for ranks, runs in outcomes.items() if ranks > 1 for pair in zip(base, runs, strict=True)]
    nodes = [round(abs(one.test - several.test) * test_nodes) for one, several in pairs]
    scores = [
        a == b
        for one, several in pairs
        for row, other in zip(one.history, several.history, strict=True)
        for a, b in zip(row, other, strict=True)
    ]
    return Difference(
        runs=len(pairs),
        runs_differing=sum(one.test != several.test for one, several in pairs),
        most_nodes=max(nodes, default=0),
        scores=len(scores),
        scores_differing=scores.count(False),
    )


@dataclass(frozen=True, kw_only=True)
class Result:
    """A study and all its runs."""

    study: Study
    ours: dict[int, list[Outcome]]
    pyg: list[Outcome]
    nodes: tuple[int, int, int]
    """Train, validation and test nodes of the first split."""
    splits: str

    def difference(self) -> Difference:
        return compare(self.ours, self.nodes[2])

    def requirements(self) -> list[tuple[str, bool]]:
        """What must hold, and whether it does."""
        study, found = self.study, []
        name = f"{study.graph} {study.config.model.upper()}"
        if study.required is not None:
            least = min(mean(runs) for runs in self.ours.values())
            sentence = (
                f"{name}: mean at least {percent(study.required)} on every number of ranks (least: {percent(least)})"
            )
            found.append((sentence, least >= study.required))
        if len(self.ours) > 1:
            difference = self.difference()
            sentence = (
                f"{name}: the same test accuracy on every number of ranks ({difference.runs_differing} of "
                f"{difference.runs} runs differ from 1 rank, by at most {difference.most_nodes} nodes)"
            )
            found.append((sentence, difference.runs_differing == 0))
        return found

    def record(self) -> dict[str, Any]:
        study = self.study
        return {
            "graph": study.graph,
            "source": study.source,
            "config": study.config.as_dict(),
            "metric": study.metric,
            "splits": self.splits,
            "nodes": dict(zip(("train", "val", "test"), self.nodes, strict=True)),
            "published": study.published,
            "required": study.required,
            "fullgraph": {str(ranks): _record(runs) for ranks, runs in self.ours.items()},
            "pyg": _record(self.pyg),
            "difference_between_rank_counts": dataclasses.asdict(self.difference()) if len(self.ours) > 1 else None,
        }


def _record(runs: list[Outcome]) -> dict[str, Any]:
    return {
        "mean": mean(runs),
        "std": std(runs),
        "runs": [{"seed": run.seed, "test": run.test, "best_epoch": run.best_epoch} for run in runs],
    }


def mean(runs: list[Outcome]) -> float:
    return statistics.fmean(run.test for run in runs)


def std(runs: list[Outcome]) -> float:
    """Of a sample: over the number of runs less one."""
    return statistics.stdev(run.test for run in runs)


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def spread(runs: list[Outcome]) -> str:
    return f"{100 * mean(runs):.2f} ± {100 * std(runs):.2f}"


def render(results: list[Result], facts: dict[str, Any], seconds: float) -> str:
    """The whole result as Markdown."""
    partitioned = [result for result in results if len(result.ours) > 1]
    alone = [result for result in results if len(result.ours) == 1]
    checks = [check for result in results for check in result.requirements()]
    parts = ["# Test accuracy on real graphs", machine_line(facts)]
    parts.append(
        f"Test score in percent at the epoch of best validation (the earliest of equals), mean ± standard deviation "
        f"over the seeds; {THREADS} thread a rank; {seconds / 60:.0f} minutes in all."
    )
    parts.append("\n".join(f"- {'met' if met else '**MISSED**'}: {sentence}" for sentence, met in checks))
    parts += _partitioned(partitioned) + _alone(alone)
    parts.append("## Settings")
    parts.append("\n".join(f"- {result.study.graph} {_settings(result)}" for result in results))
    return "\n\n".join(parts)


def _partitioned(results: list[Result]) -> list[str]:
    study = results[0].study
    counts = [f"{ranks} rank{'s' if ranks > 1 else ''}" for ranks in study.ranks]
    rows: list[list[object]] = [
        [
            result.study.config.model.upper(),
            *(spread(runs) for runs in result.ours.values()),
            spread(result.pyg),
            f"{100 * (result.study.published or math.nan):.1f}",
            f"{100 * (result.study.required or math.nan):.1f}",
        ]
        for result in results
    ]
    parts = [f"## {study.graph}, {results[0].splits}, {study.seeds} seeds"]
    parts.append(table(["model", *counts, "PyG", "published", "required"], rows))
    header = ["seed", *(f"{result.study.config.model.upper()}, {count}" for result in results for count in counts)]
    rows = [
        [seed, *(f"{100 * runs[seed - 1].test:.2f}" for result in results for runs in result.ours.values())]
        for seed in range(1, study.seeds + 1)
    ]
    parts.append(table(header, rows))
    for result in results:
        d = result.difference()
        parts.append(
            f"{result.study.config.model.upper()} in {result.study.config.dtype}: {d.runs_differing} of {d.runs} runs "
            f"differ from 1 rank at the best epoch, by at most {d.most_nodes} of {result.nodes[2]:,} test nodes. On "
            f"the way there, of {d.scores:,} accuracies (train, validation and test of every epoch) "
            f"{d.scores_differing:,} differ."
        )
    return parts


def _alone(results: list[Result]) -> list[str]:
    rows = []
    for result in results:
        ours, pyg = result.ours[1], result.pyg
        error = math.sqrt((std(ours) ** 2 + std(pyg) ** 2) / len(ours))
        rows.append(
            [
                result.study.graph,
                result.study.config.model.upper(),
                result.study.metric,
                result.splits,
                len(ours),
                spread(ours),
                spread(pyg),
                f"{100 * (mean(ours) - mean(pyg)):+.2f} ± {100 * error:.2f}",
            ]
        )
    header = ["graph", "model", "score", "splits", "seeds", "fullgraph", "PyG", "difference ± its standard error"]
    return [
        "## Beside PyG: one process, the same architecture, hyper-parameters and splits",
        table(header, rows),
    ]


def _settings(result: Result) -> str:
    """The options that differ from the defaults, as they are typed."""
    config, default = result.study.config, TrainConfig()
    named = [
        f"--{field.name.replace('_', '-')} {value}".removesuffix(" True")
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != getattr(default, field.name) or field.name == "model"
    ]
    return f"({', '.join(f'{n:,}' for n in result.nodes)} train, validation and test nodes): `{' '.join(named)}`"


def _progress(study: Study, who: str, runs: list[Outcome], started: float) -> None:
    seconds = time.monotonic() - started
    say(f"{study.graph} {study.config.model}, {who}: {spread(runs)} ({len(runs)} seeds, {seconds:.0f} s)")


def select(study: Study, options: Options) -> Study:
    """The study as the options ask for it."""
    config = dataclasses.replace(study.config, dtype=options.dtype)
    if not options.quick:
        return dataclasses.replace(study, config=config)
    if study.required is None:
        config = dataclasses.replace(config, epochs=config.epochs // 5)
    return dataclasses.replace(study, seeds=2, ranks=study.ranks[:2], config=config)


def run(study: Study, data: Path, folder: Path) -> Result:
    """All runs of a study; ``folder`` takes shards and run folders."""
    graph, splits = load_graph(study, data)
    assert graph.splits is not None
    train, val, test = (int(getattr(graph.splits, name)[0].sum()) for name in ("train", "val", "test"))
    return Result(
        study=study,
        ours=train_ours(study, graph, folder / study.graph),
        pyg=train_pyg(study, graph),
        nodes=(train, val, test),
        splits=splits,
    )


def main() -> int:
    """0 where every requirement is met."""
    options = tyro.cli(Options, prog="python -m benchmarks.bench_accuracy")
    started, facts = time.monotonic(), machine()
    with tempfile.TemporaryDirectory(prefix="bench-accuracy-") as folder:
        results = [run(select(study, options), options.data, Path(folder)) for study in STUDIES]
    seconds = time.monotonic() - started
    checks = [check for result in results for check in result.requirements()]
    record = {
        "benchmark": "accuracy",
        "quick": options.quick,
        "machine": facts,
        "seconds": round(seconds),
        "requirements": [{"requirement": sentence, "met": met} for sentence, met in checks],
        "studies": [result.record() for result in results],
    }
    deliver("accuracy", render(results, facts, seconds), record, as_json=options.json, save=options.save)
    return 0 if all(met for _, met in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
