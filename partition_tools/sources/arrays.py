"""Arrays as files hold them, checked and brought to the form that ``Graph`` takes.

``where`` is how a message names the array: file, then name. Every function raises ``ValueError`` with ``where``, the
value, what was expected and the remedy. ``changes`` collects a sentence for whatever was decided or altered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from fullgraph.wording import counted, there_are
from partition_tools.graph import Array, Splits, entry_keys, machine_memory
from partition_tools.mapped import extent
from partition_tools.sources.fields import Fields
from partition_tools.stored import Features as Features
from partition_tools.stored import StoredRows

TASKS = ("single-label", "multi-label", "regression")
PARTS = ("train", "val", "test")
_FEW_CLASSES = 1 << 16
"""Up to this number of classes most may be empty; of more, one of 16 must occur."""
_ROW_BYTES, _WEIGHT_BYTES = 16, 16
"""Least bytes of a row: an offset and a part; and of a column: a weight, its gradient and two moments of it."""
_PART_NAMES = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}


def part_of(name: str) -> str | None:
    """train, val or test, where ``name`` is a common name of it."""
    return next((part for part, names in _PART_NAMES.items() if name.lower() in names), None)


def reals(values: Array, where: str, expected: str) -> Array:
    """Real numbers of at most 8 bytes, as given; bool as uint8."""
    if values.dtype.kind not in "fiub":
        raise ValueError(f"{where} is {values.dtype}; expected {expected}")
    if values.dtype.itemsize > 8:
        raise ValueError(f"{where} is {values.dtype}, which no shard holds; save it with .astype(numpy.float64)")
    return values.astype(np.uint8) if values.dtype == np.bool_ else values


def integers(values: Array, where: str) -> NDArray[np.int64]:
    """Integers of any width as int64, in the same shape; an empty array of any type passes."""
    if values.size and values.dtype.kind not in "iu":
        raise ValueError(f"{where} is {values.dtype}; expected integers: save it with .astype(numpy.int64)")
    if values.size and values.dtype == np.uint64 and int(values.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{where} holds {int(values.max())}, which does not fit into int64; number the nodes from 0")
    return values.astype(np.int64, copy=False)


def most_nodes(num_edges: int) -> int:
    """Nodes that a graph of as many edges is believed to have where one number alone says so."""
    return 16 * num_edges + 1_000_000


def check_ends(
    src: NDArray[np.int64], dst: NDArray[np.int64], num_nodes: int, where: str, because: str, base: int | None = None
) -> None:
    """Both ends of every entry lie in 0..num_nodes-1; ``because`` says where num_nodes comes from.

    ``base`` is what was subtracted from the file's ids, of which the message speaks; None for a format that does not
    take --index-base.
    """
    if src.size == 0:
        return
    low, high = extent(src, dst)
    if low >= 0 and high < num_nodes:
        return
    bad = (src < 0) | (src >= num_nodes) | (dst < 0) | (dst >= num_nodes)
    first = int(np.argmax(bad))
    start = base or 0
    low, high = low + start, high + start
    remedy = f"number the nodes from {start}, or give every node its row"
    if low < 0:
        remedy = "ids must not be negative; a negative one often comes from an id too large for its integer type"
    elif low >= 1 and high == num_nodes and start == 0:
        remedy = f"ids seem to start at 1: {'subtract 1 from every id' if base is None else 'add --index-base 1'}"
    elif low < start:
        remedy = "ids start at 0: leave out --index-base 1"
    raise ValueError(
        f"{where}: edge {first} is {int(src[first]) + start} -> {int(dst[first]) + start}, but "
        f"{there_are(num_nodes, 'node')} ({because}), so ids go from {start} to {num_nodes - 1 + start}; "
        f"{counted(int(bad.sum()), 'such edge')}; {remedy}"
    )


def lookup(own: Array, asked: Array) -> NDArray[np.int64]:
    """[M] the place of each asked id among ``own``, -1 where it is not there. Ids of two kinds meet as text."""
    if own.dtype.kind != asked.dtype.kind:
        own, asked = own.astype(str), asked.astype(str)
    if own.size == 0:
        return np.full(asked.shape, -1)
    order = np.argsort(own, kind="stable")
    place = order[np.minimum(np.searchsorted(own[order], asked), own.size - 1)]
    return np.where(own[place] == asked, place, -1)


def csr(parts: Sequence[Array], prefix: str, num_rows: int | None = None) -> sp.csr_array:
    """The CSR matrix of (data, indices, indptr, shape), order and duplicates as given, if the four fit together.

    ``prefix`` is what stands before these four words in the file's names of them.
    """
    data, indices, indptr, shape = parts
    size = integers(shape, f"{prefix}shape")
    if size.shape != (2,) or size.min() < 0:
        raise ValueError(f"{prefix}shape is {size.tolist()}; expected two sizes [rows, columns]")
    rows, columns = int(size[0]), int(size[1])
    if num_rows is not None and rows != num_rows:
        raise ValueError(f"{prefix}shape is [{rows}, {columns}]; expected {num_rows} rows, one a node")
    data = _storable(data, f"{prefix}data")
    offsets, columns_of = integers(indptr, f"{prefix}indptr"), integers(indices, f"{prefix}indices")
    if data.ndim != 1 or data.shape != columns_of.shape:
        raise ValueError(
            f"{prefix}data has shape {list(data.shape)} and {prefix}indices {list(columns_of.shape)}; expected one "
            f"value an index"
        )
    if offsets.shape != (rows + 1,) or offsets[0] != 0 or offsets[-1] != data.size or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"{prefix}indptr must have {rows + 1} offsets that never fall, from 0 to {data.size} (the values stored); "
            f"it has shape {list(offsets.shape)}" + (f", {offsets[0]} to {offsets[-1]}" if offsets.size else "")
        )
    _check_inside(columns_of, columns, f"{prefix}indices", "columns")
    narrow = np.int32 if max(rows, columns, data.size) < 2**31 else np.int64
    return sp.csr_array(
        (data, columns_of.astype(narrow, copy=False), offsets.astype(narrow, copy=False)), shape=(rows, columns)
    )


def _storable(data: Array, where: str) -> Array:
    """Real numbers that scipy's sparse matrices take."""
    data = reals(data, where, "real numbers")
    return data.astype(np.float32) if data.dtype == np.float16 else data


