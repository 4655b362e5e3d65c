"""Reading values: the newest, page by page, whole buckets, and names in any alphabet."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.oal import FUNCTIONS, load
from batchmill.sources import Grain
from batchmill.store import Deltas, EntityRow, Selection, Store, Value
from batchmill.store.sql import entities as entities_sql
from batchmill.store.sql import values as values_sql
from batchmill.store.states import Plan
from tests.kit.stores import MINUTE, Backend, Measurement, Writer, entity_row, metrics

MANY = 3_000
"""Minutes of one entity: enough to tell a handful of rows from all of them."""


def place(value: Value) -> tuple[int, str]:
    """Where a value stands."""
    return (value.bucket, value.entity_id)


def many_minutes(count: int) -> list[int]:
    """So many minutes, one after the other."""
    start = datetime(2024, 3, 1, 12, tzinfo=UTC)
    return [Grain.MINUTE.bucket(start + timedelta(minutes=number)) for number in range(count)]


def filled(backend: Backend, count: int) -> Store:
    """A store with that many values of one entity."""
    store = backend.open()
    Writer(store).write(*(Measurement(1, minute=minute) for minute in many_minutes(count)))
    return store


def peak_bytes(work: Callable[[], Any]) -> int:
    """How much memory Python took at most while it worked."""
    work()  # what is made once is made by now
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_limit_is_the_newest_in_order(backend: Backend) -> None:
    """Of all values by bucket and entity id the last ones, also where a bucket is cut in two."""
    store = backend.open()
    rows = [Measurement(1, minute=MINUTE + m, entity=e) for m in (5, 1, 3) for e in ("b", "a", "c")]
    Writer(store).write(*rows)
    everything = [place(value) for value in store.values("calls")]
    assert everything == sorted(everything)
    for limit in range(len(rows) + 2):
        wanted = everything[max(0, len(rows) - limit) :]
        assert [place(value) for value in store.values("calls", limit=limit)] == wanted
        states = store.states("calls", limit=limit)
        assert [(state.bucket, state.entity_id) for state in states] == wanted
    assert store.values("calls", limit=10**30) == store.values("calls")
    with pytest.raises(ConfigError, match="limit"):
        store.values("calls", limit=-1)


def test_values_are_counted_without_being_read(backend: Backend) -> None:
    """The count is that of the selection, whatever the limit of a reader is."""
    store = backend.open()
    Writer(store).write(
        *(Measurement(1, minute=MINUTE + m, entity=e) for m in (0, 1) for e in "ab")
    )
    assert store.count_values("calls") == len(store.values("calls")) == 4
    assert store.count_values("calls", entity="a", start=MINUTE + 1) == 1
    assert store.count_values("percentile", grain=Grain.DAY) == 2
    assert store.count_values("calls", entity="nobody") == 0


def test_a_selection_is_the_same_as_its_fields(backend: Backend) -> None:
    """As an object, as keywords, or both; a limit bounds pages and counts as well."""
    store = backend.open()
    rows = [Measurement(1, minute=MINUTE + m, entity=e) for m in range(3) for e in ("b", "a")]
    Writer(store).write(*rows)
    selection = Selection(entity="a", start=MINUTE + 1)
    wanted = store.values("avg", entity="a", start=MINUTE + 1)
    assert store.values("avg", selection) == wanted
    assert list(store.iter_values("avg", selection)) == wanted
    assert store.count_values("avg", selection) == len(wanted) == 2
    assert store.values("avg", selection, limit=1) == wanted[1:]
    assert list(store.iter_values("avg", selection, limit=1)) == wanted[1:]
    assert store.count_values("avg", selection, limit=1) == 1


def test_rows_without_a_value_do_not_count(backend: Backend) -> None:
    """A row in which nothing matched takes no place among the newest ones."""
    store = backend.open()
    writer = Writer(store)
    batch = writer.batch([Measurement(1, minute=MINUTE + m) for m in range(4)])
    for deltas in batch.deltas:
        if deltas.grain is Grain.MINUTE:
            deltas.cells[writer.layout.columns["calls"][0]][2:] = [0, None]
    store.commit(batch)
    assert [value.bucket for value in store.values("calls", limit=2)] == [MINUTE, MINUTE + 1]
    assert store.count_values("calls") == len(list(store.iter_values("calls"))) == 2
    assert store.count_values("slowest") == 4


def test_values_come_page_by_page(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values in the same order, also where pages end inside a bucket or with the last."""
    store = backend.open()
    rows = [Measurement(1, minute=MINUTE + m, entity=e) for m in range(4) for e in ("b", "a", "c")]
    Writer(store).write(*rows)
    for size in (1, 2, 5, 12, 13):
        monkeypatch.setattr(values_sql, "PAGE", size)
        assert list(store.iter_values("avg")) == store.values("avg")
        assert list(store.iter_values("avg", entity="a")) == store.values("avg", entity="a")
        assert list(store.iter_values("avg", start=MINUTE + 9)) == []


