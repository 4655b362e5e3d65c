"""Levels of pressure, when a depth enters or leaves one, and the error of a full queue."""

from __future__ import annotations

import enum
import queue
from dataclasses import dataclass

from batchmill.errors import BatchmillError


class ThresholdLevel(enum.IntEnum):
    """How far a depth has gone; a higher level compares greater."""

    WARNING = 1
    """Approaching capacity (by default half of the maximum)."""
    CRITICAL = 2
    """At capacity (by default the maximum)."""
    CRITICAL_PLUS = 3
    """Far past capacity (by default one and a half times the maximum)."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The depths at which the levels begin, lowest first."""

    warning: int
    critical: int
    critical_plus: int

    def level_at(self, depth: int) -> ThresholdLevel | None:
        """The level of a depth, or None below all of them."""
        if depth < self.warning:
            return None
        if depth < self.critical:
            return ThresholdLevel.WARNING
        if depth < self.critical_plus:
            return ThresholdLevel.CRITICAL
        return ThresholdLevel.CRITICAL_PLUS

    def of(self, level: ThresholdLevel) -> int:
        """The depth at which ``level`` begins."""
        return (self.warning, self.critical, self.critical_plus)[level - 1]


class LevelTracker:
    """The current level, so that entering and leaving it is reported once each.

    A level is entered at its threshold and left only below ``leave_ratio`` of it: a depth that
    oscillates around a threshold enters its level once, not a hundred times.
    """

    __slots__ = ("_leave_below", "_thresholds", "current")

    def __init__(self, thresholds: Thresholds, leave_ratio: float) -> None:
        self._thresholds = thresholds
        self._leave_below = {level: thresholds.of(level) * leave_ratio for level in ThresholdLevel}
        self.current = 0
        """The highest level that holds, as a number; 0 is none."""

    def settled(self, depth: int) -> bool:
        """Whether ``depth`` changes nothing; a quick check that needs no lock."""
        current = self.current
        if current < 3 and depth >= self._thresholds.of(ThresholdLevel(current + 1)):
            return False
        return current == 0 or depth >= self._leave_below[ThresholdLevel(current)]

    def move(self, depth: int) -> tuple[list[ThresholdLevel], list[ThresholdLevel]]:
        """Record ``depth``; returns the levels it enters and those it leaves, in order."""
        entered: list[ThresholdLevel] = []
        left: list[ThresholdLevel] = []
        while self.current < 3:
            above = ThresholdLevel(self.current + 1)
            if depth < self._thresholds.of(above):
                break
            entered.append(above)
            self.current = int(above)
        while self.current > 0:
            here = ThresholdLevel(self.current)
            if depth >= self._leave_below[here]:
                break
            left.append(here)
            self.current -= 1
        return entered, left


class QueueFullError(BatchmillError, queue.Full):
    """An item was refused because too much is waiting already.

    Carries ``depth``, ``threshold`` and ``level`` as they were, and ``retry_after``: seconds after
    which another try makes sense, or None when nobody can tell. With a ``text``, which may be the
    only argument, that is its message.

    >>> str(QueueFullError("come back tomorrow"))
    'come back tomorrow'
    """

    def __init__(
        self,
        depth: int | str = 0,
        threshold: int = 0,
        level: ThresholdLevel | None = None,
        retry_after: float | None = None,
        detail: str = "",
        text: str = "",
    ) -> None:
        if isinstance(depth, str):
            text, depth = depth, 0
        super().__init__(depth, threshold, level, retry_after, detail, text)
        self.depth = depth
        self.threshold = threshold
        self.level = level
        self.retry_after = retry_after
        self.detail = detail
        self.text = text

    def __str__(self) -> str:
        if self.text:
            return self.text
        where = self.level.name if self.level is not None else "hard capacity"
        hint = (
            f"try again in {self.retry_after:g} s"
            if self.retry_after is not None
            else "slow down, or raise the limits if the consumer can take more"
        )
        detail = f"; {self.detail}" if self.detail else ""
        return f"queue full at {where}: depth {self.depth}, limit {self.threshold}{detail}; {hint}"
