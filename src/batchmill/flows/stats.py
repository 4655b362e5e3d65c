"""What a dispatcher counts and measures: stats, instruments, histograms, and rates."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from batchmill.flows.settings import Backpressure
from batchmill.telemetry import (
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

QUEUE_FULL = "queue_full"
INGRESS_FULL = "ingress_full"
MAX_FLOWS = "max_flows"
CLOSED = "closed"
CANCELLED = "cancelled"

SHORTEST_S = 1e-7
LONGEST_S = 1e4
GROWTH = 1.04

_STEPS = math.ceil(math.log(LONGEST_S / SHORTEST_S) / math.log(GROWTH))
BOUNDS = tuple(SHORTEST_S * GROWTH**step for step in range(_STEPS + 1))
"""Bucket ``n`` holds what is above ``BOUNDS[n - 1]`` and at most ``BOUNDS[n]``."""

MEMORY_S = 10.0
"""How far back a rate looks, in seconds."""


@dataclass(frozen=True, slots=True)
class LatencyStats(Snapshot):
    """Percentiles of a duration in seconds, each within 2 % (below 100 ns: 0)."""

    count: int
    """How many durations there were."""
    p50_s: float
    """Half of them took no longer."""
    p95_s: float
    """95 % of them took no longer."""
    p99_s: float
    """99 % of them took no longer."""


@dataclass(frozen=True, slots=True)
class WorkerStats(Snapshot):
    """One worker at the moment of the snapshot, and its counters since the start."""

    index: int
    """Its number, from 0."""
    depth: int
    """Signals in its queue now."""
    buffered: int
    """Signals for it in the ingress buffer now."""
    capacity: int
    """Signals its queue can hold."""
    running: int
    """Signals in its handler call now."""
    blocked: int
    """Producers that wait for room in its queue now."""
    flows: int
    """Flows assigned to it now."""
    handled: int
    """Signals whose handler call returned."""
    failed: int
    """Signals whose handler call raised."""
    rate: float
    """Signals per second that left its handler, over about the last ten seconds."""
    busy_seconds: float = 0.0
    """Time it has spent in handler calls that are over."""

    @property
    def load(self) -> int:
        """Signals queued, buffered or running: a new flow goes to the worker with the least."""
        return self.depth + self.buffered + self.running


@dataclass(frozen=True, slots=True)
class FlowStats(Snapshot):
    """A dispatcher at one moment, and its counters since the start.

    Taken in one critical section, so it always balances:
    ``dispatched == handled + failed + sum(evicted.values()) + unprocessed + pending``, and
    ``assigned_flows == completed_flows + expired_flows + displaced_flows + active_flows``.
    """

    name: str
    """The dispatcher's name."""
    running: bool
    """Whether it accepts signals."""
    policy: Backpressure
    """The backpressure policy."""
    workers: tuple[WorkerStats, ...]
    """Every worker, in order."""
    cores: int
    """Cores that the process may use, by affinity and by container quota."""
    ingress_depth: int
    """Signals in the ingress buffer now: those whose worker's queue is full."""
    ingress_capacity: int
    """Signals that the ingress buffer can hold."""
    blocked: int
    """Producers that wait for room now, whatever they wait for."""
    dispatched: int
    """Signals for which ``dispatch`` returned True."""
    refused: Mapping[str, int]
    """Signals that were never queued, by reason.

    ``ingress_full``: the worker's queue and the ingress buffer were full. ``queue_full``: the
    worker's queue was, and there is no ingress buffer (``ingress_capacity=0``). ``max_flows``: a
    new flow, and every known one had signals pending. Under BLOCK these three count waits that
    ended without room (timeout). ``closed``: at or after close. ``cancelled``: the producer's wait
    was cancelled or interrupted.
    """
    evicted: Mapping[str, int]
    """Signals that were queued and then dropped to make room (DROP_OLDEST), by reason.

    Always for a signal of the same worker; the reasons are those of ``refused``.
    """
    unprocessed: int
    """Signals that ``close()`` returned unprocessed."""
    assigned_flows: int
    """Flows that were given a worker."""
    completed_flows: int
    """Flows that ended: finished, and all their signals out of the dispatcher."""
    active_flows: int
    """Flows that have a worker now."""
    expired_flows: int
    """Flows forgotten because they were idle for ``idle_ttl``."""
    displaced_flows: int
    """Idle flows forgotten because a new one needed the place (``max_flows``)."""
    assignment_failures: int
    """New flows for which the assignment rule raised or returned no worker: the least loaded
    worker got them."""
    handler_latency: LatencyStats
    """How long a handler call took, successful or not: one duration per call."""
    wait: LatencyStats
    """How long a signal was queued until its handler call began: one duration per signal."""
    batch_sizes: Distribution = NO_BATCHES
    """Signals of each handler call that is over."""
    handler_seconds: Distribution = NO_DURATIONS
    """How long each handler call took, in the buckets that metrics have."""

    @property
    def handled(self) -> int:
        """Signals whose handler call returned."""
        return sum(worker.handled for worker in self.workers)

    @property
    def failed(self) -> int:
        """Signals whose handler call raised."""
        return sum(worker.failed for worker in self.workers)

    @property
    def in_handlers(self) -> int:
        """Signals in a handler call now."""
        return sum(worker.running for worker in self.workers)

    @property
    def queued(self) -> int:
        """Signals that wait now, in the workers' queues and in the ingress buffer."""
        return self.ingress_depth + sum(worker.depth for worker in self.workers)

    @property
    def worker_count(self) -> int:
        """How many workers there are."""
        return len(self.workers)

    @property
    def pending(self) -> int:
        """Signals accepted and not finished: queued, or in a handler call now."""
        return self.queued + self.in_handlers

    @property
    def dropped(self) -> Mapping[tuple[str, str], int]:
        """Every drop by policy and reason: refused and evicted signals together."""
        reasons = {**self.refused}
        for reason, count in self.evicted.items():
            reasons[reason] = reasons.get(reason, 0) + count
        return {(self.policy.value, reason): count for reason, count in reasons.items()}

    @property
    def rate(self) -> float:
        """Signals per second that left the handlers, over about the last ten seconds."""
        return sum(worker.rate for worker in self.workers)

    @property
    def skew(self) -> float:
        """The largest load of a worker over the mean: 1 is even, ``len(workers)`` all on one."""
        total = sum(worker.load for worker in self.workers)
        if total == 0:
            return 1.0
        return max(worker.load for worker in self.workers) * len(self.workers) / total


