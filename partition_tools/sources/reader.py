"""What a format is to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from partition_tools.graph import Graph
from partition_tools.sources.options import LoadOptions
from partition_tools.sources.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a reader may need to know beyond the file's name."""

    options: LoadOptions = field(default_factory=LoadOptions)
    tables: Tables = field(default_factory=Tables)

    @property
    def num_nodes(self) -> tuple[int, str] | None:
        """N and who says so, where --num-nodes or a file with a row a node does."""
        if self.options.num_nodes is not None:
            return self.options.num_nodes, "--num-nodes"
        return self.tables.num_rows


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One format of graph files."""

    name: str
    description: str
    """One line for people: what such a file is called and what it holds."""
    matches: Callable[[str], bool]
    """Whether the spec names this format; looks at names and headers only. May raise ``ValueError`` for a file that
    would be of this format but is damaged."""
    read: Callable[[str, Request], Graph]
    """Raises ``ValueError`` naming file, place and remedy where the file breaks the format."""
    takes: frozenset[str] = frozenset()
    """Names of the options that mean something to this format alone, of ``FORMAT_OPTIONS``."""


FORMAT_OPTIONS = frozenset({"header", "index_base", "text_ids"})
"""Options that only some formats take; for any other, they are an error."""
