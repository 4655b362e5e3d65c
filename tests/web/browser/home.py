"""A run's folder that has something for every page: metrics, alerts, kept spans, a status.

The metrics are those of :func:`tests.web.entities_kit.write_shop`; the kept spans are of calls that
these count.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from batchmill.alerts import AlertEngine, AlertSettings, load_rules
from batchmill.files import write_json
from batchmill.run import Home
from batchmill.sources import endpoint_id, instance_id, service_id
from batchmill.store import open_store
from batchmill.traces import SpanKeeper
from tests.kit.traces.segments import HOUR, made_span, write_spans
from tests.web.entities_kit import (
    CACHE,
    CHECKOUT,
    DATABASE,
    GATEWAY,
    QUEUE,
    STATEMENT,
    TRACE,
    write_shop,
)

BEGIN = int(time.time()) // 3600 * 3600 - 2 * 3600
"""The hour that the shop is open; it is over."""
SLOW = int(TRACE, 16)
"""The trace of the slow statement."""
QUICK, OTHER_INSTANCE, OF_THE_CALLER = 1, 2, 3
"""Traces: of quick calls; of another instance of the callee; and of a slow call that the caller
serves without a call of its own."""
RULES = """
[[rule]]
name = "slow"
expression = "service_resp_time"
comparison = "> 15"
message = "{name} takes {value} ms"
"""
_ENDPOINT = endpoint_id(CHECKOUT, "POST /checkout")
_INSTANCE = instance_id(CHECKOUT, "checkout-1")
_ENDS = f"{endpoint_id(GATEWAY, 'GET /')}-{_ENDPOINT}".replace("_", "-")
PAGES = {
    "services": "services",
    "service": f"service/{quote(CHECKOUT)}",
    "endpoint": f"endpoint/{quote(_ENDPOINT)}",
    "instance": f"instance/{quote(_INSTANCE)}",
    "database": f"database/{quote(DATABASE)}",
    "cache": f"cache/{quote(CACHE)}",
    "queue": f"queue/{quote(QUEUE)}",
    "topic": f"topic/{quote(endpoint_id(QUEUE, 'orders'))}",
    "relation": f"relation/{quote(GATEWAY)}-{quote(CHECKOUT)}",
    "endpoint-relation": f"endpoint-relation/{quote(_ENDS)}",
    "instance-relation": (
        f"instance-relation/{quote(instance_id(GATEWAY, 'gateway-1'))}-{quote(_INSTANCE)}"
    ),
    "own": f"service/{quote(service_id('Berlin', True))}",
    "explore": "explore",
    "topology": "topology",
    "traces": "traces",
    "trace": f"trace/{TRACE}",
    "alerts": "alerts",
    "pipeline": "pipeline",
}
HEADINGS = {name: name.capitalize() for name in PAGES} | {
    "service": "checkout",
    "endpoint": "POST /checkout",
    "instance": "checkout-1",
    "database": "orders-db",
    "cache": "redis",
    "queue": "kafka",
    "topic": "orders",
    "relation": "checkout",
    "endpoint-relation": "POST /checkout",
    "instance-relation": "checkout-1",
    "own": "Berlin",
    "trace": "gateway GET /",
}
SHOWN = dict.fromkeys(PAGES, ".chart canvas") | {
    "services": "table.services tbody tr",
    "topology": ".map a.node",
    "traces": ".found li",
    "trace": ".waterfall .row",
    "alerts": "#alerts-firing",
    "pipeline": ".bars g",
}
"""What a page shows if it has its data."""


def trace_id(trace: int) -> str:
    """As an address has it."""
    return f"{trace:032x}"


def full_home(folder: Path) -> Home:
    """Make one."""
    home = Home(folder / "home")
    home.prepare()
    write_shop(home.store_url, BEGIN)
    rules = folder / "alerts.toml"
    rules.write_text(RULES)
    times = [BEGIN + 80.0]
    with open_store(home.store_url) as store:
        settings = AlertSettings()
        with AlertEngine(
            store, load_rules(rules).rules, settings=settings, clock=lambda: times[-1]
        ) as engine:
            engine.evaluate()
            times.append(BEGIN + 3700.0)
            engine.evaluate()
    keeper = SpanKeeper(home.traces)
    keeper.take(write_spans(folder, "made", shop_spans()))
    keeper.tend(everything=True)
    write_json(home.ingest, ingest_status(received=1000))
    home.checkpoint.mkdir(exist_ok=True)
    write_json(home.progress, progress_status())
    return home


def shop_spans() -> list[dict[str, Any]]:
    """Four traces, ten minutes after the hour began."""
    first = (BEGIN - HOUR + 600) * 1000
    client: dict[str, Any] = {"service": "checkout", "kind": "CLIENT"}
    query: dict[str, Any] = {"db__system__name": "postgresql", "db__query__text": STATEMENT}
    sent: dict[str, Any] = {
        "messaging__system": "kafka",
        "messaging__destination__name": "orders",
        "peer__service": "kafka",
    }
    spans = [
        _of_gateway(SLOW, first, 950),
        _of_gateway(SLOW, first + 2, 945, span=2, parent=1, kind="CLIENT", name="POST"),
        _served(SLOW, first + 4, 940, parent=2),
        made_span(SLOW, 4, 3, at_ms=first + 10, took_ms=900, name="SELECT orders",
                  peer__service="orders-db", **client, **query),
        _of_gateway(QUICK, first + 5000, 12),
        _served(QUICK, first + 5001, 10, parent=1),
        made_span(QUICK, 4, 3, at_ms=first + 5002, took_ms=2, name="GET",
                  peer__service="redis", db__system__name="redis", **client),
        made_span(QUICK, 5, 3, at_ms=first + 5005, took_ms=1, name="orders publish",
                  **client | {"kind": "PRODUCER"}, **sent),
        _served(OTHER_INSTANCE, first + 9000, 500),
        _of_gateway(OF_THE_CALLER, first + 12_000, 2000),
    ]  # fmt: skip
    spans[-2]["resource"] = {"service.name": "checkout", "service.instance.id": "checkout-2"}
    return spans


def _of_gateway(
    trace: int, at_ms: float, took_ms: float, span: int = 1, **more: Any
) -> dict[str, Any]:
    """A span of the gateway."""
    return made_span(trace, span, at_ms=at_ms, took_ms=took_ms, service="gateway", **more)


def _served(trace: int, at_ms: float, took_ms: float, **more: Any) -> dict[str, Any]:
    """A call that the checkout served."""
    own = {"service": "checkout", "name": "POST /checkout", **more}
    return made_span(trace, 3, at_ms=at_ms, took_ms=took_ms, **own)


def ingest_status(received: int) -> dict[str, Any]:
    """The contents of the status file of ingest."""
    partitions = [(0, 20), (1, 20), (6, 20), (12, 20), (19, 20), *[(0, 20)] * 35]
    queue = {
        "name": "EVENTS",
        "kind": "queue",
        "depth": 38,
        "capacity": 800,
        "partitions": [{"depth": used, "capacity": of} for used, of in partitions],
        "threads": [{"name": "EVENTS-0", "load": 0.25}, {"name": "EVENTS-1", "load": 0.75}],
        "moves": 14,
        "last_moves": ["05:04:10 partition 3: thread 0 → 1"],
        "accepted": 90,
        "rejected": {"full": 3},
    }
    flows = {
        "name": "orders",
        "kind": "flows",
        "depth": 3,
        "capacity": 20,
        "partitions": [{"depth": 3, "capacity": 10}, {"depth": 0, "capacity": 10}],
        "threads": [],
        "moves": 0,
        "last_moves": [],
        "accepted": 7,
        "rejected": {},
        "flows": {"active": 12, "assigned": 345, "completed": 333},
    }
    jdbc = {
        "name": "jdbc",
        "level": "CRITICAL",
        "value": 130,
        "warning": 60,
        "critical": 120,
        "critical_plus": 180,
        "decisions": {"critical reject": 4},
    }
    mib = 2**20
    levels = {"warning": 256 * mib, "critical": 512 * mib, "critical_plus": 1024 * mib}
    measure = {"name": "unread bytes", "value": 300 * mib, **levels}
    return {
        "pid": os.getpid(),
        "received_spans": received,
        "acknowledged_spans": received,
        "rejected": {"no trace id": 12},
        "requests": {"http ok": 40},
        "level": "WARNING",
        "queues": [queue, flows],
        "levels": [jdbc],
        "thresholds": {"level": "WARNING", "why": "", "measures": [measure]},
    }


def progress_status() -> dict[str, Any]:
    """The contents of the progress file of the pipeline."""
    phases = {"read": 1.0, "commit": 0.5}
    batch = {"rows": 10, "segments": 1, "seconds": 1.5, "phases": phases}
    return {
        "last_batch": 1,
        "spans": 900,
        "written_at": time.time() + 3600,  # however long the test takes
        "catch_up_s": 250.0,
        "running": {"batch": 2, "since": 0.0, "seconds": 720.0, "usual_s": 10.0},
        "new_lag_s": 6.2,
        "left_out": {"duplicates": {"delivered again": 7}},
        "overflow": [
            {
                "source": "Endpoint",
                "parent": "endpoints of shop",
                "names": 412,
                "rows": 5000,
                "example": "GET /aqzrt",
            }
        ],
        "batches": [{"batch": n, "at": time.time(), **batch} for n in range(2)],
    }
