"""METIS behind a wall: each call runs in a child process and its answer is believed only after a recount.

METIS aborts, segfaults on some inputs, prints on stdout, traps signals and may then return half a partition as a
whole one. So the child (``metis_child``) has its output captured and shares with this process only a folder of
``.npy`` files, of which both map the adjacency: there is one copy of it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from partition_tools.adjacency import Adjacency
from partition_tools.graph import release

Objective: TypeAlias = Literal["cut", "volume"]
Scheme: TypeAlias = Literal["kway", "recursive"]

MAX_SEED = 2**31 - 1
"""METIS seeds libc's 32-bit generator."""
MAX_TOTAL_WEIGHT = 2**53
"""Sums beyond overflow inside METIS, which then returns everything in one part, or are no longer exact as floats."""

_CHILD = Path(__file__).with_name("metis_child.py")
_BUNDLED_METIS = {"2025.2": "5.1.0"}
"""METIS inside pymetis, which cannot be asked at run time."""
_OUTPUT_SHOWN = 2000
"""Characters of captured output in an error, from its end."""
_REMEDY = "Try another --seed, --scheme recursive, or --method bfs, which does not need METIS."
_REMEDIES = {
    signal.SIGILL: "pymetis was built for another kind of CPU: "
    "pip install --force-reinstall --no-binary pymetis pymetis builds it for this one.",
    signal.SIGKILL: "The system kills a process so when memory runs out. Try a machine with more memory, or "
    "--method bfs, which needs less.",
    signal.SIGTERM: "It was ended from outside; run it again.",
    signal.SIGINT: "It was interrupted; run it again.",
}


