"""Decides how much of the input that waits goes into a batch, and which of it.

Batches are to take about a given time, whatever waits: how much one may take follows from how long
the last ones took. A batch has a fixed cost, too, which grows with other load on the machine. Where
a batch would be mostly that, a smaller one would not be quicker, only more of them: so half of its
time at least goes into its input, and there is a least amount.

If more waits than a batch may take, that is a backlog. Then each batch has half of the time, and
takes what is new first: an event waits for the batch that runs when it arrives, and for its own.
The rest of the batch is the oldest of the backlog.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_FILE_COST = 32 * 1024
"""Opening a segment takes about as long as reading so many bytes."""
_FIRST_SHARE = 16
"""Without a pace yet, a batch takes this part of the most that is allowed."""
_RECENT = 8
_OVERHEAD_S = 1.0
"""The fixed cost of a batch, as long as all had the same size."""
_SPREAD = 1.5
"""Batches tell their fixed cost if the largest had so many times the input of the smallest."""
_TRIAL = 1.6
"""So many times the input of the last batch is enough for that."""
_MOST_GROWTH = 2
"""A batch takes at most so many times what the largest of the last ones took: a fixed cost that
chance has made too large would let a batch take far longer than it should."""
_NEW_SHARE = 0.75
"""What is new may take this part of a batch beside a backlog."""
_GROWTH, _SAFE, _SLOWLY = 1.05, 1.5, 1.002
"""By how much a ceiling grows with each batch of a backlog that came to its end: soon up to so many
times what it was lowered to, which is less than what was too much; then slowly."""


@dataclass(frozen=True)
class Segment:
    """A file of a spool."""

    mtime: float
    path: str
    size: int
    rows: int = 0

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
    backlog: int = 0
    """How many rows or messages it had of a backlog."""

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
    warm: bool = False
    """Whether a batch came before the last ones: the first of a process is slow."""
    ceiling: int | None = None
    """The most rows or messages of a batch since one ran out of memory; None: none did."""
    safe: float = 0.0
    """Beyond it the ceiling grows slowly."""
    begun: tuple[int, float] | None = None
    """The batch that runs, and when it began, by the monotonic clock; None: none runs."""

    def note(self, amount: int, seconds: float, *, backlog: int = 0) -> None:
        """Add a batch; ``backlog``: how many rows or messages of a backlog it had."""
        if self.recent and not self.warm:
            self.recent.clear()
            self.warm = True
        self.recent.append(BatchTime(amount, seconds, backlog))
        if self.ceiling is not None and backlog:  # only then it has bounded the batch
            growth = _GROWTH if self.ceiling < self.safe else _SLOWLY
            self.ceiling = int(self.ceiling * growth) + 1

    def limit(self, most: int, least: int, *, behind: bool = False) -> int:
        """How much the next batch may take; half as much beside a backlog."""
        if self.target_s is None:
            return most
        return batch_limit(self.recent, self.target_s / (2 if behind else 1), most, least)

    def lower_ceiling(self, count: int) -> None:
        """From now on, no batch has more rows or messages than one that is known to be too many."""
        if self.ceiling is None or count < self.ceiling:
            self.ceiling = max(1, count)
            self.safe = _SAFE * self.ceiling

    @property
    def usual_s(self) -> float:
        """How long a batch usually takes: its target or, if that is longer, as the last ones."""
        times = [time.seconds for time in list(self.recent)]  # another thread may add one meanwhile
        return max(self.target_s or 0.0, statistics.median(times) if times else 0.0)

    @property
    def backlog_per_s(self) -> float:
        """How many rows or messages of a backlog the last batches took in a second; 0: none."""
        times = list(self.recent)  # another thread may add one meanwhile
        seconds = sum(time.seconds for time in times)
        return sum(time.backlog for time in times) / seconds if seconds else 0.0


def batch_limit(recent: Iterable[BatchTime], target_s: float, most: int, least: int) -> int:
    """How much a batch may take to last about ``target_s``, given the last ones, newest last."""
    times = list(recent)
    if not times:
        return min(most, max(least, most // _FIRST_SHARE))
    overhead_s, pace = _fit(times)
    # Half of the time at least is for the input.
    expected_s = max(target_s, 2 * overhead_s)
    wanted = pace * (expected_s - overhead_s)
    last, amounts = times[-1], [time.amount for time in times]
    quickest = min(time.seconds for time in times)
    if len(times) > 2 and not _tell(amounts) and quickest > 1.25 * expected_s:
        # However small, they take too long. Perhaps a larger one takes no longer than that.
        wanted = _TRIAL * last.amount
    elif last.seconds > 1.5 * (overhead_s + last.amount / pace):  # slower than the others
        wanted = min(wanted, last.pace * expected_s)
    return min(most, max(least, min(int(wanted), _MOST_GROWTH * max(amounts))))


def _fit(times: Sequence[BatchTime]) -> tuple[float, float]:
    """The fixed cost of a batch in seconds, and how much input it takes in a second beside that."""
    amounts = [time.amount for time in times]
    amount = sum(amounts) / len(times)
    seconds = max(0.001, sum(time.seconds for time in times) / len(times))
    if not _tell(amounts):
        overhead_s = min(_OVERHEAD_S, seconds / 2)
    else:
        spread = sum((one - amount) ** 2 for one in amounts)
        slope = sum((time.amount - amount) * (time.seconds - seconds) for time in times) / spread
        # A tenth of the time is for the input, whatever chance says.
        overhead_s = min(max(0.0, seconds - slope * amount), 0.9 * seconds)
    return overhead_s, amount / (seconds - overhead_s)


def _tell(amounts: Sequence[int]) -> bool:
    """Whether the sizes of batches differ enough to tell their fixed cost."""
    return max(amounts) > _SPREAD * min(amounts)


@dataclass(frozen=True)
class Room:
    """What a batch may still take."""

    cost: float
    bytes: float
    rows: float

    def without(self, segment: Segment) -> Room:
        """The room left after taking that segment."""
        return Room(self.cost - segment.cost, self.bytes - segment.size, self.rows - segment.rows)

    def part(self, share: float) -> Room:
        """A part of it."""
        return Room(self.cost * share, self.bytes * share, self.rows * share)

    @property
    def is_exceeded(self) -> bool:
        """Whether more was taken than there was."""
        return self.cost < 0 or self.bytes < 0 or self.rows < 0


def how_many(waiting: Iterable[Segment], room: Room) -> int:
    """How many of the first segments go into a batch: one in any case."""
    count = 0
    for segment in waiting:
        room = room.without(segment)
        if count and room.is_exceeded:
            break
        count += 1
    return count


@dataclass(frozen=True)
class Cut:
    """The segments of a batch, of those that wait."""

    old: Sequence[Segment]
    """The oldest."""
    left: Sequence[Segment]
    """What waits on, all of it younger than ``old``."""
    new: Sequence[Segment] = ()
    """The newest, which are younger than what waits on."""


def cut(waiting: Sequence[Segment], room: Room, since: float) -> Cut:
    """The oldest segments and those that were written after ``since``, as far as there is room.

    ``waiting`` has the oldest first. One of both ends is taken in any case: so the backlog becomes
    smaller, and what is new does not wait for it. An oldest one that is larger than a batch may be
    is a batch of its own.
    """
    oldest, *others = waiting
    beside = room.without(oldest)
    if beside.is_exceeded:
        return Cut(waiting[:1], others)
    rest, new = room.part(_NEW_SHARE), 0
    for segment in reversed(others):
        rest, beside = rest.without(segment), beside.without(segment)
        fits = not (rest.is_exceeded or beside.is_exceeded)
        if segment.mtime <= since:
            break
        if not fits and (new or room.without(segment).is_exceeded):
            break
        new += 1
    end = len(waiting) - new
    for segment in waiting[end:]:
        room = room.without(segment)
    old = how_many(waiting[:end], room)
    return Cut(waiting[:old], waiting[old:end], waiting[end:])


def share(waiting: Mapping[int, tuple[int, int]], limit: int) -> dict[int, tuple[int, int]]:
    """Of the messages that wait, by partition: about ``limit``, the same part of each partition."""
    total = sum(end - first for first, end in waiting.values())
    if total <= limit:
        return dict(waiting)
    return {
        partition: (first, first + max(1, (end - first) * limit // total))
        for partition, (first, end) in waiting.items()
    }
