"""The figures of a report in the order they are shown, how each is written, and which partitioning wins it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullgraph.shards import read_manifest
from partition_tools.report import Report

Number = float | int
MOST_COMPARED = 8
_LONG = 40  # characters


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table of partitionings."""

    key: str
    """Its name in the CSV form."""
    label: str
    value: Callable[[Report], Number | str | None]
    """None where a partitioning has none."""
    write: Callable[[Number], str] = "{:,}".format
    cost: bool = False
    """Whether less is better."""
    part_of: bool = False
    """Whether the line is a detail of the one above."""

    def text(self, report: Report) -> str:
        value = self.value(report)
        return "–" if value is None else value if isinstance(value, str) else self.write(value)


def megabytes(value: Number) -> str:
    return f"{value / 1e6:,.3g}" if value < 1e9 else f"{value / 1e6:,.0f}"


def seconds(value: Number) -> str:
    return f"{value:.3g}"


def _ratio(value: Number) -> str:
    return f"{value:.3f}"


def _percent(value: Number) -> str:
    return f"{100 * value:.2f}"


FIGURES = (
    Figure(key="name", label="graph", value=lambda r: r.name),
    Figure(key="method", label="method", value=lambda r: r.method),
    Figure(key="seed", label="seed", value=lambda r: r.seed, write=str),
    Figure(key="parts", label="parts", value=lambda r: r.parts),
    Figure(key="nodes", label="nodes", value=lambda r: r.nodes),
    Figure(key="edges", label="edges", value=lambda r: r.edges),
    Figure(key="cut_edges", label="cut edges", value=lambda r: r.cut_edges, cost=True),
    Figure(key="cut_share", label="% of edges", value=lambda r: r.cut_share, write=_percent, part_of=True),
    Figure(key="cut_pairs", label="cut pairs", value=lambda r: r.cut_pairs, cost=True),
    Figure(key="cut_weight", label="cut weight", value=lambda r: r.cut_weight, write="{:,.6g}".format, cost=True),
    Figure(key="halo_rows", label="halo rows", value=lambda r: r.halo_rows, cost=True),
    Figure(key="halo_ratio", label="for each node", value=lambda r: r.halo_ratio, write=_ratio, part_of=True),
    Figure(key="random_ratio", label="of random's", value=lambda r: r.random_ratio, write=_ratio, part_of=True),
    Figure(key="replication", label="replication", value=lambda r: r.replication, write=_ratio, cost=True),
    Figure(key="max_halo_rows", label="most rows received", value=lambda r: r.max_halo_rows, cost=True),
    Figure(key="max_rows_sent", label="most rows sent", value=lambda r: r.max_rows_sent, cost=True),
    Figure(key="cover_rows", label="cover rows", value=lambda r: r.cover_rows, cost=True),
    Figure(key="max_cover_rows", label="most cover rows sent", value=lambda r: r.max_cover_rows, cost=True),
    Figure(key="max_neighbours", label="most peers", value=lambda r: r.max_neighbours, cost=True),
    Figure(key="mean_neighbours", label="mean", value=lambda r: r.mean_neighbours, write="{:.2f}".format, part_of=True),
    Figure(key="node_imbalance", label="node imbalance", value=lambda r: r.node_imbalance, write=_ratio, cost=True),
    Figure(key="edge_imbalance", label="edge imbalance", value=lambda r: r.edge_imbalance, write=_ratio, cost=True),
    Figure(key="train_imbalance", label="train imbalance", value=lambda r: r.train_imbalance, write=_ratio, cost=True),
    Figure(
        key="max_feature_bytes",
        label="most feature MB",
        value=lambda r: None if r.yardstick else r.max_feature_bytes,
        write=megabytes,
        cost=True,
    ),
    Figure(key="memory_bytes", label="memory a rank, MB", value=lambda r: r.memory_bytes, write=megabytes, cost=True),
    Figure(
        key="measured_memory_bytes",
        label="measured, process",
        value=lambda r: r.measured.memory_bytes if r.measured else None,
        write=megabytes,
        part_of=True,
    ),
    Figure(key="rows_per_epoch", label="rows an epoch", value=lambda r: r.rows_per_epoch, cost=True),
    Figure(key="bytes_per_epoch", label="MB an epoch", value=lambda r: r.bytes_per_epoch, write=megabytes, cost=True),
    Figure(
        key="max_bytes_per_epoch",
        label="most by one rank",
        value=lambda r: r.max_bytes_per_epoch,
        write=megabytes,
        part_of=True,
    ),
    Figure(
        key="measured_bytes_per_epoch",
        label="measured",
        value=lambda r: r.measured.bytes_per_epoch if r.measured else None,
        write=megabytes,
        part_of=True,
    ),
    Figure(
        key="seconds_per_epoch", label="seconds an epoch", value=lambda r: r.seconds_per_epoch, write=seconds, cost=True
    ),
    Figure(
        key="exchange_seconds",
        label="of them exchange",
        value=lambda r: r.exchange_seconds,
        write=seconds,
        part_of=True,
    ),
    Figure(
        key="measured_seconds_per_epoch",
        label="measured",
        value=lambda r: r.measured.seconds_per_epoch if r.measured else None,
        write=seconds,
        part_of=True,
    ),
)

