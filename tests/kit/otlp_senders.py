"""Spans as OTLP requests, and senders that do not give up, for tests of the whole road."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import random
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.kit.receivers import PROTOBUF
from tests.kit.threads import PATIENCE_S
from tests.oracle.catalog import Row

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RETRY_S = 0.05


def as_received(spans: Sequence[Row]) -> list[Row]:
    """Those that a receiver takes, with what it makes of a root's parent and of no service."""
    return [
        {
            **span,
            "parent_span_id": span["parent_span_id"] or None,
            "service": span["service"] or "unknown_service",
        }
        for span in spans
        if span["end_time"] >= span["time"]
    ]


def nearly_in_order(spans: Sequence[Row], distance: int, rng: random.Random) -> list[Row]:
    """Traces one after the other, but spans that far out of their place."""
    by_trace = sorted(spans, key=lambda span: str(span["trace_id"]))
    places = [number + rng.uniform(0, distance) for number in range(len(by_trace))]
    return [by_trace[number] for number in sorted(range(len(places)), key=places.__getitem__)]


def otlp(spans: Sequence[Row]) -> bytes:
    """A request with these spans, in protobuf."""
    message = ExportTraceServiceRequest()
    for span in spans:
        there = message.resource_spans.add()
        there.resource.attributes.extend(_pairs(span["resource"]))
        there.scope_spans.add().spans.add(
            trace_id=bytes.fromhex(span["trace_id"]),
            span_id=bytes.fromhex(span["span_id"]),
            parent_span_id=bytes.fromhex(span["parent_span_id"] or ""),
            name=span["name"],
            kind=Span.SpanKind.Value(f"SPAN_KIND_{span['kind']}"),
            start_time_unix_nano=_ns(span["time"]),
            end_time_unix_nano=_ns(span["end_time"]),
            status=Status(code=Status.StatusCode.Value(f"STATUS_CODE_{span['status']}")),
            attributes=_pairs(span["attributes"]),
        )
    return bytes(message.SerializeToString())


def _pairs(attributes: dict[str, str]) -> list[KeyValue]:
    return [
        KeyValue(key=key, value=AnyValue(string_value=text)) for key, text in attributes.items()
    ]


def _ns(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1) * 1000


class Traffic:
    """Clients that send every request until it is acknowledged, and some of them again.

    The requests come in portions: a client that finds none left repeats old ones, so that there is
    traffic until it is over. Now and then a client does not wait for the answer, as if that had
    been lost, and sends the request again later.
    """

    LOST = 0.1
    CLIENTS = 4
    PACE_S = 0.1

    def __init__(self, port: int, bodies: Sequence[bytes], portions: int, seed: int) -> None:
        self._port = port
        self._bodies = bodies
        self._portions = portions
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._open: list[int] = []
        self._released = 0
        self._over = threading.Event()
        self._gone = threading.Event()
        self.acknowledged: list[int] = []
        """Requests by number; several times if they were sent again."""
        self.faults = 0
        """Tries that had no answer, or another one."""
        self.odd: list[str] = []
        """Answers that a receiver must not give."""

    def release(self) -> None:
        """Let the next portion go."""
        with self._lock:
            self._release(len(self._bodies) // self._portions + 1)

    def _release(self, n: int) -> None:
        until = min(len(self._bodies), self._released + n)
        self._open += range(self._released, until)
        self._released = until

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """Clients send meanwhile; none is left in the end."""
        threads = [threading.Thread(target=self._send) for _ in range(self.CLIENTS)]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            self._gone.set()
            self._over.set()
            for each in threads:
                each.join()

    def finish(self) -> None:
        """Let all go, and say that it is over."""
        with self._lock:
            self._release(len(self._bodies))
        self._over.set()

    def is_done(self) -> bool:
        """Whether every request was acknowledged."""
        with self._lock:
            return len(set(self.acknowledged)) == len(self._bodies)

    def _send(self) -> None:
        link: http.client.HTTPConnection | None = None
        while not self._gone.is_set():
            number, lost = self._next()
            if number is None:
                if self._over.is_set() and self.is_done():
                    break
                self._gone.wait(_RETRY_S)
                continue
            answered = False
            try:
                if link is None:
                    link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
                answered = self._exchange(link, number, lost=lost)
            except (OSError, http.client.HTTPException):
                pass
            if not answered:
                if link is not None:
                    link.close()
                    link = None
                self._gone.wait(_RETRY_S)
            self._note(number, answered=answered)
            if not self._over.is_set():
                self._over.wait(self.PACE_S)
        if link is not None:
            link.close()

    def _exchange(self, link: http.client.HTTPConnection, number: int, *, lost: bool) -> bool:
        body, headers = self._bodies[number], {"content-type": PROTOBUF}
        if number % 3 == 0:
            body, headers = gzip.compress(body, 1), {**headers, "content-encoding": "gzip"}
        link.request("POST", "/v1/traces", body, headers)
        if lost:
            return False
        answer = link.getresponse()
        said = answer.read()
        if answer.status == 200 and not said:  # not even a partial success
            return True
        if answer.status != 503:
            with self._lock:
                self.odd.append(f"{answer.status} {said!r}")
        return False

    def _next(self) -> tuple[int | None, bool]:
        with self._lock:
            lost = not self._over.is_set() and self._rng.random() < self.LOST
            if self._open:
                return self._open.pop(0), lost
            if self._over.is_set() or not self.acknowledged:
                return None, False
            return self._rng.choice(self.acknowledged), lost

    def _note(self, number: int, *, answered: bool) -> None:
        with self._lock:
            if answered:
                self.acknowledged.append(number)
                return
            self.faults += 1
            self._open.insert(self._rng.randint(0, len(self._open)), number)


def sizes(requests: Sequence[Sequence[Any]], numbers: Sequence[int]) -> int:
    """How many spans these requests have together."""
    return sum(len(requests[number]) for number in numbers)
