"""Rules that choose the worker of a new flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class WorkerView(Protocol):
    """A worker as an assignment rule sees it."""

    @property
    def depth(self) -> int:
        """Signals that wait for it, in its queue and in the ingress buffer."""

    @property
    def load(self) -> int:
        """The same, and the signals in its handler call now."""

    @property
    def flows(self) -> int:
        """Flows assigned to it now."""

    @property
    def free(self) -> int:
        """Signals that its queue has room for; less than 1 when it is full."""


class Assignment(Protocol):
    """Chooses the worker of a new flow; any object with :meth:`pick` will do."""

    def pick(self, workers: Sequence[WorkerView], /) -> int:
        """The index of the worker to take.

        It runs under the dispatcher's lock, once for each new flow: it should be quick, and must
        not call the dispatcher. If it raises, or returns no index of ``workers``, the least loaded
        worker is taken; the first such failure is logged, all are counted.
        """


class LeastLoaded:
    """The least load; among equals the fewest flows; among those, take turns.

    A worker with a full queue is picked only when all are full. The load of a worker is what it has
    queued *and* what is in its handler now: by the queue alone, a worker that is busy with one
    signal would look as free as an idle one.

    >>> from types import SimpleNamespace as Worker
    >>> idle, busy = Worker(load=0, flows=3, free=9), Worker(load=1, flows=0, free=9)
    >>> LeastLoaded().pick([busy, idle])
    1
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def pick(self, workers: Sequence[WorkerView], /) -> int:
        """The index of the worker to take; the search starts behind the one picked last."""
        count = len(workers)
        start = self._next % count  # settings may be shared by dispatchers of different sizes
        best = -1
        best_full, best_load, best_flows = False, 0, 0
        for step in range(count):
            index = start + step
            if index >= count:
                index -= count
            worker = workers[index]
            load, flows, full = worker.load, worker.flows, worker.free < 1
            if best >= 0:
                if full is not best_full:
                    if full:
                        continue
                elif load > best_load or (load == best_load and flows >= best_flows):
                    continue
            best, best_full, best_load, best_flows = index, full, load, flows
        self._next = best + 1
        return best


class ShortestQueue:
    """The fewest signals queued; among equals the lowest index.

    The rule of Obsinity's proposal, for comparison: what a worker is handling now does not count,
    so at low load most flows go to the first worker, and wait there behind each other.

    >>> from types import SimpleNamespace as Worker
    >>> ShortestQueue().pick([Worker(depth=2), Worker(depth=0), Worker(depth=0)])
    1
    """

    __slots__ = ()

    def pick(self, workers: Sequence[WorkerView], /) -> int:
        """The index of the worker to take."""
        depths = [worker.depth for worker in workers]
        return depths.index(min(depths))


class RoundRobin:
    """One after the other, skipping those whose queue is full unless all are."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def pick(self, workers: Sequence[WorkerView], /) -> int:
        """The index of the worker to take."""
        count = len(workers)
        start = self._next
        picked = start % count
        for step in range(count):
            index = (start + step) % count
            if workers[index].free > 0:
                picked = index
                break
        self._next = (picked + 1) % count
        return picked
