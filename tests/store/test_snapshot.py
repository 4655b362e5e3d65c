"""Several reads of one moment: rows of many buckets, merged by their cells, and whom they name."""

from __future__ import annotations

import pytest

from batchmill.sources import Grain
from batchmill.store import Buckets, Snapshot, StatementRow, TopNRow
from batchmill.store.sql import snapshot as snapshot_sql
from tests.kit.stores import MINUTE, Backend, Measurement, Writer, expected_states

ROWS = [
    Measurement(10 * number + latency, f"n{latency % 3}", MINUTE + latency, f"e{number}")
    for number in range(4)
    for latency in range(6)
]
HALF = [row for row in ROWS if row.minute < MINUTE + 3]


@pytest.mark.parametrize("seeks", [0, 10**6], ids=["through the buckets", "one by one"])
def test_merged_cells_give_what_merged_states_give(
    backend: Backend, seeks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of some minutes, merged by their cells, have the states of all their measurements."""
    monkeypatch.setattr(snapshot_sql, "MAX_LOOKUPS", seeks)
    store = backend.open()
    writer = Writer(store)
    for measurement in ROWS:
        writer.write(measurement)
    wanted = ["id-e1", "id-e3"]

    def work(snapshot: Snapshot) -> dict[tuple[str, str], tuple[object, ...]]:
        metrics = snapshot.metrics()
        keys = {entity.key: entity.id for entity in snapshot.find("endpoint", ids=wanted)}
        read = snapshot.cells(metrics, Buckets(Grain.MINUTE, MINUTE, MINUTE + 2), entities=keys)
        assert read.complete
        states = {}
        for key, id_ in keys.items():
            mine = [row for row in read.rows if row[1] == key]
            for metric in metrics:
                columns = list(zip(*(row[read.places[metric.name]] for row in mine), strict=True))
                states[metric.name, id_] = metric.plan.states(metric.plan.merge(columns))
        return states

    expected = {
        (metric, id_): states
        for (metric, grain, _, id_), states in expected_states(writer.metrics, HALF).items()
        if grain is Grain.DAY and id_ in wanted
    }
    assert store.read(work) == expected


def test_no_more_rows_than_wanted(backend: Backend) -> None:
    """A limit cuts, and the answer says so; one that is not reached does not."""
    store = backend.open()
    Writer(store).write(*ROWS)
    minutes = Buckets(Grain.MINUTE, MINUTE, MINUTE + 5)

    def work(snapshot: Snapshot) -> list[tuple[int, bool]]:
        reads = [snapshot.cells(snapshot.metrics(), minutes, most=most) for most in (23, 24)]
        return [(len(result.rows), result.complete) for result in reads]

    assert store.read(work) == [(23, False), (24, True)]


def test_entities_are_found_by_parts_of_their_ids(backend: Backend) -> None:
    """By how an id begins or ends, taken literally, and by id or name."""
    store = backend.open()
    writer = Writer(store)
    writer.write(*(Measurement(1, entity=name) for name in ("a_b", "a_B", "a%b", "axb", "b_a")))

    def work(snapshot: Snapshot) -> list[list[str]]:
        answers = (
            snapshot.find("endpoint", id_begins="id-a_"),
            snapshot.find("endpoint", id_ends="_b"),
            snapshot.find("endpoint", id_ends="%b"),
            snapshot.find("endpoint", id_ends="x" * 50 + "_b"),
            snapshot.find(id_or_name="axb"),
            snapshot.find("endpoint", ids=["id-b_a", "id-none"]),
            snapshot.find("service"),
        )
        return [[entity.name for entity in some] for some in answers]

    assert store.read(work) == [
        *(["a_B", "a_b"], ["a_b"], ["a%b"], []),
        *(["axb"], ["b_a"], []),
    ]


def test_entities_come_in_pages(backend: Backend) -> None:
    """The page that is asked for, and how many there are of all."""
    store = backend.open()
    Writer(store).write(*(Measurement(1, entity=f"E{number}") for number in range(5)))

    def work(snapshot: Snapshot) -> list[tuple[list[str], int]]:
        pages = [
            snapshot.entities("endpoint", name, None, limit=2, offset=1) for name in (None, "e")
        ]
        return [([entity.name for entity in page.entities], page.total) for page in pages]

    assert store.read(work) == [(["E1", "E2"], 5)] * 2


def test_the_slowest_of_several_buckets_together(backend: Backend) -> None:
    """Ranked over all buckets, with how often the statement ran in the bucket, or in all."""
    store = backend.open()
    writer = Writer(store)
    for number, minute in enumerate((MINUTE, MINUTE + 1)):
        more = {
            "topn": [
                TopNRow("slow", 0, minute, 100 + ms + number, ms, f"t{ms}", "s", "SELECT 1", "S ?")
                for ms in range(3)
            ],
            "statements": [StatementRow("slow", 0, minute, "S ?", 7, 70)],
        }
        writer.write(Measurement(1, minute=minute), **more)

    def work(snapshot: Snapshot) -> object:
        minutes = Buckets(Grain.MINUTE, MINUTE, MINUTE + 1)
        (one,) = snapshot.find("endpoint")
        slowest = snapshot.slowest("slow", minutes, entity=one.key, n=3)
        assert snapshot.slowest("slow", minutes, n=3) == slowest
        totals = snapshot.statement_totals("slow", minutes, one.key)
        return [(result.rank, result.latency, result.runs) for result in slowest], totals

    assert store.read(work) == ([(1, 103, 7), (2, 102, 7), (3, 102, 7)], {"S ?": (14, 140)})


def test_a_snapshot_does_not_move(backend: Backend) -> None:
    """What is committed while it is read shows in the next one only."""
    store, other = backend.open(), backend.open()
    writer = Writer(other)
    writer.write(Measurement(1))

    def work(snapshot: Snapshot) -> list[int | None]:
        before = snapshot.newest_minute()
        if writer.number == 1:
            writer.write(Measurement(1, minute=MINUTE + 1))
        return [before, snapshot.newest_minute()]

    assert store.read(work) == [MINUTE, MINUTE]
    assert store.read(work) == [MINUTE + 1, MINUTE + 1]


def test_the_oldest_minute_of_a_source(backend: Backend) -> None:
    """It may come later than newer ones; a source without rows has none."""
    store = backend.open()
    writer = Writer(store)
    assert store.read(lambda snapshot: snapshot.oldest_minute("Endpoint")) is None
    writer.write(Measurement(1, minute=MINUTE + 5))
    writer.write(Measurement(1, minute=MINUTE + 3))
    assert store.read(lambda snapshot: snapshot.oldest_minute("Endpoint")) == MINUTE + 3


def test_the_busiest_entities_are_found_by_the_database(backend: Backend) -> None:
    """By the sum of a count over some buckets; with how many there are altogether."""
    store = backend.open()
    Writer(store).write(
        *(
            Measurement(1, minute=MINUTE + minute, entity=f"e{number}")
            for number in range(5)
            for minute in range(number + 1)
            for _ in range(2)
        )
    )
    hours = Buckets(Grain.HOUR, MINUTE // 100, MINUTE // 100)

    def work(snapshot: Snapshot) -> tuple[list[str], int, int]:
        (metric,) = (metric for metric in snapshot.metrics() if metric.name == "calls")
        ranking = snapshot.busiest(metric, hours, most=2)
        names = snapshot.entity_names(ranking.keys)
        begins = snapshot.busiest(metric, hours, kind="endpoint", id_begins="id-e3")
        return [names[key].id for key in ranking.keys], ranking.total, begins.total

    assert store.read(work) == (["id-e4", "id-e3"], 5, 1)
