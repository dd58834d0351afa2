"""Signals as flags that the loop reads: a handler only notes that one came."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from fullgraph.world import World, is_lost_rank

_STOPS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """SIGTERM and SIGINT set a number, on which all ranks stop together after the epoch; SIGUSR1 asks for a checkpoint.

    A second signal to stop, or one after another rank has failed, does what it did before.
    """

    stop = 0
    save = False

    def __init__(self, world: World) -> None:
        self._world = world
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (*_STOPS, signal.SIGUSR1):
                before = signal.getsignal(number)
                if before is not None:  # a handler that is not Python's could not be put back
                    self._before[number] = before
                    signal.signal(number, self._ask if number == signal.SIGUSR1 else self._note)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._restore()
        if self.stop and error is not None and is_lost_rank(error):  # a launcher ends what is left of the run
            signal.raise_signal(self.stop)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.stop or self._world.failed:
            self._restore()
            signal.raise_signal(number)
        self.stop = number

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.save = True
