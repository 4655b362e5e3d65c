from __future__ import annotations

import threading

import pytest

from batchmill.flows import dispatcher
from batchmill.waiters import ThreadWaiter


@pytest.fixture
def about_to_wait(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released each time a thread is about to wait, for room or for the end."""
    waits = threading.Semaphore(0)

    class CountedWaiter(ThreadWaiter):
        def wait(self, timeout_s: float | None) -> bool:
            waits.release()
            return super().wait(timeout_s)

    monkeypatch.setattr(dispatcher, "ThreadWaiter", CountedWaiter)
    return waits
