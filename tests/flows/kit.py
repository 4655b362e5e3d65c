"""What the tests of the flow dispatcher share: signals, settings, a dispatcher that always ends."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from batchmill.flows import Backpressure, FlowDispatcher, FlowSettings, FlowStats
from tests.kit.threads import WAIT_S, Gate

LOGGER = "batchmill.flows"
BLOCK, DROP_OLDEST, DROP_NEWEST = (
    Backpressure.BLOCK,
    Backpressure.DROP_OLDEST,
    Backpressure.DROP_NEWEST,
)


@dataclass(frozen=True, slots=True)
class Signal:
    flow: Any
    number: int = 0
    last: bool = False


def signals(flow: object, count: int, start: int = 0) -> list[Signal]:
    """So many signals of a flow, numbered in the order in which they should be handled."""
    return [Signal(flow, number) for number in range(start, start + count)]


def config(**settings: Any) -> FlowSettings:
    """Settings for :class:`Signal`: one worker, one signal a call, no buffer, unless given."""
    settings = {
        "worker_count": 1,
        "ingress_capacity": 0,
        "batch_max": 1,
        "flow_id": operator.attrgetter("flow"),
        "finished": operator.attrgetter("last"),
        **settings,
    }
    return FlowSettings(**settings)


class Recorder:
    """A handler that keeps every batch."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def __call__(self, batch: list[Any]) -> None:
        self.batches.append(batch)

    @property
    def items(self) -> list[Any]:
        return [signal for batch in self.batches for signal in batch]


@contextlib.contextmanager
def dispatching(handler: Callable[[list[Any]], object], **settings: Any) -> Iterator[Any]:
    """A dispatcher that always ends, and with it the gate that may hold it up."""
    names = ("error_handler", "clock", "name")
    extras = {name: settings.pop(name) for name in names if name in settings}
    dispatcher: FlowDispatcher[Any] = FlowDispatcher(handler, config(**settings), **extras)
    try:
        yield dispatcher
    finally:
        if isinstance(handler, Gate):
            handler.open()
        dispatcher.close(WAIT_S)


def assert_balanced(stats: FlowStats) -> None:
    """Every signal that was let in is in exactly one place."""
    gone = sum(stats.evicted.values()) + stats.unprocessed
    assert stats.dispatched == stats.handled + stats.failed + gone + stats.pending
    forgotten = stats.completed_flows + stats.expired_flows + stats.displaced_flows
    assert stats.assigned_flows == forgotten + stats.active_flows


def hold(dispatcher: Any, gate: Gate, flow: str | None = "held") -> None:
    """Keep a worker busy with one signal of ``flow``."""
    assert dispatcher.dispatch(Signal(flow))
    gate.wait_entered()
