"""What a partitioning costs: the cut, the rows that cross in every layer, and how evenly the work is spread.

Everything is counted from the shards themselves; what a partitioner claimed plays no part.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullgraph.cut import cut_counts_of_shards
from fullgraph.shards import Manifest, Shard, read_manifest, read_shard

WIDTH = 256
_FLOAT32 = 4
LEGEND = (
    "edges: directed entries; an undirected pair is two. cut edges: edges whose ends lie in different parts; cut "
    "pairs: unordered pairs of nodes with a cut edge.",
    "rows: one row of features a node, sent to each other part that has an edge from it, once a layer and direction. "
    "halo rows: rows received, in all as many as are sent. peers: other parts that rows are exchanged with.",
    "cover rows: the fewest rows that carry the same sums, some of them partial sums formed by the sender; linear "
    "layers (GCN, SAGE, GIN) send these, attention sends halo rows.",
    "imbalance: largest part over the mean (1.00 is even, also where there is nothing to spread). train, val, test: "
    "nodes of the first split. replication: (nodes + halo rows) / nodes.",
)


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """One part."""

    part: int
    nodes: int
    """Nodes owned."""
    edges: int
    """In-edges stored."""
    halo_rows: int
    """Rows received in one halo exchange."""
    rows_sent: int
    neighbours: int
    """Other parts that rows are exchanged with."""
    train: int
    """Training nodes of the first split."""
    val: int
    test: int
    bytes: int
    """Size of the shard's file."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One partitioning. Its fields are the keys of the JSON form; the counts are defined in `LEGEND`."""

    folder: str
    name: str
    """Name of the graph."""
    graph_id: str
    """Equal for equal edges, whatever the graph is called."""
    method: str
    seed: int
    parts: int
    nodes: int
    edges: int
    cut_edges: int
    cut_pairs: int
    halo_rows: int
    """Rows received by all parts in one halo exchange; as many are sent."""
    max_halo_rows: int
    """Rows received by the part that receives most."""
    max_rows_sent: int
    cover_rows: int
    """Rows sent by all parts where each pair sends a minimum cover of its cut edges: what linear layers need."""
    max_cover_rows: int
    """The same by the part that sends most."""
    replication: float
    node_imbalance: float
    edge_imbalance: float
    train_imbalance: float
    rows: list[list[int]]
    """[P][P] rows that part p sends part q."""
    per_part: tuple[PartReport, ...]

    def bytes_per_layer(self, width: int) -> int:
        """Bytes that all parts send in one layer's forward exchange of float32 rows; backward sends as many again."""
        return self.halo_rows * width * _FLOAT32

    def max_bytes_per_layer(self, width: int) -> int:
        """Bytes sent by the part that sends most."""
        return self.max_rows_sent * width * _FLOAT32


def report(folder: str | Path) -> Report:
    """Count one build. Reads all of its shards but the features; raises ``ValueError`` where it is damaged."""
    manifest = read_manifest(folder)
    splits: list[list[int]] = []
    counts = cut_counts_of_shards(_structures(folder, manifest, splits))
    assert counts.cover is not None
    received, sent, neighbours = counts.halo_rows, counts.rows_sent, counts.neighbours
    per_part = tuple(
        PartReport(
            part=q,
            nodes=int(counts.nodes[q]),
            edges=int(counts.edges[q]),
            halo_rows=int(received[q]),
            rows_sent=int(sent[q]),
            neighbours=int(neighbours[q]),
            train=splits[q][0],
            val=splits[q][1],
            test=splits[q][2],
            bytes=manifest.files[q].bytes,
        )
        for q in range(manifest.parts)
    )
    nodes = int(counts.nodes.sum())
    return Report(
        folder=str(folder),
        name=str(manifest.graph.get("name", "")),
        graph_id=manifest.graph_id,
        method=str(manifest.partition.get("method", "")),
        seed=int(manifest.partition.get("seed", 0)),
        parts=manifest.parts,
        nodes=nodes,
        edges=int(counts.edges.sum()),
        cut_edges=counts.cut_edges,
        cut_pairs=counts.cut_pairs,
        halo_rows=counts.total_rows,
        max_halo_rows=int(received.max()),
        max_rows_sent=counts.max_rows_sent,
        cover_rows=int(counts.cover.sum()),
        max_cover_rows=int(counts.cover.sum(axis=1).max()),
        replication=(nodes + counts.total_rows) / nodes,
        node_imbalance=imbalance(counts.nodes),
        edge_imbalance=imbalance(counts.edges),
        train_imbalance=imbalance(np.asarray([train for train, _, _ in splits])),
        rows=counts.rows.tolist(),
        per_part=per_part,
    )


