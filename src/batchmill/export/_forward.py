"""Traces and logs to Kafka, beside ingest: requests are handed on as they came.

Nobody waits for the broker: what finds no room is dropped, and counted by reason. At a quiet moment
``offered == sent + dropped + in hand``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from batchmill import presets
from batchmill._errors import ConfigError
from batchmill.export._target import Target
from batchmill.queue import BatchQueue

PROTOBUF = ("application/x-protobuf", "application/protobuf")
FULL = "queue full"
NO_ROOM = "too many bytes in hand"
NOT_PROTOBUF = "not protobuf"
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Request:
    body: bytes
    items: int


class KafkaForwarder:
    """Hands requests to a topic, each one message: ``ExportTraceServiceRequest``, or of logs.

    ``max_bytes`` bounds what is in hand; ``timeout_s`` is for how long the broker is tried, for
    each. Any thread may call any method.
    """

    def __init__(
        self,
        target: Target,
        *,
        max_bytes: int = 64 * 2**20,
        timeout_s: float = 30.0,
        buffer_size: int = 20_000,
    ) -> None:
        if target.scheme != "kafka":
            raise ConfigError("export", str(target), "kafka://host:port/topic")
        self.target = target
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._offered = self._sent = self._bytes = 0
        self._dropped: Counter[str] = Counter()
        self._ending = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": ",".join(target.peers),
                "client.id": "batchmill-forward",
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 20,
                "compression.type": "lz4",
                "delivery.timeout.ms": int(timeout_s * 1000),
                "message.max.bytes": 64 * 2**20,  # the broker's own limit counts
                "reconnect.backoff.max.ms": 5_000,
                "topic.metadata.propagation.max.ms": int(timeout_s * 500),
                "log_level": 0,
                "error_cb": lambda error: None,  # what it comes to is told by each report
            }
        )
        self._queue: BatchQueue[_Request] = BatchQueue(
            f"to {target}", presets.kafka_exporter(self, buffer_size=buffer_size)
        )

    def offer(self, body: bytes, content_type: str, items: int) -> None:
        """Hand on a request; never waits for the broker."""
        with self._lock:
            self._offered += items
            room = self._bytes + len(body) <= self._max_bytes
            if room:
                self._bytes += len(body)
        if content_type.partition(";")[0].strip().lower() not in PROTOBUF:
            self._settle(len(body) if room else 0, items, NOT_PROTOBUF)
        elif not room:
            self._settle(0, items, NO_ROOM)
        elif not self._queue.produce(_Request(body, items)):
            self._settle(len(body), items, FULL)

    def figures(self) -> dict[str, Any]:
        """What became of the spans, or the records of logs, that were offered."""
        with self._lock:
            done = self._sent + sum(self._dropped.values())
            return {
                "to": str(self.target),
                "offered": self._offered,
                "sent": self._sent,
                "dropped": dict(self._dropped),
                "in_hand": self._offered - done,
                "in_hand_bytes": self._bytes,
            }

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is in hand, as far as that goes in time; the rest is dropped, and counted."""
        deadline = time.monotonic() + timeout_s
        timer = threading.Timer(timeout_s, self._ending.set)
        timer.start()
        self._queue.shutdown()
        timer.cancel()
        timer.join()
        if self._producer.flush(max(0.0, deadline - time.monotonic())):
            self._producer.purge()
            self._producer.flush(1.0)

    # The queue's thread.

    def consume(self, batch: list[_Request]) -> None:
        """Give requests to the producer; waits while its own buffer is full."""
        for each in batch:
            while not self._put(each):
                if self._ending.is_set():
                    self._settle(len(each.body), each.items, "no time left")
                    break
                self._producer.poll(_POLL_S)
        self._producer.poll(0)

    def on_idle(self) -> None:
        """Hear what became of earlier ones."""
        self._producer.poll(0)

    def _put(self, request: _Request) -> bool:
        def told(error: KafkaError | None, message: object) -> None:
            reason = None if error is None else error.name().lstrip("_")
            self._settle(len(request.body), request.items, reason)

        try:
            self._producer.produce(self.target.path, request.body, on_delivery=told)
        except BufferError:
            return False
        except KafkaException as error:
            self._settle(len(request.body), request.items, error.args[0].name().lstrip("_"))
        return True

    def _settle(self, size: int, items: int, reason: str | None) -> None:
        with self._lock:
            self._bytes -= size
            if reason is None:
                self._sent += items
            else:
                self._dropped[reason] += items
