"""Decides how much of the input that waits goes into a batch.

Batches are to take about a given time, whatever waits: how much one may take follows the pace of
the last ones. Where a batch is mostly overhead, a smaller one would not be quicker, only more of
them: so there is a least amount, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_FILE_COST = 32 * 1024
"""Opening a segment takes about as long as reading so many bytes."""
_FIRST_SHARE = 4
"""Without a pace yet, a batch takes this part of the most that is allowed."""
_RECENT = 4


@dataclass(frozen=True)
class Segment:
    """A file of a spool."""

    mtime: float
    path: str
    size: int

    @property
    def cost(self) -> int:
        """In bytes that take as long to read."""
        return self.size + _FILE_COST


@dataclass(frozen=True)
class BatchTime:
    """How long a batch took for its input."""

    amount: int
    """The costs of its segments, or how many messages it had."""
    seconds: float

    @property
    def pace(self) -> float:
        """How much it would have taken in a second."""
        return self.amount / max(self.seconds, 0.001)


@dataclass
class Pace:
    """Remembers how long the last batches took."""

    target_s: float | None
    """How long a batch is to take; None: as long as it takes with the most input."""
    recent: deque[BatchTime] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def note(self, amount: int, seconds: float) -> None:
        """Add a batch."""
        self.recent.append(BatchTime(amount, seconds))

    def limit(self, most: int, least: int) -> int:
        """How much the next batch may take."""
        if self.target_s is None:
            return most
        return batch_limit(self.recent, self.target_s, most, least)


def batch_limit(recent: Iterable[BatchTime], target_s: float, most: int, least: int) -> int:
    """How much a batch may take to last about ``target_s``, given the last ones, newest last.

    Small batches are mostly overhead, so the best pace of the last ones counts. But after one that
    lasted too long, its own pace does.
    """
    times = list(recent)
    if not times:
        wanted = most // _FIRST_SHARE
    elif times[-1].seconds > target_s:
        wanted = int(times[-1].pace * target_s)
    else:
        wanted = int(max(time.pace for time in times) * target_s)
    return min(most, max(least, wanted))


def how_many(waiting: Iterable[Segment], most_cost: int, most_bytes: int) -> int:
    """How many of the first segments go into a batch: one in any case."""
    count = cost = size = 0
    for segment in waiting:
        cost += segment.cost
        size += segment.size
        if count and (cost > most_cost or size > most_bytes):
            break
        count += 1
    return count


def share(waiting: Mapping[int, tuple[int, int]], limit: int) -> dict[int, tuple[int, int]]:
    """Of the messages that wait, by partition: about ``limit``, the same part of each partition."""
    total = sum(end - first for first, end in waiting.values())
    if total <= limit:
        return dict(waiting)
    return {
        partition: (first, first + max(1, (end - first) * limit // total))
        for partition, (first, end) in waiting.items()
    }
