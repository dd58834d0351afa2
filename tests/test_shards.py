"""The format: what is written is read back, and whatever else is found is refused by name."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse as sp

from fullgraph.files import appears_by_rename, checksum
from fullgraph.hdf5 import FormatError
from fullgraph.shards import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    Shard,
    ShardFile,
    local_id_dtype,
    part_name,
    read_manifest,
    read_shard,
    write_manifest,
    write_shard,
)
from partition_tools.builder import build
from tests.builds import assignment, change, put, refresh_manifest, replace_dataset, rich_graph, two_triangles
from tests.graphs import CASES, shard_of

HALVES = np.array([0, 0, 0, 1, 1, 1], np.int32)
GOLDEN = Path(__file__).parent / "golden" / "shards-v1"


def manifest_for(files: list[ShardFile], **fields: Any) -> Manifest:
    given: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "build_id": "test",
        "parts": len(files),
        "graph": {"name": "g", "num_nodes": 6, "num_edges": 14},
        "partition": {},
        "changes": (),
        "files": tuple(files),
        "sums": {},
    }
    return Manifest(**given | fields)


def save(folder: Path, shards: list[Shard]) -> Manifest:
    files = [write_shard(folder / part_name(shard.part, shard.parts), shard) for shard in shards]
    graph = {"num_nodes": shards[0].num_nodes_global, "num_edges": shards[0].num_edges_global}
    manifest = manifest_for(files, graph=graph)
    write_manifest(folder, manifest)
    return manifest


def assert_same(a: Shard, b: Shard) -> None:
    for field in dataclasses.fields(Shard):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(right, sp.csr_array):
            assert isinstance(left, sp.csr_array)
            assert left.dtype == right.dtype
            assert (left != right).nnz == 0
        elif isinstance(right, np.ndarray):
            assert left.dtype == right.dtype or right.dtype.kind == "U", field.name
            np.testing.assert_array_equal(left, right, err_msg=field.name)
        else:
            assert left == right, field.name


# ------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    part = case.part(3)
    shards = [shard_of(case.graph, part, q, 3) for q in range(3)]
    save(tmp_path, shards)
    for shard in shards:
        assert_same(read_shard(tmp_path, shard.part), shard)


@pytest.mark.parametrize(
    "ids",
    [np.array([10, 2601296972838024192, -7, 3, 4, 5]), np.array(["a", "ü", "名前", "", "e" * 300, "f g"])],
    ids=["numbers", "text"],
)
def test_the_users_ids_come_back(ids: Any, tmp_path: Path) -> None:
    graph = two_triangles(node_ids=ids)
    build(graph, assignment(HALVES, 2), tmp_path / "s")
    read = [read_shard(tmp_path / "s", q).node_ids for q in range(2)]
    assert np.concatenate([part for part in read if part is not None]).tolist() == ids.tolist()


def test_features_may_be_left_out(tmp_path: Path) -> None:
    build(rich_graph(), assignment(np.arange(30) % 2, 2), tmp_path / "s")
    assert read_shard(tmp_path / "s", 0).x is not None
    assert read_shard(tmp_path / "s", 0, features=False).x is None


def test_a_shard_reads_with_plain_h5py(tmp_path: Path) -> None:
    """The two triangles in full, as the format's docstring names the datasets."""
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    splits = rich_graph(6, 0).splits
    graph = two_triangles(x=x, y=np.array([0, 1, 0, 1, 2, -1]), splits=splits, edge_weight=np.arange(14.0))
    build(graph, assignment(HALVES, 2), tmp_path / "s")
    with h5py.File(tmp_path / "s" / "part-00001-of-00002.h5") as file:
        assert dict(file.attrs) == {
            "format": "fullgraph-shards",
            "format_version": 1,
            "build_id": read_manifest(tmp_path / "s").build_id,
            "part": 1,
            "parts": 2,
            "graph": "two triangles",
            "num_nodes_global": 6,
            "num_edges_global": 14,
            "num_classes": 3,
            "task": "single-label",
        }
        found: dict[str, Any] = {}
        file.visititems(lambda name, node: found.update({name: node[()]}) if isinstance(node, h5py.Dataset) else None)
    assert splits is not None
    expected = {
        "owned/global_id": [3, 4, 5],
        "halo/global_id": [2],
        "halo/owner": [0],
        "halo/index": [2],
        "edges/indptr": [0, 3, 5, 7],
        "edges/indices": [1, 2, 3, 0, 2, 0, 1],
        "edges/global_id": [11, 12, 3, 4, 13, 5, 6],
        "edges/weight": [11, 12, 3, 4, 13, 5, 6],
        "degrees/in": [3, 2, 2, 3],
        "degrees/in_weight": [26, 17, 11, 13],
        "degrees/loops": [0, 0, 0, 0],
        "features/x": x[3:].tolist(),
        "labels/y": [1, 2, -1],
        **{f"splits/{name}": getattr(splits, name)[:, 3:].tolist() for name in ("train", "val", "test")},
    }
    assert {name: values.tolist() for name, values in found.items()} == expected
    assert found["edges/indices"].dtype == np.int32


