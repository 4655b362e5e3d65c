"""A drain task: takes batches from the partitions it owns and calls their handlers.

Guarantees
    * A task is run by one thread at a time, and a partition belongs to one task at a time, so no
      lane is ever drained by two threads at once.
    * A partition changes hands only between two cycles of the task that gives it up. The old
      owner makes the hand-over itself, so there is no moment in which both, or neither, own it.
    * A wake is never lost: one that comes while the task runs makes it run once more.
    * Owned lanes are served in turn, at most ``max_batch`` items each: a saturated one delays the
      others by a batch, no more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Set
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from batchmill.callables import check_done
from batchmill.queue.partition import CONSUMED, FAILED, UNREGISTERED, Lane, Partition, Receiver
from batchmill.telemetry import LONGEST_BITS

if TYPE_CHECKING:
    from batchmill.queue.core import QueueCore

_LOST_AFTER_CHECKS = 20
_LOST_AFTER_NS = 1_000_000_000
"""Slots that are out with nothing buffered, at every check for this long, count as lost."""

_running = threading.local()

Cell: TypeAlias = "list[DrainTask | None]"
"""A thread's record of the task that it runs: a list of one, quicker to set than a thread-local."""


def current_task() -> DrainTask | None:
    """The drain task that the calling thread is running, if it is a drain thread."""
    return cell_of_thread()[0]


def forget_current_task() -> None:
    """In a forked child, the thread that forked is not a drain thread any more."""
    cell_of_thread()[0] = None


def cell_of_thread() -> Cell:
    """The calling thread's cell; always the same list."""
    try:
        return cast("Cell", _running.cell)
    except AttributeError:
        cell: Cell = [None]
        _running.cell = cell
        return cell


class _Suspicion(NamedTuple):
    """A partition that seems to have lost slots: since when, and how often it was checked."""

    first_ns: int
    checks: int
    drained: int


