"""Traces and logs to Kafka, beside ingest: requests are handed on, each trace with its own key.

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

from confluent_kafka import KafkaError, KafkaException

from batchmill import presets
from batchmill.errors import ConfigError
from batchmill.export.senders.kafka import open_producer
from batchmill.export.settings import KAFKA, Target
from batchmill.export.trace_split import TraceRequest, split_by_trace
from batchmill.ingest import BadRequest, TooLarge, otlp_from_json
from batchmill.kafka import ConnectionErrors, check_options
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
    """How many spans or log records count as offered with it."""
    json: bool = False


@dataclass(frozen=True, slots=True)
class _Message:
    key: bytes | None
    body: bytes
    items: int


class KafkaForwarder:
    """Hands requests on to a topic: of ``logs`` one message each, of ``traces`` one for each trace.

    The messages are ``ExportLogsServiceRequest`` and ``ExportTraceServiceRequest``; the key of the
    latter is the trace id, so that a trace is in one partition. ``max_bytes`` bounds what is in
    hand or reserved; ``timeout_s`` is how long the broker is tried for each message. ``options``
    are librdkafka's. Any thread may call any method.
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
        if target.scheme != KAFKA:
            raise ConfigError("export", str(target), "kafka://host:port/topic")
        if signal not in (TRACES, LOGS):
            raise ConfigError("signal", signal, f"{TRACES} or {LOGS}")
        check_options(options or {})
        self.target = target
        self._signal = signal
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._offered = self._sent = self._bytes = 0
        self._dropped: Counter[str] = Counter()
        self._ending = threading.Event()
        self._trouble = ConnectionErrors()
        ours = {
            "linger.ms": 20,
            "delivery.timeout.ms": int(timeout_s * 1000),
            "message.max.bytes": 64 * 2**20,  # the broker's own limit counts
            # As Java's producers place keys, and ingest its own messages.
            "partitioner": "murmur2_random",
            "topic.metadata.propagation.max.ms": int(timeout_s * 500),
        }
        given = {"client.id": "batchmill-forward", **(options or {})}
        self._producer = open_producer(target, self._trouble, given, "options", **ours)
        self._queue: BatchQueue[_Request] = BatchQueue(
            f"to {target}", presets.kafka_exporter(self, buffer_size=buffer_size)
        )

    def reserve(self, size: int) -> bool:
        """Count bytes as in hand, for a request that may be offered; False: there is no room."""
        with self._lock:
            fits = self._bytes + size <= self._max_bytes
            if fits:
                self._bytes += size
            return fits

    def release(self, size: int) -> None:
        """Give back the room of a request that is not offered."""
        self._settle(size, 0, None)

    def drop(self, items: int) -> None:
        """Count the items of a request that found no room before it could be offered."""
        with self._lock:
            self._offered += items
            self._dropped[NO_ROOM] += items

    def offer(
        self, body: bytes, content_type: str, items: int, *, is_reserved: bool = False
    ) -> None:
        """Hand on a request; never waits for the broker.

        ``is_reserved`` if there is room for it already.
        """
        media_type = content_type.partition(";")[0].strip().lower()
        with self._lock:
            self._offered += items
        if media_type not in (*PROTOBUF, JSON):
            self._settle(len(body) if is_reserved else 0, items, UNKNOWN_TYPE)
        elif not is_reserved and not self.reserve(len(body)):
            self._settle(0, items, NO_ROOM)
        elif not self._queue.produce(_Request(body, items, media_type == JSON)):
            self._settle(len(body), items, FULL)

    def stats(self) -> dict[str, Any]:
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
        timer.name = "batchmill-forwarder-close"
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
        for request in batch:
            for message in self._messages(request):
                while not self._put(message):
                    if self._ending.is_set():
                        self._settle(len(message.body), message.items, NO_TIME)
                        break
                    self._producer.poll(_POLL_S)
            self._producer.poll(0)

    def on_idle(self) -> None:
        """Have librdkafka report the deliveries of earlier messages."""
        self._producer.poll(0)

    def _messages(self, request: _Request) -> Iterator[_Message]:
        """The messages of a request; what finds no room is dropped here."""
        body = request.body
        if request.json:
            try:
                body = otlp_from_json(body, self._signal)
            except (BadRequest, TooLarge):
                self._settle(len(request.body), request.items, NOT_OTLP)
                return
        traces = _split(body) if self._signal == TRACES else []
        # From here on the messages count, instead of the request.
        self._settle(len(request.body), 0, None)
        if not traces:
            yield from self._fitting(None, body, request.items)
        left = request.items
        for number, trace in enumerate(traces, 1):
            # Spans that ingest rejected are handed on, too, and count as nothing.
            items = left if number == len(traces) else min(left, trace.spans)
            left -= items
            yield from self._fitting(trace.trace_id, trace.body(), items)

    def _fitting(self, key: bytes | None, body: bytes, items: int) -> Iterator[_Message]:
        # What spans of several traces share is in each message: together they may be larger than
        # the request.
        if self.reserve(len(body)):
            yield _Message(key, body, items)
        else:
            self._settle(0, items, NO_ROOM)

    def _put(self, message: _Message) -> bool:
        """Give a message to the producer; False: its buffer is full."""

        def on_delivery(error: KafkaError | None, _: object) -> None:
            if error is None:
                self._trouble.clear()
            self._settle(len(message.body), message.items, self._reason(error))

        try:
            self._producer.produce(
                self.target.path, message.body, message.key, on_delivery=on_delivery
            )
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

    def _settle(self, size: int, items: int, drop_reason: str | None) -> None:
        """Count bytes as no longer in hand, and items as sent, or as dropped for a reason."""
        with self._lock:
            self._bytes -= size
            if drop_reason is None:
                self._sent += items
            else:
                self._dropped[drop_reason] += items


def _split(body: bytes) -> list[TraceRequest]:
    """The traces in a request; none, if it cannot be split, and then it goes as it came."""
    try:
        return split_by_trace(body)
    except ValueError:
        return []
