"""From a folder of shards to this rank's part of the graph: which parts it runs, and their shards as one."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fullgraph.checks import GraphFacts, check_split
from fullgraph.host import available_memory
from fullgraph.merge import choose_ranks, join
from fullgraph.shards import Manifest, Shard, check_file, read_manifest, read_shard
from fullgraph.view import GraphPart, make_part
from fullgraph.world import RankError, World


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Which parts run on which rank, and the parts of this rank's nodes."""

    ranks: tuple[int, ...]
    """[P] the rank of each part."""
    mine: tuple[int, ...]
    """This rank's parts, ascending."""
    owned_global: NDArray[np.int64]
    """[n] this rank's nodes, ascending."""
    owned_part: NDArray[np.int32]
    """[n] the part of each."""

    def part_of(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """[m] the part of each of these nodes, which are this rank's."""
        part: NDArray[np.int32] = self.owned_part[np.searchsorted(self.owned_global, ids)]
        return part


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """What a rank has read."""

    manifest: Manifest
    shard: Shard
    """Of all parts of this rank; ``part`` and ``parts`` are rank and number of ranks."""
    placement: Placement


def load_shard(folder: Path, world: World) -> Loaded:
    """This rank's shard, after proof that the folder fits the world and that all ranks read one build (a collective).

    W <= P ranks run P parts: each a run of consecutive parts that its host can read, of nearly equal cost.
    """
    with world.stage("load"):
        manifest = read_manifest(folder)
        if world.size > manifest.parts:
            raise ValueError(
                f"{folder} holds {manifest.parts} part{'s' if manifest.parts > 1 else ''} but {world.size} ranks were "
                f"started; start at most {manifest.parts} (torchrun --nproc-per-node {manifest.parts}, or --ranks "
                f"{manifest.parts}), or build again with --parts {world.size}"
            )
        seen = [part for part, file in enumerate(manifest.files) if os.access(folder / file.path, os.R_OK)]
    told = world.gather_json([manifest.build_id, None if len(seen) == manifest.parts else seen])
    _check_one_build("reads", [build_id for build_id, _ in told])
    with world.stage("load"):
        readable = np.zeros((world.size, manifest.parts), np.bool_)
        for rank, (_, parts) in enumerate(told):
            readable[rank, slice(None) if parts is None else parts] = True
        for unseen in np.flatnonzero(~readable.any(axis=0)).tolist():
            check_file(folder, manifest.files[unseen])
        ranks = choose_ranks(_costs(manifest), readable)
        mine = np.flatnonzero(ranks == world.rank).tolist()
    _check_room(manifest, ranks, world)
    with world.stage("load"):
        shards = [read_shard(folder, part, manifest=manifest) for part in mine]
    facts = world.gather_json([shards[0].build_id, shards[0].num_nodes_global, shards[0].num_edges_global])
    _check_one_build("reads", [build_id for build_id, *_ in facts])
    if np.array_equal(ranks, np.arange(world.size)):
        shard = shards[0]
        owned_part = np.full(shard.num_owned, shard.part, np.int32)
    else:
        shard, owned_part = _union(shards, ranks, world)
    placement = Placement(
        ranks=tuple(ranks.tolist()), mine=tuple(mine), owned_global=shard.owned_global, owned_part=owned_part
    )
    return Loaded(manifest=manifest, shard=shard, placement=placement)


def _check_room(manifest: Manifest, ranks: NDArray[np.int32], world: World) -> None:
    """Raise ``RankError`` on all ranks where the shards alone exceed the memory of a host (a collective)."""
    told = world.gather_json([platform.node(), available_memory()])
    for host in dict.fromkeys(name for name, _ in told):
        here = [rank for rank, (name, _) in enumerate(told) if name == host]
        needed = sum(file.bytes for file, rank in zip(manifest.files, ranks.tolist(), strict=True) if rank in here)
        room = min(told[rank][1] for rank in here)
        if needed > room:
            raise RankError(
                f"load: the shards of {host} are {needed / 2**30:.2f} GiB, but {room / 2**30:.2f} GiB of memory are "
                f"available there; run on more hosts, or build again with features of a smaller type"
            )


def _check_one_build(verb: str, builds: Sequence[Any]) -> None:
    different = [rank for rank, build in enumerate(builds) if build != builds[0]]
    if different:
        raise RankError(
            f"load: rank 0 {verb} build {builds[0]} but rank {different[0]} {verb} build {builds[different[0]]}; "
            f"all ranks must read shards of one build: copy them again"
        )


def _costs(manifest: Manifest) -> NDArray[np.float64]:
    """[P] nodes and edges of each part, or its bytes where the manifest does not say."""
    counts = [(file.nodes, file.edges) for file in manifest.files]
    if all(nodes is not None and edges is not None for nodes, edges in counts):
        return np.array([(nodes or 0) + (edges or 0) for nodes, edges in counts], np.float64)
    return np.array([file.bytes for file in manifest.files], np.float64)


def _union(shards: Sequence[Shard], ranks: NDArray[np.int32], world: World) -> tuple[Shard, NDArray[np.int32]]:
    """The shards of this rank as one, and the part of each of its nodes; the other ranks say where its halo nodes lie
    in theirs (a collective)."""
    with world.stage("load"):
        joined = join(shards, ranks, world.rank)
    asked = np.bincount(joined.halo_rank, minlength=world.size)
    wanted = world.gather_vector(asked.tolist()).to(torch.int64)[:, world.rank].tolist()
    question = np.stack([joined.halo_part, joined.halo_index, joined.halo_global], axis=1)
    part, index, node = world.exchange(torch.from_numpy(question), asked.tolist(), wanted).wait().numpy().T
    with world.stage("load"):
        answer = joined.places(part, index, node)
    halo_index = world.exchange(torch.from_numpy(answer)[:, None], wanted, asked.tolist()).wait()[:, 0].numpy()
    with world.stage("load"):
        return joined.shard(halo_index), joined.owned_part


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
    shard = load_shard(Path(folder), world).shard
    with world.stage("options"):
        facts = GraphFacts.of_shard(shard)
        if split or facts.num_splits:
            check_split(facts, split)
        if dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ValueError(f"dtype is {dtype}; expected torch.float32, torch.float64 or torch.bfloat16")
        if not (num_layers is None or (isinstance(num_layers, int) and num_layers >= 1)):
            raise ValueError(f"num_layers is {num_layers!r}; expected a whole number of at least 1, or None")
        if not (isinstance(seed, int) and 0 <= seed < 2**63):
            raise ValueError(f"seed is {seed!r}; expected a whole number from 0 to 2^63 - 1")
    return make_part(shard, world, split=split, dtype=dtype, num_layers=num_layers, seed=seed)
