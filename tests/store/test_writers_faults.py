"""The writers when something breaks: killed, restarted, taken over, refused. Nothing is lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from batchmill.store import FencedError, RetryPolicy, StoreUnavailableError
from batchmill.store.postgres import PostgresStore, WriterSettings
from batchmill.store.postgres import session as session_module
from batchmill.store.postgres import writers as writers_module
from batchmill.store.postgres.connection import copy_rows
from batchmill.store.postgres.writers import FAILED, LOST, Piece, remove_staged, write_piece
from batchmill.store.sql.session import StreamEpoch, Upsert
from tests.kit.processes import Life
from tests.kit.servers.postgres import Postgres
from tests.kit.stores import (
    Writer,
    all_states,
    before,
    before_merges,
    expected_states,
    metrics,
    open_writers,
    some_rows,
    staged,
)
from tests.kit.threads import WAIT_S

LIVES = """
import batchmill.store.postgres.store as postgres
import batchmill.store.postgres.session as session
import batchmill.store.postgres.writers as writers
from tests.kit.stores import Writer, before, before_merges, open_writers, some_rows

def here(place, nth):
    def act(calls):
        if moment == place and calls == int(nth):
            print("here", flush=True)
            sys.stdin.readline()  # until it is killed
    return act

nth = int(nth)
writers.write_piece = before(writers.write_piece, here("before a piece", nth))
writers.copy_rows = before(writers.copy_rows, here("inside a piece", nth))
session.merge_table = before(session.merge_table, here("before a merge", nth))
postgres.remove_staged = before(postgres.remove_staged, here("before the end", 1))
committed = int(last) if last else None
store = open_writers(url)
writer = Writer(store, committed=committed)
# A commit of the process that was killed may have ended since the test has looked.
writer.number = 0 if writer.claim.last_batch is None else writer.claim.last_batch + 1
if moment == "any time":
    print("here", flush=True)
while writer.number < int(batches):
    writer.write(*some_rows(writer.number))
store.close()
print("done", flush=True)
"""
BATCHES = 12


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    """A store whose batches go through the writers in pieces of three rows."""
    made = open_writers(postgres_url)
    yield made
    made.close()


def test_a_writing_process_that_is_killed_loses_and_doubles_nothing(postgres_url: str) -> None:
    """Killed before, inside and after pieces, between copy and merge, after a commit, any time."""
    rng = random.Random(6)
    moments = [
        *(("before a piece", rng.randrange(1, 20)) for _ in range(2)),
        *(("inside a piece", rng.randrange(1, 20)) for _ in range(2)),
        *(("before a merge", rng.randrange(1, 20)) for _ in range(3)),
        ("before the end", 0),
    ]
    rng.shuffle(moments)
    left = 0
    with open_writers(postgres_url) as store:
        for moment, nth in [*moments, *[("any time", 0)] * 3, ("never", 0)]:
            last = [
                stream.last_batch for stream in store.streams() if stream.last_batch is not None
            ]
            with Life.of_script(
                LIVES,
                url=postgres_url,
                moment=moment,
                nth=str(nth),
                last=str(last[0]) if last else "",
                batches=str(BATCHES),
            ) as process:
                process.must_hear("done" if moment == "never" else "here")
                if moment == "any time":
                    time.sleep(rng.uniform(0, 0.2))  # the moment itself is what is random
            if moment == "before a merge":
                left += len(staged(store))
        assert left > 0, "no piece was ever left behind"
        rows = [row for number in range(BATCHES) for row in some_rows(number)]
        assert all_states(store) == expected_states(metrics(), rows)
        assert staged(store) == []


@pytest.mark.parametrize("mode", ["immediate", "fast"])
@pytest.mark.parametrize(
    ("writers", "module", "name"),
    [
        pytest.param(4, writers_module, "copy_rows", id="copy-4"),
        pytest.param(4, session_module, "merge_table", id="merge-4"),
        pytest.param(1, session_module, "copy_rows", id="copy-1"),
        pytest.param(1, session_module, "merge_table", id="merge-1"),
    ],
)
def test_a_server_restarted_inside_a_commit(
    postgres: Postgres,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    writers: int,
    module: Any,
    name: str,
    mode: str,
) -> None:
    """In the middle of a copy, or of a merge: the commit is tried again, and gets in once."""
    some = WriterSettings(writers=writers, above_rows=1, piece_rows=3)
    with open_writers(postgres_url, some) as store:
        writer = Writer(store)
        writer.write(*some_rows(0))
        restarting = threading.Lock()
        restarts: list[str] = []

        def restart(calls: int) -> None:
            with restarting:
                if calls == 2 and not restarts:
                    restarts.append(mode)
                    postgres.stop(mode)
                    postgres.start()

        monkeypatch.setattr(module, name, before(getattr(module, name), restart))
        writer.write(*some_rows(1), counters={("read", "Endpoint", ""): 1})
        assert restarts == [mode]
        rows = some_rows(0) + some_rows(1)
        assert all_states(store) == expected_states(writer.metrics, rows)
        assert store.counters() == {("read", "Endpoint", ""): 1}
        assert staged(store) == []


@pytest.mark.parametrize("how", ["TRUNCATE", "DROP TABLE"])
def test_a_staged_table_that_lost_its_rows_is_noticed(
    store: PostgresStore, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What a crash empties is not taken for a piece without rows: it is written again."""
    name = store.url.rpartition("/")[2]
    lost: list[str] = []

    def lose(table: str) -> None:
        if table.startswith("staged_") and not lost:
            lost.append(table)
            postgres.execute(f"{how} {table}", name)

    before_merges(monkeypatch, lose)
    writer = Writer(store)
    writer.write(*some_rows(0))
    assert store.writers.stats().fallbacks == {LOST: 1}
    assert all_states(store) == expected_states(writer.metrics, some_rows(0))
    assert staged(store) == []


