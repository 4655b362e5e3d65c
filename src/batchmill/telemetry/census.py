"""All queues and micro-batchers of a process, as figures for its status file.

They are found by themselves: whoever writes a status need not know who made a queue. What comes out
is plain data, the same for both kinds; the pipeline page and ``batchmill top`` draw it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from batchmill.batcher import BatcherStats, snapshot_batchers
from batchmill.queue import BatchQueueStats, PartitionMove, snapshot_queues

_MANY_PARTITIONS = 512
"""Of a queue with more, the rest is added to the last one that is told: a status stays small."""


class Census:
    """Looks at every queue of this process; a thread's load is that since the look before.

    One thread at a time may use it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s: float | None = None
        self._busy: dict[tuple[str, str], tuple[float, bool]] = {}

    def take(self) -> list[dict[str, Any]]:
        """A mapping for each queue, then for each micro-batcher, by name."""
        now_s = self._clock()
        passed_s = None if self._looked_s is None else now_s - self._looked_s
        busy: dict[tuple[str, str], tuple[float, bool]] = {}

        def threads(queue: str, seen: Iterable[tuple[str, float, bool]]) -> list[dict[str, Any]]:
            told = []
            for name, seconds, inside in seen:
                busy[queue, name] = seconds, inside
                before = self._busy.get((queue, name))
                told.append({"name": name, "load": _load(before, (seconds, inside), passed_s)})
            return told

        found = [_of_queue(each, threads) for each in snapshot_queues()]
        found += [_of_batcher(each, threads) for each in snapshot_batchers()]
        self._looked_s, self._busy = now_s, busy
        return found


_Threads = Callable[[str, Iterable[tuple[str, float, bool]]], list[dict[str, Any]]]


def _of_queue(stats: BatchQueueStats, threads: _Threads) -> dict[str, Any]:
    return {
        "name": stats.name,
        "kind": "queue",
        "depth": stats.total_used,
        "capacity": stats.capacity,
        "partitions": _partitions((each.used, each.capacity) for each in stats.partitions),
        "threads": threads(
            stats.name,
            (
                (f"{stats.name}-{each.index}", each.busy_seconds, each.in_handler)
                for each in stats.threads
            ),
        ),
        "moves": stats.moved_partitions,
        "last_moves": [_text(each) for each in reversed(stats.last_moves)],
        "accepted": stats.accepted,
        "rejected": _some({**stats.dropped, "failed": stats.failed}),
    }


def _of_batcher(stats: BatcherStats, threads: _Threads) -> dict[str, Any]:
    turned_away = {
        reason: getattr(stats, reason)
        for reason in ("rejected", "dropped", "expired", "cancelled", "failed")
    }
    return {
        "name": stats.name,
        "kind": "batcher",
        "depth": stats.queue_depth,
        "capacity": stats.capacity,
        "partitions": [{"depth": stats.queue_depth, "capacity": stats.capacity}],
        "threads": threads(
            stats.name, ((each.name, each.busy_seconds, False) for each in stats.workers)
        ),
        "moves": 0,
        "last_moves": [],
        "accepted": stats.submitted - stats.rejected - stats.dropped,
        "rejected": _some(turned_away),
    }


def _load(
    before: tuple[float, bool] | None, now: tuple[float, bool], passed_s: float | None
) -> float:
    """The share of the time that a thread was busy, from 0 to 1.

    A call counts when it is over. One that was under way at both looks has filled the time.
    """
    if before is None or not passed_s or passed_s <= 0:
        return 0.0
    spent_s = now[0] - before[0]
    if before[1] and now[1] and not spent_s:
        return 1.0
    return round(min(1.0, max(0.0, spent_s / passed_s)), 3)


def _partitions(seen: Iterable[tuple[int, int]]) -> list[dict[str, int]]:
    told = [{"depth": depth, "capacity": capacity} for depth, capacity in seen]
    for more in told[_MANY_PARTITIONS:]:
        for key, value in more.items():
            told[_MANY_PARTITIONS - 1][key] += value
    return told[:_MANY_PARTITIONS]


def _text(move: PartitionMove) -> str:
    at = time.strftime("%H:%M:%S", time.gmtime(move.at))
    return f"{at} partition {move.partition}: thread {move.from_thread} → {move.to_thread}"


def _some(counts: Mapping[str, int]) -> dict[str, int]:
    return {reason: n for reason, n in counts.items() if n}
