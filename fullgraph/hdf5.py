"""Reading plain datasets from an HDF5 file that nobody vouches for.

A dataset is taken only as one contiguous, unfiltered block of bytes inside the file, reached through hard links, so
that neither another file is opened nor more memory allocated than the file is long.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

_LOOK_SECONDS = 60.0
_HEAP = b"GCOL\x01\0\0\0"
_LENGTH = struct.Struct("<Q")
_HEAP_OBJECT = struct.Struct("<HxxxxxxQ")


class FormatError(ValueError):
    """A fault in a file: where it is, what stands there and what was expected.

    ``file`` is a path ("" before it is known), ``dataset`` a path in the file ("" for the file as a whole), ``index``
    a position in the dataset.
    """

    def __init__(self, message: str, *, dataset: str = "", index: int | None = None, file: str = "") -> None:
        self.message, self.dataset, self.index, self.file = message, dataset, index, file
        place = dataset if index is None else f"{dataset}[{index}]"
        super().__init__(": ".join(text for text in (file, place, message) if text))


def require(good: bool, dataset: str, message: str) -> None:
    if not good:
        raise FormatError(message, dataset=dataset)


def require_each(good: NDArray[np.bool_], dataset: str, values: NDArray[Any], expected: str) -> None:
    """Raise `FormatError` for the first value (or row) of a dataset that is not good."""
    if not good.all():
        index = int(np.argmin(good))
        raise FormatError(f"is {values[index]}; expected {expected}", dataset=dataset, index=index)


def dtype_names(dtypes: tuple[np.dtype[Any], ...]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


@contextlib.contextmanager
def open_to_read(path: str | os.PathLike[str]) -> Iterator[h5py.File]:
    """The file, open for reading and without locks: readers never write, and network file systems refuse locks.

    HDF5 opens a file twice in one process only with the same flags of locking, so one that somebody else has open here
    is opened with theirs; they then hold whatever lock there is.
    """
    with contextlib.ExitStack() as stack:
        for locking in (False, "best-effort", True):
            try:
                file = stack.enter_context(h5py.File(path, "r", locking=locking))
                break
            except OSError as error:
                if "flag values don't match" not in str(error) or locking is True:
                    raise
        yield file


def survives(path: str) -> bool:
    """Whether HDF5 comes back, by itself, from all that a file says of its datasets; to be asked of a file for which no
    checksum vouches before it is opened.

    HDF5 may crash on a damaged one, or never end, so a forked copy of this process looks first. What is wrong in other
    ways is not told here: whoever reads the file meets it again.
    """
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            faulthandler.disable()
            _look(path)
        os._exit(0)
    end = time.monotonic() + _LOOK_SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.WIFEXITED(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.002)


def _look(path: str) -> None:
    with open_to_read(path) as file:
        with contextlib.suppress(Exception):
            check_heaps(file)
        for node in (file, *(find_dataset(file, name) for name in file)):
            if node is None:
                continue
            with contextlib.suppress(Exception):
                dict(node.attrs)
            if isinstance(node, h5py.Dataset):
                with contextlib.suppress(Exception):
                    _require_plain(node, node.name, (0, 1, 2))
                    if h5py.check_string_dtype(node.dtype) is not None:
                        node[...]


def check_heaps(file: h5py.File) -> None:
    """Raise `FormatError` where reading a string could never end; to be called before any is read.

    HDF5 keeps strings in global heaps (HDF5 file format specification, III.E): a header of 16 bytes, then objects of a
    header of 16 bytes (index, references, size) and their bytes. Object 0 is the free space, whose size counts the
    header; the library steps over it by that size, so a size of 0 holds it for ever.
    """
    size = os.path.getsize(file.filename)
    taken: list[tuple[int, int]] = []

    def note(_: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset) and (at := node.id.get_offset()) is not None:
            taken.append((at, at + node.id.get_storage_size()))

    file.visititems(note)
    with open(file.filename, "rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as content:
        first = 0
        for start, end in [*sorted(taken), (size, size)]:  # between the data of datasets
            at = content.find(_HEAP, first, start)
            while at >= 0:
                _check_heap(content, at, size)
                at = content.find(_HEAP, at + 1, start)
            first = max(first, end)


def _check_heap(content: mmap.mmap, at: int, size: int) -> None:
    (length,) = _LENGTH.unpack_from(content, at + 8) if at + 16 <= size else (0,)
    end = min(at + length, size)
    place = at + 16
    while place + 16 <= end:
        index, stored = _HEAP_OBJECT.unpack_from(content, place)
        if index == 0 and stored < 16:
            raise FormatError(
                f"the heap of strings at byte {at} has {stored} bytes of free space; expected at least 16"
            )
        place += stored if index == 0 else 16 + -(-stored // 8) * 8


def read_attribute(file: h5py.File, name: str, kind: type) -> Any:
    """A str or int attribute of the root."""
    value = file.attrs.get(name)
    if not isinstance(value, str if kind is str else np.integer):
        raise FormatError(f"attribute {name} is {value!r}; expected {kind.__name__}")
    return kind(value)


def find_dataset(file: h5py.File, path: str) -> h5py.Dataset | None:
    """The dataset at a path; None where there is none."""
    node: Any = file
    for name in path.split("/"):
        link = node.get(name, getlink=True) if isinstance(node, h5py.Group) else None
        if link is None:
            return None
        require(isinstance(link, h5py.HardLink), path, "is a soft or external link; expected the data themselves")
        node = node[name]
    return node if isinstance(node, h5py.Dataset) else None


def read_dataset(
    file: h5py.File, path: str, dtypes: tuple[np.dtype[Any], ...], dimensions: tuple[int, ...] = (1,)
) -> NDArray[Any]:
    """A numeric dataset of one of the dtypes, with one of the numbers of dimensions."""
    dataset = find_dataset(file, path)
    if dataset is None:
        raise FormatError("is missing", dataset=path)
    require(dataset.dtype in dtypes, path, f"dtype {dataset.dtype}; expected {dtype_names(dtypes)}")
    _require_plain(dataset, path, dimensions)
    return np.asarray(dataset[...])


def read_strings(file: h5py.File, path: str) -> NDArray[Any]:
    """A one-dimensional dataset of variable-length utf-8 strings, as an object array of str."""
    dataset = find_dataset(file, path)
    if dataset is None:
        raise FormatError("is missing", dataset=path)
    text = h5py.check_string_dtype(dataset.dtype)
    good = text is not None and text.encoding == "utf-8" and text.length is None
    require(good, path, f"dtype {dataset.dtype}; expected variable-length utf-8 strings")
    _require_plain(dataset, path, (1,))
    try:
        return np.asarray(dataset.asstr(errors="strict")[...], dtype=object)
    except UnicodeDecodeError as error:
        raise FormatError(f"not utf-8 ({error})", dataset=path) from None


def dataset_offset(dataset: h5py.Dataset, path: str, dimensions: tuple[int, ...]) -> int:
    """Where in its file a plain dataset with one of the numbers of dimensions begins."""
    _require_plain(dataset, path, dimensions)
    return int(dataset.id.get_offset() or 0)


def _require_plain(dataset: h5py.Dataset, path: str, dimensions: tuple[int, ...]) -> None:
    shape = dataset.shape
    expected = " or ".join(map(str, dimensions))
    require(shape is not None and len(shape) in dimensions, path, f"shape {shape}; expected {expected} dimensions")
    properties = dataset.id.get_create_plist()
    contiguous = properties.get_layout() == h5py.h5d.CONTIGUOUS and not properties.get_nfilters()
    plain = contiguous and not properties.get_external_count()
    require(plain, path, "is chunked, filtered, virtual or external; expected contiguous data")
    needed, offset, size = (
        math.prod(shape) * dataset.dtype.itemsize,
        dataset.id.get_offset(),
        os.path.getsize(dataset.file.filename),
    )
    inside = needed == 0 or (offset is not None and offset + needed <= size)
    require(inside, path, f"claims {needed} bytes (shape {list(shape)}) in a file of {size} bytes")
