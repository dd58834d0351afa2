"""``.npz`` files of yandex-research/heterophilous-graphs (minesweeper, chameleon_filtered, ...).

``edges`` [M, 2] lists undirected pairs, each once; ``node_features`` [N, F]; ``node_labels`` [N];
``train_masks, val_masks, test_masks`` [k, N]. The format defines a row as a pair, so both directions are stored (a
loop once), ordered by (src, dst); a pair listed again is merged, as the format's own loader does.
"""

from __future__ import annotations

from pathlib import Path

from fullgraph.wording import counted
from partition_tools.graph import Graph
from partition_tools.sources import arrays
from partition_tools.sources.archive import Archive
from partition_tools.sources.fields import unread
from partition_tools.sources.reader import Reader, Request

_KNOWN = {"edges", "node_features", "node_labels", "train_masks", "val_masks", "test_masks"}


def _matches(spec: str) -> bool:
    if not (spec.endswith(".npz") and Path(spec).is_file()):
        return False
    archive = Archive(spec)
    return "edges" in archive and "node_features" in archive


def _read(spec: str, request: Request) -> Graph:
    archive = Archive(spec)
    changes = unread(archive, _KNOWN)
    pairs = arrays.integers(archive.read("edges"), archive.where("edges"))
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(
            f"{archive.where('edges')} has shape {list(pairs.shape)}; expected [M, 2], a row a pair of nodes"
        )
    x = arrays.dense_features(archive.read("node_features"), archive.where("node_features"))
    num_nodes = x.shape[0]
    if num_nodes == 0:
        raise ValueError(f"{archive.where('node_features')} has no rows; expected a row a node")
    arrays.check_ends(pairs[:, 0], pairs[:, 1], num_nodes, archive.where("edges"), "rows of node_features")
    src, dst = arrays.both_ways(pairs[:, 0], pairs[:, 1], num_nodes)
    loops = int((src == dst).sum())
    distinct = (src.size + loops) // 2
    changes.append(
        f"the format lists undirected pairs: {counted(distinct, 'pair')} became {src.size:,} directed entries, both "
        f"directions of each" + (f" ({counted(loops, 'loop')} once)" if loops else "")
    )
    if distinct < pairs.shape[0]:
        changes.append(f"{counted(pairs.shape[0] - distinct, 'row')} of edges repeated a pair and went into it")
    y = archive.get("node_labels")
    if y is not None and y.shape[:1] != (num_nodes,):
        raise ValueError(
            f"{archive.where('node_labels')} has shape {list(y.shape)}; expected {num_nodes} rows, as node_features has"
        )
    given_masks = {part: (f"{part}_masks", archive.get(f"{part}_masks")) for part in ("train", "val", "test")}
    return Graph(
        name=Path(spec).stem,
        num_nodes=num_nodes,
        src=src,
        dst=dst,
        x=arrays.some_features(x, archive.where("node_features"), changes),
        y=None if y is None else arrays.labels(y, archive.where("node_labels"), changes),
        splits=arrays.splits(given_masks, num_nodes, changes, spec),
        changes=tuple(changes),
    )


READER = Reader(
    name="heterophilous",
    description="NAME.npz with edges [M, 2] (undirected pairs, each once), node_features, node_labels, *_masks [k, N]",
    matches=_matches,
    read=_read,
)
