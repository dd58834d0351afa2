"""Mt-KaHyPar's km1 objective on the halo hypergraph, in a child process; the extra ``quality`` installs it.

A node v is a net of v and the nodes that read it: the number of parts in a net, less 1, is the rows that v's part
sends, so km1 is exactly the halo rows of an exchange.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partition_tools import metis

MAX_PINS = 20_000_000
"""Beyond this the hypergraph as Python lists would take gigabytes."""
_CHILD = Path(__file__).with_name("kahypar_child.py")


def installed() -> bool:
    return importlib.util.find_spec("mtkahypar") is not None


def versions() -> dict[str, str]:
    return {"mtkahypar": metadata.version("mtkahypar")}


def partition(
    name: str,
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    nodes: int,
    parts: int,
    *,
    seed: int,
    imbalance: float,
    timeout: float,
    weight: NDArray[np.int64] | None = None,
) -> NDArray[np.int32]:
    """[N] parts of a graph with distinct edges ``src[i] -> dst[i]``, ascending in src, by the deterministic preset.

    ``weight`` [N] is what is balanced (None: each node counts 1). Raises ``metis.MetisError`` where it fails or takes
    longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="partition-tools-kahypar-") as created:
        folder = Path(created)
        np.save(folder / "offsets.npy", np.searchsorted(src, np.arange(nodes + 1)))
        np.save(folder / "readers.npy", dst)
        if weight is not None:
            np.save(folder / "weight.npy", weight)
        request = {"parent": os.getpid(), "parts": parts, "seed": seed, "imbalance": imbalance}
        (folder / "request.json").write_text(json.dumps(request))
        about = f"{nodes} nodes, {dst.shape[0]} edges, {parts} parts, seed {seed}"
        metis.run_child([sys.executable, "-P", str(_CHILD), str(folder)], timeout, f"{name}: Mt-KaHyPar", about)
        part = np.load(folder / "part.npy", allow_pickle=False)
    if part.shape != (nodes,) or int(part.min()) < 0 or int(part.max()) >= parts:
        raise metis.MetisError(f"{name}: Mt-KaHyPar returned no part for each node ({about})")
    return np.asarray(part, np.int32)
