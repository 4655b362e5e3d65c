"""The store: the public calls, each one transaction over whichever database is behind it."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from batchmill.errors import ConfigError
from batchmill.oal import Metric
from batchmill.oal import Value as Final
from batchmill.sources import Grain
from batchmill.store.errors import StoreError, StoreInUseError
from batchmill.store.protocol import Moment
from batchmill.store.retry import Retrier, RetryPolicy
from batchmill.store.sql import bucket as bucket_module
from batchmill.store.sql import outbox as outbox_module
from batchmill.store.sql import reading
from batchmill.store.sql import register as register_module
from batchmill.store.sql import streams as streams_module
from batchmill.store.sql.checkpoint import Exempt
from batchmill.store.sql.commit import Commit, add_counters
from batchmill.store.sql.entities import EntityCache
from batchmill.store.sql.reading import Place, Selection
from batchmill.store.sql.session import Owner, Session
from batchmill.store.sql.snapshot import Snapshot
from batchmill.store.types import Batch, Claim, CommitResult, CounterKey, Layout
from batchmill.store.views import (
    BucketValues,
    ExportPosition,
    OutboxDepth,
    OutboxFile,
    StateRow,
    StoredEntity,
    StoredMetric,
    StreamInfo,
    TopRecord,
    Value,
)

T = TypeVar("T")


class SqlStore(ABC):
    """What both stores share; see :class:`Store` for what the methods promise."""

    id: str

    def __init__(self, url: str, policy: RetryPolicy, *, ttl_days: int, top_n: int) -> None:
        self.url = url
        self.retrier = Retrier(policy, url)
        self._ttl_days = ttl_days
        self._top_n = top_n
        self._cache = EntityCache()
        self._layouts: dict[str, Layout] = {}
        """What each stream registered here, and under no name who did not tell."""
        # Re-entrant, so that a commit's own try may look after the stream's lock.
        self._writing = threading.RLock()

    # What a database must bring.

    @abstractmethod
    def _write_once(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` in a transaction that no other writer's overlaps, and commit it.

        Raises ``TransientError`` where another try may succeed; nothing is changed then, or all.
        """

    @abstractmethod
    def _read_once(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` on a snapshot of what is committed."""

    @abstractmethod
    def _lock(self, stream: str) -> bool:
        """Take the lock of a stream's writer; False if another holds it."""

    @abstractmethod
    def _unlock(self, stream: str) -> None:
        """Let go of a stream's lock, if it is held."""

    @abstractmethod
    def _alive(self, session: Session, stream: str) -> bool:
        """Whether somebody holds a stream's lock, here or in another process."""

    @abstractmethod
    def _held(self) -> list[str]:
        """The streams whose lock is held."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of the database."""

    @abstractmethod
    def _tidy_up(self, owner: Owner | None) -> None:
        """Remove what this writer of a stream, or one before it, has brought and never merged."""

    @abstractmethod
    def _before_commit(self, stream: str) -> None:
        """Look after the stream's lock before a try at a commit."""

    # Writing.

    def register(
        self, metrics: Iterable[Metric], *, retire: bool = True, stream: str = ""
    ) -> Layout:
        """See :meth:`Store.register`."""
        wanted = list(metrics)
        with self._writing:
            layout = self._write(
                lambda session: register_module.register(
                    session,
                    wanted,
                    _newest(session),
                    ttl_days=self._ttl_days,
                    retire=retire,
                    stream=stream,
                    alive=lambda each: self._alive(session, each),
                )
            )
            self._layouts[stream] = layout
        return layout

    def claim(
        self,
        stream: str,
        checkpoint_id: str,
        *,
        fresh: bool,
        committed: int | None,
        planned: int | Exempt | None = Exempt.NO_LOG,
    ) -> Claim:
        """See :meth:`Store.claim`."""
        with self._writing:
            ours = stream in self._held()
            if not ours and not self.retrier.run(lambda: self._lock(stream)):
                holder = self._read(lambda session: streams_module.holder(session, stream))
                raise StoreInUseError(self.url, stream, holder)
            try:
                claim = self._write(
                    lambda session: streams_module.claim(
                        session,
                        stream,
                        checkpoint_id,
                        fresh=fresh,
                        committed=committed,
                        planned=planned,
                    )
                )
            except BaseException:
                if not ours:
                    self._unlock(stream)
                raise
            self._tidy_up((stream, claim.epoch))
            return claim

    def release(self, stream: str) -> None:
        """See :meth:`Store.release`."""
        with self._writing:
            self._unlock(stream)

    def commit(self, batch: Batch) -> CommitResult:
        """See :meth:`Store.commit`."""
        layout = self._layouts.get(batch.stream, self._layouts.get(""))
        commit = Commit(batch, layout, ttl_days=self._ttl_days, top_n=self._top_n)

        def attempt() -> CommitResult:
            self._before_commit(batch.stream)
            return self._write_once(
                lambda session: commit.run(session, _newest(session), self._cache)
            )

        with self._writing:
            result = self.retrier.run(attempt)
            self._cache.add(commit.learnt)
        return result

    # Reading.

    def read(self, work: Callable[[Snapshot], T]) -> T:
        """See :meth:`Store.read`."""
        return self._read(lambda session: work(Snapshot(session)))

    def newest_minute(self) -> int | None:
        """See :meth:`Store.newest_minute`."""
        return self._read(_newest)

    def metrics(self, include_retired: bool = False) -> list[StoredMetric]:
        """See :meth:`Store.metrics`."""
        found = self._read(register_module.all_metrics)
        return [each for each in found if each.active or (include_retired and each.columns)]

    def values(
        self,
        metric: str | StoredMetric,
        *,
        entity: str | None = None,
        grain: Grain = Grain.MINUTE,
        start: Moment | None = None,
        end: Moment | None = None,
        layer: str | None = None,
        limit: int | None = None,
    ) -> list[Value]:
        """See :meth:`Store.values`."""
        wanted = Selection(grain, entity, start, end, layer, limit)

        def work(session: Session) -> list[Value]:
            found = reading.find_metric(session, metric)
            return reading.read_values(session, found, wanted)

        return self._read(work)

    def iter_values(
        self,
        metric: str | StoredMetric,
        *,
        entity: str | None = None,
        grain: Grain = Grain.MINUTE,
        start: Moment | None = None,
        end: Moment | None = None,
        layer: str | None = None,
    ) -> Iterator[Value]:
        """See :meth:`Store.iter_values`."""
        wanted = Selection(grain, entity, start, end, layer)
        found = self._read(lambda session: reading.find_metric(session, metric))

        def page(after: Place | None) -> tuple[list[Value], Place | None]:
            def work(session: Session) -> tuple[list[Value], Place | None]:
                # Its columns may have gone to another metric since the page before.
                now = reading.find_metric(session, found)
                return reading.read_page(session, now, wanted, after)

            return self._read(work)

        return reading.by_pages(page)

    def count_values(
        self,
        metric: str | StoredMetric,
        *,
        entity: str | None = None,
        grain: Grain = Grain.MINUTE,
        start: Moment | None = None,
        end: Moment | None = None,
        layer: str | None = None,
    ) -> int:
        """See :meth:`Store.count_values`."""
        wanted = Selection(grain, entity, start, end, layer)

        def work(session: Session) -> int:
            found = reading.find_metric(session, metric)
            return reading.count_values(session, found, wanted)

        return self._read(work)

    def states(
        self,
        metric: str | StoredMetric,
        *,
        entity: str | None = None,
        grain: Grain = Grain.MINUTE,
        start: Moment | None = None,
        end: Moment | None = None,
        layer: str | None = None,
        limit: int | None = None,
    ) -> list[StateRow]:
        """See :meth:`Store.states`."""
        wanted = Selection(grain, entity, start, end, layer, limit)

        def work(session: Session) -> list[StateRow]:
            found = reading.find_metric(session, metric)
            return reading.read_states(session, found, wanted)

        return self._read(work)

    def bucket_values(
        self, bucket: int, *, grain: Grain = Grain.MINUTE, most: int | None = None
    ) -> BucketValues:
        """See :meth:`Store.bucket_values`."""
        if most is not None and most < 0:
            raise ConfigError("most", most, "a whole number of at least 0, or None for all")
        return self._read(lambda session: bucket_module.read_bucket(session, grain, bucket, most))

    def entities(
        self, kind: str | None = None, name_like: str | None = None, layer: str | None = None
    ) -> list[StoredEntity]:
        """See :meth:`Store.entities`."""
        return self._read(lambda session: reading.read_entities(session, kind, name_like, layer))

    def top(
        self,
        stream: str,
        *,
        entity: str | None = None,
        grain: Grain = Grain.MINUTE,
        bucket: Moment | tuple[Moment | None, Moment | None] | None = None,
        n: int | None = None,
    ) -> list[TopRecord]:
        """See :meth:`Store.top`."""
        start, end = bucket if isinstance(bucket, tuple) else (bucket, bucket)
        wanted = Selection(grain, entity, start, end)
        return self._read(lambda session: reading.read_top(session, stream, wanted, n))

    def top_streams(self) -> list[str]:
        """See :meth:`Store.top_streams`."""
        rows = self._read(
            lambda session: session.rows("SELECT DISTINCT stream FROM topn ORDER BY stream")
        )
        return [stream for (stream,) in rows]

    def counters(self) -> dict[CounterKey, int]:
        """See :meth:`Store.counters`."""
        rows = self._read(
            lambda session: session.rows(
                "SELECT what, source, reason, n FROM counter ORDER BY what, source, reason"
            )
        )
        return {(what, source, reason): n for what, source, reason, n in rows}

    def streams(self) -> list[StreamInfo]:
        """See :meth:`Store.streams`."""
        return self._read(streams_module.all_streams)

    # The outbox.

    def outbox(self, place: str, *, after: int = 0, limit: int = 1000) -> list[OutboxFile]:
        """See :meth:`Store.outbox`."""
        return self._read(lambda session: outbox_module.files_after(session, place, after, limit))

    def outbox_depth(self, place: str, *, after: int = 0) -> OutboxDepth:
        """See :meth:`Store.outbox_depth`."""
        return self._read(lambda session: outbox_module.depth_after(session, place, after))

    def exporters(self, place: str | None = None) -> list[ExportPosition]:
        """See :meth:`Store.exporters`."""
        return self._read(lambda session: outbox_module.positions(session, place))

    def join_outbox(self, exporter: str, place: str) -> int:
        """See :meth:`Store.join_outbox`."""
        return self._write(lambda session: outbox_module.join(session, exporter, place))

    def pass_outbox(
        self,
        exporter: str,
        place: str,
        sent: Sequence[tuple[int, int]],
        counters: Mapping[CounterKey, int] | None = None,
    ) -> list[str]:
        """See :meth:`Store.pass_outbox`."""

        def work(session: Session) -> list[str]:
            counted = dict(counters or {})
            free = outbox_module.advance(session, exporter, place, sent, counted)
            add_counters(session, counted)
            return free

        return self._write(work)

    def leave_outbox(self, exporter: str, place: str) -> list[str]:
        """See :meth:`Store.leave_outbox`."""

        def work(session: Session) -> list[str]:
            counted: dict[CounterKey, int] = {}
            free = outbox_module.leave(session, exporter, place, counted)
            add_counters(session, counted)
            return free

        return self._write(work)

    def totals(
        self, metrics: Sequence[StoredMetric], wanted: Mapping[int, Collection[str]]
    ) -> dict[tuple[int, str], list[Final]]:
        """See :meth:`Store.totals`."""
        if not metrics or not wanted:
            return {}
        return self._read(lambda session: outbox_module.totals(session, metrics, wanted))

    # Its life.

    def close(self) -> None:
        """See :meth:`Store.close`. A commit that waits for its next try ends with an error."""
        if self.retrier.close():
            with self._writing:
                for stream in self._held():
                    with contextlib.suppress(StoreError):
                        self._unlock(stream)
                self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, work: Callable[[Session], T]) -> T:
        with self._writing:
            return self.retrier.run(lambda: self._write_once(work))

    def _read(self, work: Callable[[Session], T]) -> T:
        return self.retrier.run(lambda: self._read_once(work))


def _newest(session: Session) -> int | None:
    ((value,),) = session.rows("SELECT value FROM meta WHERE key = 'newest_minute'")
    return int(value) if value else None
