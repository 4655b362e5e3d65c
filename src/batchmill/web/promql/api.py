"""The part of Prometheus' HTTP API that Grafana needs to read plain selectors."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import batchmill
from batchmill.export import help_text, series_names
from batchmill.store import Snapshot
from batchmill.web.promql.parser import NAME, Selector, parse, parse_selector
from batchmill.web.promql.samples import SampledSeries, sampled_series, series
from batchmill.web.query_pool import QueryPool
from batchmill.web.responses import BadRequest, RequestError, as_json

MOST_STEPS = 11_000
MOST_BODY = 2**20
MOST_SERIES = 20_000
_LAST_S = 253_402_300_799
_SECONDS = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,9})?", re.ASCII)
_STEP = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?(?:[eE][+-]?[0-9]{1,2})?", re.ASCII)
_DURATION = re.compile(
    r"(?:([0-9]{1,9})y)?(?:([0-9]{1,9})w)?(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?"
    r"(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?(?:([0-9]{1,9})ms)?",
    re.ASCII,
)
_UNITS_S = (31_536_000, 604_800, 86_400, 3600, 60, 1, 0.001)

Params = dict[str, list[str]]


async def read_params(request: Request) -> Params:
    """The parameters of the URL and, for a POST, of the form in its body."""
    pairs = list(request.query_params.multi_items())
    if request.method == "POST":
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("application/x-www-form-urlencoded", ""):
            raise BadRequest("a POST must send its parameters as application/x-www-form-urlencoded")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY:
                raise BadRequest(f"the body has more than {MOST_BODY:,} bytes")
        try:
            pairs += parse_qsl(
                body.decode("utf-8"), keep_blank_values=True, max_num_fields=1_000, errors="strict"
            )
        except ValueError:
            raise BadRequest("the body is no form") from None
    params: Params = {}
    for name, value in pairs:
        if "\0" in value:
            raise BadRequest("a parameter holds a NUL character")
        params.setdefault(name, []).append(value)
    return params


def one(params: Params, name: str) -> str:
    """A required parameter."""
    given = params.get(name, [""])[0]
    if not given.strip():
        raise BadRequest(f'invalid parameter "{name}": it is missing')
    return given


def moment(params: Params, name: str, default: float) -> float:
    """A time in seconds since 1970, to the millisecond."""
    text = params.get(name, [""])[0]
    if not text:
        return round(default, 3)
    moment_s: float | None = None
    if _SECONDS.fullmatch(text):
        moment_s = float(text)
    elif text[:4].isdigit() and len(text) < 64:
        try:
            parsed = datetime.fromisoformat(text)
            moment_s = parsed.replace(tzinfo=parsed.tzinfo or UTC).timestamp()
        except (ValueError, OverflowError):
            moment_s = None
    if moment_s is None or not 0 <= moment_s <= _LAST_S:
        raise BadRequest(
            f'invalid parameter "{name}": cannot parse {text[:64]!r} to a valid timestamp'
        )
    return round(moment_s, 3)


def moments(params: Params) -> list[float]:
    """All times of a range query."""
    for name in ("start", "end", "step"):
        one(params, name)
    start_s, end_s = moment(params, "start", 0), moment(params, "end", 0)
    step_s = _step(params["step"][0])
    if end_s < start_s:
        raise BadRequest('invalid parameter "end": end timestamp must not be before start time')
    if step_s <= 0:
        raise BadRequest(
            'invalid parameter "step": zero or negative query resolution step widths are not '
            "accepted. Try a positive integer"
        )
    if (end_s - start_s) / step_s > MOST_STEPS:
        raise BadRequest(
            f"exceeded maximum resolution of {MOST_STEPS:,} points per timeseries. Try decreasing "
            "the query resolution (?step=XX)"
        )
    start_ms, step_ms = round(start_s * 1000), max(1, round(step_s * 1000))
    return [moment_ms / 1000 for moment_ms in range(start_ms, round(end_s * 1000) + 1, step_ms)]


def _step(text: str) -> float:
    if _STEP.fullmatch(text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if not match or not text:
        raise BadRequest(
            f'invalid parameter "step": cannot parse {text[:64]!r} to a valid duration'
        )
    return sum(int(number) * unit for number, unit in zip(match.groups(0), _UNITS_S, strict=True))


def limit(params: Params) -> int:
    """How many are returned at most; 0: as many as there may be."""
    text = params.get("limit", [""])[0]
    if not text or text == "0":
        return MOST_SERIES
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise BadRequest('invalid parameter "limit": it must be a whole number')
    return min(int(text), MOST_SERIES)


T = TypeVar("T")

V1 = "/api/v1"
API_VERSION = "2.53.0"
"""The Prometheus version whose API this is a part of; Grafana requests it."""
LABELS = (NAME, "entity_id", "kind", "label", "layer", "name")
_ERRORS = {400: "bad_data", 404: "not_found", 503: "unavailable"}


class PrometheusApi:
    """The handlers of Prometheus' API."""

    def __init__(self, pool: QueryPool, clock: Callable[[], float] = time.time) -> None:
        self._pool = pool
        self._clock = clock

    def routes(self) -> list[BaseRoute]:
        """The routes of the handlers."""
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
        """Give a handler its parameters; its errors are formatted as Prometheus does."""

        async def respond(request: Request) -> Response:
            try:
                data = await handler(request, await read_params(request))
            except RequestError as error:
                kind = _ERRORS.get(error.status, "internal")
                body = {"status": "error", "errorType": kind, "error": error.reason}
                return as_json(body, error.status, error.headers)
            return data if isinstance(data, Response) else _success(data)

        return respond

    async def _query(self, request: Request, params: Params) -> Any:
        parsed = await self._parsed(parse, one(params, "query"))
        moment_s = moment(params, "time", self._clock())
        if not isinstance(parsed, Selector):
            return {"resultType": "scalar", "result": [moment_s, _number(parsed)]}
        now_s = self._clock()

        def work(snapshot: Snapshot) -> dict[str, Any]:
            matching = sampled_series(snapshot, parsed, [moment_s], now_s)
            return {
                "resultType": "vector",
                "result": [
                    {"metric": line.labels, "value": [moment_s, _number(line.values[0])]}
                    for line in matching
                ],
            }

        return await self._ask(work)

    async def _query_range(self, request: Request, params: Params) -> Any:
        parsed = await self._parsed(parse, one(params, "query"))
        times = moments(params)
        now_s = self._clock()
        if not isinstance(parsed, Selector):
            values = [[item, _number(parsed)] for item in times]
            return {"resultType": "matrix", "result": [{"metric": {}, "values": values}]}

        def work(snapshot: Snapshot) -> dict[str, Any]:
            matching = sampled_series(snapshot, parsed, times, now_s)
            return {
                "resultType": "matrix",
                "result": [
                    {"metric": item.labels, "values": _pairs(times, item)} for item in matching
                ],
            }

        return await self._ask(work)

    async def _labels(self, request: Request, params: Params) -> Any:
        if not params.get("match[]"):
            return list(LABELS)
        return sorted({label for labels in await self._matching_series(params) for label in labels})

    async def _values(self, request: Request, params: Params) -> Any:
        name = request.path_params["name"]
        if name not in LABELS:
            return []
        if params.get("match[]"):
            matching = await self._matching_series(params)
            return sorted({labels[name] for labels in matching if labels.get(name)})
        return await self._ask(lambda snapshot: _all_values(snapshot, name))

    async def _series(self, request: Request, params: Params) -> Any:
        if not params.get("match[]"):
            raise BadRequest("no match[] parameter provided")
        return await self._matching_series(params)

    async def _matching_series(self, params: Params) -> list[dict[str, str]]:
        if len(params["match[]"]) > 20:
            raise BadRequest("more than 20 match[] are given")
        selectors = [await self._parsed(parse_selector, param) for param in params["match[]"]]
        end_s = moment(params, "end", self._clock())
        start_s = moment(params, "start", max(0.0, end_s - 86_400))
        if start_s > end_s:
            raise BadRequest("end timestamp must not be before start time")
        if end_s - start_s > 366 * 86_400:
            start_s = end_s - 366 * 86_400
        most = limit(params)

        def work(snapshot: Snapshot) -> list[dict[str, str]]:
            label_sets: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
            for selector in selectors:
                for labels in series(snapshot, selector, max(0.0, start_s), max(0.0, end_s), most):
                    label_sets[tuple(labels.items())] = labels
            return list(label_sets.values())[:most]

        return await self._pool.query(lambda store: store.read(work))

    async def _metadata(self, request: Request, params: Params) -> Any:
        wanted = params.get("metric", [""])[0]
        most = limit(params)

        def work(snapshot: Snapshot) -> dict[str, Any]:
            active = [metric for metric in snapshot.metrics() if metric.active]
            names = series_names(active)
            metadata = {
                names[metric.name]: [{"type": "gauge", "help": help_text(metric), "unit": ""}]
                for metric in active
                if not wanted or names[metric.name] == wanted
            }
            return dict(sorted(metadata.items())[:most])

        return await self._ask(work)

    async def _buildinfo(self, request: Request, params: Params) -> Any:
        return {
            "version": API_VERSION,
            "revision": f"batchmill {batchmill.__version__}",
            "branch": "",
            "buildUser": "",
            "buildDate": "",
            "goVersion": "",
            "application": "batchmill",
        }

    async def _parsed(self, how: Callable[[str], T], text: str) -> T:
        """Parse a query on a thread: its regular expressions may take a moment."""
        return await self._pool.run(lambda: how(text))

    async def _ask(self, work: Callable[[Snapshot], Any]) -> Response:
        """Query the store and encode the response, both on a thread: it may be large."""
        return await self._pool.query(lambda store: _success(store.read(work)))


def _success(data: Any) -> Response:
    return as_json({"status": "success", "data": data})


def _all_values(snapshot: Snapshot, name: str) -> list[str]:
    if name == NAME:
        return sorted(
            series_names([metric for metric in snapshot.metrics() if metric.active]).values()
        )
    if name == "label":
        return ["p50", "p75", "p90", "p95", "p99"]
    known = snapshot.find(most=MOST_SERIES)
    if name == "layer":
        layers = snapshot.layers(entity.key for entity in known)
        return sorted({",".join(sorted(layer)) for layer in layers.values()})
    return sorted({getattr(entity, "id" if name == "entity_id" else name) for entity in known})


def _pairs(times: list[float], line: SampledSeries) -> list[list[Any]]:
    return [
        [at_s, _number(value)]
        for at_s, value in zip(times, line.values, strict=True)
        if value is not None
    ]


def _number(value: float | None) -> str:
    """A number in Prometheus' notation."""
    if value is None or math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if value == int(value) and abs(value) < 2**53:
        return str(int(value))
    return json.dumps(value)
