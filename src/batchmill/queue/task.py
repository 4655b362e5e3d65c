"""One drain task: the partitions it owns, and what it does each time it is run.

Guarantees
    * A task is run by one thread at a time, and a partition belongs to one task at a time, so no
      lane is ever drained by two threads at once.
    * A partition changes hands only between two cycles of the task that gives it up. The old
      owner makes the hand-over itself, so there is no moment in which both, or neither, own it.
    * A wake is never lost: one that comes while the task runs makes it look once more.
    * Owned lanes are served in turn, at most ``max_batch`` items each: a saturated one delays the
      others by a batch, no more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Set
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from batchmill.queue.handler import Receiver
from batchmill.queue.partition import CONSUMED, FAILED, UNREGISTERED, Lane, Partition

if TYPE_CHECKING:
    from batchmill.queue.core import QueueCore

_LOST_AFTER_LOOKS = 20
_LOST_AFTER_NS = 1_000_000_000
"""Slots that are out with nothing buffered, at every look for this long, are taken for lost."""

_running = threading.local()

Cell: TypeAlias = "list[DrainTask | None]"


def current_task() -> DrainTask | None:
    """The drain task that the calling thread is running, if it is a drain thread."""
    return cell_of_thread()[0]


def forget_current_task() -> None:
    """In a forked child, the thread that forked is no drain thread any more."""
    cell_of_thread()[0] = None


def cell_of_thread() -> Cell:
    """The calling thread's note of the task it runs; always the same list."""
    try:
        return cast("Cell", _running.cell)
    except AttributeError:
        cell: Cell = [None]
        _running.cell = cell
        return cell


