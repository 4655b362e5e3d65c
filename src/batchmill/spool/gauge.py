"""How full a sink is, and whether it may accept another batch: for the spool and for Kafka.

Guarantees
    * Between ``admit`` and ``settle`` a batch counts as waiting: what waits is at most the capacity
      and one batch more.
    * After a failed write nothing is accepted for ``retry_after_s``, then one batch, and so on
      until a write succeeds: senders do not all wait for a disk or a broker that is down, and its
      recovery is noticed.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchmill.files import free_bytes
from batchmill.lifecycle import Closing
from batchmill.pressure import (
    EventKind,
    QueueThresholdEvent,
    QueueThresholdManager,
    QueueThresholdSettings,
)
from batchmill.spool.segment import Unread, UnreadScan
from batchmill.spool.sink import (
    Level,
    Measure,
    Overloaded,
    Pressure,
    SinkSettings,
    SinkStats,
    SpoolClosedError,
    SpoolSettings,
)
from batchmill.wording import count_of

_SCAN_EVERY_S = 0.1
_SCAN_SHARE = 20
"""A scan of the folder that took 10 ms is not repeated before 200 ms have passed."""
_CALM = {level: Pressure(level) for level in (Level.NORMAL, Level.WARNING)}


class Depth:
    """A number with thresholds; logs each level that it enters or leaves, once."""

    def __init__(
        self,
        name: str,
        log: Callable[..., None],
        warning: int,
        critical: int,
        critical_plus: int,
    ) -> None:
        self.name = name
        self.value = 0
        settings = QueueThresholdSettings(
            max_queue_size=critical,
            warning_threshold=warning,
            critical_threshold=critical,
            critical_plus_threshold=critical_plus,
            listeners=(functools.partial(log, name),),
            synchronous_listeners=True,  # a log line is not worth a thread
        )
        self._thresholds = settings.thresholds
        self._log = QueueThresholdManager(settings, lambda: self.value, name=name)

    @classmethod
    def of_capacity(cls, name: str, log: Callable[..., None], capacity: int) -> Depth:
        """WARNING at half of the capacity, CRITICAL at all of it, CRITICAL_PLUS at half more."""
        return cls(name, log, (capacity + 1) // 2, capacity, (3 * capacity + 1) // 2)

    @property
    def level(self) -> int:
        """The level of the value; 0 below all of them."""
        return self._thresholds.level_at(self.value) or 0

    @property
    def is_calm(self) -> bool:
        """Whether no level holds, as far as it was logged."""
        return self._log.stats().level is None

    def measure(self) -> Measure:
        """The value, and where its levels begin."""
        levels = self._thresholds
        return Measure(self.name, self.value, levels.warning, levels.critical, levels.critical_plus)

    def report(self) -> None:
        """Log a level that the value has entered or left."""
        self._log.observe(self.value)

    def close(self) -> None:
        """Log nothing more."""
        self._log.close()


class Backlog:
    """What is stored and not read yet, as far as it counts towards the level of its sink.

    This one is empty: how much of a topic is unread is the broker's business.
    """

    depths: tuple[Depth, ...] = ()

    def refresh(self) -> bool:
        """Look again, if it is time to; whether it did."""
        return False

    def reasons(self) -> list[str]:
        """Why batches must be refused; empty if they need not be."""
        return []

    def reset(self) -> None:
        """Begin anew, in a forked child."""


class Gauge:
    """How full a sink is: what waits in memory, and its backlog. Thread-safe.

    ``kind`` and ``name`` say which sink it is; ``unit`` and ``waiting`` say in messages what waits
    in it and for what.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        settings: SinkSettings,
        backlog: Backlog | None = None,
        *,
        unit: str,
        waiting: str,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = f"{kind} {name}"
        self._name = name
        self._settings = settings
        self._backlog = backlog or Backlog()
        self._unit = unit
        self._waiting = waiting
        self._log = log
        self._clock = clock
        log_level = functools.partial(log_levels, log, self._title)
        self._rows = Depth.of_capacity("queue rows", log_level, settings.capacity_rows)
        self._bytes = Depth.of_capacity("queue bytes", log_level, settings.capacity_bytes)
        self._depths = (self._rows, self._bytes, *self._backlog.depths)
        self._closed = False
        self.reset()

    def reset(self) -> None:
        """Begin anew, in a forked child: what waits, and the counters, are the parent's."""
        self._backlog.reset()
        self._lock = threading.Lock()
        self._submitted = self._written = self._failed = self._refused_rows = 0
        self._refused: dict[Level, int] = {}
        self._rows.value = self._bytes.value = 0
        self._fault = ""
        self._fault_until = 0.0
        self._calm = True

    def check(self, rows: int) -> None:
        """Raise Overloaded if nothing is accepted now, before any work is done for ``rows``."""
        self._refresh()
        with self._lock:
            pressure = self._checked(rows)
        _raise_if_overloaded(pressure)

    def admit(self, rows: int, size: int, *, accepted: bool = False) -> None:
        """Count a batch as waiting; raises Overloaded or SpoolClosedError if it is refused.

        What was ``accepted`` before is refused at no level.
        """
        self._refresh()
        with self._lock:
            pressure = self._closed_or_calm() if accepted else self._checked(rows)
            if pressure.level < Level.CRITICAL:
                if self._fault:  # the only one to try for a while
                    self._fault_until = self._clock() + self._settings.retry_after_s
                self._submitted += rows
                self._rows.value += rows
                self._bytes.value += size
        self._report()
        _raise_if_overloaded(pressure)

    def settle(self, rows: int, size: int, *, stored: bool) -> None:
        """Count a batch that was admitted as stored, or as failed."""
        with self._lock:
            self._rows.value -= rows
            self._bytes.value -= size
            if stored:
                self._written += rows
            else:
                self._failed += rows
            recovered = stored and bool(self._fault)
            if recovered:
                self._fault = ""
        if recovered:
            self._log.warning("%s: writing works again", self._title)
        self._report()

    def fail(self, why: str) -> None:
        """Refuse batches for a while, since a write has failed."""
        with self._lock:
            is_first = not self._fault
            self._fault = why
            self._fault_until = self._clock() + self._settings.retry_after_s
        if is_first:
            self._log.error("%s; batches are refused until writing works again", why)

    def level(self) -> Level:
        """The level of this moment."""
        self._refresh()
        with self._lock:
            return self._level()

    def pressure(self) -> Pressure:
        """The level of this moment and, where batches are refused, why."""
        self._refresh()
        with self._lock:
            return self._pressure()

    def measures(self) -> tuple[Measure, ...]:
        """The numbers that make the level; a failed write and a full disk are CRITICAL, too."""
        self._refresh()
        with self._lock:
            return tuple(depth.measure() for depth in self._depths)

    def stats(self) -> SinkStats:
        """The level, what waits, and the counters since the start."""
        self._refresh()
        with self._lock:
            return SinkStats(
                level=self._level(),
                submitted_rows=self._submitted,
                written_rows=self._written,
                failed_rows=self._failed,
                refused_rows=self._refused_rows,
                refused=dict(self._refused),
                queue_rows=self._rows.value,
                queue_bytes=self._bytes.value,
            )

    @property
    def fault(self) -> str:
        """Why the last write failed; empty if it did not."""
        return self._fault

    @property
    def closed(self) -> bool:
        """Whether nothing is accepted any more."""
        return self._closed

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        with self._lock:
            return not self._rows.value

    def close(self) -> None:
        """Accept nothing more; what waits can still be settled."""
        with self._lock:
            self._closed = True

    def end(self) -> None:
        """Log no more levels: all is settled."""
        for depth in self._depths:
            depth.close()

    def _level(self) -> Level:
        worst = max([depth.level for depth in self._depths])
        if worst < Level.CRITICAL and (self._fault_holds() or self._backlog.reasons()):
            return Level.CRITICAL
        return Level(worst) if worst else Level.NORMAL

    def _fault_holds(self) -> bool:
        return bool(self._fault) and self._clock() < self._fault_until

    def _pressure(self) -> Pressure:
        level = self._level()
        if level < Level.CRITICAL:
            return _CALM[level]
        reasons = [self._fault] if self._fault else []
        reasons += self._backlog.reasons()
        settings = self._settings
        if max(self._rows.level, self._bytes.level) >= Level.CRITICAL:
            reasons.append(
                f"{count_of(self._rows.value, self._unit)} ({mib(self._bytes.value)}) waiting "
                f"{self._waiting}, with {count_of(settings.capacity_rows, self._unit)} and "
                f"{mib(settings.capacity_bytes)} allowed"
            )
        retry_after_s = settings.retry_after_s * (2 if level is Level.CRITICAL_PLUS else 1)
        return Pressure(level, "; ".join(reasons), retry_after_s)

    def _closed_or_calm(self) -> Pressure:
        if self._closed:
            raise SpoolClosedError(self._name)
        return _CALM[Level.NORMAL]

    def _checked(self, rows: int) -> Pressure:
        """The pressure a batch meets; counts it as refused where it is."""
        self._closed_or_calm()
        pressure = self._pressure()
        if pressure.level >= Level.CRITICAL:
            self._refused[pressure.level] = self._refused.get(pressure.level, 0) + 1
            self._refused_rows += rows
        return pressure

    def _refresh(self) -> None:
        if self._backlog.refresh():
            self._report()

    def _report(self) -> None:
        """Log levels that were entered or left; cheap while all depths are below WARNING."""
        if self._calm and max([depth.level for depth in self._depths]) == 0:
            return
        for depth in self._depths:
            depth.report()
        self._calm = all(depth.is_calm for depth in self._depths)


