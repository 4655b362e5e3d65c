"""Which drain thread serves which partition: the arithmetic, with no thread and no clock in it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol


class Balancer(Protocol):
    """Anything that can say which drain thread serves each partition."""

    def assign(self, loads: Sequence[float], owners: Sequence[int], threads: int) -> Sequence[int]:
        """The thread of each partition from now on.

        ``loads[i]`` is what partition *i* will cost its thread: the items offered to it since the
        last decision, times the time one of them takes in its handler. ``owners[i]`` is the
        thread, 0 to ``threads - 1``, that serves it now. Answering ``owners`` moves nothing. An
        answer of the wrong length or with an index out of range is ignored with a warning.
        """
        ...


class DrainBalancer(Balancer, Protocol):
    """The balancers that come with the queue; any object with :meth:`assign` will do too."""

    @staticmethod
    def throughput_weighted() -> Balancer:
        """Longest processing time first, leaving alone what is balanced already."""
        return ThroughputWeighted()


class ThroughputWeighted:
    """Heaviest partition first, each to the thread with the least so far.

    Partitions without traffic stay. Nothing moves while the busiest thread has less than
    ``skip_ratio`` times the load of the least busy one, nor when the new plan would not take at
    least ``least_gain`` off the busiest: a plan that is only differently uneven is noise.
    """

    skip_ratio = 1.15
    least_gain = 0.03
    stickiness = 0.01  # of a thread's fair share: closer than this, the owner keeps it

    def assign(self, loads: Sequence[float], owners: Sequence[int], threads: int) -> Sequence[int]:
        before = load_per_thread(loads, owners, threads)
        busiest = max(before)
        if busiest <= 0 or busiest < self.skip_ratio * min(before):
            return owners
        plan = self._longest_first(loads, owners, threads, slack=self.stickiness)
        if max(load_per_thread(loads, plan, threads)) > busiest * (1 - self.least_gain):
            return owners
        return plan

    @staticmethod
    def _longest_first(
        loads: Sequence[float], owners: Sequence[int], threads: int, slack: float
    ) -> list[int]:
        plan = list(owners)
        tolerance = slack * sum(loads) / threads
        assigned = [0.0] * threads
        least = [(0.0, thread) for thread in range(threads)]
        for index in sorted(range(len(loads)), key=lambda i: -loads[i]):
            if loads[index] <= 0:
                break
            while least[0][0] != assigned[least[0][1]]:  # an entry from before its thread gained
                heapq.heappop(least)
            lowest, thread = least[0]
            if assigned[owners[index]] <= lowest + tolerance:
                thread = owners[index]
            plan[index] = thread
            assigned[thread] += loads[index]
            heapq.heappush(least, (assigned[thread], thread))
        return plan


def load_per_thread(loads: Sequence[float], owners: Sequence[int], threads: int) -> list[float]:
    """The sum of the loads each thread owns."""
    totals = [0.0] * threads
    for load, owner in zip(loads, owners, strict=True):
        totals[owner] += load
    return totals


def weigh(offered: Sequence[int], drained: Sequence[int], busy_ns: Sequence[int]) -> list[float]:
    """The load of each partition: items offered, times what one of them costs.

    What an item costs is known where some were drained in the same period; elsewhere the average
    stands in, and when no time at all was measured, items are counted as they are.
    """
    total_drained, total_busy = sum(drained), sum(busy_ns)
    average = total_busy / total_drained if total_drained and total_busy else 1.0
    return [
        count * (busy / done if done and total_busy else average)
        for count, done, busy in zip(offered, drained, busy_ns, strict=True)
    ]


def flaw_in(plan: object, partitions: int, threads: int) -> str | None:
    """What is wrong with a balancer's answer, or None."""
    if not isinstance(plan, Sequence) or isinstance(plan, (str, bytes)):
        return f"it is not a sequence but {plan!r}"
    if len(plan) != partitions:
        return f"it has {len(plan)} entries for {partitions} partitions"
    for index, thread in enumerate(plan):
        if isinstance(thread, bool) or not isinstance(thread, int) or not 0 <= thread < threads:
            return f"partition {index} goes to {thread!r}, not to a thread from 0 to {threads - 1}"
    return None
