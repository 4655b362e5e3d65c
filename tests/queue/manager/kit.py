"""Settings of the manager's test queues, and the threads that they start."""

from __future__ import annotations

import threading
from typing import Any

from batchmill import BatchQueueSettings, ThreadPolicy
from tests.kit.threads import WAIT_S

POOL = ("pool", ThreadPolicy.fixed(2))


def config(**settings: Any) -> BatchQueueSettings:
    """Settings of a queue with a thread of its own, unless given."""
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
