"""A bounded buffer that producers fill without taking a lock.

Guarantees
    * A partition never holds more than ``capacity`` items, whatever the number of producers.
    * An item is in the buffer exactly if ``produce`` returned True for it.
    * Items that one producer puts on one lane come out in that order.
    * A drain thread that armed a quiet partition is always woken by the next item.

How
    A *slot* is the right to put one item. There are exactly ``capacity`` of them, and each is in
    one of three places: in ``reserve`` (a number, guarded by ``lock``), in ``tokens`` (a list that
    producers pop from, with no lock), or *out*: with a producer between its pop and its append, or
    standing for an item in a buffer. Producing is ``tokens.pop()`` then ``buffer.append(item)``;
    an empty ``tokens`` raises, which leads to the rare slow path, :meth:`Partition.admit`. Draining
    copies and deletes the first n items of a lane and adds n to the reserve.

    A partition is *quiet* when no slot is out: nothing is buffered and no producer is between pop
    and append. Only then may its drain thread sleep, and it leaves the partition itself on top of
    the tokens: the producer that pops this *wake token*, instead of None, wakes the thread after
    its append. Leaving the token is called *arming*.

    Lanes keep classes apart inside a partition, so that a batch needs no grouping, while the slots
    are shared, so that the bound is the partition's.

Assumptions
    ``list.append``, ``list.pop``, ``list.extend(list)``, slicing, slice deletion, ``len`` and
    dict look-up are each atomic: under the GIL because they run no Python code in between, on a
    free-threaded build because each takes the object's own lock. Only one thread at a time drains
    a partition, and only under ``lock``, so nobody else removes from a buffer. All other fields
    are written under ``lock``. A producer may not be interrupted by code that produces on the
    same queue in the same thread (a signal handler, a finaliser): ``lock`` is not reentrant.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from batchmill.callables import check_plain
from batchmill.errors import ConfigError
from batchmill.queue.settings import Handler
from batchmill.waiters import Countdown, Waiter

if TYPE_CHECKING:
    from batchmill.queue.task import DrainTask

CLOSED: Final = -1

CONSUMED: Final = "consumed"
FAILED: Final = "failed"
UNREGISTERED: Final = "unregistered"

Route: TypeAlias = tuple[Callable[[], "Partition | None"], Callable[[Any], None]]
"""The two calls that put an item: take a slot, append the item."""

Lists: TypeAlias = tuple[list["Partition | None"], list[Any]]
"""The same as lists, to pop from and to append to: quicker in a loop than bound methods."""


class FailureLog:
    """Limits the messages about a call that fails again and again to one a minute."""

    PERIOD_S = 60.0

    def __init__(self) -> None:
        self._count = 0
        self._next = -math.inf

    def count(self, now: float) -> int:
        """Count a failure; how many to report now, or 0 when a message would come too soon."""
        self._count += 1
        if now < self._next:
            return 0
        count, self._count = self._count, 0
        self._next = now + self.PERIOD_S
        return count


class Receiver:
    """A user's handler: its methods, and the lock that keeps its calls apart.

    A handler registered for several classes has one receiver, so its calls never overlap and its
    ``on_idle`` is called once, not once per class.
    """

    def __init__(self, handler: Handler, *, exclusive: bool) -> None:
        self.handler = handler
        consume = getattr(handler, "consume", None)
        if not callable(consume):
            consume = handler
        if not callable(consume):
            raise ConfigError(
                "handler", handler, "a callable, or an object with a consume(batch) method"
            )
        check_plain("handler", consume)
        self.consume: Callable[[list[Any]], object] = consume
        self.on_idle = _method(handler, "on_idle")
        self.on_shutdown = _method(handler, "on_shutdown") or self.on_idle
        self.idle_failures = FailureLog()
        self.lock: threading.Lock | None = threading.Lock() if exclusive else None
        self.classes: set[type] = set()

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where its holder may not exist."""
        if self.lock is not None:
            self.lock = threading.Lock()


def _method(handler: object, name: str) -> Callable[[], object] | None:
    method: Callable[[], object] | None = getattr(handler, name, None)
    if not callable(method):
        return None
    check_plain(name, method)
    return method


