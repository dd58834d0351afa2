"""What this machine does a second, measured: the constants of ``fullgraph.cost.Machine``.

``python -m fullgraph.probe FILE`` as one of the ranks that torchrun starts; rank 0 writes the constants as JSON. A rank
has the threads that a training rank would have, and all ranks work at the same time.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fullgraph.cost import Machine
from fullgraph.dropout import MaskKey, ReluDropout
from fullgraph.kernels import from_coo, spmm
from fullgraph.world import World, open_world

_ROUNDS = 7
_ROWS, _WIDTH, _DEGREE = 20_000, 128, 16
_EXCHANGED = 20_000
_CALLS = 120
"""Small operations that a layer's forward and backward pass come to, with what Python does around them."""


def measure(world: World) -> Machine:
    """The slowest rank's rate of each kind, medians over rounds (a collective)."""
    device = world.device
    x, weight = torch.ones(_ROWS, _WIDTH, device=device), torch.ones(_WIDTH, _WIDTH, device=device)
    flops = 2.0 * _ROWS * _WIDTH * _WIDTH / _seconds(world, lambda: x @ weight)

    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(_ROWS, (2, _DEGREE * _ROWS), generator=generator).numpy()
    adjacency = from_coo((_ROWS, _ROWS), edges[0], edges[1], None).to(device, torch.float32)
    gather = _DEGREE * _ROWS * _WIDTH * 4.0 / _seconds(world, lambda: spmm(adjacency, x))
    act, rows = ReluDropout(torch.arange(_ROWS, device=device), 0.5, MaskKey(1, 0, 0)).over(_WIDTH), x.clone()
    elements = _ROWS * _WIDTH / (_seconds(world, lambda: act(rows, 0)) + _seconds(world, lambda: rows.mul_(x)))
    few = rows[:1]
    overhead = _CALLS * _seconds(world, lambda: few @ weight)
    if world.size == 1:
        return Machine(flops=flops, gather=gather, elements=elements, overhead=overhead)

    def exchange(rows: int) -> Callable[[], object]:
        counts = [rows] * world.size
        sent = torch.ones(rows * world.size, _WIDTH, device=device)
        return lambda: world.exchange(sent, counts, counts).wait()

    latency = _seconds(world, exchange(1))
    each = _EXCHANGED // (world.size - 1)
    travel = max(_seconds(world, exchange(each)) - latency, 1e-9)
    return Machine(
        flops=flops,
        gather=gather,
        bandwidth=(world.size - 1) * each * _WIDTH * 4.0 / travel,
        latency=latency,
        elements=elements,
        overhead=overhead,
    )


def _seconds(world: World, work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(_ROUNDS):
        world.barrier()
        start = time.perf_counter()
        work()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return float(world.gather_vector([statistics.median(taken)]).max())


def main(path: Path) -> None:
    with open_world() as world:
        found = measure(world)
        if world.rank == 0:
            path.write_text(json.dumps(dataclasses.asdict(found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
