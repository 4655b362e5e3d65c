"""PostgreSQL's own troubles: servers that go away, answers that get lost, users without rights."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from batchmill.errors import MissingExtraError
from batchmill.store import (
    NamesClashError,
    RetryPolicy,
    StoreInUseError,
    StoreMissingError,
    StoreReadOnlyError,
    StoreRefusedError,
    StoreUnavailableError,
    open_store,
)
from batchmill.store.postgres import PostgresStore
from batchmill.store.postgres.connection import TEXT, copy_blocks
from batchmill.store.postgres.session import POSTGRES
from batchmill.store.sql.schema import check_source_name
from tests.kit.servers.postgres import Postgres
from tests.kit.stores import HASTY, Backend, Measurement, Writer, all_states, expected_states
from tests.kit.threads import WAIT_S


@pytest.fixture
def place(postgres_url: str) -> Iterator[Backend]:
    """An empty database."""
    backend = Backend(postgres_url)
    yield backend
    backend.close()


def postgres_store(backend: Backend, **settings: Any) -> PostgresStore:
    """A store in an empty database."""
    store = backend.open(**settings)
    assert isinstance(store, PostgresStore)
    return store


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_commit_waits_for_a_server_that_is_down(
    place: Backend, postgres: Postgres, mode: str
) -> None:
    """The server goes and comes back: the commit backs off and gets in, exactly once."""
    store = postgres_store(place)
    writer = Writer(store)
    writer.write(Measurement(1))
    postgres.stop(mode)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            postgres.start()

    store.retrier.wait = wait
    writer.write(Measurement(2))
    assert len(waits) >= 3
    rows = [Measurement(1), Measurement(2)]
    assert all_states(store) == expected_states(writer.metrics, rows)


def test_an_unreachable_server_is_given_up_and_no_batch_is_lost(
    place: Backend, postgres: Postgres
) -> None:
    """The error says what was tried; the same batch goes in once the server is back."""
    store = postgres_store(place, retry=HASTY)
    writer = Writer(store)
    postgres.stop()
    batch = writer.batch([Measurement(1)])
    with pytest.raises(StoreUnavailableError, match="Check that the database runs") as caught:
        store.commit(batch)
    assert caught.value.attempts > 1
    assert caught.value.__cause__ is not None
    with pytest.raises(StoreUnavailableError):
        open_store(place.url, retry=HASTY)
    postgres.start()
    assert store.commit(batch).applied
    assert all_states(store) == expected_states(writer.metrics, [Measurement(1)])


def test_a_commit_whose_answer_was_lost_is_not_repeated(place: Backend) -> None:
    """The connection breaks right after COMMIT: the next try finds the batch in."""
    import psycopg

    store = postgres_store(place)
    writer = Writer(store)
    connection = store._open["writer"]
    execute = connection.execute

    def break_after_commit(sql: Any, *arguments: Any) -> Any:
        answer = execute(sql, *arguments)
        if sql == "COMMIT":
            connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        return answer

    connection.execute = break_after_commit  # type: ignore[method-assign, assignment]
    result = store.commit(writer.batch([Measurement(1)]))
    assert result.applied
    assert result.merged == 3
    assert all_states(store) == expected_states(writer.metrics, [Measurement(1)])


def test_the_lock_is_taken_again_after_a_restart(place: Backend, postgres: Postgres) -> None:
    """A restart takes the lock away; the next commit has it back, so a second writer is refused."""
    store = postgres_store(place)
    writer = Writer(store)
    postgres.stop()
    postgres.start()
    writer.write(Measurement(1))
    with pytest.raises(StoreInUseError):
        place.open().claim("live", "checkpoint-1", fresh=False, committed=0)


def test_a_deadlock_is_tried_again(place: Backend) -> None:
    """A transaction that PostgreSQL rolled back by itself runs once more."""
    import psycopg

    store = postgres_store(place)
    writer = Writer(store)
    faults = [psycopg.errors.DeadlockDetected("x"), psycopg.errors.SerializationFailure("x")]
    connection = store._open["writer"]
    execute = connection.execute

    def stumble(sql: Any, *arguments: Any) -> Any:
        if faults and b"FOR UPDATE" in bytes(sql if isinstance(sql, bytes) else b""):
            raise faults.pop()
        return execute(sql, *arguments)

    connection.execute = stumble  # type: ignore[method-assign, assignment]
    store.retrier.wait = lambda seconds: None
    writer.write(Measurement(1))
    assert faults == []
    assert all_states(store) == expected_states(writer.metrics, [Measurement(1)])


def test_closing_ends_a_commit_that_waits(place: Backend, postgres: Postgres) -> None:
    """close() from another thread does not wait for a server that is down."""
    store = postgres_store(place, retry=RetryPolicy(initial_ms=60_000, max_ms=60_000))
    writer = Writer(store)
    batch = writer.batch([Measurement(1)])
    waiting = threading.Event()
    real_wait = store.retrier.wait

    def wait(seconds: float) -> None:
        waiting.set()
        real_wait(seconds)

    store.retrier.wait = wait
    raised: list[BaseException] = []

    def commit() -> None:
        try:
            store.commit(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            raised.append(error)

    postgres.stop()
    thread = threading.Thread(target=commit)
    thread.start()
    assert waiting.wait(WAIT_S)
    store.close()
    thread.join(WAIT_S)
    postgres.start()
    assert [type(error).__name__ for error in raised] == ["StoreClosedError"]


def test_a_server_that_vanishes_while_rows_are_under_way_is_noticed(place: Backend) -> None:
    """Keepalives are not sent while data waits for an answer: that has a bound of its own."""
    store = place.open()
    assert isinstance(store, PostgresStore)
    for connection in (*store._open.values(), store._connect()):
        with connection:
            assert connection.info.get_parameters()["tcp_user_timeout"] == "60000"


def test_a_database_that_is_not_there_is_reported_at_once(postgres: Postgres) -> None:
    """What will be the same the next time is not tried again."""
    url = postgres.new_database().rpartition("/")[0] + "/nowhere"
    with pytest.raises(StoreRefusedError, match="nowhere"):
        open_store(url)


def test_a_database_without_a_store_is_an_error_for_a_reader(place: Backend) -> None:
    """With create=False nothing is made."""
    for _ in range(2):
        with pytest.raises(StoreMissingError):
            place.open(create=False)
    place.open()
    place.open(create=False)


def test_a_user_without_rights_is_reported(place: Backend, postgres: Postgres) -> None:
    """Who may not write hears which right is missing."""
    place.open()
    name = place.url.rpartition("/")[2]
    postgres.execute("DROP ROLE IF EXISTS reader")
    postgres.execute("CREATE ROLE reader LOGIN")
    postgres.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader", name)
    store = Backend(place.url.replace("postgres@", "reader@"))
    try:
        with pytest.raises(StoreReadOnlyError, match="permission denied"):
            store.open().claim("live", "c", fresh=True, committed=None)
        assert store.open().metrics() == []
    finally:
        store.close()
        postgres.execute("DROP OWNED BY reader", name)
        postgres.execute("DROP ROLE reader")


def test_two_processes_may_make_the_schema_at_once(place: Backend) -> None:
    """Whoever is second finds the store that the first one made."""
    start = threading.Barrier(3)
    ids: list[str] = []

    def work() -> None:
        start.wait(WAIT_S)
        ids.append(place.open().id)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(ids) == 3
    assert len(set(ids)) == 1


def test_stores_in_two_schemas_are_two_stores(place: Backend, postgres: Postgres) -> None:
    """Everything lives in the connection's default schema, the lock too."""
    postgres.execute("CREATE SCHEMA other", place.url.rpartition("/")[2])
    other = Backend(place.url + "?options=-csearch_path%3Dother")
    try:
        one, two = place.open(), other.open()
        assert one.id != two.id
        one.claim("live", "c", fresh=True, committed=None)
        two.claim("live", "c", fresh=True, committed=None)
    finally:
        other.close()


def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """psycopg is asked for only here, and its absence says what to install."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match=r"batchmill\[postgres\]"):
        open_store("postgresql://postgres@127.0.0.1:1/x")


def test_a_name_too_long_for_a_table_is_refused() -> None:
    """PostgreSQL would cut it off, and two sources might share a table."""
    with pytest.raises(NamesClashError, match="longer than 63"):
        check_source_name(POSTGRES, "x" * 60, set())


def test_rows_are_written_as_copy_reads_them() -> None:
    """None is the null, the word None is not; what would break a line is escaped."""
    values = [None, "None", "a\tb", "c\\d\n", ""]
    blocks = b"".join(copy_blocks([TEXT, "BIGINT"], [values, [1, None, 2, 3, 4]]))
    lines = ["None\t1", "Non\\e\tNone", "a\\tb\t2", "c\\\\d\\n\t3", "\t4"]
    assert blocks.decode() == "\n".join([*lines, ""])
