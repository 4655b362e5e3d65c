"""The error of a queue that is full."""

from __future__ import annotations

import queue

from batchmill.errors import BatchmillError
from batchmill.pressure.levels import ThresholdLevel


class QueueFullError(BatchmillError, queue.Full):
    """An item was refused because too much is waiting already.

    Carries ``depth``, ``threshold`` and ``level`` as they were, and ``retry_after``: seconds after
    which another try makes sense, or None when nobody can tell.
    """

    def __init__(
        self,
        depth: int,
        threshold: int,
        level: ThresholdLevel | None,
        retry_after: float | None = None,
        detail: str = "",
    ) -> None:
        super().__init__(depth, threshold, level, retry_after, detail)
        self.depth = depth
        self.threshold = threshold
        self.level = level
        self.retry_after = retry_after
        self.detail = detail

    def __str__(self) -> str:
        where = self.level.name if self.level is not None else "hard capacity"
        hint = (
            f"try again in {self.retry_after:g} s"
            if self.retry_after is not None
            else "slow down, or raise the limits if the consumer can take more"
        )
        detail = f"; {self.detail}" if self.detail else ""
        return f"queue full at {where}: depth {self.depth}, limit {self.threshold}{detail}; {hint}"
