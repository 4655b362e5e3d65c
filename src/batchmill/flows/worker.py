"""The worker threads: each takes batches from its queue, calls the handler, and sleeps between.

Guarantees
    * One thread per queue, so the signals of a flow are handled one at a time and in order.
    * A worker that sleeps costs no CPU and holds no reference to the dispatcher: one that nobody
      uses any more is collected, also when its handler refers back to it.
    * What a handler raises marks its batch failed and is reported; the worker goes on.

Threads are daemons: the exit hook drains first (``batchmill.lifecycle``), and nothing of ours may
keep an interpreter from ending after that.
"""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from batchmill import lifecycle
from batchmill.callables import check_done
from batchmill.flows.stats import Histogram, Rate, WorkerStats
from batchmill.telemetry import BATCH_SIZES, DURATIONS_S
from batchmill.waiters import ThreadWaiter, give_way
from batchmill.wording import count_of

if TYPE_CHECKING:
    from batchmill.flows.core import FlowCore
    from batchmill.flows.flow_map import Entry
    from batchmill.flows.queues import WorkerQueue

log = logging.getLogger("batchmill.flows")


class Worker:
    """One worker: its thread, its queue, and what it has measured."""

    def __init__(self, core: FlowCore, queue: WorkerQueue) -> None:
        self.queue = queue
        self.latency = Histogram()
        self.wait = Histogram()
        self.rate = Rate(core.clock())
        self.busy_s = 0.0
        self.items = 0
        # Handler calls that are over, by the number of signals and by time: see BATCH_SIZES.
        self.batch_sizes = [0] * (len(BATCH_SIZES) + 1)
        self.durations = [0] * (len(DURATIONS_S) + 1)
        self.revived: FlowCore | None = None
        """The core, once its dispatcher was abandoned."""
        self.thread = threading.Thread(
            target=_run,
            args=(weakref.ref(core, _Waker(queue.waiter)), self, queue.waiter),
            name=f"batchmill-{core.name}-{queue.index}",
            daemon=True,
        )

    def work(self, core: FlowCore) -> bool:
        """Handle batches until none is left; whether to sleep, and come back when woken."""
        queue, clock = self.queue, core.clock
        batch: list[Entry] = []
        succeeded = True
        while True:
            if core.workers[queue.index] is not self:
                lifecycle.leave_forked_child()  # forked inside the handler, and returned from it
            if core.lock.locked():
                give_way(core.lock)
            with core.lock:
                router = core.router
                taken_at = clock()
                if batch:
                    router.settle(queue, succeeded, taken_at)
                if core.orphans:
                    core.remove_orphans()
                batch = router.take(queue, taken_at)
                if not batch:
                    if not router.closed:
                        queue.asleep = True
                        return True
                    core.worker_ended()
                    return False
                assignment_error, router.assignment_error = router.assignment_error, None
            if assignment_error is not None:
                _report_assignment(core, assignment_error)
            signals = [entry[0] for entry in batch]
            started = clock()
            try:
                answer = core.consume(signals)
                if answer is not None:
                    check_done(core.consume, answer)
                succeeded = True
            except BaseException as error:  # noqa: BLE001 - user code; reported, the worker goes on
                succeeded = False
                _report(core, [entry[0] for entry in batch], error)
            ended = clock()
            self.latency.record(ended - started)
            self.busy_s += ended - started
            self.items += len(batch)
            self.durations[bisect_left(DURATIONS_S, ended - started)] += 1
            self.batch_sizes[bisect_left(BATCH_SIZES, len(batch))] += 1
            self.wait.record_many([taken_at - entry[3] for entry in batch])
            self.rate.add(len(batch), ended)

    def stats(self, blocked: int, now: float) -> WorkerStats:
        """What it does now, with ``blocked`` producers that wait for room; under the lock."""
        queue = self.queue
        return WorkerStats(
            index=queue.index,
            depth=queue.depth - queue.buffered,
            buffered=queue.buffered,
            capacity=queue.capacity,
            running=len(queue.running),
            blocked=blocked,
            flows=queue.flows,
            handled=queue.handled,
            failed=queue.failed,
            rate=self.rate.per_second(now),
            busy_seconds=self.busy_s,
        )


class _Waker:
    """Wakes a sleeping worker when its dispatcher is gone, so that the thread ends."""

    __slots__ = ("_waiter",)

    def __init__(self, waiter: ThreadWaiter) -> None:
        self._waiter = waiter

    def __call__(self, _: object) -> None:
        self._waiter.wake()


def _run(reference: weakref.ref[FlowCore], worker: Worker, waiter: ThreadWaiter) -> None:
    while True:
        core = reference() or worker.revived
        if core is None:
            return
        if core.abandoned:
            core.begin_close()
        if not worker.work(core):
            core.leave_registry()
            return
        del core
        waiter.wait(None)


def _report_assignment(core: FlowCore, error: Exception) -> None:
    log.warning(
        "batchmill flows %s: the assignment %r failed, the least loaded worker was taken; "
        "stats().assignment_failures counts further failures",
        core.name,
        core.settings.assignment,
        exc_info=error,
    )


def _report(core: FlowCore, batch: list[Any], error: BaseException) -> None:
    if core.on_error is None:
        log.error(
            "batchmill flows %s: handler %r failed on %s",
            core.name,
            core.handler,
            count_of(len(batch), "signal"),
            exc_info=error,
        )
        return
    try:
        check_done(core.on_error, core.on_error(batch, error))
    except BaseException:
        log.exception("batchmill flows %s: the error handler failed", core.name)
