"""The counters of a queue as frozen snapshots, and its instruments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from batchmill.telemetry import (
    NO_BATCHES,
    NO_DURATIONS,
    ComponentKind,
    Distribution,
    Snapshot,
    counter,
    durations_by_bits,
    gauge,
    histogram,
    sizes_by_bits,
    up_down,
)

if TYPE_CHECKING:
    from batchmill.queue.core import QueueCore
    from batchmill.queue.partition import Partition

DROPPED_FULL = "full"
DROPPED_STOPPED = "stopped"
DROPPED_UNREGISTERED = "unregistered"
LOST_FAILED = "failed"
LOST_HAND_OVERS = "refused_hand_overs"
LOST_LAST_CALLS = "failed_last_calls"
LOST_NOT_DRAINED = "not_drained"


@dataclass(frozen=True, slots=True)
class PartitionStats(Snapshot):
    """One partition at the moment of the snapshot."""

    index: int
    """Its number, from 0."""
    used: int
    """Items in it now."""
    capacity: int
    """Items it can hold."""
    drained: int
    """Items taken out of it since the start."""
    refused: int
    """Items refused because it was full, since the start."""
    thread: int
    """The drain thread that serves it."""
    classes: tuple[type, ...]
    """The classes seen on it so far (empty for a direct consumer)."""

    @property
    def used_percentage(self) -> float:
        """How full it is, 0 to 100."""
        return 100.0 * self.used / self.capacity


@dataclass(frozen=True, slots=True)
class ThreadLoad:
    """One drain thread since the start."""

    index: int
    """Its number, from 0."""
    partitions: int
    """How many partitions it serves now."""
    items: int
    """Items it has handed to handlers."""
    busy_seconds: float
    """Time it has spent in handlers, in calls that are over."""
    in_handler: bool = False
    """Whether it is in a handler at this moment: a call that hangs is visible here."""


@dataclass(frozen=True, slots=True)
class PartitionMove:
    """A partition that the balancer moved to another thread."""

    partition: int
    from_thread: int
    to_thread: int
    at: float
    """When it was moved, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class BatchQueueStats(Snapshot):
    """A queue at one moment, and its counters since the start.

    At any quiet moment ``accepted == consumed + failed + dropped["unregistered"] + pending``.
    Taken while producers run, each part is right, but not all are of the same instant.
    """

    name: str
    """The queue's name."""
    running: bool
    """Whether it accepts items."""
    partitions: tuple[PartitionStats, ...]
    """Every partition, in order."""
    threads: tuple[ThreadLoad, ...]
    """Every drain thread, in order."""
    accepted: int
    """Items for which ``produce`` returned True."""
    consumed: int
    """Items whose handler returned."""
    failed: int
    """Items whose handler raised."""
    dropped: Mapping[str, int]
    """Items that never reached a handler, by reason.

    ``full``: refused, no room. ``stopped``: refused at or after shutdown. ``unregistered``:
    accepted, but no handler for the class when drained. With thresholds also ``rejected`` and
    ``shed`` (dropped by a threshold's decision).
    """
    rebalances: int
    """How often the balancer moved something."""
    moved_partitions: int
    """How many partitions it moved in all."""
    flush_cycles: int
    """Drain cycles that handed at least one batch to a handler."""
    idle_cycles: int
    """Drain cycles that found nothing."""
    recovered_slots: int
    """Slots replaced after a producer was interrupted in the middle of a put (Ctrl-C)."""
    last_moves: tuple[PartitionMove, ...] = ()
    """The newest of the balancer's moves, the newest last."""
    cores: int = 0
    """Cores that its thread policy was resolved for: by affinity and by container quota."""
    scheduler_threads: int = 0
    """Threads that resulted; for a shared scheduler, all threads of its pool."""
    batch_sizes: Distribution = NO_BATCHES
    """Items of each handler call that is over."""
    handler_seconds: Distribution = NO_DURATIONS
    """How long each handler call took."""
    refused_hand_overs: Mapping[str, int] = field(default_factory=dict)
    """Items that its handlers passed on to another queue, and that were refused; by its name.

    Counted for declared downstream queues, and for a closed queue of the same manager.
    """
    failed_last_calls: int = 0
    """Handlers whose last call raised: what they had merged and not passed on is lost."""
    failed_idle_calls: int = 0
    """Calls of ``on_idle`` that raised."""

    @property
    def capacity(self) -> int:
        """Items that all partitions together can hold."""
        return sum(partition.capacity for partition in self.partitions)

    @property
    def total_used(self) -> int:
        """Items in all partitions now."""
        return sum(partition.used for partition in self.partitions)

    @property
    def used_percentage(self) -> float:
        """How full the queue is, 0 to 100."""
        return 100.0 * self.total_used / self.capacity

    @property
    def pending(self) -> int:
        """Items accepted and not finished: queued, or in a handler now."""
        done = self.consumed + self.failed + self.dropped[DROPPED_UNREGISTERED]
        return self.accepted - done

    @property
    def in_handlers(self) -> int:
        """Items that left their partition and whose handler has not returned."""
        return self.pending - self.total_used

    @property
    def lost(self) -> dict[str, int]:
        """Counts of what was accepted and did not get through, by reason; empty if all did.

        ``failed`` and ``unregistered`` items, ``refused_hand_overs`` and ``failed_last_calls``.
        """
        counts = {
            LOST_FAILED: self.failed,
            DROPPED_UNREGISTERED: self.dropped[DROPPED_UNREGISTERED],
            LOST_HAND_OVERS: sum(self.refused_hand_overs.values()),
            LOST_LAST_CALLS: self.failed_last_calls,
        }
        return {reason: count for reason, count in counts.items() if count}

    def top_n(self, count: int) -> tuple[PartitionStats, ...]:
        """The ``count`` fullest partitions, fullest first."""
        ranked = sorted(self.partitions, key=lambda partition: (-partition.used, partition.index))
        return tuple(ranked[: max(0, count)])