class GaugedSink(Closing):
    """What the spool and Kafka's sink have in common: a gauge, and being a context manager."""

    takes_packed: bool = False
    _gauge: Gauge

    def level(self) -> Level:
        """The level of this moment: from CRITICAL on, batches are refused. Cheap."""
        return self._gauge.level()

    def pressure(self) -> Pressure:
        """The level of this moment; from CRITICAL on also why, and when to try again."""
        return self._gauge.pressure()

    def measures(self) -> tuple[Measure, ...]:
        """The numbers that make the level of this moment, and where their levels begin."""
        return self._gauge.measures()

    @property
    def closed(self) -> bool:
        """Whether it accepts no more batches."""
        return self._gauge.closed


class SegmentBacklog(Backlog):
    """The segments in a spool's folder that the pipeline has not read, and the room on its disk.

    The folder is scanned every 100 ms at most, and for at most a twentieth of the time. What this
    process writes in between is counted at once.
    """

    def __init__(
        self,
        folder: Path,
        settings: SpoolSettings,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._log = log
        self._clock = clock
        self._depth = Depth(
            "unread bytes",
            functools.partial(log_levels, log, f"spool {folder}"),
            settings.unread_warning,
            settings.unread_critical,
            settings.unread_critical_plus,
        )
        self.depths = (self._depth,)
        self.reset()

    def reset(self) -> None:
        """Begin anew, in a forked child."""
        self._lock = threading.Lock()
        self._scanning = threading.Lock()
        self._scan = UnreadScan(self._folder)
        self._written_meanwhile = 0
        self._next_scan = float("-inf")
        self._depth.value = 0
        self.unread = Unread(0, 0, 0.0)
        self.free: int | None = None
        """Bytes left on the disk; None where the system does not tell."""
        self.segments = self.written_bytes = 0

    def wrote(self, size: int) -> None:
        """Count a segment of ``size`` bytes that this process has just written."""
        with self._lock:
            self._written_meanwhile += size
            self.segments += 1
            self.written_bytes += size
            unread = self.unread
            self._set(Unread(unread.segments + 1, unread.bytes + size, unread.oldest_s))

    def refresh(self) -> bool:
        """Scan the folder, if that is due and no other thread is doing it; whether it was."""
        if self._clock() < self._next_scan or not self._scanning.acquire(blocking=False):
            return False
        try:
            started = self._clock()
            with self._lock:
                self._written_meanwhile = 0
            try:
                unread, free = self._scan.scan(time.time()), free_bytes(self._folder)
            except OSError as error:  # the numbers of the last scan stay
                self._log.warning("spool %s cannot be scanned: %s", self._folder, error)
                unread, free = None, None
            ended = self._clock()
            with self._lock:
                if unread is not None:
                    # What was written meanwhile may be counted twice, until the next scan.
                    total = unread.bytes + self._written_meanwhile
                    self._set(Unread(unread.segments, total, unread.oldest_s))
                    self.free = free
                self._next_scan = ended + max(_SCAN_EVERY_S, _SCAN_SHARE * (ended - started))
        finally:
            self._scanning.release()
        return True

    def reasons(self) -> list[str]:
        """Why batches must be refused: the disk is nearly full, or too much is unread."""
        settings, free, unread = self._settings, self.free, self._depth.value
        reasons = []
        if free is not None and free < settings.min_free_bytes:
            reasons.append(
                f"the spool's disk has {mib(free)} left, and "
                f"{mib(settings.min_free_bytes)} must stay free (min_free_bytes)"
            )
        if unread >= settings.unread_critical:
            reasons.append(
                f"{mib(unread)} of segments are not read yet, with "
                f"{mib(settings.unread_critical)} allowed: the pipeline is behind, or stopped"
            )
        return reasons

    def _set(self, unread: Unread) -> None:
        self.unread = unread
        self._depth.value = unread.bytes


def mib(size: int) -> str:
    """A number of bytes, for messages."""
    return f"{size / (1 << 20):,.1f} MiB"


def log_levels(log: logging.Logger, title: str, name: str, event: QueueThresholdEvent[Any]) -> None:
    """Log that the depth ``name`` of a sink has entered or left a level."""
    if event.kind is EventKind.ENTERED:
        refusing = "; batches are refused" if event.level >= Level.CRITICAL else ""
        log.warning("%s: %s: %s%s", title, name, event.level.name, refusing)
    elif event.kind is EventKind.LEFT:
        log.info("%s: %s: no longer %s", title, name, event.level.name)


def _raise_if_overloaded(pressure: Pressure) -> None:
    if pressure.level >= Level.CRITICAL:
        raise Overloaded(pressure.level, pressure.retry_after_s, pressure.why)