def _check_inside(index: NDArray[np.int64], size: int, where: str, what: str) -> None:
    bad = (index < 0) | (index >= size)
    if bad.any():
        first = int(np.argmax(bad))
        raise ValueError(f"{where}[{first}] is {int(index[first])}; the shape declares {size} {what}, 0 to {size - 1}")


def sparse_matrix(fields: Fields) -> sp.coo_array:
    """What ``scipy.sparse.save_npz`` wrote, entries and their order as given, if its arrays fit together."""
    kind = fields.read("format")
    name = kind.item() if kind.size == 1 and kind.dtype.kind in "SU" else ""
    name = name.decode("ascii", "replace") if isinstance(name, bytes) else str(name)
    if name not in ("csr", "csc", "coo"):
        raise ValueError(
            f"{fields.where('format')} is {name[:20]!r}; expected csr, csc or coo: save matrix.tocsr() with "
            f"scipy.sparse.save_npz"
        )
    prefix, shape = fields.where(""), fields.read("shape")
    if name == "coo":
        return _coo(fields, shape, prefix)
    parts = [fields.read(part) for part in ("data", "indices", "indptr")]
    matrix = csr([*parts, shape if name == "csr" else shape[::-1]], prefix)
    major, minor = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)), matrix.indices
    place = (major, minor) if name == "csr" else (minor, major)
    return sp.coo_array((matrix.data, place), shape=matrix.shape if name == "csr" else matrix.shape[::-1])


def _coo(fields: Fields, shape: Array, prefix: str) -> sp.coo_array:
    size = integers(shape, f"{prefix}shape")
    if size.shape != (2,) or size.min() < 0:
        raise ValueError(f"{prefix}shape is {size.tolist()}; expected two sizes [rows, columns]")
    data = _storable(fields.read("data"), f"{prefix}data")
    row, col = (integers(fields.read(name), f"{prefix}{name}") for name in ("row", "col"))
    if data.ndim != 1 or not data.shape == row.shape == col.shape:
        raise ValueError(
            f"{prefix}data, row and col have shapes {list(data.shape)}, {list(row.shape)} and {list(col.shape)}; "
            f"expected one length"
        )
    _check_inside(row, int(size[0]), f"{prefix}row", "rows")
    _check_inside(col, int(size[1]), f"{prefix}col", "columns")
    return sp.coo_array((data, (row, col)), shape=(int(size[0]), int(size[1])))