def test_version_1_of_the_format_is_still_read() -> None:
    """Written when the format was; these files never change."""
    manifest = read_manifest(GOLDEN)
    assert manifest.build_id == read_shard(GOLDEN, 0).build_id
    shard = read_shard(GOLDEN, 1)
    assert shard.owned_global.tolist() == [3, 4, 5]
    assert shard.halo_global.tolist() == [2]
    assert shard.indices.tolist() == [1, 2, 3, 0, 2, 0, 1]
    assert shard.edge_global.tolist() == [11, 12, 3, 4, 13, 5, 6]
    assert isinstance(shard.x, sp.csr_array)
    assert shard.x.toarray()[:, 3].tolist() == [0.0, 0.0, 2.5]
    assert shard.node_ids is not None
    assert shard.node_ids.tolist() == ["d", "é", "f"]
    assert shard.train.tolist() == [[False, True, False]]


def test_reading_leaves_nothing_open(tmp_path: Path) -> None:
    build(rich_graph(), assignment(np.arange(30) % 2, 2), tmp_path / "s")
    shard = read_shard(tmp_path / "s", 0)
    kinds = h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_DATASET | h5py.h5f.OBJ_GROUP
    assert h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, kinds) == 0
    for file in (tmp_path / "s").iterdir():
        file.unlink()
    assert shard.in_degree.sum() > 0


