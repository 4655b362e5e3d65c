"""Aggregates a client's events in the process: rows in, deltas to the sink.

One thread turns rows into deltas, a chunk at a time, and merges them. At the end of a period it
hands the deltas of each event type to the sink, which writes them as one segment or message.

Guarantees
    * A future is done only after the segment that holds its events' deltas is durable.
    * If a future fails, none of its events was counted, with one exception: a topic may have got
      the deltas although its broker did not say so.
    * Everything that was accepted is written, or its future fails.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import pyarrow as pa

from batchmill import lifecycle
from batchmill.aggregate import (
    STATEMENT_SOURCE,
    Aggregator,
    Deltas,
    SlowestStatements,
    Statement,
    statements_to_arrow,
    to_arrow,
)
from batchmill.client.settings import STATEMENTS, EdgeSettings
from batchmill.oal import MetricSet
from batchmill.spool import (
    BadRowsError,
    Level,
    Overloaded,
    Pressure,
    SpoolClosedError,
    event_tables,
    table_of,
)
from batchmill.wording import count_of

log = logging.getLogger("batchmill.client")

_LOOK_S = 0.1
"""How often the sink's level is looked at."""
_LONGEST_MS = 2**31
_MERGE_AT = 16
"""So many deltas of chunks are merged at once."""


class DeltaSink(Protocol):
    """Where deltas are written: a spool, or a topic."""

    def submit_deltas(self, source: str, deltas: pa.Table) -> Future[Any]:
        """Write deltas; the future is done once they are durable."""
        ...

    def pressure(self) -> Pressure:
        """The level of this moment: from CRITICAL on, events are refused."""
        ...


