"""The store: the calls that write, each one transaction on whichever database is behind it.

Those that read are in :mod:`batchmill.store.reading.reader`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from batchmill.errors import ConfigError
from batchmill.oal import Metric
from batchmill.store import alert_tables
from batchmill.store.alerts import AlertChange, AlertChangeResult
from batchmill.store.batch import (
    Batch,
    Claim,
    CommitResult,
    CounterKey,
    Layout,
    OpenParts,
    PartShare,
    PartsResult,
)
from batchmill.store.clock import STEP_S, ClockReading, minute_of, span_of
from batchmill.store.errors import StoreError, StoreInUseError
from batchmill.store.reading.reader import StoreReader
from batchmill.store.reading.views import refresh_views
from batchmill.store.results import ClockRepair
from batchmill.store.retry import RetryPolicy
from batchmill.store.sql import commit as commit_sql
from batchmill.store.sql import entities as entities_sql
from batchmill.store.sql import outbox as outbox_sql
from batchmill.store.sql import parts as parts_sql
from batchmill.store.sql import registry, retention
from batchmill.store.sql import stream as stream_sql
from batchmill.store.sql.commit import Commit
from batchmill.store.sql.parts import PartsCommit
from batchmill.store.sql.session import Session
from batchmill.store.sql.stream import Checkpoint, Exempt

if TYPE_CHECKING:
    from batchmill.store.address import TaskAddress

log = logging.getLogger("batchmill.store")

T = TypeVar("T")

_abandoned: list[Store] = []
"""Never collected: closing a connection that the parent has open, too, could disturb it."""


class Store(StoreReader):
    """Where metrics are kept. One writer a stream, any number of readers.

    Every write is one transaction. Reads see what was committed, and go on while a batch is being
    written. All methods may be called from any thread; writes take turns.
    """

    id: str
    """The store's own id, made with it."""
    commits_by_part: ClassVar[bool] = False
    """Whether tasks on other machines commit parts of a batch; see :meth:`commit_parts`."""
    _locks: Mapping[str, object]
    """The locks that it holds, by stream."""

    def __init__(self, url: str, policy: RetryPolicy, *, ttl_days: int, top_n: int) -> None:
        """Use :func:`open_store`."""
        super().__init__(url, policy)
        self._ttl_days = ttl_days
        self._top_n = top_n
        self._cache = entities_sql.EntityCache()
        self._readings: dict[str, ClockReading] = {}
        """What the clocks said at the last commit to each stream."""
        self._layouts: dict[str, Layout] = {}
        """What each stream registered here; under "" what was registered without a stream."""
        # Re-entrant: a commit checks the stream's lock while it holds this.
        self._writing = threading.RLock()

    # What a database implements, beside reading.

    @abstractmethod
    def _write_once(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` in a transaction that no other writer's overlaps, and commit it.

        Raises ``TransientError`` where another try may succeed; nothing is changed then, or all.
        """

    def _write_beside_once(self, work: Callable[[Session], T]) -> T:
        """The same beside other writers, where the database can: ``work`` locks what it reads."""
        return self._write_once(work)

    @abstractmethod
    def _lock(self, stream: str, *, wait: bool) -> bool:
        """Take the lock of a stream's writer; False if another holds it, after a moment or now."""

    @abstractmethod
    def _unlock(self, stream: str) -> None:
        """Release a stream's lock, if it is held."""

    @abstractmethod
    def _has_writer(self, session: Session, stream: str) -> bool:
        """Whether a stream's lock is held, here or in another process."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close all connections."""

    def _check_lock(self, stream: str) -> None:
        """Take the stream's lock again if it got lost; called before each try of a commit."""

    # Writing.

    def register(
        self,
        metrics: Iterable[Metric],
        *,
        retire: bool = True,
        stream: str = "",
        owner: str | None = None,
    ) -> Layout:
        """Give each metric its columns; call it before the first commit, not while one runs.

        The same definition keeps its columns and its history. A changed one, or one that comes
        back, is a new version with columns of its own. Metrics that ``stream`` computed, and no
        other stream does, are retired if they are not in the set; pass ``retire=False`` for a
        stream that writes for a while only. Streams with one ``owner`` count as one: the processes
        of an application, for example. Raises :class:`MetricConflictError` where another stream
        computes a metric of that name with another definition.
        """
        wanted = list(metrics)

        def work(session: Session) -> Layout:
            registered = registry.register(
                session,
                wanted,
                retire=retire,
                stream=stream if owner is None else owner,
                has_writer=lambda other: self._has_writer(session, other),
            )
            refresh_views(session)
            return registered

        with self._writing:
            layout = self._write(work)
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
        wait: bool = True,
    ) -> Claim:
        """Become the one writer of a stream.

        ``fresh``: the checkpoint was made just now. ``committed``: the last batch that the
        checkpoint has marked done, None for none. ``planned``: the newest batch whose input the
        checkpoint has planned, None for none; without a log of plans, ``Exempt.NO_LOG``. Raises
        :class:`StoreInUseError` while another live process has the stream, and
        :class:`CheckpointMismatchError` where store and checkpoint do not match. With ``wait``, a
        process that has just ended is given a moment to be gone.
        """
        checkpoint = Checkpoint(checkpoint_id, fresh, committed, planned)
        with self._writing:
            ours = stream in self._locks
            if not ours and not self.retrier.run(lambda: self._lock(stream, wait=wait)):
                holder = self._read(lambda session: stream_sql.stream_holder(session, stream))
                raise StoreInUseError(self.url, stream, holder)
            try:
                claim = self._write(lambda session: stream_sql.claim(session, stream, checkpoint))
            except BaseException:
                if not ours:
                    self._unlock(stream)
                raise
            return claim

    def release(self, stream: str) -> None:
        """Let another process claim the stream; does nothing if it is not claimed."""
        with self._writing:
            self._unlock(stream)

    def commit(self, batch: Batch) -> CommitResult:
        """Merge a batch, in one transaction; one that was committed before changes nothing."""
        layout = self._layouts.get(batch.stream, self._layouts.get(""))
        reading = batch.clock or ClockReading.now()
        commit = Commit(
            batch,
            layout,
            ttl_days=self._ttl_days,
            top_n=self._top_n,
            reading=reading,
            last=self._readings.get(batch.stream),
        )

        def attempt() -> CommitResult:
            self._check_lock(batch.stream)
            return self._write_once(lambda session: commit.run(session, self._cache))

        with self._writing:
            result = self.retrier.run(attempt)
            self._cache.add(commit.entities)
            if result.applied:
                self._readings[batch.stream] = reading
        if result.clock_step_s:
            log.warning(
                "the clock of %s went %s by %s since its last commit: expiry waits until it has "
                "gone on for an hour",
                batch.stream,
                "ahead" if result.clock_step_s > 0 else "back",
                span_of(abs(result.clock_step_s)),
            )
        return result

    def repair_clock(
        self, now_s: float, *, after_s: float | None = None, apply: bool = False
    ) -> ClockRepair:
        """Remove what comes from the future, and trust ``now_s``, the time in seconds since 1970.

        From the future is what lies after ``after_s``, by default an hour from now. Without
        ``apply`` nothing is changed: the result says what would be removed.
        """
        after = minute_of(now_s + STEP_S if after_s is None else after_s)
        return self._write(
            lambda session: retention.repair_clock(session, now_s, after, apply=apply)
        )

    def unknown_entities(self, kind: str, ids: Iterable[str], few: int = 0) -> set[str]:
        """Which ids of a kind are those of no entity of this store.

        Up to ``few`` that this process has not met before are not looked up: they may be known.
        """
        with self._writing:
            unmet = {id_ for id_ in ids if (kind, entities_sql.fit_text(id_)) not in self._cache}
        if len(unmet) <= few:
            return unmet
        return self._read(lambda session: entities_sql.find_unknown(session, kind, unmet))

    def count_entities(self) -> dict[str, int]:
        """How many entities of each kind there are."""
        return self._read(entities_sql.count_entities)

    # Writing by parts.

    def task_address(self) -> TaskAddress:
        """From what a task opens this store, with :func:`open_for_task`; pickle it to send it.

        It holds the connection's parameters as the driver has found them, a password included.
        """
        raise ConfigError("store", self.url, "a PostgreSQL database, to be written by tasks")

    def begin_parts(
        self, stream: str, epoch: int, number: int, *, wall_s: float | None = None
    ) -> OpenParts:
        """Begin to run a batch whose parts are committed by tasks; call it before each run.

        Tasks of earlier runs cannot commit any more when it returns: it waits for those that are
        about to. ``wall_s`` is what the writer's clock says, by default that of this machine.
        Raises :class:`FencedError` if the stream belongs to another writer.
        """
        now_s = ClockReading.now(wall_s).wall_s
        return self._write_beside(
            lambda session: parts_sql.begin(
                session, stream, epoch, number, ttl_days=self._ttl_days, wall_s=now_s
            )
        )

    def may_be_recut(
        self, stream: str, epoch: int, number: int, *, wall_s: float | None = None
    ) -> bool:
        """Whether nothing of a batch is committed, nor will be until it is begun again.

        Then it may have other input when it is begun again.
        """
        opened = self.begin_parts(stream, epoch, number, wall_s=wall_s)
        return not opened.committed and not opened.recorded

    def commit_parts(self, batch: Batch, share: PartShare) -> PartsResult:
        """Merge some parts of a batch, in one transaction; called by a task.

        Of ``batch``, only what its parts change is written: entities, deltas, slow calls and
        statements. The driver commits the rest when all parts are committed, in a batch with
        ``parts``. Raises :class:`FencedError` or :class:`StaleTaskError` if another writer, or
        another run of the batch, has taken over.
        """
        commit = PartsCommit(batch, share, top_n=self._top_n)
        with self._writing:
            result = self._write_beside(lambda session: commit.run(session, self._cache))
            self._cache.add(commit.entities)
        return result

    # The outbox.

    def join_outbox(self, exporter: str, place: str) -> int:
        """Let an outbox's files wait for an exporter from now on; its position, 0 at first."""
        return self._write(lambda session: outbox_sql.join(session, exporter, place))

    def pass_outbox(
        self,
        exporter: str,
        place: str,
        sent: Sequence[tuple[int, int]],
        counters: Mapping[CounterKey, int] | None = None,
    ) -> list[str]:
        """Record that an exporter has passed files, given as (seq, rows), all up to the last.

        Adds ``counters`` in the same transaction, and returns the files that no exporter waits for
        any more: they are not listed any longer, and the caller removes them. A file that was
        dropped while it was being sent is counted as dropped no more; one that was dropped before
        is given with no rows, and stays counted.
        """

        def work(session: Session) -> list[str]:
            counted = Counter(counters or {})
            paths = outbox_sql.advance(session, exporter, place, sent, counted)
            commit_sql.add_counters(session, counted)
            return paths

        return self._write(work)

    def leave_outbox(self, exporter: str, place: str) -> list[str]:
        """Forget an exporter and count what it has not sent; returns the files to remove."""

        def work(session: Session) -> list[str]:
            counted: Counter[CounterKey] = Counter()
            paths = outbox_sql.leave(session, exporter, place, counted)
            commit_sql.add_counters(session, counted)
            return paths

        return self._write(work)

    # Alerts.

    def change_alerts(self, change: AlertChange) -> AlertChangeResult:
        """Write what an evaluation of alert rules changes, in one transaction."""
        return self._write_beside(lambda session: alert_tables.apply_change(session, change))

    def settle_notifications(self, seqs: Sequence[int]) -> None:
        """Remove notifications that were sent, or that nobody will accept."""
        self._write_beside(lambda session: alert_tables.settle(session, seqs))

    def drop_notifications(self, target: str) -> int:
        """Remove all that waits for a target; how many notifications there were."""
        return self._write_beside(lambda session: alert_tables.drop_target(session, target))

    # Closing.

    def close(self) -> None:
        """Release all claims and close the connections; may be called twice.

        A commit that waits for its next try ends with a :class:`StoreClosedError`.
        """
        if self.retrier.close():
            with self._writing:
                for stream in list(self._locks):
                    with contextlib.suppress(StoreError):
                        self._unlock(stream)
                self._disconnect()

    def prepare_fork(self) -> None:
        """Before a fork: close such connections; the next use opens them again.

        Nobody may use the store between this call and the fork.
        """

    def abandon(self) -> None:
        """In a forked child: leave the connections and locks to the parent. Do not use it again."""
        _abandoned.append(self)

    def _write(self, work: Callable[[Session], T]) -> T:
        with self._writing:
            return self.retrier.run(lambda: self._write_once(work))

    def _write_beside(self, work: Callable[[Session], T]) -> T:
        with self._writing:
            return self.retrier.run(lambda: self._write_beside_once(work))
