"""Files that appear complete or not at all, and their checksums."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file that a manifest lists."""

    path: str
    """File name inside the folder; MUST NOT hold a separator."""
    bytes: int
    xxh3: str
    """Hex xxh3-64 of the whole file."""

    def __post_init__(self) -> None:
        if self.path in ("", ".", "..") or any(mark in self.path for mark in "/\\:\0"):
            raise ValueError(f"{self.path!r} is not the plain name of a file in the folder")
        if self.bytes < 0:
            raise ValueError(f"{self.path}: {self.bytes} bytes; expected 0 or more")
        if len(self.xxh3) != 16 or not set(self.xxh3) <= set("0123456789abcdef"):
            raise ValueError(f"{self.path}: xxh3 is {self.xxh3!r}; expected 16 hex digits")


@contextlib.contextmanager
def appears_by_rename(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside ``path``; what was written there becomes ``path``, on disk, when the block ends.

    Where the block raises, ``path`` is left as it was and the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove_left_behind(path.parent, glob.escape(path.name))
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_left_behind(folder: Path, name: str = "*") -> None:
    """Remove what processes of this host that are no more left of writing files of this name in a folder."""
    for old in folder.glob(f".{name}.*.tmp"):
        number = old.name.split(".")[-2]
        with contextlib.suppress(OSError):
            if number.isdecimal() and not _lives(int(number)):
                old.unlink()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def checksum(path: str | Path) -> str:
    """Hex xxh3-64 of a file, read in blocks."""
    digest, block = xxhash.xxh3_64(), memoryview(bytearray(1 << 22))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Put a file or the entries of a folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
