"""L2: merges states again and commits them, of all event types in one transaction."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from batchmill.aggregate import (
    Aggregator,
    EntityAccount,
    EntityBook,
    EntityLimiter,
    SlowestStatements,
    contribution,
)
from batchmill.oal import Metric
from batchmill.sources import UnknownNameError, bucket_end, bucket_start
from batchmill.store import (
    OVERFLOW_LABELS,
    TOO_MANY_LABELS,
    Batch,
    CommitResult,
    FencedError,
    Layout,
    LayoutChangedError,
    Store,
    StoreError,
)
from batchmill.waiters import back_off_ms
from batchmill.wording import count_of
from batchmill.workers.l1 import DeltaBuffer, SourceStates
from batchmill.workers.settings import WorkerSettings
from batchmill.workers.stream import Stream

log = logging.getLogger("batchmill.workers")

INVALID = "invalid"
"""The store's counter of events that no metric can count, by reason."""
STATEMENT = "Statement"
TOO_FAR_AHEAD = "time too far ahead"
_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 50, 5_000
"""Pauses between tries of a commit that fails."""
_GIVE_UP_AFTER = 10
"""So many tries fail with an error that is not the store's before a batch is given up."""
_LOOK_S = 0.1
"""How often one looks again who waits for room."""
_HANG_S = 1.0
"""How much longer than it was given closing waits for a commit that is under way."""


@dataclass(frozen=True, slots=True)
class CommitStats:
    """Events and statements that L2 and TopN have committed, refused or given up."""

    committed: int = 0
    """Events in the store."""
    expired: int = 0
    """Events that are older than the store keeps."""
    late: int = 0
    """Committed events that came late."""
    invalid: Mapping[str, int] = field(default_factory=dict)
    """Events that no metric can count, by reason."""
    failed: int = 0
    """Events that were given up; the log has the error."""
    statements: int = 0
    """Statements that were counted, of which the slowest are in the store."""
    invalid_statements: int = 0
    """Statements that are too far ahead of the clock."""
    failed_statements: int = 0
    """Statements that were given up."""
    commits: int = 0
    """Transactions."""
    retries: int = 0
    """Commits that failed and were tried again."""


