"""Traces and logs to Kafka, beside ingest: requests are handed on, traces each with its own key.

Nobody waits for the broker: what finds no room is dropped, and counted by reason. At a quiet moment
``offered == sent + dropped + in hand``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from batchmill import presets
from batchmill.errors import ConfigError
from batchmill.export.by_trace import Part, by_trace
from batchmill.export.target import Target
from batchmill.ingest import BadRequest, TooLarge, otlp_from_json
from batchmill.kafka import Trouble, check_options, hide_secrets
from batchmill.queue import BatchQueue

PROTOBUF = ("application/x-protobuf", "application/protobuf")
JSON = "application/json"
FULL = "queue full"
NO_ROOM = "too many bytes in hand"
NO_TIME = "no time left"
UNKNOWN_TYPE = "neither protobuf nor JSON"
NOT_OTLP = "JSON that is not OTLP"
TRACES, LOGS = "traces", "logs"
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Request:
    body: bytes
    items: int
    json: bool = False


@dataclass(frozen=True, slots=True)
class _Message:
    key: bytes | None
    body: bytes
    items: int


class KafkaForwarder:
    """Hands requests to a topic: of ``logs`` each one message, of ``traces`` one for each in it.

    The messages are ``ExportLogsServiceRequest`` and ``ExportTraceServiceRequest``; the key of the
    latter is the trace id, so that a trace is in one partition. ``max_bytes`` bounds what is in
    hand; ``timeout_s`` is for how long the broker is tried, for each. ``options`` are librdkafka's.
    Any thread may call any method.
    """

    def __init__(
        self,
        target: Target,
        *,
        signal: str = TRACES,
        options: Mapping[str, str] | None = None,
        max_bytes: int = 64 * 2**20,
        timeout_s: float = 30.0,
        buffer_size: int = 20_000,
    ) -> None:
        if target.scheme != "kafka":
            raise ConfigError("export", str(target), "kafka://host:port/topic")
        if signal not in (TRACES, LOGS):
            raise ConfigError("signal", signal, f"{TRACES} or {LOGS}")
        self.target = target
        self._signal = signal
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._offered = self._sent = self._bytes = 0
        self._dropped: Counter[str] = Counter()
        self._ending = threading.Event()
        self._trouble = Trouble()
        self._producer = self._make(options or {}, timeout_s)
        self._queue: BatchQueue[_Request] = BatchQueue(
            f"to {target}", presets.kafka_exporter(self, buffer_size=buffer_size)
        )

    def offer(self, body: bytes, content_type: str, items: int) -> None:
        """Hand on a request; never waits for the broker."""
        kind = content_type.partition(";")[0].strip().lower()
        with self._lock:
            self._offered += items
        if kind not in (*PROTOBUF, JSON):
            self._settle(0, items, UNKNOWN_TYPE)
        elif not self._has_room(len(body)):
            self._settle(0, items, NO_ROOM)
        elif not self._queue.produce(_Request(body, items, kind == JSON)):
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
            for message in self._messages(each):
                while not self._put(message):
                    if self._ending.is_set():
                        self._settle(len(message.body), message.items, NO_TIME)
                        break
                    self._producer.poll(_POLL_S)
            self._producer.poll(0)

    def on_idle(self) -> None:
        """Hear what became of earlier ones."""
        self._producer.poll(0)

    def _messages(self, request: _Request) -> Iterator[_Message]:
        """What is to be sent of a request; what finds no room is dropped here."""
        body = request.body
        if request.json:
            try:
                body = otlp_from_json(body, self._signal)
            except (BadRequest, TooLarge):
                self._settle(len(request.body), request.items, NOT_OTLP)
                return
        parts = _parts(body) if self._signal == TRACES else []
        # From here on what is made of it counts.
        self._settle(len(request.body), 0, None)
        if not parts:
            yield from self._fitting(None, body, request.items)
        left = request.items
        for number, part in enumerate(parts, 1):
            # Spans that ingest rejected are handed on, too, and count as nothing.
            items = left if number == len(parts) else min(left, part.spans)
            left -= items
            yield from self._fitting(part.key, part.body(), items)

    def _fitting(self, key: bytes | None, body: bytes, items: int) -> Iterator[_Message]:
        # What spans of several traces share is in each message, so that all may be larger than one.
        if self._has_room(len(body)):
            yield _Message(key, body, items)
        else:
            self._settle(0, items, NO_ROOM)

    def _put(self, message: _Message) -> bool:
        def told(error: KafkaError | None, _: object) -> None:
            if error is None:
                self._trouble.forget()
            self._settle(len(message.body), message.items, self._reason(error))

        try:
            self._producer.produce(self.target.path, message.body, message.key, on_delivery=told)
        except BufferError:
            return False
        except KafkaException as error:
            self._settle(len(message.body), message.items, self._reason(error.args[0]))
        return True

    def _reason(self, error: KafkaError | None) -> str | None:
        if error is None:
            return None
        # A login that is refused shows in each message as time that was up.
        name = self._trouble.name if self._trouble.refused else error.name()
        return str(name.lstrip("_"))

    def _has_room(self, size: int) -> bool:
        with self._lock:
            room = self._bytes + size <= self._max_bytes
            if room:
                self._bytes += size
            return room

    def _settle(self, size: int, items: int, reason: str | None) -> None:
        with self._lock:
            self._bytes -= size
            if reason is None:
                self._sent += items
            else:
                self._dropped[reason] += items

    def _make(self, options: Mapping[str, str], timeout_s: float) -> Producer:
        check_options(options)
        try:
            return Producer(
                {
                    "client.id": "batchmill-forward",
                    **options,
                    "bootstrap.servers": ",".join(self.target.peers),
                    "enable.idempotence": True,
                    "acks": "all",
                    "linger.ms": 20,
                    "compression.type": "lz4",
                    "delivery.timeout.ms": int(timeout_s * 1000),
                    "message.max.bytes": 64 * 2**20,  # the broker's own limit counts
                    # As Java's producers place keys, and ingest its own messages.
                    "partitioner": "murmur2_random",
                    "reconnect.backoff.max.ms": 5_000,
                    "topic.metadata.propagation.max.ms": int(timeout_s * 500),
                    "log_level": 0,
                    "error_cb": self._trouble,
                }
            )
        except KafkaException as error:
            said = hide_secrets(str(error.args[0].str()), options)
            raise ConfigError("options", "…", f"what librdkafka takes: {said}") from None


def _parts(body: bytes) -> list[Part]:
    """The traces in a request; none, if it cannot be taken apart, and then it goes as it came."""
    try:
        return by_trace(body)
    except ValueError:
        return []
