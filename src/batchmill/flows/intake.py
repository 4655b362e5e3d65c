"""How a producer gets its signal in, and how it waits when there is no room.

A thread and an asyncio task do the same steps; they differ in how they wait between them. Which
steps there are is decided by the router; here is what only a caller has: a timeout, a thread.
"""

from __future__ import annotations

from batchmill.errors import WouldDeadlockError
from batchmill.flows.core import FlowCore
from batchmill.flows.lane import Lane
from batchmill.flows.lines import Ticket
from batchmill.flows.settings import Backpressure
from batchmill.flows.stats import CANCELLED, CLOSED, INGRESS_FULL
from batchmill.waiters import TaskWaiter, ThreadWaiter


def line_up(core: FlowCore, ticket: Ticket, timeout: float | None) -> bool:
    """Give a signal that was not let in a place in line; False when it is refused instead.

    The caller holds the lock, and has held it since the router told the reason.
    """
    patient = core.config.backpressure is Backpressure.BLOCK and ticket.reason != CLOSED
    if not patient or (timeout is not None and timeout <= 0):
        core.router.refuse(ticket.key, ticket.finish, ticket.reason, core.clock())
        return False
    if core.orphans:
        core.bury_orphans()
    core.router.line_up(ticket, core.clock())
    worker = core.current_worker()
    if worker is None or ticket.granted:
        return True
    if _may_wait(ticket, worker.lane, timeout):
        if timeout is None:
            worker.lane.blocked_on = ticket.lane
        return True
    core.router.give_up(ticket, ticket.reason, core.clock())
    if timeout is None:
        raise WouldDeadlockError(core.name, "dispatch() for which there is no room")
    return False


def _may_wait(ticket: Ticket, own: Lane, timeout: float | None) -> bool:
    """Whether the handler that runs on ``own`` can wait for this ticket and expect an end.

    Another worker's queue is worth waiting for unless that worker waits, directly or through
    others, for this one. Room under the bounds that all share may depend on this very handler, so
    they are worth waiting for only with a timeout.
    """
    if timeout is not None:
        return ticket.lane is not own
    lane = ticket.lane
    if lane is None or ticket.reason == INGRESS_FULL or lane.depth == 0:
        return False
    while lane is not None:
        if lane is own:
            return False
        lane = lane.blocked_on
    return True


def wait(core: FlowCore, ticket: Ticket, waiter: ThreadWaiter, timeout: float | None) -> bool:
    """Wait in line; whether the signal got in."""
    waiter.wait(timeout)
    with core.lock:
        return _leave(core, ticket)


async def wait_in_task(
    core: FlowCore, ticket: Ticket, waiter: TaskWaiter, timeout: float | None
) -> bool:
    """Like :func:`wait`, but it is the task that waits, not the thread."""
    try:
        await waiter.wait(timeout)
    except GeneratorExit:  # the task is destroyed, perhaps by the collector in mid-step
        core.orphan(ticket)
        raise
    except BaseException:
        with core.lock:
            _unblock(core)
            core.router.give_up(ticket, CANCELLED, core.clock())
        raise
    with core.lock:
        return _leave(core, ticket)


def _leave(core: FlowCore, ticket: Ticket) -> bool:
    _unblock(core)
    now = core.clock()
    if ticket.granted:  # also when that came together with the timeout
        return core.router.redeem(ticket, now)
    core.router.give_up(ticket, ticket.reason, now)
    return False


def _unblock(core: FlowCore) -> None:
    worker = core.current_worker()
    if worker is not None:
        worker.lane.blocked_on = None
