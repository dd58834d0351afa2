"""One Mt-KaHyPar call in a process of its own: ``python -P kahypar_child.py FOLDER``, as ``metis_child`` does METIS."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the process that asked
        if os.getppid() != request["parent"]:
            raise SystemExit("the process that asked has gone")
    import mtkahypar
    import numpy as np

    offsets = np.load(folder / "offsets.npy").tolist()
    readers = np.load(folder / "readers.npy").tolist()
    nodes = len(offsets) - 1
    nets = [[v, *readers[offsets[v] : offsets[v + 1]]] for v in range(nodes) if offsets[v + 1] > offsets[v]]
    library = mtkahypar.initialize(1, False)
    mtkahypar.set_seed(request["seed"])
    context = library.context_from_preset(mtkahypar.PresetType.DETERMINISTIC)
    context.set_partitioning_parameters(request["parts"], request["imbalance"], mtkahypar.Objective.KM1)
    context.logging = False
    if (folder / "weight.npy").exists():
        weight = np.load(folder / "weight.npy").tolist()
        graph = library.create_hypergraph(context, nodes, len(nets), nets, weight, [1] * len(nets))
    else:
        graph = library.create_hypergraph(context, nodes, len(nets), nets)
    result = graph.partition(context)
    np.save(folder / "part.npy", np.asarray(result.get_partition(), np.int32), allow_pickle=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
