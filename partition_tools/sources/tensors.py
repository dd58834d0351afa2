"""``.pt`` files: a dict of tensors in the layout of this package, as ``torch.save(data.to_dict(), path)`` writes it.

Read with ``torch.load(weights_only=True)``, which runs nothing of the file's; whatever else it holds, such as a
``Data`` object of PyG, is refused. Sparse x (COO or CSR) stays sparse; bfloat16 becomes float32, which holds it
exactly; plain numbers, strings and lists of them are arrays too.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partition_tools.graph import Array, Graph
from partition_tools.sources import layout
from partition_tools.sources.archive import directory
from partition_tools.sources.fields import Fields
from partition_tools.sources.reader import Reader, Request

if TYPE_CHECKING:
    import torch

_ENDINGS = (".pt", ".pth")
_FOLDER = 0x10
"""Of a zip member's attributes."""
_REMEDY = "save a dict of tensors: torch.save(data.to_dict(), path), or numpy.savez(path, edge_index=..., x=..., y=...)"


class _TensorFields(Fields):
    def __init__(self, path: str, values: dict[str, Any]) -> None:
        self.path = path
        self._values = {name: value for name, value in values.items() if value is not None}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def read(self, name: str) -> Array:
        if name not in self:
            raise self.missing(name)
        value = self._values[name]
        if isinstance(value, np.ndarray):
            return value
        if hasattr(value, "untyped_storage"):
            return _array(value, self.where(name))
        kinds = (bool, int, float, str)
        if not isinstance(value, (*kinds, list)) or (
            isinstance(value, list) and not all(isinstance(item, kinds) for item in value)
        ):
            raise ValueError(f"{self.where(name)} is a {type(value).__name__}; expected a tensor")
        try:
            return np.array(value)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{self.where(name)}: {error}") from error


def _matches(spec: str) -> bool:
    return spec.endswith(_ENDINGS) and Path(spec).is_file()


def _read(spec: str, request: Request) -> Graph:
    values = load_dict(spec)
    if "edge_index" not in values:
        held = ", ".join(map(str, values)) or "nothing"
        raise ValueError(f"{spec}: a dict that holds {held[:200]}; expected edge_index [2, E]: {_REMEDY}")
    return layout.graph_of(_TensorFields(spec, _without_sparse(values, spec)), request)


def load_dict(path: str) -> dict[str, Any]:
    """The dict with names as keys that a ``.pt`` file holds; ``ValueError`` for anything else."""
    import torch  # here alone: nothing else of partition_tools needs it

    _check_archive(path)
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise nearly anything
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign is not None:
            raise ValueError(
                f"{path}: holds Python objects ({foreign[1]}), which only unpickling could read, and that would run "
                f"whatever the file says; {_REMEDY}"
            ) from None
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"{path}: torch cannot read it ({reason}); the file is damaged, or {_REMEDY}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{path}: holds a {type(values).__name__}, not a dict with names as keys; {_REMEDY}")
    return dict(values)


def _check_archive(path: str) -> None:
    """The file is a whole zip archive of stored members: what torch allocates is then no more than its size."""
    members = directory(path, ".pt", "write the file with torch.save of version 1.6 or later")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{path}: {member.filename} is packed, which torch.save does not do; write the file again")
        if member.external_attr & _FOLDER:  # of which torch reads nothing, and gives whatever is in memory
            raise ValueError(f"{path}: {member.filename} is marked as a folder; the file is damaged: copy it again")
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{path}: {error}; the file is damaged: copy it again") from error
    if bad is not None:
        raise ValueError(f"{path}: {bad} differs from its checksum; the file is damaged: copy it again")


def _array(tensor: torch.Tensor, where: str) -> Array:
    """The tensor as an array of its own memory."""
    import torch

    if tensor.layout != torch.strided:
        raise ValueError(f"{where} is a sparse tensor ({tensor.layout}); expected a dense one, or x in COO or CSR")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(f"{where} shows {tensor.numel()} values of fewer stored ones (expanded); save tensor.clone()")
    if tensor.is_quantized or tensor.is_complex():
        raise ValueError(f"{where} is {tensor.dtype}; expected real numbers")
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    try:
        return np.ascontiguousarray(tensor.detach().numpy()).reshape(tuple(tensor.shape))
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{where} is {tensor.dtype}: {error}") from error


def _without_sparse(values: dict[str, Any], path: str) -> dict[str, Any]:
    """The dict with a sparse x as the four arrays that the layout knows."""
    import torch

    x = values.get("x")
    if not isinstance(x, torch.Tensor) or x.layout not in (torch.sparse_coo, torch.sparse_csr):
        return values
    stored = x._values() if x.layout == torch.sparse_coo else x.values()
    if x.ndim != 2 or stored.ndim != 1:
        raise ValueError(f"{path}: x is a sparse tensor {list(x.shape)}; expected [N, F]")
    data, shape = _array(stored, f"{path}: x"), np.array(x.shape)
    if x.layout == torch.sparse_coo:
        row, column = _array(x._indices(), f"{path}: x")
        order = np.argsort(row, kind="stable")
        counts = np.bincount(row, minlength=x.shape[0])
        parts = (data[order], column[order], np.concatenate([[0], np.cumsum(counts)]), shape)
    else:
        parts = (data, _array(x.col_indices(), f"{path}: x"), _array(x.crow_indices(), f"{path}: x"), shape)
    rest = {name: value for name, value in values.items() if name != "x"}
    return rest | dict(zip(layout.CSR, parts, strict=True))


READER = Reader(
    name="tensors",
    description="NAME.pt, a dict of tensors with the names of plain: torch.save(data.to_dict(), path)",
    matches=_matches,
    read=_read,
    takes=frozenset({"index_base"}),
)
