"""How much waits and how much is unread, kept up to date; who may come in.

Guarantees
    * Between ``admit`` and ``settle`` a batch counts as waiting, in memory: what waits is at most
      the capacity and one batch more.
    * A look at the folder takes place at most every 100 ms, and takes at most a twentieth of the
      time; what this process writes in between is counted at once.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill import lifecycle
from batchmill.pressure import (
    EventKind,
    QueueThresholdEvent,
    QueueThresholdManager,
    QueueThresholdSettings,
)
from batchmill.spool.backlog import Unread, UnreadScan, free_bytes
from batchmill.spool.errors import Overloaded
from batchmill.spool.level import Level
from batchmill.spool.settings import SpoolSettings
from batchmill.spool.thresholds import Fault, Judgement, Load, Measure, Thresholds

log = logging.getLogger("batchmill.spool")

_LOOK_EVERY_S = 0.1
_LOOK_SHARE = 20
"""A look that took 10 ms is not repeated before 200 ms have passed."""


@dataclass
class Counts:
    """Rows and batches since the start."""

    submitted_rows: int = 0
    written_rows: int = 0
    failed_rows: int = 0
    refused_rows: int = 0
    segments: int = 0
    written_bytes: int = 0


class Gauge:
    """The depth of a spool, in memory and on the disk. Any thread may ask."""

    fork_order = 1

    def __init__(
        self,
        folder: Path,
        settings: SpoolSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._clock = clock
        self._thresholds = Thresholds(settings)
        self._alarms = (
            _alarm(self._thresholds.queue, f"{folder}: what waits to be written"),
            _alarm(self._thresholds.unread, f"{folder}: what the pipeline has not read"),
        )
        self._reset()
        lifecycle.track(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self.counts = Counts()
        self.refused: dict[Level, int] = {}
        self._rows = self._bytes = 0
        self._fault = Fault(self._settings.retry_after_s)
        self._scan = UnreadScan(self._folder)
        self._unread = Unread(0, 0, 0.0)
        self._free: int | None = None
        self._added = 0
        self._next_look = float("-inf")
        self._calm = True

    def admit(self, rows: int, weight: int) -> None:
        """Take note of a batch that wants in; raises Overloaded if it may not."""
        self._look()
        with self._lock:
            now = self._clock()
            load = self._load(now)
            judgement = self._thresholds.judge(load)
            if judgement.level < Level.CRITICAL:
                self._fault.admitted(now)
                self.counts.submitted_rows += rows
                self._rows += rows
                self._bytes += weight
            else:
                self.refused[judgement.level] = self.refused.get(judgement.level, 0) + 1
                self.counts.refused_rows += rows
        self._tell(load)
        if judgement.level >= Level.CRITICAL:
            raise Overloaded(judgement.level, judgement.retry_after_s, judgement.why)

    def settle(self, rows: int, weight: int, written: bool) -> None:
        """A batch that was let in is on the disk, or will never be."""
        with self._lock:
            self._rows -= rows
            self._bytes -= weight
            if written:
                self.counts.written_rows += rows
            else:
                self.counts.failed_rows += rows
            load = self._load(self._clock())
        self._tell(load)

    def wrote(self, count: int) -> None:
        """A segment of ``count`` bytes is on the disk."""
        with self._lock:
            self._added += count
            seen = self._unread
            self._unread = Unread(seen.segments + 1, seen.bytes + count, seen.oldest_s)
            self.counts.segments += 1
            self.counts.written_bytes += count
            well = self._fault.cleared()
        if well:
            log.warning("batchmill spool %s: segments can be written again", self._folder)

    def failed(self, why: str) -> None:
        """A segment could not be written."""
        with self._lock:
            news = not self._fault.why
            self._fault.failed(why, self._clock())
        if news:
            log.error("batchmill spool: %s; batches are refused until that is over", why)

    def judge(self) -> Judgement:
        """The level of this moment, and why."""
        self._look()
        with self._lock:
            return self._thresholds.judge(self._load(self._clock()))

    def level(self) -> Level:
        """The level of this moment."""
        self._look()
        with self._lock:
            return self._thresholds.level(self._load(self._clock()))

    def measures(self) -> tuple[Measure, ...]:
        """What makes the level of this moment."""
        self._look()
        with self._lock:
            load = self._load(self._clock())
        return self._thresholds.measures(load)

    def snapshot(self) -> tuple[Counts, dict[Level, int], int, int, Unread, int | None]:
        """Counters, refusals by level, rows and bytes that wait, what is unread, room left."""
        self._look()
        with self._lock:
            counts = Counts(**vars(self.counts))
            return counts, dict(self.refused), self._rows, self._bytes, self._unread, self._free

    def close(self) -> None:
        """Nothing will be told any more."""
        for alarm in self._alarms:
            alarm.close()

    def begin_close(self) -> None:
        """At exit there is nothing to do: the batchers close themselves."""

    def await_close(self) -> None:
        """At exit there is nothing to wait for."""

    def after_fork_in_child(self) -> None:
        """What waits is the parent's, and so are its counts."""
        self._reset()

    def _load(self, now: float) -> Load:
        fault = self._fault.why if self._fault.holds(now) else ""
        return Load(self._rows, self._bytes, self._unread.bytes, self._free, fault)

    def _look(self) -> None:
        """Look at the folder, if that is due and nobody else is just doing it."""
        if self._clock() < self._next_look or not self._looking.acquire(blocking=False):
            return
        try:
            began = self._clock()
            with self._lock:
                self._added = 0
            try:
                seen, free = self._scan.look(time.time()), free_bytes(self._folder)
            except OSError as error:  # what was seen before has to do
                log.warning("batchmill spool %s cannot be looked at: %s", self._folder, error)
                seen, free = None, None
            ended = self._clock()
            with self._lock:
                if seen is not None:
                    # What was written meanwhile may be counted twice, until the next look.
                    self._unread = Unread(seen.segments, seen.bytes + self._added, seen.oldest_s)
                    self._free = free
                self._next_look = ended + max(_LOOK_EVERY_S, _LOOK_SHARE * (ended - began))
                load = self._load(ended)
        finally:
            self._looking.release()
        self._tell(load)

    def _tell(self, load: Load) -> None:
        """Have the log told of a level that is entered or left; cheap while all is calm."""
        if self._calm and self._thresholds.level(load) is Level.NORMAL:
            return
        queue, unread = self._alarms
        queue.observe(self._thresholds.fill(load))
        unread.observe(load.unread)
        self._calm = all(alarm.stats().level is None for alarm in self._alarms)


def _alarm(config: QueueThresholdSettings, what: str) -> QueueThresholdManager:
    """Tells the log when a level is entered or left, once each."""
    told = QueueThresholdSettings(
        max_queue_size=config.max_queue_size,
        warning_threshold=config.warning_threshold,
        critical_threshold=config.critical_threshold,
        critical_plus_threshold=config.critical_plus_threshold,
        listeners=(functools.partial(_log, what),),
        synchronous_listeners=True,  # a line in the log: not worth a thread
    )
    return QueueThresholdManager(told, lambda: 0, name="spool")


def _log(what: str, event: QueueThresholdEvent[Any]) -> None:
    if event.kind is EventKind.ENTERED:
        refusing = "; batches are refused" if event.level >= Level.CRITICAL else ""
        log.warning("batchmill spool %s: %s%s", what, event.level.name, refusing)
    elif event.kind is EventKind.LEFT:
        log.info("batchmill spool %s: no longer %s", what, event.level.name)
