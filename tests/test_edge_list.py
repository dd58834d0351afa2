"""Edge lists: whatever is in the rows, either the right graph or the line that is wrong."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition_tools.graph import Graph
from partition_tools.sources import LoadOptions, load
from partition_tools.sources import text as texts
from tests.graph_files import load_or_message


def write(folder: Path, content: str | bytes, name: str = "g.csv") -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def named_pairs(graph: Graph) -> list[tuple[Any, Any]]:
    """Edges by the nodes' own ids."""
    ids = np.arange(graph.num_nodes) if graph.node_ids is None else graph.node_ids
    return list(zip(ids[graph.src].tolist(), ids[graph.dst].tolist(), strict=True))


def said(graph: Graph) -> str:
    return "\n".join(graph.changes)


# ---------------------------------------------------------------------------------------------- every way to write

NAMES = st.text("abcß-_.é#%", min_size=1, max_size=5).filter(lambda name: name[0] not in "#%")
NUMBERS = st.one_of(st.integers(0, 30), st.integers(0, 2**63 - 1))


@st.composite
def edge_lists(draw: st.DrawFn) -> tuple[list[tuple[Any, Any]], bytes, str, dict[str, Any], list[float] | None]:
    """(edges by id, the file's bytes, its name, options, weights)."""
    kind = draw(st.sampled_from(["numbers", "names", "text numbers"]))
    ids = draw(st.lists(NAMES if kind == "names" else NUMBERS, min_size=1, max_size=8, unique=True))
    pool = [str(i) for i in ids] if kind != "numbers" else ids
    edges = draw(st.lists(st.tuples(st.sampled_from(pool), st.sampled_from(pool)), min_size=1, max_size=20))
    mark = draw(st.sampled_from(["\t", ";", ",", " ", "   "]))
    header = draw(st.sampled_from([None, ("source", "target", "weight"), ("From", "To", "w")]))
    columns = draw(st.sampled_from([2, 3]))
    weights = [draw(st.sampled_from([1.0, 0.5, -2.0, 1e-3])) for _ in edges] if columns == 3 else None
    rows = [[str(u), str(v), *([repr(weights[i])] if weights else [])] for i, (u, v) in enumerate(edges)]
    lines = [mark.join(row) for row in ([list(header[:columns])] if header else []) + rows]
    for _ in range(draw(st.integers(0, 4))):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(["# a,b c", "% 1 2", "", "  ", "#"])))
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    content = (end.join(lines) + draw(st.sampled_from(["", end, end * 3]))).encode()
    content = draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + content
    packed = draw(st.booleans())
    name = f"g.{draw(st.sampled_from(['csv', 'tsv', 'txt', 'edges', 'el', 'edgelist']))}{'.gz' if packed else ''}"
    options = {"text_ids": kind == "text numbers", "weights": columns == 3, "header": None if header else "no"}
    return edges, gzip.compress(content) if packed else content, name, options, weights


@given(edge_lists())
@settings(max_examples=200, deadline=None)
def test_every_way_to_write_an_edge_list(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[list[tuple[Any, Any]], bytes, str, dict[str, Any], list[float] | None],
) -> None:
    edges, content, name, options, weights = case
    g = load(write(tmp_path_factory.mktemp("edges"), content, name), LoadOptions(**options))
    assert named_pairs(g) == edges
    assert g.name == "g"
    ids = sorted({u for edge in edges for u in edge})
    assert (list(range(g.num_nodes)) if g.node_ids is None else g.node_ids.tolist()) == ids
    assert (None if g.edge_weight is None else g.edge_weight.tolist()) == weights


@given(st.integers(0, 8), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=20))
@settings(max_examples=80, deadline=None)
def test_with_a_number_of_nodes_ids_are_rows(
    tmp_path_factory: pytest.TempPathFactory, extra: int, edges: list[tuple[int, int]]
) -> None:
    num_nodes = max(max(edge) for edge in edges) + 1 + extra
    folder = tmp_path_factory.mktemp("edges")
    for base in (0, 1):
        path = write(folder, "".join(f"{u + base},{v + base}\n" for u, v in edges))
        g = load(path, LoadOptions(num_nodes=num_nodes, index_base=base))
        assert list(zip(g.src.tolist(), g.dst.tolist(), strict=True)) == edges
        assert g.num_nodes == num_nodes
        assert (None if g.node_ids is None else g.node_ids.tolist()) == (
            list(range(1, num_nodes + 1)) if base else None
        )


