"""One METIS call in a process of its own: ``python -P metis_child.py FOLDER``.

Reads ``request.json`` and the arrays beside it, writes ``part.npy`` and ``answer.json``. Loads numpy and pymetis and
nothing of this package: run as a script, so that neither METIS's signal handlers nor its aborts and printed messages
touch the process that asked. What METIS prints goes to the pipe that stands in for stdout and stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

PR_SET_PDEATHSIG = 1


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    end_with_parent(request["parent"])
    # pymetis holds the GIL, so Python's own handler would only be heard once METIS is done.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # METIS catches SIGTERM with a longjmp and may then return a half-made partition as if it were whole. Blocked (in
    # the threads that numpy starts, too), it waits until METIS is done and ends this process before it can answer.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        import pymetis
    except ImportError as error:
        raise SystemExit(f"pymetis cannot be imported: {error} (pip install pymetis)") from None
    import numpy as np

    if pymetis.zero_copy_dtype() != np.dtype(np.int64):
        raise SystemExit(f"pymetis {pymetis.version} has {pymetis.zero_copy_dtype()} indices; expected int64")

    def mapped(name: str) -> Array:
        array: Array = np.load(folder / name, mmap_mode="r", allow_pickle=False)
        return array

    options = request["options"]
    if request["volume"]:
        options["objtype"] = int(pymetis.ObjType.VOL)
    result = pymetis.part_graph(
        request["parts"],
        pymetis.CSRAdjacency(mapped("xadj.npy"), mapped("adjncy.npy")),
        vweights=mapped("vwgt.npy") if (folder / "vwgt.npy").exists() else None,
        eweights=mapped("adjwgt.npy") if (folder / "adjwgt.npy").exists() else None,
        recursive=request["recursive"],
        tpwgts=request.get("shares"),
        options=pymetis.Options(**options),
    )
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    np.save(folder / "part.npy", np.asarray(result.vertex_part, dtype=np.int64), allow_pickle=False)
    (folder / "answer.json").write_text(json.dumps({"objective": result.edge_cuts}))


def end_with_parent(parent: int) -> None:
    """A killed parent must not leave METIS running; while it runs no thread of this process can look after that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise SystemExit("the process that asked has gone")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
