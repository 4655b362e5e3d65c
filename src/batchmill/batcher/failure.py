"""What to do when a whole batch fails: plain decisions, with no thread and no sleep in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from batchmill.backoff import back_off_ms
from batchmill.errors import ConfigError


@dataclass(frozen=True, slots=True)
class bisect:  # noqa: N801 - reads as a verb where it is used: on_batch_failure=bisect()
    """Split a failing batch in halves until the poison item stands alone.

    A batch of n items with one poison item costs about 2 log2(n) more calls of the backend. The
    items of a half that succeeds are sent again only if the backend took them before it raised:
    use it with backends that fail as a whole, or that can take an item twice.
    """

    max_calls: int = 64
    """Calls for one batch at most (retries apart); past that, what is left fails together."""

    def __post_init__(self) -> None:
        if self.max_calls < 3:
            raise ConfigError("max_calls", self.max_calls, "at least 3: the batch and its halves")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often and how late a batch is sent again after the backend raised."""

    max_attempts: int = 3
    """Calls for one batch in all."""
    initial_ms: float = 100
    """The first delay."""
    max_ms: float = 10_000
    """The longest delay."""
    multiplier: float = 2.0
    """How much longer each delay is."""
    jitter: float = 0.1
    """The share of a delay that chance may take off."""
    retry_on: tuple[type[BaseException], ...] = (Exception,)
    """What is worth another try."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError("max_attempts", self.max_attempts, "at least 1")
        if not 0 < self.initial_ms <= self.max_ms:
            raise ConfigError("initial_ms", self.initial_ms, f"above 0, at most {self.max_ms:g}")
        if self.multiplier < 1:
            raise ConfigError("multiplier", self.multiplier, "at least 1")
        if not 0 <= self.jitter < 1:
            raise ConfigError("jitter", self.jitter, "from 0 to below 1")

    def delay_ms(
        self, attempt: int, error: BaseException, chance: Callable[[], float] = random.random
    ) -> float | None:
        """How long to wait after the ``attempt``-th failure, or None to give up."""
        if attempt >= self.max_attempts or not isinstance(error, self.retry_on):
            return None
        delay = back_off_ms(self.initial_ms, self.max_ms, self.multiplier, attempt)
        return delay * (1 - self.jitter * chance())


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakerPolicy:
    """When to stop calling a backend that keeps failing."""

    failures: int = 5
    """Failed calls in a row that open the circuit; halves of a bisected batch do not count."""
    reset_after_s: float = 30.0
    """How long it stays open before one batch may try."""

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise ConfigError("failures", self.failures, "at least 1")
        if self.reset_after_s <= 0:
            raise ConfigError("reset_after_s", self.reset_after_s, "above 0")


class CircuitBreaker:
    """Closed: calls go through. Open: they do not. Half open: one goes through, and decides.

    Not thread-safe: its user holds a lock.
    """

    __slots__ = ("_failures", "_open_until", "_policy", "_trial", "opened")

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._open_until: float | None = None
        self._trial = False
        self.opened = 0
        """How often the circuit has opened."""

    def blocked_for(self, now: float) -> float | None:
        """None when a call may go ahead (a trial, if it was open); else seconds until one may."""
        if self._open_until is None:
            return None
        if now < self._open_until:
            return self._open_until - now
        if self._trial:
            return self._policy.reset_after_s
        self._trial = True
        return None

    def record(self, ok: bool, now: float) -> None:
        """Take note of how a call that was let through ended."""
        was_trial, self._trial = self._trial, False
        if ok:
            self._failures = 0
            self._open_until = None
            return
        self._failures += 1
        if was_trial or self._failures >= self._policy.failures:
            if self._open_until is None or was_trial:
                self.opened += 1
            self._open_until = now + self._policy.reset_after_s