def sparse_features(matrix: sp.coo_array | sp.csr_array, where: str, changes: list[str]) -> sp.csr_array:
    """CSR features with sorted columns and no entry twice. Only what is there tells the size of a sparse file, so
    that of what it declares is checked first."""
    rows, columns = (int(size) for size in matrix.shape)
    require_memory(rows, _ROW_BYTES, f"{where}: its shape declares {rows:,} rows", "one row a node")
    require_memory(
        columns,
        _WEIGHT_BYTES,
        f"{where}: its shape declares {columns:,} columns",
        "a model has a weight or more for each: leave out columns without values, or hash them into fewer",
    )
    if isinstance(matrix, sp.csr_array) and matrix.has_canonical_format:
        return matrix
    stored, dtype = matrix.nnz, matrix.dtype
    if dtype.kind in "iu":  # sums of small integers may not fit into their type
        summed = _summed(matrix.astype(np.int64 if dtype != np.uint64 else dtype))
        summed = summed.astype(dtype) if np.array_equal(summed.data.astype(dtype), summed.data) else summed
    else:
        summed = _summed(matrix)
    if summed.nnz != stored:
        again = counted(stored - summed.nnz, "value that was", "values that were")
        changes.append(f"{where}: {again} stored again for one place went into a sum")
    return summed


def _summed(matrix: sp.coo_array | sp.csr_array) -> sp.csr_array:
    csr = sp.csr_array(matrix)
    csr.sum_duplicates()
    return csr


def require_memory(count: int, each: int, said: str, remedy: str) -> None:
    """Raise ``ValueError`` where as many things of at least ``each`` bytes cannot be in this machine's memory."""
    memory = machine_memory()
    if count * each > memory:
        raise ValueError(
            f"{said}, for which this machine's {memory / 2**30:.0f} GiB of memory do not suffice; expected at most "
            f"{memory // each:,}; {remedy}"
        )


def dense_features(values: Array | StoredRows, where: str) -> Array | StoredRows:
    """[N, F] real numbers, as given."""
    if isinstance(values, StoredRows):
        reals(values[:0], where, "real numbers [N, F]")
    else:
        values = reals(values, where, "real numbers [N, F]")
    if values.ndim != 2:
        raise ValueError(f"{where} has shape {list(values.shape)}; expected [N, F]: a row a node, a column a feature")
    return values


def some_features(x: Features | None, where: str, changes: list[str]) -> Features | None:
    """None in place of features without columns."""
    if x is None or x.shape[1] > 0:
        return x
    changes.append(f"{where} has no columns: taken as no features")
    return None


def edge_weights(values: Array, num_edges: int, where: str) -> NDArray[np.floating[Any]]:
    """[E] weights as float32 where the file has that or whole numbers that fit into it, else float64."""
    if values.shape == (num_edges, 1):
        values = values[:, 0]
    if values.shape != (num_edges,) or values.dtype.kind not in "fiub":
        raise ValueError(
            f"{where} is {values.dtype} {list(values.shape)}; expected real numbers [{num_edges}], one an edge"
        )
    values = reals(values, where, "real numbers")
    if values.dtype.kind == "f":
        return values.astype(np.float32 if values.dtype.itemsize <= 4 else np.float64, copy=False)
    largest = max(int(values.max()), -int(values.min())) if values.size else 0
    if largest > 2**53:
        raise ValueError(f"{where} holds {largest}, which no float holds exactly; scale the weights below 2^53")
    return values.astype(np.float32 if largest <= 2**24 else np.float64)


def edge_features(values: Array, num_edges: int, where: str) -> Array:
    """[E, K] real numbers, as given; [E] is one column."""
    values = reals(values, where, "real numbers [E, K]")
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim != 2 or values.shape[0] != num_edges:
        raise ValueError(f"{where} has shape {list(values.shape)}; expected [E, K] for E = {num_edges} edges")
    return values


