"""How far a run has come: what the loop over epochs carries from one to the next, and the way to a checkpoint and back.

The weights and what trains them are the trainer's.
"""

from __future__ import annotations

from typing import Any

from fullgraph.checkpoint import Snapshot
from fullgraph.metrics import LOWER_IS_BETTER, Scores
from fullgraph.stopping import Best, EarlyStopping
from fullgraph.trainer import Trainer

_BEST = "best."


class Course:
    """Epochs done, their records, and the best epoch with its state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.early = EarlyStopping(trainer.target.metric, trainer.config.patience)
        self.best_state: dict[str, Any] = {}
        self.done = 0
        self.records: list[dict[str, Any]] = []
        """One an epoch; those of before a resume have loss, seconds and bytes_sent, and may be lost."""
        self._scores: Scores | None = None

    def take(self, record: dict[str, Any], scores: Scores | None) -> None:
        """Count an epoch, and keep the state where its scores are the best."""
        self.records.append(record)
        self._scores = scores
        if scores is not None and self.early.improves(self.done, scores):
            self.best_state = self._trainer.state()
        self._trainer.advance(scores)
        self.done += 1

    @property
    def best(self) -> Best:
        """The best epoch, or where no score has told any, the last (a collective then)."""
        if self.early.best is None:
            self.early.best = Best(self.done - 1, self._trainer.evaluate())
            self.best_state = self._trainer.state()
        return self.early.best

    @property
    def score(self) -> float | None:
        """The last epoch's validation score, the larger the better; None where it was not evaluated."""
        metric = self._trainer.target.metric
        if self._scores is None or "val" not in self._scores:
            return None
        value = self._scores["val"][metric]
        return -value if metric in LOWER_IS_BETTER else value

    def snapshot(self) -> Snapshot:
        """Everything that the run needs to go on (a collective)."""
        of_trainer, best = self._trainer.snapshot(), self.early.best
        replicated = of_trainer.replicated | {
            "best": None if best is None else {"epoch": best.epoch, "scores": best.scores},
            "best_model": self.best_state.get("model"),
        }
        rows = dict(of_trainer.rows)
        if "features" in self.best_state:
            rows[f"{_BEST}features"] = self.best_state["features"]
        return Snapshot(replicated=replicated, rows=rows, ids=of_trainer.ids, local=of_trainer.local)

    def restore(self, snapshot: Snapshot, done: int) -> None:
        """Take what ``snapshot`` gave. Raises ``ValueError`` where it is not that of such a run."""
        self._trainer.restore(snapshot)
        best = snapshot.replicated.get("best")
        try:
            if best is not None:
                self.early.best = Best(int(best["epoch"]), best["scores"])
                self.best_state = {"model": snapshot.replicated["best_model"]}
                if f"{_BEST}features" in snapshot.rows:
                    features = snapshot.rows[f"{_BEST}features"]
                    self.best_state["features"] = features.to(self._trainer.world.device)
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(f"the checkpoint's best epoch cannot be read ({e!r})") from None
        self.done = done