@dataclass(slots=True, eq=False)
class PendingEvents:
    """The events of one call, and the future that answers it."""

    rows: Sequence[Any]
    answer: Future[Any]

    def fail(self, error: Exception) -> None:
        """Answer that none of the events was counted, if that is not answered yet."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True)
class _Chunk:
    """Events of one type that are not deltas yet."""

    calls: list[PendingEvents] = field(default_factory=list)
    rows: int = 0


@dataclass(slots=True)
class _Pending:
    """Deltas of one type that are not written yet, and the calls that wait for it."""

    deltas: list[Deltas] = field(default_factory=list)
    statements: SlowestStatements | None = None
    calls: list[PendingEvents] = field(default_factory=list)
    bytes: int = 0


class Edge:
    """Turns events into deltas, and gives them to a sink. Any thread may call it."""

    fork_order = 4  # after the sink

    def __init__(
        self,
        metrics: MetricSet,
        sink: DeltaSink,
        name: str,
        settings: EdgeSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``name`` is the sink's, for messages."""
        self._sink = sink
        self._name = name
        self._settings = settings
        self._clock = clock
        self._aggregators = {
            source: Aggregator(metrics.catalog.source(source), own, apdex_ms=settings.apdex_ms)
            for source, own in metrics.by_source().items()
        }
        self._convert = {
            source: event_tables(
                aggregator.plan.source, {field.column for field in aggregator.plan.fields}
            )
            for source, aggregator in self._aggregators.items()
        }
        self._thresholds = settings.thresholds()
        self._closed = False
        self._reset()
        lifecycle.track(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[str, _Chunk] = {}
        self._full: list[tuple[str, _Chunk]] = []
        self._rows = 0
        self._due: float | None = None
        """When the period ends, by the monotonic clock; None: nothing was emitted in it."""
        self._flushes: list[Future[None]] = []
        self._pending: dict[str, _Pending] = {}
        self._under_way: set[Future[None]] = set()
        """One for each table of deltas that the sink has; done when its calls are answered."""
        self._invalid: Counter[str] = Counter()
        self._look_at = 0.0
        self._pressure = Pressure(Level.NORMAL)
        self._thread: threading.Thread | None = None

    @property
    def invalid(self) -> Mapping[str, int]:
        """How many events no metric can count, by reason."""
        with self._changed:
            return dict(self._invalid)

    def takes(self, source: str) -> bool:
        """Whether a metric reads events of that type."""
        return source in self._aggregators or source == STATEMENTS

    def submit(self, source: str, rows: Sequence[Any]) -> Future[Any]:
        """Accept events of one type; the future is done once their deltas are durable.

        They are rows; or statements, with :data:`STATEMENTS` as ``source``.

        Never waits. Raises :class:`Overloaded` if too many events wait, or if the sink is at
        CRITICAL.
        """
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        call = PendingEvents(rows, answer)
        with self._changed:
            self._check()
            if self._thread is None:
                self._start()
            if self._due is None:
                self._due = time.monotonic() + self._left_of_period()
                self._changed.notify()
            chunk = self._open.get(source)
            if chunk is None:
                chunk = self._open[source] = _Chunk()
            chunk.calls.append(call)
            chunk.rows += len(rows)
            self._rows += len(rows)
            if chunk.rows >= self._settings.chunk_rows:
                self._full.append((source, self._open.pop(source)))
                self._changed.notify()
        return answer

    def flush(self, timeout: float | None = None) -> bool:
        """Write what waits now; True when all of it is answered before ``timeout`` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        handed_over: Future[None] = Future()
        with self._changed:
            if self._thread is None:
                handed_over.set_result(None)
            else:
                self._flushes.append(handed_over)
                self._changed.notify()
        if wait([handed_over], timeout).not_done:
            return False
        with self._changed:
            under_way = list(self._under_way)
        left = None if until is None else max(0.0, until - time.monotonic())
        return not wait(under_way, left).not_done

    def close(self, timeout: float | None = None) -> bool:
        """Accept no more, and hand over what waits to the sink; True when that was in time.

        What the sink does not take any more fails with its error.
        """
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def begin_close(self) -> None:
        """Hand over what waits while the sink still takes it."""
        self.close()

    def await_close(self) -> None:
        """Nothing is left: the sink waits for itself."""

    def after_fork_in_child(self) -> None:
        """A thread that does not exist here may hold the lock; what waits is the parent's."""
        self._reset()

    def _check(self) -> None:
        """Raise if no events are accepted now."""
        if self._closed:
            raise SpoolClosedError(self._name)
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._pressure = self._sink.pressure()
        pressure = self._pressure
        if pressure.level >= Level.CRITICAL:
            raise Overloaded(pressure.level, pressure.retry_after_s, pressure.why)
        if self._rows >= self._settings.capacity_rows:
            why = (
                f"{count_of(self._rows, 'event')} wait to be aggregated, with "
                f"{self._settings.capacity_rows} allowed (capacity_rows)"
            )
            raise Overloaded(Level.CRITICAL, _LOOK_S, why)

    def _left_of_period(self) -> float:
        period = self._settings.period_s
        return period - self._clock() % period if period else 0.0

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="batchmill-edge", daemon=True)
        self._thread.start()

    # What follows runs on the thread, except for _answer().

    def _run(self) -> None:
        """Work until a period ends after which nothing waits; the next event starts a new thread.

        So an edge that nobody uses any more has no thread.
        """
        over = False
        while True:
            with self._changed:
                if over and not (self._open or self._full or self._flushes):
                    self._thread = None
                    return
                while not self._is_called():
                    due = self._due
                    self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
                flushes = self._flushes
                over = bool(self._closed or flushes) or self._is_over()
                chunks, self._full, self._flushes = self._full, [], []
                if over:
                    chunks += self._open.items()
                    self._open = {}
                    self._due = None
            self._turn(chunks, over=over)
            for handed_over in flushes:
                handed_over.set_result(None)

    def _is_called(self) -> bool:
        return bool(self._closed or self._full or self._flushes) or self._is_over()

    def _is_over(self) -> bool:
        return self._due is not None and time.monotonic() >= self._due

    def _turn(self, chunks: Iterable[tuple[str, _Chunk]], *, over: bool) -> None:
        """Turn chunks into deltas; write those that must not wait any longer, or all."""
        for source, chunk in chunks:
            try:
                self._aggregate(source, chunk)
            finally:
                with self._changed:
                    self._rows -= chunk.rows
        settings = self._settings
        for source, pending in list(self._pending.items()):
            early = pending.bytes > settings.max_bytes or len(pending.calls) > settings.max_calls
            if over or early:
                self._write(source, self._pending.pop(source))

    def _keep_slowest(self, chunk: _Chunk) -> None:
        """Count the statements of a chunk; what cannot be counted is answered."""
        settings, limits = self._settings, self._thresholds
        latest = datetime.fromtimestamp(self._clock() + settings.max_ahead_s, UTC)
        pending = self._pending.setdefault(STATEMENTS, _Pending())
        if pending.statements is None:
            pending.statements = SlowestStatements(settings.top_n, limits)
        for call in chunk.calls:
            own = SlowestStatements(settings.top_n, limits)
            try:
                ahead = sum(statement.time > latest for statement in call.rows)
                if ahead:
                    reason = "time too far ahead"
                    error = BadRowsError(STATEMENT_SOURCE, reason)
                    self._refuse(call, {reason: ahead}, error)
                    continue
                for statement in call.rows:
                    _check_statement(statement)
                own.add(call.rows)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
                detail = BadRowsError(STATEMENT_SOURCE, str(error))
                self._refuse(call, {"a value that does not fit": 1}, detail)
                continue
            pending.statements.merge(own)
            pending.calls.append(call)
        pending.bytes = pending.statements.nbytes

    def _aggregate(self, source: str, chunk: _Chunk) -> None:
        """Turn the events of a chunk into deltas; what cannot be counted is answered."""
        if source == STATEMENTS:
            self._keep_slowest(chunk)
            return
        aggregator, convert = self._aggregators[source], self._convert[source]
        calls = chunk.calls
        latest_us = int((self._clock() + self._settings.max_ahead_s) * 1_000_000)
        try:
            converted = table_of(source, calls, convert)
            for place, error in converted.errors.items():
                self._refuse(calls[place], {"a value that does not fit": 1}, error)
            calls = [call for place, call in enumerate(calls) if place not in converted.errors]
            if not calls:
                return
            made = aggregator.make(converted.table, latest_us=latest_us)
            if made.invalid:
                # A future stands for all events of its call: without one of them, none counts.
                fitting = []
                for call in calls:
                    own = aggregator.make(convert([call]), latest_us=latest_us)
                    if own.invalid:
                        why = ", ".join(own.invalid)
                        self._refuse(call, own.invalid, BadRowsError(source, why))
                    else:
                        fitting.append((call, own.deltas))
                calls = [call for call, _ in fitting]
                deltas = aggregator.merge([deltas for _, deltas in fitting])
            else:
                deltas = made.deltas
        except Exception as error:
            log.exception("%s of %s cannot be aggregated", count_of(chunk.rows, "event"), source)
            for call in calls:
                call.fail(error)
            return
        pending = self._pending.setdefault(source, _Pending())
        pending.deltas.append(deltas)
        pending.calls += calls
        if len(pending.deltas) >= _MERGE_AT:
            pending.deltas = [aggregator.merge(pending.deltas)]
        pending.bytes = sum(part.nbytes for part in pending.deltas)

    def _refuse(self, call: PendingEvents, reasons: Mapping[str, int], error: Exception) -> None:
        with self._changed:
            self._invalid.update(reasons)
        call.fail(error)

    def _write(self, source: str, pending: _Pending) -> None:
        if not pending.calls:
            return
        try:
            if pending.statements is not None:
                source, table = STATEMENT_SOURCE, statements_to_arrow(pending.statements)
            else:
                aggregator = self._aggregators[source]
                table = to_arrow(aggregator.merge(pending.deltas), aggregator.plan)
            written = self._sink.submit_deltas(source, table)
        except Exception as error:  # noqa: BLE001 - whatever it is, the callers get it
            log.warning("deltas of %s are not written: %s", source, error)
            for call in pending.calls:
                call.fail(error)
            return
        answered: Future[None] = Future()
        with self._changed:
            self._under_way.add(answered)
        written.add_done_callback(functools.partial(self._answer, pending.calls, answered))

    def _answer(
        self, calls: Sequence[PendingEvents], answered: Future[None], written: Future[Any]
    ) -> None:
        error = written.exception()
        for call in calls:
            if error is None:
                call.answer.set_result(written.result())
            else:
                call.answer.set_exception(error)
        with self._changed:
            self._under_way.discard(answered)
        answered.set_result(None)


def _check_statement(statement: Statement) -> None:
    """Raise unless it can be written."""
    texts = (statement.statement, statement.trace_id, statement.span_id, statement.system)
    "".join((*texts, statement.service, statement.store)).encode()
    if statement.latency >= _LONGEST_MS:
        raise ValueError(f"latency is {statement.latency} ms; it must be below {_LONGEST_MS}")
