"""No damaged or hostile file makes a reader crash, hang, take the memory, or raise what is not a ``ValueError``."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from rich.console import Console

from fullgraph.checkpoint import checkpoints_of, read_checkpoint
from fullgraph.config import TrainConfig
from fullgraph.inference import read_config
from fullgraph.loop import train
from fullgraph.runlog import read_state, write_state
from fullgraph.shards import MANIFEST, Shard, part_name, read_manifest, read_shard
from partition_tools.assign import read_parts
from partition_tools.builder import build
from partition_tools.graph import Graph
from partition_tools.sources import load
from partition_tools.sources.hdf5_graph import save_h5
from partition_tools.sources.plain import save_npz
from tests.builds import assignment, refresh_manifest, rich_graph
from tests.fuzz import Target, damaged, faults

EDGES = np.array([[0, 1, 2, 2, 3], [1, 2, 0, 3, 3]])


# --------------------------------------------------------------------------------------------------------- formats


def _file(name: str, content: bytes | str) -> Target:
    raw = content.encode() if isinstance(content, str) else content

    def make(folder: Path) -> list[Path]:
        (folder / name).write_bytes(raw)
        return [folder / name]

    return Target(make, lambda folder: load(folder / name))


def _saved(name: str, save: Any) -> Target:
    def make(folder: Path) -> list[Path]:
        save(folder / name, rich_graph(nodes=8, edges=20))
        return [folder / name]

    return Target(make, lambda folder: load(folder / name))


def _arrays(name: str, **arrays: Any) -> Target:
    def make(folder: Path) -> list[Path]:
        np.savez(folder / name, **arrays)
        return [folder / name]

    return Target(make, lambda folder: load(folder / name))


def _csr(name: str, matrix: sp.csr_array) -> dict[str, Any]:
    return {
        f"{name}_data": matrix.data,
        f"{name}_indices": matrix.indices,
        f"{name}_indptr": matrix.indptr,
        f"{name}_shape": np.array(matrix.shape),
    }


def _planetoid(folder: Path) -> list[Path]:
    allx, one_hot = sp.csr_matrix(np.arange(18).reshape(6, 3) % 4, dtype=np.float32), np.eye(3, dtype=np.int32)
    parts: dict[str, Any] = {
        "x": allx[:2],
        "y": one_hot[[0, 1]],
        "allx": allx,
        "ally": one_hot[[0, 1, 2, 0, 1, 2]],
        "tx": sp.csr_matrix([[9, 0, 0], [6, 0, 0], [8, 0, 0]], dtype=np.float32),
        "ty": one_hot[[1, 2, 0]],
        "graph": defaultdict(list, {0: [1, 1, 9], 1: [0], 3: [3], 8: [2], 7: []}),
    }
    for part, value in parts.items():
        (folder / f"ind.toy.{part}").write_bytes(pickle.dumps(value, 2))
    (folder / "ind.toy.test.index").write_text("9\n6\n8\n")
    return sorted(folder.glob("ind.toy.*"))


def _ogb(folder: Path) -> list[Path]:
    tables = {
        "raw/edge": "0,1\n1,2\n3,0\n",
        "raw/num-node-list": "4\n",
        "raw/num-edge-list": "3\n",
        "raw/node-feat": "0.5,1\n2,0.1\n0,0\n1,1\n",
        "raw/node-label": "0\n1\n1\n0\n",
        "split/time/train": "0\n3\n",
        "split/time/valid": "1\n",
        "split/time/test": "2\n",
    }
    for name, text in tables.items():
        path = folder / "ogbn_toy" / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    return sorted((folder / "ogbn_toy").rglob("*.gz"))


def _save_pt(path: Path, graph: Graph) -> None:
    edges = torch.from_numpy(np.stack([graph.src, graph.dst]))
    torch.save({"edge_index": edges, "x": torch.from_numpy(graph.x), "y": torch.from_numpy(graph.y)}, path)


ADJACENCY = sp.csr_array((np.ones(5), (EDGES[0], EDGES[1])), shape=(4, 4))
FEATURES = sp.csr_array(np.eye(4, 3, dtype=np.float32))
GRAPHS: dict[str, Target] = {
    "npz": _saved("g.npz", save_npz),
    "h5": _saved("g.h5", save_h5),
    "pt": _saved("g.pt", _save_pt),
    "sparse npz": _arrays("g.npz", **_csr("adj", ADJACENCY), **_csr("attr", FEATURES), labels=np.array([0, 1, 1, 0])),
    "heterophilous npz": _arrays(
        "g.npz",
        edges=EDGES.T,
        node_features=np.eye(4, dtype=np.float32),
        node_labels=np.array([0, 1, 1, 0]),
        **{f"{name}_masks": np.eye(3, 4, dtype=bool) for name in ("train", "val", "test")},
    ),
    "edge list": _file("g.csv", "source,target,weight\n0,1,0.5\n1,2,1\n2,0,2.5\n# a comment\n3,3,1\n"),
    "blanks": _file("g.txt", "0 1\n1 2\n2 0\n\n3 1\n"),
    "packed edge list": _file("g.tsv.gz", gzip.compress(b"a\tb\nb\tc\n\xc3\xa9\ta\n")),
    "matrix market": _file(
        "g.mtx", "%%MatrixMarket matrix coordinate real general\n% x\n4 4 3\n1 2 0.5\n2 3 1\n4 1 2\n"
    ),
    "METIS": _file("g.graph", "% x\n4 3 011\n1 2 5 3 1\n2 1 5\n1 1 1 4 2\n3 3 2\n"),
    "planetoid": Target(_planetoid, lambda folder: load(str(folder / "ind.toy"))),
    "ogb": Target(_ogb, lambda folder: load(folder / "ogbn_toy")),
}


# ------------------------------------------------------------------------------------------------------ own formats


def _build(folder: Path) -> list[Path]:
    build(rich_graph(nodes=12, edges=30), assignment([0, 1] * 6, 2), folder / "s")
    return [folder / "s" / part_name(part, 2) for part in range(2)]


def _both(folder: Path) -> list[Shard]:
    return [read_shard(folder / "s", part) for part in range(2)]


def _same_shards(first: list[Shard], second: list[Shard]) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(first, second, strict=True)
        for name in (
            "owned_global",
            "halo_global",
            "indptr",
            "indices",
            "edge_global",
            "edge_weight",
            "x",
            "y",
            "train",
        )
    )


def _write_config(folder: Path) -> list[Path]:
    record = {"model": "gcn", "hidden": 16, "features": 5, "outputs": 4, "task": "single-label", "model_name": "gcn"}
    (folder / "config.json").write_text(json.dumps(record | {"graph": {"name": "g", "num_nodes": 12}}, indent=2))
    return [folder / "config.json"]


def _write_state(folder: Path) -> list[Path]:
    model = torch.nn.Linear(5, 4)
    write_state(folder / "best.pt", {"model": model.state_dict(), "epoch": 3, "config": {"model": "gcn"}})
    return [folder / "best.pt"]


def _checkpoint(folder: Path) -> Path:
    (found,) = checkpoints_of(folder / "run")
    return found


def _train(folder: Path) -> list[Path]:
    build(rich_graph(nodes=12, edges=30, y=np.arange(12) % 4), assignment([0] * 12, 1), folder / "s")
    config = TrainConfig(model="gcn", hidden=4, epochs=1, checkpoint_every=1, eval_every=5)
    train(folder / "s", config, run=folder / "run", console=Console(quiet=True))
    return [_checkpoint(folder) / MANIFEST]


def _train_for_state(folder: Path) -> list[Path]:
    return [path.with_name("replicated.pt") for path in _train(folder)]


def _write_parts(name: str) -> Any:
    def make(folder: Path) -> list[Path]:
        part = np.array([0, 1, 2, 0, 1, 2])
        if name.endswith(".npy"):
            np.save(folder / name, part)
        else:
            np.savetxt(folder / name, part, "%d")
        return [folder / name]

    return Target(make, lambda folder: read_parts(folder / name, num_nodes=6, parts=3))


OWN: dict[str, Target] = {
    "shards": Target(_build, _both, same=_same_shards),
    "manifest": Target(
        lambda folder: [_build(folder)[0].parent / MANIFEST], lambda folder: read_manifest(folder / "s")
    ),
    "config": Target(_write_config, read_config),
    "state": Target(_write_state, lambda folder: read_state(folder / "best.pt")),
    "checkpoint": Target(_train, lambda folder: read_checkpoint(_checkpoint(folder))),
    "checkpoint's state": Target(
        _train_for_state, lambda folder: read_checkpoint(_checkpoint(folder))._load("replicated.pt")
    ),
    "parts npy": _write_parts("part.npy"),
    "parts text": _write_parts("part.txt"),
    "resealed shards": Target(_build, _both, reseal=lambda folder: refresh_manifest(folder / "s")),
}


def _misbehave(folder: Path) -> int:
    raw = (folder / "f").read_bytes()
    if raw == b"sound" * 20:
        return 0
    match len(raw) % 6:
        case 0:
            raise ValueError("as it should be")
        case 1:
            raise KeyError("another error")
        case 2:
            return bytearray(1 << 40)[0]
        case 3:
            os.kill(os.getpid(), signal.SIGSEGV)
    return 1


def _sound(folder: Path) -> list[Path]:
    (folder / "f").write_bytes(b"sound" * 20)
    return [folder / "f"]


TARGETS = GRAPHS | OWN | {"misbehaving": Target(_sound, _misbehave, same=lambda a, b: a == b)}


@pytest.mark.parametrize("name", [*GRAPHS, *OWN])
def test_a_damaged_file_is_refused_or_read(name: str, tmp_path: Path) -> None:
    assert faults(__name__, name, tmp_path, seed=0, count=60) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*GRAPHS, *OWN])
def test_thousands_of_damaged_files_are_refused_or_read(name: str, tmp_path: Path) -> None:
    assert faults(__name__, name, tmp_path, seed=1, count=5000) == []


# ------------------------------------------------------------------------------------------------- the harness itself


def test_damage_changes_most_files() -> None:
    raw = bytes(range(256))
    changed = [damaged(raw, np.random.default_rng(seed)) != raw for seed in range(200)]
    assert sum(changed) > 190


def test_every_kind_of_fault_is_told(tmp_path: Path) -> None:
    found = faults(__name__, "misbehaving", tmp_path, seed=0, count=30)
    for text in ("KeyError: 'another error'", "MemoryError", "SIGSEGV", "another result, and no error"):
        assert any(text in fault for fault in found), text
