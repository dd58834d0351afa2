"""One rank of our trainer as a measured process: ``python -m benchmarks.rank JOB``, started by `benchmarks.systems`."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.serve import open_replies, serve
from fullgraph import TrainConfig, open_world
from fullgraph.kernels import spmm
from fullgraph.loading import load_shard
from fullgraph.trainer import Trainer, make_trainer
from fullgraph.world import World

WIDTH = 256
BLOCK_BYTES = 4 << 20


def main() -> None:
    replies = open_replies()
    job = json.loads(sys.argv[1])
    with open_world(threads=job["threads"]) as world:
        shard = load_shard(Path(job["folder"]), world).shard
        trainer = make_trainer(shard, TrainConfig(**job["config"]), world)
        del shard

        def step(epoch: int) -> dict[str, Any]:
            meter = world.meter
            travel, waited = sum(meter.travel.values()), sum(meter.waited.values())
            record, _ = trainer.step(epoch)
            return {
                "loss": record["loss"],
                "comm_seconds": record["comm_seconds"],
                "bytes_sent": record["bytes_sent"],
                "travel": sum(meter.travel.values()) - travel,
                "waited": sum(meter.waited.values()) - waited,
            }

        serve(replies, step, lambda: {**work(trainer), **rates(trainer)})


def work(trainer: Trainer) -> dict[str, Any]:
    """The least work known of a step: floating-point operations of its matrix products, bytes that its sparse products
    gather, bytes that it sends to each rank."""
    part, model, config = trainer.part, trainer.model, trainer.config
    assert part.training is not None
    flops = gathered = 0
    for layer, ((plan, _), (a, b)) in enumerate(zip(part.training, itertools.pairwise(model.widths), strict=True)):
        first = layer == 0
        if config.model == "gat":
            rows, width = plan.n_in, b * config.out_heads if layer == config.layers - 1 else b
            flops += 2 * rows * a * width * (2 if first else 3)
            # Forward, transposed, and the products of the rows at both ends of an edge.
            gathered += 3 * (plan.halo.edges.nnz + plan.n_out) * width * 4
            continue
        map_first = b < a and not (first and part.input.mode == "once")
        rows = plan.n_in if map_first else plan.n_out
        rows += plan.n_out if config.model == "sage" else 0
        flops += 2 * rows * a * b * (2 if first else 3)  # forward, the weights' gradient and the input's
        if first and part.input.mode == "once":
            continue
        linear = plan.linear
        entries = linear.local.nnz + (linear.receive.nnz if linear.receive is not None else 0)
        gathered += entries * min(a, b) * 4 * (1 if first and not map_first else 2)
    ledger = trainer.predicted_ledger() or {}
    sent = [sum(line) for line in zip(*ledger.values(), strict=True)] or [0] * trainer.world.size
    return {
        "layer0": part.input.mode,
        "rows": [[plan.n_in, plan.n_out] for plan, _ in part.training],
        "flops": flops,
        "gathered_bytes": gathered,
        "sent_bytes": sent,
        "parameter_bytes": sum(p.numel() * p.element_size() for p in trainer.parameters),
        "device": str(trainer.world.device),
        "device_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }


def rates(trainer: Trainer) -> dict[str, float]:
    """What this rank reaches while all ranks do the same: matrix products, the sparse kernel over the graph's own
    pattern, and the exchange (a collective)."""
    world, part = trainer.world, trainer.part
    device, dtype = world.device, part.whole.dtype
    rows = torch.randn(1 << 15, WIDTH, device=device, dtype=dtype)
    weight = torch.randn(WIDTH, WIDTH, device=device, dtype=dtype)
    x = torch.randn(part.whole.n_in, WIDTH, device=device, dtype=dtype)
    local = part.whole.linear.local
    step = local.shape[0] if x.is_cuda else max(1, BLOCK_BYTES // (WIDTH * x.element_size()))
    out = torch.empty_like(rows)

    def gather() -> None:
        for _, block in local.blocks(step):
            spmm(block, x)

    # Into memory that is there: new pages would cost more than the product.
    found = {
        "flops_rate": 2 * rows.shape[0] * WIDTH * WIDTH / _seconds(lambda: torch.mm(rows, weight, out=out), world),
        "gather_rate": local.nnz * WIDTH * x.element_size() / _seconds(gather, world),
    }
    if world.size > 1:
        counts = [0 if rank == world.rank else 1 << 13 for rank in range(world.size)]
        sent = rows[:1].expand(sum(counts), -1).contiguous()
        seconds = _seconds(lambda: world.exchange(sent, counts, counts).wait(), world)
        found["exchange_rate"] = sent.numel() * sent.element_size() / seconds
    return found


def _seconds(work: Callable[[], Any], world: World, repeats: int = 7) -> float:
    """The least of a few."""
    found = []
    for _ in range(repeats):
        world.barrier()
        start = time.perf_counter()
        work()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)


if __name__ == "__main__":
    main()
