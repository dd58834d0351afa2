"""From a folder of shards to this rank's part of the graph."""

from __future__ import annotations

from pathlib import Path

import torch

from fullgraph.shards import Manifest, Shard, read_manifest, read_shard
from fullgraph.view import GraphPart, make_part
from fullgraph.world import RankError, World


def load_shard(folder: Path, world: World) -> tuple[Manifest, Shard]:
    """This rank's shard, after proof that the folder fits the world and that all ranks read one build."""
    with world.stage("load"):
        manifest = read_manifest(folder)
        if manifest.parts != world.size:
            raise ValueError(
                f"{folder} holds {manifest.parts} parts but {world.size} ranks were started; start {manifest.parts} "
                f"ranks (torchrun --nproc-per-node {manifest.parts}), or build again with --parts {world.size}"
            )
        shard = read_shard(folder, world.rank)
    facts = world.gather_json([shard.build_id, shard.num_nodes_global, shard.num_edges_global])
    different = [rank for rank, other in enumerate(facts) if other != facts[0]]
    if different:
        raise RankError(
            f"load: rank 0 reads build {facts[0][0]} but rank {different[0]} reads build {facts[different[0]][0]}; "
            f"all ranks must read shards of one build: copy them again"
        )
    return manifest, shard


def load(
    folder: str | Path,
    *,
    world: World | None = None,
    split: int = 0,
    dtype: torch.dtype = torch.float32,
    num_layers: int | None = None,
    seed: int = 1,
) -> GraphPart:
    """This rank's part of the graph in ``folder``, for a training loop of one's own (a collective).

    ``part.run(model, Pass(training=True, seed=..., step=...))`` is one forward pass; loss is a local sum over
    ``part.masks["train"]`` divided by the global count, and parameter gradients are to be summed over ranks. A model
    of ``num_layers`` layers is pruned in training. Where features are learned, ``part.table`` are this rank's rows of
    them, drawn by ``seed``: for its optimiser, but not for the sum over ranks.
    """
    world = world or World()
    _, shard = load_shard(Path(folder), world)
    return make_part(shard, world, split=split, dtype=dtype, num_layers=num_layers, seed=seed)
