"""The best epoch so far by the validation score, and how long ago it was."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullgraph.metrics import LOWER_IS_BETTER, Scores


@dataclass(frozen=True)
class Best:
    """An epoch and its scores."""

    epoch: int
    scores: Scores


class EarlyStopping:
    """Keeps the best epoch by validation ``metric``; ends a run after ``patience`` epochs without a better one."""

    def __init__(self, metric: str, patience: int | None) -> None:
        self.metric, self.patience = metric, patience
        self.best: Best | None = None

    def improves(self, epoch: int, scores: Scores) -> bool:
        """Take the scores of an evaluated epoch; whether it is the best so far."""
        if "val" not in scores or math.isnan(new := scores["val"][self.metric]):
            return False
        if self.best is not None:
            old = self.best.scores["val"][self.metric]
            if not (new < old if self.metric in LOWER_IS_BETTER else new > old):
                return False
        self.best = Best(epoch, scores)
        return True

    def ends(self, epoch: int) -> bool:
        """Whether patience is over after this evaluated epoch."""
        waited = epoch - (-1 if self.best is None else self.best.epoch)
        return self.patience is not None and waited >= self.patience
