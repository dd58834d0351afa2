"""Historical rows: a store of the message rows that last came, and of when each was sent. It decides nothing."""

from __future__ import annotations

import torch
from torch import Tensor


class History:
    """Rows [m, D] of one exchange in ``dtype`` (None: in that of the rows), each with the step that sent it.

    It has no rows until the first ``push``, which must bring all of them: there is no row that nobody sent.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self._rows: Tensor | None = None
        self._sent: Tensor | None = None  # int32 [m]

    @property
    def filled(self) -> bool:
        return self._rows is not None

    def push(self, rows: Tensor, step: int, which: Tensor | None = None) -> None:
        """Take ``rows`` sent in ``step``: all m of them, or those of the int64 indices ``which`` [k].

        The tensor is kept where its dtype is the store's, so that the caller must not write to it again.
        """
        if which is None:
            self._rows = rows.detach().to(self.dtype or rows.dtype)
            self._sent = torch.full((rows.shape[0],), step, dtype=torch.int32, device=rows.device)
            return
        assert self._rows is not None, "the first push brings all rows"
        assert self._sent is not None
        self._rows[which] = rows.detach().to(self._rows.dtype)
        self._sent[which] = step

    def pull(self, dtype: torch.dtype) -> Tensor:
        """[m, D] the rows; not to be written to."""
        assert self._rows is not None, "nothing was pushed yet"
        return self._rows.to(dtype)

    def age(self, step: int) -> Tensor:
        """int32 [m] steps from each row's sending to ``step``."""
        assert self._sent is not None, "nothing was pushed yet"
        return step - self._sent

    @property
    def nbytes(self) -> int:
        """Memory that the rows and their steps take."""
        return sum(t.numel() * t.element_size() for t in (self._rows, self._sent) if t is not None)

    def state(self) -> dict[str, Tensor]:
        """Copies of the rows [m, D] and of the step [m] that sent each; nothing before the first push."""
        if self._rows is None or self._sent is None:
            return {}
        return {"rows": self._rows.clone(), "sent": self._sent.clone()}

    def load_state(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Take what ``state`` gave, of a store of the same exchange."""
        self._rows, self._sent = (
            state["rows"].to(device, self.dtype or state["rows"].dtype),
            state["sent"].to(device, torch.int32),
        )


def history_bytes(rows: int, width: int, itemsize: int) -> int:
    """Memory of a history of ``rows`` x ``width`` numbers."""
    return rows * (width * itemsize + 4)
