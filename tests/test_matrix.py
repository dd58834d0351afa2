"""Files of one sparse matrix: scipy's .npz and MatrixMarket's .mtx."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from partition_tools.graph import Graph
from partition_tools.sources import LoadOptions, load
from partition_tools.summary import summarise
from tests.data import SHARED, needs_data
from tests.graph_files import load_or_message

WEIGHTS = LoadOptions(weights=True)


def entries(graph: Graph) -> list[tuple[int, int, float]]:
    weight = np.ones(graph.num_edges) if graph.edge_weight is None else graph.edge_weight
    return list(zip(graph.src.tolist(), graph.dst.tolist(), weight.tolist(), strict=True))


@st.composite
def matrices(draw: st.DrawFn) -> sp.coo_array:
    """Entries in any order, loops, duplicates and stored zeros among them."""
    n = draw(st.integers(1, 7))
    node = st.integers(0, n - 1)
    value = st.sampled_from([0.0, 1.0, -2.0, 0.5, 3.0])
    found = draw(st.lists(st.tuples(node, node, value), max_size=15))
    row, col, data = (np.array(part) for part in zip(*found, strict=True)) if found else (np.zeros(0, int),) * 3
    return sp.coo_array((data.astype(np.float64), (row, col)), shape=(n, n))


def triples(matrix: sp.coo_array) -> list[tuple[int, int, float]]:
    return list(zip(matrix.coords[0].tolist(), matrix.coords[1].tolist(), matrix.data.tolist(), strict=True))


# ----------------------------------------------------------------------------------------------------------- scipy


@given(matrices(), st.sampled_from(["coo", "csr", "csc"]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_saved_matrix_is_its_entries(
    tmp_path_factory: pytest.TempPathFactory, matrix: sp.coo_array, kind: str, compressed: bool
) -> None:
    path = tmp_path_factory.mktemp("scipy") / "g.npz"
    saved: Any = matrix
    if kind != "coo":  # scipy's own conversion would sum duplicates
        rows, columns = matrix.coords if kind == "csr" else matrix.coords[::-1]
        order = np.argsort(rows, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=matrix.shape[0]))])
        make = sp.csr_array if kind == "csr" else sp.csc_array
        saved = make((matrix.data[order], columns[order], offsets), shape=matrix.shape)
        matrix = sp.coo_array((matrix.data[order], (matrix.coords[0][order], matrix.coords[1][order])), matrix.shape)
    sp.save_npz(path, saved, compressed=compressed)
    g = load(path, WEIGHTS)
    assert g.num_nodes == matrix.shape[0]
    assert entries(g) == triples(matrix)
    plain = load(path)
    assert plain.edge_weight is None
    assert any("--weights" in change for change in plain.changes) == bool((matrix.data != 1).any())


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint64, np.float32, np.float64])
def test_values_of_any_type(tmp_path: Path, dtype: type) -> None:
    sp.save_npz(tmp_path / "g.npz", sp.csr_array(np.array([[0, 1], [2, 0]]).astype(dtype)))
    g = load(tmp_path / "g.npz", WEIGHTS)
    assert entries(g) == [(0, 1, 1), (1, 0, 1 if dtype is np.bool_ else 2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": b"dia"}, "format is 'dia'; expected csr, csc or coo"),
        ({"format": np.array([1, 2])}, "format is ''"),
        ({"shape": [2, 3]}, r"2 rows and 3 columns; expected \[N, N\]"),
        ({"shape": [2]}, "expected two sizes"),
        ({"indices": [0, 2]}, r"indices\[1\] is 2; the shape declares 2 columns"),
        ({"indptr": [0, 1, 3]}, "from 0 to 2"),
        ({"indptr": None}, "array indptr is missing"),
        ({"data": np.ones(2, complex)}, "data is complex128"),
        ({"data": np.array([1, None], object)}, "Python objects"),
    ],
)
def test_a_matrix_that_does_not_fit_together_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    given = {"format": b"csr", "shape": [2, 2], "data": [1, 1], "indices": [1, 0], "indptr": [0, 1, 2], **change}
    np.savez(tmp_path / "g.npz", **{name: value for name, value in given.items() if value is not None})
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path / "g.npz")
    assert "g.npz" in str(caught.value)


def test_coordinates_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = {"format": b"coo", "shape": [2, 2], "data": [1, 1], "row": [0, 1], "col": [1, 0]}
    for change, message in (
        ({"row": [0, 2]}, r"row\[1\] is 2; the shape declares 2 rows"),
        ({"col": [0]}, "expected one length"),
        ({"shape": [2**40, 2**40]}, "1099511627776 nodes for 2 entries.*--num-nodes"),
    ):
        np.savez(tmp_path / "g.npz", **{**good, **change})
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "g.npz")


# --------------------------------------------------------------------------------------------------- MatrixMarket


@given(
    matrices(),
    st.sampled_from(["pattern", "real", "integer"]),
    st.sampled_from(["general", "symmetric", "skew-symmetric"]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_every_matrix_market_form(
    tmp_path_factory: pytest.TempPathFactory, matrix: sp.coo_array, field: str, symmetry: str, packed: bool
) -> None:
    found = triples(matrix)
    if field == "integer":
        found = [(i, j, float(int(value))) for i, j, value in found]
    if symmetry != "general":
        found = [(max(i, j), min(i, j), value) for i, j, value in found]
    if symmetry == "skew-symmetric":
        field = "real" if field == "pattern" else field
        found = [entry for entry in found if entry[0] != entry[1]]
    lines = [f"{i + 1} {j + 1}" + ("" if field == "pattern" else f" {value:g}") for i, j, value in found]
    head = [
        f"%%MatrixMarket matrix coordinate {field} {symmetry}",
        "% a comment",
        f"{matrix.shape[0]} " * 2 + f"{len(found)}",
    ]
    raw = ("\n".join(head + lines) + "\n").encode()
    path = tmp_path_factory.mktemp("mtx") / ("g.mtx.gz" if packed else "g.mtx")
    path.write_bytes(gzip.compress(raw) if packed else raw)

    sign = -1 if symmetry == "skew-symmetric" else 1
    expected = found + [(j, i, sign * value) for i, j, value in found if symmetry != "general" and i != j]
    g = load(path)
    assert (g.name, g.num_nodes) == ("g", matrix.shape[0])
    assert [(u, v) for u, v, _ in entries(g)] == [(u, v) for u, v, _ in expected]
    assert g.edge_weight is None
    if field != "pattern":
        assert entries(load(path, WEIGHTS)) == expected
        assert any("--weights" in change for change in g.changes) == any(value != 1 for *_, value in expected)
    elif found:
        with pytest.raises(ValueError, match="a pattern matrix has no values"):
            load(path, WEIGHTS)


@needs_data
def test_the_real_matrices() -> None:
    chesapeake = load(SHARED / "graphs/chesapeake.mtx")
    s = summarise(chesapeake)
    assert (s.num_nodes, s.num_edges, s.undirected_pairs, s.loops, s.duplicates, s.directed) == (
        39,
        340,
        170,
        0,
        0,
        False,
    )
    assert any("170 stored entries became 340" in change for change in chesapeake.changes)
    s = summarise(load(SHARED / "graphs/LFAT5.mtx", WEIGHTS))
    assert (s.num_nodes, s.num_edges, s.undirected_pairs, s.loops, s.weighted) == (14, 46, 16, 14, True)
    g = load(SHARED / "graphs/LFAT5.mtx", WEIGHTS)
    assert g.edge_weight is not None
    dense = sp.coo_array((g.edge_weight, (g.src, g.dst)), shape=(14, 14)).toarray()
    np.testing.assert_array_equal(dense, scipy.io.mmread(SHARED / "graphs/LFAT5.mtx").toarray())


GOOD = "%%MatrixMarket matrix coordinate real general\n3 3 2\n1 2 0.5\n2 3 1\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("%%MatrixMarket", "%%Market", "the first line is '%%Market matrix"),
        ("coordinate", "array", "array, a dense matrix"),
        ("real", "complex", "complex values; expected pattern"),
        ("general", "hermitian", "hermitian; expected general"),
        ("3 3 2", "3 4 2", r"3 rows and 4 columns; expected \[N, N\].*bipartite"),
        ("3 3 2", "0 0 0", "0 rows"),
        ("3 3 2", "3 3", "the line of sizes is '3 3'"),
        ("3 3 2", "3 3 -2", "the line of sizes"),
        ("3 3 2", "3 3 2000000000000", "declares 2000000000000 entries, but 2 lines follow"),
        ("3 3 2", "99999999999 99999999999 2", "99999999999 nodes for 2 entries.*--num-nodes 99999999999"),
        ("3 3 2", "3 3 3", "declares 3 entries, but 2 lines follow"),
        ("3 3 2", "3 3 1", "declares 1 entries, but 2 lines follow"),
        ("2 3 1", "2 4 1", "line 4: row 2, column 4; expected 1 to 3"),
        ("2 3 1", "0 3 1", "line 4: row 0, column 3; expected 1 to 3"),
        ("2 3 1", "-1 3 1", "line 4: row -1, column 3"),
        ("2 3 1", "2 x 1", "line 4: 'x' is not a whole number"),
        ("2 3 1", "2 3", "line 4: 2 columns, but the first row has 3"),
        ("real", "pattern", r"line 3: 3 columns; expected row, column \(pattern\)"),
        ("real", "integer", "line 3: '0.5' is not a whole number"),
    ],
)
def test_a_bad_matrix_market_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "g.mtx"
    path.write_text(GOOD)
    assert load(path, WEIGHTS).num_edges == 2
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ValueError, match=message) as caught:
        load(path, LoadOptions() if new == "pattern" else WEIGHTS)
    assert "g.mtx" in str(caught.value)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_flipped_or_cut_file_ends_as_a_graph_or_a_message(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, cut: bool
) -> None:
    raw = bytearray(GOOD.encode())
    raw[place] = byte
    path = tmp_path_factory.mktemp("mtx") / "g.mtx"
    path.write_bytes(bytes(raw[:place] if cut else raw))
    found = load_or_message(path)
    assert "g.mtx" in found if isinstance(found, str) else found.num_edges <= 9


def test_the_number_of_nodes_must_be_the_matrix_s(tmp_path: Path) -> None:
    (tmp_path / "g.mtx").write_text(GOOD)
    assert load(tmp_path / "g.mtx", LoadOptions(num_nodes=3)).num_nodes == 3
    with pytest.raises(ValueError, match="the matrix has 3 rows, one a node, but --num-nodes says 5"):
        load(tmp_path / "g.mtx", LoadOptions(num_nodes=5))
    saved = io.BytesIO()
    np.save(saved, np.ones((4, 2)))
    (tmp_path / "x.npy").write_bytes(saved.getvalue())
    with pytest.raises(ValueError, match=r"the matrix has 3 rows, one a node, but rows of .*x\.npy says 4"):
        load(tmp_path / "g.mtx", LoadOptions(features=str(tmp_path / "x.npy")))
