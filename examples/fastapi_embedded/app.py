"""A FastAPI service that computes its own metrics: rate, latency and success of every route.

    pip install 'batchmill[aggregate,cli,web]' fastapi uvicorn
    STORE=sqlite:///metrics.db uvicorn examples.fastapi_embedded.app:app --workers 2

    curl http://127.0.0.1:8000/products/7
    batchmill query route_p --store sqlite:///metrics.db --from -10m
    batchmill web --store sqlite:///metrics.db

Every worker process has an Embedded of its own; all of them write to the one store.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from fastapi import FastAPI, HTTPException, Request, Response

from batchmill import Embedded
from batchmill.sources import endpoint, source

OAL = """
route_cpm    = from(RouteCall.*).cpm();
route_avg    = from(RouteCall.ms).longAvg();
route_p      = from(RouteCall.ms).percentile2(1);
route_sla    = from(RouteCall.*).percent(ok == true);
route_status = from(RouteCall.*).labelCount(status);
"""


@source(entity=endpoint("service", "route"))
@dataclass(frozen=True)
class RouteCall:
    """A request that was answered."""

    time: datetime
    service: str
    route: str
    ms: int
    ok: bool
    status: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the store when a worker starts, and commit what is left when it ends."""
    store = os.environ.get("STORE", "sqlite:///metrics.db")
    async with Embedded(oal=OAL, store=store, name="shop") as mill:
        app.state.mill = mill
        yield


app = FastAPI(lifespan=lifespan)


@app.middleware("http")
async def count(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Emit an event for each request; that takes microseconds, and never waits for the store."""
    start, begun_s, status = datetime.now(UTC), time.perf_counter(), 500
    try:
        response = await call_next(request)
        status = response.status_code
        return response
    finally:
        route = request.scope.get("route")  # as it was declared: /products/{number}, not each one
        name = f"{request.method} {route.path if route else 'unknown'}"
        ms = int((time.perf_counter() - begun_s) * 1000)
        mill: Embedded = request.app.state.mill
        mill.emit(RouteCall(start, "shop", name, ms, status < 500, str(status)))


@app.get("/products/{number}")
async def product(number: int) -> dict[str, object]:
    """A product; those from 100 on do not exist."""
    if number >= 100:
        raise HTTPException(404)
    return {"number": number, "cents": 10 * number}


@app.post("/orders")
async def order(numbers: list[int]) -> dict[str, int]:
    """Order products; an order without any is a bug that this service has."""
    return {"cents": 10 * sum(numbers), "average": 10 * sum(numbers) // len(numbers)}


@app.get("/stats")
async def stats(request: Request) -> dict[str, int]:
    """What became of the events of this worker."""
    mill: Embedded = request.app.state.mill
    counts = mill.stats()
    return {"accepted": counts.accepted, "committed": counts.committed, "failed": counts.failed}