class DrainTask:
    """Drains the partitions it owns whenever it is woken."""

    def __init__(self, core: QueueCore, index: int) -> None:
        self.core = core
        self.index = index
        self._max_batch = core.config.max_batch
        self.finished = False
        self.calling: Receiver | None = None
        """The handler this task is in."""
        self.waits_for: Partition | None = None
        """What the handler this task is in waits for (see _knots)."""
        self.reset()

    def reset(self) -> None:
        """A new task, or one in a forked child."""
        self._submit = self.core.scheduler.submitter()
        self._run_lock = threading.Lock()
        # Reentrant: a finaliser or a signal handler may wake a task in the middle of a wake.
        self._wake_lock = threading.RLock()
        self.calling = self.waits_for = None
        self._again = False
        self._submitted = False
        self._seen_version = -1
        self._seen_interruptions = 0
        self.owned: tuple[Partition, ...] = ()
        self.farewells: deque[Receiver] = deque()
        self._lanes: list[Lane] = []
        self._unarmed: set[Partition] = set()
        self.rung: deque[Partition] = deque()
        self._idle_streak = 0
        self._missing: dict[Partition, tuple[int, int, int]] = {}
        self._next_idle_round = 0
        self._has_idlers = False
        self.wake_at = 0.0
        self.timer_due = 0.0
        self.timer_id = -1
        self.items = 0
        self.busy_ns = 0
        self.flush_cycles = 0
        self.idle_cycles = 0

    def wake(self) -> None:
        """Have the task run soon; while it runs already, have it look once more."""
        with self._wake_lock:
            self._again = True
            if not self._submitted:
                # In this order: interrupted in between, the task runs once too often.
                self._submit(self)
                self._submitted = True

    def wake_at_once(self) -> None:
        """Like :meth:`wake`, for a producer: the last thing it does is to wake the thread.

        What a producer does after that it does with the GIL held, while the thread waits for it.
        Interrupted before the last line, it leaves a task that nobody submits: whoever calls this
        has to call :meth:`wake_surely` then.
        """
        with self._wake_lock:
            self._again = True
            if self._submitted:
                return
            self._submitted = True
        self._submit(self)

    def wake_surely(self) -> None:
        """Have the task run even if it seems to be submitted already; once too often is no harm."""
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
            delay_s = self.core.config.max_idle_ms / 1000
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
        """Cycle until idle. Seconds until the next look, or None to be woken by a producer."""
        core = self.core
        run_lock = self._run_lock
        while not self.finished and run_lock is self._run_lock:
            rung = self._serve_rung() if self.rung else False
            if core.abandoned and not core.closing:
                core.begin_close()
            if self._seen_version != core.layout.version:
                self._see_layout()
            if self._seen_interruptions != core.interruptions:
                # Somewhere a slot or a wake may have been lost: take no partition for armed.
                self._seen_interruptions = core.interruptions
                self._unarmed = set(self.owned)
            while self.farewells:
                receiver = self.farewells.popleft()
                if not receiver.classes:  # else it was registered again
                    core.say_goodbye(receiver)
            if self._cycle() or rung:
                self._idle_streak = 0
                self.flush_cycles += 1
                if core.gate is not None:
                    core.gate.guard.observe(core.layout.depth())
                if self._has_idlers:
                    self._idle_round_while_busy()
                if core.rebalancer.due_ns <= time.monotonic_ns():
                    core.rebalancer.rebalance()
                if core.scheduler.others_wait():
                    self._again = True
                    return None
                continue
            if core.closing:
                if self._seen_version != core.layout.version:
                    continue  # a partition was handed to this task just before the gate closed
                return self._finish()
            return self._park()
        return None

    def _see_layout(self) -> None:
        before = set(self.owned)
        self._seen_version, self.owned = self.core.layout.hand_over(self)
        self._lanes = [lane for partition in self.owned for lane in partition.lanes]
        self._unarmed = (self._unarmed & set(self.owned)) | (set(self.owned) - before)
        self._has_idlers = any(partition.idlers for partition in self.owned)

    def _serve_rung(self) -> bool:
        """Begin with partitions whose producers woke this task: a lone item waits for no scan."""
        worked = False
        while self.rung:
            partition = self.rung.popleft()
            if partition.owner is self:  # it may have changed hands since
                for lane in partition.lanes:
                    if lane.buffer and self._serve(lane):
                        worked = True
        return worked

    def _cycle(self) -> bool:
        """Give every owned lane its turn; whether there was anything to do."""
        worked = False
        contended: Lane | None = None
        for lane in self._lanes:
            if lane.buffer:
                if self._serve(lane):
                    worked = True
                else:
                    contended = lane
        if contended is not None and not worked:
            # All there is to do is for handlers that other threads are in. Wait for one of them,
            # but not for long: that thread may itself wait for this one to make room.
            self._serve(contended, self.core.config.min_idle_ms / 1000)
            worked = True
        return worked

    def _serve(self, lane: Lane, wait_s: float = 0.0) -> bool:
        """Hand one batch of ``lane`` to its handler; False when another thread is in it."""
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
            if receiver is None:
                core.note_unregistered(lane)
                outcome = UNREGISTERED
            else:
                receiver.consume(batch)
                outcome = CONSUMED
        except BaseException as error:  # noqa: BLE001 - user code; reported, the thread lives
            outcome = FAILED
            core.report(receiver, batch, error)
        finally:
            self.calling = None
            if lock is not None:
                lock.release()
        spent = time.monotonic_ns() - started
        self.busy_ns += spent
        self.items += count
        self._unarmed.add(partition)
        partition.finished(lane, count, outcome, spent)
        return True

    def _idle_round_while_busy(self) -> None:
        """Once per ``max_idle_ms``, tell handlers whose own lanes are empty that they are idle.

        A thread kept busy by one class would otherwise never let the others pass on what they
        merged.
        """
        now = time.monotonic_ns()
        if now < self._next_idle_round:
            return
        if self._next_idle_round:
            for partition in self.owned:
                if partition.idlers:
                    busy = {lane.receiver for lane in partition.lanes if lane.buffer}
                    self._tell_idle(partition, busy)
        self._next_idle_round = now + int(self.core.config.max_idle_ms * 1e6)

    def _tell_idle(self, partition: Partition, busy: Set[Receiver | None] = frozenset()) -> None:
        for receiver in partition.idlers:
            if receiver in busy:
                continue
            lock = receiver.lock
            if lock is not None and not lock.acquire(False):
                continue  # it is consuming: not idle
            self.calling = receiver
            try:
                self.core.notify(receiver, receiver.on_idle)
            finally:
                self.calling = None
                if lock is not None:
                    lock.release()

    def _park(self) -> float | None:
        """Nothing to do: tell the handlers, arm the partitions, say when to look again."""
        self.idle_cycles += 1
        self._next_idle_round = 0
        if self._has_idlers:
            for partition in self.owned:
                if partition.idlers:
                    self._tell_idle(partition)
        self._unarmed = {partition for partition in self._unarmed if not partition.arm()}
        if self._unarmed:
            # An item came meanwhile, or a producer has its slot but has not put its item yet and
            # will wake nobody: look again soon.
            self._note_miss(self._unarmed)
            if any(partition.used for partition in self._unarmed):
                self._again = True
                return None
        elif not self._has_idlers:
            self._idle_streak = 0
            return None
        return self._back_off_s()

    def _note_miss(self, partitions: set[Partition]) -> None:
        """Slots that stay out with nothing buffered belong to interrupted producers: replace them.

        Only ever done after a producer reported an interruption, and after many looks over a long
        time: a producer that still is on its way had as many turns to finish as this thread had.
        """
        if not self.core.interruptions:
            return
        now = time.monotonic_ns()
        seen_before, self._missing = self._missing, {}
        for partition in partitions:
            drained = partition.drained
            first, looks, drained_then = seen_before.get(partition, (now, 0, drained))
            if partition.used or drained != drained_then:
                continue  # it moves: what is out there is on its way
            if looks + 1 >= _LOST_AFTER_LOOKS and now - first >= _LOST_AFTER_NS:
                self.core.recovered_slots += partition.replace_lost()
            else:
                self._missing[partition] = (first, looks + 1, drained)

    def _finish(self) -> float | None:
        """The queue is closing and the lanes are empty: wait for stragglers, then sign off.

        A straggler is a producer that got its slot before the gate closed. It will put its item,
        and it will be told True, so its item is waited for, however short the shutdown timeout.
        """
        stragglers = {partition for partition in self.owned if partition.out}
        if stragglers:
            self._note_miss(stragglers)
            return self._back_off_s()
        self.finished = True
        self.core.task_finished()
        return None

    def _back_off_s(self) -> float:
        """The next wait: from the minimum, doubling with each idle cycle, up to the maximum."""
        config = self.core.config
        delay_ms = min(config.min_idle_ms * 2.0 ** min(self._idle_streak, 30), config.max_idle_ms)
        self._idle_streak += 1
        return delay_ms / 1000
