"""The workers' bounded queues, and the producers that wait for room in them.

Pure: the caller holds the lock.

Guarantees of ``WorkerQueue``
    * Signals leave in the order they came, and what is evicted is the oldest.
    * Finish signals are evicted last: only when nothing else is queued here.
    * Taking, putting and evicting take constant time, however many finish signals are queued: one
      that eviction passed over is set aside, once, in front of all that came after it.

Guarantees of ``WaitLists``
    * A producer waits behind those that came before it with the same flow; the first of each flow
      waits at the worker's queue. So the signals of a flow are queued in the order in which their
      producers came, and no flow can block the producers of another.
    * Producers of a flow that has no worker yet (``max_flows``) wait in a list per flow until the
      flow has its place.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Any, TypeAlias

from batchmill.flows.flow_map import Entry, Flow
from batchmill.waiters import ThreadWaiter, Waiter


class Ticket:
    """A producer that waits, with the signal it wants to queue."""

    __slots__ = ("finish", "flow", "gone", "granted", "key", "queue", "reason", "signal", "waiter")

    def __init__(
        self, signal: Any, key: Hashable | None, finish: bool, reason: str, waiter: Waiter
    ) -> None:
        self.signal = signal
        self.key = key
        self.finish = finish
        self.reason = reason
        """What it waits for; counted as the reason of the refusal if it waits in vain."""
        self.waiter = waiter
        self.queue: WorkerQueue | None = None
        """Where it waits; None while it waits for a place among the flows."""
        self.flow: Flow | None = None
        self.granted = False
        """Whether its producer was woken: room is reserved for it, or the dispatcher closed."""
        self.gone = False
        """Whether it has stopped waiting, for good."""


Tickets: TypeAlias = OrderedDict[Ticket, None]
"""An ordered set: removing from the middle is as quick as from the front."""


class WorkerQueue:
    """What one worker has queued, what it is working on, and who waits for room here.

    What is beyond ``capacity`` is in the ingress buffer; the router bounds that.
    """

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
        "running",
        "tickets",
        "waiter",
    )

    def __init__(self, index: int, capacity: int) -> None:
        self.index = index
        self.capacity = capacity
        self._queue: deque[Entry] = deque()
        # Finish signals that eviction passed over: each is older than all that is in _queue.
        self._spared: deque[Entry] = deque()
        self.free = capacity
        """Room that is neither taken nor reserved for a producer that waited for it.

        Negative for what is taken or reserved in the ingress buffer."""
        self.load = 0
        """Signals queued or in the handler."""
        self.flows = 0
        """Flows assigned here; the flow map keeps it."""
        self.running: list[Entry] = []
        """What is in the handler now."""
        self.tickets: Tickets = OrderedDict()
        """Producers that wait for room here, first come first."""
        self.asleep = False
        """Whether the worker has to be woken."""
        self.waiter = ThreadWaiter()
        """Where the worker sleeps."""
        self.blocked_on: WorkerQueue | None = None
        """The queue for which the handler that runs here waits, without a timeout."""
        self.handled = 0
        self.failed = 0

    @property
    def depth(self) -> int:
        """Signals queued, those in the ingress buffer included."""
        return len(self._queue) + len(self._spared)

    @property
    def buffered(self) -> int:
        """Signals in the ingress buffer."""
        return max(0, self.depth - self.capacity)

    def put(self, entry: Entry) -> None:
        """Queue a signal and wake the worker if it sleeps; the caller has checked the room."""
        self._queue.append(entry)
        self.free -= 1
        self.load += 1
        if self.asleep:
            self.asleep = False
            self.waiter.wake()

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
        """Empty the running batch and return it."""
        done, self.running = self.running, []
        self.load -= len(done)
        return done

    def evict(self) -> Entry:
        """Remove the oldest signal that does not finish its flow, or else the oldest of all."""
        victim: Entry | None = None
        while victim is None and self._queue:
            entry = self._queue.popleft()
            _, _, finish, _, _ = entry
            if finish:
                self._spared.append(entry)
            else:
                victim = entry
        if victim is None:
            victim = self._spared.popleft()
        self.free += 1
        self.load -= 1
        return victim

    def clear(self) -> list[Entry]:
        """Remove all that is queued; it will not run."""
        left = self.queued()
        self._spared.clear()
        self._queue.clear()
        self.free += len(left)
        self.load -= len(left)
        return left

    def queued(self) -> list[Entry]:
        """A copy of what is queued, oldest first."""
        return [*self._spared, *self._queue]

    def recount(self, reserved: int) -> None:
        """Correct the counts from what is really there, and wake the worker."""
        self.free = self.capacity - self.depth - reserved
        self.load = self.depth + len(self.running)
        self.asleep = False
        self.waiter.wake()


class WaitLists:
    """All producers that wait."""

    def __init__(self) -> None:
        self._by_flow: dict[Flow, Tickets] = {}
        self._by_new_flow: OrderedDict[Hashable, Tickets] = OrderedDict()
        self._without_flow: Tickets = OrderedDict()
        self.reserved: Tickets = OrderedDict()
        """Those for whom room is reserved, until their producer has woken up and uses it."""
        self.count = 0

    def join(self, ticket: Ticket, queue: WorkerQueue) -> None:
        """Wait for room in ``queue``, behind others of the same flow if there are any."""
        self.count += 1
        ticket.queue = queue
        if ticket.flow is None:
            self._without_flow[ticket] = None
            queue.tickets[ticket] = None
            return
        tickets = self._by_flow.setdefault(ticket.flow, OrderedDict())
        tickets[ticket] = None
        if len(tickets) == 1:
            queue.tickets[ticket] = None

    def join_new_flow(self, ticket: Ticket) -> None:
        """Wait for a place among the flows."""
        self.count += 1
        self._by_new_flow.setdefault(ticket.key, OrderedDict())[ticket] = None

    @property
    def has_new_flows(self) -> bool:
        """Whether any flow waits for a place."""
        return bool(self._by_new_flow)

    def pop_new_flow(self) -> tuple[Hashable, list[Ticket]]:
        """The flow that waited longest for a place, and its producers in order."""
        key, tickets = self._by_new_flow.popitem(last=False)
        self.count -= len(tickets)
        return key, list(tickets)

    def reserve_first(self, queue: WorkerQueue) -> Ticket:
        """The first that waits at ``queue``: room is reserved for it from now on."""
        ticket, _ = queue.tickets.popitem(last=False)
        self.reserved[ticket] = None
        return ticket

    def leave(self, ticket: Ticket) -> bool:
        """Remove a ticket, and let the next of its flow move up; whether it had room reserved."""
        self.count -= 1
        ticket.gone = True
        if ticket.queue is None:
            tickets = self._by_new_flow[ticket.key]
            del tickets[ticket]
            if not tickets:
                del self._by_new_flow[ticket.key]
            return False
        ticket.queue.tickets.pop(ticket, None)
        if ticket.flow is None:
            del self._without_flow[ticket]
        else:
            tickets = self._by_flow[ticket.flow]
            del tickets[ticket]
            if not tickets:
                del self._by_flow[ticket.flow]
            else:
                first = next(iter(tickets))
                if first not in self.reserved:
                    ticket.queue.tickets[first] = None
        had_room = ticket in self.reserved
        self.reserved.pop(ticket, None)
        return had_room

    def _lists(self) -> Iterator[Tickets]:
        yield self._without_flow
        yield from self._by_new_flow.values()
        yield from self._by_flow.values()

    def __iter__(self) -> Iterator[Ticket]:
        """Everybody who waits, in no particular order."""
        for tickets in self._lists():
            yield from tickets

    def discard(self, ticket: Ticket) -> bool:
        """Remove a ticket whatever state the lists are in; whether it was there.

        To be followed by :meth:`recount`.
        """
        ticket.gone = True
        self.reserved.pop(ticket, None)
        if ticket.queue is not None:
            ticket.queue.tickets.pop(ticket, None)
        removed = False
        for tickets in self._lists():
            if ticket in tickets:
                del tickets[ticket]
                removed = True
        return removed

    def recount(self) -> None:
        """Correct the count and the queues' tickets from what is really there."""
        self._by_new_flow = OrderedDict(
            (key, tickets) for key, tickets in self._by_new_flow.items() if tickets
        )
        self._by_flow = {flow: tickets for flow, tickets in self._by_flow.items() if tickets}
        everybody = set(self)
        self.count = len(everybody)
        self.reserved = OrderedDict.fromkeys(t for t in self.reserved if t in everybody)
        heads = [next(iter(tickets)) for tickets in self._by_flow.values()]
        for first in [*self._without_flow, *heads]:
            if first.queue is not None and first not in self.reserved:
                first.queue.tickets[first] = None
