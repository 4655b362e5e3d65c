"""The HTTP API of Prometheus, as far as Grafana needs it to read plain selectors."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import batchmill
from batchmill.export import help_text, series_names
from batchmill.store import Snapshot
from batchmill.web.answers import as_json
from batchmill.web.api.desk import Desk
from batchmill.web.errors import BadQuestion, Refused
from batchmill.web.promql.params import (
    MOST_SERIES,
    Params,
    limit,
    moment,
    moments,
    one,
    read_params,
)
from batchmill.web.promql.parser import NAME, Selector, parse, parse_selector
from batchmill.web.promql.samples import Line, lines, series

T = TypeVar("T")

V1 = "/api/v1"
SPEAKS = "2.53.0"
"""The Prometheus whose API this is a part of; Grafana asks for it."""
LABELS = (NAME, "entity", "kind", "label", "layer", "name")
_ERRORS = {400: "bad_data", 404: "not_found", 503: "unavailable"}


class PrometheusApi:
    """The handlers."""

    def __init__(self, desk: Desk, clock: Callable[[], float] = time.time) -> None:
        self._desk = desk
        self._clock = clock

    def routes(self) -> list[BaseRoute]:
        """Where they are."""
        both = ["GET", "POST"]
        return [
            Route(f"{V1}/query", self._safe(self._query), methods=both),
            Route(f"{V1}/query_range", self._safe(self._query_range), methods=both),
            Route(f"{V1}/labels", self._safe(self._labels), methods=both),
            Route(f"{V1}/label/{{name}}/values", self._safe(self._values), methods=["GET"]),
            Route(f"{V1}/series", self._safe(self._series), methods=both),
            Route(f"{V1}/metadata", self._safe(self._metadata), methods=["GET"]),
            Route(f"{V1}/status/buildinfo", self._safe(self._buildinfo), methods=["GET"]),
        ]

    def _safe(self, handler: Callable[[Request, Params], Any]) -> Callable[[Request], Any]:
        """The handler with its parameters; what it refuses is said as Prometheus says it."""

        async def answered(request: Request) -> Response:
            try:
                data = await handler(request, await read_params(request))
            except Refused as error:
                kind = _ERRORS.get(error.status, "internal")
                body = {"status": "error", "errorType": kind, "error": error.reason}
                return as_json(body, error.status, error.headers)
            return data if isinstance(data, Response) else _success(data)

        return answered

    async def _query(self, request: Request, params: Params) -> Any:
        asked = await self._parsed(parse, one(params, "query"))
        moment_s = moment(params, "time", self._clock())
        if not isinstance(asked, Selector):
            return {"resultType": "scalar", "result": [moment_s, _number(asked)]}
        now_s = self._clock()

        def work(snapshot: Snapshot) -> dict[str, Any]:
            found = lines(snapshot, asked, [moment_s], now_s)
            return {
                "resultType": "vector",
                "result": [
                    {"metric": each.labels, "value": [moment_s, _number(each.values[0])]}
                    for each in found
                ],
            }

        return await self._ask(work)

    async def _query_range(self, request: Request, params: Params) -> Any:
        asked = await self._parsed(parse, one(params, "query"))
        asked_at = moments(params)
        now_s = self._clock()
        if not isinstance(asked, Selector):
            values = [[each, _number(asked)] for each in asked_at]
            return {"resultType": "matrix", "result": [{"metric": {}, "values": values}]}

        def work(snapshot: Snapshot) -> dict[str, Any]:
            found = lines(snapshot, asked, asked_at, now_s)
            return {
                "resultType": "matrix",
                "result": [
                    {"metric": each.labels, "values": _pairs(asked_at, each)} for each in found
                ],
            }

        return await self._ask(work)

    async def _labels(self, request: Request, params: Params) -> Any:
        if not params.get("match[]"):
            return list(LABELS)
        return sorted({label for each in await self._found(params) for label in each})

    async def _values(self, request: Request, params: Params) -> Any:
        name = request.path_params["name"]
        if name not in LABELS:
            return []
        if params.get("match[]"):
            found = await self._found(params)
            return sorted({each[name] for each in found if each.get(name)})
        return await self._ask(lambda snapshot: _all_values(snapshot, name))

    async def _series(self, request: Request, params: Params) -> Any:
        if not params.get("match[]"):
            raise BadQuestion("no match[] parameter provided")
        return await self._found(params)

    async def _found(self, params: Params) -> list[dict[str, str]]:
        if len(params["match[]"]) > 20:
            raise BadQuestion("more than 20 match[] are given")
        selectors = [await self._parsed(parse_selector, each) for each in params["match[]"]]
        end_s = moment(params, "end", self._clock())
        start_s = moment(params, "start", max(0.0, end_s - 86_400))
        if start_s > end_s:
            raise BadQuestion("end timestamp must not be before start time")
        if end_s - start_s > 366 * 86_400:
            start_s = end_s - 366 * 86_400
        most = limit(params)

        def work(snapshot: Snapshot) -> list[dict[str, str]]:
            found: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
            for each in selectors:
                for labels in series(snapshot, each, max(0.0, start_s), max(0.0, end_s), most):
                    found[tuple(labels.items())] = labels
            return list(found.values())[:most]

        return await self._desk.ask(lambda store: store.read(work))

    async def _metadata(self, request: Request, params: Params) -> Any:
        wanted = params.get("metric", [""])[0]
        most = limit(params)

        def work(snapshot: Snapshot) -> dict[str, Any]:
            active = [each for each in snapshot.metrics() if each.active]
            names = series_names(active)
            found = {
                names[each.name]: [{"type": "gauge", "help": help_text(each), "unit": ""}]
                for each in active
                if not wanted or names[each.name] == wanted
            }
            return dict(sorted(found.items())[:most])

        return await self._ask(work)

    async def _buildinfo(self, request: Request, params: Params) -> Any:
        return {
            "version": SPEAKS,
            "revision": f"batchmill {batchmill.__version__}",
            "branch": "",
            "buildUser": "",
            "buildDate": "",
            "goVersion": "",
            "application": "batchmill",
        }

    async def _parsed(self, how: Callable[[str], T], text: str) -> T:
        """A query, read on a thread: its regular expressions may take a moment."""
        return await self._desk.run(lambda: how(text))

    async def _ask(self, work: Callable[[Snapshot], Any]) -> Response:
        """The answer, made on the thread that reads: it may be long."""
        return await self._desk.ask(lambda store: _success(store.read(work)))


def _success(data: Any) -> Response:
    return as_json({"status": "success", "data": data})


def _all_values(snapshot: Snapshot, name: str) -> list[str]:
    if name == NAME:
        return sorted(series_names([each for each in snapshot.metrics() if each.active]).values())
    if name == "label":
        return ["p50", "p75", "p90", "p95", "p99"]
    found = snapshot.find(most=MOST_SERIES)
    if name == "layer":
        layers = snapshot.layers(each.key for each in found)
        return sorted({",".join(sorted(each)) for each in layers.values()})
    return sorted({getattr(each, "id" if name == "entity" else name) for each in found})


def _pairs(asked_at: list[float], line: Line) -> list[list[Any]]:
    return [
        [at_s, _number(value)]
        for at_s, value in zip(asked_at, line.values, strict=True)
        if value is not None
    ]


def _number(value: float | None) -> str:
    """As Prometheus writes it."""
    if value is None or math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if value == int(value) and abs(value) < 2**53:
        return str(int(value))
    return json.dumps(value)
