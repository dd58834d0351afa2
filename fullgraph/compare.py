"""``fullgraph compare``: one model trained under several exchange recipes, each measured against the exact run.

Every recipe runs over the same seeds, so that differences are paired. What crosses and what comes out do not depend on
how fast the ranks are joined; seconds over a link that is not at hand are predicted from what was counted here.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy import stats

from fullgraph.config import TrainConfig
from fullgraph.loading import load_shard
from fullgraph.metrics import LOWER_IS_BETTER
from fullgraph.policy import Recipe
from fullgraph.recipes import EXACT, EXCHANGE, Link
from fullgraph.runlog import show
from fullgraph.shards import Shard
from fullgraph.stopping import EarlyStopping
from fullgraph.trainer import make_trainer
from fullgraph.wording import counted
from fullgraph.world import Meter, RankError, World

Found = dict[str, Any]
"""What a recipe, or one run of it, came to: plain values."""
WORDS = {"test": "test", "val": "validation"}
"""Of the nodes that were scored: those of validation where there are no others."""


def compare(
    folder: Path,
    recipes: Mapping[str, TrainConfig],
    world: World,
    *,
    seeds: int,
    link: Link | None = None,
    target: float | None = None,
    console: Console | None = None,
) -> Found:
    """Train each recipe over ``seeds`` seeds from its own on and set it beside the first, the exact one (a collective).

    ``target`` is the validation score to reach; by default 99 % of the way of the exact run's best (its mean over
    seeds).
    """
    loaded = load_shard(folder, world)
    runs: dict[str, list[Found]] = {}
    for name, config in recipes.items():
        for number in range(seeds):
            one = dataclasses.replace(config, seed=config.seed + number)
            if not Recipe.of(config).exact and one.measure_drift is None:
                one = dataclasses.replace(one, measure_drift=max(1, one.epochs // 5) | 1)  # odd: every:2
            try:
                found = train_once(loaded.shard, one, world, target)
            except RankError as error:
                raise RankError(
                    f"recipe {name}, seed {one.seed}: {error}", shown_by=error.shown_by
                ) from error.__cause__
            runs.setdefault(name, []).append(found)
            if console is not None:
                score = f"{WORDS[found['scored_on']]} {show(found['metric'], found['test'])}"
                line = f"{name}, seed {one.seed}: {score}, {found['seconds']:.3g} s an epoch"
                console.print(line, highlight=False, soft_wrap=True)
    config = recipes[EXACT]
    return {
        "graph": loaded.manifest.graph.get("name"),
        "build_id": loaded.manifest.build_id,
        "ranks": world.size,
        "link": None if link is None else dataclasses.asdict(link),
        "seeds": [config.seed + number for number in range(seeds)],
        "config": config.as_dict(),
        **summarise(recipes, runs, ranks=world.size, link=link, target=target),
    }


def summarise(
    recipes: Mapping[str, TrainConfig],
    runs: Mapping[str, list[Found]],
    *,
    ranks: int,
    link: Link | None = None,
    target: float | None = None,
) -> Found:
    """What the runs of each recipe, over the same seeds in the same order, say beside those of the exact one."""
    metric = runs[EXACT][0]["metric"]
    if target is None:
        best = statistics.fmean(run["val"] for run in runs[EXACT])
        target = best / 0.99 if metric in LOWER_IS_BETTER else best * 0.99
    return {
        "metric": metric,
        "scored_on": runs[EXACT][0]["scored_on"],
        "target": target,
        "recipes": [
            _summary(name, config, runs[name], runs[EXACT], target, metric, link, ranks)
            for name, config in recipes.items()
        ],
    }


def train_once(shard: Shard, config: TrainConfig, world: World, target: float | None = None) -> Found:
    """One run: scores, seconds, and what crossed (a collective). ``RankError`` where ``target`` is no such score."""
    world = dataclasses.replace(world, meter=Meter())
    trainer = make_trainer(shard, config, world)
    metric, early = trainer.target.metric, EarlyStopping(trainer.target.metric, None)
    if trainer.num_validation == 0:
        raise RankError("compare needs validation nodes: it takes the epoch that is best by them; build with others")
    if target is not None and not (target >= 0 and (target <= 1 or metric in LOWER_IS_BETTER)):
        raise RankError(f"--target is {target:g}; expected a share of 1 for {metric}, such as 0.9")
    records, curve, drift, exchanges = [], [], [], 0
    for epoch in range(config.epochs):
        before = {tag: sum(line) for tag, line in world.meter.ledger.items()}
        record, _ = trainer.step(epoch)
        records.append(record)
        moved = [tag for tag, line in world.meter.ledger.items() if sum(line) > before.get(tag, 0)]
        exchanges += sum(tag[1] in ("forward", "backward") for tag in moved)
        if "drift" in record:
            drift.append(record["drift"])
        scores = None
        if epoch == config.epochs - 1 or (epoch + 1) % config.eval_every == 0:
            scores = trainer.evaluate()
            early.improves(epoch, scores)
            curve.append([epoch, scores.get("val", {}).get(metric), scores.get("test", {}).get(metric)])
        trainer.advance(scores)
    trainer.policy.drain()
    assert early.best is not None
    steady = {at: r for at, r in enumerate(records) if at and "drift" not in r} or dict(enumerate(records))
    period = trainer.policy.recipe.refresh.interval
    seconds = typical({at: r["seconds"] for at, r in steady.items()}, period)
    exposed = typical({at: r["comm_seconds"] for at, r in steady.items()}, period)
    work = typical({at: r["seconds"] - r["comm_seconds"] for at, r in steady.items()}, period)
    lines = {tag: line for tag, line in world.meter.ledger.items() if tag[1] in ("forward", "backward")}
    names = sorted({tuple(tag) for each in world.gather_json(list(lines)) for tag in each})
    matrix = world.gather_vector([float(n) for tag in names for n in lines.get(tag, [0] * world.size)])
    busiest = 0.0
    for traffic in matrix.reshape(world.size, len(names), world.size).unbind(1):
        busiest += float(torch.stack([traffic.sum(1), traffic.sum(0)]).max())
    facts = world.gather_vector([work, exposed, exchanges])
    best = early.best
    scored_on = "test" if "test" in best.scores else "val"
    return {
        "seed": config.seed,
        "metric": metric,
        "best_epoch": best.epoch,
        "val": best.scores["val"][metric],
        "scored_on": scored_on,
        "test": best.scores[scored_on][metric],
        "curve": curve,
        "losses": [record["loss"] for record in records],
        "seconds": seconds,
        "compute_seconds": float(facts[:, 0].max()),
        "exposed_seconds": float(facts[:, 1].max()),
        "bytes": sum(record["bytes_sent"] for record in records) / len(records),
        "busiest_bytes": busiest / len(records),
        "exchanges": float(facts[:, 2].max()) / len(records),
        "weight_bytes": sum(p.numel() * p.element_size() for p in trainer.parameters),
        "cache_bytes": trainer.cache_bytes(),
        "drift": drift,
    }


def typical(values: Mapping[int, float], period: int) -> float:
    """Of values by step: the median of each place in the period, as epochs that refresh differ from those between,
    and the mean over its places."""
    places = [[value for step, value in values.items() if step % period == place] for place in range(period)]
    return statistics.fmean(statistics.median(each) for each in places if each)


def link_seconds(run: Found, link: Link, ranks: int, *, pipelined: bool) -> tuple[float, float]:
    """Predicted (seconds an epoch, seconds of it that the network is waited for) over a link.

    Of each exchange the busiest rank's bytes in or out pass at the link's rate, after its latency; nothing is taken to
    hide, except that rows sent a step late hide under the whole compute. The gradients are summed in a ring.
    """
    if ranks == 1:
        return run["compute_seconds"], 0.0
    rows = run["busiest_bytes"] / link.bandwidth + run["exchanges"] * link.latency
    if pipelined:
        rows = max(0.0, rows - run["compute_seconds"])
    ring = 2 * (ranks - 1)
    exposed = rows + ring * (run["weight_bytes"] / ranks / link.bandwidth + link.latency) + link.latency
    return run["compute_seconds"] + exposed, exposed


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of the mean by Student's t; None for one value."""
    if len(values) < 2:
        return None
    half: float = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return half


