"""The client: turns events into rows, and gives them to a spool or to an edge.

Threads, segments and bounds are theirs.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from batchmill import lifecycle
from batchmill.aggregate import Statement
from batchmill.client.settings import STATEMENTS, EdgeSettings
from batchmill.errors import ConfigError
from batchmill.extras import require_extra
from batchmill.oal import MetricSet, load
from batchmill.sources import (
    TIME_COLUMN,
    SourceType,
    UnknownNameError,
    catalog,
    row_of,
    source_of,
)
from batchmill.spool import BadRowsError, Overloaded
from batchmill.telemetry import Snapshot

if TYPE_CHECKING:
    from batchmill.client.edge import Edge
    from batchmill.kafka import KafkaSink
    from batchmill.spool import Spool

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_KAFKA = "kafka://"
_PAUSE_S = 0.02
"""How often a client that waits for room tries again."""


@dataclass(frozen=True, slots=True)
class ClientStats(Snapshot):
    """The events of a client, by what was done with them.

    While no call is under way, ``emitted == written + failed + waiting``; refused ones are none of
    those.
    """

    emitted: int
    """Events that the spool accepted."""
    written: int
    """Events that are durable, on the disk."""
    failed: int
    """Events whose future failed."""
    refused: int
    """Events that were not accepted: too much was waiting, and ``wait_s`` was over."""
    invalid: Mapping[str, int] = field(default_factory=dict)
    """Events that a client that aggregates could not count, by reason; their futures failed."""

    @property
    def waiting(self) -> int:
        """Events that were accepted and are not on the disk yet."""
        return self.emitted - self.written - self.failed


class Client(lifecycle.Closing, lifecycle.Tracked):
    """Writes events of your own types to a spool, for the pipeline to read.

    ``spool`` is a folder, or a :class:`batchmill.spool.Spool` that others use, too; the client
    closes only what it opened. At CRITICAL a call waits up to ``wait_s`` seconds for room, then
    raises :class:`batchmill.spool.Overloaded`. Other keywords are settings of the spool.

    With ``aggregate``, the pipeline's metrics, events are aggregated in this process: what is
    written, and acknowledged, are the states of each entity and minute. ``edge`` says how long they
    are merged. In place of a spool there may be a topic then, ``kafka://broker:9092/topic``. Events
    that no metric reads are written as they are.

    >>> with Client("spool") as client:  # doctest: +SKIP
    ...     client.emit(Sale(datetime.now(UTC), "shop", 250))
    """

    fork_order = 4  # after the spool

    def __init__(
        self,
        spool: str | os.PathLike[str] | Spool | KafkaSink,
        *,
        aggregate: str | Path | Iterable[str | Path] | MetricSet | None = None,
        edge: EdgeSettings | None = None,
        wait_s: float = 1.0,
        **settings: Any,
    ) -> None:
        if aggregate is None and edge is not None:
            raise ConfigError("edge", edge, "left out where there is no aggregate")
        if aggregate is not None and not isinstance(aggregate, MetricSet):
            aggregate = load(aggregate)
        from batchmill.spool import Spool

        self._sink, self._own = _open(spool, settings)
        self._spool: Spool | None = None
        """The sink, if it takes events as they are."""
        if isinstance(self._sink, Spool):
            self._spool = self._sink
        elif aggregate is None:
            self._sink.close()
            allowed = "the pipeline's metrics: a topic takes events only as deltas"
            raise ConfigError("aggregate", None, allowed)
        self._edge: Edge | None = None
        if aggregate is not None:
            require_extra("aggregate= of a client", "aggregate", "numpy", "pyarrow")
            from batchmill.client.edge import Edge

            name = str(self._spool.folder if self._spool else self._sink)
            self._edge = Edge(aggregate, self._sink, name, edge or EdgeSettings())
        self._wait_s = wait_s
        self._reset()
        lifecycle.track(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._emitted = self._written = self._failed = self._refused = 0

    @property
    def spool(self) -> Spool | KafkaSink:
        """The spool that the events are written to, or the topic."""
        return self._sink

    def emit(self, event: object, source: str | None = None) -> Future[Path]:
        """Write one event; the future gets the path of its segment once that is durable.

        ``event`` is an instance of a class with ``@source``; or, with the name of an event type as
        ``source``, a mapping from columns to values. Without a ``time`` it happened now. A client
        that aggregates also takes a :class:`batchmill.workers.Statement`. At CRITICAL this waits
        for room, up to ``wait_s``; it never waits for the disk.
        """
        name, row = self._row(event, source)
        return self._emit(name, [row])

    def emit_many(self, events: Iterable[object], source: str | None = None) -> list[Future[Path]]:
        """Write several events; a future for each event type among them, in order.

        Much quicker than one by one. If one of them is not an event, none is accepted. If it raises
        Overloaded, events of other types may have been accepted: ``stats()`` tells how many.
        """
        rows: dict[str, list[Any]] = {}
        for event in events:
            name, row = self._row(event, source)
            rows.setdefault(name, []).append(row)
        return [self._emit(name, some) for name, some in rows.items()]

    async def aemit(self, event: object, source: str | None = None) -> Path:
        """Like :meth:`emit`, and wait until the event is durable.

        Never blocks the event loop. Cancelling the task does not take the event back.
        """
        name, row = self._row(event, source)
        until = time.monotonic() + self._wait_s
        # Room comes when the pipeline, another process, removes segments: nothing to wait on.
        while (answer := self._try(name, [row], until)) is None:  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_S)
        return await asyncio.wrap_future(answer)

    def flush(self, timeout: float | None = None) -> bool:
        """Write what waits now; True when all of it is answered before ``timeout`` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        flushed = self._edge is None or self._edge.flush(timeout)
        return (self._spool is None or self._spool.flush(_left(until))) and flushed

    async def aflush(self, timeout: float | None = None) -> bool:
        """Like :meth:`flush`, without blocking the event loop."""
        return await asyncio.to_thread(self.flush, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Write what waits, and close the spool if it is the client's own; True if in time."""
        if timeout is None:
            timeout = self._sink.settings.close_timeout_s
        until = time.monotonic() + timeout
        if not self._own:
            flushed = self.flush(timeout)
            return (self._edge is None or self._edge.close(_left(until))) and flushed
        handed_over = self._edge is None or self._edge.close(timeout)
        return self._sink.close(_left(until)) and handed_over

    async def aclose(self, timeout: float | None = None) -> bool:
        """Like :meth:`close`, without blocking the event loop."""
        return await asyncio.to_thread(self.close, timeout)

    def stats(self) -> ClientStats:
        """Its counters so far."""
        invalid = {} if self._edge is None else self._edge.invalid
        with self._lock:
            return ClientStats(self._emitted, self._written, self._failed, self._refused, invalid)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def after_fork_in_child(self) -> None:
        """What was emitted before belongs to the parent."""
        self._reset()

    def _row(self, event: object, source: str | None) -> tuple[str, Any]:
        """Under which name an event is submitted, and as what."""
        if self._edge is not None and isinstance(event, Statement):
            return STATEMENTS, event
        return row_for(event, source)

    def _emit(self, name: str, rows: list[Any]) -> Future[Path]:
        until = time.monotonic() + self._wait_s
        while (answer := self._try(name, rows, until)) is None:
            time.sleep(_PAUSE_S)
        return answer

    def _try(self, name: str, rows: list[Any], until: float) -> Future[Path] | None:
        """Submit rows; None if there is no room and it is not ``until`` yet."""
        count = len(rows)
        self._count(emitted=count)  # first: they may be written before submit() returns
        try:
            answer = self._submit(name, rows)
        except Overloaded:
            try_again = time.monotonic() < until
            self._count(emitted=-count, refused=0 if try_again else count)
            if not try_again:
                raise
            return None
        except BaseException:
            self._count(emitted=-count, refused=count)
            raise
        answer.add_done_callback(functools.partial(self._answered, count))
        return answer

    def _submit(self, name: str, rows: list[Any]) -> Future[Path]:
        if self._edge is not None and self._edge.takes(name):
            return self._edge.submit(name, rows)
        if self._spool is None:
            raise ConfigError(
                "event", name, "of a type that a metric reads: a topic takes events only as deltas"
            )
        return self._spool.submit(name, rows)

    def _answered(self, count: int, answer: Future[Path]) -> None:
        if answer.exception() is None:
            self._count(written=count)
        else:
            self._count(failed=count)

    def _count(
        self, *, emitted: int = 0, written: int = 0, failed: int = 0, refused: int = 0
    ) -> None:
        with self._lock:
            self._emitted += emitted
            self._written += written
            self._failed += failed
            self._refused += refused


def _open(
    spool: str | os.PathLike[str] | Spool | KafkaSink, settings: dict[str, Any]
) -> tuple[Spool | KafkaSink, bool]:
    """The sink, and whether it was opened here."""
    if isinstance(spool, str) and spool.startswith(_KAFKA):
        from batchmill.kafka import KafkaSink

        return KafkaSink(spool, **settings), True
    if isinstance(spool, (str, os.PathLike)):
        from batchmill.spool import Spool

        return Spool(spool, **settings), True
    if settings:
        names = ", ".join(settings)
        raise TypeError(f"give {names} to the {type(spool).__name__}: this client does not open it")
    return spool, False


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


def row_for(event: object, source: str | None) -> tuple[str, dict[str, Any]]:
    """The name of an event's type, and its row; raises if it is not one, or lacks a field."""
    if isinstance(event, Mapping):
        if source is None:
            raise TypeError("a mapping does not say which type it is: emit(event, 'Endpoint')")
        kind, columns, required = _known_source(source)
        row = dict(event)
        _check_names(kind, columns, row)
    else:
        kind = source_of(type(event))
        required = _required(kind)
        if source is not None and source != kind.name:
            raise TypeError(f"a {kind.name} is not a {source}: leave the second argument out")
        row = row_of(event)
    for name, column in required:
        if row.get(column) is None:
            raise BadRowsError(kind.name, f"{name} is required, and missing")
    row[TIME_COLUMN] = _micros(kind.name, row.get(TIME_COLUMN))
    return kind.name, row


class _KnownSource(NamedTuple):
    kind: SourceType
    columns: frozenset[str]
    required: tuple[tuple[str, str], ...]


@functools.cache
def _known_source(name: str) -> _KnownSource:
    """An event type by name; cached, since building a catalog takes time."""
    kind = catalog().source(name)
    columns = {field.column for field in kind.fields.values()} | {TIME_COLUMN}
    return _KnownSource(kind, frozenset(columns), _required(kind))


@functools.cache
def _required(kind: SourceType) -> tuple[tuple[str, str], ...]:
    """The fields that an event must have, each with its column."""
    return tuple((name, kind.fields[name].column) for name in kind.required)


def _check_names(kind: SourceType, columns: frozenset[str], row: Mapping[str, Any]) -> None:
    if not row.keys() <= columns:
        unknown = next(name for name in row if name not in columns)
        raise UnknownNameError(f"column of {kind.name}", str(unknown), tuple(sorted(columns)))


def _micros(source: str, moment: object) -> int:
    """A moment as microseconds since 1970; None is now."""
    if moment is None:
        return time.time_ns() // 1000
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise BadRowsError(source, "time has no time zone: use datetime.now(UTC)")
        return (moment - _EPOCH) // _MICROSECOND
    if isinstance(moment, int) and not isinstance(moment, bool):
        return moment
    raise BadRowsError(source, f"time is {moment!r}; it must be a datetime, or microseconds")
