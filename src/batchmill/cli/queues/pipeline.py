"""The four queues of a metrics pipeline, from their presets, wired one behind the other.

::

    samples ────► METRICS_L1_AGGREGATION ──► METRICS_L2_PERSISTENCE ──► JDBC_BATCH_PERSISTENCE
                  merge per class             merge again                ▲ rows
    slow statements ───────────────────────► TOPN_PERSISTENCE ───────────┘
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from batchmill import presets
from batchmill.cli.queues.metrics import (
    METRIC_CLASSES,
    SLOW_CLASSES,
    Database,
    Merge,
    Rank,
    as_rows,
)
from batchmill.queue import BatchQueue, BatchQueueManager, BatchQueueStats, ThreadPolicy

L1_DRAIN_THREADS = 4
"""One per core would leave a small machine nothing to balance."""

L1_BUFFER = 250
L2_BUFFER = 50
TOPN_BUFFER = 250
JDBC_BUFFER = 50
"""The presets hold 20,000, 2,000, 1,000 and 10,000 a partition: none would ever look used here."""

L1_ITEM_S = 100e-6
COMMIT_S = 0.08
L1_PERIOD_S = 0.5
L2_PERIOD_S = 1.0


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
            presets.TOPN_PERSISTENCE, presets.topn_persistence(buffer_size=TOPN_BUFFER)
        )
        self.l2: BatchQueue[Any] = create(
            presets.METRICS_L2_PERSISTENCE, presets.l2_persistence(buffer_size=L2_BUFFER)
        )
        self.l1: BatchQueue[Any] = create(
            presets.METRICS_L1_AGGREGATION,
            presets.l1_aggregation(
                threads=ThreadPolicy.fixed(L1_DRAIN_THREADS),
                buffer_size=L1_BUFFER,
                max_batch=100,
                rebalance_interval_ms=rebalance_interval_s * 1000,
            ),
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
        """The queues in the order of the road, so that each may pass on its last to the next."""
        return (self.l1, self.l2, self.topn, self.jdbc)

    def stats(self) -> tuple[BatchQueueStats, ...]:
        """A snapshot of each queue, in the order of the road."""
        return tuple(queue.stats() for queue in self.queues)

    def shutdown(self) -> None:
        """Drain the queues one after the other.

        Not all at once, as the manager would: what L1 merged has to find L2 open.
        """
        for queue in self.queues:
            self._manager.shutdown(queue.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
