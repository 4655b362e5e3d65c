"""librdkafka, as the sink needs it: made from settings, and asked about the topic."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    ResourceType,
)

from batchmill.errors import ConfigError
from batchmill.kafka.address import KafkaAddress
from batchmill.kafka.errors import KafkaLoginError, KafkaTopicError
from batchmill.kafka.options import hide_secrets
from batchmill.kafka.settings import KafkaSettings
from batchmill.kafka.trouble import Trouble

log = logging.getLogger("batchmill.kafka")

_LOOK_S = 0.2
_REFUSE_S = 1.5
"""Within this a broker has refused a login that it does not take."""
_APPEAR_S = 2.0
"""How long a topic that the broker makes by itself may take."""


def make_producer(
    address: KafkaAddress,
    settings: KafkaSettings,
    max_message_bytes: int,
    told: Callable[[KafkaError], None],
) -> Producer:
    """A producer; ``told`` hears what goes wrong with the connections, on the polling thread."""
    config: dict[str, Any] = {
        **_connection(address, settings),
        "enable.idempotence": True,
        "acks": "all",
        "compression.type": settings.compression,
        "linger.ms": settings.linger_s * 1000,
        "message.timeout.ms": round(settings.delivery_timeout_s * 1000),
        "message.max.bytes": max_message_bytes,
        "batch.size": max_message_bytes,
        # The bounds are the sink's own: these are beyond them, and a safeguard.
        "queue.buffering.max.messages": 2 * settings.capacity_rows + 200_000,
        "queue.buffering.max.kbytes": min(2 * settings.capacity_bytes // 1024 + 262_144, 2**31 - 1),
        # As Java's producers place keys: others may write to the topic as well.
        "partitioner": "murmur2_random",
        "reconnect.backoff.ms": 100,
        "reconnect.backoff.max.ms": 1000,
        "error_cb": told,
    }
    try:
        return Producer(config, logger=_ClientLog())
    except KafkaException as error:
        said = hide_secrets(_said(error), settings.options)
        raise ConfigError("options", "…", f"what librdkafka takes: {said}") from None


def check_topic(
    producer: Producer, address: KafkaAddress, timeout_s: float, trouble: Trouble
) -> str:
    """Ask for the topic: empty if it is there, else why that could not be found out.

    Raises KafkaTopicError if there is none, KafkaLoginError if the broker refuses the login;
    ``trouble`` is what the producer hears meanwhile.
    """
    until = time.monotonic() + min(timeout_s, _APPEAR_S)
    end = time.monotonic() + timeout_s
    while True:
        left = end - time.monotonic()
        try:
            # A login that is refused shows within a moment, and not in the answer.
            found = producer.list_topics(address.topic, timeout=max(0.1, min(left, _REFUSE_S)))
        except KafkaException as error:
            if trouble.refused:
                raise KafkaLoginError(str(address), trouble.text) from None
            if left > _REFUSE_S:
                continue
            return trouble.text or _said(error)
        fault = found.topics[address.topic].error
        if fault is None:
            return ""
        if time.monotonic() > until:
            if fault.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                raise KafkaTopicError(str(address))
            return str(fault.str())
        time.sleep(_LOOK_S)


def topic_limit(address: KafkaAddress, settings: KafkaSettings, timeout_s: float) -> int | None:
    """The topic's ``max.message.bytes``; None if the broker does not tell."""
    topic = ConfigResource(ResourceType.TOPIC, address.topic)
    admin = AdminClient(_connection(address, settings))  # to be kept until it has answered
    try:
        asked = admin.describe_configs([topic], request_timeout=timeout_s)
        return int(asked[topic].result(timeout_s)["max.message.bytes"].value)
    except (KafkaException, TimeoutError, KeyError, ValueError) as error:
        log.warning("the topic's max.message.bytes is not known (%s)", error)
        return None


class _ClientLog:
    """Takes what librdkafka would log: it says twice a second that a broker is not there."""

    _log = log.getChild("client")

    def log(self, level: int, message: str, *arguments: object) -> None:
        """A line of it; what matters of it is told otherwise."""
        self._log.log(min(level, logging.INFO), message, *arguments)


def _connection(address: KafkaAddress, settings: KafkaSettings) -> dict[str, Any]:
    return {
        "client.id": "batchmill",
        **settings.options,
        "bootstrap.servers": address.bootstrap,
    }


def _said(error: KafkaException) -> str:
    cause = error.args[0] if error.args else error
    return str(cause.str()) if isinstance(cause, KafkaError) else str(cause)
