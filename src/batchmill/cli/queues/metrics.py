"""What flows through the demonstration, and the handlers it flows through.

The handlers do what their namesakes in a metrics server do: L1 and L2 merge the values of an
entity into one, TopN ranks, and the database takes rows. Merging keeps the count of what was
merged, so the rows that arrive can be held against the samples that set out.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_MEASURES = ("RespTime", "Cpm", "Sla", "Apdex", "Percentile")
_SCOPES = (
    "Endpoint",
    "EndpointRelation",
    "Service",
    "ServiceInstance",
    "ServiceRelation",
    "Database",
    "Cache",
    "MessageQueue",
)
ENTITIES = ("cart", "checkout", "currency", "email", "payment", "recommend", "shipping", "web")


class Metric:
    """The value of one metric of one entity: ``count`` samples that add up to ``total``.

    Each metric is a subclass of its own, because a queue goes by class.
    """

    __slots__ = ("count", "entity", "total")

    def __init__(self, entity: str, count: int, total: float) -> None:
        self.entity = entity
        self.count = count
        self.total = total


METRIC_CLASSES: tuple[type[Metric], ...] = tuple(
    type(scope + measure, (Metric,), {"__slots__": ()})
    for scope in _SCOPES
    for measure in _MEASURES
)


@dataclass(frozen=True, slots=True)
class SlowStatement:
    """A statement that took too long."""

    statement: str
    latency_ms: float


class SlowSql(SlowStatement):
    """One sent to a database."""

    __slots__ = ()


class SlowCacheCommand(SlowStatement):
    """One sent to a cache."""

    __slots__ = ()


SLOW_CLASSES: tuple[type[SlowStatement], ...] = (SlowSql, SlowCacheCommand)


@dataclass(frozen=True, slots=True)
class Row:
    """What the database is asked to write; ``count`` is the samples a metric's row stands for."""

    table: str
    key: str
    value: float
    count: int = 0


class Wait:
    """Waits a fixed time for each item, on average exactly; other threads run meanwhile.

    A sleep takes longer than it is told, so what it took too long is taken off the next ones.
    """

    _SHORTEST_S = 0.001

    def __init__(self, item_s: float) -> None:
        self._item_s = item_s
        self._owed_s = 0.0

    def for_items(self, count: int) -> None:
        """Take the time of ``count`` items, or note it until it is worth a sleep."""
        self._owed_s += count * self._item_s
        if self._owed_s >= self._SHORTEST_S:
            started = time.perf_counter()
            time.sleep(self._owed_s)
            self._owed_s -= time.perf_counter() - started


class Merge:
    """Merges the values of each entity, and passes the sums on once per ``period_s``."""

    def __init__(
        self,
        pass_on: Callable[[list[Metric]], object],
        *,
        period_s: float,
        stagger: float = 0.0,
        item_s: float = 0.0,
    ) -> None:
        self._pass_on = pass_on
        self._period_s = period_s
        self._wait = Wait(item_s)
        self._sums: dict[str, Metric] = {}
        self._due = time.monotonic() + period_s * (1 + stagger)

    def consume(self, batch: list[Metric]) -> None:
        """Add the batch to the sums."""
        sums = self._sums
        for value in batch:
            known = sums.get(value.entity)
            if known is None:
                sums[value.entity] = type(value)(value.entity, value.count, value.total)
            else:
                known.count += value.count
                known.total += value.total
        self._wait.for_items(len(batch))
        self.on_idle()

    def on_idle(self) -> None:
        """Pass the sums on if it is time."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._period_s
            self.on_shutdown()

    def on_shutdown(self) -> None:
        """Pass on what there is."""
        sums, self._sums = self._sums, {}
        if sums:
            self._pass_on(list(sums.values()))


class Rank:
    """Keeps the slowest statements, and passes them on once per ``period_s``."""

    SIZE = 10

    def __init__(self, pass_on: Callable[[list[Row]], object], *, period_s: float) -> None:
        self._pass_on = pass_on
        self._period_s = period_s
        self._slowest: list[SlowStatement] = []
        self._due = time.monotonic() + period_s

    def consume(self, batch: list[SlowStatement]) -> None:
        """Rank the batch among those kept."""
        self._slowest = heapq.nlargest(
            self.SIZE, [*self._slowest, *batch], key=lambda slow: slow.latency_ms
        )

    def on_idle(self) -> None:
        """Pass the ranking on if it is time, and begin a new one."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._period_s
            self.on_shutdown()

    def on_shutdown(self) -> None:
        """Pass the ranking on."""
        slowest, self._slowest = self._slowest, []
        if slowest:
            self._pass_on(
                [Row(type(slow).__name__, slow.statement, slow.latency_ms) for slow in slowest]
            )


class Database:
    """Takes the time of a commit for each batch; several threads may write at once."""

    def __init__(self, commit_s: float) -> None:
        self._commit_s = commit_s
        self._lock = threading.Lock()
        self.rows = 0
        self.samples = 0

    def consume(self, batch: Sequence[Row]) -> None:
        """Write the batch."""
        time.sleep(self._commit_s)
        with self._lock:
            self.rows += len(batch)
            self.samples += sum(row.count for row in batch)


def as_rows(metrics: list[Any]) -> list[Row]:
    """Merged metrics as the database wants them."""
    return [Row(type(m).__name__, m.entity, m.total / m.count, m.count) for m in metrics]
