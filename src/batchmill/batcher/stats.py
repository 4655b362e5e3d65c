"""What a batcher is doing, as numbers: frozen snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchmill.batcher.pending import FlushReason
from batchmill.pressure import ThresholdStats


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One thread of a batcher since the start."""

    name: str
    busy_seconds: float
    """Time it has spent on batches, the one it is at included."""


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """A batcher at one moment, and its counters since the start.

    While no submit is under way, ``submitted == pending`` plus the six ways an item can end:
    ``succeeded``, ``failed``, ``rejected``, ``dropped``, ``expired`` and ``cancelled``.
    """

    submitted: int
    """Items given to submit, submit_many and asubmit."""
    succeeded: int
    """Items the backend took."""
    failed: int
    """Items the backend refused or failed on."""
    rejected: int
    """Items refused under pressure, or because the batcher was closed."""
    dropped: int
    """Items let go under pressure."""
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
    """Items waiting for an equal item's answer (``key``)."""
    batches: int
    """Batches sent."""
    backend_calls: int
    """Calls of the backend, retries and halves included."""
    flushes: Mapping[FlushReason, int]
    """Why batches were sent when they were."""
    retries: int
    """Batches sent again after a failure."""
    in_flight_limit: int
    """Batches that may be with the backend at once now."""
    breaker_opened: int
    """How often the circuit breaker opened."""
    thresholds: ThresholdStats | None
    """What the thresholds decided, by level."""
    name: str = "batcher"
    """The name in logs and on threads."""
    capacity: int | None = None
    """Items that may wait at most; None: nothing bounds that."""
    workers: tuple[WorkerLoad, ...] = ()
    """Every thread that has sent a batch, in order."""

    @property
    def pending(self) -> int:
        """Items submitted and not answered yet."""
        return self.queue_depth + self.in_flight + self.parked + self.deciding + self.joined
