"""Retries of work on a database that is busy or cannot be reached."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from batchmill.errors import ConfigError, check_numbers
from batchmill.store.errors import StoreClosedError, StoreUnavailableError
from batchmill.waiters import back_off_ms

log = logging.getLogger("batchmill.store")

T = TypeVar("T")

_SILENT_S = 3.0
"""After so long without success, the log says that a database is waited for."""


class TransientError(Exception):
    """A fault that another try may not meet; its cause is the database's error. Internal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """When to try again what failed because the database could not be reached, or was busy.

    >>> RetryPolicy(give_up_after_s=10).max_ms
    5000
    """

    initial_ms: float = 50
    """The wait before the second try."""
    max_ms: float = 5000
    """The longest wait."""
    multiplier: float = 2
    """How much longer each wait is than the one before."""
    jitter: float = 0.2
    """The random share of each wait, so that writers do not come back in step."""
    give_up_after_s: float = 300
    """After this time a :class:`StoreUnavailableError` is raised."""

    def __post_init__(self) -> None:
        check_numbers(self, 0, "initial_ms", "max_ms", "give_up_after_s")
        check_numbers(self, 1, "multiplier")
        if not 0 <= self.jitter <= 1:
            raise ConfigError("jitter", self.jitter, "from 0 to 1")

    def delay_s(self, attempt: int, chance: float) -> float:
        """The wait after the ``attempt``-th try; ``chance`` is a random number from 0 to 1."""
        whole = back_off_ms(self.initial_ms, self.max_ms, self.multiplier, attempt) / 1000
        return whole * (1 - self.jitter * chance)


class Retrier:
    """Runs work until it succeeds, fails for good, or has been tried for too long."""

    def __init__(self, policy: RetryPolicy, url: str) -> None:
        self._policy = policy
        self._url = url
        self._closed = threading.Event()
        self.wait: Callable[[float], object] = self._closed.wait
        """Waits so many seconds, or until :meth:`close`; tests replace it."""

    def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which is called again when it raises :class:`TransientError`."""
        start = time.monotonic()
        attempt = 0
        warned = False
        while True:
            self.check_open()
            attempt += 1
            try:
                return work()
            except TransientError as error:
                cause = error.__cause__ or error
                spent = time.monotonic() - start
                delay = self._policy.delay_s(attempt, random.random())
                if spent + delay > self._policy.give_up_after_s:
                    why = " ".join(str(cause).split())
                    raise StoreUnavailableError(self._url, attempt, spent, why) from cause
                if spent + delay > _SILENT_S and not warned:
                    warned = True
                    log.warning(
                        "batchmill store %s cannot be used, trying again for %.0f s: %s",
                        self._url,
                        self._policy.give_up_after_s - spent,
                        " ".join(str(cause).split()),
                    )
            self.wait(delay)

    def check_open(self) -> None:
        """Raise :class:`StoreClosedError` after :meth:`close`."""
        if self._closed.is_set():
            raise StoreClosedError(self._url)

    def close(self) -> bool:
        """End every wait; False if it was closed already."""
        if self._closed.is_set():
            return False
        self._closed.set()
        return True
