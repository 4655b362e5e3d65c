"""L1: merges the events of one type into the states of their minutes."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from batchmill.aggregate import Aggregator, Deltas
from batchmill.wording import count_of
from batchmill.workers.events import EventReader
from batchmill.workers.settings import WorkerSettings

log = logging.getLogger("batchmill.workers")

_SMALL_BYTES = 2**18
"""Deltas of less than this are not worth merging before they are handed on."""


@dataclass
class SourceStates:
    """States of one event type on their way from L1 to L2.

    A queue calls handlers by class, so every event type has a subclass of its own.
    """

    source: str
    deltas: Deltas
    events: int
    """How many events they are made of, the invalid ones included."""
    invalid: Counter[str] = field(default_factory=Counter)
    """How many events no metric can count, by reason."""


HandOn: TypeAlias = Callable[[SourceStates, float | None], bool]
"""Gives states to L2, as ``produce`` of its queue does; waits for room, up to a timeout."""


class DeltaBuffer:
    """Deltas of one event type that wait; merged whenever their memory has doubled."""

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self.clear()

    def clear(self) -> None:
        """Forget what is in it."""
        self._parts: list[Deltas] = []
        self._merged_nbytes = self.nbytes = 0
        """The memory that they take."""

    def add(self, deltas: Deltas) -> None:
        """Add deltas."""
        self.nbytes += deltas.nbytes
        self._parts.append(deltas)
        if self.nbytes > 2 * self._merged_nbytes + _SMALL_BYTES:
            try:
                self.merged()
            except Exception:  # they are added nonetheless
                log.exception("states cannot be merged, and are kept as they are")

    def merged(self) -> Deltas:
        """All of them; they stay in the buffer."""
        if len(self._parts) != 1:
            whole = self._aggregator.merge(self._parts)
            self._parts, self.nbytes = [whole], whole.nbytes
        self._merged_nbytes = self.nbytes
        return self._parts[0]


class L1Worker:
    """The handler of one event type on L1's queue.

    Collects events, aggregates them in chunks, and hands the states on when its period is over.
    What is not taken at once is kept, and handed on with what comes.
    """

    def __init__(
        self, aggregator: Aggregator, hand_on: HandOn, settings: WorkerSettings | None = None
    ) -> None:
        """``hand_on`` is called with states and a timeout: ``produce`` of L2's queue."""
        self.source = aggregator.plan.source.name
        self.reader = EventReader(aggregator.plan)
        self._aggregator = aggregator
        self._hand_on = hand_on
        self._settings = settings or WorkerSettings()
        self._states_class = type(f"{self.source}States", (SourceStates,), {})
        # Arrow imports what it needs at first use. That takes long, and fails while Python exits.
        aggregator.make(self.reader.read([], 0).table)
        self.reset()

    @property
    def states_class(self) -> type[SourceStates]:
        """The class of what it hands on, for L2's queue."""
        return self._states_class

    def reset(self) -> None:
        """Start with nothing: in a forked child, what was there is the parent's."""
        self.lock = threading.Lock()
        """Held while it works."""
        self._events: list[object] = []
        self._buffer = DeltaBuffer(self._aggregator)
        self._aggregated = 0
        self._invalid: Counter[str] = Counter()
        self._due_s: float | None = None
        self.failed = 0
        """Events that were lost to an error, which is in the log."""

    def consume(self, batch: list[Any]) -> None:
        """Take a batch of events."""
        with self.lock:
            now_s = time.monotonic()
            if self._due_s is None:
                self._due_s = now_s + self._settings.l1_period_s
            self._events += batch
            if len(self._events) >= self._settings.l1_chunk:
                self._aggregate()
            if now_s >= self._due_s:
                self._flush(None)

    def on_idle(self) -> None:
        """Hand on what is due; called while no events come."""
        with self.lock:
            if self._due_s is not None and time.monotonic() >= self._due_s:
                self._flush(None)

    def on_shutdown(self) -> None:
        """Hand on everything; the last call."""
        with self.lock:
            if not self._flush(None):
                self.failed += self._aggregated
                log.error(
                    "L1 of %s: %s lost: L2 takes no more",
                    self.source,
                    count_of(self._aggregated, "event"),
                )
                self._empty()

    def flush(self, timeout: float | None = None) -> bool:
        """Hand on everything now; False if L2 did not take it within ``timeout`` seconds."""
        start_s = time.monotonic()
        if not self.lock.acquire(timeout=-1 if timeout is None else timeout):
            return False
        try:
            spent_s = time.monotonic() - start_s
            return self._flush(None if timeout is None else max(0.0, timeout - spent_s))
        finally:
            self.lock.release()

    def _aggregate(self) -> None:
        events, self._events = self._events, []
        latest_us = int((time.time() + self._settings.max_ahead_s) * 1_000_000)
        try:
            read = self.reader.read(events, latest_us)
            made = self._aggregator.make(read.table, latest_us=latest_us)
            self._buffer.add(made.deltas)
        except Exception:
            self.failed += len(events)
            log.exception("L1 of %s: %s lost", self.source, count_of(len(events), "event"))
            return
        self._aggregated += len(events)
        self._invalid += read.invalid + made.invalid

    def _flush(self, timeout: float | None) -> bool:
        """Hand on everything; False if it was not taken, and is kept."""
        if self._events:
            self._aggregate()
        self._due_s = None
        if not self._aggregated:
            return True
        try:
            states = self._states_class(
                self.source, self._buffer.merged(), self._aggregated, self._invalid
            )
            taken = self._hand_on(states, timeout)
        except Exception:  # raised further, it would have the queue count events that are kept
            log.exception("L1 of %s: states are kept: they cannot be handed on", self.source)
            taken = False
        if taken:
            self._empty()
        else:
            self._due_s = time.monotonic() + self._settings.l1_period_s
        return taken

    def _empty(self) -> None:
        self._buffer.clear()
        self._aggregated, self._invalid = 0, Counter()
