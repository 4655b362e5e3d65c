"""A store that is locked, full, gone, hangs or is taken over: nothing is lost or counted twice."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batchmill.aggregate import Aggregator
from batchmill.oal import load
from batchmill.store import (
    Batch,
    CommitResult,
    RetryPolicy,
    Store,
    StoreRefusedError,
    StoreUnavailableError,
    open_store,
)
from batchmill.workers import Committer, L1Worker, SourceStates, WorkerSettings
from batchmill.workers import embedded as module
from tests.kit.servers.postgres import Postgres
from tests.kit.threads import WAIT_S, until
from tests.workers.kit import NOON, OAL, MillSale, embedded, totals


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The address of an empty place for a store."""
    return f"sqlite:///{tmp_path}/metrics.db"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store tries once; the committer tries again."""
    monkeypatch.setattr(module, "_RETRY", RetryPolicy(give_up_after_s=0))


@contextlib.contextmanager
def locked(url: str) -> Iterator[None]:
    """Another program writes to the file, and takes its time."""
    other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def sales(count: int, shops: int = 1) -> list[MillSale]:
    """So many events, in turn of so many shops."""
    return [MillSale(f"shop {number % shops}", 1) for number in range(count)]


def test_events_wait_for_a_locked_store(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are merged in memory up to a bound, then dropped and counted; then all are there."""
    bounds = {
        "max_waiting_bytes": 1,
        "l1_queue": {"buffer_size": 10},
        "l2_queue": {"buffer_size": 1},
    }
    with embedded(url, l1_period_s=0.001, l2_period_s=0.001, **bounds) as mill:
        with locked(url):
            until(lambda: not mill.emit(MillSale("a", 1)) and mill.stats().retries, "a drop")
            assert mill.stats().waiting > 10
            assert not mill.flush(0.01)
        assert mill.flush(WAIT_S)
        stats = mill.stats()
        assert stats.committed == stats.accepted
        assert stats.dropped["full"] >= 1
    assert totals(url) == (stats.accepted, stats.accepted)
    assert "the commit of" in caplog.text


