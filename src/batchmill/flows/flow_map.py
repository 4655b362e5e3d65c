"""Which worker has which flow, and for how long. Pure: no threads, no clock of its own.

Guarantees
    * A flow keeps its worker for as long as any of its signals is queued, in a handler, or with a
      producer that waits for room. So a flow id that is used again cannot overtake its old signals.
    * A flow is forgotten when it is finished and nothing of it is pending; whether its finish
      signal was handled, evicted or refused makes no difference.
    * A flow that never finishes is forgotten after ``idle_ttl`` with nothing pending, or earlier
      when a new flow needs its place (``max_flows``): the longest idle one goes first. Both are
      counted.

A flow is *open* from its first accepted signal until its finish. A signal that is accepted after
the finish opens the flow again: the id is in use for something new. An open flow with nothing
pending and no producer waiting is *idle*.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias


class FlowCounter(Protocol):
    """A worker's queue, as far as the flow map is concerned."""

    flows: int
    """How many flows the worker has; the flow map keeps it."""


class Flow:
    """One flow: its worker, and what of it is in the dispatcher."""

    __slots__ = ("idle_since", "is_open", "key", "pending", "waiting", "worker")

    def __init__(self, key: Hashable, worker: int) -> None:
        self.key = key
        self.worker = worker
        self.pending = 0
        """Signals queued or in the handler."""
        self.waiting = 0
        """Producers that wait for room for one of its signals."""
        self.is_open: bool | None = None
        """None until the first signal is accepted."""
        self.idle_since = 0.0

    @property
    def is_idle(self) -> bool:
        return bool(self.is_open) and not self.pending and not self.waiting

    def __repr__(self) -> str:
        state = {None: "new", True: "open", False: "finished"}[self.is_open]
        return (
            f"<Flow {self.key!r} on {self.worker}, {state},"
            f" {self.pending} pending, {self.waiting} waiting>"
        )


Entry: TypeAlias = tuple[Any, Flow | None, bool, float, int]
"""A queued signal: it, its flow, whether it finishes the flow, when it was queued, its number.

A plain tuple because one is made for every signal: with a class that has slots, a dispatch takes
about a tenth more processor time."""


class FlowMap:
    """All flows by id, and the idle ones, longest idle first."""

    def __init__(
        self, workers: Sequence[FlowCounter], idle_ttl: float | None, max_flows: int | None
    ) -> None:
        self._workers = workers
        self._flows: dict[Hashable, Flow] = {}
        self._idle: OrderedDict[Hashable, Flow] = OrderedDict()
        self._ttl = math.inf if idle_ttl is None else idle_ttl
        self._most = math.inf if max_flows is None else max_flows
        self.next_expiry = math.inf
        """No flow expires before this moment."""
        self.assigned = 0
        """Flows of which at least one signal was accepted."""
        self.completed = 0
        """Flows forgotten because they were finished and nothing of them was pending."""
        self.expired = 0
        """Flows forgotten because they were idle for the TTL."""
        self.displaced = 0
        """Flows forgotten, with nothing pending, to make room for a new one."""
        self.get = self._flows.get
        """The flow of an id, or None."""

    def __len__(self) -> int:
        return len(self._flows)

    @property
    def active(self) -> int:
        """Flows that are known now and of which a signal was accepted."""
        return self.assigned - self.completed - self.expired - self.displaced

    def make_room(self) -> bool:
        """Whether a new flow may be added, after displacing an idle one if need be."""
        if len(self._flows) < self._most:
            return True
        if not self._idle:
            return False
        self._forget(next(iter(self._idle.values())))
        self.displaced += 1
        return True

    def add(self, key: Hashable, worker: int) -> Flow:
        """Put a new flow on ``worker``; its first signal or waiting producer must follow."""
        flow = self._flows[key] = Flow(key, worker)
        self._workers[worker].flows += 1
        return flow

    def accept(self, flow: Flow, finish: bool) -> None:
        """A signal of the flow was queued; ``finish``: its last one."""
        if not flow.pending:
            if flow.is_open:
                self._idle.pop(flow.key, None)
            elif flow.is_open is None:
                self.assigned += 1
        flow.pending += 1
        flow.is_open = not finish

    def settle(self, entries: Iterable[Entry], now: float) -> None:
        """These signals are out of the dispatcher: handled, failed, evicted or given back."""
        for entry in entries:
            flow = entry[1]
            if flow is not None:
                flow.pending -= 1
                if not flow.pending:
                    self._lost_one(flow, now)

    def wait(self, flow: Flow) -> None:
        """A producer begins to wait for room for a signal of the flow."""
        if not flow.pending and flow.is_open:
            self._idle.pop(flow.key, None)
        flow.waiting += 1

    def stop_waiting(self, flow: Flow, now: float) -> None:
        """A producer does not wait any more, and its signal was not queued."""
        flow.waiting -= 1
        self._lost_one(flow, now)

    def finish(self, key: Hashable, now: float) -> bool:
        """The flow has had its last signal, accepted or refused; whether it was known."""
        flow = self._flows.get(key)
        if flow is None:
            return False
        if flow.is_open:
            flow.is_open = False
        self._lost_one(flow, now)
        return True

    def expire(self, now: float) -> None:
        """Forget flows that have been idle for the TTL."""
        while self._idle:
            flow = next(iter(self._idle.values()))
            if flow.idle_since + self._ttl > now:
                break
            self._forget(flow)
            self.expired += 1
        self._plan_expiry()

    def recount(self, pending: Iterable[Flow], waiting: Iterable[Flow], now: float) -> None:
        """Correct the counts from what is really there: one flow per signal, one per producer.

        For after Ctrl-C in the middle of a change.
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
        self._idle = OrderedDict(
            (flow.key, flow)
            for flow in self._idle.values()
            if flow.is_idle and self._flows.get(flow.key) is flow
        )
        for flow in list(self._flows.values()):
            self._workers[flow.worker].flows += 1
            if flow.key not in self._idle:
                self._lost_one(flow, now)
        used = sum(flow.is_open is not None for flow in self._flows.values())
        self.assigned = self.completed + self.expired + self.displaced + used

    def _lost_one(self, flow: Flow, now: float) -> None:
        """The flow has one signal or producer less: after the last it is forgotten, or idle."""
        if flow.pending or flow.waiting:
            return
        if not flow.is_open:
            self._forget(flow)
            if flow.is_open is not None:
                self.completed += 1
            return
        flow.idle_since = now
        self._idle[flow.key] = flow
        if self.next_expiry == math.inf:
            self._plan_expiry()

    def _forget(self, flow: Flow) -> None:
        del self._flows[flow.key]
        self._idle.pop(flow.key, None)
        self._workers[flow.worker].flows -= 1

    def _plan_expiry(self) -> None:
        if self._idle:
            self.next_expiry = next(iter(self._idle.values())).idle_since + self._ttl
        else:
            self.next_expiry = math.inf
