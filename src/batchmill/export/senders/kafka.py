"""Metrics to a Kafka topic: a message for each entity, keyed by its id.

The message is the same as over gRPC (``ExportMetricsServiceRequest``), which is what others expect
of OTLP in Kafka. An entity's messages are of one partition, and so in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from batchmill.errors import ConfigError
from batchmill.export.errors import SendError
from batchmill.export.senders.otlp import to_otlp
from batchmill.export.settings import ExporterSettings
from batchmill.export.target import Target
from batchmill.export.values import ExportedValue
from batchmill.kafka import Trouble, hide_secrets

_GRACE_S = 1.0
"""The producer itself gives up after the timeout; this much later it has said so."""


class KafkaSender:
    """A producer that waits for all acknowledgements of what it was given."""

    def __init__(self, target: Target, settings: ExporterSettings) -> None:
        self._topic = target.path
        self._timeout_s = settings.timeout_s
        timeout_ms = int(settings.timeout_s * 1000)
        self._trouble = Trouble()
        self._given = settings.kafka_options
        self._options: dict[str, Any] = {
            "client.id": "batchmill-export",
            **self._given,
            "bootstrap.servers": ",".join(target.peers),
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 5,
            "compression.type": "lz4",
            "delivery.timeout.ms": timeout_ms,
            "request.timeout.ms": timeout_ms,
            "socket.timeout.ms": max(timeout_ms, 1000),
            "reconnect.backoff.max.ms": 5_000,
            # A topic that is not there is told as such, before the message's own time is up.
            "topic.metadata.propagation.max.ms": timeout_ms // 2,
            "log_level": 0,
            "error_cb": self._trouble,
        }
        # At once: settings that librdkafka does not take are told before anything is sent.
        self._producer: Producer | None = self._make()

    def send(self, values: Sequence[ExportedValue]) -> int:
        """See :class:`Sender`."""
        by_entity: dict[tuple[str, str], list[ExportedValue]] = {}
        for each in values:
            by_entity.setdefault((each.entity_kind, each.entity_id), []).append(each)
        producer = self._open()
        failed: list[KafkaError] = []

        def report(error: KafkaError | None, message: object) -> None:
            if error is not None:
                failed.append(error)

        try:
            for (_, entity), some in by_entity.items():
                body = to_otlp(some).SerializeToString()
                key = entity.encode("utf-8", "replace")
                while not self._put(producer, key, body, report):
                    producer.poll(0.1)
        except KafkaException as error:
            self._abandon(producer)
            raise self._told(error.args[0]) from error
        left = producer.flush(self._timeout_s + _GRACE_S)
        if left:
            self._abandon(producer)
            raise SendError("timeout", f"{left} messages without an answer")
        if failed:
            if any(each.fatal() for each in failed):
                self._abandon(producer)
            raise self._told(failed[0])
        self._trouble.forget()
        return 0

    def interrupt(self) -> None:
        """See :class:`Sender`."""
        producer = self._producer
        if producer is not None:
            producer.purge()

    def close(self) -> None:
        """See :class:`Sender`."""
        if self._producer is not None:
            self._abandon(self._producer)

    def _put(self, producer: Producer, key: bytes, body: bytes, report: Any) -> bool:
        try:
            producer.produce(self._topic, body, key, on_delivery=report)
        except BufferError:  # its own buffer is full: reports make room
            return False
        return True

    def _open(self) -> Producer:
        if self._producer is None:
            self._producer = self._make()
        return self._producer

    def _make(self) -> Producer:
        try:
            return Producer(self._options)
        except KafkaException as error:
            said = hide_secrets(str(error.args[0].str()), self._given)
            raise ConfigError("kafka_options", "…", f"what librdkafka takes: {said}") from None

    def _abandon(self, producer: Producer) -> None:
        """What it still holds is sent again by the next one, or was given up."""
        producer.purge()
        producer.flush(_GRACE_S)
        self._producer = None

    def _told(self, error: KafkaError) -> SendError:
        if self._trouble.refused:  # it shows in each message as time that was up
            return SendError(self._trouble.name.lstrip("_"), self._trouble.text)
        too_large = error.code() == KafkaError.MSG_SIZE_TOO_LARGE
        reason = error.name().lstrip("_")
        return SendError(reason, error.str(), retry=not too_large, too_large=too_large)
