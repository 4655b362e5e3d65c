"""The worker threads: each takes batches from its lane, calls the handler, and sleeps between.

Guarantees
    * One thread per lane, so the signals of a flow are handled one at a time and in order.
    * A worker that sleeps costs no CPU and holds no reference to the dispatcher: one that nobody
      uses any more is collected, also when its handler refers back to it.
    * What a handler raises marks its batch failed and is reported; the worker lives.

Threads are daemons: the exit hook drains first (``_process``), and nothing of ours may keep an
interpreter from ending after that.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

from batchmill import lifecycle
from batchmill.flows.histogram import Histogram
from batchmill.flows.rate import Rate
from batchmill.waiters import ThreadWaiter

if TYPE_CHECKING:
    from batchmill.flows.core import FlowCore
    from batchmill.flows.flows import Entry
    from batchmill.flows.lane import Lane

log = logging.getLogger("batchmill.flows")


class Worker:
    """One worker: its thread, its lane, and what it has measured."""

    def __init__(self, core: FlowCore, lane: Lane) -> None:
        self.lane = lane
        self.latency = Histogram()
        self.wait = Histogram()
        self.rate = Rate(core.clock())
        self.revived: FlowCore | None = None
        """The core, once its dispatcher was abandoned."""
        self.thread = threading.Thread(
            target=_run,
            args=(weakref.ref(core, _Waker(lane.parked)), self, lane.parked),
            name=f"batchmill-{core.name}-{lane.index}",
            daemon=True,
        )

    def work(self, core: FlowCore) -> bool:
        """Handle batches until none is left; whether to sleep, and come back when woken."""
        lane, clock = self.lane, core.clock
        batch: list[Entry] = []
        succeeded = True
        while True:
            if core.workers[lane.index] is not self:
                lifecycle.leave_forked_child()  # forked inside the handler, and returned from it
            if core.lock.locked():
                core.give_way()
            with core.lock:
                router = core.router
                taken_at = clock()
                if batch:
                    router.settle(lane, succeeded, taken_at)
                if core.orphans:
                    core.bury_orphans()
                batch = router.take(lane, taken_at)
                if not batch:
                    if not router.closed:
                        lane.asleep = True
                        return True
                    core.worker_ended()
                    return False
            signals = [entry[0] for entry in batch]
            started = clock()
            try:
                core.handler(signals)
                succeeded = True
            except BaseException as error:  # noqa: BLE001 - user code; reported, the worker lives
                succeeded = False
                _report(core, [entry[0] for entry in batch], error)
            ended = clock()
            self.latency.record(ended - started)
            self.wait.record_many([taken_at - entry[3] for entry in batch])
            self.rate.add(len(batch), ended)


class _Waker:
    """Wakes a sleeping worker when its dispatcher is gone, so that the thread ends."""

    __slots__ = ("_parked",)

    def __init__(self, parked: ThreadWaiter) -> None:
        self._parked = parked

    def __call__(self, _: object) -> None:
        self._parked.wake()


def _run(reference: weakref.ref[FlowCore], worker: Worker, parked: ThreadWaiter) -> None:
    while True:
        core = reference() or worker.revived
        if core is None:
            return
        if core.abandoned:
            core.begin_close()
        if not worker.work(core):
            return
        del core
        parked.wait(None)


def _report(core: FlowCore, batch: list[Any], error: BaseException) -> None:
    if core.error_handler is None:
        log.error(
            "batchmill flows %s: handler %r failed on %d signals",
            core.name,
            core.handler,
            len(batch),
            exc_info=error,
        )
        return
    try:
        core.error_handler(batch, error)
    except BaseException:
        log.exception("batchmill flows %s: the error handler failed", core.name)
