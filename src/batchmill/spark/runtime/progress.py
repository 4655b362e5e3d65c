"""How far a stream has come, and the upkeep beside its batches.

``progress.json`` is for people and for ``batchmill status``. Nothing depends on it: the state that
counts is in the store and in the checkpoint.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from batchmill.aggregate import OVERFLOW, Offender, worst
from batchmill.process_stats import ProcessStats
from batchmill.spark.batch.report import BatchReport
from batchmill.spark.batch.writer import StreamWriter
from batchmill.spark.files.paths import AnyPath, write_whole
from batchmill.spark.input.base import Input, Unread
from batchmill.spark.input.choice import Pace
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.store import ClockState, Store, StreamInfo, TrustedTime
from batchmill.traces import SpanKeeper

log = logging.getLogger("batchmill.spark")

NAME = "progress.json"
LEFT_OUT = (
    *("duplicates", "expired", "quarantined", "quarantined segment", "unresolved", "unused"),
    "export dropped",
)
"""The counters of what did not become metrics."""
NEWEST_BATCHES = 60
"""For how many micro-batches their times are kept."""
_EVERY_S = 10.0
_NOTED_S, _MOST_NOTED = 3600.0, 100
"""For how long it is said whose entities were too many, and of how many parents a minute."""


@dataclass(frozen=True)
class BatchTimes:
    """Where the time of a micro-batch went."""

    batch: int
    at: float
    """When it was committed, in seconds since 1970."""
    rows: int
    """Rows of event types, including those derived from spans."""
    segments: int
    seconds: float
    phases: dict[str, float]
    """Seconds by phase, in their order; together, ``seconds``."""

    @classmethod
    def of(cls, report: BatchReport, at: float) -> BatchTimes:
        """The times of a batch that was committed at that time."""
        phases = {phase: round(seconds, 4) for phase, seconds in report.phases.items()}
        seconds = round(sum(phases.values()), 4)
        return cls(report.number, at, report.stats.rows, report.given, seconds, phases)


@dataclass(frozen=True)
class RunningBatch:
    """A batch that has begun and is not committed."""

    batch: int
    since: float
    """When it began, in seconds since 1970."""
    seconds: float
    """For how long it has been running, whatever the clock did meanwhile."""
    usual_s: float
    """How long a batch usually takes: its target or, if that is longer, as the last ones."""


@dataclass(frozen=True)
class Progress:
    """How far a stream has come. Rows, spans and ``left_out`` are those of the whole store."""

    stream: str
    last_batch: int | None
    committed_at: float | None
    """When the store last committed a batch of the stream, in seconds since 1970."""
    rows: int
    """Rows of event types, including those derived from spans."""
    spans: int
    """Spans that counted."""
    duplicates: int
    """Spans that were delivered again, and counted once."""
    late: int
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    """By counter and reason: how many rows or segments did not become metrics."""
    unread_segments: int = 0
    unread_bytes: int = 0
    lag_s: float = 0.0
    """The age of the oldest segment that is not committed yet."""
    unread_rows: int = 0
    """How many rows the unread segments have, about; of a topic, how many messages are unread."""
    new_lag_s: float = 0.0
    """The same age, of what was written after all that is committed: what is new does not wait for
    a backlog."""
    catch_up_s: float | None = None
    """How long the backlog will take, at the pace of the last batches; None: there is none, or it
    is not known yet."""
    written_at: float = 0.0
    source: str = ""
    """Where its events come from: a spool's folder, or the address of a topic. Unread are segments
    of the one, or messages of the other."""
    batches: tuple[BatchTimes, ...] = ()
    """The newest micro-batches of this process, the newest last."""
    running: RunningBatch | None = None
    """The batch that runs; None: none does."""
    overflow: tuple[Mapping[str, Any], ...] = ()
    """Of which parents entities went under ``overflow`` in the last hour, in this process: the
    worst first, as :class:`batchmill.aggregate.Offender` describes them."""
    overflow_rows: int = 0
    """Rows that went under ``overflow`` altogether; they are counted in ``rows``, too."""
    queues: tuple[Mapping[str, Any], ...] = ()
    """The queues of this process, as in ``batchmill status --json``."""
    levels: tuple[Mapping[str, Any], ...] = ()
    """Its thresholds, the same way."""
    page_fault: str = ""
    """Why this process has no page for Prometheus, though it is to have one; empty: it has."""
    clock: ClockState | None = None
    """What the store knew of the time at the last commit."""
    kept: Mapping[str, Any] | None = None
    """The spans that are kept for people who look at traces, and how many were dropped; None: they
    are not kept."""

    def with_lag(self, unread: Unread, now: float, backlog_per_s: float = 0.0) -> Progress:
        """The same, with a newer ``unread``; ``backlog_per_s``: how fast a backlog is read."""
        return replace(
            self,
            unread_segments=unread.segments,
            unread_bytes=unread.bytes,
            unread_rows=unread.rows,
            lag_s=round(unread.oldest_s, 3),
            new_lag_s=round(unread.new_s, 3),
            catch_up_s=round(unread.rows / backlog_per_s, 1) if backlog_per_s else None,
            written_at=now,
        )

    def write(self, folder: AnyPath) -> None:
        """Write it into a checkpoint folder, as a whole."""
        write_whole(folder / NAME, json.dumps(asdict(self)).encode(), durable=False)


def progress_of(
    stream: str,
    streams: Iterable[StreamInfo],
    counters: Mapping[tuple[str, str, str], int],
    unread: Unread,
    now: float,
    source: str = "",
    backlog_per_s: float = 0.0,
) -> Progress:
    """Put a stream's progress together."""
    own = next((info for info in streams if info.name == stream), None)
    left_out: dict[str, dict[str, int]] = {}
    totals = {"rows": 0, "spans": 0, "duplicates": 0, "late": 0, OVERFLOW: 0}
    for (counter, of, reason), count in counters.items():
        if counter in LEFT_OUT:
            reasons = left_out.setdefault(counter, {})
            reasons[reason] = reasons.get(reason, 0) + count
        key = "spans" if (counter, of) == ("rows", "Span") else counter
        if key in totals:
            totals[key] += count
    at = None if own is None or own.committed_ms is None else own.committed_ms / 1000
    last = None if own is None else own.last_batch
    progress = Progress(
        stream,
        last,
        at,
        rows=totals["rows"],
        spans=totals["spans"],
        duplicates=totals["duplicates"],
        late=totals["late"],
        left_out=left_out,
        source=source,
        overflow_rows=totals[OVERFLOW],
    )
    return progress.with_lag(unread, now, backlog_per_s)


