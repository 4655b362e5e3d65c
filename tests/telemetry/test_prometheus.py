"""What the collector gives prometheus_client. A real Prometheus scrapes it in tests/examples."""

from __future__ import annotations

import re
import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from batchmill import BatchQueueManager, BatchQueueSettings, ThreadPolicy
from batchmill.telemetry import Distribution, PrometheusCollector, Registry, default_registry
from batchmill.telemetry.exposition import TextFormat
from tests.kit.queues import make_queue, reds
from tests.kit.servers.prometheus import parsed
from tests.kit.threads import WAIT_S
from tests.telemetry.kit import Tool


def page(registry: Registry = default_registry) -> str:
    """The page of a registry in the plain text format."""
    return generate_latest(_collected(registry)).decode()


def _collected(registry: Registry = default_registry) -> CollectorRegistry:
    pages = CollectorRegistry()
    pages.register(PrometheusCollector(registry))
    return pages


def test_names_and_types_are_those_of_prometheus() -> None:
    """Counters end in _total, seconds and shares in their unit; labels name the component."""
    registry = Registry()
    times = Distribution((0.5, 10.0), (1, 2, 1), 33.5)
    tool = Tool(made=3, broken={"bent": 1}, depth=2, level=1, times=times)
    registry.register(tool)
    text = page(registry)
    values = parsed(text)
    drill = ("tool", "drill")
    assert values["batchmill_tool_made_parts_total", frozenset({drill})] == 3
    bent = frozenset({drill, ("reason", "bent")})
    assert values["batchmill_tool_broken_parts_total", bent] == 1
    assert values["batchmill_tool_depth", frozenset({drill})] == 2
    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in values.items()
        if name == "batchmill_tool_work_seconds_bucket"
    }
    assert buckets == {"0.5": 1, "10.0": 3, "+Inf": 4}
    assert values["batchmill_tool_work_seconds_count", frozenset({drill})] == 4
    assert values["batchmill_tool_work_seconds_sum", frozenset({drill})] == 33.5
    types = dict(re.findall(r"# TYPE (\S+) (\S+)", text))
    assert types["batchmill_tool_made_parts_total"] == "counter"
    assert types["batchmill_tool_work_seconds"] == "histogram"
    assert types["batchmill_tool_level"] == "gauge"


def test_openmetrics_accepts_the_page() -> None:
    """The stricter format, read back by the official parser, has the same values."""
    with make_queue("strict", consumer=lambda batch: None) as queue:
        queue.produce_many(reds(10))
        assert queue.flush(WAIT_S)
        pages = _collected()
        plain = parsed(generate_latest(pages).decode())
        text = generate_openmetrics(pages).decode()  # type: ignore[no-untyped-call]
        strict = parsed(text, TextFormat.OPENMETRICS)
    ours = {series for series in plain if ("queue", "strict") in series[1]}
    assert len(ours) > 10
    assert {series for series in strict if ("queue", "strict") in series[1]} == ours


def test_a_page_with_hundreds_of_queues() -> None:
    """Every queue is on it, made in good time, and its counters are exact."""
    manager = BatchQueueManager()
    shared = BatchQueueSettings(
        shared_scheduler=("many", ThreadPolicy.fixed(1)), consumer=lambda batch: None
    )
    names = [f"many-{number:03}" for number in range(300)]
    queues = [manager.create(name, shared) for name in names]
    for number, queue in enumerate(queues):
        queue.produce_many(reds(number))
    for queue in queues:
        assert queue.flush(WAIT_S)
    began = time.monotonic()
    values = parsed(page())
    took_s = time.monotonic() - began
    assert manager.shutdown_all()
    accepted = [
        values["batchmill_queue_accepted_items_total", frozenset({("queue", name)})]
        for name in names
    ]
    assert accepted == list(range(300))
    assert took_s < WAIT_S
