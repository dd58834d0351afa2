"""What a format is to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from partition_tools.graph import Graph


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One format of graph files."""

    name: str
    description: str
    """One line for people: what such a file is called and what it holds."""
    matches: Callable[[str], bool]
    """Whether the spec names this format; looks at names and headers only. May raise ``ValueError`` for a file that
    would be of this format but is damaged."""
    read: Callable[[str], Graph]
    """Raises ``ValueError`` naming file, place and remedy where the file breaks the format."""
