"""Stores in tests: metrics, batches made of single measurements, both backends.

A measurement is the states of one row, so that a batch is any number of measurements in any order,
and what the store must hold is what ``State.merge`` makes of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from batchmill.oal import Count, Extreme, Label, MetricSet, Sum, Tally, load
from batchmill.oal import Metric as OalMetric
from batchmill.sources import Grain
from batchmill.store import (
    Batch,
    Claim,
    Deltas,
    EntityRow,
    Layout,
    RetryPolicy,
    Store,
    decode,
    encode_label_sums,
    encode_labels,
    encode_numbers,
    open_store,
)
from batchmill.store.postgres import PostgresStore, session
from batchmill.store.postgres.session import merge_table
from batchmill.store.sql.session import Session, Upsert
from tests.kit.servers.postgres import Postgres
from tests.kit.threads import WAIT_S

MINUTE = 202403011200
SCRIPT = """
calls = from(Endpoint.*).count();
avg = from(Endpoint.latency).longAvg();
slowest = from(Endpoint.latency).max();
quickest = from(Endpoint.latency).min();
percentile = from(Endpoint.latency).percentile2(10);
statuses = from(Endpoint.*).labelCount(name);
by_name = from(Endpoint.*).labelAvg(name, latency);
"""
PART_COLUMNS = ("part_batch", "part_cutoff", "part_run")
PATIENT = RetryPolicy(initial_ms=10, max_ms=100, give_up_after_s=WAIT_S)


def metrics(text: str = SCRIPT) -> MetricSet:
    """The metrics of a script."""
    return load(text)


@dataclass
class Backend:
    """A place for one store, which may be opened several times."""

    url: str
    opened: list[Store] = field(default_factory=list)

    def open(self, **settings: Any) -> Store:
        store = open_store(self.url, **{"retry": PATIENT, **settings})
        self.opened.append(store)
        return store

    def close(self) -> None:
        for store in self.opened:
            store.close()


def backend_url(kind: str, request: pytest.FixtureRequest, *, tables: bool = True) -> str:
    """The address of a place for a store; in PostgreSQL the tables may be there already."""
    if kind == "sqlite":
        folder: Path = request.getfixturevalue("tmp_path")
        return f"sqlite:///{folder}/store.db"
    server: Postgres = request.getfixturevalue("postgres")
    if not tables:
        return server.new_database()
    return server.new_store(lambda url: open_store(url).close())


@dataclass(frozen=True)
class Measurement:
    """One row: the latency and the name that all metrics of :data:`SCRIPT` are taken from."""

    latency: int
    name: str = "GET"
    minute: int = MINUTE
    entity: str = "one"


def entity_row(name: str, layers: Iterable[str] = ("GENERAL",)) -> EntityRow:
    """An endpoint of the shop."""
    return EntityRow("endpoint", f"id-{name}", name, frozenset(layers), {"service": "shop"})


def cells_of(metric: OalMetric, rows: Sequence[Measurement]) -> list[Any]:
    """The cells of a metric over some rows, computed the plain way."""
    latencies = [row.latency for row in rows]
    names = [row.name for row in rows]
    values: list[Any] = []
    for state in metric.states:
        match state:
            case Count():
                values.append(len(rows))
            case Sum():
                values.append(sum(latencies))
            case Extreme(which=which):
                values.append(max(latencies) if which == "max" else min(latencies))
            case Tally(key=Label()):
                values.append(encode_labels({name: names.count(name) for name in names}))
            case Tally():
                keys = [latency // 10 for latency in latencies]
                values.append(encode_numbers({key: keys.count(key) for key in keys}))
            case _:
                sums: dict[str, tuple[int, int]] = {}
                for row in rows:
                    total, count = sums.get(row.name, (0, 0))
                    sums[row.name] = (total + row.latency, count + 1)
                values.append(encode_label_sums(sums))
    return values


def bucket_of(grain: Grain, minute: int) -> int:
    """The bucket that a minute lies in."""
    return minute // {Grain.MINUTE: 1, Grain.HOUR: 100, Grain.DAY: 10_000}[grain]


def deltas(
    metrics: MetricSet, layout: Layout, rows: Sequence[Measurement], names: Sequence[str]
) -> list[Deltas]:
    """The rows as deltas of all three grains."""
    made = []
    for grain in Grain:
        places: dict[tuple[int, int], list[Measurement]] = {}
        for row in rows:
            place = (bucket_of(grain, row.minute), names.index(row.entity))
            places.setdefault(place, []).append(row)
        cells: dict[str, list[Any]] = {
            column: [] for result in metrics for column in layout.columns[result.name]
        }
        for inside in places.values():
            for result in metrics:
                for column, value in zip(
                    layout.columns[result.name], cells_of(result, inside), strict=True
                ):
                    cells[column].append(value)
        made.append(
            Deltas(
                "Endpoint",
                grain,
                [bucket for bucket, _ in places],
                [entity for _, entity in places],
                cells,
            )
        )
    return made


@dataclass
class Writer:
    """Writes measurements to a store, batch by batch."""

    store: Store
    stream: str = "live"
    checkpoint: str = "checkpoint-1"
    script: str = SCRIPT
    retire: bool = True
    number: int = 0
    committed: int | None = None

    def __post_init__(self) -> None:
        self.metrics = metrics(self.script)
        self.claim: Claim = self.store.claim(
            self.stream, self.checkpoint, fresh=True, committed=self.committed
        )
        self.layout = self.store.register(self.metrics, retire=self.retire, stream=self.stream)

    def batch(self, rows: Sequence[Measurement], /, **more: Any) -> Batch:
        names = sorted({row.entity for row in rows})
        batch = Batch(
            self.stream,
            self.claim.epoch,
            self.number,
            max((row.minute for row in rows), default=None),
            [entity_row(name) for name in names],
            deltas(self.metrics, self.layout, rows, names) if rows else [],
        )
        for name, value in more.items():
            setattr(batch, name, value)
        return batch

    def write(self, *rows: Measurement, **more: Any) -> Batch:
        batch = self.batch(rows, **more)
        assert self.store.commit(batch).applied
        self.number += 1
        return batch


def all_states(store: Store) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Everything that the store holds of active metrics, decoded."""
    return {
        (metric.name, grain, row.bucket, row.entity_id): row.states
        for metric in store.metrics()
        for grain in Grain
        for row in store.states(metric, grain=grain)
    }


