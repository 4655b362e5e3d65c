"""How long things are kept: whole days, by event time."""

from __future__ import annotations

import itertools

import pytest

from batchmill.sources import Grain
from batchmill.store import EXPIRED, TOO_OLD, StatementRow, TopNRow
from tests.kit.stores import Backend, Measurement, Writer, all_states, expected_states, metrics

DAY = 10_000
FIRST = 202403010000
TTL = 2


def test_old_days_are_removed_when_a_new_one_comes(backend: Backend) -> None:
    """On a new day everything before the cutoff goes, in all grains and all tables."""
    store = backend.open(ttl_days=TTL)
    writer = Writer(store)
    for day in range(4):
        minute = FIRST + day * DAY
        writer.write(
            Measurement(day, minute=minute),
            topn=[TopNRow("db", 0, minute, day, day, "t", "s", "select", "select")],
            statements=[StatementRow("db", 0, minute, "select", 1, 1)],
        )
    kept = [Measurement(day, minute=FIRST + day * DAY) for day in range(1, 4)]
    assert all_states(store) == expected_states(metrics(), kept)
    for grain in Grain:
        assert [record.latency for record in store.top("db", grain=grain)] == [1, 2, 3]
    count = "SELECT count(*) FROM statement"
    assert store._read(lambda session: session.rows(count)) == [(9,)]


def test_names_without_end_are_as_many_as_those_of_the_days_that_are_kept(
    backend: Backend,
) -> None:
    """Entities go with the last day that has values of them, however many come for however long."""
    store = backend.open(ttl_days=TTL)
    writer = Writer(store)
    counts = []
    for day in range(8):
        minute = FIRST + day * DAY
        writer.write(*(Measurement(1, minute=minute, entity=f"{day}-{n}") for n in range(20)))
        counts.append(len(store.entities()))
    assert counts == [20, 40, *[20 * (TTL + 1)] * 6]
    count = "SELECT (SELECT count(*) FROM entity), (SELECT count(*) FROM entity_layer)"
    assert store._read(lambda session: session.rows(count)) == [(60, 60)]


def test_the_first_minute_of_the_oldest_day_is_kept(backend: Backend) -> None:
    """The cutoff lies at midnight: a day is kept or gone as a whole."""
    store = backend.open(ttl_days=TTL)
    writer = Writer(store)
    rows = [Measurement(1, minute=FIRST + 2359), Measurement(2, minute=FIRST + DAY)]
    writer.write(*rows)
    result = store.commit(writer.batch([Measurement(3, minute=FIRST + 3 * DAY + 2359)]))
    assert result.removed == 3
    assert [value.bucket for value in store.values("calls")] == [
        FIRST + DAY,
        FIRST + 3 * DAY + 2359,
    ]


def test_rows_that_come_too_late_are_counted(backend: Backend) -> None:
    """A row older than the TTL is left out, and counted; one just inside it is merged."""
    store = backend.open(ttl_days=TTL)
    writer = Writer(store)
    writer.write(Measurement(1, minute=FIRST + 3 * DAY))
    late = [Measurement(2, minute=FIRST), Measurement(3, minute=FIRST + DAY)]
    days = {("Endpoint", 20240301): 17, ("Endpoint", 20240302): 5}
    result = store.commit(
        writer.batch(
            late,
            rows=days,
            topn=[TopNRow("db", 0, FIRST, 9, 9, "t", "s", "select", "select")],
            statements=[StatementRow("db", 0, FIRST, "select", 1, 1)],
        )
    )
    assert (result.expired, result.merged) == (17, 3)
    assert store.counters()[EXPIRED, "Endpoint", TOO_OLD] == 17
    assert store.counters() == result.counters
    assert store.top("db") == []
    kept = [Measurement(1, minute=FIRST + 3 * DAY), late[1]]
    assert all_states(store) == expected_states(metrics(), kept)


def test_delta_rows_are_counted_where_no_row_count_is_given(backend: Backend) -> None:
    """Without a row count the late minute rows themselves are counted."""
    store = backend.open(ttl_days=TTL)
    writer = Writer(store)
    writer.write(Measurement(1, minute=FIRST + 5 * DAY))
    late = [Measurement(2, minute=FIRST), Measurement(2, minute=FIRST + 1)]
    assert store.commit(writer.batch(late)).expired == 2


@pytest.mark.parametrize("rows", [(), (Measurement(9, minute=FIRST + 2 * DAY),)])
def test_a_lowered_ttl_is_applied_at_once(backend: Backend, rows: tuple[Measurement, ...]) -> None:
    """No newer day is needed: the next commit removes what is now too old, and that once."""
    long = backend.open(ttl_days=7)
    writer = Writer(long)
    kept = Measurement(3, minute=FIRST + 2 * DAY)
    writer.write(Measurement(1, minute=FIRST), Measurement(2, minute=FIRST + DAY), kept)
    long.close()
    store = backend.open(ttl_days=1)
    again = Writer(store, stream="next", checkpoint="checkpoint-2")
    assert store.commit(again.batch(rows)).removed == 3
    expected = expected_states(metrics(), [Measurement(2, minute=FIRST + DAY), kept, *rows])
    assert all_states(store) == expected
    again.number += 1
    assert store.commit(again.batch(rows)).removed == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_arrival_makes_no_difference(backend: Backend, order: tuple[int, ...]) -> None:
    """What is left depends on the newest minute alone, not on when rows came."""
    store = backend.open(ttl_days=TTL)
    writer = Writer(store)
    rows = [Measurement(day, minute=FIRST + 2 * day * DAY) for day in range(3)]
    for index in order:
        writer.write(rows[index])
    assert all_states(store) == expected_states(metrics(), rows[1:])
