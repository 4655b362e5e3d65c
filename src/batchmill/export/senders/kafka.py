"""Metrics to a Kafka topic: a message for each entity, keyed by its id.

The message is the same as over gRPC (``ExportMetricsServiceRequest``), which is what others expect
of OTLP in Kafka. An entity's messages are in one partition, and so in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from batchmill.errors import ConfigError
from batchmill.export.senders import SendError
from batchmill.export.senders.otlp import to_otlp
from batchmill.export.settings import ExporterSettings, Target
from batchmill.export.values import ExportedValue
from batchmill.kafka import ConnectionErrors, hide_secrets
from batchmill.wording import count_of

_GRACE_S = 1.0
"""The producer itself gives up after the timeout; this much later it has said so."""


def open_producer(
    target: Target, trouble: ConnectionErrors, options: Mapping[str, str], field: str, **ours: Any
) -> Producer:
    """A producer that waits for all acknowledgements; errors of its connections go to ``trouble``.

    ``options`` are the user's, of the setting ``field``; raises :class:`ConfigError` at once if
    librdkafka does not take them.
    """
    try:
        return Producer(
            {
                **options,
                "bootstrap.servers": ",".join(target.peers),
                "enable.idempotence": True,
                "acks": "all",
                "compression.type": "lz4",
                "reconnect.backoff.max.ms": 5_000,
                "log_level": 0,
                "error_cb": trouble,
                **ours,
            }
        )
    except KafkaException as error:
        reason = hide_secrets(str(error.args[0].str()), options)
        raise ConfigError(field, "…", f"what librdkafka takes: {reason}") from None


class KafkaSender:
    """Sends to one topic, and waits for all acknowledgements; see :class:`Sender`."""

    def __init__(self, target: Target, settings: ExporterSettings) -> None:
        self._target = target
        self._settings = settings
        self._trouble = ConnectionErrors()
        # At once: settings that librdkafka does not take are reported before anything is sent.
        self._producer: Producer | None = self._open()

    def send(self, values: Sequence[ExportedValue]) -> int:
        by_entity: dict[tuple[str, str], list[ExportedValue]] = {}
        for value in values:
            by_entity.setdefault((value.entity_kind, value.entity_id), []).append(value)
        producer = self._producer = self._producer or self._open()
        errors: list[KafkaError] = []

        def on_delivery(error: KafkaError | None, message: object) -> None:
            if error is not None:
                errors.append(error)

        try:
            for (_, entity), entity_values in by_entity.items():
                body = to_otlp(entity_values).SerializeToString()
                key = entity.encode("utf-8", "replace")
                while True:
                    try:
                        producer.produce(self._target.path, body, key, on_delivery=on_delivery)
                        break
                    except BufferError:  # its own buffer is full: deliveries make room
                        producer.poll(0.1)
        except KafkaException as error:
            self._abandon(producer)
            raise self._as_send_error(error.args[0]) from error
        left = producer.flush(self._settings.timeout_s + _GRACE_S)
        if left:
            self._abandon(producer)
            raise SendError("timeout", f"{count_of(left, 'message')} without an answer")
        if errors:
            if any(error.fatal() for error in errors):
                self._abandon(producer)
            raise self._as_send_error(errors[0])
        self._trouble.clear()
        return 0

    def interrupt(self) -> None:
        producer = self._producer
        if producer is not None:
            producer.purge()

    def close(self) -> None:
        if self._producer is not None:
            self._abandon(self._producer)

    def _open(self) -> Producer:
        timeout_ms = int(self._settings.timeout_s * 1000)
        ours = {
            "linger.ms": 5,
            "delivery.timeout.ms": timeout_ms,
            "request.timeout.ms": timeout_ms,
            "socket.timeout.ms": max(timeout_ms, 1000),
            # A topic that is not there is reported as such, before the message's own time is up.
            "topic.metadata.propagation.max.ms": timeout_ms // 2,
        }
        options = {"client.id": "batchmill-export", **self._settings.kafka_options}
        return open_producer(self._target, self._trouble, options, "kafka_options", **ours)

    def _abandon(self, producer: Producer) -> None:
        """What it still holds is sent again by the next one, or was given up."""
        producer.purge()
        producer.flush(_GRACE_S)
        self._producer = None

    def _as_send_error(self, error: KafkaError) -> SendError:
        if self._trouble.refused:  # it shows in each message as time that was up
            return SendError(self._trouble.name.lstrip("_"), self._trouble.text)
        too_large = error.code() == KafkaError.MSG_SIZE_TOO_LARGE
        reason = error.name().lstrip("_")
        return SendError(reason, error.str(), retry=not too_large, too_large=too_large)
