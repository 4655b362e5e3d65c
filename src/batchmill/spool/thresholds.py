"""How much waits, against how much may: a level, and why. No lock, no clock, no disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from batchmill.pressure import QueueThresholdSettings
from batchmill.spool.level import Level
from batchmill.spool.settings import SpoolSettings

_FULL = 1000
"""What a full queue counts as: its fill is in thousandths, of rows or of bytes."""


class Load(NamedTuple):
    """What there is at one moment."""

    rows: int
    """Rows taken and not written."""
    bytes: int
    """What they weigh."""
    unread: int
    """Bytes of segments that the pipeline has not read."""
    free: int | None
    """Bytes left on the disk; None where nobody can tell."""
    fault: str = ""
    """Why the last segment could not be written, while nobody may try again yet."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The level of a load, and what a sender who is refused hears."""

    level: Level
    why: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measure:
    """One of the depths that make the level, and where its levels begin."""

    name: str
    value: int
    warning: int
    critical: int
    critical_plus: int

    @classmethod
    def of_capacity(cls, name: str, value: int, capacity: int) -> Measure:
        """Of what waits in memory: half of the capacity is WARNING, all of it CRITICAL."""
        share = QueueThresholdSettings(max_queue_size=_FULL).thresholds
        levels = (share.warning, share.critical, share.critical_plus)
        # The first value that reaches the level: fill is a whole number of thousandths.
        return cls(name, value, *(-(-each * capacity // _FULL) for each in levels))


_CALM = {level: Judgement(level) for level in (Level.NORMAL, Level.WARNING)}


class Thresholds:
    """The levels of a load: the worst of queue, unread bytes and disk."""

    def __init__(self, settings: SpoolSettings) -> None:
        self._settings = settings
        self.queue = QueueThresholdSettings(max_queue_size=_FULL)
        self.unread = QueueThresholdSettings(
            max_queue_size=settings.unread_critical,
            warning_threshold=settings.unread_warning,
            critical_threshold=settings.unread_critical,
            critical_plus_threshold=settings.unread_critical_plus,
        )

    def fill(self, load: Load) -> int:
        """How full the queue is, in thousandths."""
        settings = self._settings
        by_rows = load.rows * _FULL // settings.capacity_rows
        return max(by_rows, load.bytes * _FULL // settings.capacity_bytes)

    def level(self, load: Load) -> Level:
        """The level of a load."""
        fill = self.fill(load)
        worst = 0
        if fill >= self.queue.warning_threshold or load.unread >= self.unread.warning_threshold:
            worst = max(
                self.queue.thresholds.level_at(fill) or 0,
                self.unread.thresholds.level_at(load.unread) or 0,
            )
        if worst < Level.CRITICAL and (load.fault or self._short(load)):
            return Level.CRITICAL
        return Level(worst) if worst else Level.NORMAL

    def judge(self, load: Load) -> Judgement:
        """The level of a load, and, where that refuses, why."""
        level = self.level(load)
        if level < Level.CRITICAL:
            return _CALM[level]
        patience = self._settings.retry_after_s * (2 if level is Level.CRITICAL_PLUS else 1)
        return Judgement(level, "; ".join(self._reasons(load)), patience)

    def measures(self, load: Load) -> tuple[Measure, ...]:
        """The depths of a load, each with where its levels begin; the level is the worst of them,
        or CRITICAL while the disk is short or broken."""
        settings, unread = self._settings, self.unread.thresholds
        return (
            Measure.of_capacity("queue rows", load.rows, settings.capacity_rows),
            Measure.of_capacity("queue bytes", load.bytes, settings.capacity_bytes),
            Measure(
                *("unread bytes", load.unread),
                *(unread.warning, unread.critical, unread.critical_plus),
            ),
        )

    def _short(self, load: Load) -> bool:
        return load.free is not None and load.free < self._settings.min_free_bytes

    def _reasons(self, load: Load) -> list[str]:
        settings = self._settings
        reasons = []
        if load.fault:
            reasons.append(load.fault)
        if self._short(load):
            reasons.append(
                f"the spool's disk has {_mib(load.free or 0)} left, and "
                f"{_mib(settings.min_free_bytes)} must stay free (min_free_bytes)"
            )
        if load.unread >= settings.unread_critical:
            reasons.append(
                f"{_mib(load.unread)} of segments are not read yet, with "
                f"{_mib(settings.unread_critical)} allowed: the pipeline is behind, or stopped"
            )
        if self.fill(load) >= _FULL:
            reasons.append(
                f"{load.rows:,} rows ({_mib(load.bytes)}) wait to be written, with "
                f"{settings.capacity_rows:,} rows and {_mib(settings.capacity_bytes)} allowed"
            )
        return reasons


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


class Fault:
    """A disk that refused a segment: nobody may try for a while, then one may.

    Without that, everybody would be let in only to fail; and with no try at all nobody would
    notice that the disk is well again.
    """

    __slots__ = ("_hold_s", "_until", "why")

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._until = 0.0
        self.why = ""

    def holds(self, now: float) -> bool:
        """Whether batches are refused for it now."""
        return bool(self.why) and now < self._until

    def failed(self, why: str, now: float) -> None:
        """A segment could not be written."""
        self.why = why
        self._until = now + self._hold_s

    def admitted(self, now: float) -> None:
        """A batch was let in; while there is a fault, it is the only one for a while."""
        if self.why:
            self._until = now + self._hold_s

    def cleared(self) -> bool:
        """A segment was written; whether that is news."""
        news = bool(self.why)
        self.why = ""
        return news