# ------------------------------------------------------------------------------------------------------------- ids


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        ("10,2601296972838024192\n7,10\n", [7, 10, 2601296972838024192]),
        ("1,2\n2,3\n3,1\n", [1, 2, 3]),
        ("1,5\n5,9223372036854775807\n", [1, 5, 2**63 - 1]),
        ("0,2\n2,0\n", [0, 2]),
        ("a,b\nb,#1\n", ["#1", "a", "b"]),
        ('"x, y",b\nb,"x, y"\n', ["b", "x, y"]),
        ("New York\tBern\nBern\tOslo\n", ["Bern", "New York", "Oslo"]),
        ("00501,7\n7,10\n", ["00501", "10", "7"]),
        ("1.0 2.0\n2.0 4.0\n", [1, 2, 4]),
        ("1.000000000000000000e+00 2.0e+00\n2.0 4\n", [1, 2, 4]),
        (" 3 ,  4\n4,3\n", [3, 4]),
        ("a1,7\n7,8\n", ["7", "8", "a1"]),
    ],
)
def test_ids_are_kept_as_they_are(tmp_path: Path, content: str, ids: list[Any]) -> None:
    g = load(write(tmp_path, content))
    assert g.node_ids is not None
    assert g.node_ids.tolist() == ids
    assert g.node_ids.dtype.kind == ("U" if isinstance(ids[0], str) else "i")


def test_ids_that_are_rows_already_are_no_ids_of_their_own(tmp_path: Path) -> None:
    g = load(write(tmp_path, "0,1\n2,1\n"))
    assert g.node_ids is None
    assert "N is 3, the distinct ids from 0 to 2" in said(g)


def test_a_numbering_from_one_and_gaps_are_pointed_out(tmp_path: Path) -> None:
    assert "would ask for --index-base 1" in said(load(write(tmp_path, "1,2\n2,3\n3,1\n")))
    assert "add --num-nodes 5" in said(load(write(tmp_path, "0,1\n2,4\n")))
    assert "--num-nodes" not in said(load(write(tmp_path, "0,1\n2,4000000000\n")))


def test_a_comment_sign_inside_a_name_is_no_comment(tmp_path: Path) -> None:
    g = load(write(tmp_path, "# a list\na#1,b\nb,c%d\n#skipped,x\n"))
    assert named_pairs(g) == [("a#1", "b"), ("b", "c%d")]
    assert "2 edges read, 2 lines of comments skipped" in said(g)


# ---------------------------------------------------------------------------------------------------------- columns


def test_columns_are_found_by_name_in_any_order(tmp_path: Path) -> None:
    content = "id,weight,Target,source,label\n9,0.5,b,a,x\n8,2,c,b,y\n"
    g = load(write(tmp_path, content), LoadOptions(weights=True))
    assert named_pairs(g) == [("a", "b"), ("b", "c")]
    assert g.edge_weight is not None
    assert g.edge_weight.tolist() == [0.5, 2]
    assert "columns id, label were left out" in said(g)
    assert "columns id, weight, label were left out; --weights takes weight" in said(load(write(tmp_path, content)))


def test_a_first_line_of_words_above_numbers_is_a_header(tmp_path: Path) -> None:
    g = load(write(tmp_path, "left,right\n0,1\n1,2\n"))
    assert g.num_edges == 2
    assert "the first line (left, right) names the columns; --header no" in said(g)


def test_a_first_line_of_words_above_words_is_an_edge_unless_told(tmp_path: Path) -> None:
    path = write(tmp_path, "person,friend\nann,bob\n")
    g = load(path)
    assert named_pairs(g) == [("person", "friend"), ("ann", "bob")]
    assert "the first line (person, friend) is an edge; --header yes" in said(g)
    assert named_pairs(load(path, LoadOptions(header="yes"))) == [("ann", "bob")]
    known = write(tmp_path, "source,target\nann,bob\n")
    assert load(known).num_edges == 1
    assert load(known, LoadOptions(header="no")).num_edges == 2


