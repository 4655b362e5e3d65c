"""The contract of a span sink, which spool and Kafka fulfil: calls, settings, levels, errors."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from batchmill.errors import BatchmillError, ConfigError, check_ints, check_numbers
from batchmill.pressure import ThresholdLevel
from batchmill.spool.span import PackedSpans, SpanBatch

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SinkSettings:
    """The settings that the spool and Kafka's sink have in common."""

    capacity_rows: int = 200_000
    """Rows that may wait in memory: half of it is WARNING, all of it CRITICAL."""
    capacity_bytes: int = 128 * MIB
    """Bytes that may wait in memory, in the same way."""
    retry_after_s: float = 1.0
    """What a refused sender is told to wait; twice as long at CRITICAL_PLUS."""
    close_timeout_s: float = 30.0
    """How long ``close()`` waits for the rest."""

    def __post_init__(self) -> None:
        check_ints(self, 1, "capacity_rows", "capacity_bytes")
        check_numbers(self, 0, "retry_after_s", "close_timeout_s")


@dataclass(frozen=True, kw_only=True)
class SpoolSettings(SinkSettings):
    """The settings of a :class:`Spool`, which also takes each of them as an argument."""

    linger_s: float = 0.2
    """How long the first batch of a segment may wait for others; 0: not at all."""
    hurry_rows: int = 2_000
    """Rows that are worth a segment when it is known that no more are on their way; see
    :meth:`Spool.hurry`."""
    max_rows: int = 50_000
    """Rows in a segment at most; that many are written without waiting. A larger batch gets a
    segment of its own."""
    max_bytes: int = 32 * MIB
    """Bytes in a segment at most, in memory and roughly."""
    unread_warning: int = 1024 * MIB
    """Bytes of segments that the pipeline has not read: WARNING from here on."""
    unread_critical: int = 2048 * MIB
    """The same for CRITICAL: batches are refused."""
    unread_critical_plus: int = 3072 * MIB
    """The same for CRITICAL_PLUS."""
    min_free_bytes: int = 64 * MIB
    """What must stay free on the disk: less is CRITICAL. The pipeline needs room to catch up."""
    span_events: bool = True
    """Whether segments have the events and the status messages of spans. Only people who look at
    traces read those: without kept spans they can be left out, and the columns are empty."""
    writers: int = 2
    """Segments of one type that are written at once: one is encoded while the other is synced."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ints(self, 1, "hurry_rows", "max_rows", "max_bytes", "writers")
        check_ints(self, 1, "unread_warning", "unread_critical", "unread_critical_plus")
        check_ints(self, 0, "min_free_bytes")
        check_numbers(self, 0, "linger_s")
        if not self.unread_warning <= self.unread_critical <= self.unread_critical_plus:
            raise ConfigError(
                "unread_critical",
                self.unread_critical,
                f"from unread_warning, {self.unread_warning}, "
                f"to unread_critical_plus, {self.unread_critical_plus}",
            )


class Level(enum.IntEnum):
    """How full a sink is; from CRITICAL on it refuses batches.

    Compares with a ``ThresholdLevel``; a higher level is greater.
    """

    NORMAL = 0
    WARNING = ThresholdLevel.WARNING
    CRITICAL = ThresholdLevel.CRITICAL
    CRITICAL_PLUS = ThresholdLevel.CRITICAL_PLUS


@dataclass(frozen=True, slots=True)
class Pressure:
    """The level of a sink and, from CRITICAL on, what a refused sender is told."""

    level: Level
    why: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measure:
    """One of the numbers that make the level, and where its levels begin."""

    name: str
    value: int
    warning: int
    critical: int
    critical_plus: int


@dataclass(frozen=True, kw_only=True)
class SinkStats:
    """A sink at one moment, and its counters since the start.

    While no submit is under way, ``submitted_rows == written_rows + failed_rows + queue_rows``.
    Refused rows are none of those.
    """

    kind: ClassVar[str] = "sink"
    """What the sink writes to: ``spool`` or ``topic``."""
    level: Level
    """The level in force: NORMAL, WARNING, CRITICAL or CRITICAL_PLUS."""
    submitted_rows: int
    """Rows that were accepted."""
    written_rows: int
    """Rows that are durable: on the disk, or acknowledged by the broker."""
    failed_rows: int
    """Rows whose future failed; some of them may be in the topic nevertheless."""
    refused_rows: int
    """Rows that were not accepted: too much was waiting, or writing had just failed."""
    refused: Mapping[Level, int]
    """Batches that were not accepted, by level."""
    queue_rows: int
    """Rows that were accepted and are not durable yet."""
    queue_bytes: int
    """Their size in memory."""
    free_bytes: int | None = None
    """Free disk space; None: the sink writes to no disk of this machine."""

    def unread(self) -> dict[str, int]:
        """What the pipeline has not read, for a receiver's status; empty if unknown."""
        return {}


class SpanSink(Protocol):
    """Makes spans durable. Any thread may call it; nothing but ``close`` waits."""

    takes_packed: bool
    """Whether packed spans are stored as they are. Another sink makes lists of them, which costs
    more than decoding into lists."""

    def submit(self, source: str, batch: SpanBatch | PackedSpans) -> Future[Any]:
        """Accept a batch; the future is done once all of it is durable.

        Raises :class:`Overloaded`, :class:`BadRowsError` or :class:`SpoolClosedError`; the future
        may fail with them, too.
        """
        ...

    def hurry(self, *, alone: bool = False) -> bool:
        """Write what waits without lingering, if it is enough to be worth it; whether it is.

        ``alone``: one sender waits for it and nobody else sends.
        """
        ...

    def level(self) -> Level:
        """The level of this moment. Cheap."""
        ...

    def pressure(self) -> Pressure:
        """The level of this moment, and what a refused sender is told."""
        ...

    def measures(self) -> Sequence[Measure]:
        """The numbers that make the level of this moment."""
        ...

    def stats(self) -> SinkStats:
        """A snapshot of what waits, and of the counters since the start."""
        ...


class Overloaded(BatchmillError, RuntimeError):
    """A batch was refused, since too much waits already."""

    level: Level
    """CRITICAL or CRITICAL_PLUS."""
    retry_after_s: float
    why: str

    def __str__(self) -> str:
        seconds = "1 second" if self.retry_after_s == 1 else f"{self.retry_after_s:g} seconds"
        return f"refused at {self.level.name}: {self.why}; try again in {seconds}"


class SpoolClosedError(BatchmillError, RuntimeError):
    """The spool, or the Kafka sink, is closed."""

    folder: str
    """The spool's folder, or the topic's address."""
    template = "{folder} is closed, so nothing was written: open a new one"


class BadRowsError(BatchmillError, ValueError):
    """Rows do not fit the columns of their type."""

    source: str
    detail: str
    template = (
        "not written, since it does not fit the type {source}: {detail}; "
        "docs/sources.md lists its fields, and batchmill.sources.catalog() has them"
    )
