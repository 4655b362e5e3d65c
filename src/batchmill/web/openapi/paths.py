"""The OpenAPI document of the API: its paths and their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import batchmill
from batchmill.web.api.entity import KINDS
from batchmill.web.api.listing import MOST_CHOSEN, VALUE_ORDERS
from batchmill.web.api.overview import MOST_SERVICES, ORDERS, SORTS
from batchmill.web.api.parameters import COMPARES, STEPS
from batchmill.web.openapi.schemas import SCHEMAS, TEXT, TRACE_SCHEMAS, Schema

_MOMENT = r"^(now(-[0-9]{1,6}[smhdw])?|[0-9]{1,10}|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{5,8}Z)$"


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_ABOUT = {
    "from": "Start of the range: seconds since 1970, ISO 8601, now, or now-24h.",
    "to": "End of the range; its minute is included.",
    "grain": "Length of a bucket; auto: minutes up to 3 hours, hours up to 7 days, else days. "
    "5m and 10m are merged from minutes.",
    "layer": "Only entities of this layer.",
    "limit": "How many at most.",
    "offset": "How many to skip.",
}
_FROM = {"type": "string", "pattern": _MOMENT, "examples": ["now-1h", "1709208000"]}


def _query(name: str, schema: Schema, about: str = "", required: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "in": "query",
        "required": required,
        "description": about or _ABOUT.get(name, ""),
        "schema": schema,
    }


def _path(name: str, about: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": about,
        "schema": {"type": "string", "minLength": 1, "maxLength": 300},
    }


def _number(least: int, most: int, default: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, "default": default}


def _word(*words: str) -> Schema:
    return {"enum": list(words)}


_SOME_TEXT: Schema = {"type": "string", "maxLength": 200, "pattern": r"^[^\u0000]*$"}
_TIME = [
    _query("from", _FROM),
    _query("to", _FROM),
    _query("grain", _word("auto", *STEPS)),
]


def _response(schema: str, about: str) -> dict[str, Any]:
    return {"description": about, "content": {"application/json": {"schema": _ref(schema)}}}


_NO_ACCESS = {
    "401": _response("Error", "The token is missing."),
    "421": _response("Error", "The Host header is not a name of this server."),
}


def _get(
    about: str, schema: str, params: Sequence[Mapping[str, Any]] = (), missing: str = ""
) -> dict[str, Any]:
    responses = {
        "200": _response(schema, "The result."),
        "400": _response("Error", "What is wrong with the request."),
        **_NO_ACCESS,
        "503": _response("Error", "The store cannot be read now, or too many queries are running."),
    }
    if missing:
        responses["404"] = _response("Error", missing)
    return {"get": {"summary": about, "parameters": list(params), "responses": responses}}


def _prometheus(
    about: str, schema: str, params: Sequence[Mapping[str, Any]] = (), post: bool = True
) -> dict[str, Any]:
    responses = {
        "200": _response(schema, "The result, in the format of Prometheus."),
        "400": _response("PrometheusError", "What is wrong with the request."),
        **_NO_ACCESS,
        "503": _response("PrometheusError", "The store cannot be read now."),
    }
    operations: dict[str, Any] = {
        "get": {"summary": about, "parameters": list(params), "responses": responses}
    }
    if post:
        form = {
            "type": "object",
            "properties": {param["name"]: param["schema"] for param in params},
            "required": [param["name"] for param in params if param["required"]],
        }
        operations["post"] = {
            "summary": about,
            "requestBody": {
                "required": True,
                "content": {"application/x-www-form-urlencoded": {"schema": form}},
            },
            "responses": responses,
        }
    return operations


_SELECTOR: Schema = {
    "type": "string",
    "maxLength": 1000,
    "examples": ['batchmill_service_cpm{name=~".+"}', "batchmill_service_percentile"],
}
_SECONDS: Schema = {"type": "string", "pattern": r"^[0-9]{1,10}(\.[0-9]{1,3})?$"}
_MATCH: Schema = {"type": "array", "items": _SELECTOR, "maxItems": 5}
_BETWEEN = [
    _query("start", _SECONDS, "Series of this time, and of whole days around it."),
    _query("end", _SECONDS, "Up to when."),
]


def _jaeger(about: str, params: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A path of Jaeger's query service, whose errors have the shape of its results."""
    responses = {"200": _response("Jaeger", "The result."), **_NO_ACCESS}
    for code in ("400", "404", "503"):
        responses[code] = _response("Jaeger", "What is wrong.")
    return {"get": {"summary": about, "parameters": list(params), "responses": responses}}