def read_progress(
    stream: str,
    last: int | None,
    store: Store,
    source: Input,
    now: float,
    backlog_per_s: float = 0.0,
) -> Progress:
    """A stream's progress from the store and from its input."""
    unread = source.unread(last, now)
    progress = progress_of(
        stream, store.streams(), store.counters(), unread, now, source.name, backlog_per_s
    )
    return replace(progress, clock=store.clock())


class Offenders:
    """The parents of which entities went under ``overflow``, over the last hour."""

    def __init__(self) -> None:
        self._batches: deque[tuple[float, list[Offender]]] = deque()

    def add(self, offenders: Sequence[Offender], now: float) -> None:
        """Add those of a batch; what is older than an hour is forgotten."""
        if offenders:
            minute = now - now % 60
            if self._batches and self._batches[-1][0] == minute:
                _, before = self._batches.pop()
                offenders = worst([*before, *offenders], _MOST_NOTED)
            self._batches.append((minute, list(offenders)))
        while self._batches and self._batches[0][0] < now - _NOTED_S:
            self._batches.popleft()

    def worst(self, now: float) -> tuple[dict[str, Any], ...]:
        """The worst ones."""
        self.add((), now)
        noted = worst(offender for _, own in self._batches for offender in own)
        return tuple(offender.as_json() for offender in noted)


