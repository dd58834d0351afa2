"""Whether a folder of shards is what was built: one that passes trains on exactly the graph that was read.

Memory: one shard, some arrays of N entries, and one or two bytes an edge.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from fullgraph.hdf5 import FormatError
from fullgraph.shards import MANIFEST, Manifest, Shard, check_file, read_manifest, read_shard
from partition_tools.sums import Hash, add, block_ids, block_of, block_sums, num_blocks

_NODE_TABLES = {
    "x": "features/x",
    "y": "labels/y",
    "train": "splits/train",
    "val": "splits/val",
    "test": "splits/test",
    "node_ids": "ids/original",
}
_EDGE_TABLES = {
    "src": "edges/indices",
    "dst": "edges/indptr",
    "edge_weight": "edges/weight",
    "edge_x": "edges/x",
}
_BLOCKS_SHOWN = 10
_LEAST_BYTES = {"num_nodes": 32, "num_edges": 20}
"""What a node and an edge take in a shard, whatever else it holds."""
_PROBE = "import sys; from fullgraph.shards import read_shard; read_shard(sys.argv[1], int(sys.argv[2]), verify=False)"
_PROBE_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something in a build that is not as it was built."""

    file: str
    """Name of the file, or of the candidates where the sums cannot tell them apart."""
    dataset: str
    """Empty for the file as a whole."""
    index: int | None
    """Position in the dataset, where one is known."""
    message: str

    def __str__(self) -> str:
        place = self.dataset if self.index is None else f"{self.dataset}[{self.index}]"
        return ": ".join(text for text in (self.file, place, self.message) if text)


def verify(folder: str | Path, *, deep: bool = True) -> list[Fault]:
    """Every fault found; empty where the build is whole. Without ``deep`` only files' sizes and checksums are compared.

    Proves that each file is as it was written; that owned sets are disjoint and cover 0..N-1; that every edge is
    stored once, with the owner of its destination; that halo lists point at the right node of the right owner; that
    degrees are those of the whole graph; and that features, labels, splits, ids, and edges with all they carry, equal
    the sums taken from the source graph. What follows from a fault that is named already is not reported again, so a
    build may show further faults once the first are mended. ``ValueError`` where the folder is no build at all.
    """
    check = _Check(folder=Path(folder), manifest=read_manifest(folder))
    check.sizes()
    readable = [] if check.faults else [q for q in range(check.manifest.parts) if check.file(q)]
    if not deep:
        return check.faults
    shards = [q for q in readable if check.take(q)]
    if len(shards) == check.manifest.parts and check.nodes():
        check.compare_sums()
        for q in shards:
            check.halo(q)
        check.edges()
        check.data()
    return check.faults