def test_values_are_weights_only_on_request(tmp_path: Path) -> None:
    path = write(tmp_path, "0 1 3\n1 0 16777217\n", "g.wel")
    g = load(path)
    assert g.edge_weight is None
    assert "column 3 was left out; --weights takes it as edge weights" in said(g)
    weighted = load(path, LoadOptions(weights=True))
    assert weighted.edge_weight is not None
    assert weighted.edge_weight.tolist() == [3, 16777217]
    assert weighted.edge_weight.dtype == np.float64


# ------------------------------------------------------------------------------------------------------------ wrong

WRONG: list[tuple[str | bytes, dict[str, Any], str]] = [
    ("", {}, "holds no edges"),
    ("# nothing\n\n", {}, "holds no edges"),
    ("source,target\n", {}, "no edges, and nothing tells the number of nodes; add --num-nodes"),
    ("hello\n", {}, r"the first row \(hello\) has one column; expected 2 or 3"),
    ("0 1 0 1\n1 0 1 0\n", {}, "has 4 columns; expected 2 or 3.*A matrix"),
    ("1 2 {'w': 3}\n", {}, r"From networkx\? write_edgelist"),
    ("# c\n0,1\n\n2\n", {}, r"line 4: 1 column, but the first row has 2 \(separated by commas\)"),
    ("0,1\n2,3,4\n", {}, "line 2: 3 columns, but the first row has 2"),
    ("a\tb\nc d\n", {}, r"line 2: 1 column, but .*\(separated by tabs\)"),
    ('"a",b\nc\n', {}, "line 2: 1 column, but the first row has 2"),
    ("0,1\n2,x\n", {}, "line 2: 'x' is not a whole number, as those in the first row are; --text-ids"),
    ("0,1\n2,\n", {}, "line 2: '' is not a whole number"),
    ("0,1\n2,1.5\n", {}, "line 2: '1.5' is not a whole number"),
    ("1.0,2.0\n1.5,2\n", {}, "line 2: an id that is no whole number"),
    ("a,b\n,b\n", {}, "line 2: an empty id"),
    ("0,1\n2,-3\n", {}, "line 2: id -3 is negative.*--text-ids"),
    ("0,1\n2,9223372036854775808\n", {}, "line 2: '9223372036854775808' is not a whole number of 64 bits"),
    ("0,1,x\n", {"weights": True}, "line 1: 'x' is not a number"),
    ("0,1\n", {"weights": True}, "--weights: there is no third column"),
    ("a b c\nb c d\n", {}, "like triples head, relation, tail"),
    (
        "0,1\n1,7\n",
        {"num_nodes": 5},
        r"line 2: edge 1 -> 7: 5 nodes \(--num-nodes\).*1 such edge, the largest id is 7",
    ),
    ("1,2\n2,3\n", {"num_nodes": 3}, "line 2: edge 2 -> 3: 3 nodes.*add --index-base 1"),
    ("0,1\n1,2\n", {"num_nodes": 3, "index_base": 1}, "line 1: .*leave out --index-base 1"),
    ("0,1\n", {"index_base": 1}, "line 1: edge 0 -> 1: --index-base 1 says that ids start at 1"),
    ("a,b\n", {"index_base": 1}, "--index-base 1: ids are text"),
    ("a,b\n", {"num_nodes": 3}, "ids are text.*column of ids"),
    ("ä,ö\n".encode("latin-1"), {}, "line 1: .* is not UTF-8"),
    ("0,1\n".encode("utf-16"), {}, "UTF-16"),
    (b"0,1\n\0\0", {}, "control characters"),
    ("%%MatrixMarket matrix coordinate pattern general\n2 2 1\n1 2\n", {}, "name it .mtx"),
    ("*Vertices 3\n1 2\n", {}, "Pajek"),
    ("c comment\np sp 3 2\na 1 2 5\n", {}, "DIMACS"),
    ('{"nodes": []}\n', {}, "JSON"),
    ("<!DOCTYPE html>\n<html>", {}, "failed download"),
    ("version https://git-lfs.github.com/spec/v1\n", {}, "git lfs pull"),
]


