"""Building shards and proving them: exact content, any multigraph, damage found, builds that die."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import partition_tools.builder as build_module
from fullgraph.shards import MANIFEST, part_name, read_manifest, read_shard
from partition_tools.builder import build, check_target
from partition_tools.graph import Graph, Splits
from partition_tools.sums import add, block_ids, block_of, block_sums, num_blocks
from partition_tools.verify import verify
from tests.builds import assignment, change, put, refresh_manifest, rich_graph, two_triangles
from tests.graphs import CASES, shard_of
from tests.test_shards import assert_same

HALVES = np.array([0, 0, 0, 1, 1, 1], np.int32)


# ------------------------------------------------------------------------------------------------------------ content


@pytest.mark.parametrize("name", CASES)
def test_every_shard_is_the_one_made_by_hand(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for parts in (1, 3):
        part = case.part(parts)
        manifest = build(case.graph, assignment(part, parts), tmp_path / "s", force=True)
        for q in range(parts):
            by_hand = dataclasses.replace(shard_of(case.graph, part, q, parts), build_id=manifest.build_id)
            assert_same(read_shard(tmp_path / "s", q), by_hand)
        assert verify(tmp_path / "s") == []


def test_the_manifest_says_what_was_built(tmp_path: Path) -> None:
    graph = rich_graph()
    told = []
    manifest = build(
        graph, assignment(np.arange(30) % 3, 3, tries=2), tmp_path / "s", progress=lambda *at: told.append(at)
    )
    assert manifest == read_manifest(tmp_path / "s")
    assert [what for what, *_ in told] == ["writing shards"] * 3 + ["writing features"]
    assert [at[1:] for at in told[2:]] == [(120, 120), (30, 30)]
    assert {key: manifest.graph[key] for key in ("name", "num_nodes", "num_edges", "weighted", "task")} == {
        "name": "rich",
        "num_nodes": 30,
        "num_edges": 120,
        "weighted": True,
        "task": "single-label",
    }
    assert (manifest.graph["num_features"], manifest.graph["feature_dtype"]) == (5, "float32")
    assert (manifest.graph["num_classes"], manifest.graph["num_splits"]) == (4, 2)
    assert (manifest.partition["method"], manifest.partition["seed"]) == ("by hand", 7)
    assert manifest.partition["options"] == {"tries": 2}
    assert manifest.changes == ("made for a test",)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [MANIFEST, *(part_name(q, 3) for q in range(3))]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_multigraph_is_stored_once_and_verifies(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    parts = data.draw(st.one_of(st.integers(1, min(n, 5)), st.integers(1, n)))
    node = st.integers(0, n - 1)
    edges = np.array(data.draw(st.lists(st.tuples(node, node), max_size=80)), np.int64).reshape(-1, 2)
    part = data.draw(st.lists(st.integers(0, parts - 1), min_size=n, max_size=n))
    weight = np.random.default_rng(0).random(len(edges)) if data.draw(st.booleans()) else None
    graph = Graph(name="any", num_nodes=n, src=edges[:, 0].copy(), dst=edges[:, 1].copy(), edge_weight=weight)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "s"
        build(graph, assignment(part, parts), out)
        shards = [read_shard(out, q) for q in range(parts)]
        assert sorted(np.concatenate([shard.owned_global for shard in shards]).tolist()) == list(range(n))
        assert sorted(np.concatenate([shard.edge_global for shard in shards]).tolist()) == list(range(len(edges)))
        for q, shard in enumerate(shards):
            known = np.concatenate((shard.owned_global, shard.halo_global))
            rows = np.repeat(shard.owned_global, np.diff(shard.indptr))
            assert np.array_equal(np.stack((known[shard.indices], rows), axis=1), edges[shard.edge_global])
            assert all(part[node] == q for node in shard.owned_global.tolist())
        assert verify(out) == []


@pytest.mark.parametrize("density", [0.05, 0.2])
@pytest.mark.parametrize("given_sparse", [True, False])
def test_features_are_sparse_below_a_tenth(density: float, given_sparse: bool, tmp_path: Path) -> None:
    """Whatever form they come in, and to the last bit: -0.0 and NaN are values."""
    rng = np.random.default_rng(1)
    x = np.where(rng.random((60, 40)) < density, rng.standard_normal((60, 40)), 0).astype(np.float32)
    x[3, 5], x[4, 6] = np.nan, -0.0
    bits = sp.csr_array(x.view(np.uint32))
    stored = sp.csr_array((bits.data.view(np.float32), bits.indices, bits.indptr), shape=x.shape)
    graph = Graph(
        name="g", num_nodes=60, src=np.arange(60), dst=np.arange(60)[::-1].copy(), x=stored if given_sparse else x
    )
    build(graph, assignment(np.arange(60) % 2, 2), tmp_path / "s")
    assert verify(tmp_path / "s") == []
    for q in range(2):
        found = read_shard(tmp_path / "s", q).x
        assert isinstance(found, sp.csr_array) == (density < 0.1)
        if isinstance(found, sp.csr_array):
            assert found.indices.dtype == found.indptr.dtype == np.int32
            place = sp.csr_array((found.data.view(np.uint32), found.indices, found.indptr), shape=found.shape)
            assert np.array_equal(place.toarray(), x[q::2].view(np.uint32))
        else:
            assert isinstance(found, np.ndarray)
            assert np.array_equal(found.view(np.uint32), x[q::2].view(np.uint32))


def test_duplicate_entries_of_sparse_features_are_summed(tmp_path: Path) -> None:
    x = sp.csr_array((np.array([1.0, 2.0, 4.0]), np.array([3, 3, 1]), np.array([0, 2, 3, 3, 3, 3, 3])), shape=(6, 16))
    build(two_triangles(x=x), assignment(HALVES, 2), tmp_path / "s")
    found = read_shard(tmp_path / "s", 0).x
    assert isinstance(found, sp.csr_array)
    assert (found.nnz, found[0, 3], found[1, 1]) == (2, 3.0, 4.0)
    assert x.nnz == 3  # the caller's own is left as it was
    assert verify(tmp_path / "s") == []


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int64", "float16", "float64"])
def test_features_keep_their_dtype(dtype: str, tmp_path: Path) -> None:
    x = np.arange(12).reshape(6, 2).astype(dtype)
    build(two_triangles(x=x), assignment(HALVES, 2), tmp_path / "s")
    found = read_shard(tmp_path / "s", 1).x
    assert found is not None
    assert found.dtype == (np.uint8 if dtype == "bool" else x.dtype)
    assert np.array_equal(np.asarray(found), x[3:])
    assert read_manifest(tmp_path / "s").graph["feature_dtype"] == str(found.dtype)


def test_features_of_no_columns_and_of_odd_types(tmp_path: Path) -> None:
    build(two_triangles(x=np.zeros((6, 0))), assignment(HALVES, 2), tmp_path / "s")
    assert verify(tmp_path / "s") == []
    with pytest.raises(ValueError, match="x is complex128; expected a real number"):
        build(two_triangles(x=np.zeros((6, 1), complex)), assignment(HALVES, 2), tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_the_same_build_has_the_same_bytes(tmp_path: Path) -> None:
    first = build(rich_graph(), assignment(np.arange(30) % 3, 3), tmp_path / "a")
    time.sleep(1.1)  # HDF5 could store times, in seconds
    assert build(rich_graph(), assignment(np.arange(30) % 3, 3), tmp_path / "b") == first


def test_the_build_id_tells_builds_apart(tmp_path: Path) -> None:
    graph, part = rich_graph(), np.arange(30) % 3
    x = graph.x
    assert isinstance(x, np.ndarray)
    changed = x.copy()
    changed[17, 2] = np.nextafter(changed[17, 2], 9)
    other_part = part.copy()
    other_part[5] = 0
    builds = [
        (graph, assignment(part, 3)),
        (dataclasses.replace(graph, x=changed), assignment(part, 3)),
        (dataclasses.replace(graph, src=np.roll(graph.src, 1)), assignment(part, 3)),
        (graph, assignment(other_part, 3)),
        (graph, assignment(part, 3, tries=5)),
    ]
    ids = {build(*both, tmp_path / str(i)).build_id for i, both in enumerate(builds)}
    assert len(ids) == len(builds)


def test_features_are_held_one_part_at_a_time(tmp_path: Path) -> None:
    n = 40_000
    x = np.ones((n, 256), np.float32)
    graph = Graph(name="wide", num_nodes=n, src=np.arange(n), dst=np.roll(np.arange(n), 1), x=x)
    tracemalloc.start()
    try:
        build(graph, assignment(np.arange(n) * 8 // n, 8), tmp_path / "s")
        assert tracemalloc.get_traced_memory()[1] < 0.6 * x.nbytes
    finally:
        tracemalloc.stop()


# --------------------------------------------------------------------------------------------------------------- sums


def test_blocks_cover_the_ids() -> None:
    for count in (1, 7, 1024, 1025, 5000):
        blocks = block_of(np.arange(count), count)
        ranges = [block_ids(block, count) for block in range(num_blocks(count))]
        assert [list(range(*both)) for both in ranges] == [
            np.flatnonzero(blocks == block).tolist() for block in range(num_blocks(count))
        ]


def test_sums_depend_on_rows_and_ids_and_not_on_order() -> None:
    rng = np.random.default_rng(0)
    x, ids = rng.standard_normal((3000, 6)), np.arange(3000)
    whole = block_sums(ids, x, 3000)
    order = rng.permutation(3000)
    halves = [block_sums(some, x[some], 3000) for some in (order[:1000], order[1000:])]
    assert np.array_equal(add(*halves), whole)
    swapped = x.copy()
    swapped[[4, 5]] = swapped[[5, 4]]  # in one block, or in two
    assert np.count_nonzero(block_sums(ids, swapped, 3000) != whole) in (1, 2)
    flipped = x.copy()
    flipped.view(np.uint64)[2000, 3] ^= np.uint64(1)
    assert np.flatnonzero(block_sums(ids, flipped, 3000) != whole).tolist() == [block_of(np.array([2000]), 3000)[0]]


def test_sums_of_text_do_not_depend_on_the_array_it_is_in() -> None:
    words = ["a", "longer", "ü", ""]
    ids = np.arange(4)
    assert np.array_equal(
        block_sums(ids, np.array(words, dtype="U40"), 4), block_sums(ids, np.array(words, dtype=object), 4)
    )


# ------------------------------------------------------------------------------------------------------------- verify


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "s"
    build(rich_graph(edges=70), assignment(np.arange(30) % 3, 3), folder)
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "s"
    copy.mkdir()
    for file in built.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def flip(value: Any) -> Any:
    return 1 - value


def more(value: Any) -> Any:
    return value + 1


def swap_edges(file: h5py.File) -> None:
    """Exchange the global ids of two edges from different rows."""
    ids = file["edges/global_id"]
    ids[0], ids[len(ids) - 1] = ids[len(ids) - 1], ids[0]


def other_halo_node(file: h5py.File) -> None:
    """Make a halo node that part 2 owns one of its nodes that the list does not hold, in order."""
    values, owner = file["halo/global_id"][...], file["halo/owner"][...]
    free = next(node for node in range(2, 30, 3) if node not in values)
    place = int(np.searchsorted(np.where(owner == 2, values, -1), free))
    assert owner[place] == 2
    values[place] = free
    file["halo/global_id"][...] = values


# dataset -> edits of part 1 that only verify can find, as every shard by itself still looks right
CHANGES: dict[str, list[Callable[[h5py.File], None]]] = {
    "features/x": [put("features/x", (0, 0), more), put("features/x", (9, 4), -0.0)],
    "labels/y": [put("labels/y", 3, lambda old: (old + 2) % 4), put("labels/y", 9, lambda old: -1 if old >= 0 else 0)],
    "splits/train": [put("splits/train", (0, 4), flip), put("splits/train", (1, 9), flip)],
    "splits/val": [put("splits/val", (1, 0), flip)],
    "splits/test": [put("splits/test", (0, 5), flip)],
    "ids/original": [put("ids/original", 2, "node é 8"), put("ids/original", 0, "")],
    "edges/weight": [put("edges/weight", 0, more), put("edges/weight", 15, 0.0)],
    "edges/x": [put("edges/x", (0, 0), more), put("edges/x", (15, 1), more)],
    "edges/global_id": [put("edges/global_id", 0, more), swap_edges],
    "degrees/in": [put("degrees/in", 3, more), put("degrees/in", -1, more)],
    "degrees/in_weight": [
        put("degrees/in_weight", 0, lambda old: np.nextafter(old, 99)),
        put("degrees/in_weight", -1, 0.0),
    ],
    "degrees/loops": [put("degrees/loops", 5, more), put("degrees/loops", -1, more)],
    "halo/index": [put("halo/index", -1, more)],
    "halo/global_id": [other_halo_node],
}


@pytest.mark.parametrize(("dataset", "edit"), [(name, edit) for name, edits in CHANGES.items() for edit in edits])
def test_a_changed_value_is_named(dataset: str, edit: Callable[[h5py.File], None], folder: Path) -> None:
    name = change(folder, 1, edit)
    places = [(fault.file, fault.dataset) for fault in verify(folder) if fault.file != MANIFEST]
    assert places
    # An edge id that two parts hold may be wrong in either.
    assert all(file in (name, f"{name} or {part_name(2, 3)}", f"{part_name(0, 3)} or {name}") for file, _ in places)
    assert {found for _, found in places} == {dataset}


@pytest.mark.parametrize("dataset", ["features/x", "edges/global_id", "halo/index"])
def test_a_checksum_tells_which_file_it_is(dataset: str, folder: Path) -> None:
    name = change(folder, 1, CHANGES[dataset][0], refresh=False)
    whole, *inside = [fault for fault in verify(folder) if fault.file != MANIFEST]
    assert (whole.file, whole.dataset) == (name, "")
    assert {(fault.file, fault.dataset) for fault in inside} == {(name, dataset)}


@pytest.mark.parametrize(
    ("dataset", "index", "value", "found"),
    [
        ("features/x", (6, 2), 9.0, 6),
        ("labels/y", 6, -1, 6),
        ("degrees/in", 6, 10**6, 6),
        ("degrees/loops", 6, 10**6, 6),
        ("halo/index", -1, 10**6, None),
        ("edges/indices", 0, 10**6, 0),
    ],
)
def test_the_place_of_a_fault_is_found(dataset: str, index: Any, value: Any, found: int | None, folder: Path) -> None:
    change(folder, 1, put(dataset, index, value))
    (fault, *_) = [fault for fault in verify(folder) if fault.dataset == dataset]
    assert fault.index == (read_shard(folder, 1).num_halo - 1 if found is None else found)


def test_nodes_owned_twice_and_never(tmp_path: Path) -> None:
    graph = Graph(name="bare", num_nodes=6, src=np.zeros(0, np.int64), dst=np.zeros(0, np.int64))
    build(graph, assignment([0, 1, 0, 1, 0, 1], 2), tmp_path / "s")
    change(tmp_path / "s", 0, put("owned/global_id", 1, 3), refresh=False)
    assert str(verify(tmp_path / "s")[1]).startswith("part-00000-of-00002.h5: owned/global_id: node 3 is stored by")
    refresh_manifest(tmp_path / "s")
    assert [str(fault) for fault in verify(tmp_path / "s")] == [
        "part-00000-of-00002.h5 or part-00001-of-00002.h5: owned/global_id: node 3 is stored by part 0 and by part 1",
        "manifest.json: owned/global_id: node 2 is owned by no part",
    ]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_change_of_a_number_goes_unseen(built: Path, data: st.DataObject) -> None:
    """Any value of any dataset of any part, checksum refreshed: a fault in that file, in that group of datasets."""
    part = data.draw(st.integers(0, 2))
    datasets = [*CHANGES, "owned/global_id", "halo/owner", "edges/indptr", "edges/indices"]
    dataset = data.draw(st.sampled_from([name for name in datasets if name != "ids/original"]))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for file in built.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())

        def edit(file: h5py.File) -> None:
            values = file[dataset][...]
            place = data.draw(st.integers(0, values.size - 1))
            step = data.draw(st.integers(1, 3))
            if values.dtype == np.uint8:
                values.flat[place] ^= 1
            else:
                values.flat[place] += data.draw(st.sampled_from([step, -step]))
            file[dataset][...] = values

        name = change(folder, part, edit)
        faults = verify(folder)
        group = dataset.split("/")[0]
        assert any(name in fault.file and fault.dataset.split("/")[0] in (group, "halo") for fault in faults), [
            str(fault) for fault in faults
        ]


def test_sparse_features_are_verified(tmp_path: Path) -> None:
    case = CASES["sparse"]
    build(case.graph, assignment(case.part(2), 2), tmp_path / "s")
    name = change(tmp_path / "s", 0, put("features/data", 3, lambda old: -old))
    (fault,) = verify(tmp_path / "s")
    assert (fault.file, fault.dataset) == (name, "features")
    assert "differs from the source graph at global id" in fault.message


def test_large_graphs_name_the_range_and_the_candidates(tmp_path: Path) -> None:
    n = 5000
    graph = Graph(name="long", num_nodes=n, src=np.arange(n), dst=np.roll(np.arange(n), 1), y=np.arange(n) % 3)
    build(graph, assignment(np.arange(n) % 2, 2), tmp_path / "s")
    change(tmp_path / "s", 0, put("labels/y", 1000, lambda old: (old + 1) % 3), refresh=False)
    damaged, fault = verify(tmp_path / "s")
    assert damaged.file == fault.file == part_name(0, 2)  # the checksum tells which of the two it is
    assert fault.message == "differs from the source graph at global ids 1998 to 2001"
    refresh_manifest(tmp_path / "s")
    (fault,) = verify(tmp_path / "s")
    assert fault.file == f"{part_name(0, 2)} or {part_name(1, 2)}"


def test_a_mixed_truncated_or_missing_file_is_named(folder: Path, tmp_path: Path) -> None:
    build(rich_graph(seed=1), assignment(np.arange(30) % 3, 3), tmp_path / "other")
    name = part_name(1, 3)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes((tmp_path / "other" / name).read_bytes())
    refresh_manifest(folder)
    assert [(fault.file, "another build" in fault.message) for fault in verify(folder)] == [(name, True)]
    (folder / name).write_bytes(whole[:-1])
    assert [fault.file for fault in verify(folder)] == [name]
    (folder / name).unlink()
    assert [fault.file for fault in verify(folder)] == [name]


def test_a_file_whose_structure_is_garbage_does_not_take_verify_along(folder: Path) -> None:
    path = folder / part_name(0, 3)
    whole = bytearray(path.read_bytes())
    whole[8:4000] = np.random.default_rng(0).integers(0, 256, 3992, dtype=np.uint8).tobytes()
    path.write_bytes(whole)
    assert {fault.file for fault in verify(folder)} == {path.name}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"graph": {"num_nodes": 10**15, "num_edges": 70}}, "graph.num_nodes: is 1000000000000000, but the files"),
        ({"graph": {"num_nodes": 30, "num_edges": 10**15}}, "graph.num_edges: is 1000000000000000, but the files"),
        ({"sums": {}}, "sums.dst: 0 sums; expected 70"),
        ({"sums": {"other": []}}, "sums.other"),
    ],
)
def test_a_manifest_that_lies_is_named(fields: dict[str, Any], message: str, folder: Path) -> None:
    refresh_manifest(folder, **fields)
    assert any(message in str(fault) for fault in verify(folder))


# ----------------------------------------------------------------------------------------------- folders, overwriting


def test_a_build_is_replaced_only_by_force(tmp_path: Path) -> None:
    out = tmp_path / "s"
    first = build(two_triangles(), assignment(HALVES, 2), out)
    with pytest.raises(ValueError, match="holds a build already; --force replaces it"):
        build(two_triangles(), assignment(HALVES, 2), out)
    second = build(two_triangles(), assignment(np.arange(6) % 3, 3), out, force=True)
    assert second.build_id != first.build_id
    assert sorted(path.name for path in out.iterdir()) == [MANIFEST, *(part_name(q, 3) for q in range(3))]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_other_files_are_never_removed(tmp_path: Path) -> None:
    out = tmp_path / "s"
    build(two_triangles(), assignment(HALVES, 2), out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds files that no build wrote \(notes.txt\)"):
        build(two_triangles(), assignment(HALVES, 2), out, force=True)
    (out / "notes.txt").unlink()
    (out / MANIFEST).write_text('{"name": "a web app"}')
    with pytest.raises(ValueError, match=r"no build wrote \(manifest.json\)"):
        build(two_triangles(), assignment(HALVES, 2), out, force=True)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        check_target(file, force=True)


def test_new_nested_empty_and_linked_folders_are_taken(tmp_path: Path) -> None:
    build(two_triangles(), assignment(HALVES, 2), tmp_path / "a" / "b" / "c")
    (tmp_path / "empty").mkdir()
    build(two_triangles(), assignment(HALVES, 2), tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    build(two_triangles(), assignment(HALVES, 2), tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / part_name(0, 2)).touch()
    (tmp_path / "damaged" / MANIFEST).write_text('{"format": "fullgraph-shards", "format_version": 99}')
    build(two_triangles(), assignment(HALVES, 2), tmp_path / "damaged", force=True)
    for name in ("a/b/c", "empty", "link", "damaged"):
        assert verify(tmp_path / name) == []


def test_a_build_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "s"
    old = build(two_triangles(), assignment(HALVES, 2), out)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build_module, "write_manifest", full)
    with pytest.raises(OSError, match="No space left"):
        build(two_triangles(), assignment(np.arange(6) % 3, 3), out, force=True)
    assert read_manifest(out) == old
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_disk_that_is_too_small_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module.shutil, "disk_usage", lambda _: _Usage(100))
    with pytest.raises(ValueError, match=r"the shards take at least 0\.0 MB, but 0\.0 MB are free there; make room"):
        build(two_triangles(), assignment(HALVES, 2), tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


@dataclasses.dataclass
class _Usage:
    free: int


def test_an_assignment_of_another_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the assignment has 5 entries for 6 nodes"):
        build(two_triangles(), assignment(HALVES[:5], 2), tmp_path / "s")


# ----------------------------------------------------------------------------------------------------- builds that die


def _build_large(out: Path) -> None:
    n = 20_000
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 3, (1, n))
    graph = Graph(
        name="large",
        num_nodes=n,
        src=rng.integers(0, n, 100_000),
        dst=rng.integers(0, n, 100_000),
        x=rng.standard_normal((n, 64), dtype=np.float32),
        splits=Splits(train=kind == 0, val=kind == 1, test=kind == 2),
    )
    build(graph, assignment(np.arange(n) % 8, 8), out, force=True)


def _killed_after(seconds: float, out: Path) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=_build_large, args=(out,))
    child.start()
    assert child.pid is not None
    child.join(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    child.join()
    return child.exitcode


def test_a_killed_build_leaves_nothing_that_loads(tmp_path: Path) -> None:
    out = tmp_path / "s"
    start = time.perf_counter()
    _build_large(out)
    seconds = time.perf_counter() - start
    complete = read_manifest(out)
    killed = 0
    for fraction in np.random.default_rng(0).uniform(0.05, 1.1, 6):
        for file in out.glob("*"):
            file.unlink()
        if out.exists():
            out.rmdir()
        if _killed_after(fraction * seconds, out) == 0:
            assert read_manifest(out) == complete
        else:
            killed += 1
            with pytest.raises(ValueError, match=r"was not finished|no such folder"):
                read_manifest(out)
    assert killed
    # What was left behind goes with the next build, which is whole.
    _build_large(out)
    assert read_manifest(out) == complete
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_killed_replacement_leaves_the_old_build(tmp_path: Path) -> None:
    out = tmp_path / "s"
    old = build(two_triangles(), assignment(HALVES, 2), out)
    for seconds in (0.1, 0.3):
        if _killed_after(seconds, out) != 0:
            assert read_manifest(out) == old
            assert verify(out) == []


def test_a_build_that_still_runs_is_not_cleared_away(tmp_path: Path) -> None:
    """Two builds into one place: the folder of the one at work stays, and the first to end wins."""
    out = tmp_path / "s"

    told: list[str] = []

    def second(what: str, done: int, of: int) -> None:
        told.append(what)
        if len(told) == 1:
            build(two_triangles(), assignment(HALVES, 2), out)

    with pytest.raises(ValueError, match="holds a build already"):
        build(two_triangles(), assignment(np.arange(6) % 3, 3), out, progress=second)
    assert read_manifest(out).parts == 2
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
