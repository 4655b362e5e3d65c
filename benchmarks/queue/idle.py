"""The cost of idle queues: CPU time of the whole process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from batchmill import BatchQueueManager, BatchQueueSettings, ThreadPolicy
from benchmarks.kit.report import Table, say, spread
from benchmarks.queue import peers
from benchmarks.queue.check import Sink
from benchmarks.queue.mill import unique_name
from benchmarks.queue.peers import Peer
from benchmarks.queue.work import ITEM_CLASSES

QUEUES = 50
OWN_THREADS = f"batchmill, {QUEUES} queues, a thread each"
SHARED = f"batchmill, {QUEUES} queues on one shared scheduler"
SETTLE_S = 0.5


@dataclass(kw_only=True)
class Idle:
    """Percent of a core by set-up, one figure a repeat."""

    seconds: float
    percent: dict[str, list[float]] = field(default_factory=dict)

    def worst_of_fifty(self) -> float:
        """The higher of the two ways to run 50 batchmill queues."""
        return max(median(self.percent[OWN_THREADS]), median(self.percent[SHARED]))

    def tables(self) -> list[Table]:
        """One table."""
        rows = [
            [name, f"{median(values):.3f} %", spread(values, digits=3)]
            for name, values in self.percent.items()
        ]
        return [
            Table(
                "Idle CPU, percent of one core",
                f"CPU time of the process over {self.seconds:g} s in which nothing is produced;"
                " every queue has consumed one item before. No handler defines on_idle.",
                ["set-up", "median", "min..max"],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """Every figure."""
        return {"seconds": self.seconds, "percent_of_a_core": self.percent}


def measure(*, repeats: int, seconds: float) -> Idle:
    """Set up, settle, measure, tear down; each set-up in turn, ``repeats`` times."""
    set_ups: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "nothing at all": nullcontext,
        "batchmill, 1 queue": lambda: _mills(1, shared=False),
        OWN_THREADS: lambda: _mills(QUEUES, shared=False),
        SHARED: lambda: _mills(QUEUES, shared=True),
        f"queue.Queue, {QUEUES} threads in get()": lambda: _peers(peers.plain_queue),
        f"polling, {QUEUES} threads, 1..50 ms back-off": lambda: _peers(
            lambda handlers: peers.PollingPeer(handlers, consumers=1)
        ),
    }
    result = Idle(seconds=seconds, percent={name: [] for name in set_ups})
    for repeat in range(repeats):
        say(f"idle: repeat {repeat + 1} of {repeats}")
        for name, set_up in set_ups.items():
            with set_up():
                time.sleep(SETTLE_S)
                result.percent[name].append(_percent_of_a_core(seconds))
    return result


def _percent_of_a_core(seconds: float) -> float:
    wall, cpu = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    return 100 * (time.process_time() - cpu) / (time.perf_counter() - wall)


@contextmanager
def _mills(count: int, *, shared: bool) -> Iterator[None]:
    manager = BatchQueueManager()
    one = ThreadPolicy.fixed(1)
    config = BatchQueueSettings(shared_scheduler=("idle", one)) if shared else _own_thread()
    try:
        for _ in range(count):
            queue = manager.create(unique_name(), config)
            queue.add_handler(ITEM_CLASSES[0], Sink())
            queue.produce(ITEM_CLASSES[0](0, 0))
        yield
    finally:
        manager.shutdown_all()


def _own_thread() -> BatchQueueSettings:
    return BatchQueueSettings(threads=ThreadPolicy.fixed(1))


@contextmanager
def _peers(build: Callable[[peers.Handlers], Peer], count: int = QUEUES) -> Iterator[None]:
    running = [build({ITEM_CLASSES[0]: Sink()}) for _ in range(count)]
    try:
        for peer in running:
            peer.put(ITEM_CLASSES[0](0, 0))
        yield
    finally:
        for peer in running:
            peer.finish()
            peer.close()