@pytest.mark.parametrize(("content", "options", "message"), WRONG)
def test_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, content: str | bytes, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(write(tmp_path, content), LoadOptions(**options))
    assert "g.csv" in str(caught.value)


@given(st.binary(max_size=60), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_bytes_end_as_a_graph_or_a_message(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, packed: bool
) -> None:
    path = write(tmp_path_factory.mktemp("bytes"), gzip.compress(content) if packed else content, "g.txt")
    found = load_or_message(path)
    assert "g.txt" in found if isinstance(found, str) else found.num_nodes >= 1


@given(st.text('01,;\t \n"#ab.-e', max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_ends_as_a_graph_or_a_message(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    path = write(tmp_path_factory.mktemp("text"), content, "g.txt")
    found = load_or_message(path)
    assert "g.txt" in found if isinstance(found, str) else found.num_edges <= content.count("\n") + 1


def test_a_cut_gzip_file_and_one_that_swells_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"0 1\n1 2\n" * 1000)
    for raw in (whole[:-5], whole[: len(whole) // 2], whole[:-8] + bytes(8)):
        with pytest.raises(ValueError, match=r"g\.txt\.gz: not a whole gzip file"):
            load(write(tmp_path, raw, "g.txt.gz"))
    with pytest.raises(ValueError, match=r"packed bytes become more than 67108864 bytes.*gunzip"):
        load(write(tmp_path, gzip.compress(bytes(1 << 27)), "g.txt.gz"))


def test_one_huge_name_does_not_make_all_huge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_SPARE", 1 << 16)
    content = "a,b\n" * 500 + "c," + "d" * 1000 + "\n"
    with pytest.raises(ValueError, match="line 501: a line of 1002 bytes among 501 rows"):
        load(write(tmp_path, content))


def test_a_field_too_long_for_a_quoted_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"g\.csv: field larger than field limit"):
        load(write(tmp_path, f'"a","{"b" * 200_000}"\n'))


def test_rows_are_found_again_beyond_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_BLOCK", 8)
    content = "# c\n" + "".join(f"{i},{i + 1}\n" for i in range(50))
    assert load(write(tmp_path, content)).num_edges == 50
    assert load(write(tmp_path, content + "7,007\n")).node_ids is not None
    with pytest.raises(ValueError, match="line 52: 3 columns"):
        load(write(tmp_path, content + "1,2,3\n"))


@pytest.mark.parametrize("content", ["1.0,2\n2.0,3\n3.0,1\n", "1,2.0\n2,3.0\n3,1.0\n"])
def test_ids_of_which_one_column_is_written_as_floats(tmp_path: Path, content: str) -> None:
    g = load(write(tmp_path, content))
    assert g.node_ids is not None
    assert (g.num_nodes, g.node_ids.tolist()) == (3, [1, 2, 3])
    assert "ids are written as floats and were read as whole numbers" in said(g)


def test_gaps_are_told_by_the_number_of_the_first_node(tmp_path: Path) -> None:
    path = write(tmp_path, "1 2\n2 4\n")
    assert "1 number from 1 to the last is no node's" in said(load(path))
    assert "add --num-nodes 4 --index-base 1" in said(load(path))
    assert said(load(path, LoadOptions(index_base=1))).endswith("add --num-nodes 4")
    assert load(path, LoadOptions(index_base=1, num_nodes=4)).num_nodes == 4
    zero = write(tmp_path, "0 1\n1 3\n")
    assert said(load(zero)).endswith("add --num-nodes 4")


def test_a_numbering_from_one_that_was_asked_for_is_not_asked_again(tmp_path: Path) -> None:
    path = write(tmp_path, "1 2\n2 3\n")
    assert "--index-base" in said(load(path))
    assert "--index-base" not in said(load(path, LoadOptions(index_base=1)))
