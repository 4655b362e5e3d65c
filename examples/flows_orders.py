"""Flows for orders: the steps of an order in order, different orders at the same time.

Four threads receive events of orders, as from four connections. The handler of a step waits for
another system (here: sleeps for a millisecond), so the workers overlap. An order ends with
"delivered" or "cancelled"; then the dispatcher forgets it. One order sends a step that cannot be:
the error handler gets it, and the other orders go on.

Prints:

    200 orders, 799 steps handled, 1 failed: order-7 cannot be refunded
    every order in order: True
    flows: 200 assigned, 200 completed, 0 active
    dropped: 0, still queued: 0
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from batchmill.flows import Backpressure, FlowDispatcher, FlowSettings

STEPS = ("placed", "paid", "packed", "delivered")


@dataclass(frozen=True)
class OrderEvent:
    order: str
    step: str


class Orders:
    """What happened to each order. No lock: one order is with one worker at a time."""

    def __init__(self) -> None:
        self.steps: defaultdict[str, list[str]] = defaultdict(list)
        self.failures: list[str] = []

    def consume(self, batch: list[OrderEvent]) -> None:
        for event in batch:
            if event.step not in STEPS:
                raise ValueError(f"{event.order} cannot be {event.step}")
            time.sleep(0.001)
            self.steps[event.order].append(event.step)

    def on_error(self, batch: list[OrderEvent], error: BaseException) -> None:
        self.failures.append(str(error))


def receive(dispatcher: FlowDispatcher[OrderEvent], connection: int) -> None:
    """The events of every fourth order, all orders of the connection interleaved."""
    for step in STEPS:
        for number in range(connection, 200, 4):
            wrong = (number, step) == (7, "packed")
            dispatcher.dispatch(OrderEvent(f"order-{number}", "refunded" if wrong else step))


orders = Orders()
settings = FlowSettings(
    worker_count=8,
    batch_max=1,  # so that a failure is one step, not a batch of them
    worker_queue_capacity=16,
    ingress_capacity=100,
    backpressure=Backpressure.BLOCK,
    flow_id=lambda event: event.order,
    finished=lambda event: event.step in ("delivered", "cancelled"),
)
with FlowDispatcher(orders, settings, error_handler=orders, name="orders") as dispatcher:
    threads = [threading.Thread(target=receive, args=(dispatcher, n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

stats = dispatcher.stats()
[failure] = orders.failures
print(
    f"{len(orders.steps)} orders, {stats.handled} steps handled, {stats.failed} failed: {failure}"
)
in_order = all(steps == sorted(steps, key=STEPS.index) for steps in orders.steps.values())
print(f"every order in order: {in_order}")
print(
    f"flows: {stats.assigned_flows} assigned, {stats.completed_flows} completed,"
    f" {stats.active_flows} active"
)
print(f"dropped: {sum(stats.dropped.values())}, still queued: {stats.queued}")
