"""The N slowest calls: exact, whatever order they came in."""

from __future__ import annotations

import random
from typing import Any

import pytest

from batchmill.sources import Grain
from batchmill.store import StatementRow, TopNRow
from tests.kit.stores import MINUTE, Backend, Writer, bucket_of, entity_row

N = 5


def records(seed: int, count: int = 200) -> list[TopNRow]:
    """Calls at random, with many ties."""
    chance = random.Random(seed)
    return [
        TopNRow(
            "db",
            chance.randrange(2),
            MINUTE + chance.choice([0, 1, 100]),
            chance.randrange(12),
            chance.randrange(3),
            f"trace-{chance.randrange(4)}",
            f"span-{number}",
            f"select {number}",
            f"select {number % 7}",
        )
        for number in range(count)
    ]


def ranked(rows: list[TopNRow], grain: Grain) -> list[tuple[Any, ...]]:
    """The N slowest of each place, by sorted()."""
    places: dict[tuple[int, int], list[TopNRow]] = {}
    for row in rows:
        places.setdefault((bucket_of(grain, row.minute), row.entity), []).append(row)
    return [
        (bucket, f"id-{entity}", rank, row.latency, row.span_id)
        for (bucket, entity), inside in sorted(places.items())
        for rank, row in enumerate(
            sorted(inside, key=lambda r: (-r.latency, r.time_us, r.trace_id, r.span_id))[:N], 1
        )
    ]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_slowest_are_exact_in_any_order(backend: Backend, seed: int) -> None:
    """Split and shuffled at random, with many ties: the same as sorting them all."""
    store = backend.open(top_n=N)
    writer = Writer(store)
    rows = records(seed)
    chance = random.Random(-seed)
    chance.shuffle(rows)
    while rows_left := rows[writer.number * 23 : writer.number * 23 + 23]:
        writer.write(entities=[entity_row("0"), entity_row("1")], topn=rows_left)
    for grain in Grain:
        slowest = store.top("db", grain=grain)
        assert [
            (result.bucket, result.entity_id, result.rank, result.latency, result.span_id)
            for result in slowest
        ] == ranked(rows, grain)


def test_records_are_selected(backend: Backend) -> None:
    """By entity, by one bucket or a range of them, and the first few of each place."""
    store = backend.open(top_n=N)
    rows = records(4)
    Writer(store).write(entities=[entity_row("0"), entity_row("1")], topn=rows)
    everything = store.top("db")
    assert [record.span_id for record in everything] == [
        row[-1] for row in ranked(rows, Grain.MINUTE)
    ]
    assert store.top("db", n=1) == [record for record in everything if record.rank == 1]
    assert store.top("db", entity="1") == [
        record for record in everything if record.entity_name == "1"
    ]
    one = [record for record in everything if record.bucket == MINUTE + 1]
    assert store.top("db", bucket=MINUTE + 1) == one
    assert store.top("db", bucket=(MINUTE + 1, None)) == [
        record for record in everything if record.bucket > MINUTE
    ]
    assert store.top("cache") == []
    assert store.top_streams() == ["db"]


def test_runs_of_a_statement_add_up(backend: Backend) -> None:
    """How often the normalised text ran, and how long, over all batches and in each grain."""
    store = backend.open()
    writer = Writer(store)
    row = TopNRow("db", 0, MINUTE, 300, 1, "t", "s", "select 1", "select ?")
    writer.write(
        entities=[entity_row("0")],
        topn=[row],
        statements=[
            StatementRow("db", 0, MINUTE, "select ?", 3, 400),
            StatementRow("db", 0, MINUTE, "delete", 1, 9),
        ],
    )
    writer.write(
        entities=[entity_row("0")],
        statements=[
            StatementRow("db", 0, MINUTE, "select ?", 2, 50),
            StatementRow("db", 0, MINUTE + 1, "select ?", 10, 100),
        ],
    )
    totals = {}
    for grain in Grain:
        (record,) = store.top("db", grain=grain)
        assert (record.statement, record.normalised) == ("select 1", "select ?")
        totals[grain] = (record.runs, record.total_ms)
    assert totals == {Grain.MINUTE: (5, 450), Grain.HOUR: (15, 550), Grain.DAY: (15, 550)}