TEXTS = ("name", "method")
"""Keys of the figures that are text."""

GLOSSARY = (
    ("edge", "a directed entry u -> v, stored with the owner of v; an undirected pair is two."),
    (
        "cut edge, cut pair, cut weight",
        "an edge whose ends lie in different parts; an unordered pair of nodes joined by one; the sum of the cut "
        "edges' weights.",
    ),
    (
        "halo rows",
        "halo nodes (owned elsewhere, source of an edge into the part), summed over parts. A halo exchange sends a "
        "row of features for each, once a layer and direction; as many are received as are sent.",
    ),
    ("replication", "(nodes + halo rows) / nodes: how often a node is held on average."),
    (
        "cover rows",
        "the fewest rows that carry the same sums, some of them partial sums formed by the sender (a minimum vertex "
        "cover of the cut edges of each pair of parts). Linear layers (GCN, SAGE, GIN) send these, attention sends "
        "halo rows.",
    ),
    ("peers", "other parts that a part exchanges rows with."),
    ("imbalance", "largest part over the mean; 1 is even, also where there is nothing to spread."),
    ("train, val, test", "nodes of the split that the report was asked about, the first by default."),
    (
        "rows and MB an epoch",
        "message rows that the stated model sends in a training step, and their bytes forward and backward, all parts "
        "together. A layer sends rows only for nodes that a training node can feel (pruned), and layer 0, whose input "
        "never changes, none where its sums are formed once or its halo rows are kept.",
    ),
    (
        "seconds an epoch",
        "predicted for the stated model and machine: in each layer the slowest part's matrix products at its "
        "operations a second, rows read by the sparse kernel at its bytes a second, what dropout and activations go "
        "through, an overhead a layer, and rows exchanged at the link's bandwidth and latency, with no overlap.",
    ),
    (
        "memory a rank",
        "predicted tensors of the rank that needs most at the peak of a step; a measured peak is that of the whole "
        "process, Python and torch included.",
    ),
    ("measured", "medians over the epochs of the run that was named."),
    (
        "random, contiguous",
        "yardsticks: the same graph dealt out at random, and cut into runs of consecutive ids, in equal parts.",
    ),
)


