"""For the tests of the receivers: requests in protobuf and in JSON, a spool that can be held up."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from batchmill.ingest.decode import (
    BadRequest,
    Decoded,
    Limits,
    TooLarge,
    compiled,
    decode_traces,
)
from batchmill.ingest.decode.body import too_many_bytes
from batchmill.ingest.decode.json import read_json
from batchmill.ingest.decode.protobuf import read_proto
from batchmill.ingest.decode.rows import Rows
from batchmill.ingest.intake import Intake
from batchmill.ingest.responses import Rejected
from batchmill.spool import Spool
from tests.kit.threads import Gate

PROTOBUF, JSON = "application/x-protobuf", "application/json"
LIMITS = Limits()

LARGE = 20_000
"""Spans of a request that is decoded on the thread for large ones: more than a megabyte."""

Attributes = Sequence[tuple[str, Any]]
"""Values: None, text, bool, int, float, bytes, a list of values, a dict of values."""


@dataclass(frozen=True)
class S:
    """A span as the tests write it."""

    trace_id: bytes = b"\x01" * 16
    span_id: bytes = b"\x02" * 8
    parent_id: bytes = b""
    name: str = "GET /"
    kind: int = 2
    start: int = 1_700_000_000_000_000_000
    end: int = 1_700_000_000_005_000_000
    status: int = 0
    attributes: Attributes = ()


@dataclass(frozen=True)
class Group:
    """Spans of one resource."""

    spans: Sequence[S] = ()
    resource: Attributes = field(default=(("service.name", "cart"),))


class HeldSpool(Spool):
    """Holds whoever submits a large batch at ``gate``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, linger_s=0)
        self.gate = Gate()

    def submit(self, source: str, batch: Any) -> Future[Path]:
        if len(batch) >= LARGE:
            self.gate.wait()
        return super().submit(source, batch)


async def take(intake: Intake, body: bytes, encoding: str, sender: str = "") -> Rejected:
    """Have a request in protobuf taken; returns once its spans are durable."""
    with intake.admit(sender) as held:
        held.add(body)
        return await intake.take_traces(held, encoding, PROTOBUF)


def zstd(body: bytes) -> bytes:
    """A body compressed with zstd."""
    return bytes(pa.compress(body, "zstd", asbytes=True))


def protobuf(*groups: Group) -> bytes:
    """The request in protobuf."""
    request = ExportTraceServiceRequest()
    for group in groups:
        there = request.resource_spans.add()
        there.resource.attributes.extend(_key_values(group.resource))
        scope = there.scope_spans.add()
        scope.scope.name = "tests"
        for given in group.spans:
            span = scope.spans.add(
                trace_id=given.trace_id,
                span_id=given.span_id,
                parent_span_id=given.parent_id,
                name=given.name,
                start_time_unix_nano=given.start,
                end_time_unix_nano=given.end,
                attributes=_key_values(given.attributes),
            )
            span.kind = given.kind
            span.status.code = given.status
    return bytes(request.SerializeToString())


def as_json(*groups: Group, **style: Any) -> bytes:
    """The request in JSON; ``style`` is for `json.dumps`."""
    return json.dumps({"resourceSpans": [_group(group) for group in groups]}, **style).encode()


def decoded(*groups: Group, limits: Limits = LIMITS) -> Decoded:
    """The request, decoded: the same from both forms."""
    one = decode_traces(protobuf(*groups), PROTOBUF, limits)
    other = decode_traces(as_json(*groups), JSON, limits)
    assert other.batch.unpacked().columns == one.batch.unpacked().columns
    assert (other.rejections, other.cuts) == (one.rejections, one.cuts)
    return one


@contextmanager
def decoding_in(language: str) -> Iterator[None]:
    """Requests are decoded by the reference, in ``python``, or by the ``compiled`` decoder.

    The latter decodes them here however many odd spans they have.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiled.SETTING, language)
        patch.setattr(compiled, "MOST_ODD", 1)
        compiled.library.cache_clear()
        try:
            yield
        finally:
            compiled.library.cache_clear()


@pytest.fixture(scope="module", params=["compiled", "python"])
def decoder(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both decoders, one after the other."""
    with decoding_in(request.param):
        yield


def by_reference(body: bytes, form: str, limits: Limits) -> Decoded:
    """The request as the reference decodes it."""
    if len(body) > limits.max_decompressed_bytes:
        raise too_many_bytes(len(body), limits.max_decompressed_bytes)
    rows = Rows(limits)
    (read_json if form == JSON else read_proto)(body, rows)
    return rows.decoded()


def check_equal(body: bytes, form: str, limits: Limits) -> None:
    """The compiled decoder gives what the reference gives: spans, counts, or the same error."""
    outcomes: list[Any] = []
    for decode in (decode_traces, by_reference):
        try:
            result = decode(body, form, limits)
        except (BadRequest, TooLarge) as error:
            outcomes.append((type(error), str(error)))
        else:
            outcomes.append((result.batch.unpacked().columns, result.rejections, result.cuts))
    assert outcomes[0] == outcomes[1]


def row(what: Decoded, index: int = 0) -> dict[str, Any]:
    """A row of a batch."""
    return {name: values[index] for name, values in what.batch.unpacked().columns.items()}


def texts(value: Any) -> str:
    """The text that an attribute of this value becomes."""
    (pairs,) = decoded(Group([S(attributes=[("k", value)])])).batch.unpacked().columns["attributes"]
    return str(dict(pairs)["k"])


def _key_values(attributes: Attributes) -> list[KeyValue]:
    return [KeyValue(key=key, value=_any(value)) for key, value in attributes]


def _any(value: Any) -> AnyValue:
    made = AnyValue()
    if isinstance(value, bool):
        made.bool_value = value
    elif isinstance(value, int):
        made.int_value = value
    elif isinstance(value, float):
        made.double_value = value
    elif isinstance(value, str):
        made.string_value = value
    elif isinstance(value, bytes):
        made.bytes_value = value
    elif isinstance(value, list):
        made.array_value.SetInParent()
        made.array_value.values.extend(_any(item) for item in value)
    elif isinstance(value, Mapping):
        made.kvlist_value.SetInParent()
        made.kvlist_value.values.extend(_key_values(list(value.items())))
    return made


def _group(group: Group) -> dict[str, Any]:
    spans = [_span(span) for span in group.spans]
    resource = {"attributes": _json_pairs(group.resource)}
    return {"resource": resource, "scopeSpans": [{"scope": {"name": "tests"}, "spans": spans}]}


def _span(span: S) -> dict[str, Any]:
    return {
        "traceId": span.trace_id.hex(),
        "spanId": span.span_id.hex(),
        "parentSpanId": span.parent_id.hex(),
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.start),
        "endTimeUnixNano": span.end,
        "status": {"code": span.status},
        "attributes": _json_pairs(span.attributes),
    }


def _json_pairs(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _json_any(value)} for key, value in attributes]


def _json_any(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        odd = value != value or value in (float("inf"), float("-inf"))
        names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
        return {"doubleValue": names[str(value)] if odd else value}
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bytes):
        return {"bytesValue": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_json_any(item) for item in value]}}
    if isinstance(value, Mapping):
        return {"kvlistValue": {"values": _json_pairs(list(value.items()))}}
    return {}
