"""What the tests of the manager share: settings, and the fixtures ``manager`` and ``started``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from batchmill import BatchQueueManager, BatchQueueSettings, ThreadPolicy
from tests.kit.threads import WAIT_S, Gate

POOL = ("pool", ThreadPolicy.fixed(2))


def config(**settings: Any) -> BatchQueueSettings:
    """Settings of a queue with a thread of its own, unless told otherwise."""
    settings.setdefault("shutdown_timeout_ms", WAIT_S * 1000)
    if "shared_scheduler" not in settings:
        settings.setdefault("threads", ThreadPolicy.fixed(1))
    return BatchQueueSettings(**settings)


def pooled(**settings: Any) -> BatchQueueSettings:
    """Settings of a queue on the shared scheduler."""
    return config(**({"shared_scheduler": POOL} | settings))


def drain_threads(of: str) -> set[str]:
    """The names of the live threads of a queue or scheduler."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith(f"batchmill-{of}-")}


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
