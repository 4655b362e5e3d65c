"""A batch that is committed by parts: each once, whatever happens on the way."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from batchmill.errors import ConfigError
from batchmill.sources import Grain
from batchmill.store import (
    EXPIRED,
    TOO_OLD,
    BatchGapError,
    FencedError,
    PartConflictError,
    PartsMissingError,
    PartsResult,
    RowsMismatchError,
    StaleTaskError,
    StatementRow,
    TopNRow,
    open_for_task,
)
from tests.kit.stores import (
    MINUTE,
    Backend,
    Measurement,
    Writer,
    all_states,
    backend_url,
    downgrade,
    expected_states,
    some_rows,
)
from tests.store.parts.kit import PARTS, Parted, part_of

DAY = 10_000


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A place for one store, of each kind."""
    made = Backend(backend_url(request.param, request))
    yield made
    made.close()


def test_a_batch_by_parts_makes_the_same_store(backend: Backend) -> None:
    """As one that is committed as a whole, and they may follow each other."""
    store = backend.open()
    parted = Parted(store)
    parted.write(some_rows(0))
    parted.writer.write(*some_rows(1))
    parted.write(some_rows(2))
    rows = [row for number in range(3) for row in some_rows(number)]
    assert all_states(store) == expected_states(parted.writer.metrics, rows)
    assert store.newest_minute() == max(row.minute for row in rows)
    assert [stream.last_batch for stream in store.streams()] == [2]


def test_merged_rows_are_counted_over_all_parts(backend: Backend) -> None:
    """Each task counts its own, the books all of them."""
    parted = Parted(backend.open())
    rows = some_rows(0)
    opened = parted.begin()
    merged = [
        parted.store.commit_parts(*parted.task(rows, opened, part)).merged for part in range(PARTS)
    ]
    whole = parted.writer.batch(rows)
    assert sum(merged) == sum(len(deltas.buckets) for deltas in whole.deltas)
    assert all(merged)
    assert parted.store.commit(parted.books(rows)).merged == sum(merged)


def test_a_second_attempt_changes_nothing(backend: Backend) -> None:
    """Neither before the books are closed nor after."""
    parted = Parted(backend.open())
    rows = some_rows(0)
    opened = parted.begin()
    tasks = [parted.task(rows, opened, *parts) for parts in ((0, 1), (2, 3))]
    for task in tasks:
        assert parted.store.commit_parts(*task).applied
        assert parted.store.commit_parts(*task) == PartsResult(applied=False)
    books = parted.books(rows)
    assert parted.store.commit(books).applied
    assert not parted.store.commit(books).applied
    assert parted.begin().committed
    for task in tasks:
        assert parted.store.commit_parts(*task) == PartsResult(applied=False)
    assert all_states(parted.store) == expected_states(parted.writer.metrics, rows)


def test_a_run_that_broke_off_is_continued(backend: Backend) -> None:
    """The next one sees what is recorded, and the tasks of the first are too late."""
    parted = Parted(backend.open())
    rows = some_rows(0)
    first = parted.begin()
    assert first.recorded == frozenset()
    parted.store.commit_parts(*parted.task(rows, first, 1, 3))
    second = parted.begin()
    assert second.recorded == {1, 3}
    assert second.cutoff == first.cutoff
    with pytest.raises(StaleTaskError):
        parted.store.commit_parts(*parted.task(rows, first, 0))
    parted.store.commit_parts(*parted.task(rows, second, 0, 2))
    assert parted.store.commit(parted.books(rows)).applied
    assert all_states(parted.store) == expected_states(parted.writer.metrics, rows)


def test_parts_that_one_task_commits_stay_together(backend: Backend) -> None:
    """A task with one part that is in the store and one that is not says so."""
    parted = Parted(backend.open())
    rows = some_rows(0)
    opened = parted.begin()
    parted.store.commit_parts(*parted.task(rows, opened, 1, 2))
    before = all_states(parted.store)
    with pytest.raises(PartConflictError) as caught:
        parted.store.commit_parts(*parted.task(rows, opened, 0, 1))
    assert (caught.value.recorded, caught.value.missing) == ((1,), (0,))
    assert "part 1 is in the store and part 0 is not, though" in str(caught.value)
    assert all_states(parted.store) == before
    assert parted.begin().recorded == {1, 2}


@pytest.mark.parametrize("parts", [(), (1, 1), (-1, 0)])
def test_what_are_no_parts_is_refused(backend: Backend, parts: tuple[int, ...]) -> None:
    """Without a part nothing would be recorded, and a second attempt would not be noticed."""
    parted = Parted(backend.open())
    batch, share = parted.task(some_rows(0), parted.begin(), 0)
    with pytest.raises(ConfigError, match="each once"):
        parted.store.commit_parts(batch, replace(share, parts=parts))


