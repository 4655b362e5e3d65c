"""Spans of the oracle as messages in a topic."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from batchmill.kafka import encode
from batchmill.spool import SPAN_COLUMNS, SpanBatch
from tests.kit.kafka import Broker
from tests.kit.threads import PATIENCE_S

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def span_batch(rows: Sequence[dict[str, Any]]) -> SpanBatch:
    """Rows as the decoder would have them."""
    batch = SpanBatch()
    for row in rows:
        for name in SPAN_COLUMNS:
            value = row.get(name)
            if isinstance(value, datetime):
                value = (value - _EPOCH) // timedelta(microseconds=1)
            elif name in ("resource", "attributes"):
                value = dict(value or {})
            batch.columns[name].append(value)
    return batch


def send(
    broker: Broker, topic: str, rows: Sequence[dict[str, Any]] = (), *, raw: Sequence[bytes] = ()
) -> int:
    """Put spans, and whatever else, into a topic; how many messages it were."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": broker.bootstrap})
    messages = encode(span_batch(rows)) if rows else []
    for message in messages:
        producer.produce(topic, key=message.key, value=message.value)
    for value in raw:
        producer.produce(topic, value=value)
    assert producer.flush(PATIENCE_S) == 0
    return len(messages) + len(raw)
