"""Reading a whole bucket: the same values as metric by metric, the busiest entities first."""

from __future__ import annotations

import pytest

from batchmill import ConfigError
from batchmill.sources import Grain
from tests.kit.stores import MINUTE, Backend, Measurement, Writer, metrics

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
    found = store.bucket_values(bucket, grain=grain)
    values = {
        (name, entity.kind, entity.id, entity.name, entity.layers, str(value))
        for entity in found.entities
        for name, value in entity.values.items()
    }
    assert values == {
        (each.metric, "endpoint", each.entity_id, each.entity_name, each.layers, str(each.value))
        for metric in store.metrics()
        for each in store.values(metric, grain=grain, start=bucket, end=bucket)
    }
    assert values
    assert not found.left_out


def test_the_busiest_come_first(backend: Backend) -> None:
    """With a limit, the entities with the most rows are read, and the others are counted."""
    store = backend.open()
    Writer(store).write(*(Measurement(1, entity=f"e{n}") for n in range(5) for _ in range(n + 1)))
    found = store.bucket_values(MINUTE, most=2)
    assert [(each.id, each.values["calls"]) for each in found.entities] == [
        ("id-e4", 5),
        ("id-e3", 4),
    ]
    assert found.left_out == dict.fromkeys((each.name for each in store.metrics()), 3)


def test_former_versions_are_not_read(backend: Backend) -> None:
    """Of a metric that was redefined the new version is read; one that was removed is not."""
    store = backend.open()
    writer = Writer(
        store, script="kept = from(Endpoint.*).count();gone = from(Endpoint.*).count();"
    )
    writer.write(Measurement(5))
    store.register(metrics("kept = from(Endpoint.latency).max();"), stream=writer.stream)
    found = store.bucket_values(MINUTE)
    assert [(each.name, each.version) for each in found.metrics] == [("kept", 2)]
    assert [dict(each.values) for each in found.entities] == [{}]


def test_a_bucket_without_rows_is_empty(backend: Backend) -> None:
    """A bucket in which nothing happened has metrics and no entity."""
    store = backend.open()
    Writer(store).write(*ROWS)
    found = store.bucket_values(MINUTE - 5)
    assert (found.entities, len(found.metrics)) == ([], 7)


def test_a_negative_limit_is_an_error(backend: Backend) -> None:
    """``most`` is a number of entities."""
    with pytest.raises(ConfigError, match="most=-1"):
        backend.open().bucket_values(MINUTE, most=-1)