def imbalance(loads: NDArray[np.integer[Any]]) -> float:
    """Largest load over the mean; 1.0 where all are zero."""
    total = int(loads.sum())
    return float(loads.max()) * loads.shape[0] / total if total else 1.0


def _structures(folder: str | Path, manifest: Manifest, splits: list[list[int]]) -> Iterator[Shard]:
    """All shards without features; notes the nodes of the first split on the way."""
    for q in range(manifest.parts):
        shard = read_shard(folder, q, manifest=manifest, verify=False, features=False)
        splits.append([int(mask[:1].sum()) for mask in (shard.train, shard.val, shard.test)])
        yield shard


# ------------------------------------------------------------------------------------------------------------- forms


def to_json(reports: Sequence[Report], *, width: int = WIDTH) -> str:
    """A list with one object a folder: the fields of `Report`, ``width``, and the bytes that follow from it."""
    return "[\n" + ",\n".join(json.dumps(asdict(report) | _bytes(report, width)) for report in reports) + "\n]"


def to_csv(reports: Sequence[Report], *, width: int = WIDTH) -> str:
    """A header and one line a folder; without the figures of single parts."""
    text = io.StringIO()
    lines = [asdict(report) | _bytes(report, width) for report in reports]
    names = [name for name in lines[0] if name not in ("rows", "per_part")]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _bytes(report: Report, width: int) -> dict[str, int]:
    return {
        "width": width,
        "bytes_per_layer": report.bytes_per_layer(width),
        "max_bytes_per_layer": report.max_bytes_per_layer(width),
    }


def show(reports: Sequence[Report], console: Console, *, width: int = WIDTH) -> None:
    """Print partitionings side by side, then each part by part, then what the words mean."""
    console.print(_side_by_side(reports, width))
    if len({report.graph_id for report in reports}) > 1:
        console.print("These are different graphs: their figures cannot be compared.", style="yellow")
    for report in reports:
        console.print(_part_table(report))
    for line in LEGEND:
        console.print(line, style="dim", highlight=False)


def _side_by_side(reports: Sequence[Report], width: int) -> Table:
    table = Table(title="Partitionings", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for report in reports:
        table.add_column(Text(report.folder), justify="right", overflow="fold")
    rows = {
        "graph": [report.name for report in reports],
        "method": [report.method for report in reports],
        "seed": [str(report.seed) for report in reports],
        "parts": [str(report.parts) for report in reports],
        "nodes": [f"{report.nodes:,}" for report in reports],
        "edges": [f"{report.edges:,}" for report in reports],
        "cut edges": [f"{report.cut_edges:,}" for report in reports],
        "cut edges, % of edges": [f"{100 * report.cut_edges / max(1, report.edges):.2f}" for report in reports],
        "cut pairs": [f"{report.cut_pairs:,}" for report in reports],
        "halo rows": [f"{report.halo_rows:,}" for report in reports],
        "most rows received": [f"{report.max_halo_rows:,}" for report in reports],
        "most rows sent": [f"{report.max_rows_sent:,}" for report in reports],
        "cover rows": [f"{report.cover_rows:,}" for report in reports],
        "most cover rows sent": [f"{report.max_cover_rows:,}" for report in reports],
        "replication": [f"{report.replication:.3f}" for report in reports],
        "node imbalance": [f"{report.node_imbalance:.3f}" for report in reports],
        "edge imbalance": [f"{report.edge_imbalance:.3f}" for report in reports],
        "train imbalance": [f"{report.train_imbalance:.3f}" for report in reports],
        f"MB a layer, width {width}": [f"{report.bytes_per_layer(width) / 1e6:,.2f}" for report in reports],
        "  most by one part": [f"{report.max_bytes_per_layer(width) / 1e6:,.2f}" for report in reports],
    }
    for name, values in rows.items():
        table.add_row(name, *(Text(value) for value in values))
    return table


def _part_table(report: Report) -> Table:
    table = Table(
        title=Text(f"{report.folder}: part by part"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in ("part", "nodes", "edges", "halo rows", "rows sent", "peers", "train", "val", "test", "MB"):
        table.add_column(name, justify="right", overflow="fold")  # a number is never cut short
    for part in report.per_part:
        work = (part.nodes, part.edges, part.halo_rows, part.rows_sent, part.neighbours)
        counts = (*work, part.train, part.val, part.test)
        table.add_row(str(part.part), *(f"{count:,}" for count in counts), f"{part.bytes / 1e6:,.2f}")
    return table
