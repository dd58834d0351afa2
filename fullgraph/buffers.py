"""Memory of large rows that is used again in the next step.

A full-graph step makes the same large tensors as the step before it. Taken afresh from the system each time, their
pages are cleared and mapped again, which on a CPU costs as much time as a third of the arithmetic. A buffer is lent
again once no tensor shares its storage any more, whoever held one: nothing has to be handed back, and a row that a
user keeps stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_SMALLEST = 1 << 20
"""Bytes below which malloc keeps the memory itself."""
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class Buffers:
    """Large CPU tensors of one process; on a GPU torch's own allocator does this."""

    def __init__(self) -> None:
        self._kept: list[torch.UntypedStorage] = []

    def empty(self, rows: int, width: int, like: Tensor) -> Tensor:
        """An uninitialised [rows, width] tensor of the kind of ``like``."""
        size = rows * width * like.element_size()
        if _use_count is None or like.device.type != "cpu" or size < _SMALLEST:
            return torch.empty(rows, width, dtype=like.dtype, device=like.device)
        fitting = (kept for kept in self._kept if size <= kept.nbytes() <= 2 * size and _use_count(kept._cdata) == 1)
        storage = min(fitting, key=lambda kept: kept.nbytes(), default=None)
        if storage is None:
            storage = torch.empty(size, dtype=torch.uint8).untyped_storage()
            self._kept.append(storage)
        out = torch.empty(0, dtype=like.dtype)
        return out.set_(storage, 0, (rows, width), (width, 1))

    @property
    def bytes_kept(self) -> int:
        """Lent or not."""
        return sum(kept.nbytes() for kept in self._kept)
