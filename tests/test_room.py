"""A run states the memory it will take, and does not start where a host has less."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from torch import nn

import fullgraph.loading
import fullgraph.memory
from fullgraph.config import TrainConfig
from fullgraph.loading import load_shard
from fullgraph.memory import require_room
from fullgraph.shards import read_manifest
from fullgraph.trainer import make_trainer
from fullgraph.world import RankError, World
from partition_tools.builder import build
from tests.builds import assignment
from tests.graphs import CASES
from tests.ranks import RankPool


class Own(nn.Module):
    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.map = nn.Linear(features, outputs)

    def forward(self, x: Any, views: Any) -> Any:
        return self.map(views[0].propagate(x))


def stated(
    world: World, folder: Path, options: TrainConfig, available: list[int], model: Any = None, places: Any = ("a",) * 4
) -> str:
    shard = load_shard(folder, world).shard
    trainer = make_trainer(shard, options, world, model)
    with (
        mock.patch.object(fullgraph.memory, "available_memory", return_value=available[world.rank]),
        mock.patch("platform.node", return_value=places[world.rank]),
    ):
        try:
            return require_room(trainer)
        except RankError as error:
            return f"refused: {error}"


def shards(case: str, parts: int, folder: Path) -> Path:
    build(CASES[case].graph, assignment(CASES[case].part(parts), parts), folder / f"{case} {parts}")
    return folder / f"{case} {parts}"


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
@pytest.mark.parametrize("case", ["undirected", "sparse", "learned features", "edge features"])
def test_a_run_states_its_peak(ranks: RankPool, case: str, model: Any, tmp_path: Path) -> None:
    found = ranks.run(2, stated, shards(case, 2, tmp_path), TrainConfig(model=model), [8 << 30, 4 << 30])
    assert len(set(found)) == 1
    assert re.fullmatch(r"memory: \d+ MiB predicted at the peak of rank [01], 4.00 GiB available", found[0])


def test_a_run_that_does_not_fit_is_refused_with_numbers_and_remedies(ranks: RankPool, tmp_path: Path) -> None:
    folder, options = shards("undirected", 3, tmp_path), TrainConfig(model="gcn", hidden=4096, dtype="float64")
    found = ranks.run(3, stated, folder, options, [1 << 30, 1 << 20, 1 << 30], None, ("a", "b", "a"))
    assert len(set(found)) == 1
    assert re.match(
        r"refused: memory: b has 1 MiB available, but its 1 rank is predicted to take \d+ MiB more", found[0]
    )
    assert "at the peak of rank" in found[0]
    for remedy in ("a smaller --hidden (now 4096)", "--dtype float32", "more ranks", "--no-memory-check"):
        assert remedy in found[0]
    # Ranks of one host share what it has.
    need = float(found[0].split(" MiB more")[0].split()[-1])
    together = ranks.run(3, stated, folder, options, [int(2.5 * need * 2**20)] * 3)
    assert "refused: memory: a has" in together[0]
    assert "its 3 ranks are predicted to take" in together[0]
    forced = TrainConfig(model="gcn", hidden=4096, dtype="float64", memory_check=False)
    assert "predicted at the peak" in ranks.run(3, stated, folder, forced, [1] * 3)[0]


def loaded(world: World, folder: Path, available: list[int], places: str) -> str:
    with (
        mock.patch.object(fullgraph.loading, "available_memory", return_value=available[world.rank]),
        mock.patch("platform.node", return_value=places[world.rank]),
    ):
        try:
            return str(load_shard(folder, world).manifest.parts)
        except RankError as error:
            return str(error)


def test_shards_that_exceed_the_memory_are_not_read(ranks: RankPool, tmp_path: Path) -> None:
    folder = shards("undirected", 3, tmp_path)
    sizes = [file.bytes for file in read_manifest(folder).files]
    enough = [sizes[0] + sizes[2], sizes[1], sizes[0] + sizes[2]]
    assert ranks.run(3, loaded, folder, enough, "aba") == ["3"] * 3
    text = r"load: the shards of a are 0.00 GiB, but 0.00 GiB of memory are available there; run on more hosts"
    (found,) = set(ranks.run(3, loaded, folder, [enough[0] - 1, *enough[1:]], "aba"))
    assert re.match(text, found)


def test_nothing_is_predicted_for_a_model_of_ones_own(tmp_path: Path) -> None:
    text = stated(World(), shards("undirected", 1, tmp_path), TrainConfig(), [0], Own)
    assert text == "memory: not predicted for a model of one's own"


def test_what_is_resident_is_measured() -> None:
    before = fullgraph.memory._resident(World())
    held = np.ones(1 << 25)
    assert fullgraph.memory._resident(World()) - before > held.nbytes // 2
