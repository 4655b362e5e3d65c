"""How far a stream has come, for people and for ``batchmill status``: ``progress.json``.

Nothing depends on it: what counts is in the store and in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from batchmill.spark.input.inputs import Input, Unread
from batchmill.spark.input.removal import write_json
from batchmill.spark.l2.engine import BatchReport
from batchmill.store import Store, StreamInfo

NAME = "progress.json"
_LEFT_OUT = (
    *("duplicates", "expired", "quarantined", "quarantined segment", "unresolved", "unused"),
    "export dropped",
)


NEWEST_BATCHES = 60
"""So many micro-batches are told of."""


@dataclass(frozen=True)
class BatchTimes:
    """Where the time of a micro-batch went."""

    batch: int
    at: float
    """When it was through, in seconds since 1970."""
    rows: int
    """Rows of event types, those made of spans included."""
    segments: int
    seconds: float
    phases: dict[str, float]
    """Seconds by phase, in their order; together, ``seconds``."""

    @classmethod
    def of(cls, report: BatchReport, at: float) -> BatchTimes:
        """Those of a batch that was committed at that time."""
        phases = {phase: round(seconds, 4) for phase, seconds in report.phases.items()}
        seconds = round(sum(phases.values()), 4)
        return cls(report.number, at, report.stats.rows, report.given, seconds, phases)


@dataclass(frozen=True)
class Progress:
    """How far a stream has come. Rows, spans and what was left out are those of the whole store."""

    stream: str
    last_batch: int | None
    committed_at: float | None
    """When the store last took something of the stream, in seconds since 1970."""
    rows: int
    """Rows of event types, those made of spans included."""
    spans: int
    duplicates: int
    """Spans that were delivered again, and counted once."""
    late: int
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    """By what became of it and the reason: how many."""
    unread_segments: int = 0
    unread_bytes: int = 0
    lag_s: float = 0.0
    """The age of the oldest segment that no commit has yet."""
    written_at: float = 0.0
    source: str = ""
    """Where its events come from: a spool's folder, or the address of a topic. What is unread are
    segments of the one, or messages of the other."""
    batches: tuple[BatchTimes, ...] = ()
    """The newest micro-batches of this process, the newest last."""
    queues: tuple[Mapping[str, Any], ...] = ()
    """The queues of this process, as ``batchmill status --json`` has them: a store's writers."""

    def with_lag(self, unread: Unread, now: float) -> Progress:
        """The same, with another look at what is unread."""
        return replace(
            self,
            unread_segments=unread.segments,
            unread_bytes=unread.bytes,
            lag_s=round(unread.oldest_s, 3),
            written_at=now,
        )

    def write(self, folder: Path) -> None:
        """Put it into a checkpoint folder, in one piece."""
        write_json(folder / NAME, asdict(self))


def progress_of(
    stream: str,
    streams: Iterable[StreamInfo],
    counters: Mapping[tuple[str, str, str], int],
    unread: Unread,
    now: float,
    reads: str = "",
) -> Progress:
    """What is known, put together."""
    own = next((each for each in streams if each.name == stream), None)
    left_out: dict[str, dict[str, int]] = {}
    totals = {"rows": 0, "spans": 0, "duplicates": 0, "late": 0}
    for (what, source, reason), n in counters.items():
        if what in _LEFT_OUT:
            reasons = left_out.setdefault(what, {})
            reasons[reason] = reasons.get(reason, 0) + n
        key = "spans" if (what, source) == ("rows", "Span") else what
        if key in totals:
            totals[key] += n
    at = None if own is None or own.committed_at is None else own.committed_at / 1000
    last = None if own is None else own.last_batch
    found = Progress(
        stream,
        last,
        at,
        totals["rows"],
        totals["spans"],
        totals["duplicates"],
        totals["late"],
        left_out,
        source=reads,
    )
    return found.with_lag(unread, now)


def look(stream: str, last: int | None, store: Store, source: Input, now: float) -> Progress:
    """Ask the store, and where the events come from."""
    unread = source.unread(last, now)
    return progress_of(stream, store.streams(), store.counters(), unread, now, source.name)