def test_the_books_name_the_parts_that_are_missing(backend: Backend) -> None:
    """And change nothing; the batch can be completed after that."""
    parted = Parted(backend.open())
    rows = some_rows(0)
    opened = parted.begin()
    parted.store.commit_parts(*parted.task(rows, opened, 0, 2))
    with pytest.raises(PartsMissingError, match="but parts 1, 3 are not in the store: ") as caught:
        parted.store.commit(parted.books(rows))
    assert (caught.value.missing, caught.value.unknown) == ((1, 3), ())
    assert parted.store.newest_minute() is None
    parted.store.commit_parts(*parted.task(rows, opened, 1, 3))
    fewer = parted.books(rows)
    fewer.parts = 3
    with pytest.raises(PartsMissingError, match="but the store also has part 3: "):
        parted.store.commit(fewer)
    assert parted.store.commit(parted.books(rows)).applied
    assert all_states(parted.store) == expected_states(parted.writer.metrics, rows)


def test_rows_that_got_lost_on_the_way_are_noticed(backend: Backend) -> None:
    """What the readers counted and what the tasks counted must be the same."""
    parted = Parted(backend.open())
    rows = some_rows(0)
    opened = parted.begin()
    parted.store.commit_parts(*parted.task(rows, opened, *range(PARTS)))
    books = parted.books(rows)
    books.expected_rows = {"Endpoint": len(rows) + 1, "Service": 2}
    with pytest.raises(RowsMismatchError) as caught:
        parted.store.commit(books)
    assert f"Endpoint: {len(rows) + 1} read, {len(rows)} in the parts" in str(caught.value)
    assert "Service: 2 read, 0 in the parts" in str(caught.value)
    assert [stream.last_batch for stream in parted.store.streams()] == [None]


def test_a_fenced_writer_can_neither_begin_nor_commit_parts(backend: Backend) -> None:
    """The stream was claimed again: the new owner sees what is recorded and goes on."""
    old = Parted(backend.open())
    rows = some_rows(0)
    opened = old.begin()
    old.store.commit_parts(*old.task(rows, opened, 0))
    old.store.release("live")
    new = Parted(backend.open())
    with pytest.raises(FencedError):
        old.store.commit_parts(*old.task(rows, opened, 1))
    with pytest.raises(FencedError):
        old.begin()
    with pytest.raises(FencedError):
        old.store.commit(old.books(rows))
    again = new.begin()
    assert again.recorded == {0}
    new.store.commit_parts(*new.task(rows, again, 1, 2, 3))
    new.store.commit(new.books(rows))
    assert all_states(new.store) == expected_states(new.writer.metrics, rows)


def test_batches_are_begun_in_order(backend: Backend) -> None:
    """A batch that is not the next one is refused before anything is run."""
    parted = Parted(backend.open())
    with pytest.raises(BatchGapError):
        parted.store.begin_parts("live", parted.writer.claim.epoch, 1)
    with pytest.raises(FencedError):
        parted.store.begin_parts("nobody", 1, 0)


def test_a_batch_may_be_recut_while_no_part_is_recorded(backend: Backend) -> None:
    """And a task that was started before cannot commit what is not the batch's any more."""
    parted = Parted(backend.open())
    rows = some_rows(0)
    opened = parted.begin()
    key = ("live", parted.writer.claim.epoch, 0)
    assert parted.store.may_be_recut(*key)
    with pytest.raises(StaleTaskError):
        parted.store.commit_parts(*parted.task(rows, opened, 0))
    opened = parted.begin()
    parted.store.commit_parts(*parted.task(rows, opened, 0))
    assert not parted.store.may_be_recut(*key)


def test_days_that_have_expired_are_left_out_of_all_parts(backend: Backend) -> None:
    """By the cutoff of the batch's begin, also if another stream moves it meanwhile."""
    parted = Parted(backend.open(ttl_days=2))
    parted.write([Measurement(1, minute=MINUTE)])
    other = Parted(backend.open(ttl_days=2), stream="other", checkpoint="c2", retire=False)
    late = [Measurement(2, minute=202402250000, entity=f"e{n}") for n in range(4)]
    fresh = [Measurement(3, minute=MINUTE + 1, entity=f"e{n}") for n in range(4)]
    opened = parted.begin()
    assert opened.cutoff == 20240228
    parted.store.commit_parts(*parted.task(late + fresh, opened, 0, 1))
    other.write([Measurement(4, minute=MINUTE + 4 * DAY)])
    assert parted.begin().cutoff == 20240228
    opened = parted.begin()
    parted.store.commit_parts(*parted.task(late + fresh, opened, 2, 3))
    result = parted.store.commit(parted.books(late + fresh))
    assert result.counters[EXPIRED, "Endpoint", TOO_OLD] == len(late)
    parted.writer.number += 1
    assert parted.begin().cutoff == 20240303