def labels(values: Array, where: str, changes: list[str], task: str | None = None) -> Array:
    """Labels in ``Graph.y``'s form. Shape and type tell the task unless ``task`` does.

    [N] or [N, 1] integers are classes from 0, -1 for none. [N, C] of 0 and 1 is multi-label. Floats are targets
    ([N] or [N, T], NaN for none), unless [N] or [N, 1] holds nothing but whole numbers from 0 and NaN: then classes.
    """
    if values.dtype.kind not in "fiub" or values.ndim not in (1, 2) or 0 in values.shape[1:]:
        raise ValueError(
            f"{where} is {values.dtype} {list(values.shape)}; expected numbers: [N] classes, [N, C] zeros and ones, or "
            f"[N] or [N, T] targets"
        )
    if task is not None and task not in TASKS:
        raise ValueError(f"{where}: task is {task!r}; expected one of {', '.join(TASKS)}")
    single = values.reshape(-1) if values.shape[1:] in ((), (1,)) else None
    if task is None:
        task = _task(values, single)
    if task == "single-label":
        if single is None:
            raise ValueError(f"{where} has shape {list(values.shape)}; a single-label graph needs [N] classes")
        return _classes(single, where, changes)
    if task == "multi-label":
        return _label_columns(values.reshape(values.shape[0], -1), where, changes)
    values = reals(values, where, "targets")
    if single is None and bool(((values == 0) | (values == 1) | np.isnan(values)).all()):
        changes.append(
            f"{where} holds 0, 1 and NaN: taken as targets of a regression, because several labels a node are 0 or 1 "
            f"each, and none says that it is unknown"
        )
    targets = values.astype(np.float64 if values.dtype.kind in "iu" or values.dtype.itemsize > 4 else np.float32)
    return targets if single is None else targets.reshape(-1)


def _task(values: Array, single: Array | None) -> str:
    if single is None:
        return (
            "multi-label" if bool(((values == 0) | (values == 1)).all()) or values.dtype.kind != "f" else "regression"
        )
    if values.dtype.kind != "f":
        return "single-label"
    given = single[~np.isnan(single)]
    whole = (given >= 0) & (given < 2**31) & (given == np.floor(given))
    return "single-label" if given.size and bool(whole.all()) else "regression"


def _classes(values: Array, where: str, changes: list[str]) -> NDArray[np.int64]:
    if values.dtype.kind == "f":
        none = np.isnan(values)
        numbers = np.where(none, -1, values)
        if not ((numbers == np.floor(numbers)) & (np.abs(numbers) < 2**31)).all():
            raise ValueError(f"{where} is {values.dtype} with fractions; expected classes, whole numbers from 0")
        changes.append(
            f"{where} is {values.dtype} and holds whole numbers only: taken as classes"
            + (f", {int(none.sum())} NaN as no label" if none.any() else "")
        )
        classes = numbers.astype(np.int64)
    else:
        classes = values.astype(np.int64) if values.dtype == np.bool_ else integers(values, where)
    bad = (classes < -1) | (classes >= 2**31)
    if bad.any():
        first = int(np.argmax(bad))
        raise ValueError(
            f"{where}[{first}] is {int(classes[first])}; classes are numbered from 0, and -1 says that a node has no "
            f"label: number them with numpy.unique(..., return_inverse=True)"
        )
    used = np.unique(classes[classes >= 0])
    most = int(used[-1]) + 1 if used.size else 0
    if most > max(_FEW_CLASSES, 16 * used.size):
        raise ValueError(
            f"{where}[{int(np.argmax(classes))}] is {most - 1}, but only {counted(used.size, 'class', 'classes')} "
            f"occur, and a model has an output for every number up to the largest; number them from 0: "
            f"numpy.unique(..., return_inverse=True)"
        )
    if values.dtype.kind == "u" and most - 1 == np.iinfo(values.dtype).max:
        changes.append(
            f"{where} is {values.dtype} and its largest class is {most - 1}; if that says that a node has no label, "
            f"save it as -1 in int64"
        )
    elif most > 2 * used.size + 8:
        changes.append(
            f"{where}: of the classes 0 to {most - 1} only {used.size} occur; a model has an output for each"
        )
    if used.size > 1 and used[0] == 1 and used[-1] == used.size:
        changes.append(
            f"{where}: no node has class 0, all of 1 to {used.size} occur; if labels are numbered from 1, add "
            f"--label-base 1"
        )
    return classes