class Lane:
    """The items of one class in one partition (of all classes, for a direct consumer)."""

    def __init__(self, partition: Partition, cls: type | None, receiver: Receiver | None) -> None:
        self.partition = partition
        self.cls = cls
        self.receiver = receiver
        self.buffer: list[Any] = []
        self.route: Route = (partition.tokens.pop, self.buffer.append)
        self.lists: Lists = (partition.tokens, self.buffer)
        self.watchers: list[tuple[int, Countdown]] = []
        self.linger_until_ns = 0
        """Until when its items wait for others; 0: not decided. Its drain task's own."""
        self.reset_counters()

    def reset_counters(self) -> None:
        self.drained = 0
        self.consumed = 0
        self.failed = 0
        self.unregistered = 0

    @property
    def finished(self) -> int:
        """Items whose handler has returned or raised, and items without a handler."""
        return self.consumed + self.failed + self.unregistered

    def watch(self, countdown: Countdown) -> None:
        """Count ``countdown`` down when everything that is on the lane now is finished."""
        with self.partition.lock:
            target = self.drained + len(self.buffer)
            if self.finished >= target:
                return
            countdown.add()
            self.watchers.append((target, countdown))
        self.notify_watchers()  # the drain thread may have finished before it saw the watcher

    def unwatch(self, countdown: Countdown) -> None:
        """Remove a watcher that gave up."""
        with self.partition.lock:
            self.watchers = [
                (target, watcher) for target, watcher in self.watchers if watcher is not countdown
            ]

    def notify_watchers(self) -> None:
        with self.partition.lock:
            finished = self.finished
            due = [countdown for target, countdown in self.watchers if target <= finished]
            if due:
                self.watchers = [watcher for watcher in self.watchers if watcher[0] > finished]
        for countdown in due:
            countdown.done()


