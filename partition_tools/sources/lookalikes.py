"""Files that people take for graph files of a known format, each with what it is and what to use instead."""

from __future__ import annotations

import re
from pathlib import Path

_AS_EDGES = "write its edges as rows, source and destination, to a .csv"
_BY_ENDING = {
    "mesh": "a METIS mesh (elements and their corners), not a graph; convert it with METIS's m2gmetis to a .graph",
    "msh": "a mesh (elements and their corners), not a graph; convert it to a METIS .graph",
    "hgr": "a hypergraph of hMETIS; edges there join any number of nodes: write a graph",
    "hmetis": "a hypergraph of hMETIS; edges there join any number of nodes: write a graph",
    "graphml": f"GraphML; {_AS_EDGES}: networkx.write_edgelist(networkx.read_graphml(PATH), 'g.txt', data=False)",
    "gml": f"GML; {_AS_EDGES}: networkx.write_edgelist(networkx.read_gml(PATH), 'g.txt', data=False)",
    "gexf": f"GEXF; {_AS_EDGES}: networkx.write_edgelist(networkx.read_gexf(PATH), 'g.txt', data=False)",
    "net": f"Pajek; {_AS_EDGES}",
    "dot": f"Graphviz; {_AS_EDGES}",
    "json": f"JSON; {_AS_EDGES}",
    "gr": f"a DIMACS graph; {_AS_EDGES}",
    "dimacs": f"a DIMACS graph; {_AS_EDGES}",
    "g6": f"graph6; {_AS_EDGES}",
    "s6": f"sparse6; {_AS_EDGES}",
    "rb": "a Harwell-Boeing matrix; write it with scipy.sparse.save_npz",
    "mat": "a MATLAB file; write its matrix with scipy.sparse.save_npz",
    "xlsx": f"a spreadsheet; {_AS_EDGES}",
    "parquet": f"Parquet; {_AS_EDGES}, or numpy.savez(path, edge_index=...)",
    "feather": f"Feather; {_AS_EDGES}, or numpy.savez(path, edge_index=...)",
    "pkl": "a pickle, which is not read because that would run whatever it says; numpy.savez(path, edge_index=...)",
    "pickle": "a pickle, which is not read because that would run whatever it says; numpy.savez(path, edge_index=...)",
    "bin": "perhaps a graph saved by DGL; write numpy.savez(path, edge_index=numpy.stack(graph.edges()), ...)",
    "dgl": "perhaps a graph saved by DGL; write numpy.savez(path, edge_index=numpy.stack(graph.edges()), ...)",
    "zip": "an archive; unpack it and name what is in it",
    "tar": "an archive; unpack it and name what is in it",
    "tgz": "an archive; unpack it and name what is in it",
    "bz2": "packed by bzip2; unpack it, or pack it by gzip",
    "xz": "packed by xz; unpack it, or pack it by gzip",
    "zst": "packed by zstd; unpack it, or pack it by gzip",
}
_BY_HEAD = (
    (rb"version https://git-lfs", "a pointer of Git LFS in place of the file; fetch it: git lfs pull"),
    (rb"\s*<(!doctype html|html)", "a web page, as a failed download leaves; download the file again"),
)


def refuse(spec: str) -> None:
    """Raise ``ValueError`` for a file that is damaged in a way that has a name, or no file of a graph at all."""
    path = Path(spec)
    if not path.is_file():
        return
    with open(path, "rb") as stream:
        head = stream.read(256)
    for pattern, what in _BY_HEAD:
        if re.match(pattern, head, re.IGNORECASE):
            raise ValueError(f"{spec}: {what}")


def explain(spec: str) -> str | None:
    """What a file or folder that no reader takes is, if that is known."""
    path = Path(spec)
    if path.is_dir():
        return _explain_folder(path)
    if not path.is_file():
        return None
    if re.search(r"\.part\.[0-9]+$", path.name):
        return "a partition as METIS writes it, a part a node; name the graph, and this by --method file:PATH"
    stem = path.name.lower().removesuffix(".gz")
    return _BY_ENDING.get(stem.rpartition(".")[2])


def _explain_folder(path: Path) -> str | None:
    if (path / "manifest.json").is_file():
        return f"a folder of shards, partitioned already; train on it: fullgraph train {path}"
    if (path / "raw" / "num-node-dict.csv.gz").is_file() or (path / "raw" / "triplet-type-list.csv.gz").is_file():
        return "an OGB graph of several kinds of nodes or edges; this reads graphs of one kind"
    if (path / "processed").is_dir() and any((path / "processed").glob("*.pt")):
        return "a data set that PyG processed; save it as a dict: torch.save(dataset[0].to_dict(), 'graph.pt')"
    if any(path.glob("*.npz")) or any(path.glob("*.graph")):
        return "a folder; name one of the files in it"
    return None