def named_classes(values: Array, where: str, changes: list[str]) -> tuple[NDArray[np.int64], Array]:
    """([N] classes of names in their order, -1 for empty ones; [C] the names)."""
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.ndim != 1:
        raise ValueError(f"{where} has shape {list(values.shape)}; expected [N] names of classes")
    names, classes = np.unique(values, return_inverse=True)
    empty = int(names.size > 0 and names[0] == "")
    names = names[empty:]
    shown = ", ".join(names[:10].tolist()) + (", ..." if names.size > 10 else "")
    changes.append(f"{where}: {counted(names.size, 'name', 'names')} became classes in their order: {shown}")
    return (classes.reshape(values.shape) - empty).astype(np.int64), names


def labels_from_one(y: Array, where: str, changes: list[str]) -> Array:
    """Classes counted from 0, of classes counted from 1 with 0 for no label."""
    if y.ndim != 1 or y.dtype != np.int64:
        raise ValueError(f"--label-base 1: {where} has {y.dtype} labels {list(y.shape)}; expected classes [N]")
    changes[:] = [sentence for sentence in changes if not sentence.endswith("add --label-base 1")]
    none = int((y == 0).sum())
    changes.append(
        "labels are numbered from 1: class 0 is label 1"
        + (f"; {counted(none, 'node of label 0 has', 'nodes of label 0 have')} none" * bool(none))
    )
    return np.where(y > 0, y - 1, -1)


def labels_as(y: Array, task: str, where: str, changes: list[str]) -> Array:
    """Labels in the form of another task; ``ValueError`` where they cannot be."""
    was = "regression" if y.dtype.kind == "f" else "multi-label" if y.ndim == 2 else "single-label"
    if was == task:
        return y
    if was == "multi-label" and task == "single-label":
        count = y.sum(axis=1, dtype=np.int64)
        if (count > 1).any():
            node = int(np.argmax(count > 1))
            raise ValueError(f"--task {task}: {where}: node {node} has {int(count[node])} labels; expected one at most")
        result = np.where(count == 1, y.argmax(axis=1), -1).astype(np.int64)
    elif was == "single-label" and task == "regression":
        result = np.where(y < 0, np.nan, y).astype(np.float64)
    else:
        result = labels(y, where, [], task)
    changes.append(f"labels were taken as {task} (--task), not as the {was} that they look like")
    return result


def _label_columns(values: Array, where: str, changes: list[str]) -> NDArray[np.uint8]:
    bad = (values != 0) & (values != 1)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{where}[{row}, {column}] is {values[row, column]}; [N, C] integers are labels, 0 or 1 each; save "
            f"regression targets as floats"
        )
    columns = values.astype(np.uint8)
    if columns.shape[1] > 1 and columns.size and bool((columns.sum(axis=1) == 1).all()):
        changes.append(
            f"{where} has exactly one 1 in every row and is taken as multi-label; if classes exclude each other, add "
            f"--task single-label"
        )
    return columns


def masks(values: Array, num_nodes: int, where: str) -> NDArray[np.bool_]:
    """[N], [N, 1], [k, N] or [N, k] of zeros and ones as bool [k, N]."""
    if values.dtype.kind not in "iubf":
        raise ValueError(f"{where} is {values.dtype}; expected a mask of 0 and 1, [N] or [k, N]")
    bad = (values != 0) & (values != 1)
    if bad.any():
        raise ValueError(
            f"{where} holds {values[bad][0]}; expected a mask of 0 and 1, [N] or [k, N] (lists of nodes are named "
            f"train_idx, val_idx and test_idx)"
        )
    mask = values.astype(np.bool_, copy=False)
    if mask.shape == (num_nodes,):
        return mask[None, :]
    if mask.ndim == 2 and num_nodes in mask.shape:
        if mask.shape == (num_nodes, num_nodes) and num_nodes > 1:
            raise ValueError(
                f"{where} has shape {list(mask.shape)} for {num_nodes} nodes: splits as rows and as columns look "
                f"alike; save fewer splits"
            )
        return mask if mask.shape[1] == num_nodes else np.ascontiguousarray(mask.T)
    raise ValueError(
        f"{where} has shape {list(mask.shape)}; expected [{num_nodes}], [{num_nodes}, 1], [k, {num_nodes}] or "
        f"[{num_nodes}, k] for {num_nodes} nodes and k splits"
    )