_NOT_KEPT = "Spans are not kept here."
_MICROS: Schema = {"type": "integer", "minimum": 0, "maximum": 2**53}
_TRACE_PATHS: Mapping[str, Mapping[str, Any]] = {
    "/api/v1/traces": _get(
        "The newest traces that have a span to which all parameters apply.",
        "Traces",
        [
            _query("service", _SOME_TEXT, "The span's service."),
            _query("name", _SOME_TEXT, "The name of the span, or of its endpoint."),
            _query(
                "peer",
                _SOME_TEXT,
                "What the span calls, by its name in metrics: a database, cache, broker, host …",
            ),
            _query("status", _word("any", "error", "ok")),
            _query("kind", _word("any", "server", "client", "producer", "consumer", "internal")),
            _query("min_ms", {"type": "number", "minimum": 0, "maximum": 1e9}),
            _query("max_ms", {"type": "number", "minimum": 0, "maximum": 1e9}),
            _query(
                "attribute",
                {
                    "type": "array",
                    "maxItems": 8,
                    "items": {"type": "string", "pattern": "^[a-z.]+="},
                },
                "key=value, of the span or its resource; may be repeated.",
            ),
            *_TIME[:2],
            _query("limit", _number(1, 500, 20)),
        ],
        _NOT_KEPT,
    ),
    "/api/v1/traces/services": _get("What is kept.", "TraceServices", (), _NOT_KEPT),
    "/api/v1/traces/{id}": _get(
        "One trace, in the order of a waterfall.",
        "Trace",
        [_path("id", "The trace's id.")],
        "No span of this trace is kept.",
    ),
    "/api/services": _jaeger("Jaeger: the services."),
    "/api/services/{service}/operations": _jaeger(
        "Jaeger: the names of a service's spans.", [_path("service", "The service's name.")]
    ),
    "/api/operations": _jaeger(
        "Jaeger: the names and kinds of a service's spans.",
        [_query("service", _SOME_TEXT, required=True), _query("spanKind", _SOME_TEXT)],
    ),
    "/api/traces": _jaeger(
        "Jaeger: traces of a query, or by their ids.",
        [
            *(_query(name, _SOME_TEXT) for name in ("service", "operation", "tags", "tag")),
            *(_query(name, _SOME_TEXT) for name in ("minDuration", "maxDuration", "traceID")),
            *(_query(name, _MICROS) for name in ("start", "end")),
            _query("limit", _number(1, 500, 100)),
        ],
    ),
    "/api/traces/{id}": _jaeger("Jaeger: one trace.", [_path("id", "The trace's id.")]),
    "/api/dependencies": _jaeger(
        "Jaeger: the calls between services.",
        [_query(name, _number(60_000, 2**40, 86_400_000)) for name in ("endTs", "lookback")],
    ),
}

