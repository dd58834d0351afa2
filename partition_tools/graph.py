"""The graph as every reader returns it and every later stage takes it.

Features may stay in their file (`stored.StoredRows`), and so may edges: their arrays are mapped then, and whatever goes
through them by `edge_blocks` needs no memory for them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from partition_tools.stored import Features

Array: TypeAlias = NDArray[Any]

EDGE_BLOCK = 1 << 22
"""Edges that are looked at together."""


def entry_keys(src: NDArray[np.int64], dst: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    """[E] one number an entry: equal for entries with equal ends, in the order of (src, dst)."""
    if num_nodes > 3_037_000_499:  # the square must fit into int64
        raise ValueError(f"{num_nodes} nodes; at most 3,037,000,499 can be handled")
    keys: NDArray[np.int64] = src * np.int64(num_nodes) + dst
    return keys


@dataclass(frozen=True, kw_only=True)
class Splits:
    """k splits of the nodes: three bool masks of shape [k, N] each."""

    train: NDArray[np.bool_]
    val: NDArray[np.bool_]
    test: NDArray[np.bool_]

    @property
    def count(self) -> int:
        return int(self.train.shape[0])


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A graph with N nodes and E directed entries; entry i is an edge ``src[i] -> dst[i]`` with global edge id i.

    An undirected pair is stored as two entries. Loops, duplicates and isolated nodes are kept as given.
    Construction checks shapes, dtypes and ranges and raises ``ValueError`` naming the field, the value and what
    was expected.
    """

    name: str
    num_nodes: int
    src: NDArray[np.int64]
    """[E] global ids of sources."""
    dst: NDArray[np.int64]
    """[E] global ids of destinations."""
    x: Features | None = None
    """[N, F] features, dense, CSR or left in their file, any real dtype."""
    y: Array | None = None
    """int64 [N] classes with -1 for no label; uint8 [N, C] multi-label; float32/float64 [N] or [N, T] targets
    with NaN for no label."""
    splits: Splits | None = None
    edge_weight: NDArray[np.floating[Any]] | None = None
    """[E] float32 or float64."""
    edge_x: Array | None = None
    """[E, K] edge features, any real dtype."""
    node_weight: NDArray[np.int64] | None = None
    """[N, c] weights for balance, where the file has them."""
    node_ids: Array | None = None
    """[N] the user's own ids (int64 or str), where they differ from 0..N-1."""
    class_names: Array | None = None
    """[C] the user's own labels of the classes (int64 or str), or names of label columns, where they differ from
    0..C-1."""
    learned_features: int = 0
    """Columns of a feature table that training learns, a row a node, in place of x; 0 for none."""
    changes: tuple[str, ...] = ()
    """One sentence for each thing that was changed or chosen on the way from the file to here."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """For messages: field -> the file it came from, and "" -> the file of the graph itself."""

    def __post_init__(self) -> None:
        n, e = self.num_nodes, self.src.shape[0]
        if n < 1:
            raise ValueError(f"{self.name}: the graph has {n} nodes; at least 1 is needed")
        memory = machine_memory()
        if 16 * n > memory:  # one offset and one part a node are the least that anything needs
            raise ValueError(
                f"{self.name}: num_nodes is {n}, for which this machine's {memory / 2**30:.0f} GiB of memory do not "
                f"suffice; expected the number of nodes, at most {memory // 16}"
            )
        for end in ("src", "dst"):
            ids = getattr(self, end)
            if ids.dtype != np.int64 or ids.ndim != 1:
                raise ValueError(f"{self.name}: {end} is {ids.dtype} {list(ids.shape)}; expected int64 [E]")
            if ids.shape[0] != e:
                raise ValueError(f"{self.name}: src has {e} entries but {end} has {ids.shape[0]}")
            if e and not _inside(ids, n):
                bad = int(np.flatnonzero((ids < 0) | (ids >= n))[0])
                raise ValueError(
                    f"{self.name}: edge {bad} is {int(self.src[bad])} -> {int(self.dst[bad])}, but node ids go from "
                    f"0 to {n - 1} ({n} nodes)"
                )
        rows = {
            "x": self.x,
            "y": self.y,
            "node_weight": self.node_weight,
            "node_ids": self.node_ids,
        }
        for name, value in rows.items():
            if value is not None and value.shape[0] != n:
                raise ValueError(f"{self.name}: {name} has {value.shape[0]} rows for {n} nodes")
        if self.x is not None and len(self.x.shape) != 2:
            raise ValueError(f"{self.name}: x has shape {list(self.x.shape)}; expected [N, F] = [{n}, F]")
        if self.edge_weight is not None and self.edge_weight.shape != (e,):
            raise ValueError(f"{self.name}: edge_weight has shape {list(self.edge_weight.shape)} for {e} edges")
        if self.edge_x is not None and (self.edge_x.ndim != 2 or self.edge_x.shape[0] != e):
            raise ValueError(f"{self.name}: edge_x has shape {list(self.edge_x.shape)}; expected [E, K] with E = {e}")
        if self.class_names is not None and (self.task not in ("single-label", "multi-label") or not self._named()):
            raise ValueError(
                f"{self.name}: class_names has {self.class_names.shape[0]} names; expected one for each class of a "
                f"graph with classes"
            )
        if self.learned_features < 0 or (self.learned_features and self.x is not None):
            raise ValueError(
                f"{self.name}: learned_features is {self.learned_features}; expected 0, or more for a graph without x"
            )
        if self.splits is not None:
            for part in ("train", "val", "test"):
                mask = getattr(self.splits, part)
                if mask.dtype != np.bool_ or mask.shape != (self.splits.count, n):
                    raise ValueError(
                        f"{self.name}: {part} masks are {mask.dtype} {list(mask.shape)}; expected bool "
                        f"[{self.splits.count}, {n}]"
                    )

    def _named(self) -> bool:
        """Whether each class or label column has its name."""
        assert self.y is not None
        assert self.class_names is not None
        classes = self.y.shape[1] if self.y.ndim == 2 else int(self.y.max(initial=-1)) + 1
        return bool(self.class_names.shape[0] >= classes)

    def where(self, name: str) -> str:
        """How messages name a field: the file it came from, or the graph's own file and the field."""
        return self.origin.get(name) or f"{self.origin.get('', self.name)}: {name}"

    def node(self, index: int) -> str:
        """How messages name a node: by the user's own id, where there is one."""
        return f"node {index if self.node_ids is None else self.node_ids[index]}"

    def edge(self, index: int) -> str:
        """How messages name an edge: by its place, from 0, and the user's own ids of its ends."""
        ends = (self.node(int(ids[index])).removeprefix("node ") for ids in (self.src, self.dst))
        return f"edge {index} ({' -> '.join(ends)})"

    @property
    def num_edges(self) -> int:
        """Directed entries."""
        return int(self.src.shape[0])

    @property
    def edges_on_disk(self) -> bool:
        """Whether the edges' arrays are mapped from files."""
        return isinstance(self.src, np.memmap)

    def edge_blocks(self) -> Iterator[tuple[slice, NDArray[np.int64], NDArray[np.int64]]]:
        """(which edges, their sources, their destinations), block by block; nothing of them stays in memory."""
        for start in range(0, self.num_edges, EDGE_BLOCK):
            block = slice(start, min(start + EDGE_BLOCK, self.num_edges))
            yield block, self.src[block], self.dst[block]
            release(self.src)
            release(self.dst)

    @property
    def task(self) -> str | None:
        """``single-label``, ``multi-label`` or ``regression``, as the labels say; None without labels."""
        if self.y is None:
            return None
        if np.issubdtype(self.y.dtype, np.floating):
            return "regression"
        return "multi-label" if self.y.ndim == 2 else "single-label"

    @property
    def labelled(self) -> NDArray[np.bool_]:
        """[N] whether a node has its label: class not -1, no target NaN; every node of a multi-label graph has."""
        if self.y is None:
            return np.zeros(self.num_nodes, np.bool_)
        if self.task == "single-label":
            return np.asarray(self.y >= 0)
        if self.task == "multi-label":
            return np.ones(self.num_nodes, np.bool_)
        return np.asarray(~np.isnan(self.y.reshape(self.num_nodes, -1)).any(axis=1))


def machine_memory() -> int:
    """Bytes of memory that this machine has, whoever uses them."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def release(array: Array | None) -> None:
    """Give back the pages of a mapped array that have been read; they are read again when they are needed."""
    while isinstance(array, np.memmap):
        mapped = getattr(array, "_mmap", None)
        if isinstance(mapped, mmap.mmap):
            mapped.madvise(mmap.MADV_DONTNEED)
            return
        array = array.base


def _inside(ids: NDArray[np.int64], num_nodes: int) -> bool:
    for start in range(0, ids.shape[0], EDGE_BLOCK):
        block = ids[start : start + EDGE_BLOCK]
        if int(block.min()) < 0 or int(block.max()) >= num_nodes:
            return False
        release(ids)
    return True
