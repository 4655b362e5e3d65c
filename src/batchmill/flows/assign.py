"""Which worker takes a new flow, and which the next signal without a flow. Pure: no threads.

The load of a worker is what it has queued *and* what is in its handler now. Counting the queue
alone makes a worker that is busy with one signal look as free as an idle one, and breaking ties by
the lowest number then piles flows up on worker 0 while the others rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Loaded(Protocol):
    """What the rule wants to know about a worker."""

    load: int
    """Signals queued or in the handler."""
    flows: int
    """Flows assigned to it now."""
    free: int
    """Signals its queue has room for; less than 1 when it is full."""


class Assignment(Protocol):
    """A rule that picks a worker for a flow that has none."""

    def pick(self, workers: Sequence[Loaded], /) -> int:
        """The index of the worker to take."""


class LeastLoaded:
    """The least load; among equals the fewest flows; among those, take turns.

    A worker with a full queue is picked only when all are full.

    >>> from types import SimpleNamespace as Worker
    >>> idle, busy = Worker(load=0, flows=3, free=9), Worker(load=1, flows=0, free=9)
    >>> LeastLoaded().pick([busy, idle])
    1
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def pick(self, workers: Sequence[Loaded], /) -> int:
        """The index of the worker to take; the search starts behind the one picked last."""
        count = len(workers)
        start = self._next
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
        self._next = best + 1 if best + 1 < count else 0
        return best


class RoundRobin:
    """One after the other, passing over those whose queue is full unless all are."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def pick(self, workers: Sequence[Loaded], /) -> int:
        """The index of the worker to take."""
        count = len(workers)
        start = self._next
        picked = start
        for step in range(count):
            index = (start + step) % count
            if workers[index].free > 0:
                picked = index
                break
        self._next = (picked + 1) % count
        return picked
