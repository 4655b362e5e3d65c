"""The settings of a batcher: frozen, keyword-only, checked when made."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from batchmill.batcher.adaptive import AdaptiveConcurrency
from batchmill.batcher.failure import BreakerPolicy, RetryPolicy, bisect
from batchmill.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatcherSettings:
    """The settings of a :class:`MicroBatcher`.

    >>> BatcherSettings(batch_size=10).linger_ms
    5
    """

    batch_size: int = 100
    """Items in a batch at most; that many are sent without waiting."""

    linger_ms: float = 5
    """How long the oldest item may wait for company, from when it was accepted; 0: not at all."""

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
        for name in ("batch_size", "max_in_flight"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, value, "a whole number of at least 1")
        if not isinstance(self.linger_ms, (int, float)) or not self.linger_ms >= 0:
            raise ConfigError("linger_ms", self.linger_ms, "a number of at least 0")
        if self.max_weight is not None:
            if not self.max_weight > 0:
                raise ConfigError("max_weight", self.max_weight, "above 0")
            if self.weigh is None:
                raise ConfigError("weigh", None, "a callable from item to weight, for max_weight")
        for name in ("weigh", "key"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise ConfigError(name, function, "a callable that takes an item")
        if not self.close_timeout_s >= 0:
            raise ConfigError("close_timeout_s", self.close_timeout_s, "at least 0")
