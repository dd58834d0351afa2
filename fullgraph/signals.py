"""Signals as numbers that the loop reads: a handler only notes that one came."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from fullgraph.world import World, is_lost_rank


class StopSignal:
    """SIGTERM and SIGINT set a number, on which all ranks stop together after the epoch.

    A second signal, or one after another rank has failed, does what it did before.
    """

    number = 0

    def __init__(self, world: World) -> None:
        self._world = world
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._restore()
        if self.number and error is not None and is_lost_rank(error):  # a launcher ends what is left of the run
            signal.raise_signal(self.number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.number or self._world.failed:
            self._restore()
            signal.raise_signal(number)
        self.number = number