def test_closing_does_not_wait_for_ever(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """After its timeout what is not committed is lost, counted and logged; it answers False."""
    mill = embedded(url)
    mill.emit_many(sales(3))
    with locked(url):
        assert not mill.close(0.01)
        assert (mill.stats().failed, mill.stats().waiting) == (3, 0)
        assert "3 events lost" in caplog.text
        assert not mill.close()
    assert totals(url) == (0, 0)


def test_a_store_that_hangs(postgres_url: str) -> None:
    """Closing answers all the same; the thread that hangs closes the store later."""
    import psycopg

    with psycopg.connect(postgres_url) as other:
        mill = embedded(postgres_url, l1_period_s=0.001, l2_period_s=0.001)
        other.execute("SELECT value FROM meta FOR UPDATE")
        mill.emit_many(sales(3))
        until(lambda: mill._committer.turn.locked(), "a commit")
        begun = time.monotonic()
        assert not mill.close(0.01)
        assert time.monotonic() - begun < WAIT_S / 2
        assert (mill.stats().failed, mill.stats().waiting) == (3, 0)
        other.rollback()
    until(lambda: mill._committer._store is None, "the store is closed")


def test_a_full_disk(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Events wait until there is room; the log says what to do."""
    with embedded(url, l1_period_s=0.001, l2_period_s=0.001) as mill:
        store: Any = mill._committer._store
        store._writer.execute("PRAGMA max_page_count = 60")
        mill.emit_many(sales(2000, 2000))
        until(lambda: "no disk space" in caplog.text, "a failed commit")
        assert mill.stats().committed == 0
        store._writer.execute("PRAGMA max_page_count = 1000000")
        assert mill.flush(WAIT_S)
    assert totals(url) == (2000, 2000)


@pytest.mark.system
def test_a_server_that_crashes(postgres: Postgres, caplog: pytest.LogCaptureFixture) -> None:
    """Events that come while it is down are there when it is up again."""
    url = postgres.new_database()
    with embedded(url, l1_period_s=0.001, l2_period_s=0.001) as mill:
        mill.emit_many(sales(5))
        assert mill.flush(WAIT_S)
        postgres.stop("immediate")
        mill.emit_many(sales(5))
        until(lambda: mill.stats().retries, "a failed commit")
        postgres.start()
        assert mill.flush(WAIT_S)
    assert totals(url) == (10, 10)


def test_a_store_that_cannot_be_used_at_the_start(postgres: Postgres, tmp_path: Path) -> None:
    """The constructor raises, and leaves nothing behind."""
    with pytest.raises(StoreUnavailableError):
        embedded("postgresql://nobody@127.0.0.1:1/nothing")
    with pytest.raises(StoreRefusedError):
        embedded(f"postgresql://postgres@127.0.0.1:{postgres.port}/nothing")
    with pytest.raises(OSError, match="nowhere"):
        embedded(f"sqlite:///{tmp_path}/nowhere/metrics.db")


def test_another_process_takes_the_stream(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """As when a lock got lost: it goes on with another stream, and commits what it has."""
    with embedded(url) as mill, open_store(url) as other:
        mill.emit(MillSale("a", 1))
        assert mill.flush(WAIT_S)
        [lock] = Path(url.removeprefix("sqlite:///")).parent.glob("*.lock")
        lock.unlink()
        other.claim("embedded-0", "workers", fresh=False, committed=0)
        mill.emit(MillSale("a", 1))
        assert mill.flush(WAIT_S)
        assert [stream.name for stream in other.streams()] == ["embedded-0", "embedded-1"]
    assert totals(url) == (2, 2)
    assert "was claimed again" in caplog.text


def test_columns_that_were_given_to_other_metrics(url: str) -> None:
    """As after a long pause: metrics are registered again, and no wrong column gets anything."""
    with embedded(url, ttl_days=2) as mill:
        mill.emit(MillSale("a", 1, NOON - timedelta(days=30)))
        assert mill.flush(WAIT_S)
        with open_store(url, ttl_days=2) as other:
            other.register([], stream="embedded-0")
        with embedded(url, ttl_days=2, oal=OAL.replace("mill", "till")) as other_mill:
            other_mill.emit(MillSale("a", 1))
        with embedded(url, ttl_days=2, oal=OAL.replace("mill", "bill")):
            mill.emit_many([MillSale("a", 7)] * 2)
            assert mill.flush(WAIT_S)
    with open_store(url) as store:
        values = {
            metric.name: [value.value for value in store.values(metric)]
            for metric in store.metrics()
        }
    assert (values["mill_sales"], values["mill_cents"], values["bill_sales"]) == ([2], [14], [])


class Parts:
    """A committer by hand, and a worker that hands on to it at once."""

    def __init__(self, store: Store, **settings: Any) -> None:
        metrics = load(OAL)
        aggregator = Aggregator(metrics.catalog.source("MillSale"), metrics)
        # However slow the machine is, states are handed on when a test says so.
        given = WorkerSettings(**{"l1_period_s": 3600, **settings})
        self.committer = Committer(lambda: store, metrics, {"MillSale": aggregator}, given)
        self.worker = L1Worker(aggregator, self._hand_on, given)
        self.takes = True

    def _hand_on(self, states: SourceStates, timeout: float | None) -> bool:
        if self.takes:
            self.committer.add_states(states)
        return self.takes

    def commit(self) -> bool:
        return self.committer.commit_all(time.monotonic() + WAIT_S)


@pytest.mark.parametrize("reached", [True, False], ids=["committed", "not committed"])
def test_a_commit_that_got_no_answer(
    url: str, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    """It is tried again, and counted once, whether it had reached the store or not."""
    with open_store(url, ttl_days=3650) as store:
        parts = Parts(store)
        commit, failures = store.commit, [StoreUnavailableError(url, 1, 0.1, "no answer")]

        def without_answer(batch: Batch) -> CommitResult:
            if not failures:
                return commit(batch)
            if reached:
                commit(batch)
            raise failures.pop()

        monkeypatch.setattr(store, "commit", without_answer)
        for _ in range(2):
            parts.worker.consume(sales(3))
            parts.worker.flush()
            assert parts.commit()
        assert (parts.committer.counts.committed, parts.committer.counts.retries) == (6, 1)
        assert parts.committer.close()
    assert totals(url) == (6, 6)


def test_an_error_that_comes_again_and_again(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the store is not to blame, its batch is given up and counted; later ones go in."""
    monkeypatch.setattr("batchmill.workers.l2._LONGEST_PAUSE_MS", 1)
    with open_store(url, ttl_days=3650) as store:
        parts = Parts(store)
        failures = [ZeroDivisionError("a bug")] * 10
        commit = store.commit

        def buggy(batch: Batch) -> CommitResult:
            if failures:
                raise failures.pop()
            return commit(batch)

        monkeypatch.setattr(store, "commit", buggy)
        parts.worker.consume(sales(3))
        parts.worker.flush()
        assert parts.commit()
        assert parts.committer.counts.failed == 3
        parts.worker.consume(sales(2))
        parts.worker.flush()
        assert parts.commit()
        assert parts.committer.close()
    assert totals(url) == (2, 2)
    assert "3 events lost: commits fail again and again" in caplog.text
    assert "a bug" in caplog.text


def test_states_that_are_not_taken_are_kept(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """L1 hands them on later; at the end they are lost, and counted."""
    with open_store(url, ttl_days=3650) as store:
        parts = Parts(store)
        parts.takes = False
        parts.worker.consume(sales(3))
        assert not parts.worker.flush(0)
        parts.takes = True
        parts.worker.consume(sales(2))
        assert parts.worker.flush()
        assert parts.commit()
        parts.takes = False
        parts.worker.consume(sales(4))
        parts.worker.on_shutdown()
        assert parts.worker.failed == 4
        assert parts.committer.close()
        parts.committer.add_states(SourceStates("MillSale", parts.worker._aggregator.empty(), 1))
        assert parts.committer.counts.failed == 1
    assert totals(url) == (5, 5)
    assert "4 events lost: L2 takes no more" in caplog.text


def test_an_error_of_the_aggregation_is_counted(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its chunk is lost, which closing says; the events before and after it count."""
    mill = embedded(url)
    mill.emit_many(sales(3))
    assert mill.flush(WAIT_S)
    aggregator = mill._aggregators["MillSale"]
    with monkeypatch.context() as patch:
        patch.setattr(aggregator, "make", lambda *_, **__: 1 / 0)
        mill.emit_many(sales(2))
        assert not mill.flush(WAIT_S)
    mill.emit(MillSale("a", 1))
    assert not mill.close()
    assert (mill.stats().failed, mill.stats().committed, mill.stats().waiting) == (2, 4, 0)
    assert "2 events lost" in caplog.text


def test_memory_that_waits_is_known_without_summing_it_up(url: str) -> None:
    """The bytes of a buffer are those of its parts, before and after they are merged."""
    with open_store(url, ttl_days=3650) as store:
        parts = Parts(store, l1_chunk=1)
        for _ in range(3):
            parts.worker.consume(sales(600, 600))
            buffer = parts.worker._buffer
            assert buffer.nbytes == sum(part.nbytes for part in buffer._parts)
        assert len(buffer.merged()) == 600
        assert buffer.nbytes == buffer.merged().nbytes
        parts.committer.close()