def printable(text: str) -> str:
    """Names from files and folders without what would steer a terminal or break a page."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def labels(reports: Sequence[Report]) -> list[str]:
    """How each is called beside the others: its folder, without the folders that all are in; yardsticks by parts."""
    folders = [Path(report.folder) for report in reports if not report.yardstick]
    shared = 0
    if len(set(folders)) > 1:
        for names in zip(*(folder.parts[:-1] for folder in folders), strict=False):
            if len(set(names)) > 1:
                break
            shared += 1
    return [
        printable(f"{r.folder} ({r.parts})" if r.yardstick else str(Path(*Path(r.folder).parts[shared:])))
        for r in reports
    ]


def shortened(label: str) -> str:
    """A label that fits the head of a column or a bar."""
    return label if len(label) <= _LONG else f"{label[: _LONG // 2 - 1]}…{label[-_LONG // 2 :]}"


def remarks(reports: Sequence[Report]) -> list[str]:
    """What to know before comparing them."""
    if not same_graph(reports):
        return ["These are different graphs: their figures cannot be compared."]
    parts = dict.fromkeys(report.parts for report in reports)
    if len(parts) > 1:
        return [f"These are in different numbers of parts ({', '.join(map(str, parts))}): fewer parts always cut less."]
    return []


def shown(reports: Sequence[Report]) -> list[Figure]:
    """The figures that some partitioning has."""
    return [figure for figure in FIGURES if any(figure.value(report) is not None for report in reports)]


def same_graph(reports: Sequence[Report]) -> bool:
    return len({report.graph_id for report in reports}) == 1


def best(figure: Figure, reports: Sequence[Report]) -> list[int]:
    """Which of the partitionings have the least cost; none where there is nothing to choose between.

    Yardsticks are no candidates. Costs that are written alike are equal.
    """
    values = {i: figure.value(r) for i, r in enumerate(reports) if figure.cost and not r.yardstick}
    numbers = {i: value for i, value in values.items() if isinstance(value, (int, float))}
    if len(set(map(figure.write, numbers.values()))) < 2 or not same_graph(reports):
        return []
    least = figure.write(min(numbers.values()))
    return [i for i, value in numbers.items() if figure.write(value) == least]


@dataclass(frozen=True, kw_only=True)
class Winner:
    """Who pays least of one cost. Its fields are the keys of the JSON form."""

    cost: str
    """Its key."""
    label: str
    winners: tuple[str, ...]
    """Folders of the least cost; several, or all, where they are written alike."""
    value: Number
    runner_up: str | None
    """Folder of the next larger cost; null where all are equal."""
    runner_up_value: Number | None
    saved: float
    """Share of the next larger cost that is saved: 1 - value / runner_up_value; 0 where all are equal."""
    text: str
    runner_up_text: str


def winners(reports: Sequence[Report]) -> list[Winner]:
    """The winner of each cost among the partitionings, yardsticks left out; they must be of one graph."""
    reports = [report for report in reports if not report.yardstick]
    assert same_graph(reports)
    out = []
    for figure in FIGURES:
        values = [figure.value(report) for report in reports]
        numbers = [value for value in values if isinstance(value, (int, float))]
        if not figure.cost or len(numbers) < len(reports):
            continue
        least = min(numbers)
        others = [value for value in numbers if figure.write(value) != figure.write(least)]
        runner_up = reports[numbers.index(min(others))] if others else None
        out.append(
            Winner(
                cost=figure.key,
                label=figure.label,
                winners=tuple(r.folder for r, value in zip(reports, numbers, strict=True) if value not in others),
                value=least,
                runner_up=runner_up.folder if runner_up else None,
                runner_up_value=min(others) if others else None,
                saved=1 - least / min(others) if others else 0.0,
                text=figure.write(least),
                runner_up_text=figure.write(min(others)) if others else "",
            )
        )
    return out


def check_comparable(folders: Sequence[str | Path]) -> None:
    """Raise ``ValueError`` naming two folders that hold different graphs, or a folder that is named twice."""
    manifests = [read_manifest(folder) for folder in folders]
    first, facts = manifests[0], manifests[0].graph
    for at, (folder, other) in enumerate(zip(folders, manifests, strict=True)):
        if other.graph_id != first.graph_id:
            raise ValueError(
                f"compare: {folders[0]} holds the graph {_named(facts)}, {folder} holds {_named(other.graph)}; only "
                f"partitionings of one graph can be compared: name folders that were built from the same graph"
            )
        for before in range(at):
            if manifests[before].build_id == other.build_id:
                raise ValueError(
                    f"compare: {folders[before]} and {folder} are the same build; name each partitioning once"
                )


def _named(facts: dict[str, Any]) -> str:
    return f"{facts.get('name')} ({facts['num_nodes']:,} nodes, {facts['num_edges']:,} edges)"
