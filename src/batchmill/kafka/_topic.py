"""A topic, asked about: whether it is there, and how much of it was not read yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaException, TopicPartition

from batchmill.kafka._address import KafkaAddress
from batchmill.kafka._errors import KafkaReadError, KafkaTopicError

_WAIT_S = 5.0
"""How long the broker may take to answer."""
_MESSAGE_S = 1.0
"""How long it may take to hand over a message."""


class Behind(NamedTuple):
    """What a reader has not read."""

    messages: int
    oldest_s: float
    """How long the oldest of them has been in the topic; 0 if there is none."""


def check_readable(address: KafkaAddress) -> None:
    """Raise KafkaReadError if no broker answers, KafkaTopicError if it has no such topic."""
    with _asking(address) as consumer:
        _partitions(consumer, address)


def behind(address: KafkaAddress, read: Mapping[int, int], now: float) -> Behind:
    """What whoever has ``read`` up to an offset in each partition has not read."""
    messages, oldest = 0, now
    with _asking(address) as consumer:
        for partition in _partitions(consumer, address):
            place = TopicPartition(address.topic, partition)
            low, high = consumer.get_watermark_offsets(place, timeout=_WAIT_S)
            at = max(low, read.get(partition, 0))
            if high > at:
                messages += high - at
                oldest = min(oldest, _sent_at(consumer, address.topic, partition, at, now))
    return Behind(messages, max(0.0, now - oldest))


@contextlib.contextmanager
def _asking(address: KafkaAddress) -> Iterator[Any]:
    consumer = Consumer(
        {
            "bootstrap.servers": address.bootstrap,
            "group.id": "batchmill-lag",
            "enable.auto.commit": False,
            "log_level": 0,  # what matters of it is raised
        }
    )
    try:
        yield consumer
    except KafkaException as error:
        raise KafkaReadError(str(address), str(error.args[0].str())) from error
    finally:
        consumer.close()


def _partitions(consumer: Any, address: KafkaAddress) -> list[int]:
    found = consumer.list_topics(address.topic, timeout=_WAIT_S).topics[address.topic]
    if found.error is not None:
        raise KafkaTopicError(str(address))
    return sorted(found.partitions)


def _sent_at(consumer: Any, topic: str, partition: int, offset: int, now: float) -> float:
    """When a message came into its topic; now, if it cannot be had in a moment."""
    consumer.assign([TopicPartition(topic, partition, offset)])
    try:
        message = consumer.poll(_MESSAGE_S)
    finally:
        consumer.unassign()
    if message is None or message.error() is not None:
        return now
    return float(message.timestamp()[1]) / 1000
