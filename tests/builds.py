"""Small builds on disk, and ways to damage them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from fullgraph.files import checksum
from fullgraph.shards import read_manifest, write_manifest
from partition_tools.assign import Assignment
from partition_tools.graph import Graph, Splits


def assignment(part: Any, parts: int, cluster: Any = None, **options: Any) -> Assignment:
    return Assignment(
        part=np.asarray(part, np.int32),
        cluster=None if cluster is None else np.asarray(cluster, np.int32),
        parts=parts,
        method="by hand",
        seed=7,
        options=options,
        versions={"numpy": "0"},
        notes=(),
    )


def two_triangles(**fields: Any) -> Graph:
    """0-1-2 and 3-4-5, joined by 2-3; every pair both ways, 14 edges."""
    pairs = np.array([[0, 1], [0, 2], [1, 2], [2, 3], [3, 4], [3, 5], [4, 5]])
    edges = np.concatenate([pairs, pairs[:, ::-1]])
    fields = {"src": edges[:, 0].copy(), "dst": edges[:, 1].copy()} | fields
    return Graph(name="two triangles", num_nodes=6, **fields)


def rich_graph(nodes: int = 30, edges: int = 120, seed: int = 0, **fields: Any) -> Graph:
    """A graph with everything that a shard can hold; its weights are such that their sums are not exact."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 3, (2, nodes))
    given = {
        "src": rng.integers(0, nodes, edges),
        "dst": rng.integers(0, nodes, edges),
        "x": rng.standard_normal((nodes, 5), dtype=np.float32),
        "y": rng.integers(-1, 4, nodes),
        "splits": Splits(train=kind == 0, val=kind == 1, test=kind == 2),
        "edge_weight": rng.random(edges, dtype=np.float32),
        "edge_x": rng.integers(-9, 9, (edges, 2), np.int16),
        "node_ids": np.array([f"node é {i * 7}" for i in range(nodes)]),
        "changes": ("made for a test",),
    }
    return Graph(name="rich", num_nodes=nodes, **given | fields)


def change(folder: Path, part: int, edit: Callable[[h5py.File], None], *, refresh: bool = True) -> str:
    """Edit a shard in place and, unless told not to, make the manifest agree with it. Returns its name."""
    manifest = read_manifest(folder)
    entry = manifest.files[part]
    with h5py.File(folder / entry.path, "r+") as file:
        edit(file)
    if refresh:
        refresh_manifest(folder)
    return entry.path


def refresh_manifest(folder: Path, **fields: Any) -> None:
    """Rewrite the manifest with the sizes and checksums that the files have now, and other fields as given."""
    manifest = read_manifest(folder)
    files = tuple(
        dataclasses.replace(file, bytes=(folder / file.path).stat().st_size, xxh3=checksum(folder / file.path))
        for file in manifest.files
    )
    write_manifest(folder, dataclasses.replace(manifest, files=files, **fields))


def put(dataset: str, index: Any, value: Any) -> Callable[[h5py.File], None]:
    """Edit that sets one place; ``value`` may be a function of what stands there."""

    def edit(file: h5py.File) -> None:
        values = file[dataset]
        values[index] = value(values[index]) if callable(value) else value

    return edit


def replace_dataset(dataset: str, values: NDArray[Any], **options: Any) -> Callable[[h5py.File], None]:
    def edit(file: h5py.File) -> None:
        del file[dataset]
        file.create_dataset(dataset, data=values, **options)

    return edit
