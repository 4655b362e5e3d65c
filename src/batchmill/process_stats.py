"""Stats of all components of a process, as plain data for its status file.

They register themselves, so whoever writes a status need not know who made them. Queues, batchers
and flows give the same fields; the pipeline page and ``batchmill top`` show them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from batchmill.batcher import BatcherStats, snapshot_batchers
from batchmill.flows import FlowStats, snapshot_flows
from batchmill.pressure import ThresholdStats, snapshot_thresholds
from batchmill.queue import BatchQueueStats, PartitionMove, snapshot_queues

_MAX_PARTITIONS = 512
"""Of a queue with more, the rest is added to the last one listed: a status stays small."""


@dataclass(frozen=True, slots=True)
class _ThreadTime:
    """How long a thread has been busy."""

    thread: str
    busy_s: float
    """In calls of a handler that have returned."""
    in_handler: bool = False
    """Whether a call is under way now."""


class ProcessStats:
    """Collects the stats of every component of this process; one thread at a time may use it.

    A thread's load is that since the previous call of :meth:`queues`.
    """

    page_fault: ClassVar[str] = ""
    """Why this process has no page for Prometheus, though it is to have one; empty: it has."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._collected_s: float | None = None
        self._times: dict[tuple[str, str], _ThreadTime] = {}

    def report(self) -> dict[str, Any]:
        """What a status file says: ``queues`` and ``levels``; ``page_fault`` if there is one."""
        fault = {"page_fault": self.page_fault} if self.page_fault else {}
        return {"queues": self.queues(), "levels": self.levels(), **fault}

    def levels(self) -> list[dict[str, Any]]:
        """A JSON object for the thresholds of each queue, batcher or other depth, by name."""
        return [_level(stats) for stats in snapshot_thresholds()]

    def queues(self) -> list[dict[str, Any]]:
        """A JSON object for each queue, then each micro-batcher, then each flow dispatcher."""
        now_s = self._clock()
        elapsed_s = 0.0 if self._collected_s is None else now_s - self._collected_s
        times: dict[tuple[str, str], _ThreadTime] = {}

        def loads(queue: str, threads: Iterable[_ThreadTime]) -> list[dict[str, Any]]:
            named = {(queue, now.thread): now for now in threads}
            times.update(named)
            return [
                {"name": now.thread, "load": _load(self._times.get(key), now, elapsed_s)}
                for key, now in named.items()
            ]

        queues = [
            _queue(stats, loads(stats.name, _queue_threads(stats))) for stats in snapshot_queues()
        ]
        batchers = [
            _batcher(stats, loads(stats.name, _batcher_threads(stats)))
            for stats in snapshot_batchers()
        ]
        flows = [_flows(stats, loads(stats.name, _workers(stats))) for stats in snapshot_flows()]
        self._collected_s, self._times = now_s, times
        return queues + batchers + flows


def _queue(stats: BatchQueueStats, threads: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": stats.name,
        "kind": "queue",
        "depth": stats.total_used,
        "capacity": stats.capacity,
        "partitions": _partitions(stats),
        "threads": threads,
        "moves": stats.moved_partitions,
        "last_moves": [_move(move) for move in reversed(stats.last_moves)],
        "accepted": stats.accepted,
        "rejected": _nonzero({**stats.dropped, "failed": stats.failed}),
    }


def _queue_threads(stats: BatchQueueStats) -> Iterator[_ThreadTime]:
    for thread in stats.threads:
        name = f"{stats.name}-{thread.index}"
        yield _ThreadTime(name, thread.busy_seconds, thread.in_handler)


def _batcher(stats: BatcherStats, threads: list[dict[str, Any]]) -> dict[str, Any]:
    reasons = ("rejected", "dropped", "expired", "cancelled", "failed")
    return {
        "name": stats.name,
        "kind": "batcher",
        "depth": stats.queue_depth,
        "capacity": stats.capacity,
        "partitions": [{"depth": stats.queue_depth, "capacity": stats.capacity}],
        "threads": threads,
        "moves": 0,
        "last_moves": [],
        "accepted": stats.submitted - stats.rejected - stats.dropped,
        "rejected": _nonzero({reason: getattr(stats, reason) for reason in reasons}),
    }


def _batcher_threads(stats: BatcherStats) -> Iterator[_ThreadTime]:
    for worker in stats.workers:
        yield _ThreadTime(worker.name, worker.busy_seconds)


def _flows(stats: FlowStats, threads: list[dict[str, Any]]) -> dict[str, Any]:
    dropped = {reason: count for (_, reason), count in stats.dropped.items()}
    return {
        "name": stats.name,
        "kind": "flows",
        "depth": stats.queued,
        "capacity": stats.ingress_capacity + sum(worker.capacity for worker in stats.workers),
        "partitions": [
            {"depth": worker.depth + worker.buffered, "capacity": worker.capacity}
            for worker in stats.workers
        ],
        "threads": threads,
        "moves": 0,
        "last_moves": [],
        "accepted": stats.dispatched,
        "rejected": _nonzero({**dropped, "failed": stats.failed}),
        "flows": {
            "active": stats.active_flows,
            "assigned": stats.assigned_flows,
            "completed": stats.completed_flows,
            "expired": stats.expired_flows,
            "displaced": stats.displaced_flows,
        },
    }


def _workers(stats: FlowStats) -> Iterator[_ThreadTime]:
    for worker in stats.workers:
        yield _ThreadTime(f"{stats.name}-{worker.index}", worker.busy_seconds, worker.running > 0)


def _level(stats: ThresholdStats) -> dict[str, Any]:
    decisions = {
        f"{level.name.lower()} {action.value}": count
        for (level, action), count in stats.decisions.items()
    }
    return {
        "name": stats.name,
        "level": "NORMAL" if stats.level is None else stats.level.name,
        "value": stats.depth,
        **stats.limits,
        "decisions": _nonzero(decisions),
    }


def _load(before: _ThreadTime | None, now: _ThreadTime, elapsed_s: float) -> float:
    """The share of the time that a thread was busy, from 0 to 1.

    A call counts when it is over. One that was under way both times has filled the time between.
    """
    if before is None or elapsed_s <= 0:
        return 0.0
    busy_s = now.busy_s - before.busy_s
    if before.in_handler and now.in_handler and not busy_s:
        return 1.0
    return round(min(1.0, max(0.0, busy_s / elapsed_s)), 3)


def _partitions(stats: BatchQueueStats) -> list[dict[str, int]]:
    partitions = [{"depth": one.used, "capacity": one.capacity} for one in stats.partitions]
    listed = partitions[:_MAX_PARTITIONS]
    for partition in partitions[_MAX_PARTITIONS:]:
        listed[-1]["depth"] += partition["depth"]
        listed[-1]["capacity"] += partition["capacity"]
    return listed


def _move(move: PartitionMove) -> str:
    at = time.strftime("%H:%M:%S", time.gmtime(move.at))
    return f"{at} partition {move.partition}: thread {move.from_thread} → {move.to_thread}"


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {reason: count for reason, count in counts.items() if count}
