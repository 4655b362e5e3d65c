"""How many batches may be with the backend at once, found out by trying."""

from __future__ import annotations

from dataclasses import dataclass

from batchmill.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveConcurrency:
    """Start at ``least``; one more while answers stay quick, fewer at once when they slow down.

    ``max_in_flight`` is the ceiling. An answer is slow when it takes ``tolerance`` times as long as
    the quickest kind of answer seen lately.
    """

    least: int = 1
    tolerance: float = 2.0
    back_off: float = 0.7

    def __post_init__(self) -> None:
        if self.least < 1:
            raise ConfigError("least", self.least, "at least 1")
        if self.tolerance <= 1:
            raise ConfigError("tolerance", self.tolerance, "above 1")
        if not 0 < self.back_off < 1:
            raise ConfigError("back_off", self.back_off, "between 0 and 1")


class InFlightLimit:
    """The limit in force. Additive increase, multiplicative decrease; its user holds a lock."""

    __slots__ = ("_baseline_s", "_ceiling", "_exact", "_policy")

    def __init__(self, ceiling: int, policy: AdaptiveConcurrency | None) -> None:
        self._policy = policy
        self._ceiling = ceiling
        self._exact = float(min(policy.least, ceiling) if policy is not None else ceiling)
        self._baseline_s: float | None = None

    @property
    def current(self) -> int:
        """Batches that may be in flight now."""
        return max(1, int(self._exact))

    def record(self, took_s: float, ok: bool, in_flight: int) -> None:
        """Learn from a batch that took ``took_s`` while ``in_flight`` were out, itself included."""
        policy = self._policy
        if policy is None:
            return
        if not ok or (
            self._baseline_s is not None and took_s > self._baseline_s * policy.tolerance
        ):
            self._exact = max(
                float(min(policy.least, self._ceiling)), self._exact * policy.back_off
            )
        elif in_flight >= self.current:  # only a limit that was used up says anything
            self._exact = min(float(self._ceiling), self._exact + 1.0 / self.current)
        if ok:
            # Follows quicker answers at once and slower ones by and by, so that a backend that has
            # become slower for good is not taken for an overloaded one for ever.
            known = self._baseline_s
            self._baseline_s = (
                took_s if known is None or took_s < known else known + (took_s - known) * 0.05
            )