def test_a_lock_on_a_shard_does_not_keep_readers_out(tmp_path: Path) -> None:
    """Some file systems refuse locks, and other programs may hold one."""
    build(two_triangles(), assignment(HALVES, 2), tmp_path / "s")
    with open(tmp_path / "s" / part_name(0, 2), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        read_shard(tmp_path / "s", 0)


def test_no_torch_is_loaded() -> None:
    code = "import sys, fullgraph.shards, fullgraph.cut; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------ single files


def test_local_ids_widen_where_they_must() -> None:
    assert local_id_dtype(2**31 - 1) == np.int32
    assert local_id_dtype(2**31) == np.int64


def test_a_file_that_fails_half_way_does_not_appear(tmp_path: Path) -> None:
    def fail() -> None:
        with appears_by_rename(tmp_path / "a") as temporary:
            temporary.write_text("half")
            raise KeyError

    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_checksum_of_any_length(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "long").write_bytes(bytes(9_000_000))
    assert checksum(tmp_path / "empty") == "2d06800538d394c2"
    assert checksum(tmp_path / "long") != checksum(tmp_path / "empty")


# --------------------------------------------------------------------------------------------------- damaged builds


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "s"
    build(rich_graph(), assignment(np.arange(30) % 3, 3), folder)
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "s"
    copy.mkdir()
    for file in built.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_a_truncated_shard_is_refused_before_hdf5_opens_it(folder: Path) -> None:
    path = folder / part_name(1, 3)
    whole = path.read_bytes()
    for length in sorted({0, 1, len(whole) - 1, *range(0, len(whole), len(whole) // 20)}):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=rf"part-00001-of-00003.h5: {length} bytes; the manifest says"):
            read_shard(folder, 1)
        # Even where the manifest agrees: an error, never a crash or a wrong shard.
        refresh_manifest(folder)
        with pytest.raises(FormatError, match=r"part-00001-of-00003.h5.*(build the folder again)"):
            read_shard(folder, 1)
        path.write_bytes(whole)
        refresh_manifest(folder)
    read_shard(folder, 1)


def test_a_flipped_byte_anywhere_is_refused(folder: Path) -> None:
    path = folder / part_name(0, 3)
    whole = path.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(whole), 60).tolist():
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (place % 8)
        path.write_bytes(flipped)
        with pytest.raises(FormatError, match=r"checksum is .*; the manifest says .*; copy the file again"):
            read_shard(folder, 0)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / part_name(2, 3)).unlink()
    read_shard(folder, 1)
    with pytest.raises(FormatError, match=r"part-00002-of-00003.h5: the manifest lists this file, but it is not there"):
        read_shard(folder, 2)


def test_a_part_that_does_not_exist(folder: Path) -> None:
    with pytest.raises(ValueError, match="part 3 was asked for, but the build has parts 0 to 2"):
        read_shard(folder, 3)


def link(file: h5py.File, target: h5py.SoftLink | h5py.ExternalLink) -> None:
    del file["labels/y"]
    file["labels/y"] = target


def make_group(file: h5py.File) -> None:
    del file["halo/owner"]
    file.create_group("halo/owner")


def make_virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(shape=(10,), dtype="i8")
    layout[:] = h5py.VirtualSource("/etc/hosts", "x", shape=(10,))
    del file["labels/y"]
    file.create_virtual_dataset("labels/y", layout)


def claim_more(file: h5py.File) -> None:
    """A header of 2^50 rows without the bytes."""
    del file["labels/y"]
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    space = h5py.h5s.create_simple((2**50,))
    h5py.h5d.create(file["labels"].id, b"y", h5py.h5t.STD_I64LE, space, plist)


DAMAGE: dict[str, tuple[Callable[[h5py.File], None], str]] = {
    "missing dataset": (lambda file: file.__delitem__("halo/owner"), "halo/owner: is missing"),
    "a group in its place": (make_group, "halo/owner: is missing"),
    "dtype": (replace_dataset("halo/index", np.zeros(3, np.float64)), "halo/index: dtype float64; expected int64"),
    "dimensions": (replace_dataset("halo/index", np.zeros((3, 1), np.int64)), "halo/index: shape .*1 dimensions"),
    "length": (replace_dataset("degrees/loops", np.zeros(3, np.int64)), r"degrees/loops: shape \[3\]; expected"),
    "gzip": (replace_dataset("labels/y", np.zeros(10, np.int64), compression="gzip"), "labels/y: is chunked, filtered"),
    "chunks": (replace_dataset("labels/y", np.zeros(10, np.int64), chunks=(5,)), "labels/y: is chunked, filtered"),
    "virtual": (make_virtual, "labels/y: is chunked, filtered, virtual"),
    "external data": (
        replace_dataset("labels/y", np.zeros(10, np.int64), external="/tmp/fullgraph-no-such-file"),
        "labels/y: .*external",
    ),
    "soft link": (lambda file: link(file, h5py.SoftLink("/owned/global_id")), "labels/y: is a soft or external link"),
    "external link": (lambda file: link(file, h5py.ExternalLink("/etc/hosts", "/x")), "labels/y: is a soft or ext"),
    "claims more than the file": (claim_more, r"labels/y: claims \d+ bytes .* in a file of"),
    "text ids of fixed length": (replace_dataset("ids/original", np.array([b"x"] * 10)), "ids/original: dtype .*utf-8"),
    "ids not utf-8": (put("ids/original", 0, b"\xff"), "ids/original: not utf-8"),
    "format": (lambda file: file.attrs.__setitem__("format", "other"), "attribute format is 'other'"),
    "version": (lambda file: file.attrs.__setitem__("format_version", 2), "format version 2, but .* reads version 1"),
    "build": (lambda file: file.attrs.__setitem__("build_id", "other"), "build_id is 'other', .*another build"),
    "part": (lambda file: file.attrs.__setitem__("part", 2), "part is 2, but the manifest says 1|halo/owner"),
    "attribute missing": (lambda file: file.attrs.__delitem__("parts"), "attribute parts is None; expected int"),
    "attribute type": (lambda file: file.attrs.__setitem__("parts", "3"), "attribute parts is '3'; expected int"),
    "owned order": (put("owned/global_id", 1, 28), r"owned/global_id\[2\]: is 7; expected more"),
    "owned range": (put("owned/global_id", 9, 30), r"owned/global_id\[9\]: is 30; expected a node id in 0..29"),
    "halo range": (put("halo/global_id", 0, -1), r"halo/global_id\[0\]: is -1; expected a node id"),
    "halo owned here": (put("halo/global_id", 0, 1), r"halo/global_id\[0\]: is 1; expected a node that this part does"),
    "halo owner": (put("halo/owner", 0, 1), r"halo/owner\[0\]: is 1; expected a part in 0..2 other than 1"),
    "halo owner range": (put("halo/owner", 0, 3), r"halo/owner\[0\]: is 3; expected a part"),
    "halo index": (put("halo/index", 2, -5), r"halo/index\[2\]: is -5; expected 0 or more"),
    "offsets start": (put("edges/indptr", 0, 1), "edges/indptr: starts at 1; expected 0"),
    "offsets fall": (put("edges/indptr", 3, 2**40), r"edges/indptr\[4\]: is .* no less than the offset before it"),
    "offsets wrap": (put("edges/indptr", slice(3, 5), [2**63 - 1, -(2**63)]), r"edges/indptr\[4\]: is -9223"),
    "offsets end": (put("edges/indptr", 10, lambda old: old + 1), "edges/indptr: ends at"),
    "offset moved": (put("edges/indptr", 4, lambda old: old - 1), r"edges/indptr\[4\]: row 3 holds"),
    "index range": (put("edges/indices", 5, 10**6), r"edges/indices\[5\]: is 1000000; expected a local id in 0"),
    "index order": (put("edges/indices", 0, lambda old: 20), r"edges/indices\[1\]: is .* ascend within a row"),
    "edge range": (put("edges/global_id", 5, 120), r"edges/global_id\[5\]: is 120; expected an edge id in 0..119"),
    "degree": (put("degrees/in", 4, lambda old: old + 1), r"degrees/in\[4\]: is \d+; expected the"),
    "class": (put("labels/y", 7, 9), r"labels/y\[7\]: is 9; expected a class in 0..3, or -1"),
    "mask": (put("splits/val", (1, 3), 2), r"splits/val\[3\]: is .* expected 0 and 1 only"),
    "splits": (replace_dataset("splits/test", np.zeros((1, 10), np.uint8)), r"splits/test: bool \[1, 10\]; expected"),
    "features": (replace_dataset("features/x", np.zeros((9, 5), np.float32)), r"features/x: shape \[9, 5\]"),
    "no features": (lambda file: file.__delitem__("features"), "num_features is 0, but the manifest says 5"),
    "edge features": (replace_dataset("edges/x", np.zeros((3, 2))), r"edges/x: shape \[3, 2\]; expected \[\d+, K\]"),
    "no edge features": (lambda file: file.__delitem__("edges/x"), "num_edge_features is 0, but the manifest says 2"),
    "learned": (
        lambda file: file.attrs.__setitem__("learned_features", 4),
        "learned_features is 4; expected 0, or more",
    ),
    "learned type": (lambda file: file.attrs.__setitem__("learned_features", "4"), "learned_features is '4'; expected"),
    "no weights": (lambda file: file.__delitem__("edges/weight"), "weighted is False, but the manifest says True"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_that_a_checksum_does_not_show_is_named(kind: str, folder: Path) -> None:
    edit, message = DAMAGE[kind]
    name = change(folder, 1, edit)
    with pytest.raises(FormatError, match=message) as caught:
        read_shard(folder, 1)
    assert name in str(caught.value)
    assert "build the folder again" in str(caught.value)
    read_shard(folder, 0)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put("features/indices", 0, 50), r"features/indices\[0\]: is 50; expected a column in 0..39"),
        (put("features/indptr", 1, 10**6), r"features/indptr\[2\]: is .* no less than the offset before"),
        (replace_dataset("features/data", np.zeros(3)), "features/indptr: ends at"),
        (lambda file: file["features"].attrs.__setitem__("shape", [5, 40]), r"features: attribute shape is \[5, 40\]"),
        (lambda file: file["features"].attrs.__setitem__("shape", "x"), "features: attribute shape"),
    ],
)
def test_damaged_sparse_features(edit: Callable[[h5py.File], None], message: str, tmp_path: Path) -> None:
    case = CASES["sparse"]
    build(case.graph, assignment(case.part(2), 2), tmp_path / "s")
    change(tmp_path / "s", 0, edit)
    with pytest.raises(FormatError, match=message):
        read_shard(tmp_path / "s", 0)


def test_unknown_members_are_ignored(folder: Path) -> None:
    change(folder, 1, lambda file: file.attrs.update(extra=1))
    read_shard(folder, 1)


def test_a_shard_of_another_build_is_refused(folder: Path, tmp_path: Path) -> None:
    build(rich_graph(seed=1), assignment(np.arange(30) % 3, 3), tmp_path / "other")
    name = part_name(1, 3)
    (folder / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(FormatError, match=r"00001-of-00003.h5: the file is of build \w+; the manifest is of build"):
        read_shard(folder, 1)
    refresh_manifest(folder)
    with pytest.raises(FormatError, match=r"build_id is .*, but the manifest says .*another build"):
        read_shard(folder, 1)


# ------------------------------------------------------------------------------------------------ manifests, folders


ENTRY = {"path": "a.h5", "bytes": 3, "xxh3": "0" * 16}
CONTENT: dict[str, Any] = {
    "format": "fullgraph-shards",
    "format_version": 1,
    "build_id": "x",
    "parts": 1,
    "graph": {"num_nodes": 1, "num_edges": 0},
    "partition": {},
    "changes": [],
    "files": [ENTRY],
    "sums": {},
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "other"}, "format is 'other'; expected 'fullgraph-shards'"),
        ({"format_version": 2, "files": None}, "format version 2, but this version of fullgraph reads version 1"),
        ({"format_version": True}, "format version True"),
        ({"parts": 2}, "1 files are listed for 2 parts"),
        ({"parts": 0, "files": []}, "0 files are listed for 0 parts"),
        ({"parts": True}, "parts is True; expected int"),
        ({"graph": []}, r"graph is \[\]; expected dict"),
        ({"graph": {"num_nodes": "6", "num_edges": 0}}, "graph.num_nodes is '6'"),
        ({"graph": {"num_nodes": 0, "num_edges": 0}}, "graph.num_nodes is 0; expected a number of at least 1"),
        ({"files": [7]}, r"files\[0\] is 7; expected path, bytes and xxh3"),
        ({"files": [ENTRY | {"path": 5}]}, r"files\[0\] is"),
        ({"files": [ENTRY | {"path": "../a.h5"}]}, "'../a.h5' is not the plain name of a file in the folder"),
        ({"files": [ENTRY | {"path": "/etc/hosts"}]}, "is not the plain name"),
        ({"files": [ENTRY | {"path": "b\\a"}]}, "is not the plain name"),
        ({"files": [ENTRY | {"path": ".."}]}, "is not the plain name"),
        ({"files": [ENTRY | {"path": ""}]}, "is not the plain name"),
        ({"files": [ENTRY | {"bytes": -1}]}, "-1 bytes"),
        ({"files": [ENTRY | {"xxh3": "zz"}]}, "xxh3 is 'zz'; expected 16 hex digits"),
        ({"parts": 2, "files": [ENTRY, ENTRY]}, "a file is listed twice"),
        ({"sums": {"x": [2**53]}}, "sums.x holds something else than integers"),
        ({"sums": {"x": 5}}, "sums.x holds"),
    ],
)
def test_a_manifest_with_odd_content_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(CONTENT | fields))
    with pytest.raises(ValueError, match=message) as caught:
        read_manifest(tmp_path)
    assert str(tmp_path / MANIFEST) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "null", '"x"', "\xff\xfe", "{}"])
