"""Turns a queue's inside into the numbers its users see."""

from __future__ import annotations

from batchmill import lifecycle
from batchmill.queue import stats
from batchmill.queue.core import QueueCore


def snapshot_queues() -> tuple[stats.BatchQueueStats, ...]:
    """A snapshot of each running queue of this process, by name: for whoever watches all of it."""
    running = [core for core in lifecycle.tracked(QueueCore) if not core.layout.closed]
    return tuple(snapshot(core) for core in sorted(running, key=lambda core: core.name))


def snapshot(core: QueueCore) -> stats.BatchQueueStats:
    """A frozen copy of how full ``core`` is and of its counters."""
    layout = core.layout
    with layout.lock:
        partitions = list(layout.partitions)
        rebalances, moved = core.rebalancer.rebalances, layout.moved_partitions
        last_moves = tuple(layout.last_moves)
    totals = {"drained": 0, "used": 0, "consumed": 0, "failed": 0, "unregistered": 0}
    rows = []
    for partition in partitions:
        with partition.lock:
            used = 0
            for lane in partition.lanes:
                totals["consumed"] += lane.consumed
                totals["failed"] += lane.failed
                totals["unregistered"] += lane.unregistered
                used += len(lane.buffer)
            totals["drained"] += partition.drained
            totals["used"] += used
            rows.append(
                stats.PartitionStats(
                    index=partition.index,
                    used=used,
                    capacity=partition.capacity,
                    drained=partition.drained,
                    refused=partition.refused,
                    thread=partition.owner.index,
                    classes=tuple(lane.cls for lane in partition.lanes if lane.cls is not None),
                )
            )
    owners = [row.thread for row in rows]
    return stats.BatchQueueStats(
        name=core.name,
        running=not layout.closed,
        partitions=tuple(rows),
        threads=tuple(
            stats.ThreadLoad(
                index=task.index,
                partitions=owners.count(task.index),
                items=task.items,
                busy_seconds=task.busy_ns / 1e9,
                in_handler=task.calling is not None,
            )
            for task in core.tasks
        ),
        accepted=totals["drained"] + totals["used"],
        consumed=totals["consumed"],
        failed=totals["failed"],
        dropped=stats.drops(
            full=sum(partition.refused for partition in partitions),
            stopped=sum(partition.stopped for partition in partitions),
            unregistered=totals["unregistered"],
            **({"rejected": 0, "shed": 0} | core.gate.turned_away if core.gate else {}),
        ),
        rebalances=rebalances,
        moved_partitions=moved,
        flush_cycles=sum(task.flush_cycles for task in core.tasks),
        idle_cycles=sum(task.idle_cycles for task in core.tasks),
        recovered_slots=core.recovered_slots,
        last_moves=last_moves,
    )
