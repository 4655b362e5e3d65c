"""FlowDispatcher, the class that applications use."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, Self

from batchmill import lifecycle
from batchmill.errors import ConfigError, WouldDeadlockError
from batchmill.flows.core import FlowCore
from batchmill.flows.queues import Ticket
from batchmill.flows.settings import ErrorHandler, FlowSettings, Handler
from batchmill.flows.stats import FlowStats
from batchmill.waiters import TaskWaiter, ThreadWaiter, give_way
from batchmill.wording import count_of

log = logging.getLogger("batchmill.flows")

if TYPE_CHECKING:
    # Of every type checker's own; where nothing tells T, it is Any, and no annotation is needed.
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")


class FlowDispatcher(Generic[T]):
    """Spreads signals over workers so that each flow's are handled one at a time and in order.

    Any thread may call any method. It starts at once; leave it with :meth:`close`, or use it as a
    context manager.

    * *In order*: the signals of a flow are handled in the order in which they were dispatched, on
      one worker for as long as the flow lives. Signals without a flow have no order.
    * *Spread*: a new flow goes to the worker with the least queued and running.
    * *Bounded*: each worker's queue, the ingress buffer for what has no room there, and the number
      of flows.
    * *Accounted for*: a signal for which ``dispatch`` returned True is handled once, or evicted
      (DROP_OLDEST), or returned by :meth:`close`; each is counted.
    * *After fork*: the child's dispatcher is empty and running; what was queued is the parent's.

    ``handler`` gets a list of up to ``batch_max`` signals, which is its to keep. Calls for
    different workers run at the same time. What it raises marks the batch failed and goes to
    ``error_handler``, called with the batch and the error, or else to the log. Both are callables,
    or objects with a method ``consume`` and ``on_error``. ``clock`` is what ages and durations are
    measured by.

    >>> config = FlowSettings(worker_count=2, flow_id=lambda signal: signal[0])
    >>> with FlowDispatcher(lambda batch: None, config) as dispatcher:
    ...     dispatcher.dispatch(("order-7", "paid"))
    True
    """

    def __init__(
        self,
        handler: Handler[T],
        config: FlowSettings | None = None,
        *,
        error_handler: ErrorHandler[T] | None = None,
        name: str = "flows",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = FlowSettings() if config is None else config
        if not isinstance(config, FlowSettings):
            raise ConfigError("config", config, "a FlowSettings")
        core = FlowCore(handler, config, name, error_handler, clock)
        lifecycle.track(core)
        core.start()
        self._core = core
        self._flow_id = config.flow_id
        self._finished = config.finished

    @property
    def name(self) -> str:
        """Its name, in logs and on threads."""
        return self._core.name

    @property
    def config(self) -> FlowSettings:
        """Its settings."""
        return self._core.settings

    @property
    def running(self) -> bool:
        """Whether it accepts signals: True until :meth:`close` begins."""
        return not self._core.router.closed

    def dispatch(self, signal: T, timeout: float | None = None) -> bool:
        """Queue a signal; True when it was accepted, False when it was not and will not be.

        Under BLOCK it waits for room, for ``timeout`` seconds at most if one is given; the other
        policies never wait. It returns False if the dispatcher is closed, also while it waits. A
        finish signal that is refused ends its flow all the same.

        Inside a handler, a wait that only this handler's return could end raises
        WouldDeadlockError; with a timeout it returns False.
        """
        core = self._core
        key = self._flow_id(signal)
        finish = self._finished is not None and bool(self._finished(signal))
        ticket: Ticket | None = None
        try:
            if core.lock.locked():
                give_way(core.lock)
            with core.lock:
                reason = core.router.offer(signal, key, finish, core.clock())
                if reason is None:
                    return True
                waiter = ThreadWaiter()
                ticket = Ticket(signal, key, finish, reason, waiter)
                if not core.join_waiting(ticket, timeout):
                    return False
            return core.wait(ticket, waiter, timeout)
        except WouldDeadlockError:
            raise
        except BaseException:
            core.interrupted(ticket)
            raise

    async def adispatch(self, signal: T, timeout: float | None = None) -> bool:
        """Like :meth:`dispatch`, but only the task waits, never its loop.

        A task that is cancelled while it waits has dispatched nothing. Signals of one flow from
        tasks of one loop are queued in the order in which the tasks came.
        """
        core = self._core
        key = self._flow_id(signal)
        finish = self._finished is not None and bool(self._finished(signal))
        if core.lock.locked():
            give_way(core.lock)
        with core.lock:
            reason = core.router.offer(signal, key, finish, core.clock())
            if reason is None:
                return True
            waiter = TaskWaiter()
            ticket = Ticket(signal, key, finish, reason, waiter)
            if not core.join_waiting(ticket, timeout):
                return False
        return await core.wait_in_task(ticket, waiter, timeout)

    def complete(self, flow_id: Hashable) -> bool:
        """End a flow without a finish signal; whether it was known.

        It is forgotten once nothing of it is pending; until then a signal with the same id still
        goes to the same worker.
        """
        core = self._core
        with core.lock:
            return core.router.complete(flow_id, core.clock())

    def stats(self) -> FlowStats:
        """The dispatcher as it is now, and its counters since the start."""
        return self._core.stats()

    def close(self, timeout: float | None = None) -> list[T]:
        """Refuse new signals, drain, end the workers; the signals that were not processed.

        ``dispatch`` calls that wait return False. Draining takes ``timeout`` seconds at most (None:
        the setting ``close_timeout``); what is queued then is returned in the order it was
        dispatched. A batch that is in the handler at that moment is not part of it: its worker ends
        when the handler returns.

        Any number of threads may call it, any number of times. Inside a handler it does not wait:
        the drain goes on, and ends, when the handler has returned; with ``timeout=0`` what is
        queued is returned.
        """
        core = self._core
        seconds = core.settings.close_timeout if timeout is None else timeout
        core.begin_close()
        if core.current_worker() is not None:
            return [] if seconds > 0 else core.take_back()
        waiter = ThreadWaiter()
        if core.await_end(waiter):
            try:
                waiter.wait(seconds)
            finally:
                core.stop_awaiting(waiter)
        left = core.take_back()
        core.join()
        return left

    async def aclose(self, timeout: float | None = None) -> list[T]:
        """Like :meth:`close`, but only the task waits, never its loop."""
        core = self._core
        seconds = core.settings.close_timeout if timeout is None else timeout
        core.begin_close()
        waiter = TaskWaiter()
        if core.await_end(waiter):
            try:
                await waiter.wait(seconds)
            finally:
                core.stop_awaiting(waiter)
        return core.take_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log_dropped(self.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._log_dropped(await self.aclose())

    def _log_dropped(self, left: list[T]) -> None:
        if left:
            log.warning(
                "batchmill flows %s: not drained after %g s, dropped %s. A handler "
                "hangs or is slow: raise close_timeout, or call close() to have them returned.",
                self.name,
                self.config.close_timeout,
                count_of(len(left), "signal"),
            )

    def __repr__(self) -> str:
        state = "running" if self.running else "closed"
        return f"<FlowDispatcher {self.name!r} {state}>"

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and not core.router.closed:
            core.abandon()
            warnings.warn(
                f"batchmill flow dispatcher {core.name!r} was never closed; it drains itself now",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
