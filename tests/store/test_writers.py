"""The writers: rows of large batches over several connections, exactly once all the same."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchmill import ConfigError
from batchmill.store import open_store
from batchmill.store.address import pop_parameter
from batchmill.store.postgres import PostgresStore, WriterSettings
from batchmill.store.postgres import writers as writers_module
from batchmill.store.postgres.writers import write_piece
from tests.kit.servers.postgres import Postgres
from tests.kit.stores import (
    TINY,
    Measurement,
    Writer,
    all_states,
    before,
    before_merges,
    expected_states,
    open_writers,
    some_rows,
    staged,
)
from tests.kit.threads import WAIT_S, until
from tests.store.test_merging import ROWS


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    """A store whose batches go through the writers in pieces of three rows."""
    made = open_writers(postgres_url)
    yield made
    made.close()


@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(batches=st.lists(ROWS, min_size=1, max_size=3))
def test_several_writers_make_the_store_that_one_makes(
    postgres: Postgres, batches: list[list[Measurement]]
) -> None:
    """Whatever the batches are, the store is the same, and nothing stays staged."""
    contents = []
    for some in (WriterSettings(writers=1), TINY):
        with open_writers(postgres.new_database(), some) as store:
            writer = Writer(store)
            for rows in batches:
                writer.write(*rows, counters={("read", "Endpoint", ""): len(rows)})
            contents.append((all_states(store), store.entities(), store.counters()))
            assert staged(store) == []
            assert (store.writers.stats().queue is None) == (some.writers == 1)
    rows = [row for batch in batches for row in batch]
    assert contents[0] == contents[1]
    assert contents[1][0] == expected_states(writer.metrics, rows)


def test_a_list_that_fills_several_columns_is_cut_once(store: PostgresStore) -> None:
    """Metrics that share a state share its list, in pieces as well."""
    writer = Writer(store)
    rows = some_rows(0)
    batch = writer.batch(rows)
    (calls,), (_, count) = writer.layout.columns["calls"], writer.layout.columns["avg"]
    for deltas in batch.deltas:
        del deltas.cells[count]
        deltas.shared = {count: calls}
    store.commit(batch)
    counted = store.writers.stats().queue
    assert counted is not None
    assert counted.consumed > 0
    assert all_states(store) == expected_states(writer.metrics, rows)


def test_a_reader_sees_the_old_state_until_all_is_merged(
    store: PostgresStore, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two merges of a commit, the store is as it was before."""
    reader = open_store(postgres_url)
    writer = Writer(store)
    writer.write(*some_rows(0))
    old = all_states(reader)
    seen: list[bool] = []
    before_merges(monkeypatch, lambda _: seen.append(all_states(reader) == old))
    try:
        writer.write(*some_rows(1))
        assert len(seen) > 10
        assert all(seen)
        rows = some_rows(0) + some_rows(1)
        assert all_states(reader) == expected_states(writer.metrics, rows)
    finally:
        reader.close()