class Partition:
    """A set of lanes that share ``capacity`` slots and are drained by one task at a time."""

    def __init__(self, index: int, capacity: int, owner: DrainTask) -> None:
        self.index = index
        self.capacity = capacity
        self.owner = owner
        self.next_owner: DrainTask | None = None
        self.lanes: tuple[Lane, ...] = ()
        self.routes: dict[type, Route] = {}
        self.idle_receivers: tuple[Receiver, ...] = ()
        self.weight = 0.0
        # Slots are moved from the reserve to the tokens in chunks: large enough that the lock is
        # rare, small enough that tokens take little memory.
        self.chunk = max(1, min(1024, capacity // 4))
        self.closed = False
        self.tokens: list[Partition | None] = []
        self.reset()

    def reset(self) -> None:
        """Empty it, with all slots in the reserve: a new partition, or a forked child's."""
        self.lock = threading.Lock()
        self.waiters: deque[Waiter] = deque()
        self.tokens.clear()
        self.reserve = self.capacity
        self.armed = False
        self.drained = 0
        self.refused = 0
        self.stopped = 0
        self.busy_ns = 0
        self.stalled_at = -1
        for lane in self.lanes:
            lane.buffer.clear()
            lane.watchers.clear()
            lane.linger_until_ns = 0
            lane.reset_counters()

    def add_lane(self, cls: type | None, receiver: Receiver | None) -> Lane:
        lane = Lane(self, cls, receiver)
        self.lanes = (*self.lanes, lane)
        return lane

    @property
    def used(self) -> int:
        return sum([len(lane.buffer) for lane in self.lanes])

    @property
    def out(self) -> int:
        """Slots out: buffered items, and producers between pop and append."""
        return self.capacity - self.reserve - len(self.tokens)

    @property
    def offered(self) -> int:
        """Items that producers tried to put so far, accepted or not.

        A refused or a waiting item is demand on this partition just as an accepted one is.
        """
        return self.drained + self.used + self.refused + len(self.waiters)

    def admit(self, lane: Lane, items: list[Any], waiter: Waiter | None = None) -> int:
        """Put as many of the first ``items`` as fit; return how many, or CLOSED.

        If none fits, ``waiter`` (if given) is woken when there may be room.
        """
        with self.lock:
            if self.closed:
                return CLOSED
            count = self._claim(len(items))
            if count == 0:
                if waiter is not None:
                    self.waiters.append(waiter)
                return 0
            lane.buffer.extend(items if count == len(items) else items[:count])
            if self.reserve and not self.tokens:
                self._refill_tokens()
            armed = self.armed
        if armed:
            self.wake_owner()
        return count

    def _claim(self, wanted: int) -> int:
        count = min(wanted, self.reserve)
        self.reserve -= count
        return count if count == wanted else count + self._pop_tokens(wanted - count)

    def _pop_tokens(self, most: int) -> int:
        """Take up to ``most`` tokens; how many there were. Producers may pop meanwhile."""
        for count in range(most):
            try:
                self.tokens.pop()
            except IndexError:
                return count
        return most

    def _refill_tokens(self) -> None:
        count = min(self.reserve, self.chunk)
        self.reserve -= count
        self.tokens.extend([None] * count)

    def wake_owner(self) -> None:
        """Wake the drain thread: called after the append, by the taker of the wake token.

        ``armed`` stays: the drain thread may have armed anew since the token was taken.
        """
        owner = self.owner
        owner.woken_for.append(self)
        owner.wake_at_once()

    def leave(self, waiter: Waiter) -> None:
        """Stop waiting for room. A wake that this waiter did not use goes to the next one."""
        with self.lock:
            try:
                self.waiters.remove(waiter)
                return
            except ValueError:
                room = self.capacity - self.out
        self._wake_next(min(1, room))

    def _wake_next(self, count: int) -> None:
        """Wake the ``count`` longest-waiting producers, skipping those that are gone."""
        while count > 0:
            with self.lock:
                chosen = [self.waiters.popleft() for _ in range(min(count, len(self.waiters)))]
            if not chosen:
                return
            count -= sum([waiter.wake() for waiter in chosen])

    def take(self, lane: Lane, most: int) -> list[Any]:
        """Remove and return up to ``most`` items of ``lane``, and free their slots."""
        with self.lock:
            self.armed = False
            buffer = lane.buffer
            batch = buffer[:most]
            count = len(batch)
            del buffer[:count]
            lane.drained += count
            self.drained += count
            self.reserve += count
            has_waiters = bool(self.waiters)
        if has_waiters:
            self._wake_next(count)
        return batch

    def finished(self, lane: Lane, count: int, outcome: str, spent_ns: int) -> None:
        """Count a batch whose handler has returned or raised, and wake callers of ``flush``."""
        with self.lock:
            self.busy_ns += spent_ns
            if outcome == CONSUMED:
                lane.consumed += count
            elif outcome == FAILED:
                lane.failed += count
            else:
                lane.unregistered += count
            watched = bool(lane.watchers)
        if watched:
            lane.notify_watchers()

    def arm(self) -> bool:
        """Leave the wake token for the next producer; False when the partition is not quiet."""
        with self.lock:
            if self.closed:
                return True  # there is no next item, and a token here would admit one
            tokens = self.tokens
            self.armed = True  # until take(): an item that comes through admit() also wakes
            if tokens[-1:] != [self]:
                if self._claim(1) == 0:
                    return False
                tokens.append(self)
            return self.reserve + len(tokens) == self.capacity

    @property
    def is_full(self) -> bool:
        """Whether there is no free slot; without the lock, so only a hint."""
        return not self.reserve and not self.tokens

    def arm_after(self, items: int) -> None:
        """Wake the drain thread when that many more items were put, or the partition is full.

        The wake token lies below as many others as may be taken before it. Items that come through
        ``admit`` wake as well.
        """
        with self.lock:
            if self.closed:
                return
            self.armed = True
            self.reserve += self._pop_tokens(len(self.tokens))
            between = self.out - self.used  # producers between pop and append
            count = self._claim(max(1, items - between))
            if count:
                self.tokens.extend([self, *[None] * (count - 1)])

    def close(self) -> None:
        """Accept no more items, and wake the producers that wait for room."""
        with self.lock:
            self.closed = True
            self.reserve += self._pop_tokens(len(self.tokens))
        self.wake_all()

    def wake_all(self) -> None:
        """Wake every producer that waits for room, to look again."""
        self._wake_next(len(self.waiters))

    def count_refused(self, count: int) -> None:
        with self.lock:
            self.refused += count
            self.stalled_at = self.drained

    def count_stopped(self, count: int) -> None:
        with self.lock:
            self.stopped += count

    def replace_lost(self) -> int:
        """Return the slots of producers that were interrupted between pop and append.

        Only for a partition that has had empty buffers and slots out for so long that no producer
        can still be between the two.
        """
        with self.lock:
            lost = 0 if self.used else self.out
            self.reserve += lost
        self._wake_next(lost)
        return lost
