"""Queues by name, and the schedulers they share."""

from __future__ import annotations

import logging
import threading
from typing import Any

from batchmill import lifecycle
from batchmill.cores import available_cores
from batchmill.errors import QueueClosedError, QueueConflictError, QueueExistsError
from batchmill.queue.core import QueueCore
from batchmill.queue.queue import BatchQueue
from batchmill.queue.scheduler import Scheduler
from batchmill.queue.settings import BatchQueueSettings, ThreadPolicy

log = logging.getLogger("batchmill.queue")


class BatchQueueManager:
    """A registry of named queues and of the schedulers they share; any thread may use it.

    A shared scheduler is made when the first queue names it and ends with the last one that used
    it. ``batchmill.default_manager`` is the process-wide manager.
    """

    fork_order = 0  # a queue that was closing when the process forked needs it

    def __init__(self) -> None:
        # Reentrant: creating a queue may log, and a log handler may use the manager.
        self._lock = threading.RLock()
        self._queues: dict[str, BatchQueue[Any]] = {}
        self._schedulers: dict[str, tuple[ThreadPolicy, Scheduler]] = {}
        self._shutting_down = 0
        lifecycle.track(self)

    def create(self, name: str, config: BatchQueueSettings) -> BatchQueue[Any]:
        """Make a queue of that name; a name that is taken raises and starts nothing."""
        with self._lock:
            if self._running(name) is not None:
                raise QueueExistsError(name)
            return self._make(name, config)

    def get_or_create(self, name: str, config: BatchQueueSettings) -> BatchQueue[Any]:
        """The queue of that name, made with ``config`` if there is none: the first call decides.

        A later call that wants a direct consumer where there are handlers, or the reverse, raises.
        Other settings that differ are ignored with a warning.
        """
        with self._lock:
            queue = self._running(name)
            if queue is None:
                return self._make(name, config)
        _compare(name, queue.config, config)
        return queue

    def get(self, name: str) -> BatchQueue[Any] | None:
        """The running queue of that name, or None."""
        with self._lock:
            return self._running(name)

    def _running(self, name: str) -> BatchQueue[Any] | None:
        """The queue of that name, unless it was shut down (it may still hang in a handler)."""
        queue = self._queues.get(name)
        return queue if queue is not None and queue.running else None

    def names(self) -> tuple[str, ...]:
        """The names of the running queues, oldest first."""
        with self._lock:
            return tuple(name for name in self._queues if self._running(name) is not None)

    def shutdown(self, name: str) -> bool:
        """Shut one queue down and remove it; False when there is none, or it was not in time."""
        with self._lock:
            queue = self._queues.pop(name, None)
        return queue is not None and queue.shutdown()

    def shutdown_all(self) -> bool:
        """Stop all queues, then drain all, then end the schedulers; True when all were in time.

        No queue can be created meanwhile. All queues stop before the first is waited for, so the
        call takes as long as the slowest queue, not as long as all of them in turn.
        """
        with self._lock:
            self._shutting_down += 1
            queues = list(self._queues.values())
        try:
            for queue in queues:
                queue._core.begin_close()
            in_time = [queue._await_drain(queue._core.deadline) for queue in queues]
            return all(in_time)
        finally:
            with self._lock:
                self._shutting_down -= 1
                for queue in queues:
                    self._remove(queue._core)

    def _make(self, name: str, config: BatchQueueSettings) -> BatchQueue[Any]:
        if self._shutting_down:
            raise QueueClosedError("manager", f"creating queue {name!r}")
        scheduler = None
        if config.shared_scheduler is not None:
            scheduler = self._shared(*config.shared_scheduler)
        try:
            queue: BatchQueue[Any] = BatchQueue(
                name, config, scheduler=scheduler, on_done=self._queue_done
            )
        except BaseException:
            if scheduler is not None and not scheduler.users and config.shared_scheduler:
                del self._schedulers[config.shared_scheduler[0]]
            raise
        self._queues[name] = queue
        return queue

    def _shared(self, name: str, policy: ThreadPolicy) -> Scheduler:
        if name not in self._schedulers:
            cores = available_cores()
            self._schedulers[name] = (policy, Scheduler(name, policy.resolve(cores), cores))
        first_policy, scheduler = self._schedulers[name]
        if first_policy != policy:
            log.warning(
                "batchmill scheduler %s: it runs with %s; the later %s is ignored",
                name,
                first_policy,
                policy,
            )
        return scheduler

    def _queue_done(self, core: QueueCore) -> None:
        """A queue has drained: remove it, and its scheduler if no other queue uses it."""
        with self._lock:
            self._remove(core)
            if core.scheduler.release() and core.settings.shared_scheduler is not None:
                self._schedulers.pop(core.settings.shared_scheduler[0], None)

    def _remove(self, core: QueueCore) -> None:
        queue = self._queues.get(core.name)
        if queue is not None and queue._core is core:
            del self._queues[core.name]

    def begin_close(self) -> None:
        """At exit: nothing, as each queue closes itself."""

    def await_close(self) -> None:
        """At exit: nothing."""

    def after_fork_in_child(self) -> None:
        """The lock may be held by a thread that does not exist here."""
        self._lock = threading.RLock()
        self._shutting_down = 0


def _compare(name: str, running: BatchQueueSettings, wanted: BatchQueueSettings) -> None:
    if (running.consumer is None) != (wanted.consumer is None):
        has, wants = "handlers", "a direct consumer"
        if running.consumer is not None:
            has, wants = wants, has
        raise QueueConflictError(
            name, f"it runs with {has}, and this call wants {wants}: use another name"
        )
    for field in ("threads", "shared_scheduler", "partitions", "buffer_size", "strategy"):
        if getattr(running, field) != getattr(wanted, field):
            log.warning(
                "batchmill queue %s: it runs with %s=%s; the later %s is ignored",
                name,
                field,
                getattr(running, field),
                getattr(wanted, field),
            )


default_manager = BatchQueueManager()
