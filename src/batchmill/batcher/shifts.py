"""Who is at which batch since when, and what each worker has spent on batches that are over.

No lock of its own: everything is called under the engine's. It is asked once per batch, never per
item.
"""

from __future__ import annotations

import threading

from batchmill.batcher.stats import WorkerLoad


class Shifts:
    """How busy the workers of a batcher are."""

    __slots__ = ("_since", "_spent_s")

    def __init__(self) -> None:
        self._since: dict[int, tuple[str, float]] = {}
        self._spent_s: dict[str, float] = {}

    def begin(self, batch_id: int, now: float) -> None:
        """The calling worker has taken a batch."""
        self._since[batch_id] = threading.current_thread().name, now

    def end(self, batch_id: int, took_s: float) -> None:
        """That batch is over; a batch that nobody has taken is none."""
        if batch_id in self._since:
            worker, _ = self._since.pop(batch_id)
            self._spent_s[worker] = self._spent_s.get(worker, 0.0) + took_s

    def loads(self, now: float) -> tuple[WorkerLoad, ...]:
        """Every worker that has ever taken a batch, by name; what it is at counts up to now."""
        spent = dict(self._spent_s)
        for worker, since in self._since.values():
            spent[worker] = spent.get(worker, 0.0) + now - since
        return tuple(WorkerLoad(worker, spent[worker]) for worker in sorted(spent))
