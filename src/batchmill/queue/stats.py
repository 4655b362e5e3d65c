"""What a queue is doing, as numbers: frozen snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

DROPPED_FULL = "full"
DROPPED_STOPPED = "stopped"
DROPPED_UNREGISTERED = "unregistered"


@dataclass(frozen=True, slots=True)
class PartitionStats:
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
    """Items turned away because it was full, since the start."""
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
    """Whether it is in a handler at this moment: a call that hangs shows here."""


@dataclass(frozen=True, slots=True)
class PartitionMove:
    """A partition that the balancer gave to another thread."""

    partition: int
    from_thread: int
    to_thread: int
    at: float
    """When it changed hands, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class BatchQueueStats:
    """A queue at one moment, and its counters since the start.

    At any quiet moment ``accepted == consumed + failed + dropped["unregistered"] + pending``.
    Taken while producers run, the parts are each right, but not all at the same instant.
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
    """Items for which a producer was told True."""
    consumed: int
    """Items whose handler returned."""
    failed: int
    """Items whose handler raised."""
    dropped: Mapping[str, int]
    """Items that never reached a handler, by reason.

    ``full``: turned away, no room. ``stopped``: turned away at or after shutdown.
    ``unregistered``: accepted, but no handler for the class when drained. With thresholds also
    ``rejected`` and ``shed`` (decided to drop).
    """
    rebalances: int
    """How often the balancer moved something."""
    moved_partitions: int
    """How many partitions it moved in all."""
    flush_cycles: int
    """Drain cycles that handed something over."""
    idle_cycles: int
    """Drain cycles that found nothing."""
    recovered_slots: int
    """Slots replaced after a producer was interrupted in the middle of a put (Ctrl-C)."""
    last_moves: tuple[PartitionMove, ...] = ()
    """The newest of the balancer's moves, the newest last."""

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

    def top_n(self, count: int) -> tuple[PartitionStats, ...]:
        """The ``count`` fullest partitions, fullest first."""
        ranked = sorted(self.partitions, key=lambda partition: (-partition.used, partition.index))
        return tuple(ranked[: max(0, count)])


class DropCounts(dict[str, int]):
    """Drops by reason: a dict that cannot be changed, so that a snapshot stays what it was."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a snapshot cannot be changed; dict(...) makes a copy that can")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __reduce__(self) -> tuple[type[DropCounts], tuple[dict[str, int]]]:
        return DropCounts, (dict(self),)


def drops(full: int, stopped: int, unregistered: int, **by_thresholds: int) -> DropCounts:
    """The read-only mapping of drop reasons."""
    return DropCounts(
        {
            DROPPED_FULL: full,
            DROPPED_STOPPED: stopped,
            DROPPED_UNREGISTERED: unregistered,
            **by_thresholds,
        }
    )