def _summary(
    name: str,
    config: TrainConfig,
    runs: list[Found],
    exact: list[Found],
    target: float,
    metric: str,
    link: Link | None,
    ranks: int,
) -> Found:
    scores = [run["test"] for run in runs]
    differences = [run["test"] - other["test"] for run, other in zip(runs, exact, strict=True)]
    epochs = [_epochs_to(run["curve"], target, metric) for run in runs]
    reached = [each for each in epochs if each is not None]
    seconds = statistics.median(run["seconds"] for run in runs)
    out: Found = {
        "name": name,
        "changes": {k: v for k, v in config.as_dict().items() if v != getattr(TrainConfig, k) and k in EXCHANGE},
        "score": statistics.fmean(scores),
        "score_interval": interval(scores),
        "difference": statistics.fmean(differences),
        "difference_interval": interval(differences),
        "bytes": statistics.fmean(run["bytes"] for run in runs),
        "seconds": seconds,
        "compute_seconds": statistics.median(run["compute_seconds"] for run in runs),
        "exposed_seconds": statistics.median(run["exposed_seconds"] for run in runs),
        "reached": len(reached),
        "epochs_to_target": statistics.fmean(reached) if reached else None,
        "seconds_to_target": statistics.fmean(reached) * seconds if reached else None,
        "cache_bytes": runs[0]["cache_bytes"],
        "drift": _mean_drift(runs),
        "runs": runs,
    }
    if link is not None:
        predicted = [link_seconds(run, link, ranks, pipelined=config.refresh == "pipelined") for run in runs]
        out["link_seconds"] = statistics.median(each for each, _ in predicted)
        out["link_exposed_seconds"] = statistics.median(each for _, each in predicted)
        out["link_seconds_to_target"] = statistics.fmean(reached) * out["link_seconds"] if reached else None
    return out


