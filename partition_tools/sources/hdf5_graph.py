"""``.h5`` graph files of this package: the layout of ``layout.py`` as HDF5, and their writer.

- The root MUST have the attributes ``format`` = "fullgraph-graph" and ``format_version`` = 1 (int64), and MAY have
  ``num_nodes`` (int64) and ``task`` (string), which then are no datasets.
- Every other array of the layout is a dataset of its name at the root: numbers of native width in little-endian order,
  bool as uint8, strings of ``node_ids`` as fixed-length utf-8. A dataset MUST be contiguous: neither chunked nor
  filtered, so that its size can be checked against the file's before it is read.
- A dataset SHOULD have the attribute ``xxh3``, the hex xxh3-64 of its bytes; it is compared where it is there. (HDF5
  notices few flipped bits by itself.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash

from fullgraph.files import appears_by_rename
from fullgraph.hdf5 import (
    FormatError,
    check_heaps,
    dataset_offset,
    find_dataset,
    open_to_read,
    read_attribute,
    read_dataset,
    survives,
)
from partition_tools.graph import Array, Graph
from partition_tools.sources import layout
from partition_tools.sources.fields import Fields
from partition_tools.sources.reader import Reader, Request
from partition_tools.stored import STORED_FROM, StoredRows, row_blocks

FORMAT = "fullgraph-graph"
FORMAT_VERSION = 1

_ENDINGS = (".h5", ".hdf5")
_ATTRIBUTES = {"num_nodes": int, "task": str}
_DTYPES = tuple(np.dtype(code) for code in ("?", "f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"))


class _H5Fields(Fields):
    def __init__(self, file: h5py.File, path: str) -> None:
        self.path = path
        self._file = file

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._file, *(name for name in _ATTRIBUTES if name in self._file.attrs))

    def read(self, name: str) -> Array:
        if name not in self:
            raise self.missing(name)
        if name in _ATTRIBUTES and name in self._file.attrs:
            return np.asarray(read_attribute(self._file, name, _ATTRIBUTES[name]))
        dataset = find_dataset(self._file, name)
        if dataset is None:
            raise FormatError("is a group; expected a dataset", dataset=name)
        text = h5py.check_string_dtype(dataset.dtype)
        fixed = text is not None and text.encoding == "utf-8" and text.length is not None
        if text is not None and not fixed:
            raise FormatError("strings of variable length or in ascii; expected fixed-length utf-8", dataset=name)
        values = read_dataset(self._file, name, (dataset.dtype,) if fixed else _DTYPES, (0, 1, 2))
        expected = dataset.attrs.get("xxh3")
        if expected is not None and expected != _checksum(values):
            raise FormatError("differs from its checksum; copy the file again", dataset=name)
        if fixed:
            return _decoded(values, name)
        return values.view(np.uint8) if values.dtype == np.bool_ else values

    def rows(self, name: str) -> Array | StoredRows:
        dataset = find_dataset(self._file, name)
        if dataset is None or dataset.dtype not in _DTYPES or dataset.nbytes < STORED_FROM:
            return self.read(name)
        offset = dataset_offset(dataset, name, (0, 1, 2))
        rows = StoredRows(self.path, offset, dataset.dtype, dataset.shape)
        expected, digest = dataset.attrs.get("xxh3"), xxhash.xxh3_64()
        for _, block in row_blocks(rows) if expected is not None else ():
            digest.update(block.reshape(-1).view(np.uint8).data)
        if expected is not None and expected != digest.hexdigest():
            raise FormatError("differs from its checksum; copy the file again", dataset=name)
        return rows


def _decoded(values: Array, name: str) -> Array:
    try:
        return np.asarray(np.strings.decode(values, "utf-8"))
    except UnicodeDecodeError as error:
        raise FormatError(f"not utf-8 ({error})", dataset=name) from None


def _matches(spec: str) -> bool:
    return spec.endswith(_ENDINGS) and Path(spec).is_file()


def _read(spec: str, request: Request) -> Graph:
    if not survives(spec):
        raise ValueError(f"{spec}: is too damaged for HDF5 to be read; copy it again")
    try:
        with open_to_read(spec) as file:
            check_heaps(file)
            _check_format(file, spec)
            return layout.graph_of(_H5Fields(file, spec), request)
    except FormatError as fault:
        raise FormatError(fault.message, dataset=fault.dataset, index=fault.index, file=spec) from None
    except (OSError, RuntimeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{spec}: HDF5 cannot read it ({error}); it may have been cut short: copy it again") from error


def _check_format(file: h5py.File, spec: str) -> None:
    found = file.attrs.get("format")
    if found == "fullgraph-shards":
        raise ValueError(
            f"{spec}: a shard, one part of a graph that is partitioned already; name the file that it was built from, "
            f"or train on its folder: fullgraph train {Path(spec).parent}"
        )
    if found != FORMAT:
        raise ValueError(
            f"{spec}: attribute format is {found!r}; expected {FORMAT!r}; this HDF5 file holds "
            f"{', '.join(file) or 'nothing'}: write a graph with partition_tools.sources.save_h5"
        )
    version = read_attribute(file, "format_version", int)
    if version != FORMAT_VERSION:
        raise ValueError(f"{spec}: format version {version}; this version of partition-tools reads {FORMAT_VERSION}")


def save_h5(path: str | Path, graph: Graph) -> None:
    """Write ``graph`` (all of it but its name and its changes); the file appears complete or not at all.

    ``path`` must end in ``.h5`` or ``.hdf5``.
    """
    path = Path(path)
    if path.suffix not in _ENDINGS:
        raise ValueError(f"{path}: the file's name must end in .h5")
    fields: dict[str, Any] = layout.fields_of(graph, path)
    with appears_by_rename(path) as temporary, h5py.File(temporary, "w", libver=("earliest", "v110")) as file:
        file.attrs.update(format=FORMAT, format_version=FORMAT_VERSION)
        for name, kind in _ATTRIBUTES.items():
            if name in fields:
                file.attrs[name] = kind(fields.pop(name).item())
        for name, values in fields.items():
            text = values.dtype.kind in "UO"
            stored = np.strings.encode(values.astype(str), "utf-8") if text else values
            stored = stored.view(np.uint8) if stored.dtype == np.bool_ else stored
            if text:
                stored = stored.astype(h5py.string_dtype("utf-8", max(1, stored.dtype.itemsize)))
            dataset = file.create_dataset(name, data=np.ascontiguousarray(stored).reshape(stored.shape))
            dataset.attrs["xxh3"] = _checksum(stored)


def _checksum(values: Array) -> str:
    return xxhash.xxh3_64(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data).hexdigest()


READER = Reader(
    name="h5",
    description="NAME.h5 as partition_tools.sources.save_h5 writes it: the arrays of plain, with checksums",
    matches=_matches,
    read=_read,
    takes=frozenset({"index_base"}),
)
