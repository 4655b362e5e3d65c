"""The JSON API: each handler reads its parameters, asks at the desk, and shapes the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import batchmill
from batchmill.store import Snapshot
from batchmill.web.answers import as_json
from batchmill.web.api import lists, openapi, overview, service, topology
from batchmill.web.api.desk import Desk
from batchmill.web.api.lists import epoch
from batchmill.web.api.memory import Memory
from batchmill.web.api.params import checked, read_params
from batchmill.web.api.range import read_range
from batchmill.web.errors import Unavailable

V1 = "/api/v1"


class Api:
    """The handlers."""

    def __init__(
        self,
        desk: Desk,
        pipeline: Callable[[], Mapping[str, Any]] | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._desk = desk
        self._pipeline = pipeline
        self._clock = clock
        self._memory = Memory()

    def routes(self) -> list[BaseRoute]:
        """Where they are."""
        return [
            Route(f"{V1}/status", self.status),
            Route(f"{V1}/pipeline", self.pipeline),
            Route(f"{V1}/metrics", self.metrics),
            Route(f"{V1}/metrics/{{metric}}/values", self.values),
            Route(f"{V1}/entities", self.entities),
            Route(f"{V1}/services", self.services),
            # An id is base64, which may hold a slash.
            Route(f"{V1}/services/{{id:path}}", self.service),
            Route(f"{V1}/topology", self.topology),
            Route(f"{V1}/topn", self.topn),
            Route(f"{V1}/openapi.json", self.openapi),
        ]

    async def status(self, request: Request) -> Response:
        """Whether the store can be read, and how new it is."""
        read_params(request.query_params, ())
        fault: str | None = None
        newest: int | None = None
        try:
            newest = await self._desk.ask(lambda store: store.newest_minute())
        except Unavailable as error:
            fault = error.reason
        return as_json(
            {
                "version": batchmill.__version__,
                "now": int(self._clock()),
                "store": {"ok": fault is None, "fault": fault},
                "newest_minute": None if newest is None else epoch(newest),
                "answers": dict(self._desk.answers),
            }
        )

    async def pipeline(self, request: Request) -> Response:
        """What the processes of the run tell of themselves."""
        if self._pipeline is None:
            raise Unavailable(
                "this server knows no run: start it with the run's folder, as batchmill run does"
            )
        return as_json(await self._desk.run(self._pipeline))

    async def services(self, request: Request) -> Response:
        """All services over a range."""
        question = overview.Question.read(self._params(request, overview.PARAMS), self._clock())
        memory = self._memory
        return await self._answer(lambda snapshot: overview.services(snapshot, question, memory))

    async def service(self, request: Request) -> Response:
        """One service over a range."""
        given = checked("id", request.path_params["id"])
        wanted = read_range(self._params(request, service.PARAMS), self._clock())
        return await self._answer(lambda snapshot: service.service(snapshot, given, wanted))

    async def topology(self, request: Request) -> Response:
        """Who calls whom."""
        params = self._params(request, topology.PARAMS)
        wanted = read_range(params, self._clock())
        layer = params.get("layer")
        return await self._answer(lambda snapshot: topology.topology(snapshot, wanted, layer))

    async def metrics(self, request: Request) -> Response:
        """What is measured."""
        self._params(request, ())
        return await self._answer(lists.metrics)

    async def values(self, request: Request) -> Response:
        """The values of a metric."""
        name = checked("metric", request.path_params["metric"])
        params = self._params(request, lists.VALUE_PARAMS)
        wanted = read_range(params, self._clock())
        return await self._answer(lambda snapshot: lists.values(snapshot, name, wanted, params))

    async def entities(self, request: Request) -> Response:
        """What is measured about."""
        params = self._params(request, lists.ENTITY_PARAMS)
        return await self._answer(lambda snapshot: lists.entities(snapshot, params))

    async def topn(self, request: Request) -> Response:
        """The slowest calls."""
        params = self._params(request, lists.TOPN_PARAMS)
        wanted = read_range(params, self._clock())
        return await self._answer(lambda snapshot: lists.topn(snapshot, wanted, params))

    async def openapi(self, request: Request) -> Response:
        """What may be asked."""
        return as_json(openapi.document())

    def _params(self, request: Request, known: Collection[str]) -> dict[str, str]:
        return read_params(request.query_params, known)

    async def _answer(self, work: Callable[[Snapshot], Any]) -> Response:
        return await self._desk.ask(lambda store: as_json(store.read(work)))