def test_a_full_queue_makes_the_commit_wait(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more pieces wait than the queues hold; none is dropped, and the counters balance."""
    gate = threading.Event()
    monkeypatch.setattr(
        writers_module, "write_piece", before(write_piece, lambda _: gate.wait(WAIT_S))
    )
    some = WriterSettings(writers=2, above_rows=1, piece_rows=1, buffer_size=1)
    with open_writers(postgres_url, some) as store:
        writer = Writer(store)
        batch = writer.batch(some_rows(0))
        thread = threading.Thread(target=store.commit, args=(batch,))
        thread.start()

        def accepted() -> int:
            counted = store.writers.stats().queue
            return counted.accepted if counted is not None else 0

        try:
            # One in each writer's hands, one waiting for each.
            until(lambda: accepted() == 4, "the queues are full")
            assert thread.is_alive()
        finally:
            gate.set()
            thread.join(WAIT_S)
        pieces = sum(len(deltas.buckets) for deltas in batch.deltas)
        counted = store.writers.stats().queue
        assert counted is not None
        assert (counted.accepted, counted.consumed, counted.failed) == (pieces, pieces, 0)
        assert counted.pending == sum(counted.dropped.values()) == 0
        assert all_states(store) == expected_states(writer.metrics, some_rows(0))


def test_a_replay_stages_nothing(store: PostgresStore) -> None:
    """A batch that is in already is known before a row of it is copied."""
    writer = Writer(store)
    batch = writer.write(*some_rows(0))
    before_it = store.writers.stats().queue
    assert not store.commit(batch).applied
    assert store.writers.stats().queue == before_it


def test_small_batches_have_no_threads(postgres_url: str) -> None:
    """By default the usual micro-batch goes over the one connection, and no thread is started."""
    threads = threading.active_count()
    with open_writers(postgres_url, WriterSettings()) as store:
        Writer(store).write(*some_rows(0))
        assert threading.active_count() == threads
        assert store.writers.stats().queue is None


def test_closing_ends_the_threads_and_their_connections(store: PostgresStore) -> None:
    """Nothing of the writers is left after close()."""
    Writer(store).write(*some_rows(0))
    connections = list(store.writers._copier._connections.values())
    assert connections
    store.close()
    assert all(connection.closed for connection in connections)
    queue = store.writers.stats().queue
    assert queue is not None
    assert not queue.running


def test_a_store_that_nobody_has_any_more_takes_its_threads_along(postgres_url: str) -> None:
    """Its threads end by themselves and close their connections; a warning says so."""
    store = open_writers(postgres_url)
    Writer(store).write(*some_rows(0))
    connections = list(store.writers._copier._connections.values())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # psycopg says the same of the store's own connections
        del store
        gc.collect()
    assert any("never shut down" in str(message.message) for message in said)
    until(
        lambda: all(connection.closed for connection in connections), "the connections are closed"
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")
def test_a_forked_child_leaves_the_connections_to_its_parent(store: PostgresStore) -> None:
    """The child has none of them, and the parent's go on working after its end."""
    writer = Writer(store)
    writer.write(*some_rows(0))
    pid = os.fork()
    if pid == 0:
        os._exit(len(store.writers._copier._connections))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    writer.write(*some_rows(1))
    assert store.writers.stats().retried == 0
    rows = some_rows(0) + some_rows(1)
    assert all_states(store) == expected_states(writer.metrics, rows)


def test_an_address_says_how_many_writers_there_are(postgres_url: str) -> None:
    """`writers` is batchmill's: PostgreSQL never hears of it, and all else is passed on."""
    for more, expected in (("", 4), ("?writers=2", 2), ("?writers=1&sslmode=prefer", 1)):
        with open_store(postgres_url + more) as store:
            assert isinstance(store, PostgresStore)
            assert store.writers.settings.writers == expected


@pytest.mark.parametrize("given", ["0", "-1", "65", "many", "", "٤"])
def test_an_address_with_no_number_of_writers_is_refused(given: str) -> None:
    """The message says what is allowed."""
    with pytest.raises(ConfigError, match="a whole number from 1 to 64"):
        open_store(f"postgresql://u@127.0.0.1:1/x?writers={given}")


@pytest.mark.parametrize(
    ("address", "rest"),
    [
        ("postgresql://u@h/d?writers=2", "postgresql://u@h/d"),
        ("postgresql://u@h/d?a=1&writers=2&b=", "postgresql://u@h/d?a=1&b="),
        ("postgresql://u:p?writers=9@h/d?writers=2", "postgresql://u:p?writers=9@h/d"),
    ],
)
def test_only_the_parameter_is_taken_out(address: str, rest: str) -> None:
    """What stands around it stays, a password that looks like it too."""
    assert pop_parameter(address, "writers") == (rest, "2")
    assert pop_parameter(rest, "writers") == (rest, None)