class MetisError(RuntimeError):
    """METIS died, ran out of time, or gave an answer that does not stand a recount; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Metis:
    """One graph laid out for METIS in a folder of its own, for as many calls as wanted."""

    name: str
    folder: Path
    adjacency: Adjacency
    """Mapped from the folder."""

    def partition(
        self,
        *,
        parts: int,
        seed: int,
        scheme: Scheme,
        objective: Objective,
        imbalance: float,
        timeout: float | None = None,
        shares: NDArray[np.float64] | None = None,
    ) -> NDArray[np.int32]:
        """[N] part of each node; parts may come out empty or beyond the tolerance, which the caller looks after.

        ``imbalance`` is the fraction by which the heaviest part may exceed its share: its entry of ``shares`` [P],
        which sum to 1, or an even one. ``timeout`` is in seconds.
        Raises ``MetisError``.
        """
        assert 1 < parts <= self.adjacency.num_nodes
        assert objective == "cut" or scheme == "kway"
        # Recursive bisection meets its tolerance in every one of its levels, so they multiply.
        levels = math.ceil(math.log2(parts)) if scheme == "recursive" else 1
        request = {
            "parent": os.getpid(),
            "parts": parts,
            "recursive": scheme == "recursive",
            "volume": objective == "volume",
            "shares": None if shares is None else shares.tolist(),
            "options": {"seed": seed, "ufactor": max(1, int(1000 * ((1 + imbalance) ** (1 / levels) - 1) + 1e-6))},
        }
        about = (
            f"{self.adjacency.num_nodes} nodes, {self.adjacency.num_pairs} undirected pairs, {parts} parts, "
            f"seed {seed}, {scheme}, {objective}, pymetis {_pymetis_version()}"
        )
        for stale in ("part.npy", "answer.json"):
            (self.folder / stale).unlink(missing_ok=True)
        (self.folder / "request.json").write_text(json.dumps(request))
        # -P: the package's folder, where the script lies, must not come before the standard library.
        command = [sys.executable, "-P", str(_CHILD), str(self.folder)]
        output = run_child(command, timeout, f"{self.name}: METIS", about)

        def refuse(what: str) -> MetisError:
            return MetisError(f"{self.name}: METIS {what} ({about}).{output} {_REMEDY}")

        try:
            answer = np.load(self.folder / "part.npy", allow_pickle=False)
            reported = int(json.loads((self.folder / "answer.json").read_text())["objective"])
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise refuse(f"ended without a readable answer: {error}") from None
        if answer.dtype != np.int64 or answer.shape != (self.adjacency.num_nodes,):
            raise refuse(f"returned {answer.dtype} {list(answer.shape)} in place of a part for each node")
        if int(answer.min()) < 0 or int(answer.max()) >= parts:
            node = int(np.flatnonzero((answer < 0) | (answer >= parts))[0])
            raise refuse(f"put node {node} into part {int(answer[node])}")
        part: NDArray[np.int32] = answer.astype(np.int32)
        counted = self.adjacency.volume(part, parts) if objective == "volume" else self.adjacency.cut(part)
        if counted != reported:
            raise refuse(f"reported a {objective} of {reported}, but its partition has {counted}")
        return part


@contextmanager
def laid_out(name: str, adjacency: Adjacency, load: NDArray[np.int64] | None) -> Iterator[Metis]:
    """METIS for an adjacency and the load [N] of each node that is to be balanced (None: each node counts 1).

    Keep no other reference to the adjacency: the one inside ``Metis`` is mapped from a folder in ``TMPDIR``, which is
    removed at the end. Raises ``ValueError`` where the folder has too little space.
    """
    if load is not None:
        assert load.dtype == np.int64
        assert load.shape == (adjacency.num_nodes,)
        assert int(load.min()) >= 0
        assert 0 < load.sum(dtype=np.float64) < MAX_TOTAL_WEIGHT
    with tempfile.TemporaryDirectory(prefix="partition-tools-metis-") as created:
        folder = Path(created)
        try:
            stored = adjacency.stored(folder)
            del adjacency
            if load is not None:
                np.save(folder / "vwgt.npy", load, allow_pickle=False)
        except OSError as error:
            raise ValueError(
                f"{name}: the graph could not be laid out for METIS in {folder}: {error} (TMPDIR names another place)"
            ) from error
        for array in (stored.xadj, stored.adjncy, stored.weight):
            release(array)  # it is the child's to look at
        yield Metis(name=name, folder=folder, adjacency=stored)


def versions() -> dict[str, str]:
    """What a partition depends on besides its options; another libc may give another partition, too."""
    pymetis = _pymetis_version()
    bundled = _BUNDLED_METIS.get(".".join(pymetis.split(".")[:2]))
    return {"pymetis": pymetis, "METIS": f"{bundled or 'as bundled in pymetis'}, 64-bit indices"}


def _pymetis_version() -> str:
    """Told without loading it."""
    try:
        return metadata.version("pymetis")
    except metadata.PackageNotFoundError:
        raise MetisError("pymetis is not installed: pip install pymetis, or --method bfs") from None


def refill_empty(
    part: NDArray[np.int32], parts: int, adjacency: Adjacency, load: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], int]:
    """Fills empty parts in place and returns their ids and the number of nodes moved; deterministic.

    Each empty part takes nodes from the part with the largest load: up to the mean load and half of the donor's, in
    breadth-first order from the node with the fewest neighbours in the donor, so that what moves hangs together and
    few pairs are newly cut. Needs parts <= N.
    """
    assert parts <= part.shape[0]
    count = np.bincount(part, minlength=parts)
    empty = np.flatnonzero(count == 0)
    weight = np.ones(part.shape[0]) if load is None else load.astype(np.float64)
    total = np.bincount(part, weights=weight, minlength=parts)
    mean, moved = float(total.sum()) / parts, 0
    for target in empty.tolist():
        donor = int(np.argmax(np.where(count > 1, total, -1.0)))
        nodes = np.flatnonzero(part == donor)
        inner_degree = np.diff(adjacency.induced(nodes).xadj)
        nodes = nodes[np.argsort(inner_degree, kind="stable")]
        nodes = nodes[adjacency.induced(nodes).breadth_first_order()]
        reached = np.cumsum(weight[nodes])
        room = min(mean, float(total[donor]) / 2)
        take = min(max(1, int(np.searchsorted(reached, room, side="right"))), nodes.size - 1)
        part[nodes[:take]] = target
        for changed, by, carried in ((target, take, reached[take - 1]), (donor, -take, -reached[take - 1])):
            count[changed] += by
            total[changed] += carried
        moved += take
    return empty, moved


def run_child(command: list[str], timeout: float | None, who: str, about: str) -> str:
    """Runs a partitioner and returns what it printed, as a sentence; raises ``MetisError`` where it fails."""
    timed_out = False
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            captured, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.kill()  # METIS traps SIGTERM.
            captured, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
    text = captured.decode(errors="replace").strip()[-_OUTPUT_SHOWN:]
    output = f" It printed: {text!r}." if text else " It printed nothing."
    if timed_out:
        raise MetisError(
            f"{who} took more than {timeout:g} s ({about}).{output} Allow it longer (--timeout), or try "
            "--objective cut, fewer parts, or --method bfs, which does not need METIS."
        )
    if process.returncode < 0:
        number = -process.returncode
        try:
            ended_by = signal.Signals(number)
        except ValueError:
            raise MetisError(f"{who} was ended by signal {number} ({about}).{output} {_REMEDY}") from None
        raise MetisError(f"{who} was ended by {ended_by.name} ({about}).{output} {_REMEDIES.get(ended_by, _REMEDY)}")
    if process.returncode:
        raise MetisError(f"{who} failed with exit status {process.returncode} ({about}).{output} {_REMEDY}")
    return output
