"""A request in OTLP's JSON -> the same in protobuf, for those to whom it is handed on.

OTLP's JSON is protobuf's own but for ids, which are hex there and base64 here.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from batchmill.ingest.decode.json import load_json
from batchmill.ingest.decode.limits import BadRequest, Limits

_IDS = ("traceId", "spanId", "parentSpanId")
_NOT_JSON = ("trace_id", "span_id", "parent_span_id")
"""protobuf would take these for the same; in OTLP they are nothing."""
_ROADS: dict[str, tuple[Any, tuple[str, str, str]]] = {
    "traces": (ExportTraceServiceRequest, ("resourceSpans", "scopeSpans", "spans")),
    "logs": (ExportLogsServiceRequest, ("resourceLogs", "scopeLogs", "logRecords")),
}


def otlp_from_json(body: bytes, signal: str = "traces", limits: Limits | None = None) -> bytes:
    """The bytes of an ExportTraceServiceRequest, or of one with ``logs``.

    A span or a record whose ids are none is left out. Raises `BadRequest` or `TooLarge`.
    """
    request = load_json(body, limits or Limits())
    kind, road = _ROADS[signal]
    if not isinstance(request, dict):
        raise BadRequest(f"the body is JSON, but not an object with {road[0]}")
    for scope in _walk(request, *road[:2]):
        items = scope.get(road[2])
        if isinstance(items, list):
            scope[road[2]] = [each for each in items if _turn(each)]
    try:
        message = ParseDict(request, kind(), ignore_unknown_fields=True)
    except (ParseError, RecursionError) as error:
        raise BadRequest(f"the body is JSON, but not OTLP: {error}") from None
    return bytes(message.SerializeToString())


def _walk(of: dict[str, Any], name: str, *further: str) -> Iterator[dict[str, Any]]:
    found = of.get(name)
    for each in found if isinstance(found, list) else ():
        if isinstance(each, dict):
            if further:
                yield from _walk(each, *further)
            else:
                yield each


def _turn(item: Any) -> bool:
    """Have its ids as protobuf takes them; False: they are none."""
    if not isinstance(item, dict):
        return False
    for name in _NOT_JSON:
        item.pop(name, None)
    for name in _IDS:
        given = item.get(name)
        if given is None:
            continue
        try:
            item[name] = base64.b64encode(bytes.fromhex(given)).decode()
        except (ValueError, TypeError):
            return False
    links = item.get("links")
    if isinstance(links, list):
        item["links"] = [each for each in links if _turn(each)]
    return True
