"""Asks the balancer from time to time, and sets its answer in motion."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from batchmill.queue import balancer as balancer_module
from batchmill.queue.config import BatchQueueSettings
from batchmill.queue.layout import Layout

log = logging.getLogger("batchmill.queue")

_NEVER = 1 << 63


class Rebalancer:
    """Decides when to ask; there is no timer, as a queue without traffic has nothing to balance.

    Drain tasks look at ``due_ns`` after a cycle that had work, and the first one that finds it
    passed does the asking.
    """

    def __init__(self, config: BatchQueueSettings, layout: Layout) -> None:
        self._config = config
        self._layout = layout
        self.reset()

    def reset(self) -> None:
        self._asking = threading.Lock()
        self.rebalances = 0
        self._seen: list[tuple[int, int, int]] = []
        self._plan_next()

    def _plan_next(self) -> None:
        self.due_ns = _NEVER
        if self._config.balancer is not None and len(self._layout.tasks) > 1:
            interval_ns = int(self._config.rebalance_interval_ms * 1e6)
            self.due_ns = time.monotonic_ns() + interval_ns

    def rebalance(self) -> None:
        """Ask the balancer, and ask owners to give up what should move.

        The balancer is the user's code, so no lock of the layout's is held while it thinks; what
        has changed meanwhile makes its answer void.
        """
        if not self._asking.acquire(blocking=False):
            return
        try:
            self._plan_next()
            layout = self._layout
            with layout.lock:
                loads, owners = self._loads(), layout.owners()
            plan = self._ask(loads, owners)
            if plan is None:
                return
            with layout.lock:
                if layout.closed or layout.owners() != owners:
                    return
                givers = layout.ask_to_move(plan)
                if givers:
                    self.rebalances += 1
        finally:
            self._asking.release()
        for giver in givers:
            giver.wake()

    def _ask(self, loads: list[float], owners: tuple[int, ...]) -> Sequence[int] | None:
        balancer, name = self._config.balancer, self._layout.name
        if balancer is None:
            return None
        threads = len(self._layout.tasks)
        try:
            plan = balancer.assign(loads, owners, threads)
        except Exception:
            log.exception("batchmill queue %s: the balancer failed; nothing moves", name)
            return None
        flaw = balancer_module.flaw_in(plan, len(owners), threads)
        if flaw is not None:
            log.warning("batchmill queue %s: balancer's answer ignored: %s", name, flaw)
            return None
        return plan

    def _loads(self) -> list[float]:
        """What each partition cost since the last time, and what it was offered."""
        now = [(p.offered, p.drained, p.busy_ns) for p in self._layout.partitions]
        before = self._seen + [(0, 0, 0)] * (len(now) - len(self._seen))
        self._seen = now
        return balancer_module.weigh(
            [new[0] - old[0] for new, old in zip(now, before, strict=True)],
            [new[1] - old[1] for new, old in zip(now, before, strict=True)],
            [new[2] - old[2] for new, old in zip(now, before, strict=True)],
        )
