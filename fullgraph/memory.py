"""Whether a run fits the memory of its hosts, by prediction, before its first step."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path

import torch

from fullgraph.footprint import LayerRows, RankRows, memory_by_tensor
from fullgraph.host import available_memory
from fullgraph.kernels import SparseRows
from fullgraph.models import GNN
from fullgraph.plan import Plan
from fullgraph.trainer import Trainer
from fullgraph.world import RankError, World

_RESIDENT = ("weights", "features", "labels and masks", "graph")
"""What a trainer that is made, but has taken no step, holds already."""


def require_room(trainer: Trainer) -> str:
    """A line that states the peak memory predicted for the largest rank, beside what is available (a collective).

    Raises ``RankError`` on all ranks, with numbers and remedies, where the ranks of a host are predicted to need more
    than it has, unless told not to (``--no-memory-check``). Nothing is predicted for a model of the user's own.
    """
    config, world = trainer.config, trainer.world
    told = _predicted(trainer)
    resident = _resident(world)
    if told is None:
        return "memory: not predicted for a model of one's own"
    if cached := trainer.cache_bytes():
        told = told | {"cached message rows": cached}
    more = sum(bytes_ for name, bytes_ in told.items() if name not in _RESIDENT)
    on_gpu = world.device.type == "cuda"
    room = torch.cuda.mem_get_info(world.device)[0] if on_gpu else available_memory()
    place = f"GPU {world.device.index} of {platform.node()}" if on_gpu else platform.node()
    largest = max(told, key=lambda name: told[name])
    every = world.gather_json([place, resident, more, room, largest])
    peaks = [resident + more for _, resident, more, *_ in every]
    rank = peaks.index(max(peaks))
    for name in dict.fromkeys(place for place, *_ in every):
        ranks = [r for r, (place, *_) in enumerate(every) if place == name]
        need, have = sum(every[r][2] for r in ranks), min(every[r][3] for r in ranks)
        if need > have and config.memory_check:
            who = f"{len(ranks)} rank{'s are' if ranks[1:] else ' is'}"
            raise RankError(
                f"memory: {name} has {_gib(have)} available, but its {who} predicted "
                f"to take {_gib(need)} more ({_gib(max(peaks))} at the peak of rank {rank}, most of it for "
                f"{every[rank][4]}); {_remedy(trainer)}, or start anyway with --no-memory-check"
            )
    return (
        f"memory: {_gib(max(peaks))} predicted at the peak of rank {rank}, {_gib(min(e[3] for e in every))} available"
    )


def _remedy(trainer: Trainer) -> str:
    config = trainer.config
    ways = [f"use more ranks on more hosts, a smaller --hidden (now {config.hidden})"]
    if config.dtype == "float64":
        ways.append("--dtype float32")
    elif config.dtype == "float32":
        ways.append("--dtype bfloat16")
    if not config.prune:
        ways.append("pruning (leave out --no-prune)")
    if not config.recompute and (config.model in ("gat", "gin") or config.norm != "none"):
        ways.append("--recompute")
    if trainer.part.input.mode != "exchange":
        ways.append("--layer0 exchange")
    return ", ".join(ways)


def _predicted(trainer: Trainer) -> dict[str, int] | None:
    """Bytes by tensor at the peak of this rank."""
    model, part, config = trainer.model, trainer.part, trainer.config
    if not isinstance(model, GNN) or part.training is None:
        return None
    graph = part.whole.graph
    rank = RankRows(
        owned=graph.n,
        halo=graph.halo_global.shape[0],
        edges=graph.indices.shape[0],
        layers=tuple(_rows(model, plan) for plan, _ in part.training),
        train=trainer.train_rows.shape[0],
        stored_features=part.x.values.shape[0] if isinstance(part.x, SparseRows) else None,
        weighted=graph.edge_weight is not None,
        edge_features=model.edge_dim,
    )
    return memory_by_tensor(
        config,
        rank,
        features=model.widths[0],
        outputs=model.widths[-1],
        layer0=part.input.mode,
        learned=trainer.table is not None,
    )


def _rows(model: GNN, plan: Plan) -> LayerRows:
    counts = getattr(plan, model.uses).route.counts
    halo = plan.halo.halo.shape[0] if model.uses == "halo" else plan.graph.halo_global.shape[0]
    return LayerRows(
        n_in=plan.n_in,
        n_out=plan.n_out,
        edges=plan.num_edges,
        halo=halo,
        sent=sum(counts.sent),
        received=sum(counts.received),
    )


def _resident(world: World) -> int:
    """Bytes that this rank holds now."""
    if world.device.type == "cuda":
        return torch.cuda.memory_allocated(world.device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * resource.getpagesize()


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