def test_a_second_driver_takes_over_while_pieces_are_staged(
    store: PostgresStore,
    postgres: Postgres,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one is fenced off, and its pieces are removed."""
    other = open_writers(postgres_url)
    first = Writer(store)
    first.write(*some_rows(0))
    staged_pieces: list[int] = []
    second: list[Writer] = []

    def take_over(table: str) -> None:
        if second or not table.startswith("staged_"):
            return
        queue = store.writers._queue
        assert queue is not None
        assert queue.flush(WAIT_S)
        staged_pieces.append(len(staged(other)))
        for connection in (store._open["writer"], store._locks["live"]):
            postgres.execute(f"SELECT pg_terminate_backend({connection.info.backend_pid})")
        second.append(Writer(other, number=1, committed=0))
        staged_pieces.append(len(staged(other)))

    before_merges(monkeypatch, take_over)
    try:
        with pytest.raises(FencedError):
            store.commit(first.batch(some_rows(7)))
        assert staged_pieces[0] > 10
        assert staged_pieces[1] == 0
        second[0].write(*some_rows(1))
        rows = some_rows(0) + some_rows(1)
        assert all_states(other) == expected_states(first.metrics, rows)
        assert staged(other) == []
    finally:
        other.close()


def test_pieces_of_a_later_driver_are_not_removed_by_an_earlier_one(store: PostgresStore) -> None:
    """Each clears up to its own epoch."""
    writer = Writer(store)
    batch = writer.batch(some_rows(0))
    upsert = Upsert(
        "minute_Endpoint", ("bucket", "entity"), ("BIGINT", "BIGINT"), ("bucket",), "DO UPDATE"
    )
    columns = [batch.deltas[0].buckets, batch.deltas[0].entities]
    connection = store._open["writer"]
    names = [
        write_piece(connection, Piece(StreamEpoch("live", epoch), upsert, columns, 0, 2))
        for epoch in (1, 2, 10)
    ]
    remove_staged(connection, StreamEpoch("live", 2))
    assert staged(store) == [names[2]]
    remove_staged(connection, StreamEpoch("elsewhere", 99))
    assert staged(store) == [names[2]]
    remove_staged(connection, StreamEpoch("live", 10))
    assert staged(store) == []


def test_a_writer_whose_connection_broke_makes_a_new_one(
    store: PostgresStore, postgres: Postgres
) -> None:
    """Idle for too long, or cut: the piece is written again, and the commit does not notice."""
    writer = Writer(store)
    writer.write(*some_rows(0))
    for connection in store.writers._copier._connections.values():
        postgres.execute(f"SELECT pg_terminate_backend({connection.info.backend_pid})")
    writer.write(*some_rows(1))
    stats = store.writers.stats()
    assert stats.retried > 0
    assert stats.fallbacks == {}
    rows = some_rows(0) + some_rows(1)
    assert all_states(store) == expected_states(writer.metrics, rows)


def test_what_the_writers_cannot_do_goes_over_the_one_connection(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A piece that fails fails no commit: the next try does without, and the one after it not."""
    broken = [True]

    def copy(*arguments: Any) -> None:
        if broken:
            raise ValueError("not this one")
        copy_rows(*arguments)

    monkeypatch.setattr(writers_module, "copy_rows", copy)
    writer = Writer(store)
    writer.write(*some_rows(0))
    assert store.writers.stats().fallbacks == {FAILED: 1}
    assert "not this one" in caplog.text
    broken.clear()
    before_it = store.writers.stats().queue
    writer.write(*some_rows(1))
    counted = store.writers.stats().queue
    assert before_it is not None
    assert counted is not None
    assert counted.consumed > before_it.consumed
    assert counted.accepted == counted.consumed + counted.failed
    rows = some_rows(0) + some_rows(1)
    assert all_states(store) == expected_states(writer.metrics, rows)
    assert staged(store) == []


def test_a_user_who_may_make_no_tables_can_commit(
    store: PostgresStore, postgres: Postgres, postgres_url: str
) -> None:
    """Who has the tables but not the right to make some writes over one connection from then on."""
    Writer(store).write(*some_rows(0))
    store.close()
    name = postgres_url.rpartition("/")[2]
    postgres.execute("DROP ROLE IF EXISTS plain")
    postgres.execute("CREATE ROLE plain LOGIN")
    postgres.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO plain", name)
    postgres.execute("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO plain", name)
    try:
        with open_writers(postgres_url.replace("postgres@", "plain@")) as plain:
            writer = Writer(plain, number=1, committed=0)
            writer.write(*some_rows(1))
            writer.write(*some_rows(2))
            assert plain.writers.stats().fallbacks == {FAILED: 1}
            rows = some_rows(0) + some_rows(1) + some_rows(2)
            assert all_states(plain) == expected_states(writer.metrics, rows)
    finally:
        postgres.execute("DROP OWNED BY plain", name)
        postgres.execute("DROP ROLE plain")


def test_somebody_who_reads_a_staged_table_holds_up_no_commit(
    store: PostgresStore, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup has locked it: that one table is removed later, the others now."""
    import psycopg

    held: list[str] = []
    with psycopg.connect(postgres_url) as backup:

        def hold(table: str) -> None:
            if table.startswith("staged_") and not held:
                held.append(table)
                backup.execute(f"LOCK TABLE {table} IN ACCESS SHARE MODE".encode())

        before_merges(monkeypatch, hold)
        writer = Writer(store)
        writer.write(*some_rows(0))
        assert staged(store) == held
        backup.rollback()
    writer.write(*some_rows(1))
    assert staged(store) == []


def test_a_try_that_waits_gives_up_with_the_stores_own_error(
    postgres: Postgres, postgres_url: str
) -> None:
    """A server that stays away: the error that a commit over one connection would end with."""
    hasty = RetryPolicy(initial_ms=1, max_ms=5, give_up_after_s=0.2)
    with open_writers(postgres_url, retry=hasty) as store:
        writer = Writer(store)
        writer.write(*some_rows(0))
        batch = writer.batch(some_rows(1))
        postgres.stop("immediate")
        with pytest.raises(StoreUnavailableError, match="Check that the database runs"):
            store.commit(batch)
        postgres.start()
        assert store.commit(batch).applied
        rows = some_rows(0) + some_rows(1)
        assert all_states(store) == expected_states(writer.metrics, rows)
