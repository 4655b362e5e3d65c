"""The settings of a batcher and its policies: frozen, keyword-only, checked when made."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from batchmill.errors import ConfigError, check_ints, check_numbers
from batchmill.waiters import back_off_ms


@dataclass(frozen=True, slots=True)
class bisect:  # noqa: N801 - reads as a verb where it is used: on_batch_failure=bisect()
    """Split a failing batch in halves until the poison item is alone.

    A batch of n items with one poison item costs about 2 log2(n) more calls of the backend. The
    items of a half that succeeds are sent again only if the backend took them before it raised:
    use it with backends that fail as a whole, or that can take an item twice.
    """

    max_calls: int = 64
    """Calls for one batch at most (retries apart); past that, what is left fails together.

    Only the whole batch is retried, before it is split; its parts are sent once each.
    """

    def __post_init__(self) -> None:
        if self.max_calls < 3:
            raise ConfigError("max_calls", self.max_calls, "at least 3: the batch and its halves")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often and after which delay a batch is sent again when the backend raised."""

    max_attempts: int = 3
    """Calls for one batch in all."""
    initial_ms: float = 100
    """The first delay."""
    max_ms: float = 10_000
    """The longest delay."""
    multiplier: float = 2.0
    """How much longer each delay is than the one before."""
    jitter: float = 0.1
    """The share of a delay that is cut off at random."""
    retry_on: tuple[type[BaseException], ...] = (Exception,)
    """The errors that are worth another try."""

    def __post_init__(self) -> None:
        check_ints(self, 1, "max_attempts")
        check_numbers(self, 1, "multiplier")
        if not 0 < self.initial_ms <= self.max_ms:
            raise ConfigError("initial_ms", self.initial_ms, f"above 0, at most {self.max_ms:g}")
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
        check_ints(self, 1, "failures")
        if self.reset_after_s <= 0:
            raise ConfigError("reset_after_s", self.reset_after_s, "above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveConcurrency:
    """Start at ``least``; one more while answers stay quick, fewer at once when they slow down.

    ``max_in_flight`` is the upper limit. An answer is slow when it takes ``tolerance`` times as
    long as the quick answers of late.
    """

    least: int = 1
    tolerance: float = 2.0
    back_off: float = 0.7

    def __post_init__(self) -> None:
        check_ints(self, 1, "least")
        if self.tolerance <= 1:
            raise ConfigError("tolerance", self.tolerance, "above 1")
        if not 0 < self.back_off < 1:
            raise ConfigError("back_off", self.back_off, "between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatcherSettings:
    """The settings of a :class:`MicroBatcher`.

    >>> BatcherSettings(batch_size=10).linger_ms
    5
    """

    batch_size: int = 100
    """Items in a batch at most; that many are sent without waiting."""

    linger_ms: float = 5
    """How long the oldest item may wait for others, from when it was accepted; 0: not at all."""

    max_in_flight: int = 1
    """Batches with the backend at once. With one, batches keep the order of submission."""

    max_weight: float | None = None
    """Weight of a batch at most (bytes, rows: what ``weigh`` says). A heavier item goes alone."""

    weigh: Callable[[Any], float] | None = None
    """The weight of an item; needed with ``max_weight``."""

    on_batch_failure: bisect | None = None
    """What to do with a batch that failed as a whole; None: all its items fail."""

    retry: RetryPolicy | None = None
    """Whether and when a failed batch is sent again."""

    key: Callable[[Any], Hashable] | None = None
    """An item's identity: equal keys that wait or are in flight are sent once, and all answered."""

    breaker: BreakerPolicy | None = None
    """When to stop calling a backend that keeps failing."""

    adaptive: AdaptiveConcurrency | None = None
    """Whether the number of batches in flight follows the backend's speed."""

    close_timeout_s: float = 30
    """How long leaving a ``with`` block, or the interpreter's exit, waits for the rest."""

    def __post_init__(self) -> None:
        check_ints(self, 1, "batch_size", "max_in_flight")
        check_numbers(self, 0, "linger_ms", "close_timeout_s")
        if self.max_weight is not None:
            if not self.max_weight > 0:
                raise ConfigError("max_weight", self.max_weight, "above 0")
            if self.weigh is None:
                raise ConfigError("weigh", None, "a callable from item to weight, for max_weight")
        for name in ("weigh", "key"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise ConfigError(name, function, "a callable that takes an item")
