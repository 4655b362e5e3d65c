"""A small order service with a queue, thresholds, a micro-batcher and flows, and one page for all.

    pip install 'batchmill[prometheus]'
    python -m examples.telemetry_prometheus
    prometheus --config.file=examples/telemetry_prometheus/prometheus.yml

Then ask Prometheus, at http://127.0.0.1:9090: the file has some questions. The service registers
nothing by hand but the collector: whatever components the process has are on the page.
"""

from __future__ import annotations

import argparse
import random
import signal
import threading
import time
from dataclasses import dataclass

import prometheus_client

from batchmill import BatchQueue, BatchQueueSettings, BufferStrategy, ThreadPolicy
from batchmill.batcher import BatcherSettings, MicroBatcher
from batchmill.flows import FlowDispatcher, FlowSettings
from batchmill.pressure import QueueThresholdSettings
from batchmill.telemetry import PrometheusCollector

PORT = 9400


@dataclass(frozen=True)
class Step:
    """What happens to an order: its steps are handled in order, those of others meanwhile."""

    order: int
    name: str


@dataclass(frozen=True)
class View:
    """A page that somebody looked at: counted in batches, and dropped when there are too many."""

    page: str


def ship(orders: list[int]) -> list[str]:
    """Send a batch of orders to the warehouse, which takes its time."""
    time.sleep(0.005)
    return [f"parcel for order {order}" for order in orders]


def serve(stop: threading.Event, orders_per_s: float) -> None:
    """Take orders until stopped."""
    chance = random.Random(7)
    views: BatchQueue[View] = BatchQueue(
        "views",
        BatchQueueSettings(
            threads=ThreadPolicy.fixed(1),
            buffer_size=1_000,
            strategy=BufferStrategy.IF_POSSIBLE,
            consumer=lambda batch: time.sleep(0.001),
        ),
    )
    warehouse: MicroBatcher[int] = MicroBatcher(
        ship,
        BatcherSettings(batch_size=50, linger_ms=100),
        QueueThresholdSettings(max_queue_size=500),
        name="warehouse",
    )

    def handle(steps: list[Step]) -> None:
        for step in steps:
            if step.name == "paid":
                warehouse.submit(step.order)

    orders: FlowDispatcher[Step] = FlowDispatcher(
        handle,
        FlowSettings(
            worker_count=2,
            flow_id=lambda step: step.order,
            finished=lambda step: step.name == "paid",
        ),
        name="orders",
    )
    with views, warehouse, orders:
        number = 0
        while not stop.wait(chance.expovariate(orders_per_s)):
            number += 1
            views.produce_many([View("/cart")] * chance.randrange(1, 40))
            for name in ("placed", "checked", "paid"):
                orders.dispatch(Step(number, name))


def main() -> None:
    """Serve orders and the page until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m examples.telemetry_prometheus")
    parser.add_argument("--port", type=int, default=PORT, help="0: any free one")
    parser.add_argument("--orders-per-s", type=float, default=50.0)
    given = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    prometheus_client.REGISTRY.register(PrometheusCollector())
    server, thread = prometheus_client.start_http_server(given.port, "127.0.0.1")
    print(f"http://127.0.0.1:{server.server_port}/metrics; Ctrl-C ends it", flush=True)
    serve(stop, given.orders_per_s)
    server.shutdown()
    server.server_close()
    thread.join()
    print("ended", flush=True)


if __name__ == "__main__":
    main()
