"""The numbers of parts: consecutive ones share most rows, so that a run of them merged on one rank cuts least."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

_EXACT_UP_TO = 128
"""Parts for which the order of a tree's branches is optimised, in time that grows with the third power."""


def numbering(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """[P] new number of each part, given the rows [P, P] that each sends each.

    Parts are joined to ever larger groups, those first that share most rows (average linkage); the leaves of that tree
    in order are the new numbers. Deterministic.
    """
    parts = rows.shape[0]
    if parts < 3:
        return np.arange(parts)
    shared = (rows + rows.T).astype(np.float64)
    np.fill_diagonal(shared, 0)
    distance = squareform(shared.max() - shared + 1, checks=False)
    tree = hierarchy.linkage(distance, "average", optimal_ordering=parts <= _EXACT_UP_TO)
    number = np.empty(parts, np.int64)
    number[hierarchy.leaves_list(tree)] = np.arange(parts)
    return number
