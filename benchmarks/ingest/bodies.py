"""Prepared protobuf requests with spans, as an OpenTelemetry client would send them.

A sender sets new trace ids and times in a request each time it sends it, at almost no cost: so no
span is sent twice, and the benchmark measures the receiver.
"""

from __future__ import annotations

import base64
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

SEED = 20260501
SERVICES = 20
GATEWAY = "service-0"
_MS = 1_000_000
SPREAD_NS = 500 * _MS
"""Traces of a request start within so much."""


@dataclass(kw_only=True)
class Made:
    """A span before it is in any request."""

    trace_id: bytes
    span_id: bytes
    parent: bytes
    service: str
    kind: Span.SpanKind.ValueType
    name: str
    start_ns: int
    """From the start of the request's time on."""
    took_ns: int
    attributes: dict[str, str | int] = field(default_factory=dict)


class Body:
    """The bytes of a request, and where in them its ids and times are."""

    def __init__(self, spans: Sequence[Made]) -> None:
        data = bytearray()
        places: list[tuple[int, int, int]] = []
        by_service: dict[str, list[Made]] = defaultdict(list)
        for span in spans:
            by_service[span.service].append(span)
        ordered = [span for group in by_service.values() for span in group]
        for service, group in by_service.items():
            _put_group(data, places, service, group)
        self.spans = len(ordered)
        self.bytes = len(data)
        self._data = np.frombuffer(bytes(data), np.uint8)
        at = np.asarray(places, np.int64)
        eight = np.arange(8)
        self._traces = at[:, 0, None] + eight
        self._times = np.concatenate([at[:, 1], at[:, 2]])[:, None] + eight
        starts = np.asarray([span.start_ns for span in ordered], np.uint64)
        took = np.asarray([span.took_ns for span in ordered], np.uint64)
        self._offsets = np.concatenate([starts, starts + took])

    def fresh(self, rng: np.random.Generator, now_ns: int) -> bytes:
        """The request with traces of its own, that end about now."""
        data = self._data.copy()
        data[self._traces] ^= rng.integers(0, 256, 8, np.uint8)
        times = (self._offsets + np.uint64(now_ns - SPREAD_NS)).astype("<u8")
        data[self._times] = times.view(np.uint8).reshape(-1, 8)
        return data.tobytes()


class JsonBody:
    """The same request as OTLP/JSON. Only trace ids change; times are those of its making."""

    def __init__(self, body: Body) -> None:
        plain = body.fresh(np.random.default_rng(0), time.time_ns())
        text = as_json(plain)
        mark = b'"traceId":"'
        at = np.asarray([match.end() for match in re.finditer(re.escape(mark), text)], np.int64)
        self.spans = body.spans
        self.bytes = len(text)
        self._data = np.frombuffer(text, np.uint8)
        self._traces = at[:, None] + np.arange(16)

    def fresh(self, rng: np.random.Generator, now_ns: int) -> bytes:
        """The request with traces of its own."""
        data = self._data.copy()
        digits = np.frombuffer(rng.bytes(8).hex().encode(), np.uint8)
        places = np.frombuffer(b"0123456789abcdef", np.uint8)
        # Adds modulo 16, so that the spans of a trace still have one id.
        old = data[self._traces]
        values = np.where(old >= ord("a"), old - ord("a") + 10, old - ord("0"))
        added = np.where(digits >= ord("a"), digits - ord("a") + 10, digits - ord("0"))
        data[self._traces] = places[(values + added) % 16]
        return data.tobytes()


