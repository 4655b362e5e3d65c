"""What a batcher counts: how items end, how busy its workers are; and its instruments.

Guarantees of ``Outcomes``
    * An entry is counted, under the lock, before its submitter is answered.
    * Whoever waits for answers is woken after they were given.
    * What a submitter's callback raises is logged; the other entries are answered all the same.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchmill.batcher.entries import Entry
from batchmill.batcher.pending import Duplicates, FlushReason
from batchmill.pressure import ThresholdStats
from batchmill.telemetry import (
    BATCH_SIZES,
    DURATIONS_S,
    NO_BATCHES,
    NO_DURATIONS,
    ComponentKind,
    Distribution,
    Snapshot,
    counter,
    gauge,
    histogram,
    up_down,
)
from batchmill.waiters import ThreadWaiter

log = logging.getLogger("batchmill.batcher")


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One thread of a batcher since the start."""

    name: str
    busy_seconds: float
    """Time it has spent on batches, the current one included."""


@dataclass(frozen=True, slots=True)
class BatcherStats(Snapshot):
    """A batcher at one moment, and its counters since the start.

    While no submit is under way, ``submitted == pending`` plus the six ways an item can end:
    ``succeeded``, ``failed``, ``rejected``, ``dropped``, ``expired`` and ``cancelled``.
    """

    submitted: int
    """Items given to submit, submit_many and asubmit."""
    succeeded: int
    """Items the backend processed."""
    failed: int
    """Items the backend failed on."""
    rejected: int
    """Items refused under pressure, or because the batcher was closed."""
    dropped: int
    """Items dropped under pressure."""
    expired: int
    """Items whose deadline passed before they were sent."""
    cancelled: int
    """Items taken back before they were sent: a cancelled future, an interrupted submit."""
    queue_depth: int
    """Items waiting for a batch."""
    in_flight: int
    """Items with the backend."""
    parked: int
    """Items waiting to be offered again."""
    deciding: int
    """Items that thresholds are deciding about, or whose submit waits for room."""
    joined: int
    """Items waiting for the result of an equal item (``key``)."""
    batches: int
    """Batches sent."""
    backend_calls: int
    """Calls of the backend, including retries and split batches."""
    flushes: Mapping[FlushReason, int]
    """Why batches were sent, by reason."""
    retries: int
    """Batches sent again after a failure."""
    in_flight_limit: int
    """Batches that may be with the backend at the same time, now."""
    breaker_opened: int
    """How often the circuit breaker opened."""
    thresholds: ThresholdStats | None
    """What the thresholds decided, by level."""
    name: str = "batcher"
    """The name in logs and on threads."""
    capacity: int | None = None
    """Items that may wait at most; None for no limit."""
    workers: tuple[WorkerLoad, ...] = ()
    """Every thread that has sent a batch, in order."""
    batch_sizes: Distribution = NO_BATCHES
    """Items of each batch that the backend has finished."""
    batch_seconds: Distribution = NO_DURATIONS
    """How long the backend took for each, with all retries and splits of a batch."""

    @property
    def pending(self) -> int:
        """Items submitted that have no result yet."""
        return self.queue_depth + self.in_flight + self.parked + self.deciding + self.joined


class BatchTimes:
    """Batches by size and time, and how long each worker has been busy. Under the engine's lock.

    It is called once per batch, never per item.
    """

    __slots__ = ("_busy_s", "_durations", "_items", "_running", "_seconds", "_sizes")

    def __init__(self) -> None:
        self._running: dict[int, tuple[str, float]] = {}  # by batch: its worker, and since when
        self._busy_s: dict[str, float] = {}
        self._sizes = [0] * (len(BATCH_SIZES) + 1)
        self._items = 0
        self._durations = [0] * (len(DURATIONS_S) + 1)
        self._seconds = 0.0

    def begin(self, batch_id: int, now: float) -> None:
        """The calling worker has taken a batch."""
        self._running[batch_id] = threading.current_thread().name, now

    def end(self, batch_id: int, now: float) -> None:
        """The batch is over; does nothing if no worker has taken it."""
        if batch_id in self._running:
            worker, since = self._running.pop(batch_id)
            self._busy_s[worker] = self._busy_s.get(worker, 0.0) + now - since

    def sent(self, items: int, took_s: float) -> None:
        """The backend has finished a batch."""
        self._sizes[bisect_left(BATCH_SIZES, items)] += 1
        self._items += items
        self._durations[bisect_left(DURATIONS_S, took_s)] += 1
        self._seconds += took_s

    def loads(self, now: float) -> tuple[WorkerLoad, ...]:
        """Every worker that has ever taken a batch, by name; a batch under way counts up to now."""
        busy_s = dict(self._busy_s)
        for worker, since in self._running.values():
            busy_s[worker] = busy_s.get(worker, 0.0) + now - since
        return tuple(WorkerLoad(worker, busy_s[worker]) for worker in sorted(busy_s))

    @property
    def sizes(self) -> Distribution:
        """Batches by the number of their items."""
        return Distribution(BATCH_SIZES, tuple(self._sizes), self._items)

    @property
    def durations(self) -> Distribution:
        """Batches by how long the backend took."""
        return Distribution(DURATIONS_S, tuple(self._durations), self._seconds)


