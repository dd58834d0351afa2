"""Our .h5 graph files: what is saved is loaded, and a damaged file ends as a message."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from fullgraph import hdf5
from fullgraph.shards import read_manifest, read_shard
from partition_tools.builder import build
from partition_tools.graph import Graph
from partition_tools.sources import load, save_h5, save_npz
from tests.builds import assignment, two_triangles
from tests.graph_files import assert_same, load_or_message, rich_graphs


@given(rich_graphs(), st.sampled_from(["h5", "hdf5", "npz"]))
@settings(max_examples=100, deadline=None)
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, graph: Graph, ending: str) -> None:
    path = tmp_path_factory.mktemp("saved") / f"g.{ending}"
    (save_npz if ending == "npz" else save_h5)(path, graph)
    assert_same(load(path), graph)


def whole(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    g = Graph(
        name="g",
        num_nodes=4,
        src=np.array([0, 1, 2]),
        dst=np.array([1, 2, 3]),
        x=rng.random((4, 3)),
        y=np.array([0, 1, 0, 1]),
        node_ids=np.array(["a", "bb", "ccc", "ß"]),
    )
    save_h5(folder / "g.h5", g)
    return folder / "g.h5"


def test_the_file_is_what_its_description_says(tmp_path: Path) -> None:
    with h5py.File(whole(tmp_path)) as file:
        assert dict(file.attrs) == {
            "format": "fullgraph-graph",
            "format_version": 1,
            "num_nodes": 4,
            "task": "single-label",
        }
        assert sorted(file) == ["edge_index", "node_ids", "x", "y"]
        assert all("xxh3" in dataset.attrs for dataset in file.values())
        assert file["node_ids"].asstr()[...].tolist() == ["a", "bb", "ccc", "ß"]


def test_a_file_written_by_hand_is_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "mine.h5", "w") as file:
        file.attrs.update(format="fullgraph-graph", format_version=1)
        file["edge_index"] = np.array([[0, 1], [1, 2]], np.int32)
        file["x"] = np.ones((3, 2), np.float16)
        file["train_mask"] = np.array([True, False, True])
        file["val_idx"] = np.array([1])
        file["extra"] = np.ones(2)
    g = load(tmp_path / "mine.h5")
    assert (g.name, g.num_nodes, g.num_edges) == ("mine", 3, 2)
    assert isinstance(g.x, np.ndarray)
    assert g.x.dtype == np.float16
    assert g.splits is not None
    assert g.splits.train.tolist() == [[True, False, True]]
    assert g.splits.val.tolist() == [[False, True, False]]
    assert any("extra" in change for change in g.changes)


def _external(file: h5py.File) -> None:
    del file["y"]
    file["y"] = h5py.ExternalLink("/etc/hostname", "y")


def _chunked(file: h5py.File) -> None:
    del file["y"]
    file.create_dataset("y", data=np.zeros(4, np.int64), compression="gzip")


def _huge(file: h5py.File) -> None:
    del file["x"]
    file.create_dataset("x", (1 << 40, 4), np.float64)


def _texts(file: h5py.File) -> None:
    del file["node_ids"]
    file["node_ids"] = np.array(["a", "b", "c", "d"], object)


def _not_utf8(file: h5py.File) -> None:
    del file["node_ids"]
    file.create_dataset("node_ids", data=np.array([b"\xff", b"a", b"b", b"c"]).astype(h5py.string_dtype("utf-8", 1)))


def _group(file: h5py.File) -> None:
    del file["y"]
    file.create_group("y")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda file: file.attrs.__delitem__("format"),
            "attribute format is None; .*holds edge_index, node_ids, x, y.*save_h5",
        ),
        (lambda file: file.attrs.__setitem__("format_version", 2), "format version 2; this version .* reads 1"),
        (lambda file: file.attrs.__setitem__("format", "fullgraph-shards"), "a shard, .*fullgraph train"),
        (lambda file: file.attrs.__setitem__("num_nodes", 5), "contradictory .*num_nodes: 5, rows of x: 4"),
        (lambda file: file.attrs.__setitem__("num_nodes", "4"), "attribute num_nodes is '4'; expected int"),
        (lambda file: file["y"].write_direct(np.array([0, 1, 1, 1])), "y: differs from its checksum"),
        (lambda file: file.__delitem__("edge_index"), "array edge_index is missing"),
        (_external, "y: is a soft or external link"),
        (_chunked, "y: is chunked"),
        (_huge, "x: is chunked, filtered|x: claims"),
        (_texts, "node_ids: strings of variable length"),
        (_not_utf8, "node_ids: not utf-8"),
        (_group, "y: is a group"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = whole(tmp_path)
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert "g.h5" in str(caught.value)


@given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_flipped_or_cut_file_never_gives_other_data(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, cut: bool
) -> None:
    path = whole(tmp_path_factory.mktemp("h5"))
    before, raw = load(path), bytearray(path.read_bytes())
    raw[place % len(raw)] = byte
    path.write_bytes(bytes(raw[: place % len(raw)] if cut else raw))
    found = load_or_message(path)
    if isinstance(found, str):
        assert "g.h5" in found
    else:  # a dataset whose name was hit means nothing to the layout, and that is said
        for field in ("src", "dst", "x", "y", "node_ids"):
            if getattr(found, field) is not None:
                np.testing.assert_array_equal(getattr(found, field), getattr(before, field))


def test_a_shard_is_told_from_a_graph(tmp_path: Path) -> None:
    build(two_triangles(), assignment([0, 0, 0, 1, 1, 1], 2), tmp_path / "s")
    with pytest.raises(ValueError, match=r"a shard, one part of a graph.*fullgraph train .*s"):
        load(tmp_path / "s" / "part-00000-of-00002.h5")
    with pytest.raises(ValueError, match="a folder of shards, partitioned already"):
        load(tmp_path / "s")


def test_what_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    none = np.zeros(0, np.int64)
    g = Graph(name="g", num_nodes=2, src=none, dst=none, learned_features=4)
    with pytest.raises(ValueError, match="learned_features are no data"):
        save_h5(tmp_path / "g.h5", g)
    with pytest.raises(ValueError, match=r"must end in \.h5"):
        save_h5(tmp_path / "g.npz", g)
    assert not list(tmp_path.iterdir())


def test_sparse_features_stay_sparse(tmp_path: Path) -> None:
    x = sp.csr_array(np.eye(3, 5, dtype=np.float32))
    save_h5(tmp_path / "g.h5", Graph(name="g", num_nodes=3, src=np.zeros(0, int), dst=np.zeros(0, int), x=x))
    assert isinstance(load(tmp_path / "g.h5").x, sp.csr_array)


def test_a_file_that_hdf5_does_not_survive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = whole(tmp_path)
    assert hdf5.survives(str(path))
    monkeypatch.setattr(hdf5, "_look", lambda _: os.kill(os.getpid(), signal.SIGSEGV))
    with pytest.raises(ValueError, match=r"g\.h5: is too damaged for HDF5 to be read; copy it again"):
        load(path)
    monkeypatch.setattr(hdf5, "_look", lambda _: time.sleep(60))
    monkeypatch.setattr(hdf5, "_LOOK_SECONDS", 0.05)
    assert not hdf5.survives(str(path))


def test_what_a_file_lacks_is_left_for_its_reader_to_tell(tmp_path: Path) -> None:
    (tmp_path / "g.h5").write_bytes(b"no HDF5")
    assert hdf5.survives(str(tmp_path / "g.h5"))
    with pytest.raises(ValueError, match="HDF5 cannot read it"):
        load(tmp_path / "g.h5")


@pytest.mark.parametrize("locking", [None, True, False, "best-effort"])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_that_is_open_in_this_process_is_read(tmp_path: Path, mode: str, locking: Any) -> None:
    graph = two_triangles()
    save_h5(tmp_path / "g.h5", graph)
    build(graph, assignment([0, 0, 0, 1, 1, 1], 2), tmp_path / "s")
    shard = tmp_path / "s" / read_manifest(tmp_path / "s").files[0].path
    options = {} if locking is None else {"locking": locking}
    with h5py.File(tmp_path / "g.h5", mode, **options), h5py.File(shard, mode, **options):
        assert load(tmp_path / "g.h5").num_edges == 14
        assert read_shard(tmp_path / "s", 0, verify=False).num_owned == 3