def splits(given: dict[str, tuple[str, Array | None]], num_nodes: int, changes: list[str], where: str) -> Splits | None:
    """``given`` maps train, val and test to (name in the file, mask or None). None where the file has no mask."""
    found = {
        part: masks(mask, num_nodes, f"{where}: {name}") for part, (name, mask) in given.items() if mask is not None
    }
    if not found:
        return None
    counts = {part: mask.shape[0] for part, mask in found.items()}
    count = max(counts.values())
    if not set(counts.values()) <= {1, count}:
        raise ValueError(f"{where}: the masks hold different numbers of splits: {counts}; expected the same number")
    filled: dict[str, NDArray[np.bool_]] = {}
    for part, (name, _) in given.items():
        if part not in found:
            changes.append(f"the file has no {name}: no node is in {part}")
            filled[part] = np.zeros((count, num_nodes), np.bool_)
        elif counts[part] < count:
            changes.append(f"{name} holds one split and serves all {count}")
            filled[part] = np.repeat(found[part], count, axis=0)
        else:
            filled[part] = found[part]
    return Splits(**filled)


def index_masks(
    values: Array, num_nodes: int, where: str, *, base: int = 0, ids: Array | None = None
) -> NDArray[np.bool_]:
    """A list [m] of nodes, or [k, m] lists of as many each, as bool [k, N].

    Nodes are named by their rows, counted from ``base``, or by ``ids`` [N] where given.
    """
    names = values if ids is not None and values.dtype.kind == "U" else integers(values, where)
    if names.ndim not in (1, 2):
        raise ValueError(f"{where} has shape {list(names.shape)}; expected a list of nodes [m], or [k, m]")
    names = names[None, :] if names.ndim == 1 else names
    nodes = names - base if ids is None else lookup(ids, names)
    bad = (nodes < 0) | (nodes >= num_nodes)
    if bad.any():
        there = f"{base} to {num_nodes - 1 + base}" if ids is None else f"with ids like {ids[0]}, {ids[-1]}"
        raise ValueError(
            f"{where} names node {names[bad][0]} at place {int(np.argwhere(bad)[0, 1])}; "
            f"{there_are(num_nodes, 'node')}, {there}"
        )
    in_order = np.sort(nodes, axis=1)
    again = in_order[:, 1:] == in_order[:, :-1]
    if again.any():
        node = int(in_order[:, 1:][again][0])
        raise ValueError(
            f"{where} names node {node + base if ids is None else ids[node]} more than once; expected a list of nodes, "
            f"each once (a mask is bool, or named train_mask, val_mask or test_mask)"
        )
    mask = np.zeros((nodes.shape[0], num_nodes), np.bool_)
    np.put_along_axis(mask, nodes, True, axis=1)
    return mask


def mask_names(*, bare: bool = False) -> tuple[str, ...]:
    """Names under which a file may hold train, val and test, as masks or as lists of node ids."""
    ends = ("_mask", "_idx", *([""] if bare else []))
    return tuple(name + end for end in ends for names in _PART_NAMES.values() for name in names)


def field_splits(
    fields: Fields,
    num_nodes: int,
    changes: list[str],
    *,
    bare: bool = False,
    base: int = 0,
    ids: Array | None = None,
) -> Splits | None:
    """The splits in the fields ``train_mask`` or ``train_idx`` (with ``bare`` also ``train``, by type) and so on;
    lists as in ``index_masks``."""
    given: dict[str, tuple[str, Array | None]] = {}
    for part, names in _PART_NAMES.items():
        found = [name for name in mask_names(bare=bare) if name in fields and name.partition("_")[0] in names]
        if len(found) > 1:
            raise ValueError(f"{fields.path}: {' and '.join(found)} say the same thing; keep one of them")
        name = found[0] if found else f"{part}_mask"
        value = fields.get(name)
        if value is not None and (name.endswith("_idx") or ("_" not in name and value.dtype != np.bool_)):
            value = index_masks(value, num_nodes, fields.where(name), base=base, ids=ids)
        given[part] = (name, value)
    return splits(given, num_nodes, changes, fields.path)


def both_ways(
    src: NDArray[np.int64], dst: NDArray[np.int64], num_nodes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every pair among the entries once in each direction, a loop once; ordered by (src, dst)."""
    keys = np.unique(np.concatenate([entry_keys(src, dst, num_nodes), entry_keys(dst, src, num_nodes)]))
    return keys // num_nodes, keys % num_nodes
