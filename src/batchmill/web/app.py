"""The ASGI application: all routes behind one guard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from batchmill.http import Access
from batchmill.run import StatusReader
from batchmill.telemetry.exposition import TextFormat, render_telemetry
from batchmill.traces import SpanReader
from batchmill.web import pages
from batchmill.web.api.handlers import Api
from batchmill.web.api.traces import TracesApi
from batchmill.web.jaeger import JaegerApi
from batchmill.web.live import Live
from batchmill.web.meaning import MetricNames
from batchmill.web.promql.api import PrometheusApi
from batchmill.web.query_pool import QueryPool
from batchmill.web.responses import HEALTH, METRICS, Guard, RequestError, refused


def make_app(
    store_url: str,
    *,
    access: Access | None = None,
    run: StatusReader | None = None,
    hosts: Collection[str] = (),
    traces: Path | None = None,
    normalise_names: bool = True,
) -> Starlette:
    """The ASGI application for the store at ``store_url``, which need not exist yet.

    With a token in ``access``, ``/metrics`` and everything under ``/api`` require it; the static
    files contain no data. ``run`` reads the status of a run for the pipeline page; None without a
    run. ``hosts`` are the host names that requests may use; empty for any. ``traces`` is the folder
    of kept spans; None if there is none. ``normalise_names``: as the pipeline has it.
    """
    pool = QueryPool(store_url)
    live = Live(pool, run)
    names = MetricNames(normalise=normalise_names)
    reader = None if traces is None else SpanReader(traces, names)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            live.close()
            pool.close()

    app = Starlette(
        routes=[
            *Api(pool, run, reader).routes(),
            *TracesApi(pool, reader, names).routes(),
            *JaegerApi(pool, reader).routes(),
            *PrometheusApi(pool).routes(),
            *live.routes(),
            Route(METRICS, _metrics, methods=["GET"]),
            Route(HEALTH, _health, methods=["GET"]),
            *pages.routes(),
        ],
        middleware=[Middleware(Guard, access=access or Access(), hosts=hosts)],
        exception_handlers={RequestError: refused, HTTPException: pages.not_found},
        lifespan=lifespan,
    )
    app.state.pool = pool
    app.state.live = live  # the server closes it before it waits for open requests
    return app


async def _metrics(request: Request) -> Response:
    """The components of this process, for Prometheus."""
    text_format = TextFormat.accepted(request.headers.get("accept", ""))
    body = await asyncio.to_thread(render_telemetry, text_format)
    return Response(body, headers={"content-type": text_format.value})


async def _health(request: Request) -> Response:
    """That this process answers."""
    return PlainTextResponse("ok\n")