class Upkeep:
    """Maintains one running stream: removes read segments, writes progress.

    A failure in here never ends the stream.
    """

    def __init__(
        self,
        writer: StreamWriter,
        checkpoint: Checkpoint,
        store: Store,
        source: Input,
        pace: Pace,
        clock: Callable[[], float],
        trim: Callable[[], object] = lambda: None,
        keeper: SpanKeeper | None = None,
        trusted: TrustedTime | None = None,
    ) -> None:
        """``trim`` removes what quarantine and checkpoint have too much of; ``keeper`` keeps spans.

        ``trusted`` hears what the store knows of the time.
        """
        self._keeper = keeper
        self._trusted = trusted or TrustedTime()
        self._pace = pace
        self._trim = trim
        self._writer = writer
        self._checkpoint = checkpoint
        self._store = store
        self._clock = clock
        self._source = source
        self._last: Progress | None = None
        self._fault = ""
        self._batches: deque[BatchTimes] = deque(maxlen=NEWEST_BATCHES)
        self._offenders = Offenders()
        self._process = ProcessStats()
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Also run regularly, in a thread, until :meth:`stop`."""
        self._thread = threading.Thread(target=self._run, name="batchmill-upkeep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, if there is one."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def progress(self) -> Progress:
        """How far the stream has come by now."""
        with self._lock:
            writer = self._writer
            progress = read_progress(
                writer.stream,
                writer.last,
                self._store,
                self._source,
                self._clock(),
                self._pace.backlog_per_s,
            )
            assert progress.clock is not None
            self._trusted.note(progress.clock)
            return replace(
                progress,
                batches=tuple(self._batches),
                running=self._running(),
                kept=self._kept(),
                overflow=self._offenders.worst(self._clock()),
            )

    def note(self, report: BatchReport) -> None:
        """Record a finished batch and its times, and write the progress."""
        if report.applied:
            with self._lock:
                now = self._clock()
                self._batches.append(BatchTimes.of(report, round(now, 3)))
                self._offenders.add(report.stats.overflow.offenders, now)
        self.write_progress(committed=True)

    def write_progress(self, *, committed: bool = False) -> None:
        """Write ``progress.json``; the store is only asked after a claim or a commit.

        Then the store was reachable just now: otherwise stopping the stream would wait for it.
        """
        try:
            with self._lock:  # also while it is written, so that an older one never overwrites it
                if committed or self._last is None:
                    progress = self.progress()
                else:
                    now = self._clock()
                    unread = self._source.unread(self._writer.last, now)
                    progress = self._last.with_lag(unread, now, self._pace.backlog_per_s)
                self._last = progress
                progress = replace(progress, running=self._running(), kept=self._kept())
                replace(progress, **self._process.report()).write(self._checkpoint.folder)
                self._fault = ""
        except Exception as error:  # noqa: BLE001 - the progress is only for people
            if str(error) != self._fault:  # once, not every second while a broker is down
                log.warning("the progress of %s is not written: %s", self._writer.stream, error)
            self._fault = str(error)

    def _running(self) -> RunningBatch | None:
        last = self._writer.last
        batch, began_s = self._pace.begun or (None, 0.0)
        if batch is None or (last is not None and batch <= last):
            return None
        seconds = time.monotonic() - began_s
        since, usual_s = self._clock() - seconds, self._pace.usual_s
        return RunningBatch(batch, round(since, 3), round(seconds, 3), round(usual_s, 3))

    def _kept(self) -> dict[str, Any] | None:
        return None if self._keeper is None else asdict(self._keeper.stats)

    def remove_read(self) -> None:
        """Let the input remove what is not needed any more."""
        try:
            self._source.remove_read()
        except OSError as error:
            log.warning("read segments cannot be removed yet, trying again later: %s", error)

    def trim(self) -> None:
        """Remove the oldest of the quarantine beyond its limit, and forgotten backfills."""
        try:
            self._trim()
        except OSError as error:
            log.warning(
                "old files of quarantine and checkpoint cannot be removed, trying again later: %s",
                error,
            )

    def _run(self) -> None:
        due = time.monotonic() + _EVERY_S
        while not self._stopping.wait(min(_EVERY_S, self._source.poll_s)):
            if time.monotonic() >= due:
                due = time.monotonic() + _EVERY_S
                self.remove_read()
                self.trim()
            self.write_progress()
