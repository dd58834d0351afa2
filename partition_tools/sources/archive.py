"""``.npz`` files from anywhere: every array's declared size is checked before it is read, and nothing is unpickled."""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from typing import IO, Any

import numpy as np

from partition_tools.graph import Array

_DEFLATE_LIMIT = 1032
"""Deflate makes at most this many bytes of one (zlib's technical notes)."""
_BLOCK = 1 << 24


class Archive:
    """The arrays of an ``.npz`` file. Only the directory is read until :meth:`read` asks for an array."""

    def __init__(self, path: str) -> None:
        """Raises ``ValueError`` where the file is no zip archive or its directory contradicts the file's size."""
        self.path = path
        size = os.path.getsize(path)
        if size == 0:
            raise ValueError(f"{path}: the file is empty (0 bytes); write it again with numpy.savez")
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}: not a whole .npz archive ({error}); it may have been cut short: copy or write it again"
            ) from error
        packed = sum(member.compress_size for member in members)
        if packed > size:
            raise ValueError(f"{path}: the directory declares {packed} bytes of arrays, but the file has {size} bytes")
        for member in members:
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(
                    f"{path}: {member.filename} is encrypted or packed by an unusual method; write the file with "
                    f"numpy.savez or numpy.savez_compressed"
                )
            if member.file_size > _DEFLATE_LIMIT * member.compress_size:
                raise ValueError(
                    f"{path}: {member.filename} declares {member.file_size} bytes, more than its "
                    f"{member.compress_size} packed bytes can hold; the file is damaged"
                )
        self._members = {
            member.filename.removesuffix(".npy"): member for member in members if member.filename.endswith(".npy")
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def where(self, name: str) -> str:
        """How messages name the array: file and name."""
        return f"{self.path}: {name}"

    def get(self, name: str) -> Array | None:
        """The array, or None where the file has none of that name."""
        return self.read(name) if name in self else None

    def read(self, name: str) -> Array:
        """The array, in native byte order. Raises ``ValueError`` naming file and array."""
        if name not in self:
            raise ValueError(f"{self.path}: array {name} is missing; the file holds {', '.join(self.names) or 'none'}")
        member = self._members[name]
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(member) as stream:
                shape, fortran_order, dtype = _header(stream)
                if dtype.hasobject:
                    raise ValueError(
                        "it holds Python objects, which only unpickling could read, and that would run whatever the "
                        "file says; write it as numbers or strings"
                    )
                declared, held = math.prod(shape) * dtype.itemsize, member.file_size - stream.tell()
                if min(shape, default=0) < 0 or dtype.itemsize == 0 or declared != held:
                    raise ValueError(
                        f"the header declares {dtype} {list(shape)} = {declared} bytes, but the file holds {held} "
                        f"bytes of it; the file is damaged"
                    )
                raw = np.empty(held, np.uint8)
                for start in range(0, held, _BLOCK):
                    block = stream.read(min(_BLOCK, held - start))
                    raw[start : start + len(block)] = np.frombuffer(block, np.uint8)
                    if len(block) < min(_BLOCK, held - start):
                        raise ValueError(f"it ends after {start + len(block)} of {held} bytes; the file is damaged")
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, struct.error) as error:
            raise ValueError(f"{self.where(name)}: {error}") from error
        values = raw.view(dtype).reshape(shape, order="F" if fortran_order else "C")
        return np.ascontiguousarray(values, dtype.newbyteorder("=")).reshape(shape)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(stream)
        if version == (2, 0):
            return np.lib.format.read_array_header_2_0(stream)
    except (OSError, zipfile.BadZipFile, zlib.error):
        raise
    except Exception as error:  # numpy's parser lets errors of Python's tokenizer through
        raise ValueError(f"its header cannot be read ({error}); the file is damaged") from error
    raise ValueError(f"it has .npy version {version[0]}.{version[1]}; expected 1.0 or 2.0")


def unread(archive: Archive, known: set[str]) -> list[str]:
    """The sentence, if one is due, that tells which arrays of the file mean nothing to its reader."""
    others = [name for name in archive.names if name not in known]
    return [f"arrays that this layout does not know were left out: {', '.join(others)}"] if others else []
