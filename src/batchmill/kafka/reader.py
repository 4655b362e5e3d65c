"""Reads ranges of a topic's messages; runs in the tasks of Spark, on any machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from batchmill.errors import ConfigError
from batchmill.kafka.client import consumer_of, offsets_of
from batchmill.kafka.errors import KafkaLostError, KafkaReadError
from batchmill.kafka.settings import KafkaAddress, check_options

_MESSAGES_AT_ONCE = 1000
_POLL_S = 1.0
_SILENCE_S = 120.0
"""After so long without a message, reading fails."""
_SETTINGS = {
    "auto.offset.reset": "error",  # messages that are gone must not be skipped in silence
    "enable.partition.eof": True,
    # What is fetched beyond the range is thrown away.
    "queued.min.messages": 10_000,
}
_CERTIFICATES = ("ssl.ca", "ssl.certificate", "ssl.key")


class MessageRange(NamedTuple):
    """Some messages of a partition, from ``first`` up to but not including ``end``."""

    partition: int
    first: int
    end: int


class KafkaMessage(NamedTuple):
    """A message as it is in the topic."""

    partition: int
    offset: int
    value: bytes | None


def check_accepted(options: Mapping[str, str]) -> None:
    """Raise ConfigError unless librdkafka accepts the options; connects to no broker."""
    check_options(options)
    with consumer_of(KafkaAddress((), "none"), options, _SETTINGS):
        pass


def with_certificates(options: Mapping[str, str]) -> dict[str, str]:
    """librdkafka's options with the text of certificates and keys in place of their files' names.

    Executors on other machines do not have the files. Raises ConfigError if one cannot be read.
    """
    own = dict(options)
    for what in _CERTIFICATES:
        name = f"{what}.location"
        # "probe" and folders are for the machine that opens the connection.
        if name not in own or own[name] == "probe" or Path(own[name]).is_dir():
            continue
        try:
            own[f"{what}.pem"] = Path(own[name]).read_text("ascii")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            allowed = f"a file in PEM that can be read ({why})"
            raise ConfigError(f"options[{name!r}]", own[name], allowed) from None
        del own[name]
    return own


def divide(ranges: Sequence[MessageRange], size: int) -> list[list[MessageRange]]:
    """Ranges in groups of ``size`` messages, the last of fewer.

    >>> divide([MessageRange(0, 5, 8), MessageRange(1, 0, 2)], 4)
    [[MessageRange(partition=0, first=5, end=8), MessageRange(partition=1, first=0, end=1)], \
[MessageRange(partition=1, first=1, end=2)]]
    """
    groups: list[list[MessageRange]] = []
    room = 0
    for partition, first, end in ranges:
        while first < end:
            if not room:
                groups.append([])
                room = size
            stop = min(end, first + room)
            groups[-1].append(MessageRange(partition, first, stop))
            room -= stop - first
            first = stop
    return groups


def read_messages(
    address: KafkaAddress,
    ranges: Sequence[MessageRange],
    options: Mapping[str, str],
    *,
    skip_lost: bool = False,
) -> Iterator[list[KafkaMessage]]:
    """The messages of some ranges, of different partitions, a few at a time.

    Raises KafkaLostError if the topic does not have all of them any more, unless ``skip_lost``;
    KafkaReadError if no message comes for two minutes; KafkaLoginError.
    """
    left = {own.partition: own for own in ranges if own.first < own.end}
    with consumer_of(address, options, _SETTINGS) as (consumer, errors):
        consumer.assign([TopicPartition(address.topic, own.partition, own.first) for own in ranges])
        heard = time.monotonic()
        while left:
            received = consumer.consume(_MESSAGES_AT_ONCE, _POLL_S)
            messages = []
            for message in received:
                own = left.get(message.partition())
                if own is None:
                    continue
                fault = message.error()
                if fault is None and message.offset() < own.end:
                    messages.append(KafkaMessage(own.partition, message.offset(), message.value()))
                    own = left[own.partition] = own._replace(first=message.offset() + 1)
                elif fault is not None and fault.code() == KafkaError._AUTO_OFFSET_RESET:
                    own = left[own.partition] = _remaining(consumer, address, own, skip_lost)
                elif fault is not None and fault.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(fault)
                # The last offsets of a range may belong to no message.
                elif message.offset() >= own.end:
                    own = own._replace(first=own.end)
                if own.first >= own.end:
                    del left[own.partition]
                    consumer.incremental_unassign([TopicPartition(address.topic, own.partition)])
            if messages:
                yield messages
                heard = time.monotonic()
            elif errors.refused:
                raise KafkaException(errors.error)
            elif time.monotonic() - heard > _SILENCE_S:
                for own in left.values():
                    if offsets_of(consumer, address, own.partition)[1] < own.end:
                        _remaining(consumer, address, own, skip_lost=False)
                detail = errors.text or f"no message within {_SILENCE_S:g} s"
                raise KafkaReadError(str(address), detail)


def _remaining(
    consumer: Any, address: KafkaAddress, own: MessageRange, skip_lost: bool
) -> MessageRange:
    """What the topic still has of a range of which it lacks messages."""
    low, high = offsets_of(consumer, address, own.partition)
    if not skip_lost:
        what = f"partition {own.partition} was to be read from {own.first:,} to {own.end:,}"
        raise KafkaLostError(str(address), f"{what}, and has {low:,} to {high:,}")
    end = min(own.end, high)
    rest = own._replace(first=min(max(own.first, low), end), end=end)
    if rest.first < rest.end:
        place = TopicPartition(address.topic, rest.partition, rest.first)
        consumer.incremental_unassign([place])
        consumer.incremental_assign([place])
    return rest