def _epochs_to(curve: Sequence[Sequence[float]], target: float, metric: str) -> int | None:
    for epoch, val, _ in curve:
        if val is not None and (val <= target if metric in LOWER_IS_BETTER else val >= target):
            return int(epoch) + 1
    return None


def _mean_drift(runs: Sequence[Found]) -> list[Found]:
    """By layer, means over measured epochs and seeds."""
    by_layer: dict[int, list[Found]] = {}
    for run in runs:
        for measured in run["drift"]:
            for line in measured:
                by_layer.setdefault(int(line["layer"]), []).append(line)
    return [
        {"layer": layer} | {key: float(np.mean([line[key] for line in lines])) for key in ("relative_error", "cosine")}
        for layer, lines in sorted(by_layer.items())
    ]


def table_of(found: Found) -> tuple[str, list[str], list[list[str]], list[str]]:
    """(title, heads, cells, notes) of a comparison, the exact run first."""
    metric, link, seeds, config = found["metric"], found["link"], len(found["seeds"]), found["config"]
    unit, scale = ("", 1.0) if metric in LOWER_IS_BETTER else (", points", 100.0)
    title = (
        f"{found['graph']} on {counted(found['ranks'], 'rank')}, {config['model']}, {counted(seeds, 'seed')}, "
        f"{config['epochs']} epochs; {WORDS[found['scored_on']]} {metric} of the epoch best by validation"
    )
    heads = ["recipe", metric, f"against exact{unit}", "MB/epoch", "s/epoch", "waited s", "s to target", "drift"]
    if link is not None:
        heads += [f"s/epoch {link['name']}*", "waited s*", "s to target*"]
    rows = []
    for line in found["recipes"]:
        drift = max((layer["relative_error"] for layer in line["drift"]), default=None)
        row = [
            line["name"],
            _with_interval(scale * line["score"], line["score_interval"], scale, "%.2f" if unit else "%.4g"),
            ""
            if line["name"] == EXACT
            else _with_interval(
                scale * line["difference"], line["difference_interval"], scale, "%+.2f" if unit else "%+.4g"
            ),
            f"{line['bytes'] / 1e6:.3g}",
            f"{line['seconds']:.3g}",
            f"{line['exposed_seconds']:.3g}",
            _seconds(line["seconds_to_target"], line["reached"], seeds),
            "" if drift is None else f"{drift:.2g}",
        ]
        if link is not None:
            row += [
                f"{line['link_seconds']:.3g}",
                f"{line['link_exposed_seconds']:.3g}",
                _seconds(line["link_seconds_to_target"], line["reached"], seeds),
            ]
        rows.append(row)
    notes = [
        f"target: validation {metric} {show(metric, found['target'])}; drift: relative error of the rows in use, in "
        "the layer where it is largest; ± 95 % over seeds."
    ]
    if link is not None:
        notes.append("* predicted from bytes and compute counted here, not measured over such a link.")
    return title, heads, rows, notes


def show_comparison(found: Found, console: Console) -> None:
    """Print it as a table."""
    title, heads, rows, notes = table_of(found)
    console.print(title, highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head == heads[0] else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print("\n".join(notes), style="dim", highlight=False, soft_wrap=True)


def _with_interval(value: float, half: float | None, scale: float, form: str) -> str:
    return form % value + ("" if half is None else f" ± {form.replace('+', '') % (scale * half)}")


def _seconds(value: float | None, reached: int, seeds: int) -> str:
    if value is None:
        return "not reached"
    return f"{value:.3g}" + ("" if reached == seeds else f" ({reached} of {seeds})")
