"""Deltas in a topic: as messages, and sent by a client that aggregates to a real broker."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")
pytest.importorskip("numpy")

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill import Client, oal
from batchmill.aggregate import Aggregator, from_arrow, to_arrow
from batchmill.client import EdgeSettings
from batchmill.errors import ConfigError
from batchmill.kafka import (
    KafkaSettings,
    KafkaSink,
    KafkaWriteError,
    MessageTooLargeError,
    decode,
    deltas_in,
    encode,
    encode_deltas,
)
from tests.kafka.kit import batch_of, row
from tests.kit.servers.kafka import Broker
from tests.kit.threads import WAIT_S

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
SCRIPT = """
calls = from(Endpoint.*).count();
slow = from(Endpoint.latency).percentile2(1);
"""
METRICS = oal.load(SCRIPT)
AGGREGATOR = Aggregator(METRICS.catalog.source("Endpoint"), tuple(METRICS))
HOUR = EdgeSettings(period_s=3600)


def event(n: int) -> dict[str, Any]:
    """A call of one of fifty endpoints."""
    latency = random.Random(n).randrange(10**9)
    name = f"/{n % 50}"
    return {"time": NOON, "serviceName": "shop", "name": name, "latency": latency, "status": True}


def table(events: int) -> pa.Table:
    """The deltas of so many calls."""
    schema = METRICS.catalog.source("Endpoint").arrow_schema()
    rows = pa.Table.from_pylist([event(n) for n in range(events)], schema=schema)
    return to_arrow(AGGREGATOR.make(rows).deltas, AGGREGATOR.plan)


def counted(values: list[bytes]) -> dict[str, int]:
    """How many events of each endpoint the messages stand for."""
    parts = []
    for value in values:
        deltas = deltas_in(value)
        assert deltas is not None
        assert deltas.source == "Endpoint"
        part = pq.read_table(pa.BufferReader(deltas.parquet))
        parts.append(from_arrow(part, AGGREGATOR.plan))
    merged = AGGREGATOR.merge(parts)
    names = merged.roles[-1].to_pylist()
    return dict(zip(names, merged.rows.tolist(), strict=True))


def test_deltas_are_one_message() -> None:
    """Of their event type, and without a key: any partition will do."""
    (message,) = encode_deltas("Endpoint", table(1000))
    assert (message.key, message.spans) == (b"", 50)
    assert counted([message.value]) == {f"/{n}": 20 for n in range(50)}


def test_deltas_that_are_too_large_are_several_messages() -> None:
    """Each within the limit; together they are the same. One that cannot be cut is an error."""
    deltas = table(20_000)
    whole = len(encode_deltas("Endpoint", deltas, 2**30)[0].value)
    messages = encode_deltas("Endpoint", deltas, whole // 3)
    assert len(messages) >= 3
    assert max(len(message.value) for message in messages) <= whole // 3
    assert counted([message.value for message in messages]) == {f"/{n}": 400 for n in range(50)}
    with pytest.raises(MessageTooLargeError, match="topic"):
        encode_deltas("Endpoint", deltas, 100, "topic")


def test_other_messages_are_no_deltas() -> None:
    """Spans, other formats, and names that are no event type's: they would name a folder."""
    (spans,) = encode(batch_of([row(1)]))
    (deltas,) = encode_deltas("Endpoint", table(10))
    evil = deltas.value.replace(b"Endpoint", b"../point")
    both = deltas.value + spans.value
    for value in (spans.value, b"", None, b"\x12\xff", b"\x12\x00", evil, both):
        assert deltas_in(value) is None
    assert len(decode(deltas.value)) == 0


def test_a_client_sends_deltas(kafka: Broker) -> None:
    """They are in the topic when the futures are done; every event counts once."""
    topic = kafka.new_topic(partitions=2)
    with Client(f"kafka://{kafka.bootstrap}/{topic}", aggregate=METRICS, edge=HOUR) as client:
        answers = [client.emit(event(n), "Endpoint") for n in range(100)]
        assert not answers[0].done()
        assert client.flush(WAIT_S)
        assert all(answer.exception(0) is None for answer in answers)
        (message,) = kafka.read(topic)
        assert counted([message.value]) == {f"/{n}": 2 for n in range(50)}
        last = client.emit(event(0), "Endpoint")
    assert last.exception(0) is None
    assert sum(counted([record.value for record in kafka.read(topic)]).values()) == 101
    stats = client.stats()
    assert (stats.emitted, stats.written, stats.waiting) == (101, 101, 0)


def test_without_a_broker_the_calls_fail() -> None:
    """With the sink's error, and counted."""
    settings = KafkaSettings(delivery_timeout_s=0.5, linger_s=0.001)
    with (
        KafkaSink("kafka://127.0.0.1:9/spans", settings) as sink,
        Client(sink, aggregate=METRICS, edge=HOUR) as client,
    ):
        answer = client.emit(event(1), "Endpoint")
        assert client.flush(WAIT_S)
        assert isinstance(answer.exception(0), KafkaWriteError)
        assert (client.stats().failed, client.stats().waiting) == (1, 0)


def test_a_topic_takes_events_only_as_deltas() -> None:
    """So a client must aggregate, and its script must read the type."""
    with pytest.raises(ConfigError, match="only as deltas"):
        Client("kafka://127.0.0.1:9/spans")
    with (
        Client("kafka://127.0.0.1:9/spans", aggregate=METRICS) as client,
        pytest.raises(ConfigError, match="only as deltas"),
    ):
        client.emit({"time": NOON, "name": "shop", "latency": 1, "status": True}, "Service")
    assert client.stats().refused == 1