class DrainTask:
    """Drains the partitions it owns whenever it is woken."""

    # Python is slower to reach the attributes of an object that has more than thirty in a dict.
    __slots__ = (
        "__weakref__",
        "_again",
        "_has_idle_receivers",
        "_idle_streak",
        "_lanes",
        "_linger_ns",
        "_max_batch",
        "_next_idle_round_ns",
        "_run_lock",
        "_seen_interruptions",
        "_seen_version",
        "_submit",
        "_submitted",
        "_suspects",
        "_unarmed",
        "_wake_lock",
        "batch_sizes",
        "busy_ns",
        "calling",
        "core",
        "durations",
        "finished",
        "flush_cycles",
        "idle_cycles",
        "index",
        "items",
        "owned",
        "removed_receivers",
        "timer_due",
        "timer_id",
        "waits_for",
        "wake_at",
        "woken_for",
    )

    def __init__(self, core: QueueCore, index: int) -> None:
        self.core = core
        self.index = index
        self._max_batch = core.settings.max_batch
        self._linger_ns = int(core.settings.linger_ms * 1e6)
        self.finished = False
        self.calling: Receiver | None = None
        """The handler that this task is calling now."""
        self.waits_for: Partition | None = None
        """The full partition that this handler waits for (see :mod:`.deadlock`)."""
        self.reset()

    def reset(self) -> None:
        """A new task, or one in a forked child."""
        self._submit = self.core.scheduler.submit
        self._run_lock = threading.Lock()
        # Reentrant: a finaliser or a signal handler may wake a task in the middle of a wake.
        self._wake_lock = threading.RLock()
        self.calling = self.waits_for = None
        self._again = False
        self._submitted = False
        self._seen_version = -1
        self._seen_interruptions = 0
        self.owned: tuple[Partition, ...] = ()
        self.removed_receivers: deque[Receiver] = deque()
        self._lanes: list[Lane] = []
        self._unarmed: set[Partition] = set()
        self.woken_for: deque[Partition] = deque()
        self._idle_streak = 0
        self._suspects: dict[Partition, _Suspicion] = {}
        self._next_idle_round_ns = 0
        self._has_idle_receivers = False
        self.wake_at = 0.0
        self.timer_due = 0.0
        self.timer_id = -1
        self.items = 0
        self.busy_ns = 0
        # Handler calls that are over, by the number of items and by nanoseconds: by their bits.
        self.batch_sizes = [0] * LONGEST_BITS
        self.durations = [0] * LONGEST_BITS
        self.flush_cycles = 0
        self.idle_cycles = 0

    def wake(self) -> None:
        """Run the task soon; if it is running, run it once more."""
        with self._wake_lock:
            self._again = True
            if not self._submitted:
                # In this order: interrupted in between, the task runs once too often.
                self._submit(self)
                self._submitted = True

    def wake_at_once(self) -> None:
        """Like :meth:`wake`, for a producer: waking the thread is the last thing it does.

        Whatever a producer does after that it does with the GIL held, while the thread waits for
        it. Interrupted before the last line, it leaves a task that nobody submits: the caller has
        to call :meth:`wake_surely` then.
        """
        with self._wake_lock:
            self._again = True
            if self._submitted:
                return
            self._submitted = True
        self._submit(self)

    def wake_surely(self) -> None:
        """Run the task even if it seems to be submitted already; once too often is no harm."""
        self._again = True
        self._submit(self)

    def run(self, cell: Cell) -> None:
        """Work until there is nothing to do or others wait; called by a scheduler thread.

        ``cell`` is the thread's own, from :func:`cell_of_thread`.
        """
        run_lock = self._run_lock
        if not run_lock.acquire(False):
            return
        cell[0] = self
        delay_s: float | None = 0.0
        try:
            with self._wake_lock:
                self._again = False
            delay_s = self._work()
        except BaseException:
            delay_s = self.core.settings.max_idle_ms / 1000
            raise
        finally:
            cell[0] = None
            run_lock.release()
            if run_lock is self._run_lock:  # else this is a child, forked inside the handler
                if delay_s is not None:
                    self.core.scheduler.submit_later(self, delay_s)
                with self._wake_lock:
                    self._submitted = False
                    again = self._again
                if again:
                    self.wake()

    def _work(self) -> float | None:
        """Cycle until idle. Seconds until the next run, or None to be woken by a producer."""
        core = self.core
        run_lock = self._run_lock
        while not self.finished and run_lock is self._run_lock:
            worked = self._serve_woken() if self.woken_for else False
            if core.abandoned and not core.closing and core.may_close_itself:
                core.begin_close()
            if self._seen_version != core.layout.version:
                self._refresh_layout()
            if self._seen_interruptions != core.interruptions:
                # A slot or a wake may have been lost: treat every partition as not armed.
                self._seen_interruptions = core.interruptions
                self._unarmed = set(self.owned)
            while self.removed_receivers:
                receiver = self.removed_receivers.popleft()
                if not receiver.classes:  # else it was registered again
                    core.call_on_shutdown(receiver)
            if self._cycle() or worked:
                self._idle_streak = 0
                self.flush_cycles += 1
                if core.gate is not None:
                    core.gate.guard.observe(core.layout.depth())
                if self._has_idle_receivers:
                    self._idle_round_while_busy()
                if core.rebalancer.due_ns <= time.monotonic_ns():
                    core.rebalancer.rebalance()
                if core.scheduler.has_ready_tasks():
                    self._again = True
                    return None
                continue
            if core.closing:
                if self._seen_version != core.layout.version:
                    continue  # a partition was handed to this task just before the queue closed
                return self._finish()
            return self._park()
        return None

    def _refresh_layout(self) -> None:
        before = set(self.owned)
        self._seen_version, self.owned = self.core.layout.hand_over(self)
        self._lanes = [lane for partition in self.owned for lane in partition.lanes]
        self._unarmed = (self._unarmed & set(self.owned)) | (set(self.owned) - before)
        self._has_idle_receivers = any(partition.idle_receivers for partition in self.owned)

    def _serve_woken(self) -> bool:
        """Begin with partitions whose producers woke this task: a single item waits for no scan."""
        worked = False
        while self.woken_for:
            partition = self.woken_for.popleft()
            if partition.owner is self:  # it may have changed hands since
                for lane in partition.lanes:
                    if lane.buffer and not self._lingers(lane) and self._serve(lane):
                        worked = True
        return worked

    def _cycle(self) -> bool:
        """Serve every owned lane once; whether there was anything to do."""
        worked = False
        contended: Lane | None = None
        for lane in self._lanes:
            if lane.buffer and not self._lingers(lane):
                if self._serve(lane):
                    worked = True
                else:
                    contended = lane
        if contended is not None and not worked:
            # All items are for handlers that other threads are calling. Wait for one of them, but
            # not for long: that thread may itself wait for this one to make room.
            self._serve(contended, self.core.settings.min_idle_ms / 1000)
            worked = True
        return worked

    def _lingers(self, lane: Lane) -> bool:
        """Whether the items of ``lane`` wait for others, for a fuller batch."""
        if not self._linger_ns:
            return False
        if (
            len(lane.buffer) >= self._max_batch
            or lane.receiver is None
            or lane.watchers
            or lane.partition.is_full
            or self.core.closing
        ):
            return False
        now = time.monotonic_ns()
        if not lane.linger_until_ns:
            lane.linger_until_ns = now + self._linger_ns
        return now < lane.linger_until_ns

    def _park_lingering(self) -> float | None:
        """Sleep while items wait for others: seconds until the first of them are due.

        A producer that fills a batch or a partition wakes the thread, and so do flush and shutdown.
        """
        lengths: dict[Partition, int] = {}
        for lane in self._lanes:
            if lane.buffer:
                length = max(lengths.get(lane.partition, 0), len(lane.buffer))
                lengths[lane.partition] = length
        for partition, length in lengths.items():
            partition.arm_after(self._max_batch - length)
        others = self._unarmed - lengths.keys()
        self._unarmed -= {partition for partition in others if partition.arm()}
        # Only now: what came before the partitions were armed has woken nobody.
        waiting = [lane for lane in self._lanes if lane.buffer]
        if not all(map(self._lingers, waiting)):
            self._again = True
            return None
        delay_s = (min(lane.linger_until_ns for lane in waiting) - time.monotonic_ns()) / 1e9
        if self._has_idle_receivers or self._unarmed & others:
            self._idle_round_while_busy()
            delay_s = min(delay_s, self._back_off_s())
        return max(0.0, delay_s)

    def _serve(self, lane: Lane, wait_s: float = 0.0) -> bool:
        """Hand one batch of ``lane`` to its handler; False when another thread is calling it."""
        core = self.core
        receiver = lane.receiver
        lock = receiver.lock if receiver is not None else None
        if lock is not None and not (
            lock.acquire(False) or (wait_s and lock.acquire(timeout=wait_s))
        ):
            return False
        partition = lane.partition
        batch: list[Any] = []
        count = 0
        started = time.monotonic_ns()
        self.calling = receiver
        try:
            # Taken only now: a batch taken before the lock could be overtaken by a later one.
            batch = partition.take(lane, self._max_batch)
            count = len(batch)  # now: the list is the handler's to change
            lane.linger_until_ns = 0
            if receiver is None:
                core.warn_unregistered(lane)
                outcome = UNREGISTERED
            else:
                answer = receiver.consume(batch)
                if answer is not None:
                    check_done(receiver.consume, answer)
                outcome = CONSUMED
        except BaseException as error:  # noqa: BLE001 - user code; reported, the thread lives
            outcome = FAILED
            core.report(receiver, batch, error)
        finally:
            self.calling = None
            if lock is not None:
                lock.release()
        spent = time.monotonic_ns() - started
        if receiver is not None:
            self.busy_ns += spent
            self.items += count
            self.batch_sizes[count.bit_length()] += 1
            self.durations[spent.bit_length()] += 1
        self._unarmed.add(partition)
        partition.finished(lane, count, outcome, spent)
        return True

    def _idle_round_while_busy(self) -> None:
        """Once per ``max_idle_ms``, call ``on_idle`` of handlers whose own lanes are empty.

        A thread kept busy by one class would otherwise never let the others pass on what they
        merged.
        """
        now = time.monotonic_ns()
        if now < self._next_idle_round_ns:
            return
        if self._next_idle_round_ns:
            for partition in self.owned:
                if partition.idle_receivers:
                    busy = {lane.receiver for lane in partition.lanes if lane.buffer}
                    self._call_on_idle(partition, busy)
        self._next_idle_round_ns = now + int(self.core.settings.max_idle_ms * 1e6)

    def _call_on_idle(self, partition: Partition, busy: Set[Receiver | None] = frozenset()) -> None:
        for receiver in partition.idle_receivers:
            if receiver in busy:
                continue
            lock = receiver.lock
            if lock is not None and not lock.acquire(False):
                continue  # it is consuming: not idle
            self.calling = receiver
            try:
                self.core.call_on_idle(receiver)
            finally:
                self.calling = None
                if lock is not None:
                    lock.release()

    def _park(self) -> float | None:
        """Nothing to do: call ``on_idle``, arm the partitions, return the delay of the next run."""
        if self._linger_ns and any(lane.buffer for lane in self._lanes):
            return self._park_lingering()
        self.idle_cycles += 1
        self._next_idle_round_ns = 0
        if self._has_idle_receivers:
            for partition in self.owned:
                if partition.idle_receivers:
                    self._call_on_idle(partition)
        self._unarmed = {partition for partition in self._unarmed if not partition.arm()}
        if self._unarmed:
            # An item came meanwhile, or a producer has its slot but has not put its item yet and
            # will wake nobody: look again soon.
            self._recover_lost_slots(self._unarmed)
            if any(partition.used for partition in self._unarmed):
                self._again = True
                return None
        elif not self._has_idle_receivers:
            self._idle_streak = 0
            return None
        return self._back_off_s()

    def _recover_lost_slots(self, partitions: set[Partition]) -> None:
        """Replace slots that stay out with nothing buffered: their producers were interrupted.

        Only ever done after a producer reported an interruption, and after many checks over a long
        time: a producer that is still between pop and append had as many turns to finish as this
        thread had.
        """
        if not self.core.interruptions:
            return
        now = time.monotonic_ns()
        earlier, self._suspects = self._suspects, {}
        for partition in partitions:
            drained = partition.drained
            since = earlier.get(partition) or _Suspicion(now, 0, drained)
            if partition.used or drained != since.drained:
                continue  # items still pass: the slots that are out belong to live producers
            checks = since.checks + 1
            if checks >= _LOST_AFTER_CHECKS and now - since.first_ns >= _LOST_AFTER_NS:
                self.core.recovered_slots += partition.replace_lost()
            else:
                self._suspects[partition] = _Suspicion(since.first_ns, checks, drained)

    def _finish(self) -> float | None:
        """The queue is closing and the lanes are empty: wait for late producers, then finish.

        A producer that got its slot before the queue closed will put its item and return True, so
        its item is waited for, however short the shutdown timeout.
        """
        awaited = {partition for partition in self.owned if partition.out}
        if awaited:
            self._recover_lost_slots(awaited)
            return self._back_off_s()
        self.finished = True
        self.core.task_finished()
        return None

    def _back_off_s(self) -> float:
        """The next wait: from the minimum, doubling with each idle cycle, up to the maximum."""
        settings = self.core.settings
        doublings = min(self._idle_streak, 30)
        delay_ms = min(settings.min_idle_ms * 2.0**doublings, settings.max_idle_ms)
        self._idle_streak += 1
        return delay_ms / 1000
