"""What is asked of a graph file, on the command line or from Python, beyond its name."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

from fullgraph.records import check_types, flag

FEATURE_KINDS = "degree, onehot, random:K or learned:K"

_CHOICES = {
    "index_base": (None, 0, 1),
    "label_base": (0, 1),
    "header": (None, "yes", "no"),
    "duplicates": ("keep", "sum", "first", "error"),
    "task": (None, "single-label", "multi-label", "regression"),
    "nan": ("error", "zero", "mean"),
}


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a graph is read, and what is done to it. Construction raises ``ValueError`` naming the flag and the value.

    Everything is off by default; what was done stands in ``Graph.changes``.
    """

    undirected: bool = False
    """Add the reverse of every edge that has none."""
    drop_loops: bool = False
    """Leave out edges from a node to itself."""
    duplicates: Literal["keep", "sum", "first", "error"] = "keep"
    """What becomes of edges with the same two ends: all are kept; one is, with the sum of their weights (1 each where
    there are none); the first is; or they are an error."""
    num_nodes: int | None = None
    """Number of nodes. Ids of an edge list are then rows, from --index-base, not names."""
    weights: bool = False
    """Take the values of a matrix, or the third column of an edge list, as edge weights."""
    weights_as_features: bool = False
    """Add the edge weights as one more edge feature, which gat's attention sees (it takes no weights otherwise)."""
    features: str | None = None
    """File of features, a row a node or with a column of ids (.npy, sparse .npz, .csv, .tsv, .txt, also .gz); or, made
    from the graph, degree, onehot, random:K, random:K:SEED or learned:K (K columns that training learns)."""
    labels: str | None = None
    """File of labels, a row a node or with a column of ids (.npy, .csv, .tsv, .txt, also .gz); names become classes."""
    splits: str | None = None
    """File that says train, val or test for nodes, a row a node or with a column of ids; or .npz of masks or of index
    lists named train, val and test."""
    id_column: str | None = None
    """Column of ids in the files of --features, --labels and --splits: its name, or its number from 1. Without it a
    column named id, node or node_id is taken, and else row i is node i."""
    header: Literal["yes", "no"] | None = None
    """Whether the first line of an edge list names its columns; found out by default."""
    index_base: Literal[0, 1] | None = None
    """Number of the first node where nodes are named by their rows: in .npz, .h5 and .pt files, and in edge lists whose
    ids are rows of --features or --labels or go to --num-nodes."""
    text_ids: bool = False
    """Take the ids of an edge list as names, even where they look like numbers."""
    task: Literal["single-label", "multi-label", "regression"] | None = None
    """What the labels are, where it is not what they look like."""
    label_base: Literal[0, 1] = 0
    """Number of the first class; with 1, label 0 means none."""
    nan: Literal["error", "zero", "mean"] = "error"
    """What becomes of features that are NaN or infinite: an error, 0, or the mean of their column."""

    def __post_init__(self) -> None:
        check_types(self)
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                choices = ", ".join(str(value) for value in values if value is not None)
                raise ValueError(f"{flag(name)} {getattr(self, name)}: expected {choices}")
        if self.num_nodes is not None and self.num_nodes < 1:
            raise ValueError(f"{flag('num_nodes')} {self.num_nodes}: expected at least 1")
        if self.text_ids and (self.index_base is not None or self.num_nodes is not None):
            raise ValueError("--text-ids: names are not numbered; leave out --index-base and --num-nodes")
        if self.label_base == 1 and self.task in ("multi-label", "regression"):
            raise ValueError(f"--label-base 1: numbers classes, and --task {self.task} has none; leave one out")
        self._made()
        if self.id_column is not None and not any((self.features_file, self.labels, self.splits)):
            raise ValueError("--id-column has no effect without a file for --features, --labels or --splits")

    @property
    def features_made(self) -> tuple[str, int, int] | None:
        """(degree, onehot, random or learned; columns K or 0; seed), where --features is no file."""
        return self._made()

    @property
    def features_file(self) -> str | None:
        return self.features if self._made() is None else None

    def _made(self) -> tuple[str, int, int] | None:
        if self.features is None:
            return None
        if self.features in ("degree", "onehot"):
            return self.features, 0, 0
        kind, colon, rest = self.features.partition(":")
        if kind not in ("random", "learned") or not (colon or self.features in ("random", "learned")):
            return None
        pattern = r"([0-9]{1,7})(?::([0-9]{1,18}))?" if kind == "random" else r"([0-9]{1,7})()"
        match = re.fullmatch(pattern, rest)
        if match is None or int(match[1]) < 1:
            raise ValueError(f"--features {self.features}: expected {kind}:K with K columns, from 1, as {kind}:64")
        return kind, int(match[1]), int(match[2] or 0)

    def asked(self) -> tuple[str, ...]:
        """Names of the fields that differ from their default."""
        return tuple(f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
