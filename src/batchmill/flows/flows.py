"""Which flow is where, and how long it stays there. Pure: no threads, no clock of its own.

Guarantees
    * A flow keeps its worker for as long as any of its signals is queued, in a handler, or with a
      producer that waits for room. So a flow whose id is used again can never overtake its past.
    * A flow is forgotten when it is finished and nothing of it is pending; whether its finish
      signal was handled, evicted or refused makes no difference.
    * A flow that never finishes is forgotten after ``idle_ttl`` with nothing pending, or earlier
      when a new flow needs its place (``max_flows``): the one that rested longest goes first.
      Both are counted.

A flow is *open* from the first signal that was accepted for it until its finish. A signal that is
accepted after the finish opens the flow again: the id is in use for something new.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias


class Home(Protocol):
    """A worker, as far as the flow map is concerned."""

    flows: int
    """How many flows it has; the flow map keeps it."""


class Flow:
    """One flow and where it stands."""

    __slots__ = ("key", "opened", "pending", "rested_at", "waiting", "worker")

    def __init__(self, key: Hashable, worker: int) -> None:
        self.key = key
        self.worker = worker
        self.pending = 0
        """Signals queued or in the handler."""
        self.waiting = 0
        """Producers that wait for room for one of its signals."""
        self.opened = False
        self.rested_at = 0.0

    @property
    def is_resting(self) -> bool:
        """Open, and nothing of it is here."""
        return self.opened and not self.pending and not self.waiting

    def __repr__(self) -> str:
        state = "open" if self.opened else "finished"
        return (
            f"<Flow {self.key!r} on {self.worker}, {state},"
            f" {self.pending} pending, {self.waiting} waiting>"
        )


Entry: TypeAlias = tuple[Any, Flow | None, bool, float, int]
"""A queued signal: it, its flow, whether it finishes the flow, when and as which it came."""


class FlowMap:
    """All flows by id, and those that rest, longest first."""

    def __init__(
        self, workers: Sequence[Home], idle_ttl: float | None, max_flows: int | None
    ) -> None:
        self._workers = workers
        self._flows: dict[Hashable, Flow] = {}
        self._resting: OrderedDict[Hashable, Flow] = OrderedDict()
        self._ttl = math.inf if idle_ttl is None else idle_ttl
        self._most = math.inf if max_flows is None else max_flows
        self.next_expiry = math.inf
        """No flow expires before this moment."""
        self.expired = 0
        """Flows forgotten because they rested for the TTL."""
        self.displaced = 0
        """Flows forgotten, with nothing pending, to make room for a new one."""
        self.get = self._flows.get
        """The flow of an id, or None."""

    def __len__(self) -> int:
        return len(self._flows)

    def make_room(self) -> bool:
        """Whether a new flow may be added, after displacing a resting one if need be."""
        if len(self._flows) < self._most:
            return True
        if not self._resting:
            return False
        self._forget(next(iter(self._resting.values())))
        self.displaced += 1
        return True

    def add(self, key: Hashable, worker: int) -> Flow:
        """Put a new flow on ``worker``. It must be given a signal, or a waiting producer, next."""
        flow = self._flows[key] = Flow(key, worker)
        self._workers[worker].flows += 1
        return flow

    def accept(self, flow: Flow, finish: bool) -> None:
        """A signal of the flow was queued; ``finish``: its last one."""
        if not flow.pending and flow.opened:
            self._resting.pop(flow.key, None)
        flow.pending += 1
        flow.opened = not finish

    def settle(self, entries: Iterable[Entry], now: float) -> None:
        """These signals are out of the dispatcher: handled, failed, evicted or given back."""
        for entry in entries:
            flow = entry[1]
            if flow is not None:
                flow.pending -= 1
                if not flow.pending:
                    self._rest(flow, now)

    def wait(self, flow: Flow) -> None:
        """A producer begins to wait for room for a signal of the flow."""
        if not flow.pending and flow.opened:
            self._resting.pop(flow.key, None)
        flow.waiting += 1

    def stop_waiting(self, flow: Flow, now: float) -> None:
        """A producer does not wait any more, and its signal was not queued."""
        flow.waiting -= 1
        self._rest(flow, now)

    def finish(self, key: Hashable, now: float) -> bool:
        """The flow has had its last signal, queued or not; whether it was known."""
        flow = self._flows.get(key)
        if flow is None:
            return False
        flow.opened = False
        self._rest(flow, now)
        return True

    def expire(self, now: float) -> None:
        """Forget what has rested for the TTL."""
        while self._resting:
            flow = next(iter(self._resting.values()))
            if flow.rested_at + self._ttl > now:
                break
            self._forget(flow)
            self.expired += 1
        self._plan_expiry()

    def recount(self, pending: Iterable[Flow], waiting: Iterable[Flow], now: float) -> None:
        """Put the counts right from what is really there, one mention per signal.

        For after a signal handler raised in the middle of a change (Ctrl-C).
        """
        for flow in self._flows.values():
            flow.pending = flow.waiting = 0
        for flow in pending:
            flow.pending += 1
            self._flows.setdefault(flow.key, flow)
        for flow in waiting:
            flow.waiting += 1
            self._flows.setdefault(flow.key, flow)
        for worker in self._workers:
            worker.flows = 0
        resting = [flow for flow in self._resting.values() if self._flows.get(flow.key) is flow]
        self._resting = OrderedDict((flow.key, flow) for flow in resting if flow.is_resting)
        for flow in list(self._flows.values()):
            self._workers[flow.worker].flows += 1
            if flow.key not in self._resting:
                self._rest(flow, now)

    def _rest(self, flow: Flow, now: float) -> None:
        """See whether the flow, which has just lost something, is done or begins to rest."""
        if flow.pending or flow.waiting:
            return
        if not flow.opened:
            self._forget(flow)
            return
        flow.rested_at = now
        self._resting[flow.key] = flow
        if self.next_expiry == math.inf:
            self._plan_expiry()

    def _forget(self, flow: Flow) -> None:
        del self._flows[flow.key]
        self._resting.pop(flow.key, None)
        self._workers[flow.worker].flows -= 1

    def _plan_expiry(self) -> None:
        if self._resting:
            self.next_expiry = next(iter(self._resting.values())).rested_at + self._ttl
        else:
            self.next_expiry = math.inf
