"""Clients of librdkafka: the sink's producer, and consumers that ask how far a topic was read."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    ResourceType,
)

from batchmill.errors import ConfigError
from batchmill.kafka.errors import KafkaLoginError, KafkaReadError, KafkaTopicError
from batchmill.kafka.settings import KafkaAddress, KafkaSettings, hide_secrets

log = logging.getLogger("batchmill.kafka")

_LOGIN_S = 1.5
"""Within this time a broker has refused a login that it does not accept."""
_ANSWER_S = 5.0
"""How long a broker may take to answer."""
_MESSAGE_S = 1.0
"""How long it may take to hand over a message."""
_APPEAR_S = 2.0
"""How long a topic that the broker creates by itself may take."""
_RETRY_S = 0.2
# One message is enough to see how old it is: no others are fetched with it.
_ASKING = {"max.partition.fetch.bytes": 1_000, "queued.min.messages": 1}
_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})
_REFUSED = (KafkaError._AUTHENTICATION, KafkaError._SSL)
_VAGUE = (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT)


class ConnectionErrors:
    """Keeps the last error of a client's connections; pass it to the client as ``error_cb``.

    librdkafka tells of a message only that its time was up; the reason goes to ``error_cb``, over
    and over. A broker that refuses a login closes the connection, so that librdkafka reports it as
    down right afterwards: such vague errors do not replace a specific one.
    """

    def __init__(self) -> None:
        self.error: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        """Called by librdkafka with an error."""
        if self.error is None or error.code() not in _VAGUE:
            self.error = error

    @property
    def refused(self) -> bool:
        """Whether the broker is there, and refuses this client."""
        return self.error is not None and self.error.code() in _REFUSED

    @property
    def name(self) -> str:
        """librdkafka's name for the error; empty if there was none."""
        return "" if self.error is None else str(self.error.name())

    @property
    def text(self) -> str:
        """Its text; empty if there was none."""
        return "" if self.error is None else str(self.error.str())

    def clear(self) -> None:
        """Forget the error: the connection works again."""
        self.error = None