class Histogram:
    """Counts durations in a fixed number of buckets: exact counts, percentiles within 2 %.

    Bucket bounds grow by 4 % from 100 ns to about three hours, so the geometric middle of a bucket
    is at most 2 % away from any value in it, and a histogram always takes the same few kilobytes.
    Shorter durations count as 0, longer ones as the last bound. One thread records; another may
    read at the same time and sees some recent moment.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)

    def record(self, seconds: float) -> None:
        """Count one duration; a negative one counts as 0."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1

    def record_many(self, durations_s: Iterable[float]) -> None:
        """Count several durations; fast where each is close to the one before."""
        counts = self._counts
        bucket, above, up_to = 0, -math.inf, SHORTEST_S
        for seconds in durations_s:
            if not above < seconds <= up_to:
                bucket = bisect_left(BOUNDS, seconds)
                above = BOUNDS[bucket - 1] if bucket else -math.inf
                up_to = BOUNDS[bucket] if bucket < len(BOUNDS) else math.inf
            counts[bucket] += 1

    @property
    def count(self) -> int:
        """How many durations were counted."""
        return sum(self._counts)

    def quantile(self, share: float) -> float:
        """The duration that ``share`` (0 to 1) of all do not exceed; 0.0 with none counted."""
        return self.quantiles((share,))[0]

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Several quantiles of the same moment."""
        counts = list(self._counts)  # a copy: the worker goes on recording
        total = sum(counts)
        return [_value_at(counts, max(1, math.ceil(share * total))) for share in shares]


def latency_stats(histograms: Iterable[Histogram]) -> LatencyStats:
    """The percentiles of several histograms together."""
    histogram = merged(histograms)
    p50, p95, p99 = histogram.quantiles((0.50, 0.95, 0.99))
    return LatencyStats(count=histogram.count, p50_s=p50, p95_s=p95, p99_s=p99)


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """The sum of several histograms."""
    result = Histogram()
    for one in histograms:
        result._counts = [sum(pair) for pair in zip(result._counts, one._counts, strict=True)]
    return result


def _value_at(counts: Sequence[int], rank: int) -> float:
    """The value of the ``rank``-th smallest, from 1."""
    seen = 0
    for bucket, count in enumerate(counts):
        seen += count
        if seen >= rank:
            return _middle(bucket)
    return 0.0


def _middle(bucket: int) -> float:
    if bucket == 0:
        return 0.0
    if bucket == len(BOUNDS):
        return BOUNDS[-1]
    return math.sqrt(BOUNDS[bucket - 1] * BOUNDS[bucket])


class Rate:
    """Signals per second, over about the last ten seconds.

    A signal's weight decays with its age (by half every seven seconds), so the rate follows a
    change within seconds, and any number of readers see the same value.
    """

    __slots__ = ("_decayed_at", "_started")

    def __init__(self, now: float) -> None:
        self._started = now
        # Weight and time as one object: a reader never sees one without the other.
        self._decayed_at = (0.0, now)

    def add(self, count: int, now: float) -> None:
        """Count ``count`` signals at ``now``; called by one thread only."""
        self._decayed_at = (self._decayed(now) + count, now)

    def per_second(self, now: float) -> float:
        """The rate at ``now``; soon after the start, the average since then."""
        elapsed_s = now - self._started
        if elapsed_s <= 0.0:
            return 0.0
        return self._decayed(now) / (MEMORY_S * -math.expm1(-elapsed_s / MEMORY_S))

    def _decayed(self, now: float) -> float:
        weight, at = self._decayed_at
        return weight * math.exp(min(0.0, at - now) / MEMORY_S)


def _capacity(stats: FlowStats) -> int:
    return stats.ingress_capacity + sum(worker.capacity for worker in stats.workers)


def _dropped(stats: FlowStats) -> dict[str, int]:
    reasons = dict.fromkeys((QUEUE_FULL, INGRESS_FULL, MAX_FLOWS, CLOSED, CANCELLED), 0)
    for (_, reason), count in stats.dropped.items():
        reasons[reason] = count
    return reasons


def _flows_gone(stats: FlowStats) -> dict[str, int]:
    return {"expired": stats.expired_flows, "displaced": stats.displaced_flows}


FLOWS: ComponentKind[FlowStats] = ComponentKind(
    "flows",
    (
        up_down("depth", "{signal}", "Signals that wait now.", lambda s: s.queued),
        up_down("ingress_depth", "{signal}", "Those in the buffer.", lambda s: s.ingress_depth),
        up_down("capacity", "{signal}", "Signals that can wait.", _capacity),
        gauge("used", "1", "How full it is, 0 to 1.", lambda s: s.queued / _capacity(s)),
        counter("dispatched_signals", "{signal}", "Signals accepted.", lambda s: s.dispatched),
        counter(
            "handled_signals",
            "{signal}",
            "Signals whose handler call returned.",
            lambda s: s.handled,
        ),
        counter(
            "failed_signals", "{signal}", "Signals whose handler call raised.", lambda s: s.failed
        ),
        counter(
            "dropped_signals",
            "{signal}",
            "Signals refused or evicted: queue_full, ingress_full, max_flows, closed, cancelled.",
            _dropped,
            "reason",
        ),
        counter(
            "unprocessed_signals",
            "{signal}",
            "Signals that close() returned unprocessed.",
            lambda s: s.unprocessed,
        ),
        up_down("blocked_producers", "{thread}", "Producers waiting now.", lambda s: s.blocked),
        counter(
            "assigned_flows",
            "{flow}",
            "Flows that were given a worker.",
            lambda s: s.assigned_flows,
        ),
        counter("completed_flows", "{flow}", "Flows that ended.", lambda s: s.completed_flows),
        counter(
            "forgotten_flows",
            "{flow}",
            "Flows forgotten unfinished: expired (idle too long), displaced (by a new one).",
            _flows_gone,
            "reason",
        ),
        up_down(
            "active_flows", "{flow}", "Flows that have a worker now.", lambda s: s.active_flows
        ),
        counter(
            "assignment_failures",
            "{failure}",
            "New flows for which the assignment rule failed.",
            lambda s: s.assignment_failures,
        ),
        histogram("batch_size", "{signal}", "Signals of a handler call.", lambda s: s.batch_sizes),
        histogram("handler_duration", "s", "Time of a handler call.", lambda s: s.handler_seconds),
        up_down(
            "worker_depth",
            "{signal}",
            "Signals that wait for a worker, in its queue and in the buffer.",
            lambda s: {str(one.index): one.depth + one.buffered for one in s.workers},
            "worker",
        ),
        up_down(
            "worker_flows",
            "{flow}",
            "Flows that a worker has now.",
            lambda s: {str(one.index): one.flows for one in s.workers},
            "worker",
        ),
        counter(
            "worker_busy",
            "s",
            "Time in handlers, in calls that are over; its rate is the load of the worker.",
            lambda s: {str(one.index): one.busy_seconds for one in s.workers},
            "worker",
        ),
        up_down(
            "workers_in_handler",
            "{thread}",
            "Workers that are in a handler now; one that stays there hangs.",
            lambda s: sum(one.running > 0 for one in s.workers),
        ),
    ),
    label="flows",
)
