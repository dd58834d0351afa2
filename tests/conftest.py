"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to four ranks that stay alive; ``ranks.run(size, function, *args)``."""
    from tests.ranks import rank_pool  # here, so that tests without ranks load no torch

    with rank_pool() as pool:
        yield pool
