"""Queues by name, and the schedulers they share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from batchmill import lifecycle
from batchmill.cores import available_cores
from batchmill.errors import (
    ConfigError,
    QueueClosedError,
    QueueConflictError,
    QueueExistsError,
)
from batchmill.queue import deadlock
from batchmill.queue.core import QueueCore
from batchmill.queue.queue import BatchQueue
from batchmill.queue.scheduler import Scheduler
from batchmill.queue.settings import BatchQueueSettings, ThreadPolicy
from batchmill.queue.stats import LOST_NOT_DRAINED, BatchQueueManagerStats, BatchQueueStats

log = logging.getLogger("batchmill.queue")

if TYPE_CHECKING:
    # Of every type checker's own; where nothing tells T, it is Any, and no annotation is needed.
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")


class BatchQueueManager:
    """A registry of named queues and of the schedulers they share; any thread may use it.

    A shared scheduler is made when the first queue names it and ends with the last one that used
    it. ``batchmill.default_manager`` is the process-wide manager.

    A queue whose handlers pass items on to other queues declares these when it is created. Such
    *downstream* queues are closed after it, when its handlers have had their last call: in
    :meth:`shutdown_all`, at interpreter exit, and where a manager is garbage.

    >>> manager = BatchQueueManager()
    >>> settings = BatchQueueSettings(threads=ThreadPolicy.fixed(1), consumer=print)
    >>> l2 = manager.create("l2", settings)
    >>> l1 = manager.create("l1", BatchQueueSettings(threads=ThreadPolicy.fixed(1),
    ...     consumer=lambda batch: l2.produce(sum(batch))), downstream=["l2"])
    >>> l1.produce_many([1, 2, 3])
    3
    >>> manager.shutdown_all()
    [6]
    True
    """

    fork_order = 0  # a queue that was closing when the process forked needs it

    def __init__(self) -> None:
        # Reentrant: creating a queue may log, and a log handler may use the manager.
        self._lock = threading.RLock()
        self._queues: dict[str, BatchQueue[Any]] = {}
        self._replaced: list[BatchQueue[Any]] = []  # still draining, while their names are reused
        self._downstream: dict[str, tuple[str, ...]] = {}
        self._schedulers: dict[str, tuple[ThreadPolicy, Scheduler]] = {}
        self._shutting_down = 0
        self._shut_down: tuple[BatchQueueStats, ...] = ()
        self._lost: dict[str, dict[str, int]] = {}
        lifecycle.track(self)

    def create(
        self,
        name: str,
        config: BatchQueueSettings[T],
        *,
        downstream: Iterable[str | BatchQueue[Any]] = (),
    ) -> BatchQueue[T]:
        """Make a queue of that name; a name that is taken raises and starts nothing.

        ``downstream`` are the queues of this manager that its handlers pass items on to, by name or
        as they are. They have to run already, and must not pass items on to this one.
        """
        with self._lock:
            if self._running(name) is not None:
                raise QueueExistsError(name)
            declared = self._check_downstream(name, downstream)
            return self._make(name, config, declared)

    def get_or_create(
        self,
        name: str,
        config: BatchQueueSettings[T],
        *,
        downstream: Iterable[str | BatchQueue[Any]] = (),
    ) -> BatchQueue[T]:
        """The queue of that name, made with ``config`` if there is none: the first call decides.

        A later call that wants a direct consumer where there are handlers, or the reverse, raises.
        Other settings that differ are ignored with a warning. Its ``downstream`` queues are added
        to those that were declared before.
        """
        with self._lock:
            queue = self._running(name)
            if queue is None:
                return self._make(name, config, self._check_downstream(name, downstream))
        _compare(name, queue.config, config)
        with self._lock:
            declared = self._check_downstream(name, downstream)
            if self._queues.get(name) is queue:
                self._declare(name, declared)
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

    def stats(self) -> BatchQueueManagerStats:
        """The running queues, and what the latest :meth:`shutdown_all` ended and lost."""
        with self._lock:
            queues = [queue for queue in self._queues.values() if queue.running]
            shut_down, lost = self._shut_down, self._lost
        return BatchQueueManagerStats(
            queues=tuple(queue.stats() for queue in queues),
            shut_down=shut_down,
            lost={name: dict(counts) for name, counts in lost.items()},
        )

    def shutdown(self, name: str) -> bool:
        """Shut one queue down and remove it; False when there is none, or it was not in time.

        Its downstream queues stay open.
        """
        with self._lock:
            queue = self._queues.get(name)
        return queue is not None and queue.shutdown()

    def shutdown_all(self) -> bool:
        """Drain and end all queues, upstream first; True when nothing that they accepted was lost.

        No queue can be created meanwhile. A queue is closed when the queues that declared it as
        their downstream have drained and their handlers have had their last call, or are out of
        time. Queues that do not depend on each other close together, so the call takes as long as
        the slowest of them.

        False when a queue was not drained in time, when a handler failed on items or in its last
        call, or a downstream queue refused what was passed on, since the queues were created. A
        warning says how many, and so does :meth:`stats`. Inside a handler it returns False at once,
        and the queues end in the background.
        """
        with self._lock:
            self._shutting_down += 1
            queues = [*self._replaced, *self._queues.values()]
        if any(deadlock.is_needed_to_drain(queue._core) for queue in queues):
            threading.Thread(
                target=self._shut_down_all, args=(queues,), name="batchmill-shutdown", daemon=True
            ).start()
            return False
        return self._shut_down_all(queues)

    def _shut_down_all(self, queues: list[BatchQueue[Any]]) -> bool:
        by_core = {queue._core: queue for queue in queues}
        ended: list[BatchQueueStats] = []
        lost: dict[str, dict[str, int]] = {}
        try:
            for group in lifecycle.closing_groups(by_core):
                for core in group:
                    core.begin_close()
                for core in group:
                    in_time = by_core[core]._await_drain(core.deadline)
                    stats = core.stats()
                    ended.append(stats)
                    losses = stats.lost
                    if not in_time:
                        losses[LOST_NOT_DRAINED] = stats.pending
                    if losses:
                        # A name may occur twice: an older queue of that name has not ended yet.
                        counts = lost.setdefault(stats.name, {})
                        for reason, count in losses.items():
                            counts[reason] = counts.get(reason, 0) + count
        finally:
            with self._lock:
                self._shutting_down -= 1
                self._shut_down, self._lost = tuple(ended), lost
        for name, losses in lost.items():
            text = ", ".join(f"{reason} {count:,}" for reason, count in losses.items())
            log.warning("batchmill queue %s: not all that it accepted got through: %s", name, text)
        return not lost

    def _check_downstream(
        self, name: str, downstream: Iterable[str | BatchQueue[Any]]
    ) -> tuple[str, ...]:
        """The names of declared queues, which must run here and not lead back to ``name``."""
        allowed = "the names of running queues of this manager: create downstream queues first"
        if isinstance(downstream, str):
            raise ConfigError("downstream", downstream, f"a list of {allowed}")
        names = []
        for entry in downstream:
            queue = self._running(entry) if isinstance(entry, str) else entry
            target = queue.name if isinstance(queue, BatchQueue) else entry
            if target != name and (queue is None or self._running(str(target)) is not queue):
                raise ConfigError("downstream", entry, allowed)
            path = self._path(str(target), name)
            if path:
                raise QueueConflictError(
                    name,
                    f"its downstream queues lead back to it ({' -> '.join([name, *path])}), so "
                    "none of them could be closed first: leave one out",
                )
            names.append(str(target))
        return tuple(names)

    def _path(self, start: str, end: str) -> list[str]:
        """The names from one queue downstream to another; empty if there is no way."""
        if start == end:
            return [start]
        for name in self._downstream.get(start, ()):
            path = self._path(name, end)
            if path:
                return [start, *path]
        return []

    def _declare(self, name: str, downstream: tuple[str, ...]) -> None:
        known = self._downstream.get(name, ())
        self._downstream[name] = tuple(dict.fromkeys([*known, *downstream]))
        self._link()

    def _link(self) -> None:
        """Tell the queues who is upstream and downstream of them."""
        cores = {name: queue._core for name, queue in self._queues.items()}
        upstream: dict[str, list[QueueCore]] = {name: [] for name in cores}
        for name, core in cores.items():
            names = [target for target in self._downstream.get(name, ()) if target in cores]
            core.downstream = tuple(cores[target] for target in names)
            for target in names:
                upstream[target].append(core)
        for name, core in cores.items():
            core.upstream = tuple(upstream[name])

    def _make(
        self, name: str, config: BatchQueueSettings[T], downstream: tuple[str, ...]
    ) -> BatchQueue[T]:
        if self._shutting_down:
            raise QueueClosedError("manager", f"creating queue {name!r}")
        scheduler = None
        if config.shared_scheduler is not None:
            scheduler = self._shared(*config.shared_scheduler)
        try:
            queue = BatchQueue(name, config, scheduler=scheduler, on_done=self._queue_done)
        except BaseException:
            if scheduler is not None and not scheduler.users and config.shared_scheduler:
                del self._schedulers[config.shared_scheduler[0]]
            raise
        if name in self._queues:
            self._replaced.append(self._queues.pop(name))
            self._downstream.pop(name, None)
        self._queues[name] = queue
        self._declare(name, downstream)
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
            self._replaced = [queue for queue in self._replaced if queue._core is not core]
            queue = self._queues.get(core.name)
            if queue is not None and queue._core is core:
                del self._queues[core.name]
                self._downstream.pop(core.name, None)
                self._link()
            if core.scheduler.release() and core.settings.shared_scheduler is not None:
                self._schedulers.pop(core.settings.shared_scheduler[0], None)

    def begin_close(self) -> None:
        """At exit: nothing, as each queue closes itself."""

    def await_close(self) -> None:
        """At exit: nothing."""

    def after_fork_in_child(self) -> None:
        """The lock may be held by a thread that does not exist here."""
        self._lock = threading.RLock()
        self._shutting_down = 0
        self._shut_down, self._lost = (), {}
        self._link()  # a queue may have been added or removed halfway


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
