"""One worker's bounded queue. Pure: the caller holds the lock.

Guarantees
    * Signals leave in the order they came, and what is evicted is the oldest.
    * Finish signals are evicted last: only when nothing else is queued here.
    * Taking, putting and evicting take constant time, however many finish signals are queued: one
      that eviction passed over is set aside, once, in front of all that came after it.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from batchmill.flows.flows import Entry
from batchmill.flows.lines import Ticket
from batchmill.waiters import ThreadWaiter


class Lane:
    """What one worker has queued, what it is working on, and who waits for room here."""

    __slots__ = (
        "_queue",
        "_spared",
        "asleep",
        "blocked_on",
        "capacity",
        "failed",
        "flows",
        "free",
        "handled",
        "index",
        "load",
        "parked",
        "running",
        "tickets",
    )

    def __init__(self, index: int, capacity: int) -> None:
        self.index = index
        self.capacity = capacity
        self._queue: deque[Entry] = deque()
        # Finish signals that eviction passed over: each is older than all that is in _queue.
        self._spared: deque[Entry] = deque()
        self.free = capacity
        """Room that is neither taken nor promised to a producer that waited for it."""
        self.load = 0
        """Signals queued or in the handler."""
        self.flows = 0
        """Flows assigned here; the flow map keeps it."""
        self.running: list[Entry] = []
        """What is in the handler now."""
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        """Producers that wait for room here, first come first."""
        self.asleep = False
        """Whether the worker has to be woken."""
        self.parked = ThreadWaiter()
        """Where the worker sleeps."""
        self.blocked_on: Lane | None = None
        """The lane for which the handler that runs here waits, without a timeout."""
        self.handled = 0
        self.failed = 0

    @property
    def depth(self) -> int:
        """Signals queued."""
        return len(self._queue) + len(self._spared)

    def put(self, entry: Entry) -> None:
        """Queue a signal and see that the worker is awake; the caller made sure of the room."""
        self._queue.append(entry)
        self.free -= 1
        self.load += 1
        if self.asleep:
            self.asleep = False
            self.parked.wake()

    def take(self, most: int) -> list[Entry]:
        """The oldest signals, ``most`` at most; they are running from now on."""
        queue = self._queue
        if self._spared:
            taken = [self._spared.popleft() for _ in range(min(most, len(self._spared)))]
            taken += [queue.popleft() for _ in range(min(most - len(taken), len(queue)))]
        elif len(queue) <= most:
            taken = list(queue)
            queue.clear()
        else:
            taken = [queue.popleft() for _ in range(most)]
        self.running = taken
        self.free += len(taken)
        return taken

    def finish_running(self) -> list[Entry]:
        """What was in the handler and no longer is."""
        done, self.running = self.running, []
        self.load -= len(done)
        return done

    def evict(self) -> Entry:
        """Remove the oldest signal that does not finish its flow, or else the oldest of all."""
        victim: Entry | None = None
        while victim is None and self._queue:
            entry = self._queue.popleft()
            if entry[2]:
                self._spared.append(entry)
            else:
                victim = entry
        if victim is None:
            victim = self._spared.popleft()
        self.free += 1
        self.load -= 1
        return victim

    def clear(self) -> list[Entry]:
        """Take out all that is queued; it will not run."""
        left = [*self._spared, *self._queue]
        self._spared.clear()
        self._queue.clear()
        self.free += len(left)
        self.load -= len(left)
        return left

    def queued(self) -> list[Entry]:
        """A copy of what is queued, oldest first."""
        return [*self._spared, *self._queue]

    def recount(self, promised: int) -> None:
        """Put the counts right from what is really there, and see that the worker is awake."""
        self.free = self.capacity - self.depth - promised
        self.load = self.depth + len(self.running)
        self.asleep = False
        self.parked.wake()