def test_memory_is_that_of_the_selected_rows(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few values of many, the number of all, or all page by page: not all of them at once."""
    store = filled(backend, MANY)
    monkeypatch.setattr(values_sql, "PAGE", MANY // 30)
    everything = peak_bytes(lambda: store.values("percentile"))
    assert len(store.values("percentile")) == MANY
    assert peak_bytes(lambda: store.values("percentile", limit=10)) < everything / 10
    assert peak_bytes(lambda: store.count_values("percentile")) < everything / 10
    assert peak_bytes(lambda: sum(1 for _ in store.iter_values("percentile"))) < everything / 5


ARGUMENTS = {
    "percent": "status == true",
    "rate": "status == true, latency > 5",
    "percentile": "10",
    "percentile2": "10",
    "histogram": "100, 20",
    "labelCount": "name",
    "labelAvg": "name, latency",
    "apdex": "serviceName, status",
}
SOME = {"numbers": ("7:2",), "labels": ('"a":2',), "label_sums": ('"a":[4,2]',)}
"""What a cell may hold besides nothing; numbers, where it is not said."""
DOUBLES = ("sumDouble", "doubleAvg", "maxDouble", "minDouble")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_database_knows_which_rows_have_a_value(backend: Backend, function: str) -> None:
    """For each function and each combination of its cells: in SQL as in Python."""
    source = "ServiceInstanceJVMCPU.usePercent" if function in DOUBLES else "Endpoint.latency"
    script = f"m = from({source}).{function}({ARGUMENTS.get(function, '')});"
    (metric,) = load(script)
    plan = Plan.of(metric)
    options = [(None, *SOME.get(cell.value, (0, 3))) for cell in plan.cells]
    rows = list(itertools.product(*options))
    minutes = many_minutes(len(rows))
    store = backend.open()
    writer = Writer(store, script=script)
    columns = map(list, zip(*rows, strict=True))
    cells = dict(zip(writer.layout.columns["m"], columns, strict=True))
    deltas = Deltas(metric.source, Grain.MINUTE, minutes, [0] * len(rows), cells)
    writer.write(entities=[entity_row("one")], deltas=[deltas], newest_minute=minutes[-1])
    wanted = [
        minute
        for minute, row in zip(minutes, rows, strict=True)
        if plan.value(plan.states(row), 1) is not None
    ]
    assert 0 < len(wanted) < len(rows)
    assert [value.bucket for value in store.values("m", limit=len(wanted))] == wanted
    assert store.count_values("m") == len(wanted)


@pytest.mark.parametrize(
    ("part", "matches"),
    [
        ("CAFÉ", ["CAFÉ", "café"]),
        ("café", ["CAFÉ", "café"]),
        ("fé", ["CAFÉ", "café"]),
        ("ПЛАТЁЖ", ["/платёж"]),
        ("STRASSE", ["Straße"]),
        ("", ["/платёж", "CAFÉ", "Straße", "a!b%c_d", "café"]),
        ("!B%C_", ["a!b%c_d"]),
        ("b_c", []),
    ],
)
def test_names_are_found_in_any_alphabet(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, part: str, matches: list[str]
) -> None:
    """Capitals of every alphabet are letters like the small ones, in both stores."""
    store = backend.open()
    names = ["CAFÉ", "café", "/платёж", "Straße", "a!b%c_d"]
    rows = [entity_row(name, ["GENERAL"]) for name in names]
    Writer(store).write(entities=[*rows, EntityRow("service", "s", "Le Café")])
    monkeypatch.setattr(entities_sql, "PAGE", 2)
    assert sorted(entity.name for entity in store.entities("endpoint", part)) == sorted(matches)
    layered = store.entities(name_like=part, layer="GENERAL")
    assert [entity.id for entity in layered] == sorted(entity.id for entity in layered)
    assert sorted(entity.name for entity in layered) == sorted(matches)


def test_moments_at_the_ends_of_the_calendar(backend: Backend) -> None:
    """The last day and hour are days and hours; what UTC has no year for is refused."""
    store = filled(backend, 3)
    for end in (99991231, 9999123123, 999912312359, datetime.max, datetime.max.replace(tzinfo=UTC)):
        for grain, count in ((Grain.MINUTE, 3), (Grain.HOUR, 1), (Grain.DAY, 1)):
            values = store.values("calls", grain=grain, start=datetime.min, end=end)
            assert len(values) == count
    east, west = timezone(timedelta(hours=5)), timezone(timedelta(hours=-5))
    with pytest.raises(ConfigError, match=r"start=.*calendar"):
        store.values("calls", start=datetime.min.replace(tzinfo=east))
    with pytest.raises(ConfigError, match=r"end=.*calendar"):
        store.count_values("calls", end=datetime.max.replace(tzinfo=west))


ROWS = [
    Measurement(latency * 10, f"name {latency % 3}", MINUTE + latency % 2, f"e{number}")
    for number in range(6)
    for latency in range(1, 4 + number)
]


@pytest.mark.parametrize("grain", Grain)
def test_a_bucket_has_what_each_metric_has(backend: Backend, grain: Grain) -> None:
    """Every value that values() answers for the bucket is there, and no other."""
    store = backend.open()
    Writer(store).write(*ROWS)
    bucket = int(str(MINUTE)[: {Grain.MINUTE: 12, Grain.HOUR: 10, Grain.DAY: 8}[grain]])
    content = store.bucket_values(bucket, grain=grain)
    values = {
        (name, entity.kind, entity.id, entity.name, entity.layers, str(value))
        for entity in content.entities
        for name, value in entity.values.items()
    }
    assert values == {
        (
            value.metric,
            "endpoint",
            value.entity_id,
            value.entity_name,
            value.layers,
            str(value.value),
        )
        for metric in store.metrics()
        for value in store.values(metric, grain=grain, start=bucket, end=bucket)
    }
    assert values
    assert not content.left_out


def test_the_busiest_come_first(backend: Backend) -> None:
    """With a limit, the entities with the most rows are read, and the others are counted."""
    store = backend.open()
    Writer(store).write(*(Measurement(1, entity=f"e{n}") for n in range(5) for _ in range(n + 1)))
    content = store.bucket_values(MINUTE, most=2)
    assert [(entity.id, entity.values["calls"]) for entity in content.entities] == [
        ("id-e4", 5),
        ("id-e3", 4),
    ]
    assert content.left_out == dict.fromkeys((metric.name for metric in store.metrics()), 3)


def test_former_versions_are_not_read(backend: Backend) -> None:
    """Of a metric that was redefined the new version is read; one that was removed is not."""
    store = backend.open()
    writer = Writer(
        store, script="kept = from(Endpoint.*).count();gone = from(Endpoint.*).count();"
    )
    writer.write(Measurement(5))
    store.register(metrics("kept = from(Endpoint.latency).max();"), stream=writer.stream)
    content = store.bucket_values(MINUTE)
    assert [(metric.name, metric.version) for metric in content.metrics] == [("kept", 2)]
    assert [dict(entity.values) for entity in content.entities] == [{}]


def test_a_bucket_without_rows_is_empty(backend: Backend) -> None:
    """A bucket in which nothing happened has metrics and no entity."""
    store = backend.open()
    Writer(store).write(*ROWS)
    content = store.bucket_values(MINUTE - 5)
    assert (content.entities, len(content.metrics)) == ([], 7)


def test_a_negative_limit_is_an_error(backend: Backend) -> None:
    """``most`` is a number of entities."""
    with pytest.raises(ConfigError, match="most=-1"):
        backend.open().bucket_values(MINUTE, most=-1)