@dataclass(kw_only=True)
class _Check:
    """What has been seen so far. Methods add to ``faults`` and are called in the order of `verify`."""

    folder: Path
    manifest: Manifest
    faults: list[Fault] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)
    """Parts whose checksum differs."""
    totals: dict[str, Hash] = field(default_factory=dict)
    bad_blocks: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Table -> [B] blocks whose sum differs from the source's."""
    sparse: bool = False
    """Whether features are stored as CSR."""
    degree_faults: list[Fault] = field(default_factory=list)
    """Held back until the edges, which they follow from, are known to be right."""

    def __post_init__(self) -> None:
        self.num_nodes, self.num_edges = self.manifest.graph["num_nodes"], self.manifest.graph["num_edges"]

    def _add(self, q: int | None, dataset: str, message: str, index: int | None = None) -> None:
        file = MANIFEST if q is None else self.manifest.files[q].path
        self.faults.append(Fault(file=file, dataset=dataset, index=index, message=message))

    def _first(
        self, q: int, dataset: str, bad: NDArray[np.bool_], message: str, *values: NDArray[Any]
    ) -> Iterator[Fault]:
        """One fault for all bad positions of a dataset; ``message`` is formatted with the values at the first."""
        if bad.any():
            index, count = int(np.argmax(bad)), int(np.count_nonzero(bad))
            found = message.format(*(value[index] for value in values))
            found += f" (the first of {count})" if count > 1 else ""
            yield Fault(file=self.manifest.files[q].path, dataset=dataset, index=index, message=found)

    def _add_twice(
        self, q: int, dataset: str, noun: str, bad: NDArray[np.bool_], ids: NDArray[np.int64], owner: NDArray[Any]
    ) -> None:
        """An id that part q holds and another part, or part q itself, held before. Which is wrong, sums do not say."""
        if bad.any():
            index = int(np.argmax(bad))
            first = int(owner[ids[index]])
            parts = [q] if first < 0 else [first, q]
            suspects = [part for part in parts if part in self.damaged] or parts
            found = f"{noun} {ids[index]} is stored " + ("twice" if first < 0 else f"by part {first} and by part {q}")
            self.faults.append(
                Fault(
                    file=self._names(suspects),
                    dataset=dataset,
                    index=index if suspects == [q] else None,
                    message=found,
                )
            )

    def _names(self, parts: list[int]) -> str:
        return " or ".join(self.manifest.files[q].path for q in parts)

    # ---- files

    def sizes(self) -> None:
        """Numbers in the manifest that no files of these sizes can hold; nothing is allocated before."""
        stored = sum(file.bytes for file in self.manifest.files)
        for key, least in _LEAST_BYTES.items():
            if (count := self.manifest.graph[key]) * least > stored:
                self._add(None, f"graph.{key}", f"is {count}, but the files have {stored} bytes in all")
        for name in sorted({"src", "dst", *self.manifest.sums}):
            blocks = num_blocks(self.num_edges if name in _EDGE_TABLES else self.num_nodes)
            found = len(self.manifest.sums.get(name, ()))
            if name not in _EDGE_TABLES | _NODE_TABLES or found != blocks:
                self._add(None, f"sums.{name}", f"{found} sums; expected {blocks}")
        if self.faults:
            return
        smallest = np.min_scalar_type(-self.manifest.parts)
        self.owner = np.full(self.num_nodes, -1, smallest)
        self.index = np.zeros(self.num_nodes, np.int64)
        self.edge_owner = np.full(self.num_edges, -1, smallest)
        self.in_degree = np.zeros(self.num_nodes, np.int64)
        self.in_weight = np.zeros(self.num_nodes, np.float64)
        self.loop_count = np.zeros(self.num_nodes, np.int64)

    def file(self, q: int) -> bool:
        """Whether the file of part q can be looked into."""
        try:
            check_file(self.folder, self.manifest.files[q], verify=False)
        except FormatError as fault:
            self._add(q, "", fault.message)
            return False
        try:
            check_file(self.folder, self.manifest.files[q])
        except FormatError as fault:
            self.damaged.add(q)
            self._add(q, "", fault.message)
            return self._survives(q)
        return True

    def _survives(self, q: int) -> bool:
        # HDF5 may crash on a file whose structure is damaged: let a child try first.
        command = [sys.executable, "-c", _PROBE, str(self.folder), str(q)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            code = subprocess.run(
                command, env=environment, capture_output=True, timeout=_PROBE_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code < 0:
            self._add(q, "", "too damaged for HDF5 to be read")
        return code >= 0

    # ---- one shard at a time

    def take(self, q: int) -> bool:
        """Read part q and note what it holds; False where it is not a shard."""
        try:
            shard = read_shard(self.folder, q, manifest=self.manifest, verify=False)
        except FormatError as fault:
            self._add(q, fault.dataset, fault.message, fault.index)
            return False
        self.sparse = isinstance(shard.x, sp.csr_array)
        owned, ids = shard.owned_global, shard.edge_global
        taken = self.owner[owned] >= 0
        self._add_twice(q, "owned/global_id", "node", taken, owned, self.owner)
        self.owner[owned] = q
        self.index[owned] = np.arange(shard.num_owned)
        order = np.argsort(ids, kind="stable")
        again = self.edge_owner[ids] >= 0
        again[order[1:]] |= ids[order[1:]] == ids[order[:-1]]
        self._add_twice(q, "edges/global_id", "edge", again, ids, self.edge_owner)
        self.edge_owner[ids] = q
        rows = np.repeat(np.arange(shard.num_owned), np.diff(shard.indptr))
        self._take_degrees(q, shard, rows, order)
        src = np.concatenate((owned, shard.halo_global))[shard.indices]
        tables = {"src": (ids, src), "dst": (ids, owned[rows])}
        tables |= {name: (ids, getattr(shard, name)) for name in ("edge_weight", "edge_x")}
        tables |= {name: (owned, getattr(shard, name)) for name in ("x", "y", "node_ids")}
        if shard.train.shape[0]:
            tables |= {name: (owned, getattr(shard, name).T) for name in ("train", "val", "test")}
        for name, (row_ids, values) in tables.items():
            if values is not None:
                sums = block_sums(row_ids, values, self.num_edges if name in _EDGE_TABLES else self.num_nodes)
                self.totals[name] = add(self.totals[name], sums) if name in self.totals else sums
        return True

    def _take_degrees(self, q: int, shard: Shard, rows: NDArray[np.int64], order: NDArray[np.int64]) -> None:
        n, owned, weight = shard.num_owned, shard.owned_global, shard.edge_weight
        self.in_degree[owned] = np.diff(shard.indptr)
        self.loop_count[owned] = np.bincount(rows[rows == shard.indices], minlength=n)
        # Added in order of edge id, as the whole graph's were, so the sums are equal to the last bit.
        self.in_weight[owned] = (
            self.in_degree[owned] if weight is None else np.bincount(rows[order], weight[order], minlength=n)
        )
        self._compare_degrees(q, shard, owned, slice(0, n))

    def _compare_degrees(self, q: int, shard: Shard, nodes: NDArray[np.int64], place: slice) -> None:
        for dataset, stored, right in (
            ("degrees/in", shard.in_degree, self.in_degree[nodes]),
            ("degrees/in_weight", shard.in_weight, self.in_weight[nodes]),
            ("degrees/loops", shard.loop_count, self.loop_count[nodes]),
        ):
            bad = np.zeros(stored.shape[0], np.bool_)
            bad[place] = (stored[place] != right) & ~(np.isnan(stored[place]) & np.isnan(right))
            expected = np.zeros_like(stored)
            expected[place] = right
            message = "is {}; the edges of the whole graph give {}"
            self.degree_faults += self._first(q, dataset, bad, message, stored, expected)

    # ---- all shards together

    def nodes(self) -> bool:
        """Whether every node has one owner."""
        missing = np.flatnonzero(self.owner < 0)
        if missing.size:
            more = f" and {missing.size - 1} others are" if missing.size > 1 else " is"
            self._add(None, "owned/global_id", f"node {missing[0]}{more} owned by no part")
        return not any(fault.dataset == "owned/global_id" for fault in self.faults)

    def compare_sums(self) -> None:
        for name in _EDGE_TABLES | _NODE_TABLES:
            wanted, found = self.manifest.sums.get(name), self.totals.get(name)
            if wanted is None and found is None:
                continue
            if wanted is None or found is None:
                self._add(None, f"sums.{name}", "the shards and the manifest differ in whether the graph has this")
            else:
                self.bad_blocks[name] = np.asarray(wanted, np.uint64) != found

    def halo(self, q: int) -> None:
        """Halo lists of part q against what their owners hold."""
        shard = read_shard(self.folder, q, manifest=self.manifest, verify=False, features=False)
        halo = shard.halo_global
        owner, index = self.owner[halo], self.index[halo]
        bad = (owner != shard.halo_owner) | (index != shard.halo_index)
        # Where the edges from such a node are not those of the source either, the node is wrong, not its place.
        blocks = block_of(shard.edge_global, self.num_edges)
        from_bad = np.append(np.zeros(shard.num_owned, np.bool_), bad)[shard.indices] & self.bad_blocks["src"][blocks]
        wrong_node = np.zeros(bad.shape[0], np.bool_)
        wrong_node[shard.indices[from_bad] - shard.num_owned] = True
        self.bad_blocks["src"][blocks[from_bad]] = False
        place = "node {} is owned by part {} at index {}; the list says part {} at index {}"
        lists = (halo, owner, index, shard.halo_owner, shard.halo_index)
        self.faults += self._first(q, "halo/global_id", wrong_node, place, *lists)
        self.faults += self._first(q, "halo/owner", bad & ~wrong_node & (owner != shard.halo_owner), place, *lists)
        self.faults += self._first(q, "halo/index", bad & ~wrong_node & (owner == shard.halo_owner), place, *lists)
        if not bad.any():
            self._compare_degrees(q, shard, halo, slice(shard.num_owned, None))

    def edges(self) -> None:
        """Every edge stored, with its own ends and weight; degrees follow from that."""
        missing = np.flatnonzero(self.edge_owner < 0)
        if missing.size:
            more = f" and {missing.size - 1} others are" if missing.size > 1 else " is"
            self._add(None, "edges/global_id", f"edge {missing[0]}{more} stored by no part")
        else:
            both = self.bad_blocks["src"] & self.bad_blocks["dst"]
            self._differ("edges/global_id", both, self.edge_owner)
            for name, dataset in _EDGE_TABLES.items():
                if name in self.bad_blocks:
                    self._differ(dataset, self.bad_blocks[name] & ~both, self.edge_owner)
        if not any(fault.dataset.startswith(("edges/", "halo/global_id")) for fault in self.faults):
            self.faults += self.degree_faults

    def data(self) -> None:
        for name, dataset in _NODE_TABLES.items():
            if name in self.bad_blocks:
                # The values of a sparse row lie in three datasets, which its hash cannot tell apart.
                place = "features" if dataset == "features/x" and self.sparse else dataset
                self._differ(place, self.bad_blocks[name], self.owner)

    def _differ(self, dataset: str, bad: NDArray[np.bool_], owner: NDArray[Any]) -> None:
        """A fault for each block of global ids, naming the parts that hold its ids, damaged files first."""
        count = owner.shape[0]
        blocks = np.flatnonzero(bad)
        for place, block in enumerate(blocks[:_BLOCKS_SHOWN].tolist(), start=1):
            first, end = block_ids(block, count)
            parts = np.unique(owner[first:end]).tolist()
            suspects = [q for q in parts if q in self.damaged] or parts
            index = None
            if len(suspects) == 1 and owner is self.owner:
                places = self.index[first:end][owner[first:end] == suspects[0]]
                index = int(places[0]) if places.size == 1 else None
            ids = f"id {first}" if end == first + 1 else f"ids {first} to {end - 1}"
            rest = f" (and in {blocks.size - place} further blocks of ids)" if place == _BLOCKS_SHOWN else ""
            self.faults.append(
                Fault(
                    file=self._names(suspects),
                    dataset=dataset,
                    index=index,
                    message=f"differs from the source graph at global {ids}{rest}",
                )
            )
