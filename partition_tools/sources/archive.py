"""Zip archives of arrays from anywhere: every declared size is checked before it is read, and nothing is unpickled."""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from typing import IO, Any

import numpy as np

from partition_tools.graph import Array
from partition_tools.sources.fields import Fields
from partition_tools.stored import STORED_FROM, StoredRows

_DEFLATE_LIMIT = 1032
"""Deflate makes at most this many bytes of one (zlib's technical notes)."""
_BLOCK = 1 << 24
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, struct.error)


def directory(path: str, kind: str, remedy: str) -> list[zipfile.ZipInfo]:
    """The members of a zip archive, none of which can be larger than the file allows.

    Raises ``ValueError`` where the file is no zip archive or its directory contradicts the file's size.
    """
    size = os.path.getsize(path)
    if size == 0:
        raise ValueError(f"{path}: the file is empty (0 bytes); {remedy}")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: not a whole {kind} archive ({error}); it may have been cut short: copy or write it again"
        ) from error
    packed = sum(member.compress_size for member in members)
    if packed > size:
        raise ValueError(f"{path}: the directory declares {packed} bytes of arrays, but the file has {size} bytes")
    for member in members:
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{path}: {member.filename} is encrypted or packed by an unusual method; {remedy}")
        most = member.compress_size * (1 if member.compress_type == zipfile.ZIP_STORED else _DEFLATE_LIMIT)
        if member.file_size > most:
            raise ValueError(
                f"{path}: {member.filename} declares {member.file_size} bytes, more than its {member.compress_size} "
                f"packed bytes can hold; the file is damaged"
            )
    return members


class Archive(Fields):
    """The arrays of an ``.npz`` file. Only the directory is read until :meth:`read` asks for an array."""

    def __init__(self, path: str) -> None:
        """Raises ``ValueError`` where the file is no zip archive or its directory contradicts the file's size."""
        self.path = path
        members = directory(path, ".npz", "write the file with numpy.savez or numpy.savez_compressed")
        self._members = {
            member.filename.removesuffix(".npy"): member for member in members if member.filename.endswith(".npy")
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    def read(self, name: str) -> Array:
        if name not in self:
            raise self.missing(name)
        member = self._members[name]
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(member) as stream:
                return _array(stream, member.file_size)
        except _DAMAGE as error:
            raise ValueError(f"{self.where(name)}: {error}") from error

    def rows(self, name: str) -> Array | StoredRows:
        member = self._members.get(name)
        if member is None or member.compress_type != zipfile.ZIP_STORED or member.file_size < STORED_FROM:
            return self.read(name)
        try:
            with open(self.path, "rb") as stream:
                stream.seek(member.header_offset)
                kind, named, extra = struct.unpack("<4s22xHH", stream.read(30))
                if kind != b"PK\x03\x04":
                    raise ValueError("its local header is damaged")
                stream.seek(named + extra, os.SEEK_CUR)
                _check_crc(stream, member)
                return _left_there(stream, self.path, member.file_size) or self.read(name)
        except _DAMAGE as error:
            raise ValueError(f"{self.where(name)}: {error}") from error


def _check_crc(stream: IO[bytes], member: zipfile.ZipInfo) -> None:
    """Leaves the stream where it was."""
    start, crc = stream.tell(), 0
    for at in range(0, member.file_size, _BLOCK):
        crc = zlib.crc32(stream.read(min(_BLOCK, member.file_size - at)), crc)
    if crc != member.CRC:
        raise ValueError("differs from its checksum; copy or write the file again")
    stream.seek(start)


def npy_rows(path: str) -> Array | StoredRows:
    """The array of an ``.npy`` file, left there where it is long; ``ValueError`` names the file."""
    size = os.path.getsize(path)
    if size < STORED_FROM:
        return read_npy(path)
    try:
        with open(path, "rb") as stream:
            return _left_there(stream, path, size) or read_npy(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _left_there(stream: IO[bytes], path: str, size: int) -> StoredRows | None:
    """The numbers whose ``.npy`` file of ``size`` bytes begins here in the stream; None for strings, and where they lie
    column by column."""
    start = stream.tell()
    shape, fortran_order, dtype = _checked_header(stream, size)
    if fortran_order or not shape or dtype.kind not in "biuf":
        stream.seek(start)
        return None
    return StoredRows(path, stream.tell(), dtype, shape)


def read_npy(path: str) -> Array:
    """The array of an ``.npy`` file, in native byte order; ``ValueError`` names the file."""
    try:
        with open(path, "rb") as stream:
            return _array(stream, os.path.getsize(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _array(stream: IO[bytes], size: int) -> Array:
    """The array in a stream of ``size`` bytes, which its header must fit."""
    start = stream.tell()
    shape, fortran_order, dtype = _checked_header(stream, size)
    held = size - (stream.tell() - start)
    raw = np.empty(held, np.uint8)
    for start in range(0, held, _BLOCK):
        block = stream.read(min(_BLOCK, held - start))
        raw[start : start + len(block)] = np.frombuffer(block, np.uint8)
        if len(block) < min(_BLOCK, held - start):
            raise ValueError(f"it ends after {start + len(block)} of {held} bytes; the file is damaged")
    values = raw.view(dtype).reshape(shape, order="F" if fortran_order else "C")
    return np.ascontiguousarray(values, dtype.newbyteorder("=")).reshape(shape)


def _checked_header(stream: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and dtype, if what follows in ``size`` bytes from here is as long."""
    start = stream.tell()
    shape, fortran_order, dtype = _header(stream)
    if dtype.hasobject:
        raise ValueError(
            "it holds Python objects, which only unpickling could read, and that would run whatever the file says; "
            "write it as numbers or strings"
        )
    declared, held = math.prod(shape) * dtype.itemsize, size - (stream.tell() - start)
    if min(shape, default=0) < 0:
        raise ValueError(f"the header declares the shape {list(shape)}, and no size is negative; the file is damaged")
    if dtype.itemsize == 0 or declared != held:
        raise ValueError(
            f"the header declares {dtype} {list(shape)} = {declared} bytes, but the file holds {held} bytes of it; "
            f"the file is damaged"
        )
    return shape, fortran_order, dtype


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
