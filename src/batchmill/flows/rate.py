"""How many signals a second, lately. Pure: the caller says what time it is.

Each signal's weight fades with its age (by half every seven seconds), so the rate follows a change
within seconds and reading it changes nothing: any number of readers see the same figure.
"""

from __future__ import annotations

import math

MEMORY_S = 10.0


class Rate:
    """Signals a second, over about the last ten seconds."""

    __slots__ = ("_faded_at", "_started")

    def __init__(self, now: float) -> None:
        self._started = now
        # The weight and its moment as one object: a reader never sees one without the other.
        self._faded_at = (0.0, now)

    def add(self, count: int, now: float) -> None:
        """Count ``count`` signals at ``now``; one thread does."""
        self._faded_at = (self._faded(now) + count, now)

    def per_second(self, now: float) -> float:
        """The rate at ``now``; soon after the start, the plain average since then."""
        watched_s = now - self._started
        if watched_s <= 0.0:
            return 0.0
        return self._faded(now) / (MEMORY_S * -math.expm1(-watched_s / MEMORY_S))

    def _faded(self, now: float) -> float:
        weight, at = self._faded_at
        return weight * math.exp(min(0.0, at - now) / MEMORY_S)
