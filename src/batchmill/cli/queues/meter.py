"""From counters to rates and loads: the arithmetic between two snapshots, with no clock in it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from batchmill.queue import BatchQueueStats

RATE_WINDOW_S = 1.0
LOAD_WINDOW_S = 3.0


@dataclass(frozen=True, slots=True)
class Look:
    """All queues at one moment."""

    at_s: float
    """Seconds since the start."""
    stats: tuple[BatchQueueStats, ...]
    """One snapshot a queue; the first is the queue whose thread load is watched."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a queue did per second."""

    accepted: float
    consumed: float


@dataclass(frozen=True, slots=True)
class Loads:
    """How busy each drain thread of a queue was between two looks."""

    from_s: float
    to_s: float
    shares: tuple[float, ...]
    """Of each thread: time spent in handlers, as a part of the time that passed."""
    partitions: tuple[int, ...]
    """Of each thread: the partitions it served at the end."""

    @property
    def ratio(self) -> float | None:
        """Share of the busiest thread over that of the least busy; None while one had nothing."""
        return max(self.shares) / min(self.shares) if min(self.shares) > 0 else None


class Meter:
    """Remembers looks for as long as a figure needs them. Looks are to be added in order."""

    def __init__(self, first: Look) -> None:
        self._first = first
        self._recent: deque[Look] = deque([first])
        self._last_static = first
        self._rebalanced: Look | None = None

    def add(self, look: Look) -> None:
        """Take one more look into account."""
        if look.stats[0].rebalances == 0:
            self._last_static = look
        elif look.stats[0].rebalances != self.last.stats[0].rebalances:
            self._rebalanced = look
        self._recent.append(look)
        # The first one kept is the last that is old enough: windows are never shorter than asked.
        while look.at_s - self._recent[1].at_s >= LOAD_WINDOW_S:
            self._recent.popleft()

    @property
    def last(self) -> Look:
        """The newest look."""
        return self._recent[-1]

    def rates(self) -> tuple[Rate, ...]:
        """Each queue's, over the last second or what there is of it."""
        new = self.last
        old = self._at_least_back(RATE_WINDOW_S)
        passed_s = new.at_s - old.at_s
        if passed_s <= 0:
            return tuple(Rate(0.0, 0.0) for _ in new.stats)
        return tuple(
            Rate((b.accepted - a.accepted) / passed_s, (b.consumed - a.consumed) / passed_s)
            for a, b in zip(old.stats, new.stats, strict=True)
        )

    def loads_before(self) -> Loads | None:
        """From the start up to the first rebalance; up to now while there was none."""
        return _loads(self._first, self._last_static)

    def loads_after(self) -> Loads | None:
        """Since the latest rebalance, the last few seconds at most; None before the first."""
        if self._rebalanced is None:
            return None
        old = self._at_least_back(LOAD_WINDOW_S)
        return _loads(max(old, self._rebalanced, key=lambda look: look.at_s), self.last)

    def _at_least_back(self, window_s: float) -> Look:
        for look in reversed(self._recent):
            if self.last.at_s - look.at_s >= window_s:
                return look
        return self._recent[0]


def _loads(old: Look, new: Look) -> Loads | None:
    passed_s = new.at_s - old.at_s
    if passed_s <= 0:
        return None
    threads = list(zip(old.stats[0].threads, new.stats[0].threads, strict=True))
    return Loads(
        from_s=old.at_s,
        to_s=new.at_s,
        shares=tuple((b.busy_seconds - a.busy_seconds) / passed_s for a, b in threads),
        partitions=tuple(b.partitions for _, b in threads),
    )


def balances(stats: BatchQueueStats) -> bool:
    """Whether everything the queue accepted was consumed: nothing failed, nothing is left."""
    return stats.accepted == stats.consumed and not (
        stats.pending or stats.failed or stats.dropped["unregistered"]
    )