def expected_states(
    metrics: MetricSet, rows: Sequence[Measurement]
) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """What the store must hold after those rows, however they were cut into batches."""
    expected: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for grain in Grain:
        places: dict[tuple[int, str], list[Measurement]] = {}
        for row in rows:
            places.setdefault((bucket_of(grain, row.minute), row.entity), []).append(row)
        for (bucket, entity), inside in places.items():
            for result in metrics:
                values = cells_of(result, inside)
                states = tuple(
                    decode(state, [value])
                    for state, value in zip(result.states, values, strict=True)
                )
                expected[result.name, grain, bucket, f"id-{entity}"] = states
    return expected


HASTY = RetryPolicy(initial_ms=1, multiplier=100_000, max_ms=10**8, give_up_after_s=60)
"""Gives up after the second try, however long a try takes: the next wait would be too long."""


def open_postgres(url: str, retry: RetryPolicy = PATIENT) -> PostgresStore:
    """A store in PostgreSQL whose commits are tried again for long."""
    return PostgresStore(url, url, retry, ttl_days=7, top_n=50, create=True)


def some_rows(number: int, entities: int = 12) -> list[Measurement]:
    """The rows of a batch, always the same for its number: about 40 delta rows."""
    rng = random.Random(number)
    return [
        Measurement(
            rng.randrange(1000), f"name {rng.randrange(5)}", MINUTE + rng.randrange(2), f"e{n}"
        )
        for n in range(entities)
        for _ in range(3)
    ]


def before(function: Callable[..., Any], act: Callable[[int], object]) -> Callable[..., Any]:
    """A function that first calls ``act`` with how many calls there were before."""
    calls = iter(range(10**6))

    def both(*arguments: Any, **named: Any) -> Any:
        act(next(calls))
        return function(*arguments, **named)

    return both


def before_merges(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], object]) -> None:
    """Call ``act`` with a table's name before that table's rows are merged."""

    def both(upsert: Upsert, table: str, where: str = "") -> str:
        act(table)
        return merge_table(upsert, table, where)

    monkeypatch.setattr(session, "merge_table", both)


ADDED = {
    3: [
        "DROP TABLE outbox",
        "DROP TABLE export_position",
        "DELETE FROM meta WHERE key = 'outbox_seq'",
    ],
    4: [
        "DROP TABLE part_commit",
        *(f"ALTER TABLE stream DROP COLUMN {name}" for name in PART_COLUMNS),
        "DELETE FROM meta WHERE key = 'columns'",
    ],
    5: [
        *(f"ALTER TABLE stream DROP COLUMN {name}" for name in ("clock_ms", "steady_ms")),
        "DELETE FROM meta WHERE key IN ('clock', 'last_minute')",
    ],
    6: [
        *(f"DROP TABLE alert_{name}" for name in ("rule", "state", "episode", "notification")),
        "DELETE FROM meta WHERE key = 'alerts'",
    ],
}
"""How to undo the step to each version of the schema."""


def downgrade(store: Store, version: int) -> None:
    """Make a store one of an older schema; close it after that."""

    def work(session: Session) -> None:
        for step in sorted(ADDED, reverse=True):
            if step > version:
                for sql in ADDED[step]:
                    session.run(sql)
        session.run(f"UPDATE meta SET value = '{version}' WHERE key = 'schema_version'")

    store._write(work)
