"""Jaeger's HTTP query API over kept spans, so that Grafana's Jaeger data source can read them.

The paths and the JSON are those of Jaeger's query service: ``/api/services``,
``/api/services/{service}/operations``, ``/api/operations``, ``/api/traces``, ``/api/traces/{id}``
and ``/api/dependencies``.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from batchmill.store import Snapshot
from batchmill.traces import SpanReader, Trace, TraceQuery, TraceSpan
from batchmill.web.api.coverage import Coverage
from batchmill.web.api.parameters import TimeRange, read_range
from batchmill.web.api.relations import read_relations
from batchmill.web.api.service import name_of
from batchmill.web.api.traces import MOST_TRACES, NOT_KEPT
from batchmill.web.query_pool import QueryPool
from batchmill.web.responses import BadRequest, RequestError, as_json
from batchmill.wording import count_of

_DAY_US = 86_400_000_000
_LONGEST_MS = 1499 * _DAY_US // 1000
"""The longest range of dependencies: ``read_range`` allows 1,500 days."""
_UNITS_US = {"ns": 0.001, "us": 1, "ms": 1000, "s": 1_000_000, "m": 60e6, "h": 3600e6}
_UNITS_US |= {"\u00b5s": 1, "\u03bcs": 1}  # the micro sign, and the Greek letter
_DURATION = re.compile(rf"([0-9]+\.?[0-9]*|\.[0-9]+)({'|'.join(_UNITS_US)})")
_LIMIT = 100
"""As in Jaeger: Grafana sends no limit if its field is empty."""


class _NotFound(RequestError):
    status = 404


class JaegerApi:
    """The handlers of Jaeger's paths."""

    def __init__(
        self,
        pool: QueryPool,
        reader: SpanReader | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._reader = reader
        self._clock = clock

    def routes(self) -> list[BaseRoute]:
        """The routes of the handlers."""
        return [
            Route("/api/services", self._answer(self._services)),
            Route("/api/services/{service:path}/operations", self._answer(self._operations)),
            Route("/api/operations", self._answer(self._operations_with_kinds)),
            Route("/api/traces", self._answer(self._traces)),
            Route("/api/traces/{id:path}", self._answer(self._trace)),
            Route("/api/dependencies", self._answer(self._dependencies)),
        ]

    def _answer(self, handle: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """A handler whose result, or error, has the shape of Jaeger's."""

        async def answer(request: Request) -> Response:
            try:
                data = await handle(request)
            except RequestError as error:
                fault = [{"code": error.status, "msg": error.reason}]
                return as_json(_shape(None, fault), error.status, error.headers)
            return as_json(_shape(data))

        return answer

    async def _services(self, request: Request) -> list[str]:
        reader = self._kept()
        return await self._pool.run(lambda: sorted(reader.services()))

    async def _operations(self, request: Request) -> list[str]:
        names = await self._names(request.path_params["service"])
        return sorted({name for name, _ in names})

    async def _operations_with_kinds(self, request: Request) -> list[dict[str, str]]:
        service = request.query_params.get("service", "")
        if not service:
            raise BadRequest("the parameter 'service' is required")
        wanted = request.query_params.get("spanKind", "").lower()
        names = sorted(await self._names(service))
        return [
            {"name": name, "spanKind": kind.lower()}
            for name, kind in names
            if not wanted or kind.lower() == wanted
        ]

    async def _names(self, service: str) -> set[tuple[str, str]]:
        reader = self._kept()
        services = await self._pool.run(reader.services)
        return services.get(service, set())

    async def _traces(self, request: Request) -> list[dict[str, Any]]:
        params, reader = request.query_params, self._kept()
        ids = params.getlist("traceID")
        if ids:
            traces = await self._pool.run(
                lambda: [reader.trace(trace_id) for trace_id in ids[:MOST_TRACES]]
            )
            return [as_jaeger(trace) for trace in traces if trace is not None]
        query = self._query(params)

        def work() -> list[dict[str, Any]]:
            traces = reader.traces([one.trace_id for one in reader.search(query).traces])
            return [as_jaeger(trace) for trace in traces]

        return await self._pool.run(work)

    def _query(self, params: Any) -> TraceQuery:
        if not params.get("service"):
            raise BadRequest("parameter 'service' is required")
        now_us = int(self._clock() * 1_000_000)
        end = _number(params, "end", now_us)
        attributes = _tags(params.getlist("tag"), params.getlist("tags"))
        error = None
        if attributes.get("error") in ("true", "false"):
            error = attributes.pop("error") == "true"
        kind = attributes.pop("span.kind", None)
        return TraceQuery(
            start_us=_number(params, "start", end - 2 * _DAY_US),
            end_us=end,
            service=params["service"],
            name=params.get("operation") or None,
            kind=kind.upper() if kind else None,
            error=error,
            status=attributes.pop("otel.status_code", None),
            status_message=attributes.pop("otel.status_description", None),
            min_us=_duration(params, "minDuration"),
            max_us=_duration(params, "maxDuration"),
            attributes=attributes,
            limit=min(max(1, _number(params, "limit", _LIMIT)), MOST_TRACES),
        )

    async def _trace(self, request: Request) -> list[dict[str, Any]]:
        reader, trace_id = self._kept(), request.path_params["id"]
        trace = await self._pool.run(lambda: reader.trace(trace_id))
        if trace is None:
            raise _NotFound("trace not found")
        return [as_jaeger(trace)]

    async def _dependencies(self, request: Request) -> list[dict[str, Any]]:
        now_ms = int(self._clock() * 1000)
        end_ms = _number(request.query_params, "endTs", now_ms)
        start_ms = end_ms - _number(request.query_params, "lookback", _DAY_US // 1000)
        end_ms = min(end_ms, now_ms)
        start_ms = max(0, start_ms, end_ms - _LONGEST_MS)
        if start_ms >= end_ms:
            return []
        given = {"from": str(start_ms / 1000), "to": str(end_ms / 1000)}
        time_range = read_range(given, self._clock())
        return await self._pool.query(
            lambda store: store.read(lambda snapshot: dependencies(snapshot, time_range))
        )

    def _kept(self) -> SpanReader:
        if self._reader is None:
            raise _NotFound(NOT_KEPT)
        return self._reader


def _shape(data: Any, errors: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    total = len(data) if isinstance(data, list) else 0
    return {"data": data, "total": total, "limit": 0, "offset": 0, "errors": errors}


def as_jaeger(trace: Trace) -> dict[str, Any]:
    """A trace in Jaeger's JSON."""
    processes: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}
    known = {span.span_id for span in trace.spans}
    spans = []
    for span in trace.spans:
        place = span.service, tuple(span.resource.items())
        process = processes.setdefault(place, f"p{len(processes) + 1}")
        spans.append(_span(span, process, known))
    warnings = []
    if trace.left_out:
        warnings.append(f"{count_of(trace.left_out, 'later span')} left out")
        # Grafana shows the warnings of spans only.
        spans[0]["warnings"] = warnings + (spans[0]["warnings"] or [])
    return {
        "traceID": trace.trace_id,
        "spans": spans,
        "processes": {
            process: {
                "serviceName": service,
                "tags": [_tag(key, text) for key, text in pairs if key != "service.name"],
            }
            for (service, pairs), process in processes.items()
        },
        "warnings": warnings or None,
    }


def _span(span: TraceSpan, process: str, known: set[str]) -> dict[str, Any]:
    references = []
    if span.parent_span_id and span.parent_span_id != span.span_id:
        references.append(
            {"refType": "CHILD_OF", "traceID": span.trace_id, "spanID": span.parent_span_id}
        )
    tags = [_tag("span.kind", span.kind.lower())]
    if span.status != "UNSET":
        tags.append(_tag("otel.status_code", span.status))
    if span.is_error:
        tags.append({"key": "error", "type": "bool", "value": True})
    if span.status_message:
        tags.append(_tag("otel.status_description", span.status_message))
    tags += [_tag(key, text) for key, text in span.attributes.items()]
    lost = span.parent_span_id and span.parent_span_id not in known
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "flags": 1,
        "operationName": span.name,
        "references": references,
        "startTime": span.start_us,
        "duration": span.duration_us,
        "tags": tags,
        "logs": [_log(event, span.start_us) for event in span.events],
        "processID": process,
        "warnings": ["the parent of this span is not kept"] if lost else None,
    }


def _log(event: Mapping[str, Any], start_us: int) -> dict[str, Any]:
    at, attributes = event.get("time"), event.get("attributes")
    fields = [_tag("event", str(event.get("name", "")))]
    if isinstance(attributes, dict):
        fields += [_tag(key, str(text)) for key, text in attributes.items()]
    return {"timestamp": at if isinstance(at, int) else start_us, "fields": fields}


def _tag(key: str, text: str) -> dict[str, Any]:
    return {"key": key, "type": "string", "value": text}


def dependencies(snapshot: Snapshot, time_range: TimeRange) -> list[dict[str, Any]]:
    """How often services called each other, by the metrics of relations."""
    metrics = snapshot.metrics()
    coverage = Coverage.read(snapshot, time_range, metrics)
    calls: Counter[tuple[str, str]] = Counter()
    for relation in read_relations(snapshot, coverage, metrics).by_key.values():
        caller, callee = map(name_of, relation.ends)
        calls[caller, callee] += relation.calls
    return [
        {"parent": caller, "child": callee, "callCount": count}
        for (caller, callee), count in sorted(calls.items())
    ]


def _number(params: Mapping[str, str], name: str, default: int) -> int:
    text = params.get(name)
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise BadRequest(f"unable to parse param '{name}': {text[:64]!r} is no whole number")
    return int(text)


def _duration(params: Mapping[str, str], name: str) -> int | None:
    """A duration such as ``1.2s`` or ``100ms``, in microseconds."""
    text = params.get(name)
    if not text:
        return None
    unsigned = text.removeprefix("+")
    if unsigned == "0":
        return 0
    parts = list(_DURATION.finditer(unsigned))
    if not parts or "".join(part[0] for part in parts) != unsigned:
        raise BadRequest(
            f"unable to parse param '{name}': {text[:64]!r} is no duration, such as 1.2s, 100ms "
            "or 500us"
        )
    return round(sum(float(part[1]) * _UNITS_US[part[2]] for part in parts))


def _tags(pairs: Sequence[str], objects: Sequence[str]) -> dict[str, str]:
    """The tags of a query: ``tag=key:value``, and ``tags`` as JSON."""
    tags: dict[str, str] = {}
    for pair in pairs:
        key, sign, text = pair.partition(":")
        if not sign:
            raise BadRequest(f"malformed 'tag' parameter, expecting key:value: {pair[:64]!r}")
        tags[key] = text
    for text in objects:
        try:
            given = json.loads(text)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise BadRequest(f"malformed 'tags' parameter, expecting a JSON object: {text[:64]!r}")
        for key, value in given.items():
            tags[key] = value if isinstance(value, str) else json.dumps(value)
    return tags
