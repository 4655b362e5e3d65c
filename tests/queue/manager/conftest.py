"""Fixtures of the manager's tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from batchmill import BatchQueueManager
from tests.kit.threads import Gate


@pytest.fixture
def manager() -> Iterator[BatchQueueManager]:
    """A manager of the test's own, whose queues end with it."""
    made = BatchQueueManager()
    yield made
    Gate.open_all()
    made.shutdown_all()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads started from now on."""
    names: list[str] = []
    start = threading.Thread.start

    def watched_start(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", watched_start)
    return names
