"""Named arrays, whatever file they lie in: one layout of a graph then has one reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from partition_tools.graph import Array
from partition_tools.stored import StoredRows


class Fields(ABC):
    """The arrays of a file by name. Nothing is read, or at least nothing converted, before it is asked for."""

    path: str

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]: ...

    @abstractmethod
    def read(self, name: str) -> Array:
        """The array, in native byte order. Raises ``ValueError`` naming file and array."""

    def rows(self, name: str) -> Array | StoredRows:
        """The same, left in the file where it is long and lies there as it is."""
        return self.read(name)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def where(self, name: str) -> str:
        """How messages name the array: file and name."""
        return f"{self.path}: {name}"

    def get(self, name: str) -> Array | None:
        """The array, or None where the file has none of that name."""
        return self.read(name) if name in self else None

    def missing(self, name: str) -> ValueError:
        return ValueError(f"{self.path}: array {name} is missing; the file holds {', '.join(self.names) or 'none'}")


def unread(fields: Fields, known: Iterable[str]) -> list[str]:
    """The sentence, if one is due, that tells which arrays of the file mean nothing to its reader."""
    others = [name for name in fields.names if name not in set(known)]
    return [f"arrays that this layout does not know were left out: {', '.join(others)}"] if others else []