def test_a_manifest_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"not JSON|not a folder of shards"):
        read_manifest(tmp_path)


def test_manifests_round_trip(tmp_path: Path) -> None:
    file = ShardFile(path="a.h5", bytes=3, xxh3="0123456789abcdef")
    manifest = manifest_for([file], changes=("one", "two"), sums={"src": [1, 2**53 - 1]}, partition={"seed": 3})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def test_folders_that_are_no_build_say_what_they_are(tmp_path: Path) -> None:
    def why(folder: Path) -> str:
        with pytest.raises(ValueError, match=r"partition-tools build|name that folder") as caught:
            read_manifest(folder)
        return str(caught.value)

    assert "no such folder" in why(tmp_path / "nowhere")
    (tmp_path / ".nowhere.0123abcd.building").mkdir()
    assert "its build was not finished" in why(tmp_path / "nowhere")
    (tmp_path / "g.npz").touch()
    assert f"partition-tools build {tmp_path / 'g.npz'} --parts P --out DIR" in why(tmp_path / "g.npz")
    (tmp_path / "empty").mkdir()
    assert "this is not a folder of shards" in why(tmp_path / "empty")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / part_name(0, 2)).touch()
    assert "was not finished" in why(tmp_path / "half")
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "inner" / MANIFEST).touch()
    assert "there is one in inner; name that folder" in why(tmp_path / "outer")