def make_producer(
    address: KafkaAddress,
    settings: KafkaSettings,
    max_message_bytes: int,
    on_error: Callable[[KafkaError], None],
) -> Producer:
    """A producer; ``on_error`` gets the errors of its connections, on the polling thread."""
    config: dict[str, Any] = {
        **_connection(address, settings),
        "enable.idempotence": True,
        "acks": "all",
        "compression.type": settings.compression,
        "linger.ms": settings.linger_s * 1000,
        "message.timeout.ms": round(settings.delivery_timeout_s * 1000),
        "message.max.bytes": max_message_bytes,
        "batch.size": max_message_bytes,
        # The sink has bounds of its own; these lie beyond them, as a safeguard.
        "queue.buffering.max.messages": 2 * settings.capacity_rows + 200_000,
        "queue.buffering.max.kbytes": min(2 * settings.capacity_bytes // 1024 + 262_144, 2**31 - 1),
        # As Java's producers do: others may write to the topic as well.
        "partitioner": "murmur2_random",
        "reconnect.backoff.ms": 100,
        "reconnect.backoff.max.ms": 1000,
        "error_cb": on_error,
    }
    try:
        return Producer(config, logger=_ClientLog())
    except KafkaException as error:
        raise _bad_options(error, settings.options) from None


def check_topic(
    producer: Producer, address: KafkaAddress, timeout_s: float, errors: ConnectionErrors
) -> str:
    """Ask for the topic: empty if it exists, else why that could not be found out.

    Raises KafkaTopicError if it does not exist, KafkaLoginError if the broker refuses the login;
    ``errors`` are those of the producer's connections.
    """
    started = time.monotonic()
    appear_until, end = started + min(timeout_s, _APPEAR_S), started + timeout_s
    while True:
        left = end - time.monotonic()
        try:
            # A refused login shows in `errors` within a moment, and not in the answer.
            listing = producer.list_topics(address.topic, timeout=max(0.1, min(left, _LOGIN_S)))
        except KafkaException as error:
            if errors.refused:
                raise KafkaLoginError(str(address), errors.text) from None
            if left > _LOGIN_S:
                continue
            return errors.text or _text(error)
        fault = listing.topics[address.topic].error
        if fault is None:
            return ""
        if time.monotonic() > appear_until:
            if fault.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                raise KafkaTopicError(str(address))
            return str(fault.str())
        time.sleep(_RETRY_S)


def topic_limit(address: KafkaAddress, settings: KafkaSettings, timeout_s: float) -> int | None:
    """The topic's ``max.message.bytes``; None if the broker does not tell."""
    topic = ConfigResource(ResourceType.TOPIC, address.topic)
    admin = AdminClient(_connection(address, settings))  # must live until it has answered
    try:
        answers = admin.describe_configs([topic], request_timeout=timeout_s)
        return int(answers[topic].result(timeout_s)["max.message.bytes"].value)
    except (KafkaException, TimeoutError, KeyError, ValueError) as error:
        log.warning("the topic's max.message.bytes is not known (%s)", error)
        return None


class Behind(NamedTuple):
    """What a reader has not read."""

    messages: int
    oldest_s: float
    """How long the oldest of them has been in the topic; 0 if there is none."""


def check_readable(address: KafkaAddress, options: Mapping[str, str] = _NO_OPTIONS) -> None:
    """Raise KafkaReadError if no broker answers, KafkaTopicError if there is no such topic.

    Raises KafkaLoginError if the broker refuses the login in ``options``, which are librdkafka's.
    """
    with consumer_of(address, options, _ASKING) as (consumer, errors):
        _partitions(consumer, address, errors)


def message_range(
    address: KafkaAddress, options: Mapping[str, str] = _NO_OPTIONS
) -> dict[int, tuple[int, int]]:
    """By partition: the first message that the topic still has, and the first that will come."""
    with consumer_of(address, options, _ASKING) as (consumer, errors):
        return {
            partition: offsets_of(consumer, address, partition)
            for partition in _partitions(consumer, address, errors)
        }


def behind(
    address: KafkaAddress,
    read: Mapping[int, int],
    now: float,
    options: Mapping[str, str] = _NO_OPTIONS,
) -> Behind:
    """What a reader has not read; ``read`` is how far it got, by partition."""
    messages, oldest = 0, now
    with consumer_of(address, options, _ASKING) as (consumer, errors):
        for partition in _partitions(consumer, address, errors):
            low, high = offsets_of(consumer, address, partition)
            offset = max(low, read.get(partition, 0))
            if high > offset:
                messages += high - offset
                oldest = min(oldest, _sent_at(consumer, address.topic, partition, offset, now))
    return Behind(messages, max(0.0, now - oldest))


@contextlib.contextmanager
def consumer_of(
    address: KafkaAddress, options: Mapping[str, str], settings: Mapping[str, Any]
) -> Iterator[tuple[Any, ConnectionErrors]]:
    """A consumer that commits nothing; its exceptions become ours."""
    errors = ConnectionErrors()
    try:
        consumer = Consumer(
            {
                **options,
                **settings,
                "bootstrap.servers": address.bootstrap,
                "group.id": "batchmill",  # never joined
                "enable.auto.commit": False,
                "log_level": 0,  # what matters is raised
                "error_cb": errors,
            }
        )
    except KafkaException as error:
        raise _bad_options(error, options) from None
    try:
        yield consumer, errors
    except KafkaException as error:
        consumer.poll(0)  # calls error_cb
        if errors.refused:
            raise KafkaLoginError(str(address), errors.text) from None
        raise KafkaReadError(str(address), errors.text or _text(error)) from error
    finally:
        consumer.close()


def _partitions(consumer: Any, address: KafkaAddress, errors: ConnectionErrors) -> list[int]:
    try:
        listing = consumer.list_topics(address.topic, timeout=_LOGIN_S)
    except KafkaException:
        # A refused login is reported at once; else the broker may only be slow.
        consumer.poll(0)
        if errors.refused:
            raise
        listing = consumer.list_topics(address.topic, timeout=_ANSWER_S - _LOGIN_S)
    topic = listing.topics[address.topic]
    if topic.error is not None:
        raise KafkaTopicError(str(address))
    return sorted(topic.partitions)


def offsets_of(consumer: Any, address: KafkaAddress, partition: int) -> tuple[int, int]:
    """The first message that a partition still has, and the first that will come."""
    place = TopicPartition(address.topic, partition)
    low, high = consumer.get_watermark_offsets(place, timeout=_ANSWER_S)
    return low, high


def _sent_at(consumer: Any, topic: str, partition: int, offset: int, now: float) -> float:
    """When a message came into its topic; now, if the broker does not hand it over in time."""
    consumer.assign([TopicPartition(topic, partition, offset)])
    try:
        message = consumer.poll(_MESSAGE_S)
    finally:
        consumer.unassign()
    if message is None or message.error() is not None:
        return now
    return float(message.timestamp()[1]) / 1000


class _ClientLog:
    """librdkafka's logger. It would log twice a second that a broker is away: INFO at most."""

    _log = log.getChild("client")

    def log(self, level: int, message: str, *arguments: object) -> None:
        """Log a line; what matters of it also comes as an error."""
        self._log.log(min(level, logging.INFO), message, *arguments)


def _connection(address: KafkaAddress, settings: KafkaSettings) -> dict[str, Any]:
    return {
        "client.id": "batchmill",
        **settings.options,
        "bootstrap.servers": address.bootstrap,
    }


def _bad_options(error: KafkaException, options: Mapping[str, str]) -> ConfigError:
    text = hide_secrets(_text(error), options)
    return ConfigError("options", "…", f"what librdkafka accepts: {text}")


def _text(error: KafkaException) -> str:
    cause = error.args[0] if error.args else error
    return str(cause.str()) if isinstance(cause, KafkaError) else str(cause)