def as_json(body: bytes) -> bytes:
    """A request in protobuf as JSON, as an SDK writes it."""
    request = MessageToDict(ExportTraceServiceRequest.FromString(body), use_integers_for_enums=True)
    for group in request["resourceSpans"]:
        for scope in group["scopeSpans"]:
            for span in scope["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):
                    span[name] = base64.b64decode(span.get(name, "")).hex()
                span["status"] = {}
    return json.dumps(request, separators=(",", ":"), ensure_ascii=False).encode()


def bodies(count: int, spans: int, seed: int = 0) -> list[Body]:
    """``count`` requests of ``spans`` spans each: whole traces but for the last."""
    made = []
    for number in range(count):
        rng = random.Random(f"{SEED}-{seed}-{number}")
        rows: list[Made] = []
        while len(rows) < spans:
            rows += trace(rng, rng.randrange(SPREAD_NS))
        made.append(Body(rows[:spans]))
    return made


def marker(service: str, now_ns: int, rng: np.random.Generator) -> bytes:
    """A request with a single span, of a service that nobody else has."""
    span = Made(
        trace_id=rng.bytes(16), span_id=rng.bytes(8), parent=b"", service=service,
        kind=Span.SPAN_KIND_SERVER, name="GET /marker", start_ns=0, took_ns=_MS,
    )  # fmt: skip
    return Body([span]).fresh(rng, now_ns)


def trace(rng: random.Random, start_ns: int) -> Iterator[Made]:
    """A page of a gateway, and one to four services behind it, each with a database or a queue."""
    trace_id = rng.randbytes(16)

    def span(
        kind: Span.SpanKind.ValueType,
        service: str,
        name: str,
        parent: bytes,
        **attributes: str | int,
    ) -> Made:
        return Made(
            trace_id=trace_id, span_id=rng.randbytes(8), parent=parent, service=service, kind=kind,
            name=name, start_ns=start_ns, took_ns=int(rng.lognormvariate(3, 1) * _MS),
            attributes={key.replace("__", "."): value for key, value in attributes.items()},
        )  # fmt: skip

    page = f"/page/{rng.randrange(20)}"
    root = span(Span.SPAN_KIND_SERVER, GATEWAY, f"GET {page}", b"", **_http(rng, page))
    yield root
    for _ in range(rng.randrange(1, 5)):
        service, path = f"service-{rng.randrange(1, SERVICES)}", f"/thing/{rng.randrange(20)}"
        call = span(Span.SPAN_KIND_CLIENT, GATEWAY, "GET", root.span_id, **_http(rng, path))
        served = span(
            Span.SPAN_KIND_SERVER, service, f"GET {path}", call.span_id, **_http(rng, path)
        )
        yield from (call, served)
        yield span(
            Span.SPAN_KIND_CLIENT, service, "SELECT shop", served.span_id,
            db__system__name="postgresql", db__namespace="shop", server__address="db",
            server__port=5432, db__operation__name="SELECT", db__collection__name="orders",
            db__query__text=f"select * from orders where id = {rng.randrange(10_000)}",
            thread__id=rng.randrange(32), thread__name=f"worker-{rng.randrange(32)}",
            network__peer__address="10.0.0.5",
        )  # fmt: skip


def _http(rng: random.Random, path: str) -> dict[str, str | int]:
    return {
        "http__request__method": "GET",
        "http__response__status_code": 500 if rng.random() < 0.02 else 200,
        "http__route": path,
        "url__path": path,
        "url__scheme": "http",
        "server__address": "shop.example",
        "server__port": 8080,
        "network__protocol__version": "1.1",
        "user_agent__original": f"agent/{rng.randrange(5)}.0",
        "client__address": f"10.0.{rng.randrange(256)}.{rng.randrange(256)}",
    }


def _put_group(
    data: bytearray, places: list[tuple[int, int, int]], service: str, spans: Sequence[Made]
) -> None:
    """Add the spans of one service, and note where trace id, start and end of each are."""
    resource = Resource()
    _put(resource.attributes, {"service.name": service, "service.instance.id": f"{service}-0"})
    head = _field(1, resource.SerializeToString())
    parts: list[bytes] = []
    offsets: list[tuple[int, int, int]] = []
    at = 0
    for span in spans:
        start, end = span.start_ns + 1, span.start_ns + span.took_ns + 2  # 0 would be left out
        message = Span(
            trace_id=span.trace_id, span_id=span.span_id, parent_span_id=span.parent,
            name=span.name, kind=span.kind, start_time_unix_nano=start, end_time_unix_nano=end,
        )  # fmt: skip
        _put(message.attributes, span.attributes)
        raw = message.SerializeToString()
        part = _field(2, raw)
        inside = at + len(part) - len(raw)
        first = raw.index(b"\x39" + start.to_bytes(8, "little") + b"\x41")
        offsets.append((inside + raw.index(span.trace_id), inside + first + 1, inside + first + 10))
        parts.append(part)
        at += len(part)
    scope = _field(2, b"".join(parts))
    group = _field(1, head + scope)
    start_at = len(data) + len(group) - at
    data += group
    places += [(start_at + a, start_at + b, start_at + c) for a, b, c in offsets]


def _put(into: Any, attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        one = into.add(key=key)
        if isinstance(value, int):
            one.value.int_value = value
        else:
            one.value.string_value = value


def _field(number: int, payload: bytes) -> bytes:
    """A field of a message, as protobuf writes it."""
    size, length = len(payload), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    length.append(size)
    return bytes((number << 3 | 2,)) + bytes(length) + payload


def random_of(*numbers: int) -> np.random.Generator:
    """Ids that no other sender has."""
    return np.random.default_rng([SEED, *numbers])