class Delivery:
    """Entries that were counted and whose submitters are being answered."""

    __slots__ = ("entries", "oldest_seq", "thread")

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.oldest_seq = min((entry.seq for entry in entries if entry.seq), default=0)
        """0: none of them was accepted, so that no flush() waits for them."""
        self.thread = threading.get_ident()


class Outcomes:
    """Counts how entries end, and answers their submitters.

    ``count`` and ``delivered_up_to`` are called with the lock held, ``deliver`` without it.
    """

    def __init__(self, name: str, lock: threading.Lock, duplicates: Duplicates) -> None:
        self._name = name
        self._lock = lock
        self._duplicates = duplicates
        self._deliveries: set[Delivery] = set()
        self.waiters: list[ThreadWaiter] = []
        """Woken whenever accepted entries have been answered."""
        self.counts = dict.fromkeys(
            ("submitted", "succeeded", "failed", "rejected", "dropped", "expired", "cancelled"), 0
        )

    def count(self, ended: Sequence[Entry]) -> Delivery:
        """Count entries that have ended, with the followers that share their result."""
        entries = list(ended)
        for entry in ended:
            # A follower shares neither a cancellation nor a deadline: it takes the place instead.
            if entry.key is not None and entry.result is not None and entry.ending != "expired":
                for follower in self._duplicates.release(entry):
                    entries.append(follower.share(entry.ending, entry.result))
        counts = self.counts
        for entry in entries:
            counts[entry.ending] += 1
        delivery = Delivery(entries)
        if delivery.oldest_seq:
            self._deliveries.add(delivery)
        return delivery

    def deliver(self, delivery: Delivery) -> None:
        """Answer the submitters; their callbacks run here."""
        for entry in delivery.entries:
            if entry.result is None:
                continue
            try:
                entry.resolve(entry.result)
            except BaseException:  # raised by a callback: the others must be answered all the same
                log.exception("batchmill batcher %s: a callback of an item failed", self._name)
        if delivery.oldest_seq:
            with self._lock:
                self._deliveries.discard(delivery)
                for waiter in self.waiters:
                    waiter.wake()

    def delivered_up_to(self, seq: int) -> bool:
        """Whether no other thread is answering an entry up to ``seq``."""
        here = threading.get_ident()
        return all(
            delivery.oldest_seq > seq or delivery.thread == here for delivery in self._deliveries
        )


def _pending(stats: BatcherStats) -> Mapping[str, int]:
    return {
        "waiting": stats.queue_depth,
        "in_flight": stats.in_flight,
        "parked": stats.parked,
        "deciding": stats.deciding,
        "joined": stats.joined,
    }


def _dropped(stats: BatcherStats) -> Mapping[str, int]:
    return {
        "rejected": stats.rejected,
        "dropped": stats.dropped,
        "expired": stats.expired,
        "cancelled": stats.cancelled,
    }


BATCHER: ComponentKind[BatcherStats] = ComponentKind(
    "batcher",
    (
        up_down("depth", "{item}", "Items waiting for a batch.", lambda s: s.queue_depth),
        up_down(
            "capacity",
            "{item}",
            "Items that may wait at most; missing where nothing bounds them.",
            lambda s: s.capacity,
        ),
        gauge(
            "used",
            "1",
            "How full it is, 0 to 1; missing where nothing bounds it.",
            lambda s: s.queue_depth / s.capacity if s.capacity else None,
        ),
        up_down("pending_items", "{item}", "Items without a result, by where.", _pending, "state"),
        counter("submitted_items", "{item}", "Items submitted.", lambda s: s.submitted),
        counter("succeeded_items", "{item}", "Items processed.", lambda s: s.succeeded),
        counter("failed_items", "{item}", "Items that the backend failed on.", lambda s: s.failed),
        counter(
            "dropped_items",
            "{item}",
            "Items that were not sent: rejected, dropped, expired, cancelled.",
            _dropped,
            "reason",
        ),
        histogram("batch_size", "{item}", "Items of a batch.", lambda s: s.batch_sizes),
        histogram(
            "backend_duration",
            "s",
            "Time of the backend for a batch, with retries.",
            lambda s: s.batch_seconds,
        ),
        counter(
            "flushes",
            "{batch}",
            "Batches formed, by why.",
            lambda s: {reason.value: count for reason, count in s.flushes.items()},
            "reason",
        ),
        counter("backend_calls", "{call}", "Calls of the backend.", lambda s: s.backend_calls),
        counter("retries", "{batch}", "Batches sent again after a failure.", lambda s: s.retries),
        up_down(
            "in_flight_limit",
            "{batch}",
            "Batches that may be with the backend at a time, now.",
            lambda s: s.in_flight_limit,
        ),
        counter(
            "breaker_opened", "{time}", "How often the breaker opened.", lambda s: s.breaker_opened
        ),
        counter(
            "worker_busy",
            "s",
            "Time on batches, the current one included; its rate is the load of the worker.",
            lambda s: {load.name.rpartition("-")[2]: load.busy_seconds for load in s.workers},
            "worker",
        ),
    ),
    label="batcher",
)
