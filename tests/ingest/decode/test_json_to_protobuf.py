"""OTLP's JSON turned into protobuf: the same request, whoever it is handed on to."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto")

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from batchmill.ingest import BadRequest, Limits, TooLarge, otlp_from_json

TRACE, SPAN, PARENT = bytes(range(16)), bytes(range(8)), bytes(range(8, 16))
IDS = ("traceId", "spanId", "parentSpanId")


def traces() -> ExportTraceServiceRequest:
    """A span with something of everything."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add(schema_url="a")
    group.resource.attributes.add(key="service.name").value.string_value = "shop"
    scope = group.scope_spans.add(schema_url="b")
    scope.scope.name = "tests"
    span = scope.spans.add(
        trace_id=TRACE, span_id=SPAN, parent_span_id=PARENT, name="ü", kind=2, flags=1
    )
    span.start_time_unix_nano, span.end_time_unix_nano = 2**63, 2**63 + 1
    span.status.code = 2
    value = span.attributes.add(key="list").value.array_value.values.add()
    value.kvlist_value.values.add(key="number").value.int_value = -(2**62)
    span.attributes.add(key="double").value.double_value = 0.1
    span.attributes.add(key="bytes").value.bytes_value = b"\xff\x00"
    span.attributes.add(key="yes").value.bool_value = True
    span.events.add(name="event", time_unix_nano=7).attributes.add(key="x")
    span.links.add(trace_id=TRACE[::-1], span_id=SPAN[::-1], trace_state="s")
    return request


def logs() -> ExportLogsServiceRequest:
    """A record of a log, within a trace."""
    request = ExportLogsServiceRequest()
    record = (
        request.resource_logs.add()
        .scope_logs.add()
        .log_records.add(trace_id=TRACE, span_id=SPAN, severity_number=9, time_unix_nano=2**63)
    )
    record.body.string_value = "text"
    return request


def otlp_json(message: Any) -> dict[str, Any]:
    """A message in OTLP's JSON, which is protobuf's own with ids in hex."""

    def turned(given: Any) -> Any:
        if isinstance(given, list):
            return [turned(result) for result in given]
        if not isinstance(given, dict):
            return given
        return {
            name: base64.b64decode(value).hex() if name in IDS else turned(value)
            for name, value in given.items()
        }

    return dict(turned(MessageToDict(message)))


def test_traces_are_the_same() -> None:
    """Every field that a span has; names of enums and numbers as text, as protobuf writes them."""
    body = json.dumps(otlp_json(traces())).encode()
    assert ExportTraceServiceRequest.FromString(otlp_from_json(body)) == traces()


def test_logs_are_the_same() -> None:
    """Their ids, too."""
    body = json.dumps(otlp_json(logs())).encode()
    assert ExportLogsServiceRequest.FromString(otlp_from_json(body, "logs")) == logs()


def test_a_span_whose_ids_are_none_is_left_out() -> None:
    """As ingest does; the others stay, and what is not of OTLP is ignored."""
    text = otlp_json(traces())
    spans = text["resourceSpans"][0]["scopeSpans"][0]["spans"]
    spans += [{"traceId": "no hex"}, {"traceId": 7}, 7]
    spans[0] |= {"trace_id": "AAAA", "unknown": {"a": 1}, "parentSpanId": None}
    spans[0]["links"].append({"spanId": "x"})
    expected = traces()
    expected.resource_spans[0].scope_spans[0].spans[0].parent_span_id = b""
    message = ExportTraceServiceRequest.FromString(otlp_from_json(json.dumps(text).encode()))
    assert message == expected


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b'{"resourceSpans": 7}', b"\xff", b"[" * 9999])
def test_what_is_no_request_is_reported(body: bytes) -> None:
    """Whatever it is, it is one kind of error."""
    with pytest.raises(BadRequest):
        otlp_from_json(body)


def test_its_limits_are_those_of_ingest() -> None:
    """Each value takes far more memory than it has bytes."""
    with pytest.raises(TooLarge):
        otlp_from_json(b'{"a": [1, 2, 3, 4]}', limits=Limits(max_json_values=3))