PATHS: Mapping[str, Mapping[str, Any]] = {
    **_TRACE_PATHS,
    "/api/v1/status": _get("Whether the store can be read, and how new it is.", "Status"),
    "/api/v1/metrics": _get("The metrics that the store has.", "Metrics"),
    "/api/v1/metrics/{metric}/values": _get(
        "The values of a metric, a series for each entity.",
        "Values",
        [
            _path("metric", "The metric's name."),
            _query(
                "entity",
                {"type": "array", "items": _SOME_TEXT, "maxItems": MOST_CHOSEN},
                "Id or name of an entity; may be repeated.",
            ),
            *_TIME,
            _query("layer", _SOME_TEXT),
            _query("search", _SOME_TEXT, "A part of the entity's name, in any case."),
            _query("order", _word(*VALUE_ORDERS), "By id, or the largest over the range first."),
            _query("limit", _number(1, 1000, 100)),
        ],
        "There is no such metric, or entity.",
    ),
    "/api/v1/entities": _get(
        "The entities that metrics are about.",
        "Entities",
        [
            _query("kind", _SOME_TEXT, "service, instance, endpoint, service_relation …"),
            _query("name", _SOME_TEXT, "A part of the name, in any case."),
            _query("layer", _SOME_TEXT),
            _query("limit", _number(1, 1000, 100)),
            _query("offset", _number(0, 10_000_000, 0)),
        ],
    ),
    "/api/v1/alerts": _get(
        "The alerts that fire or are pending, those that fired in a range, and the rules.",
        "Alerts",
        [
            *_TIME,
            _query("entity", _SOME_TEXT, "Id or name of one entity."),
            _query("limit", _number(1, 1000, 200)),
        ],
    ),
    "/api/v1/entities/{kind}/{id}": _get(
        "One entity over a range: groups of charts, lists of other entities, slow statements.",
        "Entity",
        [
            {**_path("kind", "The entity's kind."), "schema": _word(*KINDS)},
            _path("id", "The entity's id, or its name."),
            *_TIME,
        ],
        "There is no such entity.",
    ),
    "/api/v1/services": _get(
        "All services over a range, with their measures by bucket and over the whole range.",
        "Services",
        [
            *_TIME,
            _query("compare", _word(*COMPARES), "An earlier time, whose values are in `before`."),
            _query("layer", _SOME_TEXT),
            _query("search", _SOME_TEXT, "A part of the name, in any case."),
            _query("sort", _word(*SORTS)),
            _query("order", _word(*ORDERS)),
            _query("limit", _number(1, MOST_SERVICES, 500)),
            _query("offset", _number(0, 10_000_000, 0)),
        ],
    ),
    "/api/v1/services/{id}": _get(
        "One service over a range.",
        "Service",
        [_path("id", "The service's id, or its name."), *_TIME],
        "There is no such service.",
    ),
    "/api/v1/topology": _get(
        "The calls between services over a range.",
        "Topology",
        [*_TIME, _query("layer", _SOME_TEXT)],
    ),
    "/api/v1/topn": _get(
        "The slowest calls of the buckets of a range.",
        "TopN",
        [
            _query("stream", _SOME_TEXT, "Which kind of calls; the first one if none is given."),
            _query("entity", _SOME_TEXT, "Id or name of one entity."),
            *_TIME,
            _query("n", _number(1, 1000, 20), "How many at most."),
        ],
        "There is no such stream, or entity.",
    ),
    "/api/v1/pipeline": _get("The state of the run's processes.", "Pipeline"),
    "/api/v1/query": _prometheus(
        "The series of a plain selector at a moment.",
        "Answer",
        [
            _query("query", _SELECTOR, "A plain selector.", required=True),
            _query("time", _SECONDS, "When; now if it is not given."),
        ],
    ),
    "/api/v1/query_range": _prometheus(
        "The series of a plain selector over a range.",
        "Answer",
        [
            _query("query", _SELECTOR, "A plain selector.", required=True),
            _query("start", _SECONDS, "The first moment.", required=True),
            _query("end", _SECONDS, "The last moment.", required=True),
            _query(
                "step",
                {"type": "string", "pattern": r"^[1-9][0-9]{0,4}[smh]?$"},
                "From one moment to the next.",
                required=True,
            ),
        ],
    ),
    "/api/v1/labels": _prometheus(
        "Label names.", "Labels", [_query("match[]", _MATCH, "Selectors."), *_BETWEEN]
    ),
    "/api/v1/label/{name}/values": _prometheus(
        "The values of a label.",
        "Labels",
        [
            _path("name", "The label's name."),
            _query("match[]", _MATCH, "Selectors."),
            *_BETWEEN,
        ],
        post=False,
    ),
    "/api/v1/series": _prometheus(
        "The series of selectors.",
        "Series",
        [_query("match[]", {**_MATCH, "minItems": 1}, "Selectors.", required=True), *_BETWEEN],
    ),
    "/api/v1/metadata": _prometheus(
        "Metadata of metrics.",
        "Metadata",
        [
            _query("metric", _SOME_TEXT, "The name of its series."),
            _query("limit", _number(0, 100_000, 0)),
        ],
        post=False,
    ),
    "/api/v1/status/buildinfo": _prometheus("Build information.", "BuildInfo", post=False),
}


@cache
def document() -> Mapping[str, Any]:
    """The OpenAPI document."""
    live = {
        "summary": "Changes as server-sent events: pipeline, commit, store.",
        "responses": {
            "200": {
                "description": "Events without end.",
                "content": {"text/event-stream": {"schema": TEXT}},
            },
            **_NO_ACCESS,
            "503": _response("Error", "There are too many listeners already."),
        },
    }
    whole = {
        "summary": "This document.",
        "responses": {
            "200": {
                "description": "OpenAPI 3.1.",
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
            **_NO_ACCESS,
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "batchmill",
            "version": batchmill.__version__,
            "description": "Metrics of services, as a batchmill store has them. Names that end in "
            "_s are seconds since 1970, in _us microseconds; from, to, times and incomplete are "
            "seconds, too. A bucket or minute is yyyyMMddHHmm (UTC), shorter for hours and days. "
            "Shares are from 0 to 1; null: there is no value.",
        },
        "paths": {
            **PATHS,
            "/api/v1/live": {"get": live},
            "/api/v1/openapi.json": {"get": whole},
        },
        "components": {
            "schemas": {**SCHEMAS, **TRACE_SCHEMAS},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }
