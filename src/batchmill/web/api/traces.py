"""Traces of kept spans: search, and one trace as a waterfall."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from batchmill.sources import service_id
from batchmill.traces import SpanReader, Trace, TraceQuery
from batchmill.web.api.entity import ROLES
from batchmill.web.api.parameters import checked, choice, read_moment, read_params, whole
from batchmill.web.meaning import MetricNames
from batchmill.web.query_pool import QueryPool
from batchmill.web.responses import BadRequest, NotFound, as_json

V1 = "/api/v1"
PARAMS = (
    *("service", "name", "peer", "status", "kind", "min_ms", "max_ms"),
    *("from", "to", "limit"),
)
MOST_TRACES = 500
MOST_ATTRIBUTES = 8
_STATUSES = ("any", "error", "ok")
_KINDS = ("any", "server", "client", "producer", "consumer", "internal")
NOT_KEPT = (
    "spans are not kept here: `batchmill run` keeps them, unless keep_spans is off; give "
    "`batchmill web` its --home"
)


class TracesApi:
    """The handlers of traces."""

    def __init__(
        self,
        pool: QueryPool,
        reader: SpanReader | None,
        meaning: MetricNames,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``reader``: of the kept spans; None if there are none."""
        self._pool = pool
        self._reader = reader
        self._meaning = meaning
        self._clock = clock

    def routes(self) -> list[BaseRoute]:
        """The routes of the handlers."""
        return [
            Route(f"{V1}/traces", self.search),
            Route(f"{V1}/traces/services", self.services),
            Route(f"{V1}/traces/{{id}}", self.trace),
        ]

    async def search(self, request: Request) -> Response:
        """The newest traces of a query."""
        query = read_query(request.query_params, self._clock())
        reader = self._kept()

        def work() -> Any:
            result = reader.search(query)
            stats = reader.stats()
            return {
                "from": query.start_us // 1_000_000,
                "to": query.end_us // 1_000_000,
                "traces": [asdict(trace) for trace in result.traces],
                "more": result.more,
                "oldest_s": None if stats.oldest_us is None else stats.oldest_us // 1_000_000,
                "unreadable_files": reader.unreadable_files,
            }

        return as_json(await self._pool.run(work))

    async def services(self, request: Request) -> Response:
        """The services with kept spans, and the names of these."""
        read_params(request.query_params, ())
        reader = self._kept()

        def work() -> Any:
            services = reader.services()
            return {
                "services": {
                    service: sorted({name for name, _ in names})
                    for service, names in sorted(services.items())
                },
                "kept": asdict(reader.stats()),
                "unreadable_files": reader.unreadable_files,
            }

        return as_json(await self._pool.run(work))

    async def trace(self, request: Request) -> Response:
        """One trace."""
        read_params(request.query_params, ())
        trace_id = checked("id", request.path_params["id"])
        reader = self._kept()
        trace = await self._pool.run(lambda: reader.trace(trace_id))
        if trace is None:
            raise NotFound(
                f"no span of the trace {trace_id[:64]} is kept: it may be too old, or not "
                "committed yet"
            )
        return as_json(await self._pool.run(lambda: waterfall(trace, self._meaning)))

    def _kept(self) -> SpanReader:
        if self._reader is None:
            raise NotFound(NOT_KEPT)
        return self._reader


def read_query(given: QueryParams, now_s: float) -> TraceQuery:
    """A query from the parameters of a request."""
    attributes: dict[str, str] = {}
    for pair in given.getlist("attribute"):
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise BadRequest(
                f"attribute={pair[:64]!r} is not valid: it must be a key and a value, such as "
                "http.route=/orders"
            )
        attributes[checked("attribute", key)] = checked("attribute", text)
    if len(attributes) > MOST_ATTRIBUTES:
        raise BadRequest(f"at most {MOST_ATTRIBUTES} attributes can be searched for at once")
    rest = [(name, value) for name, value in given.multi_items() if name != "attribute"]
    params = read_params(QueryParams(rest), PARAMS)
    start_s = read_moment("from", params.get("from", "now-1h"), now_s)
    end_s = read_moment("to", params.get("to", "now"), now_s)
    if start_s >= end_s:
        raise BadRequest("from must lie before to")
    status = choice(params, "status", "any", _STATUSES)
    kind = choice(params, "kind", "any", _KINDS)
    return TraceQuery(
        start_us=int(start_s * 1_000_000),
        end_us=int(end_s * 1_000_000),
        service=params.get("service"),
        name=params.get("name"),
        peer=params.get("peer"),
        kind=None if kind == "any" else kind.upper(),
        error={"any": None, "error": True, "ok": False}[status],
        min_us=_micros(params, "min_ms"),
        max_us=_micros(params, "max_ms"),
        attributes=attributes,
        limit=whole(params, "limit", 20, 1, MOST_TRACES),
    )


def _micros(params: Mapping[str, str], name: str) -> int | None:
    text = params.get(name)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1e10:
        raise BadRequest(f"{name}={text[:64]!r} is not valid: it must be milliseconds, from 0 on")
    return round(number * 1000)


def waterfall(trace: Trace, meaning: MetricNames) -> dict[str, Any]:
    """A trace in JSON: spans as the table of kept spans has them, each resource once."""
    resources: dict[tuple[tuple[str, str], ...], int] = {}
    services: dict[str, int] = {}
    spans = []
    for span, depth, critical, backend in zip(
        *(trace.spans, trace.depths, trace.critical, meaning.backends(trace.spans)), strict=True
    ):
        services[span.service] = services.get(span.service, 0) + 1
        resource = resources.setdefault(tuple(span.resource.items()), len(resources))
        spans.append(
            {
                "span_id": span.span_id,
                "parent_span_id": span.parent_span_id,
                "depth": depth,
                "start_us": span.start_us,
                "duration_us": span.duration_us,
                "service": span.service,
                "name": span.name,
                "endpoint": meaning.endpoint(span.name, has_route=span.has_route),
                "kind": span.kind,
                "status": span.status,
                "status_message": span.status_message,
                "instance": span.instance,
                "backend": None if backend is None else _backend(*backend),
                "resource_index": resource,
                "attributes": span.attributes,
                "events": [_event(event) for event in span.events],
                "critical": critical,
            }
        )
    return {
        "trace_id": trace.trace_id,
        "start_us": trace.start_us,
        "duration_us": trace.duration_us,
        "missing": trace.missing,
        "spans_left_out": trace.left_out,
        "services": services,
        "resources": [dict(pairs) for pairs in resources],
        "spans": spans,
    }


def _backend(name: str, layer: str) -> dict[str, Any]:
    return {"id": service_id(name, normal=False), "name": name, "role": ROLES[layer]}


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    at_us = event.get("time")
    attributes = event.get("attributes")
    return {
        "time": at_us if isinstance(at_us, int) else None,
        "name": str(event.get("name", "")),
        "attributes": attributes if isinstance(attributes, dict) else {},
    }
