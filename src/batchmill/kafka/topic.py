"""A topic, asked about: whether it is there, and how much of it was not read yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaException, TopicPartition

from batchmill.errors import ConfigError
from batchmill.kafka.address import KafkaAddress
from batchmill.kafka.errors import KafkaLoginError, KafkaReadError, KafkaTopicError
from batchmill.kafka.options import hide_secrets
from batchmill.kafka.trouble import Trouble

_WAIT_S = 5.0
"""How long the broker may take to answer."""
_REFUSE_S = 1.5
"""Within this it has refused a login that it does not take."""
_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})
_MESSAGE_S = 1.0
"""How long it may take to hand over a message."""


class Behind(NamedTuple):
    """What a reader has not read."""

    messages: int
    oldest_s: float
    """How long the oldest of them has been in the topic; 0 if there is none."""


def check_readable(address: KafkaAddress, options: Mapping[str, str] = _NO_OPTIONS) -> None:
    """Raise KafkaReadError if no broker answers, KafkaTopicError if it has no such topic.

    Raises KafkaLoginError if it does not take the login in ``options``, which are librdkafka's.
    """
    with _asking(address, options) as (consumer, trouble):
        _partitions(consumer, address, trouble)


def behind(
    address: KafkaAddress,
    read: Mapping[int, int],
    now: float,
    options: Mapping[str, str] = _NO_OPTIONS,
) -> Behind:
    """What whoever has ``read`` up to an offset in each partition has not read."""
    messages, oldest = 0, now
    with _asking(address, options) as (consumer, trouble):
        for partition in _partitions(consumer, address, trouble):
            place = TopicPartition(address.topic, partition)
            low, high = consumer.get_watermark_offsets(place, timeout=_WAIT_S)
            at = max(low, read.get(partition, 0))
            if high > at:
                messages += high - at
                oldest = min(oldest, _sent_at(consumer, address.topic, partition, at, now))
    return Behind(messages, max(0.0, now - oldest))


@contextlib.contextmanager
def _asking(address: KafkaAddress, options: Mapping[str, str]) -> Iterator[tuple[Any, Trouble]]:
    trouble = Trouble()
    try:
        consumer = Consumer(
            {
                **options,
                "bootstrap.servers": address.bootstrap,
                "group.id": "batchmill-lag",
                "enable.auto.commit": False,
                # One message is enough to see how old it is: no others are to be fetched with it.
                "max.partition.fetch.bytes": 1_000,
                "queued.min.messages": 1,
                "log_level": 0,  # what matters of it is raised
                "error_cb": trouble,
            }
        )
    except KafkaException as error:
        said = hide_secrets(str(error.args[0].str()), options)
        raise ConfigError("options", "…", f"what librdkafka takes: {said}") from None
    try:
        yield consumer, trouble
    except KafkaException as error:
        consumer.poll(0)  # it hears of its connections here
        if trouble.refused:
            raise KafkaLoginError(str(address), trouble.text) from None
        detail = trouble.text or str(error.args[0].str())
        raise KafkaReadError(str(address), detail) from error
    finally:
        consumer.close()


def _partitions(consumer: Any, address: KafkaAddress, trouble: Trouble) -> list[int]:
    try:
        answer = consumer.list_topics(address.topic, timeout=_REFUSE_S)
    except KafkaException:
        # Whoever is refused need not wait any longer to hear it; the broker may only be slow.
        consumer.poll(0)
        if trouble.refused:
            raise
        answer = consumer.list_topics(address.topic, timeout=_WAIT_S - _REFUSE_S)
    found = answer.topics[address.topic]
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
