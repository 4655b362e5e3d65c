"""The handlers of the JSON API: read parameters, query the store on the pool, return JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import batchmill
from batchmill.run import StatusReader
from batchmill.store import Snapshot, Store
from batchmill.traces import SpanReader
from batchmill.web import openapi
from batchmill.web.api import alerts, entity, listing, overview, service, topology
from batchmill.web.api.listing import epoch
from batchmill.web.api.measures import MeasureCache
from batchmill.web.api.parameters import checked, read_list, read_params, read_range
from batchmill.web.query_pool import QueryPool
from batchmill.web.responses import Unavailable, as_json

V1 = "/api/v1"


class Api:
    """The handlers of ``/api/v1``."""

    def __init__(
        self,
        pool: QueryPool,
        run: StatusReader | None,
        spans: SpanReader | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._spans = spans
        self._pool = pool
        self._run = run
        self._clock = clock
        self._cache = MeasureCache()

    def routes(self) -> list[BaseRoute]:
        """The routes of the handlers."""
        return [
            Route(f"{V1}/status", self.status),
            Route(f"{V1}/pipeline", self.pipeline),
            Route(f"{V1}/metrics", self.metrics),
            Route(f"{V1}/metrics/{{metric}}/values", self.values),
            Route(f"{V1}/entities", self.entities),
            Route(f"{V1}/entities/{{kind}}/{{id:path}}", self.entity),
            Route(f"{V1}/services", self.services),
            # An id is base64, which may hold a slash.
            Route(f"{V1}/services/{{id:path}}", self.service),
            Route(f"{V1}/topology", self.topology),
            Route(f"{V1}/topn", self.topn),
            Route(f"{V1}/alerts", self.alerts),
            Route(f"{V1}/openapi.json", self.openapi),
        ]

    async def status(self, request: Request) -> Response:
        """Whether the store can be read, and how new it is."""
        read_params(request.query_params, ())
        fault: str | None = None
        newest: int | None = None
        url: str | None = None
        try:
            newest, url = await self._pool.query(
                lambda store: (store.newest_minute(), _address(store))
            )
        except Unavailable as error:
            fault = error.reason
        return as_json(
            {
                "version": batchmill.__version__,
                "now_s": int(self._clock()),
                "store": {"ok": fault is None, "fault": fault, "url": url},
                "newest_minute_s": None if newest is None else epoch(newest),
                "answers": dict(self._pool.answers),
            }
        )

    async def pipeline(self, request: Request) -> Response:
        """The state of the run's processes."""
        run = self._run
        if run is None:
            raise Unavailable("this server has no run: start it with --home, as batchmill run does")
        return as_json(await self._pool.run(lambda: run.read().as_json()))

    async def services(self, request: Request) -> Response:
        """All services over a range."""
        query = overview.ServicesQuery.read(self._params(request, overview.PARAMS), self._clock())
        cache = self._cache
        return await self._respond(lambda snapshot: overview.services(snapshot, query, cache))

    async def service(self, request: Request) -> Response:
        """One service over a range."""
        given = checked("id", request.path_params["id"])
        time_range = read_range(self._params(request, service.PARAMS), self._clock())
        return await self._respond(lambda snapshot: service.service(snapshot, given, time_range))

    async def topology(self, request: Request) -> Response:
        """The calls between services."""
        params = self._params(request, topology.PARAMS)
        time_range = read_range(params, self._clock())
        layer = params.get("layer")
        return await self._respond(lambda snapshot: topology.topology(snapshot, time_range, layer))

    async def metrics(self, request: Request) -> Response:
        """All metrics."""
        self._params(request, ())
        return await self._respond(listing.metrics)

    async def values(self, request: Request) -> Response:
        """The values of a metric."""
        name = checked("metric", request.path_params["metric"])
        params = read_params(request.query_params, listing.VALUE_PARAMS, ("entity",))
        chosen = read_list(request.query_params, "entity", listing.MOST_CHOSEN)
        time_range = read_range(params, self._clock())
        return await self._respond(
            lambda snapshot: listing.values(snapshot, name, time_range, params, chosen)
        )

    async def entities(self, request: Request) -> Response:
        """All entities."""
        params = self._params(request, listing.ENTITY_PARAMS)
        return await self._respond(lambda snapshot: listing.entities(snapshot, params))

    async def entity(self, request: Request) -> Response:
        """One entity over a range."""
        kind = checked("kind", request.path_params["kind"])
        given = checked("id", request.path_params["id"])
        time_range = read_range(self._params(request, entity.PARAMS), self._clock())
        return await self._respond(
            lambda snapshot: entity.entity(snapshot, kind, given, time_range, self._spans)
        )

    async def topn(self, request: Request) -> Response:
        """The slowest calls."""
        params = self._params(request, listing.TOPN_PARAMS)
        time_range = read_range(params, self._clock())
        return await self._respond(lambda snapshot: listing.topn(snapshot, time_range, params))

    async def alerts(self, request: Request) -> Response:
        """Alerts and their rules."""
        params = self._params(request, alerts.PARAMS)
        time_range = read_range(params, self._clock())
        return await self._respond(lambda snapshot: alerts.alerts(snapshot, time_range, params))

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document."""
        return as_json(openapi.document())

    def _params(self, request: Request, known: Collection[str]) -> dict[str, str]:
        return read_params(request.query_params, known)

    async def _respond(self, work: Callable[[Snapshot], Any]) -> Response:
        return await self._pool.query(lambda store: as_json(store.read(work)))


def _address(store: Store) -> str:
    """The store's address in any folder: a command that is copied from the pages has it."""
    scheme, _, path = store.url.partition(":///")
    return f"{scheme}:///{Path(path).absolute()}" if scheme == "sqlite" else store.url
