"""What parts are balanced by: loads of nodes, and the most that each part may carry of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Loads:
    """c loads of N nodes and what P parts may carry."""

    names: tuple[str, ...]
    """[c] nodes, edges, train, cost or weights, as they are called by --balance."""
    load: NDArray[np.int64]
    """[c, N]"""
    target: NDArray[np.float64]
    """[c, P] an even share, or one by capacities."""
    allowed: NDArray[np.float64]
    """[c, P] the target and the tolerance, granted that one node cannot be split."""

    @classmethod
    def make(
        cls, loads: dict[str, NDArray[np.int64]], parts: int, *, tolerance: float, shares: NDArray[np.float64]
    ) -> Loads:
        """``loads`` by name, [N] each; ``shares`` [P] sum to 1."""
        load = np.stack(list(loads.values()))
        target = load.sum(axis=1, dtype=np.float64)[:, None] * shares
        indivisible = np.maximum(np.ceil(target - 1e-9), load.max(axis=1)[:, None])
        return cls(
            names=tuple(loads),
            load=load,
            target=target,
            allowed=np.maximum(target * (1 + tolerance), indivisible),
        )

    @property
    def parts(self) -> int:
        return int(self.target.shape[1])

    def totals(self, part: NDArray[np.int32]) -> NDArray[np.float64]:
        """[c, P] what each part carries."""
        return np.stack([np.bincount(part, row, self.parts) for row in self.load])

    def imbalance(self, part: NDArray[np.int32]) -> dict[str, float]:
        """By name, the largest ratio of what a part carries to its target, less 1; 0 where there is no load."""
        ratio = np.divide(self.totals(part), self.target, out=np.ones_like(self.target), where=self.target > 0)
        return {name: float(row.max()) - 1 for name, row in zip(self.names, ratio, strict=True)}

    def beyond(self, part: NDArray[np.int32]) -> dict[str, float]:
        """By name, those of `imbalance` that are more than is allowed."""
        over = self.totals(part) > self.allowed + 1e-9
        found = self.imbalance(part)
        return {name: found[name] for name, row in zip(self.names, over, strict=True) if row.any()}

    def admit(self, part: NDArray[np.int32], totals: NDArray[np.float64], moves: Moves) -> Moves:
        """The moves that can be made together: those of least gain are left out where they overfill a part.

        A part beyond what is allowed may not get heavier. The result may be empty.
        """
        order = np.argsort(-moves.gain, kind="stable")
        moves = moves.take(order)
        for _ in range(2 * self.parts):
            inflow = self._flow(moves.node, moves.target)
            new = totals + inflow - self._flow(moves.node, part[moves.node])
            over = (new > self.allowed + 1e-9) & (new > totals)
            if not over.any():
                return moves
            keep = np.ones(moves.node.shape[0], np.bool_)
            for c, q in np.argwhere(over).tolist():
                into = np.flatnonzero((moves.target == q) & (self.load[c, moves.node] > 0))
                excess = new[c, q] - max(self.allowed[c, q], totals[c, q])
                # From the least gain upwards, until the excess is gone.
                carried = np.cumsum(self.load[c, moves.node[into[::-1]]])
                drop = int(np.searchsorted(carried, excess - 1e-9)) + 1
                keep[into[::-1][:drop]] = False
            moves = moves.take(keep)
        return moves.take(slice(0))

    def _flow(self, node: NDArray[np.int64], at: NDArray[Any]) -> NDArray[np.float64]:
        return np.stack([np.bincount(at, row[node], self.parts) for row in self.load])


@dataclass(frozen=True, eq=False)
class Moves:
    """Nodes that may move, each to one part."""

    node: NDArray[np.int64]
    target: NDArray[np.int64]
    gain: NDArray[np.floating[Any]]

    def take(self, which: Any) -> Moves:
        return Moves(self.node[which], self.target[which], self.gain[which])


def integer_load(load: NDArray[np.floating[Any]], scale: int = 1024) -> NDArray[np.int64]:
    """[N] positive loads as integers, a mean node's being ``scale``."""
    mean = float(load.mean())
    return np.maximum(np.rint(load * (scale / mean)), 1).astype(np.int64) if mean > 0 else np.ones(load.shape, np.int64)


def even_shares(parts: int, capacities: Sequence[float] = ()) -> NDArray[np.float64]:
    """[P] what each part should carry of the whole."""
    given = np.asarray(capacities, np.float64) if len(capacities) else np.ones(parts)
    assert given.shape == (parts,)
    return given / math.fsum(given)
