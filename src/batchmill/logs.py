"""The log of a command: on the standard error output, with a limit for what repeats."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from batchmill.wording import count_of

_MAX_KINDS = 200
"""Kinds of messages that are counted on their own; beyond it, those of a logger are one kind."""


def configure_logs(*, verbose: bool, form: str = "%(asctime)s %(levelname)s %(message)s") -> None:
    """Log warnings, or more, with a limit for each kind of message.

    Where the log is set up already, by who calls the command in a process of theirs, it stays.
    """
    before = set(logging.getLogger().handlers)
    logging.basicConfig(format=form, level=logging.INFO if verbose else logging.WARNING)
    for handler in set(logging.getLogger().handlers) - before:
        limit = LogLimit(handler.handle)
        handler.addFilter(limit)
        atexit.register(limit.flush)


@dataclass(slots=True)
class _Kind:
    """A kind of messages in the current period."""

    began: float
    passed: int = 0
    record: logging.LogRecord | None = None
    """The newest that was left out."""
    left_out: int = 0


class LogLimit(logging.Filter):
    """Lets ``burst`` messages of each kind through in ``period_s``, then says how many more came.

    Messages are of one kind if they have the same logger, level and text before its arguments are
    filled in: a stranger who can cause a message a thousand times a second causes a few lines a
    minute. Any thread may log.
    """

    def __init__(
        self,
        write: Callable[[logging.LogRecord], object],
        *,
        burst: int = 5,
        period_s: float = 60.0,
    ) -> None:
        """``write`` gets the records that say how many were left out."""
        super().__init__()
        self._write = write
        self._burst = burst
        self._period_s = period_s
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int, str], _Kind] = {}
        self._timer: threading.Timer | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a message is written."""
        if getattr(record, "counted", False):
            return True
        now = time.monotonic()
        key = (record.name, record.levelno, str(record.msg))
        with self._lock:
            if key not in self._kinds and len(self._kinds) >= _MAX_KINDS:
                key = (record.name, record.levelno, "")
            kind = self._kinds.setdefault(key, _Kind(now))
            if now - kind.began >= self._period_s and not kind.left_out:
                kind.began, kind.passed = now, 0
            if kind.passed < self._burst:
                kind.passed += 1
                return True
            kind.record = record
            kind.left_out += 1
            if self._timer is None:
                self._timer = threading.Timer(self._period_s, self.flush)
                self._timer.name = "batchmill-log"
                self._timer.daemon = True
                self._timer.start()
        return False

    def flush(self) -> None:
        """Say how many messages were left out, and begin a new period."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            kinds, self._kinds = self._kinds, {}
        for kind in kinds.values():
            if kind.record is not None:
                self._write(_counted(kind.record, kind.left_out, self._period_s))


def _counted(last: logging.LogRecord, count: int, period_s: float) -> logging.LogRecord:
    """A record that stands for those that were left out; without their traceback."""
    text = f"{count_of(count, 'message')} like this in {period_s:g} s: {last.getMessage()}"
    record = logging.LogRecord(last.name, last.levelno, last.pathname, last.lineno, text, (), None)
    record.counted = True
    return record
