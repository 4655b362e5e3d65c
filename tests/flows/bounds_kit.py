"""What the tests of full workers share: a worker that is busy, and threads that say they wait."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from batchmill.flows import Backpressure
from batchmill.flows import dispatcher as dispatcher_module
from batchmill.waiters import ThreadWaiter
from tests.flows.kit import Gate, Signal

BLOCK, DROP_OLDEST, DROP_NEWEST = (
    Backpressure.BLOCK,
    Backpressure.DROP_OLDEST,
    Backpressure.DROP_NEWEST,
)


@pytest.fixture
def lined_up(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released each time a thread has its place in line and is about to wait."""
    told = threading.Semaphore(0)

    class Telling(ThreadWaiter):
        def wait(self, timeout_s: float | None) -> bool:
            told.release()
            return super().wait(timeout_s)

    monkeypatch.setattr(dispatcher_module, "ThreadWaiter", Telling)
    return told


def hold(dispatcher: Any, gate: Gate, flow: str | None = "held") -> None:
    """Keep a worker busy with one signal of ``flow``."""
    assert dispatcher.dispatch(Signal(flow))
    gate.wait_entered()
