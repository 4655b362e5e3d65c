"""L1: merges the events of one type into the states of their minutes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from batchmill.aggregate import Aggregator, Deltas
from batchmill.wording import count_of
from batchmill.workers.events import EventReader
from batchmill.workers.periodic import PeriodicWorker
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


class L1Worker(PeriodicWorker):
    """The handler of one event type on L1's queue: aggregates events in chunks, hands on states."""

    _events: list[object]
    _buffer: DeltaBuffer
    _aggregated: int
    _invalid: Counter[str]

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
        super().__init__(f"L1 of {self.source}", "event", self._settings.l1_period_s)

    @property
    def states_class(self) -> type[SourceStates]:
        """The class of what it hands on, for L2's queue."""
        return self._states_class

    def _collect(self, batch: list[Any]) -> None:
        self._events += batch
        if len(self._events) >= self._settings.l1_chunk:
            self._aggregate()

    def _aggregate(self) -> None:
        events, self._events = self._events, []
        latest_us = int((time.time() + self._settings.max_ahead_s) * 1_000_000)
        try:
            read = self.reader.read(events, latest_us)
            made = self._aggregator.make(read.table, latest_us=latest_us)
            self._buffer.add(made.deltas)
        except Exception:
            self.failed += len(events)
            log.exception("%s: %s lost", self._name, count_of(len(events), "event"))
            return
        self._aggregated += len(events)
        self._invalid += read.invalid + made.invalid

    def _waiting(self) -> int:
        if self._events:
            self._aggregate()
        return self._aggregated

    def _hand_over(self, timeout: float | None) -> bool:
        try:
            states = self._states_class(
                self.source, self._buffer.merged(), self._aggregated, self._invalid
            )
            return self._hand_on(states, timeout)
        except Exception:  # raised further, it would have the queue count events that are kept
            log.exception("%s: states are kept: they cannot be handed on", self._name)
            return False

    def _empty(self) -> None:
        self._events = []
        self._buffer = DeltaBuffer(self._aggregator)
        self._aggregated, self._invalid = 0, Counter()
