"""L1 and L2 by hand: typed events, merged twice, then stored in a database.

The L1 queue takes the events of all classes, with a handler for each. A handler merges its batches
into one state per minute, and passes the states on to the L2 queue when its period is over, or when
nothing comes. The L2 handler merges them again and commits what has changed in one transaction. So
20,000 events become a few states, and two rows.

L1 declares L2 as its downstream: shutdown_all() ends L1 first, with a last call of its handlers,
and L2 after that. It returns True only if everything that was accepted got through.

Prints:

    20000 of 20000 events accepted, all got through: True
    checkout, minute 1: 10000 events, mean 49.5 ms, most 99 ms
    search, minute 1: 10000 events, mean 149.5 ms, most 199 ms
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchmill import BatchQueue, BatchQueueManager, presets

PERIOD_S = 0.5
TABLE = """
CREATE TABLE latency (
    metric TEXT, minute INTEGER, count INTEGER, total_ms INTEGER, most_ms INTEGER,
    PRIMARY KEY (metric, minute)
)
"""
MERGE = """
INSERT INTO latency VALUES (?, ?, ?, ?, ?) ON CONFLICT (metric, minute) DO UPDATE SET
    count = count + excluded.count,
    total_ms = total_ms + excluded.total_ms,
    most_ms = max(most_ms, excluded.most_ms)
"""


@dataclass(frozen=True, slots=True)
class Event:
    minute: int
    latency_ms: int


class Checkout(Event):
    """An event of the shop."""


class Search(Event):
    """Another one: a class of its own has a handler of its own."""


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a metric in a minute; states of the same minute can be merged."""

    metric: str
    minute: int
    count: int
    total_ms: int
    most_ms: int

    def merge(self, other: State) -> State:
        return replace(
            self,
            count=self.count + other.count,
            total_ms=self.total_ms + other.total_ms,
            most_ms=max(self.most_ms, other.most_ms),
        )


class States:
    """The states that were merged since they were last taken, by metric and minute."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, int], State] = {}

    def add(self, state: State) -> None:
        key = (state.metric, state.minute)
        known = self._states.get(key)
        self._states[key] = state if known is None else known.merge(state)

    def take(self) -> list[State]:
        taken, self._states = list(self._states.values()), {}
        return taken


class L1Handler:
    """Merges the events of one class. Its calls never overlap, so it needs no lock."""

    def __init__(self, metric: str, l2: BatchQueue[State]) -> None:
        self._metric, self._l2 = metric, l2
        self._states, self._due_s = States(), 0.0

    def consume(self, batch: Sequence[Event]) -> None:
        for event in batch:
            latency = event.latency_ms
            self._states.add(State(self._metric, event.minute, 1, latency, latency))
        if time.monotonic() >= self._due_s:
            self.on_idle()

    def on_idle(self) -> None:
        """Pass on what was merged; also the last call at shutdown."""
        self._due_s = time.monotonic() + PERIOD_S
        for state in self._states.take():
            self._l2.produce(state)  # BLOCKING: it waits, and refuses nothing before it is closed


class L2Handler:
    """Merges states, and commits them when nothing more comes."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database, self._states = database, States()

    def consume(self, batch: list[State]) -> None:
        for state in batch:
            self._states.add(state)

    def on_idle(self) -> None:
        rows = [
            (state.metric, state.minute, state.count, state.total_ms, state.most_ms)
            for state in self._states.take()
        ]
        with self._database:
            self._database.executemany(MERGE, rows)


database = sqlite3.connect(":memory:", check_same_thread=False)
database.execute(TABLE)
manager = BatchQueueManager()
l2 = manager.create("L2", presets.l2_persistence())
l2.add_handler(State, L2Handler(database))
l1 = manager.create("L1", presets.l1_aggregation(), downstream=[l2])
l1.add_handler(Checkout, L1Handler("checkout", l2))
l1.add_handler(Search, L1Handler("search", l2))

accepted = l1.produce_many(Checkout(1, number % 100) for number in range(10_000))
accepted += l1.produce_many(Search(1, 100 + number % 100) for number in range(10_000))
complete = manager.shutdown_all()

print(f"{accepted} of 20000 events accepted, all got through: {complete}")
for metric, minute, count, total_ms, most_ms in database.execute(
    "SELECT * FROM latency ORDER BY metric"
):
    mean = total_ms / count
    print(f"{metric}, minute {minute}: {count} events, mean {mean} ms, most {most_ms} ms")
database.close()
