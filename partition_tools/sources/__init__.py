"""Graph files of every known format become a :class:`~partition_tools.graph.Graph` through one door, :func:`load`.

A new format is one module with a ``READER`` and one line in ``READERS``. Of two readers that match, the first reads.
Nothing in a file is ever executed: pickled Python objects are refused (Planetoid's pickles are taken apart by a
reader that knows arrays, lists and dicts only), and sizes that a header declares are checked against the file's
before anything is allocated.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from fullgraph.records import check_names, flag
from fullgraph.wording import counted
from partition_tools import prepare
from partition_tools.graph import Graph
from partition_tools.sources import (
    arrays,
    demo,
    edge_array,
    edge_list,
    gnn_benchmark,
    hdf5_graph,
    heterophilous,
    lookalikes,
    matrix,
    metis,
    ogb,
    plain,
    planetoid,
    tables,
    tensors,
)
from partition_tools.sources.hdf5_graph import save_h5
from partition_tools.sources.options import LoadOptions
from partition_tools.sources.plain import save_npz
from partition_tools.sources.reader import FORMAT_OPTIONS, Reader, Request

__all__ = ["READERS", "LoadOptions", "Reader", "formats", "load", "save_h5", "save_npz"]

READERS: tuple[Reader, ...] = (
    demo.READER,
    planetoid.READER,
    ogb.READER,
    metis.READER,
    matrix.MATRIX_MARKET_READER,
    edge_list.READER,
    edge_array.READER,
    hdf5_graph.READER,
    tensors.READER,
    gnn_benchmark.READER,
    heterophilous.READER,
    matrix.SCIPY_READER,
    plain.READER,
)


def formats() -> tuple[tuple[str, str], ...]:
    """(name, one-line description) of each format, in the order in which they are tried."""
    return tuple((reader.name, reader.description) for reader in READERS)


def load(spec: str | os.PathLike[str], options: LoadOptions | None = None, **fields: Any) -> Graph:
    """The graph that ``spec`` names: a path, or ``demo:NAME?key=value&...`` for a generated one.

    ``options`` say how it is read and what is done to it, in this order: features, labels and splits are joined, loops
    dropped, duplicates merged, reverse edges added, features made. Each step is said in ``Graph.changes``. Options may
    be given as keywords instead: ``load("g.csv", undirected=True)``. Raises ``ValueError`` for a file that does not
    exist, cannot be read, has no known format or breaks its own, for features and weights that are NaN or infinite
    (unless ``nan`` says what becomes of features), and for an option that contradicts the file or would have no effect.
    """
    if options is not None and fields:
        raise ValueError(f"load: give options or keywords ({', '.join(fields)}), not both")
    check_names("load", fields, LoadOptions)
    if not isinstance(options, LoadOptions | None):
        raise TypeError(f"load: options are {options!r}; expected LoadOptions")
    spec, options = str(spec), options or LoadOptions(**fields)
    try:
        request = Request(options=options, tables=tables.Tables.read(options))
        graph = tables.join(replace(_read(spec, request), origin={"": spec}), request.tables)
    except OSError as error:
        raise ValueError(f"{error.filename or spec}: cannot be read: {error.strerror or error}") from error
    graph = _labels(graph, options)
    if options.weights and graph.edge_weight is None:
        raise ValueError(f"{spec}: --weights: the file holds no edge weights")
    if options.drop_loops:
        graph = prepare.drop_loops(graph)
    if options.duplicates != "keep":
        graph = prepare.merge_duplicates(graph, options.duplicates)
    if options.undirected:
        graph = prepare.make_undirected(graph)
    if options.weights_as_features:
        graph = prepare.weights_as_features(graph)
    if options.features_made is not None:
        graph = prepare.make_features(graph, *options.features_made)
    if options.nan != "error":
        graph = prepare.fill_features(graph, options.nan)
    prepare.check_values(graph)
    return graph


def _read(spec: str, request: Request) -> Graph:
    lookalikes.refuse(spec)
    reader = next((reader for reader in READERS if reader.matches(spec)), None)
    if reader is None:
        raise ValueError(_unknown(spec))
    without_effect = [name for name in request.options.asked() if name in FORMAT_OPTIONS - reader.takes]
    if without_effect:
        takers = ", ".join(other.name for other in READERS if without_effect[0] in other.takes)
        raise ValueError(
            f"{spec}: {flag(without_effect[0])} has no effect on {reader.name} files, only on {takers}; leave it out"
        )
    graph = reader.read(spec, request)
    asked = request.options.num_nodes
    if asked is not None and asked != graph.num_nodes:
        raise ValueError(f"{spec}: has {counted(graph.num_nodes, 'node')}, but --num-nodes says {asked}")
    return graph


def _unknown(spec: str) -> str:
    what = lookalikes.explain(spec)
    if what is not None:
        return f"{spec}: is {what}. partition-tools formats lists what is read"
    problem = "no known format has this name or content" if os.path.exists(spec) else "no such file"
    tried = "\n".join(f"  {name}: {description}" for name, description in formats())
    return f"{spec}: {problem}. Give one of these:\n{tried}"


def _labels(graph: Graph, options: LoadOptions) -> Graph:
    """Labels as --label-base and --task say."""
    if options.task is None and options.label_base == 0:
        return graph
    if graph.y is None:
        raise ValueError(f"{graph.name}: --task and --label-base have no effect on a graph without labels")
    y, changes = graph.y, list(graph.changes)
    names, where = graph.class_names, graph.where("y")
    if options.label_base == 1:
        if names is not None:
            raise ValueError(f"{where}: --label-base 1 has no effect on names of classes; leave it out")
        y = arrays.labels_from_one(y, where, changes)
        names = np.arange(1, int(y.max(initial=0)) + 2)
    if options.task is not None:
        if names is not None and options.task == "regression":
            raise ValueError(f"{where}: --task regression: the labels are names; give numbers")
        names = names if y.ndim == 2 or options.task == "single-label" else None
        y = arrays.labels_as(y, options.task, where, changes)
    return replace(graph, y=y, class_names=names, changes=tuple(changes))
