"""What a report predicts from shards on disk equals what the ranks that train on them say and send."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullgraph.config import TrainConfig
from fullgraph.cost import ITEM_BYTES, Ledger
from fullgraph.loading import load_shard
from fullgraph.trainer import make_trainer
from fullgraph.world import Meter, World
from partition_tools.builder import build
from partition_tools.report import Question, Report, report
from tests.builds import assignment
from tests.graphs import CASES
from tests.ranks import RankPool, rank_pool

RUNS = (
    TrainConfig(model="sage", layers=2, hidden=8),
    TrainConfig(model="sage", layers=2, hidden=8, plan="halo"),
    TrainConfig(model="gcn", layers=3, hidden=8, prune=False, layer0="exchange"),
    TrainConfig(model="gcn", layers=3, hidden=8, prune=False, plan="halo"),
    TrainConfig(model="gin", layers=3, hidden=32, norm="batch", input_dropout=0.2),
    TrainConfig(model="gat", layers=2, hidden=8, heads=2, out_heads=2, layer0="once"),
    TrainConfig(model="gat", layers=2, hidden=8, heads=2, prune=False, layer0="exchange", dtype="float64"),
    TrainConfig(model="sage", layers=2, hidden=8, dtype="bfloat16"),
)
Told = tuple[Ledger, str, int]


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    with rank_pool(8) as pool:
        yield pool


def told(world: World, folder: Path, configs: tuple[TrainConfig, ...]) -> list[Told]:
    """This rank's ledger as its plans predict it, how layer 0 gets its rows, and the bytes that a step then sends."""
    out = []
    for config in configs:
        trainer = make_trainer(load_shard(folder, world).shard, config, dataclasses.replace(world, meter=Meter()))
        trainer.step(0)  # aggregates of layer 0 are formed once, in the first step
        before = trainer.world.meter.bytes_sent
        trainer.step(1)
        ledger = trainer.predicted_ledger()
        assert ledger is not None
        out.append((ledger, trainer.part.input.mode, trainer.world.meter.bytes_sent - before))
    return out


def check(found: Report, ranks: list[Told], config: TrainConfig) -> None:
    per_part = [sum(map(sum, ledger.values())) for ledger, _, _ in ranks]
    assert [part.bytes_per_epoch for part in found.per_part] == per_part
    assert per_part == [sent for _, _, sent in ranks]
    assert (found.bytes_per_epoch, found.max_bytes_per_epoch) == (sum(per_part), max(per_part))
    itemsize = ITEM_BYTES[config.dtype]
    for layer in found.layers:
        forward = sum(sum(ledger.get((layer.layer, "forward"), [])) for ledger, _, _ in ranks)
        backward = sum(sum(ledger.get((layer.layer, "backward"), [])) for ledger, _, _ in ranks)
        assert layer.rows_sent * layer.width * itemsize == forward
        assert layer.bytes == forward + backward
    mode = ranks[0][1]
    assert found.layer0 == ("exchange" if mode == "once" and (config.model == "gat" or config.input_dropout) else mode)


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_predicted_bytes_are_sent(parts: int, ranks: RankPool, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pool = request.getfixturevalue("eight") if parts > 4 else ranks
    sent = 0
    for name in ("directed", "one way") if parts == 3 else ("directed",):
        case = CASES[name]
        folder = tmp_path / name
        build(case.graph, assignment(np.asarray(case.part(parts)), parts), folder)
        runs = RUNS if parts < 8 else RUNS[:3]
        by_rank: list[list[Told]] = pool.run(parts, told, folder, runs, timeout=120)
        for i, config in enumerate(runs):
            (found,) = report([folder], Question(config=config))
            check(found, [of_rank[i] for of_rank in by_rank], config)
            sent += found.bytes_per_epoch
    assert sent > 0


@pytest.mark.parametrize("options", [{"plan": "halo"}, {"plan": "cover"}])
def test_pruned_and_covered_rows_are_fewer(options: dict[str, Any], tmp_path: Path) -> None:
    """Layer by layer, so that a report of a partitioning whose layers are not pruned says so, too."""
    case = CASES["directed"]
    build(case.graph, assignment(np.asarray(case.part(3)), 3), tmp_path / "s")
    pruned, whole = (
        report([tmp_path / "s"], Question(config=TrainConfig(prune=prune, layers=3, hidden=8, **options)))[0]
        for prune in (True, False)
    )
    assert [layer.halo_rows for layer in whole.layers] == [whole.halo_rows] * 3
    assert [layer.cover_rows for layer in whole.layers] == [whole.cover_rows] * 3
    for layer in pruned.layers:
        assert layer.cover_rows <= layer.halo_rows <= whole.halo_rows
    assert pruned.layers[-1].nodes == pruned.train < pruned.nodes
    assert pruned.layers[-1].pruned
    assert (pruned.rows, pruned.cover) == (whole.rows, whole.cover)