def test_slow_calls_and_statements_come_by_parts(backend: Backend) -> None:
    """The slowest of an entity, and what was too old is counted when the books are closed."""
    parted = Parted(backend.open(top_n=2))
    parted.write([Measurement(1)])
    rows = [Measurement(1, entity="e1"), Measurement(1, entity="e2")]
    opened = parted.begin()
    for row in rows:
        batch, share = parted.task(rows, opened, part_of(row))
        batch.topn = [
            TopNRow("db", 0, minute, latency, 0, "t", "s", "SELECT 1", "SELECT ?")
            for minute, latency in ((MINUTE, 5), (MINUTE, 7), (MINUTE, 6), (202401010000, 9))
        ]
        batch.statements = [
            StatementRow("db", 0, minute, "SELECT ?", 3, 18) for minute in (MINUTE, 202401010000)
        ]
        parted.store.commit_parts(batch, share)
    used = {part_of(row) for row in rows}
    parted.store.commit_parts(*parted.task([], opened, *(set(range(PARTS)) - used)))
    result = parted.store.commit(parted.books(rows))
    assert result.counters["expired records", "db", TOO_OLD] == 2
    assert result.counters["expired statements", "db", TOO_OLD] == 2
    records = [(record.entity_id, record.latency, record.runs) for record in parted.store.top("db")]
    assert records == [("id-e1", 7, 3), ("id-e1", 6, 3), ("id-e2", 7, 3), ("id-e2", 6, 3)]


def test_a_store_of_the_third_schema_commits_parts(backend: Backend) -> None:
    """What it holds stays."""
    writer = Writer(backend.open())
    writer.write(Measurement(5))
    downgrade(writer.store, 3)
    backend.close()
    store = backend.open()
    parted = Parted(store, committed=0)
    parted.writer.number = 1
    parted.write([Measurement(7, entity=name) for name in "abc"])
    rows = [Measurement(5), *(Measurement(7, entity=name) for name in "abc")]
    assert all_states(store) == expected_states(parted.writer.metrics, rows)


def test_random_runs_make_the_same_store(backend: Backend) -> None:
    """Batches with attempts that come twice, runs that break off, and new claims."""
    rng = random.Random(19)
    parted = Parted(backend.open())
    for number in range(8):
        rows = some_rows(number)
        closed = False
        while not closed:
            opened = parted.begin()
            left = [part for part in range(PARTS) if part not in opened.recorded]
            rng.shuffle(left)
            while left and rng.random() < 0.8:
                some = tuple(left[: rng.randrange(1, len(left) + 1)])
                left = left[len(some) :]
                task = parted.task(rows, opened, *some)
                for attempt in range(rng.randrange(1, 3)):
                    assert parted.store.commit_parts(*task).applied == (attempt == 0)
            if left:
                with pytest.raises(PartsMissingError):
                    parted.store.commit(parted.books(rows))
            else:
                closed = parted.store.commit(parted.books(rows)).applied
        parted.writer.number += 1
    rows = [row for number in range(8) for row in some_rows(number)]
    assert all_states(parted.store) == expected_states(parted.writer.metrics, rows)


def test_a_task_opens_the_same_store(postgres_url: str) -> None:
    """By what it got from the driver, once in a process; no password is shown."""
    backend = Backend(postgres_url)
    parted = Parted(backend.open())
    address = pickle.loads(pickle.dumps(parted.store.task_address()))
    assert "parameters" not in repr(address)
    store = open_for_task(address)
    assert open_for_task(address) is store
    assert (store.id, store.url) == (parted.store.id, parted.store.url)
    rows = some_rows(0)
    opened = parted.begin()
    for part in range(PARTS):
        assert store.commit_parts(*parted.task(rows, opened, part)).applied
    assert parted.store.commit(parted.books(rows)).applied
    assert all_states(store) == expected_states(parted.writer.metrics, rows)
    assert store.values("calls", grain=Grain.DAY)
    store.close()
    backend.close()


def test_a_file_is_not_written_by_tasks(backend: Backend) -> None:
    """SQLite says which store can."""
    store = backend.open()
    assert store.commits_by_part == (not store.url.startswith("sqlite"))
    if not store.commits_by_part:
        with pytest.raises(ConfigError, match="PostgreSQL"):
            store.task_address()
