"""What the collector gives prometheus_client, and a real Prometheus that scrapes it."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from batchmill import BatchQueueManager, BatchQueueSettings, ThreadPolicy
from batchmill.telemetry import Distribution, PrometheusCollector, Registry, default_registry
from batchmill.telemetry.exposition import TextFormat
from tests.kit.queues import make_queue, reds
from tests.kit.servers.prometheus import parsed, running_prometheus
from tests.kit.threads import WAIT_S, until
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
    assert strict.keys() == plain.keys()


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


@pytest.mark.slow
def test_a_real_prometheus_scrapes_an_applications_page(tmp_path: Path) -> None:
    """prometheus_client's own server, our collector, and rates that PromQL computes of it."""
    pages = _collected()
    server, thread = start_http_server(0, "127.0.0.1", pages)
    assert isinstance(server, WSGIServer)
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join)
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        target = f"127.0.0.1:{server.server_port}"
        prometheus = stack.enter_context(running_prometheus(tmp_path / "prometheus", target))
        queue = stack.enter_context(make_queue("scraped", consumer=lambda batch: None))
        queue.produce_many(reds(1_000))
        assert queue.flush(WAIT_S)
        query = 'batchmill_queue_consumed_items_total{queue="scraped"}'
        until(lambda: [v for _, v in prometheus.query(query)] == [1_000], "it was scraped")
        mean = 'batchmill_queue_batch_size_sum{queue="scraped"}'
        assert [value for _, value in prometheus.query(mean)] == [1_000]
        up = prometheus.query('up{job="batchmill"}')
        assert [value for _, value in up] == [1]