@dataclass(frozen=True, slots=True)
class BatchQueueManagerStats(Snapshot):
    """The queues of a manager at one moment, and what its latest ``shutdown_all`` came to."""

    queues: tuple[BatchQueueStats, ...]
    """Every running queue, oldest first."""
    shut_down: tuple[BatchQueueStats, ...]
    """The queues that the latest ``shutdown_all`` ended, in that order, as they were then."""
    lost: Mapping[str, Mapping[str, int]]
    """What the latest ``shutdown_all`` lost, by queue and reason; empty when it answered True.

    The reasons are those of ``BatchQueueStats.lost``, and ``not_drained``: items left in a queue
    that ran out of time (0 if only a handler's last call was left).
    """


class DropCounts(dict[str, int]):
    """Drops by reason: a dict that cannot be changed, so that a snapshot stays what it was."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a snapshot cannot be changed; dict(...) makes a copy that can")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __reduce__(self) -> tuple[type[DropCounts], tuple[dict[str, int]]]:
        return DropCounts, (dict(self),)


def take_snapshot(core: QueueCore) -> BatchQueueStats:
    """A frozen copy of how full ``core`` is and of its counters."""
    layout = core.layout
    with layout.lock:
        partitions = list(layout.partitions)
        rebalances, moved = core.rebalancer.rebalances, layout.moved_partitions
        refused_hand_overs = DropCounts(core.refused_hand_overs)
        last_moves = tuple(layout.last_moves)
    consumed = failed = unregistered = 0
    rows = []
    for partition in partitions:
        with partition.lock:
            rows.append(_partition_stats(partition))
            consumed += sum([lane.consumed for lane in partition.lanes])
            failed += sum([lane.failed for lane in partition.lanes])
            unregistered += sum([lane.unregistered for lane in partition.lanes])
    drops = {
        DROPPED_FULL: sum(row.refused for row in rows),
        DROPPED_STOPPED: sum(partition.stopped for partition in partitions),
        DROPPED_UNREGISTERED: unregistered,
    }
    if core.gate is not None:
        drops |= {"rejected": 0, "shed": 0} | core.gate.dropped
    owners = [row.thread for row in rows]
    return BatchQueueStats(
        name=core.name,
        running=not layout.closed,
        partitions=tuple(rows),
        threads=tuple(
            ThreadLoad(
                index=task.index,
                partitions=owners.count(task.index),
                items=task.items,
                busy_seconds=task.busy_ns / 1e9,
                in_handler=task.calling is not None,
            )
            for task in core.tasks
        ),
        accepted=sum(row.drained + row.used for row in rows),
        consumed=consumed,
        failed=failed,
        dropped=DropCounts(drops),
        rebalances=rebalances,
        moved_partitions=moved,
        flush_cycles=sum(task.flush_cycles for task in core.tasks),
        idle_cycles=sum(task.idle_cycles for task in core.tasks),
        recovered_slots=core.recovered_slots,
        last_moves=last_moves,
        cores=core.scheduler.cores,
        scheduler_threads=core.scheduler.size,
        batch_sizes=sizes_by_bits(
            [tuple(task.batch_sizes) for task in core.tasks],
            sum(task.items for task in core.tasks),
        ),
        handler_seconds=durations_by_bits(
            [tuple(task.durations) for task in core.tasks],
            sum(task.busy_ns for task in core.tasks) / 1e9,
        ),
        refused_hand_overs=refused_hand_overs,
        failed_last_calls=core.failed_last_calls,
        failed_idle_calls=core.failed_idle_calls,
    )


def _partition_stats(partition: Partition) -> PartitionStats:
    return PartitionStats(
        index=partition.index,
        used=partition.used,
        capacity=partition.capacity,
        drained=partition.drained,
        refused=partition.refused,
        thread=partition.owner.index,
        classes=tuple(lane.cls for lane in partition.lanes if lane.cls is not None),
    )


QUEUE: ComponentKind[BatchQueueStats] = ComponentKind(
    "queue",
    (
        up_down("depth", "{item}", "Items in all partitions now.", lambda s: s.total_used),
        up_down("capacity", "{item}", "Items that all partitions can hold.", lambda s: s.capacity),
        gauge("used", "1", "How full the queue is, 0 to 1.", lambda s: s.used_percentage / 100),
        gauge(
            "fullest_partition_used",
            "1",
            "How full its fullest partition is, 0 to 1: a class that comes faster than it drains.",
            lambda s: max(partition.used_percentage for partition in s.partitions) / 100,
        ),
        up_down("partitions", "{partition}", "Partitions.", lambda s: len(s.partitions)),
        counter("accepted_items", "{item}", "Items accepted.", lambda s: s.accepted),
        counter("consumed_items", "{item}", "Items whose handler returned.", lambda s: s.consumed),
        counter("failed_items", "{item}", "Items whose handler raised.", lambda s: s.failed),
        counter(
            "dropped_items",
            "{item}",
            "Items that reached no handler: full, stopped, unregistered, rejected, shed.",
            lambda s: s.dropped,
            "reason",
        ),
        histogram("batch_size", "{item}", "Items of a handler call.", lambda s: s.batch_sizes),
        histogram("handler_duration", "s", "Time of a handler call.", lambda s: s.handler_seconds),
        counter(
            "thread_busy",
            "s",
            "Time in handlers, in calls that are over; its rate is the load of the thread.",
            lambda s: {str(thread.index): thread.busy_seconds for thread in s.threads},
            "thread",
        ),
        up_down(
            "threads_in_handler",
            "{thread}",
            "Threads that are in a handler now; one that stays there hangs.",
            lambda s: sum(thread.in_handler for thread in s.threads),
        ),
        up_down("threads", "{thread}", "Drain threads.", lambda s: len(s.threads)),
        counter(
            "rebalances",
            "{rebalance}",
            "How often the balancer moved something.",
            lambda s: s.rebalances,
        ),
        counter(
            "moved_partitions",
            "{partition}",
            "Partitions that it moved in all.",
            lambda s: s.moved_partitions,
        ),
        counter(
            "refused_hand_overs",
            "{item}",
            "Items that handlers passed on to a queue that refused them.",
            lambda s: s.refused_hand_overs,
            "downstream",
        ),
        counter(
            "failed_last_calls",
            "{call}",
            "Handlers whose last call raised: what they had merged is lost.",
            lambda s: s.failed_last_calls,
        ),
        counter(
            "failed_idle_calls",
            "{call}",
            "Calls of on_idle that raised.",
            lambda s: s.failed_idle_calls,
        ),
        counter(
            "recovered_slots",
            "{slot}",
            "Slots replaced after a producer was interrupted.",
            lambda s: s.recovered_slots,
        ),
    ),
    label="queue",
)
