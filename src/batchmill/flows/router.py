"""Which worker gets a signal, and who has to wait. Pure: the caller has the lock and the clock.

Guarantees
    * A signal's flow is looked up and the signal queued in one step, so the signals of a flow are
      queued in the order in which their producers came.
    * Nobody waits for ever: room that becomes free is reserved for the producer that has waited
      longest at that queue, and the queues take turns. Nobody overtakes a producer that waits with
      the same flow.
    * Room is only reserved: the producer queues its signal itself, or has given up meanwhile. A
      reservation that is given up goes to the next that waits.
    * No worker's queue ever holds more than its capacity. What has no room there waits in the
      ingress buffer, which all workers share and which holds no more than its own capacity.
    * Every signal that is refused or evicted is counted under a reason, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from batchmill.flows.assignment import LeastLoaded, RoundRobin
from batchmill.flows.flow_map import Entry, Flow, FlowMap
from batchmill.flows.queues import Ticket, WaitLists, WorkerQueue
from batchmill.flows.settings import Backpressure, FlowSettings
from batchmill.flows.stats import CANCELLED, CLOSED, INGRESS_FULL, MAX_FLOWS, QUEUE_FULL


class Router:
    """The queues, the ingress buffer, the flows, the producers that wait, and the counts.

    The ingress buffer is part of the workers' queues: a queue with more signals than its capacity
    has the rest in the buffer, behind the others. So a signal never changes its place, and a full
    buffer holds up nobody whose worker has room.
    """

    def __init__(self, settings: FlowSettings) -> None:
        self.queues = [
            WorkerQueue(index, settings.worker_queue_capacity)
            for index in range(settings.worker_count)
        ]
        self.flows = FlowMap(self.queues, settings.idle_ttl, settings.max_flows)
        self._assignment = settings.assignment
        self._fallback = LeastLoaded()
        self._round_robin = RoundRobin()
        self._drops_oldest = settings.backpressure is Backpressure.DROP_OLDEST
        self._batch_max = settings.batch_max
        self._ingress_capacity = settings.ingress_capacity
        self._ingress_free = settings.ingress_capacity
        self._full = INGRESS_FULL if settings.ingress_capacity else QUEUE_FULL
        self._waiting = WaitLists()
        self._last_reserved = -1
        self.closed = False
        self._numbers = 0
        self._numbers_lost = 0
        self.unprocessed = 0
        self.refused = {QUEUE_FULL: 0, INGRESS_FULL: 0, MAX_FLOWS: 0, CLOSED: 0, CANCELLED: 0}
        self.evicted = {QUEUE_FULL: 0, INGRESS_FULL: 0}
        self.assignment_failures = 0
        self.assignment_error: Exception | None = None
        """The first failure of the assignment rule, until a worker has logged it."""

    def offer(self, signal: Any, key: Hashable | None, finish: bool, now: float) -> str | None:
        """Queue a signal; None if it was queued, else the reason, and nothing has changed."""
        if now >= self.flows.next_expiry:
            self._expire(now)
        flow = self.flows.get(key) if key is not None else None
        if flow is None or flow.waiting:
            return self._offer_new(signal, key, flow, finish, now)
        queue = self.queues[flow.worker]
        if queue.free < 1 or self.closed:
            return self._offer_at(queue, signal, flow, finish, now)
        self.flows.accept(flow, finish)
        # What _put does, without the call: most signals come this way.
        number = self._numbers
        self._numbers = number + 1
        queue.put((signal, flow, finish, now, number))
        return None

    def add_waiting(self, ticket: Ticket, now: float) -> None:
        """Let a producer whose offer was refused wait for room."""
        if ticket.key is None:
            queue = self.queues[self._round_robin.pick(self.queues)]
        else:
            flow = self.flows.get(ticket.key)
            if flow is None:
                if self._waiting.has_new_flows or not self.flows.make_room():
                    ticket.reason = MAX_FLOWS
                    self._waiting.join_new_flow(ticket)
                    return
                flow = self._add_flow(ticket.key)
            self.flows.wait(flow)
            ticket.flow = flow
            queue = self.queues[flow.worker]
        self._waiting.join(ticket, queue)
        self._reserve_free(now)

    def accept_granted(self, ticket: Ticket, now: float) -> bool:
        """Queue the signal of a producer that was woken; False when closed in the meantime."""
        queue = ticket.queue
        if self.closed or queue is None:
            self.give_up(ticket, CLOSED, now)
            return False
        self._leave(ticket)
        if ticket.flow is not None:
            ticket.flow.waiting -= 1
            self.flows.accept(ticket.flow, ticket.finish)
        self._put(queue, ticket.signal, ticket.flow, ticket.finish, now)
        self._reserve_free(now)  # the next with the same flow may go on
        return True

    def give_up(self, ticket: Ticket, reason: str, now: float) -> None:
        """The producer waits no more: its signal is refused, and its room goes to the next."""
        if ticket.gone:
            return
        self._withdraw(ticket, reason, now)
        self._reserve_free(now)

    def _withdraw(self, ticket: Ticket, reason: str, now: float) -> None:
        self._leave(ticket)
        if ticket.flow is not None:
            self.flows.stop_waiting(ticket.flow, now)
        self.refuse(ticket.key, ticket.finish, reason, now)

    def refuse(self, key: Hashable | None, finish: bool, reason: str, now: float) -> None:
        """Count a signal that is not queued. A finish signal ends its flow all the same."""
        self.refused[reason] += 1
        if finish and key is not None:
            self.flows.finish(key, now)
        self._admit_new_flows(now)

    def complete(self, key: Hashable, now: float) -> bool:
        """End a flow without a signal; whether it was known."""
        known = self.flows.finish(key, now)
        self._admit_new_flows(now)
        return known

    def take(self, queue: WorkerQueue, now: float) -> list[Entry]:
        """The next batch of a worker; its room in the queue is free at once."""
        taken = queue.take(self._batch_max)
        self._leave_ingress(queue, len(taken))
        if self._waiting.count:
            self._reserve_free(now)
        return taken

    def settle(self, queue: WorkerQueue, succeeded: bool, now: float) -> None:
        """The handler of the worker's batch has ended."""
        done = queue.finish_running()
        if succeeded:
            queue.handled += len(done)
        else:
            queue.failed += len(done)
        self.flows.settle(done, now)
        if self._waiting.has_new_flows:
            self._admit_new_flows(now)

    def expire(self, now: float) -> None:
        """Forget flows that have been idle for too long."""
        if now >= self.flows.next_expiry:
            self._expire(now)

    def close(self) -> None:
        """Accept no more, and wake the producers that wait."""
        self.closed = True
        for ticket in self._waiting:
            ticket.granted = True
            ticket.waiter.wake()

    def clear(self, now: float) -> list[Entry]:
        """Remove all that is queued; returned in the order it was dispatched."""
        left: list[Entry] = []
        for queue in self.queues:
            cleared = queue.clear()
            self._leave_ingress(queue, len(cleared))
            left += cleared
        left.sort(key=lambda entry: entry[4])  # its number
        self.unprocessed += len(left)
        self.flows.settle(left, now)
        return left

    @property
    def dispatched(self) -> int:
        """Signals that were queued since the start."""
        return self._numbers - self._numbers_lost

    @property
    def ingress_depth(self) -> int:
        """Signals in the ingress buffer."""
        return sum(queue.buffered for queue in self.queues)

    @property
    def waiting(self) -> int:
        """Producers that wait."""
        return self._waiting.count

    def waiting_per_queue(self) -> Counter[WorkerQueue | None]:
        """Producers that wait for room in each queue; None: for a place among the flows."""
        return Counter(ticket.queue for ticket in self._waiting)

    def recount(self, now: float) -> None:
        """Correct every count from what is really queued, running and waiting.

        For after Ctrl-C in the middle of a change.
        """
        self._waiting.recount()
        reserved = self._waiting.reserved
        entries = [entry for queue in self.queues for entry in [*queue.queued(), *queue.running]]
        done = sum(queue.handled + queue.failed for queue in self.queues)
        gone = sum(self.evicted.values()) + self.unprocessed
        self._numbers_lost = self._numbers - done - gone - len(entries)
        for queue in self.queues:
            queue.recount(sum(ticket.queue is queue for ticket in reserved))
        in_ingress = sum(max(0, -queue.free) for queue in self.queues)
        self._ingress_free = self._ingress_capacity - in_ingress
        self.flows.recount(
            [flow for _, flow, _, _, _ in entries if flow is not None],
            [ticket.flow for ticket in self._waiting if ticket.flow is not None],
            now,
        )
        self._admit_new_flows(now)
        self._reserve_free(now)

    def interrupt(self, ticket: Ticket | None, now: float) -> None:
        """A producer was interrupted at an unknown point: drop its ticket, correct the counts."""
        waited = ticket is not None and self._waiting.discard(ticket)
        self.recount(now)
        if waited and ticket is not None:
            self.refuse(ticket.key, ticket.finish, CANCELLED, now)

    def _offer_new(
        self, signal: Any, key: Hashable | None, flow: Flow | None, finish: bool, now: float
    ) -> str | None:
        """The signal has no flow, or a new one, or others wait with signals of its flow."""
        if self.closed:
            return CLOSED
        if flow is not None:
            return self._full  # behind the producers that wait with the same flow
        if key is None:
            queue = self.queues[self._round_robin.pick(self.queues)]
            return self._offer_at(queue, signal, None, finish, now)
        worker = self._pick()
        queue = self.queues[worker]
        if not self._drops_oldest and queue.free < 1 and self._ingress_free < 1:
            # The flow is added only if the signal fits: a refused signal must leave no flow behind.
            return self._full
        if self._waiting.has_new_flows or not self.flows.make_room():
            return MAX_FLOWS
        return self._offer_at(queue, signal, self.flows.add(key, worker), finish, now)

    def _offer_at(
        self, queue: WorkerQueue, signal: Any, flow: Flow | None, finish: bool, now: float
    ) -> str | None:
        if self.closed:
            return CLOSED
        full = queue.free < 1 and self._ingress_free < 1
        if full and not self._drops_oldest:
            return self._full
        if flow is not None:
            # Before the eviction: the evicted signal may be the last one of this very flow.
            self.flows.accept(flow, finish)
        if full:
            self._evict(queue, now)
        self._put(queue, signal, flow, finish, now)
        return None

    def _evict(self, queue: WorkerQueue, now: float) -> None:
        victim = queue.evict()
        self._leave_ingress(queue, 1)
        self.evicted[self._full] += 1
        self.flows.settle((victim,), now)

    def _put(
        self, queue: WorkerQueue, signal: Any, flow: Flow | None, finish: bool, now: float
    ) -> None:
        number = self._numbers
        self._numbers = number + 1
        if queue.free < 1:
            self._ingress_free -= 1
        queue.put((signal, flow, finish, now, number))

    def _leave_ingress(self, queue: WorkerQueue, count: int) -> None:
        """Free the buffer's room for those that moved up in ``queue``, which lost ``count``."""
        if queue.free < count:
            self._ingress_free += min(count, count - queue.free)

    def _pick(self) -> int:
        """The worker of a new flow."""
        try:
            index = self._assignment.pick(self.queues)
        except Exception as error:  # noqa: BLE001 - user code; counted, and a worker logs it
            return self._pick_instead(error)
        if isinstance(index, int) and 0 <= index < len(self.queues):
            return index
        return self._pick_instead(ValueError(f"{index!r} is not the index of a worker"))

    def _pick_instead(self, error: Exception) -> int:
        if not self.assignment_failures:
            self.assignment_error = error
        self.assignment_failures += 1
        return self._fallback.pick(self.queues)

    def _add_flow(self, key: Hashable) -> Flow:
        return self.flows.add(key, self._pick())

    def _leave(self, ticket: Ticket) -> None:
        """Remove a ticket, and free the room that may be reserved for it."""
        if self._waiting.leave(ticket) and ticket.queue is not None:
            ticket.queue.free += 1
            self._leave_ingress(ticket.queue, 1)

    def _reserve_free(self, now: float) -> None:
        """Reserve free room for producers that wait: at each queue, first come, first served."""
        while not self.closed:
            # The queues take turns, so that no queue can keep the others waiting.
            for index in range(self._last_reserved + 1, self._last_reserved + 1 + len(self.queues)):
                queue = self.queues[index % len(self.queues)]
                if queue.tickets and (queue.free > 0 or self._ingress_free > 0):
                    self._last_reserved = queue.index
                    self._reserve(queue, now)
                    break
            else:
                return

    def _reserve(self, queue: WorkerQueue, now: float) -> None:
        ticket = self._waiting.reserve_first(queue)
        if queue.free < 1:
            self._ingress_free -= 1
        queue.free -= 1
        ticket.granted = True
        if not ticket.waiter.wake():
            # Its event loop is closed, so nobody will use the room; the caller goes on to the next.
            self._withdraw(ticket, CANCELLED, now)

    def _admit_new_flows(self, now: float) -> None:
        """Add flows that wait for a place, as long as there is one."""
        while self._waiting.has_new_flows and not self.closed and self.flows.make_room():
            key, tickets = self._waiting.pop_new_flow()
            flow = self._add_flow(key)
            queue = self.queues[flow.worker]
            for ticket in tickets:
                ticket.flow, ticket.reason = flow, self._full
                self.flows.wait(flow)
                self._waiting.join(ticket, queue)
            self._reserve_free(now)

    def _expire(self, now: float) -> None:
        self.flows.expire(now)
        if self._waiting.has_new_flows:
            self._admit_new_flows(now)
