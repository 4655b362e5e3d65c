"""The four queues of a metrics pipeline with their handlers, and the traffic that feeds them.

::

    samples ────► METRICS_L1_AGGREGATION ──► METRICS_L2_PERSISTENCE ──► JDBC_BATCH_PERSISTENCE
                  merge per class             merge again                ▲ rows
    slow statements ───────────────────────► TOPN_PERSISTENCE ───────────┘

L1 and L2 merge the values of an entity into one, TopN keeps the slowest, the database writes rows.
A merged value keeps the count of its samples, so that the rows written can be compared with the
samples sent.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from batchmill import presets
from batchmill.queue import BatchQueue, BatchQueueManager, BatchQueueStats, ThreadPolicy

L1_DRAIN_THREADS = 4
"""One per core would leave a small machine nothing to balance."""

L1_BUFFER = 250
L2_BUFFER = 50
TOPN_BUFFER = 250
JDBC_BUFFER = 50
"""The presets hold 20,000, 2,000, 1,000 and 10,000 per partition: bars would stay empty here."""

L1_ITEM_S = 100e-6
COMMIT_S = 0.08
L1_PERIOD_S = 0.5
L2_PERIOD_S = 1.0


RECEIVERS = 2
SAMPLES_PER_S = 20_000
SLOW_PER_S = 300
BURST_FACTOR = 3
TICK_S = 0.01
_LONGEST_TICK_S = 0.1
"""A receiver that was delayed makes up for this much only: more would be a burst."""

_LATENCIES_MS = [random.Random(7).lognormvariate(3.5, 0.8) for _ in range(4096)]


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

    Each metric is a subclass of its own, because a queue partitions by class.
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
    """A database row; ``count`` is the number of samples that a metric's row stands for."""

    table: str
    key: str
    value: float
    count: int = 0


class Wait:
    """Waits a fixed time for each item, on average exactly; other threads run meanwhile.

    A sleep takes longer than requested; the excess is taken off the next ones.
    """

    _SHORTEST_S = 0.001

    def __init__(self, item_s: float) -> None:
        self._item_s = item_s
        self._owed_s = 0.0

    def for_items(self, count: int) -> None:
        """Sleep for ``count`` items, or add their time to the next sleep if it is too short."""
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
            merged = sums.get(value.entity)
            if merged is None:
                sums[value.entity] = type(value)(value.entity, value.count, value.total)
            else:
                merged.count += value.count
                merged.total += value.total
        self._wait.for_items(len(batch))
        self.on_idle()

    def on_idle(self) -> None:
        """Pass the sums on if the period is over."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._period_s
            self.on_shutdown()

    def on_shutdown(self) -> None:
        """Pass the sums on."""
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
        """Keep the slowest of the batch and those kept so far."""
        self._slowest = heapq.nlargest(
            self.SIZE, [*self._slowest, *batch], key=lambda slow: slow.latency_ms
        )

    def on_idle(self) -> None:
        """Pass the ranking on if the period is over, and start a new one."""
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
    """Sleeps for the time of a commit per batch; several threads may write at once."""

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
    """Merged metrics as database rows."""
    return [Row(type(m).__name__, m.entity, m.total / m.count, m.count) for m in metrics]


class Pipeline:
    """Four running queues; leave it with :meth:`shutdown`, or use it as a context manager."""

    def __init__(self, rebalance_interval_s: float) -> None:
        self._manager = BatchQueueManager()
        self.database = Database(COMMIT_S)
        create = self._manager.create
        self.jdbc: BatchQueue[Any] = create(
            presets.JDBC_BATCH_PERSISTENCE,
            presets.jdbc_batch(self.database, buffer_size=JDBC_BUFFER, max_batch=JDBC_BUFFER),
        )
        self.topn: BatchQueue[Any] = create(
            presets.TOPN_PERSISTENCE,
            presets.topn_persistence(buffer_size=TOPN_BUFFER),
            downstream=[self.jdbc],
        )
        self.l2: BatchQueue[Any] = create(
            presets.METRICS_L2_PERSISTENCE,
            presets.l2_persistence(buffer_size=L2_BUFFER),
            downstream=[self.jdbc],
        )
        self.l1: BatchQueue[Any] = create(
            presets.METRICS_L1_AGGREGATION,
            presets.l1_aggregation(
                threads=ThreadPolicy.fixed(L1_DRAIN_THREADS),
                buffer_size=L1_BUFFER,
                max_batch=100,
                rebalance_interval_ms=rebalance_interval_s * 1000,
            ),
            downstream=[self.l2],
        )
        self._add_handlers()

    def _add_handlers(self) -> None:
        for slow in SLOW_CLASSES:
            self.topn.add_handler(slow, Rank(self.jdbc.produce_many, period_s=L2_PERIOD_S))
        for index, metric in enumerate(METRIC_CLASSES):
            # Not all at the same moment: a rate per second should not depend on which second.
            part = index / len(METRIC_CLASSES)
            to_database = Merge(self._write, period_s=L2_PERIOD_S, stagger=part)
            self.l2.add_handler(metric, to_database)
            to_l2 = Merge(
                self.l2.produce_many, period_s=L1_PERIOD_S, stagger=part, item_s=L1_ITEM_S
            )
            self.l1.add_handler(metric, to_l2)

    def _write(self, metrics: list[Any]) -> None:
        self.jdbc.produce_many(as_rows(metrics))

    @property
    def queues(self) -> tuple[BatchQueue[Any], ...]:
        """The queues in the order items pass through them."""
        return (self.l1, self.l2, self.topn, self.jdbc)

    def stats(self) -> tuple[BatchQueueStats, ...]:
        """The stats of each queue, in the order of :attr:`queues`."""
        return tuple(queue.stats() for queue in self.queues)

    def shutdown(self) -> bool:
        """Drain the queues, upstream first; whether all that they accepted got through."""
        return self._manager.shutdown_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def rates_per_s(total_per_s: float) -> list[float]:
    """The rate of each class: the k-th has 1/k of the first one's (Zipf)."""
    shares = [1 / rank for rank in range(1, len(METRIC_CLASSES) + 1)]
    return [total_per_s * share / sum(shares) for share in shares]