@dataclass
class _PendingCommit:
    """What waits for a commit."""

    buffers: dict[str, DeltaBuffer] = field(default_factory=dict)
    invalid: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By event type and reason."""
    statements: SlowestStatements | None = None
    statement_count: int = 0
    """The invalid ones included."""
    events: int = 0
    """The invalid ones included."""
    since_s: float = 0.0
    tries: int = 0

    @property
    def nbytes(self) -> int:
        states = sum(buffer.nbytes for buffer in self.buffers.values())
        return states + (0 if self.statements is None else self.statements.nbytes)

    def __bool__(self) -> bool:
        return bool(self.events or self.statement_count)

    def __str__(self) -> str:
        events = count_of(self.events, "event")
        if not self.statement_count:
            return events
        return f"{events} and {count_of(self.statement_count, 'statement')}"


class Committer:
    """Merges what L1 and TopN hand on, and commits it once in a period. Any thread may call it.

    * What it was given is in memory, merged, until the store has it. A commit that fails is tried
      again, after ever longer pauses; what comes meanwhile goes into the next one.
    * A commit that got no answer is not counted twice: its stream's number tells whether it is in
      the store.
    * A batch is given up, counted as failed and logged, only if the store is fine and an error
      comes again and again.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        metrics: Iterable[Metric],
        aggregators: Mapping[str, Aggregator],
        settings: WorkerSettings | None = None,
        *,
        name: str | None = None,
    ) -> None:
        """``name`` is that of the application; see :class:`~batchmill.workers.Embedded`."""
        self._open_store = open_store
        self._metrics = list(metrics)
        self._aggregators = aggregators
        self._settings = settings or WorkerSettings()
        self._name = name
        self.reset()

    def reset(self) -> None:
        """Start with nothing: in a forked child, what was there is the parent's."""
        self.lock = threading.Lock()
        """Held while something is added, or counted."""
        self.turn = threading.Lock()
        """Held by the thread that commits."""
        self._waiting = _PendingCommit()
        self._draft: _PendingCommit | None = None
        """What is being committed, maybe not for the first time."""
        self._store: Store | None = None
        self._stream: Stream | None = None
        self._layout: Layout | None = None
        self._new_entities = EntityAccount(
            self._settings.max_new_entities,
            self._settings.max_entities,
            lambda: self.connect().count_entities(),
        )
        self._next_try_s = 0.0
        self._give_up_s = float("inf")
        self._stopped = threading.Event()
        self._close_late = False
        """Whether the thread that commits now has to close the store."""
        self.counts = CommitStats()
        """What became of everything so far: replaced at each commit, never changed."""

    def connect(self) -> Store:
        """Open the store, claim a stream and register the metrics, as far as that is not done."""
        if self._store is None:
            self._store = self._open_store()
        if self._stream is None:
            self._stream, self._layout = Stream(self._store, self._name or "embedded"), None
        if self._layout is None:
            self._layout = self._store.register(
                self._metrics,
                retire=self._name is not None,
                stream=self._stream.name,
                owner=self._name,
            )
        return self._store

    def add_states(self, states: SourceStates) -> None:
        """Add states of an event type; waits while too much waits for the store."""
        self._wait_for_room(None)
        with self.lock:
            if self._stopped.is_set():
                self.counts = replace(self.counts, failed=self.counts.failed + states.events)
                return
            waiting = self._begin()
            buffer = waiting.buffers.get(states.source)
            if buffer is None:
                buffer = DeltaBuffer(self._aggregators[states.source])
                waiting.buffers[states.source] = buffer
            waiting.events += states.events
            buffer.add(states.deltas)
            for reason, count in states.invalid.items():
                waiting.invalid[states.source, reason] += count

    def add_statements(
        self,
        statements: SlowestStatements,
        count: int,
        too_far_ahead: int = 0,
        timeout: float | None = None,
    ) -> bool:
        """Add ``count`` statements, beside those that are too far ahead of the clock.

        Waits while too much waits for the store; False after ``timeout`` seconds, or if it is
        closed, and then nothing was added.
        """
        in_time = self._wait_for_room(timeout)
        with self.lock:
            if not in_time or self._stopped.is_set():
                return False
            waiting = self._begin()
            if waiting.statements is None:
                waiting.statements = statements
            else:
                waiting.statements.merge(statements)
            waiting.statement_count += count + too_far_ahead
            if too_far_ahead:
                waiting.invalid[STATEMENT, TOO_FAR_AHEAD] += too_far_ahead
            return True

    def commit_if_due(self) -> None:
        """Commit if the period is over, unless another thread is at it."""
        with self.lock:
            now_s = time.monotonic()
            due_s = self._waiting.since_s + self._settings.l2_period_s
            due = self._draft is not None or (bool(self._waiting) and now_s >= due_s)
        if due and now_s >= self._next_try_s and self.turn.acquire(blocking=False):
            self._take_turn()

    def commit_all(self, deadline_s: float) -> bool:
        """Commit what waits now, trying until ``deadline_s``; whether none of it waits any more.

        ``deadline_s`` is a time of the monotonic clock.
        """
        for _ in range(2):  # what failed before, then what has come since
            while True:
                if not self.turn.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                    return False
                if self._take_turn():
                    break
                pause_s = min(self._next_try_s, deadline_s) - time.monotonic()
                if self._stopped.wait(max(0.0, pause_s)) or time.monotonic() >= deadline_s:
                    return False
        return True

    def give_up_at(self, deadline_s: float) -> None:
        """Let nobody wait for room after ``deadline_s``, a time of the monotonic clock."""
        self._give_up_s = deadline_s

    def close(self, deadline_s: float | None = None) -> bool:
        """Release the stream and close the store; what still waits is lost, and counted.

        A commit that is under way is waited for until shortly after ``deadline_s``. False if
        something was lost.
        """
        self._stopped.set()
        wait_s = 0.0 if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        in_turn = self.turn.acquire(timeout=wait_s + _HANG_S)
        with self.lock:
            lost = [part for part in (self._draft, self._waiting) if part]
            self._draft, self._waiting = None, _PendingCommit()
            for part in lost:
                self._count_lost(part)
        for part in lost:
            log.error("%s lost: the store took no more before closing", part)
        if not in_turn:
            log.error("a commit hangs: the store is closed when it returns")
            self._close_late = True
            in_turn = self.turn.acquire(blocking=False)
        if in_turn:
            self._close_store()
            self.turn.release()
        return not lost

    def prepare_fork(self) -> None:
        """Before a fork; the caller holds :attr:`turn`."""
        if self._store is not None:
            self._store.prepare_fork()

    def abandon(self) -> None:
        """In a forked child: leave the parent's store alone, and start with nothing."""
        if self._store is not None:
            self._store.abandon()
        self.reset()

    def _begin(self) -> _PendingCommit:
        if not self._waiting:
            self._waiting.since_s = time.monotonic()
        return self._waiting

    def _wait_for_room(self, timeout: float | None) -> bool:
        """Wait while more than ``max_waiting_bytes`` wait; False if time is up before."""
        deadline_s = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._stopped.is_set():
            with self.lock:
                draft = 0 if self._draft is None else self._draft.nbytes
                if self._waiting.nbytes + draft <= self._settings.max_waiting_bytes:
                    return True
            now_s = time.monotonic()
            if now_s >= self._give_up_s:
                return True
            if now_s >= deadline_s:
                return False
            if now_s >= self._next_try_s and self.turn.acquire(timeout=_LOOK_S):
                self._take_turn()
            else:
                self._stopped.wait(min(_LOOK_S, max(0.0, self._next_try_s - now_s)))
        return True

    def _take_turn(self) -> bool:
        """Commit; the caller has acquired :attr:`turn`, which is released."""
        try:
            return self._commit()
        finally:
            if self._close_late:
                self._close_store()
            self.turn.release()

    def _close_store(self) -> None:
        store, self._store, self._stream, self._layout = self._store, None, None, None
        if store is not None:
            store.close()

    def _commit(self) -> bool:
        """Commit what failed before, else what waits; False if that failed (again)."""
        with self.lock:
            if self._draft is None and self._waiting:
                self._draft, self._waiting = self._waiting, _PendingCommit()
            draft = self._draft
        if draft is None:
            return True
        draft.tries += 1
        try:
            store = self.connect()
            now_s = time.time()
            budget = self._new_entities.budget(now_s)
            limiter = None if budget is None else EntityLimiter(budget, store.unknown_entities)
            batch, late = self._batch(draft, store.newest_minute(until_s=now_s), limiter)
            assert self._stream is not None
            try:
                result = self._stream.commit(batch)
            except FencedError as error:
                self._fenced(draft, error)
                return False
        except Exception as error:  # noqa: BLE001 - what waits is kept
            if isinstance(error, (LayoutChangedError, UnknownNameError)):
                self._layout = None  # register again
            self._failed(draft, error)
            return False
        self._next_try_s = 0.0
        if limiter is not None:
            self._new_entities.add(limiter.overflow)
        self._count(draft, result, late)
        return True

    def _batch(
        self, draft: _PendingCommit, newest: int | None, limiter: EntityLimiter | None
    ) -> tuple[Batch, int]:
        """What a draft commits, and how many of its events are late."""
        assert self._layout is not None
        late_before = None
        if newest is not None:
            late_after = timedelta(minutes=self._settings.late_after_minutes)
            late_before = bucket_start(newest) - late_after
        batch, book, late = Batch("", 0, 0), EntityBook(limiter), 0
        counters: Counter[tuple[str, str, str]] = Counter()
        minutes = [0]
        for source, buffer in draft.buffers.items():
            made = contribution(buffer.merged(), self._aggregators[source], self._layout, book)
            batch.deltas += made.deltas
            counters["rows", source, ""] += made.rows
            counters[OVERFLOW_LABELS, source, TOO_MANY_LABELS] += made.moved_labels
            for minute, rows in made.rows_by_minute.items():
                day = minute // 10_000
                batch.rows[source, day] = batch.rows.get((source, day), 0) + rows
                if late_before is not None and bucket_end(minute) <= late_before:
                    counters["late", source, ""] += rows
                    late += rows
            minutes += made.rows_by_minute
        for (source, reason), count in draft.invalid.items():
            counters[INVALID, source, reason] += count
        if draft.statements is not None:
            book.limit_services(draft.statements.places())
            batch.topn = draft.statements.topn_rows(book)
            batch.statements = draft.statements.statement_rows(book)
            minutes += [row.minute for row in batch.statements]
        batch.newest_minute = max(minutes) or None
        batch.entities = book.rows()
        if limiter is not None:
            counters.update(limiter.overflow.counters())
        batch.counters = {key: count for key, count in counters.items() if count}
        return batch, late

    def _count(self, draft: _PendingCommit, result: CommitResult, late: int) -> None:
        invalid: Counter[str] = Counter()
        for (source, reason), count in draft.invalid.items():
            if source != STATEMENT:
                invalid[reason] += count
        invalid_statements = draft.invalid[STATEMENT, TOO_FAR_AHEAD]
        with self.lock:
            if self._draft is not draft:
                return  # closed meanwhile, and counted as lost: nobody waited for the answer
            self._draft = None
            counts = self.counts
            committed = draft.events - invalid.total() - result.expired
            statements = draft.statement_count - invalid_statements
            self.counts = replace(
                counts,
                committed=counts.committed + committed,
                expired=counts.expired + result.expired,
                late=counts.late + late,
                invalid=invalid + Counter(counts.invalid),
                statements=counts.statements + statements,
                invalid_statements=counts.invalid_statements + invalid_statements,
                commits=counts.commits + 1,
            )

    def _count_lost(self, part: _PendingCommit) -> None:
        """Count as failed; the caller holds the lock."""
        self.counts = replace(
            self.counts,
            failed=self.counts.failed + part.events,
            failed_statements=self.counts.failed_statements + part.statement_count,
        )

    def _failed(self, draft: _PendingCommit, error: Exception) -> None:
        tries = draft.tries
        pause_ms = back_off_ms(_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS, 2, tries)
        self._next_try_s = time.monotonic() + pause_ms / 1000
        if tries >= _GIVE_UP_AFTER and not isinstance(error, StoreError):
            log.error("%s lost: commits fail again and again", draft, exc_info=error)
            self._give_up(draft)
            return
        with self.lock:
            self.counts = replace(self.counts, retries=self.counts.retries + 1)
        if tries & (tries - 1) == 0:  # the 1st, 2nd, 4th, 8th ... time
            log.warning(
                "the commit of %s failed %s, next try in %.1f s: %s",
                draft,
                count_of(tries, "time"),
                pause_ms / 1000,
                error,
            )

    def _give_up(self, draft: _PendingCommit) -> None:
        with self.lock:
            if self._draft is draft:
                self._draft = None
                self._count_lost(draft)

    def _fenced(self, draft: _PendingCommit, error: FencedError) -> None:
        """Another process has taken the stream over: go on with another one."""
        assert self._stream is not None
        if self._stream.leave():
            self._failed(draft, error)
        else:
            log.error(
                "%s may be missing in the store: a commit got no answer, and another process has "
                "taken over the stream since",
                draft,
            )
            self._give_up(draft)
        self._stream = None


class L2Worker:
    """The handler of one event type on L2's queue."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    def consume(self, batch: list[Any]) -> None:
        """Merge states, and commit if it is time."""
        for states in batch:
            self._committer.add_states(states)
        self._committer.commit_if_due()

    def on_idle(self) -> None:
        """Commit what is due; called while no states come."""
        self._committer.commit_if_due()

    def on_shutdown(self) -> None:
        """Do nothing: closing the committer commits the rest."""
