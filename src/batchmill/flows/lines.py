"""Who waits for room, and in which order. Pure: the caller holds the lock.

A producer waits behind those who came before it with the same flow; the first of each flow waits
in the line of its worker. So the signals of a flow get in one after the other in the order in
which their producers came, and of several flows none can keep the others out.

Producers of a flow that has no worker yet, because there are as many flows as there may be, wait
in a line per flow until the flow has its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from batchmill.flows.flows import Flow
from batchmill.waiters import Waiter

if TYPE_CHECKING:
    from batchmill.flows.lane import Lane


class Ticket:
    """A producer's place in line, with the signal it wants to queue."""

    __slots__ = ("finish", "flow", "gone", "granted", "key", "lane", "reason", "signal", "waiter")

    def __init__(
        self, signal: Any, key: Hashable | None, finish: bool, reason: str, waiter: Waiter
    ) -> None:
        self.signal = signal
        self.key = key
        self.finish = finish
        self.reason = reason
        """What it waits for; the reason to count if it waits in vain."""
        self.waiter = waiter
        self.lane: Lane | None = None
        """Where it waits; None while it waits for a place among the flows."""
        self.flow: Flow | None = None
        self.granted = False
        """Whether its producer was told to go on: there is room, or the dispatcher closed."""
        self.gone = False
        """Whether it has left the line, for good."""


Line: TypeAlias = OrderedDict[Ticket, None]
"""An ordered set: leaving from the middle is as quick as from the front."""


class Lines:
    """All who wait."""

    def __init__(self) -> None:
        self._by_flow: dict[Flow, Line] = {}
        self._newcomers: OrderedDict[Hashable, Line] = OrderedDict()
        self._loose: Line = OrderedDict()  # without a flow
        self.promised: Line = OrderedDict()
        """Those for whom room is kept, and who have not come for it yet."""
        self.count = 0

    def join(self, ticket: Ticket, lane: Lane) -> None:
        """Wait for room on ``lane``, behind others of the same flow if there are any."""
        self.count += 1
        ticket.lane = lane
        if ticket.flow is None:
            self._loose[ticket] = None
            lane.tickets[ticket] = None
            return
        line = self._by_flow.setdefault(ticket.flow, OrderedDict())
        line[ticket] = None
        if len(line) == 1:
            lane.tickets[ticket] = None

    def join_newcomers(self, ticket: Ticket) -> None:
        """Wait for a place among the flows."""
        self.count += 1
        self._newcomers.setdefault(ticket.key, OrderedDict())[ticket] = None

    @property
    def has_newcomers(self) -> bool:
        """Whether any flow waits for a place."""
        return bool(self._newcomers)

    def pop_newcomers(self) -> tuple[Hashable, list[Ticket]]:
        """The flow that waited longest for a place, and its producers in order."""
        key, line = self._newcomers.popitem(last=False)
        self.count -= len(line)
        return key, list(line)

    def promise_first(self, lane: Lane) -> Ticket:
        """Take the first of the lane's line aside; he may come for his room."""
        ticket, _ = lane.tickets.popitem(last=False)
        self.promised[ticket] = None
        return ticket

    def leave(self, ticket: Ticket) -> bool:
        """Take a ticket out, and let the next of its flow move up; whether room was kept for it."""
        self.count -= 1
        ticket.gone = True
        if ticket.lane is None:
            line = self._newcomers[ticket.key]
            del line[ticket]
            if not line:
                del self._newcomers[ticket.key]
            return False
        ticket.lane.tickets.pop(ticket, None)
        if ticket.flow is None:
            del self._loose[ticket]
        else:
            line = self._by_flow[ticket.flow]
            del line[ticket]
            if not line:
                del self._by_flow[ticket.flow]
            else:
                first = next(iter(line))
                if first not in self.promised:
                    ticket.lane.tickets[first] = None
        kept = ticket in self.promised
        self.promised.pop(ticket, None)
        return kept

    def __iter__(self) -> Iterator[Ticket]:
        """Everybody who waits, in no particular order."""
        for line in (self._loose, *self._newcomers.values(), *self._by_flow.values()):
            yield from line

    def discard(self, ticket: Ticket) -> bool:
        """Take a ticket out whatever state its line is in; whether it was there.

        To be followed by :meth:`recount`.
        """
        ticket.gone = True
        self.promised.pop(ticket, None)
        if ticket.lane is not None:
            ticket.lane.tickets.pop(ticket, None)
        found = False
        for line in (self._loose, *self._newcomers.values(), *self._by_flow.values()):
            if ticket in line:
                del line[ticket]
                found = True
        return found

    def recount(self) -> None:
        """Put the count and the lanes' lines right from what is really there."""
        self._newcomers = OrderedDict((k, line) for k, line in self._newcomers.items() if line)
        self._by_flow = {flow: line for flow, line in self._by_flow.items() if line}
        everybody = set(self)
        self.count = len(everybody)
        self.promised = OrderedDict.fromkeys(t for t in self.promised if t in everybody)
        for first in [*self._loose, *(next(iter(line)) for line in self._by_flow.values())]:
            if first.lane is not None and first not in self.promised:
                first.lane.tickets[first] = None