class Pace:
    """Turns a rate and elapsed time into whole items; fractions are carried over."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._owed = 0.0

    def items(self, passed_s: float) -> int:
        """How many items are due for the elapsed time."""
        self._owed += self._per_s * passed_s
        whole = int(self._owed)
        self._owed -= whole
        return whole


class Traffic:
    """Receivers that feed a pipeline until :meth:`stop`, with one burst on the way."""

    def __init__(self, pipeline: Pipeline, burst_s: tuple[float, float]) -> None:
        self._pipeline = pipeline
        self._burst_s = burst_s
        self._stop = threading.Event()
        self._started = time.monotonic()
        self._threads = [
            threading.Thread(target=self._receive, args=(index,), name=f"receiver-{index}")
            for index in range(RECEIVERS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the receivers and join their threads."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _receive(self, index: int) -> None:
        rng = random.Random(index)
        metrics = [
            (cls, Pace(rate))
            for cls, rate in zip(
                METRIC_CLASSES, rates_per_s(SAMPLES_PER_S / RECEIVERS), strict=True
            )
        ]
        slow = [(cls, Pace(SLOW_PER_S / RECEIVERS / len(SLOW_CLASSES))) for cls in SLOW_CLASSES]
        last = time.monotonic()
        while not self._stop.wait(TICK_S):
            now = time.monotonic()
            passed_s = min(now - last, _LONGEST_TICK_S)
            last = now
            for statement, pace in slow:
                for latency_ms in rng.choices(_LATENCIES_MS, k=pace.items(passed_s)):
                    name = f"statement {rng.randrange(100)}"
                    self._pipeline.topn.produce(statement(name, 10 * latency_ms))
            weighted_s = passed_s * (BURST_FACTOR if self._is_burst(now) else 1)
            for metric, pace in metrics:
                if count := pace.items(weighted_s):
                    entities = rng.choices(ENTITIES, k=count)
                    latencies = rng.choices(_LATENCIES_MS, k=count)
                    self._pipeline.l1.produce_many(
                        [
                            metric(*sample)
                            for sample in zip(entities, [1] * count, latencies, strict=True)
                        ]
                    )

    def _is_burst(self, now: float) -> bool:
        start_s, end_s = self._burst_s
        return start_s <= now - self._started < end_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
