"""Other ways to keep the signals of a flow in order: a single thread per worker, chosen by hash."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

from batchmill.flows import Assignment, FlowDispatcher, FlowSettings, LeastLoaded, WorkerView

BATCH_MAX = 128
QUEUE_CAPACITY = 8_192

Handler: TypeAlias = Callable[[list[Any]], object]


class FlowSignal:
    """A signal: its flow, its number within it, and whether it is the last."""

    __slots__ = ("flow_id", "last", "number", "sent")

    def __init__(self, flow_id: Hashable, number: int, last: bool) -> None:
        self.flow_id = flow_id
        self.number = number
        self.last = last
        self.sent = 0.0


class FlowPeer(Protocol):
    """Takes signals, hands each flow's to the handler in order."""

    def put(self, signal: FlowSignal, /) -> object:
        """Take a signal."""

    def finish(self) -> None:
        """Return when all is handled, and end."""


class MillFlows:
    """The dispatcher, as its users run it; ``assignment`` takes the place of its own rule."""

    def __init__(
        self,
        handler: Handler,
        workers: int,
        batch_max: int = BATCH_MAX,
        assignment: Assignment | None = None,
    ) -> None:
        config = FlowSettings(
            worker_count=workers,
            worker_queue_capacity=QUEUE_CAPACITY,
            batch_max=batch_max,
            finished=lambda signal: signal.last,
            assignment=assignment or LeastLoaded(),
        )
        self.dispatcher: FlowDispatcher[FlowSignal] = FlowDispatcher(handler, config)
        self.put = self.dispatcher.dispatch

    def finish(self) -> None:
        """Drain; nothing may be left."""
        left = self.dispatcher.close(60)
        if left:
            raise RuntimeError(f"{len(left)} signals were not processed")


class RandomRule:
    """For scale: any worker, drawn from a fixed seed, as a hash of the flow would."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def pick(self, workers: Sequence[WorkerView], /) -> int:
        """Any index."""
        return self._draw(len(workers))


class ExecutorFlows:
    """A ThreadPoolExecutor with one thread per worker; the flow's hash chooses."""

    def __init__(self, handler: Handler, workers: int) -> None:
        self._handler = handler
        self._submits = [ThreadPoolExecutor(max_workers=1) for _ in range(workers)]

    def put(self, signal: FlowSignal, /) -> object:
        """Submit it to the executor of its flow."""
        executors = self._submits
        return executors[hash(signal.flow_id) % len(executors)].submit(self._handler, [signal])

    def finish(self) -> None:
        """Wait for all of them."""
        for executor in self._submits:
            executor.shutdown()


class QueueFlows:
    """A bounded queue.Queue and a thread per worker, in batches; the flow's hash chooses."""

    def __init__(self, handler: Handler, workers: int) -> None:
        self._handler = handler
        self._queues: list[queue.Queue[Any]] = [queue.Queue(QUEUE_CAPACITY) for _ in range(workers)]
        self._threads = [threading.Thread(target=self._drain, args=(q,)) for q in self._queues]
        for thread in self._threads:
            thread.start()

    def put(self, signal: FlowSignal, /) -> object:
        """Put it on the queue of its flow."""
        self._queues[hash(signal.flow_id) % len(self._queues)].put(signal)
        return True

    def finish(self) -> None:
        """Send the threads home behind the last signal."""
        for one in self._queues:
            one.put(None)
        for thread in self._threads:
            thread.join()

    def _drain(self, source: queue.Queue[Any]) -> None:
        ending = False
        while not ending:
            batch = [source.get()]
            try:
                while len(batch) < BATCH_MAX:
                    batch.append(source.get_nowait())
            except queue.Empty:
                pass
            if batch[-1] is None:
                ending = True
                batch.pop()
            if batch:
                self._handler(batch)
