"""Where each signal goes, and who has to wait. Pure: the caller holds the lock and has the clock.

Guarantees
    * A signal's flow is looked up and the signal queued in one step, so the signals of a flow are
      queued in the order in which their producers came.
    * Whoever waits is served: room that becomes free is promised to the first in line, and the
      lines of several workers take turns. Nobody passes a producer that waits with the same flow.
    * Room is promised, not handed over: the signal is queued by its producer, who may have given
      up in the meantime. A promise that is given back goes to the next in line.
    * No worker's queue ever holds more than its capacity, nor all together more than the
      ingress capacity.
    * Every signal that is refused or evicted is counted under a reason, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from batchmill.flows.assign import Assignment, LeastLoaded, RoundRobin
from batchmill.flows.flows import Entry, Flow, FlowMap
from batchmill.flows.lane import Lane
from batchmill.flows.lines import Lines, Ticket
from batchmill.flows.settings import Backpressure, FlowSettings
from batchmill.flows.stats import CANCELLED, CLOSED, INGRESS_FULL, MAX_FLOWS, QUEUE_FULL


class Router:
    """The lanes, the flows, the lines of those who wait, and the counts."""

    def __init__(self, config: FlowSettings) -> None:
        self.lanes = [
            Lane(index, config.worker_queue_capacity) for index in range(config.worker_count)
        ]
        self.flows = FlowMap(self.lanes, config.idle_ttl, config.max_flows)
        self.assignment: Assignment = LeastLoaded()
        self._turns = RoundRobin()
        self._drops_oldest = config.backpressure is Backpressure.DROP_OLDEST
        self._batch_max = config.batch_max
        self._capacity = config.ingress_capacity
        self._free = config.ingress_capacity
        self._lines = Lines()
        self._served = -1
        self.closed = False
        self._numbers = 0
        self._numbers_lost = 0
        self.unprocessed = 0
        self.refused = {QUEUE_FULL: 0, INGRESS_FULL: 0, MAX_FLOWS: 0, CLOSED: 0, CANCELLED: 0}
        self.evicted = {QUEUE_FULL: 0, INGRESS_FULL: 0}

    def offer(self, signal: Any, key: Hashable | None, finish: bool, now: float) -> str | None:
        """Queue a signal; None when it is in, else the reason why not, and nothing has changed."""
        if now >= self.flows.next_expiry:
            self._expire(now)
        flow = self.flows.get(key) if key is not None else None
        if flow is None or flow.waiting:
            return self._offer_otherwise(signal, key, flow, finish, now)
        lane = self.lanes[flow.worker]
        if lane.free < 1 or self._free < 1 or self.closed:
            return self._offer_full(signal, flow, lane, finish, now)
        self.flows.accept(flow, finish)
        # What _put does, without the call: most signals come this way.
        number = self._numbers
        self._numbers = number + 1
        self._free -= 1
        lane.put((signal, flow, finish, now, number))
        return None

    def line_up(self, ticket: Ticket, now: float) -> None:
        """Give a producer that was told a reason its place in line."""
        if ticket.key is None:
            lane = self.lanes[self._turns.pick(self.lanes)]
        else:
            flow = self.flows.get(ticket.key)
            if flow is None:
                if self._lines.has_newcomers or not self.flows.make_room():
                    ticket.reason = MAX_FLOWS
                    self._lines.join_newcomers(ticket)
                    return
                flow = self._add_flow(ticket.key)
            self.flows.wait(flow)
            ticket.flow = flow
            lane = self.lanes[flow.worker]
        self._lines.join(ticket, lane)
        self._serve(lane, now)

    def redeem(self, ticket: Ticket, now: float) -> bool:
        """Queue the signal of a ticket that was granted; False when closed in the meantime."""
        lane = ticket.lane
        if self.closed or lane is None:
            self.give_up(ticket, CLOSED, now)
            return False
        self._leave(ticket)
        if ticket.flow is not None:
            ticket.flow.waiting -= 1
            self.flows.accept(ticket.flow, ticket.finish)
        self._put(lane, ticket.signal, ticket.flow, ticket.finish, now)
        self._serve(lane, now)  # the next with the same flow may go on
        return True

    def give_up(self, ticket: Ticket, reason: str, now: float) -> None:
        """The producer waits no more: its signal is refused, and who is next may have its room."""
        if ticket.gone:
            return
        self._withdraw(ticket, reason, now)
        if ticket.lane is not None:
            self._serve(ticket.lane, now)

    def _withdraw(self, ticket: Ticket, reason: str, now: float) -> None:
        self._leave(ticket)
        if ticket.flow is not None:
            self.flows.stop_waiting(ticket.flow, now)
        self.refuse(ticket.key, ticket.finish, reason, now)

    def refuse(self, key: Hashable | None, finish: bool, reason: str, now: float) -> None:
        """Count a signal that does not get in. A finish that does not still ends its flow."""
        self.refused[reason] += 1
        if finish and key is not None:
            self.flows.finish(key, now)
        self._welcome(now)

    def complete(self, key: Hashable, now: float) -> bool:
        """End a flow without a signal; whether it was known."""
        known = self.flows.finish(key, now)
        self._welcome(now)
        return known

    def take(self, lane: Lane, now: float) -> list[Entry]:
        """The next batch of a worker; its room is free at once."""
        taken = lane.take(self._batch_max)
        self._free += len(taken)
        if self._lines.count:
            self._serve(lane, now)
        return taken

    def settle(self, lane: Lane, succeeded: bool, now: float) -> None:
        """The worker's batch is out of its handler."""
        done = lane.finish_running()
        if succeeded:
            lane.handled += len(done)
        else:
            lane.failed += len(done)
        self.flows.settle(done, now)
        if self._lines.has_newcomers:
            self._welcome(now)

    def expire(self, now: float) -> None:
        """Forget the flows whose time is up."""
        if now >= self.flows.next_expiry:
            self._expire(now)

    def close(self) -> None:
        """Let nobody in any more, and tell those who wait."""
        self.closed = True
        for ticket in self._lines:
            ticket.granted = True
            ticket.waiter.wake()

    def clear(self, now: float) -> list[Entry]:
        """Take out all that is queued, in the order it was dispatched."""
        left = [entry for lane in self.lanes for entry in lane.clear()]
        left.sort(key=lambda entry: entry[4])
        self._free += len(left)
        self.unprocessed += len(left)
        self.flows.settle(left, now)
        return left

    @property
    def dispatched(self) -> int:
        """Signals that were let in since the start."""
        return self._numbers - self._numbers_lost

    @property
    def depth(self) -> int:
        """Signals queued, over all workers."""
        return sum(lane.depth for lane in self.lanes)

    @property
    def waiting(self) -> int:
        """Producers that wait."""
        return self._lines.count

    def waiting_per_lane(self) -> Counter[Lane | None]:
        """Producers that wait for room on each lane; None: for a place among the flows."""
        return Counter(ticket.lane for ticket in self._lines)

    def recount(self, now: float) -> None:
        """Put every count right from what is really queued, running and waiting.

        For after an exception out of the blue (Ctrl-C) in the middle of a change.
        """
        self._lines.recount()
        promised = self._lines.promised
        entries = [entry for lane in self.lanes for entry in [*lane.queued(), *lane.running]]
        done = sum(lane.handled + lane.failed for lane in self.lanes)
        gone = sum(self.evicted.values()) + self.unprocessed
        self._numbers_lost = self._numbers - done - gone - len(entries)
        for lane in self.lanes:
            lane.recount(sum(ticket.lane is lane for ticket in promised))
        self._free = self._capacity - self.depth - len(promised)
        self.flows.recount(
            [flow for _, flow, _, _, _ in entries if flow is not None],
            [ticket.flow for ticket in self._lines if ticket.flow is not None],
            now,
        )
        self._welcome(now)
        self._serve(self.lanes[0], now)

    def interrupt(self, ticket: Ticket | None, now: float) -> None:
        """A producer was interrupted, nobody knows where: drop its ticket and count anew."""
        waited = ticket is not None and self._lines.discard(ticket)
        self.recount(now)
        if waited and ticket is not None:
            self.refuse(ticket.key, ticket.finish, CANCELLED, now)

    def _offer_otherwise(
        self, signal: Any, key: Hashable | None, flow: Flow | None, finish: bool, now: float
    ) -> str | None:
        """The signal has no flow, or a new one, or others wait with signals of its flow."""
        if self.closed:
            return CLOSED
        if flow is not None:
            return QUEUE_FULL  # behind those who wait with the same flow
        if key is None:
            lane = self.lanes[self._turns.pick(self.lanes)]
            return self._offer_at(lane, signal, None, finish, now)
        worker = self.assignment.pick(self.lanes)
        lane = self.lanes[worker]
        if not self._drops_oldest:
            # Not mapped before it is certain: a signal that is refused leaves no flow behind.
            if self._free < 1:
                return INGRESS_FULL
            if lane.free < 1:
                return QUEUE_FULL
        if self._lines.has_newcomers or not self.flows.make_room():
            return MAX_FLOWS
        return self._offer_at(lane, signal, self.flows.add(key, worker), finish, now)

    def _offer_at(
        self, lane: Lane, signal: Any, flow: Flow | None, finish: bool, now: float
    ) -> str | None:
        if lane.free < 1 or self._free < 1:
            return self._offer_full(signal, flow, lane, finish, now)
        if flow is not None:
            self.flows.accept(flow, finish)
        self._put(lane, signal, flow, finish, now)
        return None

    def _offer_full(
        self, signal: Any, flow: Flow | None, lane: Lane, finish: bool, now: float
    ) -> str | None:
        if self.closed:
            return CLOSED
        reason = QUEUE_FULL if lane.free < 1 else INGRESS_FULL
        if not self._drops_oldest:
            return reason
        if flow is not None:
            # Before the eviction: what is evicted may be the last that holds this very flow.
            self.flows.accept(flow, finish)
        self._evict(lane if lane.free < 1 else max(self.lanes, key=_depth), reason, now)
        self._put(lane, signal, flow, finish, now)
        return None

    def _evict(self, lane: Lane, reason: str, now: float) -> None:
        victim = lane.evict()
        self._free += 1
        self.evicted[reason] += 1
        self.flows.settle((victim,), now)

    def _put(self, lane: Lane, signal: Any, flow: Flow | None, finish: bool, now: float) -> None:
        number = self._numbers
        self._numbers = number + 1
        self._free -= 1
        lane.put((signal, flow, finish, now, number))

    def _add_flow(self, key: Hashable) -> Flow:
        return self.flows.add(key, self.assignment.pick(self.lanes))

    def _leave(self, ticket: Ticket) -> None:
        """Take a ticket out of its line, with the room that may be kept for it."""
        if self._lines.leave(ticket) and ticket.lane is not None:
            self._free += 1
            ticket.lane.free += 1

    def _serve(self, lane: Lane, now: float) -> None:
        """Promise the room there is to those who wait: in each line, first come, first served.

        Room arose on ``lane``. Where a handler waits for that one without a timeout, it comes
        first: under the ingress bound the room might otherwise go where only the return of that
        handler could free it again.
        """
        if self.closed:
            return
        if any(other.blocked_on is lane for other in self.lanes):
            while lane.tickets and lane.free > 0 and self._free > 0:
                self._promise(lane, now)
        while self._free > 0:
            # The lanes take turns: no line can keep the others waiting.
            for index in range(self._served + 1, self._served + 1 + len(self.lanes)):
                lane = self.lanes[index % len(self.lanes)]
                if lane.tickets and lane.free > 0:
                    self._served = lane.index
                    self._promise(lane, now)
                    break
            else:
                return

    def _promise(self, lane: Lane, now: float) -> None:
        ticket = self._lines.promise_first(lane)
        lane.free -= 1
        self._free -= 1
        ticket.granted = True
        if not ticket.waiter.wake():
            # Its loop is gone, and nobody will come. Whoever called this goes on to the next.
            self._withdraw(ticket, CANCELLED, now)

    def _welcome(self, now: float) -> None:
        """Give flows that wait for a place theirs, as far as there is any."""
        while self._lines.has_newcomers and not self.closed and self.flows.make_room():
            key, tickets = self._lines.pop_newcomers()
            flow = self._add_flow(key)
            lane = self.lanes[flow.worker]
            for ticket in tickets:
                ticket.flow, ticket.reason = flow, QUEUE_FULL
                self.flows.wait(flow)
                self._lines.join(ticket, lane)
            self._serve(lane, now)

    def _expire(self, now: float) -> None:
        self.flows.expire(now)
        if self._lines.has_newcomers:
            self._welcome(now)


def _depth(lane: Lane) -> int:
    return lane.depth
