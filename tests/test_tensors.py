"""Saved dicts of tensors."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from partition_tools.graph import Graph
from partition_tools.sources import load
from tests.graph_files import assert_same, load_or_message, rich_graphs

EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])


def tensor_dict(graph: Graph) -> dict[str, Any]:
    """As a user of PyG holds it."""
    x = graph.x
    if isinstance(x, sp.csr_array):
        x = torch.sparse_csr_tensor(
            torch.from_numpy(x.indptr.astype(np.int64)), torch.from_numpy(x.indices.astype(np.int64)),
            torch.from_numpy(x.data), size=x.shape, check_invariants=True,
        )  # fmt: skip
    elif x is not None:
        x = torch.from_numpy(x)
    found: dict[str, Any] = {
        "edge_index": torch.from_numpy(np.stack([graph.src, graph.dst])),
        "num_nodes": graph.num_nodes,
        "task": graph.task,
        "x": x,
        "node_ids": None if graph.node_ids is None else graph.node_ids.tolist(),
    }
    for name, field in (
        ("y", "y"),
        ("edge_weight", "edge_weight"),
        ("edge_attr", "edge_x"),
        ("node_weight", "node_weight"),
    ):
        value = getattr(graph, field)
        found[name] = None if value is None else torch.from_numpy(value)
    if graph.splits is not None:  # a column a split, as PyG's data sets with several have it
        for part in ("train", "val", "test"):
            found[f"{part}_mask"] = torch.from_numpy(getattr(graph.splits, part).T.copy())
    return found


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@given(rich_graphs())
@settings(max_examples=60, deadline=None)
def test_what_torch_saves_is_loaded(tmp_path_factory: pytest.TempPathFactory, graph: Graph) -> None:
    path = tmp_path_factory.mktemp("pt") / "g.pt"
    torch.save(tensor_dict(graph), path)
    assert_same(load(path), graph)


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (torch.tensor([[0.1], [2], [3]], dtype=torch.bfloat16), np.float32),
        (torch.tensor([[True], [False], [True]]), np.uint8),
        (torch.nn.Parameter(torch.ones(3, 1)), np.float32),
        (torch.ones(6, 2, dtype=torch.float64)[::2, 1:], np.float64),
        (torch.tensor([[1], [2], [3]], dtype=torch.uint16), np.uint16),
    ],
)
def test_types_and_strides(tmp_path: Path, x: torch.Tensor, dtype: type) -> None:
    torch.save({"edge_index": EDGES, "x": x}, tmp_path / "g.pt")
    g = load(tmp_path / "g.pt")
    assert isinstance(g.x, np.ndarray)
    assert g.x.dtype == dtype
    np.testing.assert_array_equal(g.x.astype(np.float64), x.detach().double().numpy())


def test_sparse_coordinates_stay_sparse(tmp_path: Path) -> None:
    torch.save({"edge_index": EDGES, "x": torch.eye(3).to_sparse()}, tmp_path / "g.pt")
    g = load(tmp_path / "g.pt")
    assert isinstance(g.x, sp.csr_array)
    np.testing.assert_array_equal(g.x.toarray(), np.eye(3))


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


class Data:
    """Some class of the user's."""


def test_objects_are_refused_and_nothing_runs(tmp_path: Path) -> None:
    target, path = tmp_path / "ran", tmp_path / "g.pt"
    for content, name in (
        ({"edge_index": EDGES, "x": Bomb(target)}, r"posix\.system"),
        (Data(), r"test_tensors\.Data"),
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=rf"g\.pt: holds Python objects \(.*{name}\).*data\.to_dict"):
            load(path)
    path.write_bytes(pickle.dumps(Bomb(target)))
    with pytest.raises(ValueError, match=r"g\.pt: not a whole \.pt archive"):
        load(path)
    assert not target.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (EDGES, "holds a Tensor, not a dict"),
        ((EDGES, EDGES), "holds a tuple, not a dict"),
        ({1: EDGES}, "not a dict with names"),
        ({"x": EDGES}, r"a dict that holds x; expected edge_index \[2, E\]"),
        ({"edge_index": EDGES, "x": {"a": 1}}, "x is a dict; expected a tensor"),
        ({"edge_index": EDGES, "x": [EDGES]}, "x is a list; expected a tensor"),
        (
            {"edge_index": EDGES, "x": torch.ones(1, 1).expand(3, 10**12)},
            "x shows 3000000000000 values of fewer stored",
        ),
        ({"edge_index": EDGES, "x": torch.ones(3, 1, dtype=torch.complex64)}, "x is torch.complex64"),
        ({"edge_index": EDGES.to_sparse()}, "edge_index is a sparse tensor"),
        ({"edge_index": EDGES, "x": torch.eye(3), "y": torch.zeros(4)}, "rows of x: 3, rows of y: 4"),
        ({"edge_index": EDGES, "edge_attr": torch.ones(2, 2)}, r"edge_attr has shape \[2, 2\]; expected \[E, K\]"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "g.pt")
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path / "g.pt")
    assert "g.pt" in str(caught.value)


def saved() -> bytes:
    raw = io.BytesIO()
    torch.save({"edge_index": EDGES, "x": torch.arange(12.0).reshape(3, 4), "num_nodes": 3}, raw)
    return raw.getvalue()


WHOLE = saved()


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255), st.booleans())
@example(1636, 16, False)  # a tensor that calls itself a folder
@settings(max_examples=100, deadline=None)
def test_a_flipped_or_cut_file_never_gives_other_data(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, cut: bool
) -> None:
    raw = bytearray(WHOLE)
    raw[place] = byte
    path = tmp_path_factory.mktemp("pt") / "g.pt"
    path.write_bytes(bytes(raw[:place] if cut else raw))
    found = load_or_message(path)
    if isinstance(found, str):
        assert "g.pt" in found
    else:
        assert (found.src.tolist(), found.dst.tolist()) == ([0, 1, 2], [1, 2, 0])
        np.testing.assert_array_equal(found.x, np.arange(12.0).reshape(3, 4))


def test_a_packed_archive_is_refused_before_torch_sees_it(tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(io.BytesIO(WHOLE)) as old,
        zipfile.ZipFile(tmp_path / "g.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
        new.writestr("archive/data/9", bytes(1 << 20))
    with pytest.raises(ValueError, match=r"is packed, which torch.save does not do"):
        load(tmp_path / "g.pt")


def test_sizes_that_a_tensor_declares_beyond_its_storage_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(WHOLE)) as old, zipfile.ZipFile(tmp_path / "g.pt", "w") as new:
        for member in old.infolist():
            content = old.read(member)
            if member.filename.endswith("data.pkl"):  # rows 3 -> 2^31 - 1
                assert b"K\x03K\x04\x86" in content
                content = content.replace(b"K\x03K\x04\x86", b"J\xff\xff\xff\x7fK\x04\x86")
            new.writestr(member.filename, content)
    with pytest.raises(ValueError, match=r"g\.pt"):
        load(tmp_path / "g.pt")
