"""How much waits for the broker, against how much may; who may come in.

Guarantees
    * Between ``admit`` and ``settle`` a batch counts as waiting: what waits is at most the capacity
      and one batch more.
    * After a failure nobody is let in for a while, then one batch, and so on until the broker has
      acknowledged something: a dead broker does not keep every sender waiting.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from batchmill.kafka.settings import MIB, KafkaSettings
from batchmill.pressure import (
    EventKind,
    QueueThresholdEvent,
    QueueThresholdManager,
    QueueThresholdSettings,
)
from batchmill.spool import Judgement, Level, Measure, Overloaded, SpoolClosedError

log = logging.getLogger("batchmill.kafka")

_FULL = 1000
"""What a full queue counts as: its fill is in thousandths, of rows or of bytes."""


@dataclass
class Counts:
    """Rows and messages since the start."""

    submitted_rows: int = 0
    written_rows: int = 0
    failed_rows: int = 0
    refused_rows: int = 0
    messages: int = 0
    written_bytes: int = 0
    refused: dict[Level, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)


class Load:
    """What waits for the broker. Any thread may ask."""

    def __init__(
        self, name: str, settings: KafkaSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._rows = self._bytes = 0
        self._counts = Counts()
        self._fault = ""
        self._held_until = 0.0
        self._calm = True
        self._config = QueueThresholdSettings(
            max_queue_size=_FULL,
            listeners=(functools.partial(_log, name),),
            synchronous_listeners=True,  # a line in the log: not worth a thread
        )
        self._alarm = QueueThresholdManager(self._config, lambda: 0, name="kafka")

    def check(self, rows: int) -> None:
        """Raise Overloaded if nothing may come in now, before any work is done for ``rows``."""
        with self._lock:
            judged = self._checked(rows)
        self._refuse(judged)

    def admit(self, rows: int, size: int) -> None:
        """Take note of a batch that wants in; raises Overloaded or SpoolClosedError instead."""
        with self._lock:
            judged = self._checked(rows)
            if judged.level < Level.CRITICAL:
                if self._fault:  # the only one for a while
                    self._held_until = self._clock() + self._settings.retry_after_s
                self._counts.submitted_rows += rows
                self._rows += rows
                self._bytes += size
        self._refuse(judged)
        self._tell()

    def settle(self, rows: int, size: int, messages: int, failure: str = "") -> None:
        """A batch that was let in is in the topic; or it is not, for the reason given."""
        with self._lock:
            self._rows -= rows
            self._bytes -= size
            counts = self._counts
            if failure:
                counts.failed_rows += rows
                counts.failures[failure] = counts.failures.get(failure, 0) + 1
            else:
                counts.written_rows += rows
                counts.messages += messages
                counts.written_bytes += size
            well = bool(self._fault) and not failure
            if well:
                self._fault = ""
        if well:
            log.warning("%s takes messages again", self._name)
        self._tell()

    def failed(self, why: str) -> None:
        """The broker did not take something, and may not take more."""
        with self._lock:
            news = not self._fault
            self._fault = why
            self._held_until = self._clock() + self._settings.retry_after_s
        if news:
            log.error("%s; senders are told to wait until that is over", why)

    def judge(self) -> Judgement:
        """The level of this moment, and why."""
        with self._lock:
            return self._judged()

    def level(self) -> Level:
        """The level of this moment."""
        with self._lock:
            return self._level()

    def close(self) -> None:
        """Let nobody in any more."""
        with self._lock:
            self._closed = True

    def end(self) -> None:
        """Nothing will be told any more."""
        self._alarm.close()

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._closed

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        with self._lock:
            return not self._rows

    def snapshot(self) -> tuple[Level, Counts, int, int]:
        """The level, the counters, and the rows and bytes that wait.

        As long as the broker takes nothing that is CRITICAL, also at the moments when one batch is
        let in to try.
        """
        with self._lock:
            level = max(self._level(), Level.CRITICAL) if self._fault else self._level()
            counts = Counts(**vars(self._counts))
            counts.refused, counts.failures = dict(counts.refused), dict(counts.failures)
            return level, counts, self._rows, self._bytes

    def measures(self) -> tuple[Measure, ...]:
        """What makes the level, beside a broker that is away."""
        with self._lock:
            rows, size = self._rows, self._bytes
        return (
            Measure.of_capacity("queue rows", rows, self._settings.capacity_rows),
            Measure.of_capacity("queue bytes", size, self._settings.capacity_bytes),
        )

    def _fill(self) -> int:
        by_rows = self._rows * _FULL // self._settings.capacity_rows
        return max(by_rows, self._bytes * _FULL // self._settings.capacity_bytes)

    def _level(self) -> Level:
        level = Level(self._config.thresholds.level_at(self._fill()) or 0)
        held = bool(self._fault) and self._clock() < self._held_until
        return max(level, Level.CRITICAL) if held else level

    def _judged(self) -> Judgement:
        level = self._level()
        if level < Level.CRITICAL:
            return Judgement(level)
        reasons = [self._fault] if self._fault else []
        if self._fill() >= _FULL:
            settings = self._settings
            reasons.append(
                f"{self._rows:,} spans ({self._bytes / MIB:,.1f} MiB) wait for the broker of "
                f"{self._name}, with {settings.capacity_rows:,} spans and "
                f"{settings.capacity_bytes / MIB:,.1f} MiB allowed"
            )
        patience = self._settings.retry_after_s * (2 if level is Level.CRITICAL_PLUS else 1)
        return Judgement(level, "; ".join(reasons), patience)

    def _checked(self, rows: int) -> Judgement:
        if self._closed:
            raise SpoolClosedError(self._name)
        judged = self._judged()
        if judged.level >= Level.CRITICAL:
            counts = self._counts
            counts.refused[judged.level] = counts.refused.get(judged.level, 0) + 1
            counts.refused_rows += rows
        return judged

    def _refuse(self, judged: Judgement) -> None:
        if judged.level >= Level.CRITICAL:
            raise Overloaded(judged.level, judged.retry_after_s, judged.why)

    def _tell(self) -> None:
        """Have the log told of a level that is entered or left; cheap while all is calm."""
        with self._lock:
            fill = self._fill()
        if self._calm and fill < self._config.warning_threshold:
            return
        self._alarm.observe(fill)
        self._calm = self._alarm.stats().level is None


def _log(name: str, event: QueueThresholdEvent[Any]) -> None:
    if event.kind is EventKind.ENTERED:
        refusing = "; senders are told to wait" if event.level >= Level.CRITICAL else ""
        log.warning("what waits for %s: %s%s", name, event.level.name, refusing)
    elif event.kind is EventKind.LEFT:
        log.info("what waits for %s: no longer %s", name, event.level.name)
