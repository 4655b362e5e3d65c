"""Which handler, lane, partition and drain task a class has, and moving partitions between tasks.

Guarantees
    * ``Partition.owner`` is the only record of which task drains a partition. It changes only under
      ``Layout.lock``, as do growth, rebalancing and closing: none of them can meet another halfway.
    * A class (or key bucket) that has a partition keeps it. Growth only makes room for later ones,
      so it can never put a class's new items ahead of its old ones.
    * A partition is handed over by the task that gives it up, between two of its cycles.
"""

from __future__ import annotations

import logging
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Hashable, Sequence

from batchmill.errors import (
    ConfigError,
    HandlerExistsError,
    QueueClosedError,
    QueueConflictError,
    SelectorError,
)
from batchmill.queue.partition import Lane, Partition, Receiver
from batchmill.queue.settings import BatchQueueSettings, Handler, check_positive
from batchmill.queue.stats import PartitionMove
from batchmill.queue.strategies import (
    KEY_BUCKETS,
    KeyHash,
    TypeHash,
    key_bucket,
    partition_loads,
    plan_error,
    type_hash_of,
)
from batchmill.queue.task import DrainTask

log = logging.getLogger("batchmill.queue")

_LAST_MOVES = 8
_NEVER = 1 << 63


class Layout:
    """The partitions of a queue, the tasks that own them, and their handlers."""

    def __init__(
        self, name: str, settings: BatchQueueSettings, tasks: Sequence[DrainTask], partitions: int
    ) -> None:
        self.name = name
        self.settings = settings
        self.tasks = tasks
        self.lock = threading.Lock()
        self.version = 0  # goes up with every change that tasks have to see
        self.moved_partitions = 0
        self.last_moves: deque[PartitionMove] = deque(maxlen=_LAST_MOVES)
        self.closed = False
        self.lanes: dict[type, Lane] = {}
        self._weights: dict[type, float] = {}
        self._total_weight = 0.0
        self._receivers: dict[Hashable, Receiver] = {}
        self._known_receivers: weakref.WeakValueDictionary[Hashable, Receiver] = (
            weakref.WeakValueDictionary()
        )
        self._by_type = isinstance(settings.selector, TypeHash)
        self._buckets: list[Partition | None] = [None] * KEY_BUCKETS
        self._bucket_counts: list[int] = []
        self.direct: Receiver | None = None
        if settings.consumer is not None:
            exclusive = settings.serialize or len(tasks) == 1
            self.direct = Receiver(settings.consumer, exclusive=exclusive)
        self.partitions: list[Partition] = []
        for index in range(partitions):
            self._add_partition(tasks[index % len(tasks)])
        if self.direct is not None and self.direct.on_idle is not None:
            self.partitions[0].idle_receivers = (self.direct,)

    def receivers(self) -> list[Receiver]:
        """The direct consumer, or all registered handlers."""
        return [self.direct] if self.direct is not None else list(self._receivers.values())

    def add_handler(self, cls: type, handler: Handler, weight: float) -> None:
        """Register ``handler`` for ``cls``; adaptive partitions grow."""
        if not isinstance(cls, type):
            raise ConfigError("cls", cls, "a class")
        if cls is type(None):
            raise ConfigError("cls", cls, "another class: None is not an item")
        check_positive("weight", weight)
        if self.direct is not None:
            raise QueueConflictError(
                self.name, "it has a direct consumer, which takes every class: add no handlers"
            )
        with self.lock:
            if self.closed:
                raise QueueClosedError(self.name, "add_handler()")
            if cls in self._weights:
                raise HandlerExistsError(self.name, cls)
            # Also one that was removed but is still in a call: it must not get a second lock.
            identity = _identity_of(handler)
            receiver = self._known_receivers.get(identity)
            if receiver is None:
                receiver = Receiver(handler, exclusive=True)
                self._known_receivers[identity] = receiver
            self._receivers[identity] = receiver
            self._grow(self._total_weight + weight)
            home = self._home_of(cls, weight)
            for lane in self._lanes_of(cls):
                lane.receiver = receiver
            if receiver.on_idle is not None and not receiver.classes:
                home.idle_receivers = (*home.idle_receivers, receiver)
            receiver.classes.add(cls)
            self.version += 1
            # Last: interrupted or forked before this, the class can simply be registered again.
            self._weights[cls] = weight
            self._total_weight += weight

    def remove_handler(self, cls: type) -> bool:
        """Unregister; False when the class had no handler. Partitions do not shrink.

        A handler that has no class left gets its last call from a drain thread.
        """
        with self.lock:
            weight = self._weights.pop(cls, None)
            if weight is None:
                return False
            self._total_weight -= weight
            if cls in self.lanes:
                self.lanes[cls].partition.weight -= weight
            for lane in self._lanes_of(cls):
                lane.receiver = None
            for key, receiver in list(self._receivers.items()):
                receiver.classes.discard(cls)
                if not receiver.classes:
                    del self._receivers[key]
                    for partition in self.partitions:
                        partition.idle_receivers = tuple(
                            other for other in partition.idle_receivers if other is not receiver
                        )
                    self.tasks[0].removed_receivers.append(receiver)
            self.version += 1
        self.tasks[0].wake()
        return True

    def lane_of_type(self, cls: type) -> Lane:
        """The lane of a class under *type_hash*; a class without a handler is placed by hash."""
        with self.lock:
            lane = self.lanes.get(cls)
            if lane is None:
                partition = self.partitions[type_hash_of(cls) % len(self.partitions)]
                lane = self.lanes[cls] = self._lane_in(partition, cls)
            return lane

    def lane_in(self, partition: Partition, cls: type) -> Lane:
        """The lane of a class in a partition that a selector chose."""
        with self.lock:
            return self._lane_in(partition, cls)

    def partition_of(self, item: object) -> Partition:
        """The partition that the selector chooses for ``item``."""
        selector = self.settings.selector
        if isinstance(selector, KeyHash):
            bucket = key_bucket(selector.key(item))
            return self._buckets[bucket] or self._pin_bucket(bucket)
        if self._by_type:
            cls = type(item)
            return (self.lanes.get(cls) or self.lane_of_type(cls)).partition
        partitions = self.partitions
        count = len(partitions)
        index = selector(item, count)
        if isinstance(index, int) and 0 <= index < count:
            return partitions[index]
        raise SelectorError(self.name, index, count)

    def _pin_bucket(self, bucket: int) -> Partition:
        """Give a key bucket, for good, the partition that has the fewest."""
        with self.lock:
            partition = self._buckets[bucket]
            if partition is None:
                missing = len(self.partitions) - len(self._bucket_counts)
                self._bucket_counts.extend([0] * missing)
                index = index_of_least(self._bucket_counts)
                self._bucket_counts[index] += 1
                partition = self._buckets[bucket] = self.partitions[index]
            return partition

    def depth(self) -> int:
        """Items in all partitions."""
        return sum([partition.used for partition in self.partitions])

    def owners(self) -> tuple[int, ...]:
        """The task of each partition."""
        return tuple(partition.owner.index for partition in self.partitions)

    def request_moves(self, plan: Sequence[int]) -> set[DrainTask]:
        """Note the next owners, under ``lock``; return the tasks that have to give some up."""
        givers: set[DrainTask] = set()
        for partition, index in zip(self.partitions, plan, strict=True):
            target = self.tasks[index]
            partition.next_owner = target if target is not partition.owner else None
            if partition.next_owner is not None:
                givers.add(partition.owner)
        if givers:
            self.version += 1
        return givers

    def hand_over(self, task: DrainTask) -> tuple[int, tuple[Partition, ...]]:
        """Give partitions of ``task`` to their next owners; the version, and what it still owns.

        Called by the task itself between two cycles: that is what makes the hand-over safe.
        """
        takers: set[DrainTask] = set()
        moved: list[Partition] = []
        with self.lock:
            for partition in self.partitions:
                if partition.owner is task and partition.next_owner is not None:
                    partition.owner, partition.next_owner = partition.next_owner, None
                    takers.add(partition.owner)
                    move = partition.index, task.index, partition.owner.index
                    self.last_moves.append(PartitionMove(*move, time.time()))
                    moved.append(partition)
            self.moved_partitions += len(moved)
            if takers:
                self.version += 1
            owned = tuple(partition for partition in self.partitions if partition.owner is task)
            version = self.version
        for taker in takers:
            taker.wake()
        for partition in moved:
            partition.wake_all()  # a handler that waits there may now wait for its own thread
        return version, owned

    def close(self) -> None:
        """Accept no more items and handlers; calling it again does no harm."""
        with self.lock:
            self.closed = True
            for partition in self.partitions:
                partition.next_owner = None
                partition.close()

    def after_fork_in_child(self) -> None:
        """Empty the partitions and replace the locks; handlers and placement stay."""
        self.lock = threading.Lock()
        self.moved_partitions = 0
        self.last_moves.clear()
        self.version += 1
        for receiver in self.receivers():
            receiver.renew_lock()
        for partition in self.partitions:
            partition.next_owner = None
            partition.reset()
            partition.closed = self.closed

    def _add_partition(self, owner: DrainTask) -> None:
        partition = Partition(len(self.partitions), self.settings.buffer_size, owner)
        if self.direct is not None:
            partition.add_lane(None, self.direct)
        self.partitions.append(partition)

    def _grow(self, weight: float) -> None:
        wanted = self.settings.partitions.resolve(len(self.tasks), weight)
        while len(self.partitions) < wanted:
            self._add_partition(self.tasks[fewest_owned(self.owners(), len(self.tasks))])

    def _home_of(self, cls: type, weight: float) -> Partition:
        """The partition of a newly registered class; its owner also calls ``on_idle``.

        Where the selector decides, a class has no partition of its own, and any will do.
        """
        if not self._by_type:
            return self.partitions[len(self._weights) % len(self.partitions)]
        lane = self.lanes.get(cls)
        if lane is None:
            index = index_of_least([partition.weight for partition in self.partitions])
            lane = self.lanes[cls] = self.partitions[index].add_lane(cls, None)
        lane.partition.weight += weight
        return lane.partition

    def _lane_in(self, partition: Partition, cls: type) -> Lane:
        wanted = None if self.direct is not None else cls
        lane = next((lane for lane in partition.lanes if lane.cls is wanted), None)
        if lane is None:
            lane = partition.add_lane(cls, self._receiver_of(cls))
            self.version += 1  # each task keeps a list of its lanes
        partition.routes[cls] = lane.route
        return lane

    def _lanes_of(self, cls: type) -> list[Lane]:
        if self._by_type:
            return [self.lanes[cls]] if cls in self.lanes else []
        return [lane for part in self.partitions for lane in part.lanes if lane.cls is cls]

    def _receiver_of(self, cls: type) -> Receiver | None:
        receivers = self._receivers.values()
        return next((receiver for receiver in receivers if cls in receiver.classes), None)


def _identity_of(handler: Handler) -> Hashable:
    """What makes two registrations the same handler: equality for bound methods, else identity.

    ``obj.method`` is a new object each time it is read, but it is the same handler.
    """
    owner = getattr(handler, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        return id(handler)
    # A method of a built-in, such as a list's append, has a name and no function.
    function = getattr(handler, "__func__", None)
    return (id(owner), id(function) if function is not None else getattr(handler, "__name__", ""))


def index_of_least(values: Sequence[float]) -> int:
    """The index of the smallest value, the first one of several."""
    return min(range(len(values)), key=values.__getitem__)


def fewest_owned(owners: Sequence[int], threads: int) -> int:
    """The thread that owns the fewest partitions: it gets the one that is added."""
    return index_of_least([owners.count(thread) for thread in range(threads)])


class Rebalancer:
    """Calls the balancer at intervals, and starts the moves that it decides.

    There is no timer, as a queue without traffic has nothing to balance: drain tasks compare
    ``due_ns`` after a cycle that had work, and the first one past it calls :meth:`rebalance`.
    """

    def __init__(self, layout: Layout) -> None:
        self._settings = layout.settings
        self._layout = layout
        self.reset()

    def reset(self) -> None:
        self._running = threading.Lock()
        self.rebalances = 0
        self._last_counts: list[tuple[int, int, int]] = []
        self._set_due()

    def _set_due(self) -> None:
        self.due_ns = _NEVER
        if self._settings.balancer is not None and len(self._layout.tasks) > 1:
            interval_ns = int(self._settings.rebalance_interval_ms * 1e6)
            self.due_ns = time.monotonic_ns() + interval_ns

    def rebalance(self) -> None:
        """Call the balancer, and have owners give up the partitions that should move.

        The balancer is the user's code, so the layout's lock is not held during the call; its
        plan is ignored if the owners have changed meanwhile.
        """
        if not self._running.acquire(blocking=False):
            return
        try:
            self._set_due()
            layout = self._layout
            with layout.lock:
                loads, owners = self._loads(), layout.owners()
            plan = self._plan(loads, owners)
            if plan is None:
                return
            with layout.lock:
                if layout.closed or layout.owners() != owners:
                    return
                givers = layout.request_moves(plan)
                if givers:
                    self.rebalances += 1
        finally:
            self._running.release()
        for giver in givers:
            giver.wake()

    def _plan(self, loads: list[float], owners: tuple[int, ...]) -> Sequence[int] | None:
        balancer, name = self._settings.balancer, self._layout.name
        if balancer is None:
            return None
        threads = len(self._layout.tasks)
        try:
            plan = balancer.assign(loads, owners, threads)
        except Exception:
            log.exception("batchmill queue %s: the balancer failed; nothing moves", name)
            return None
        error = plan_error(plan, len(owners), threads)
        if error is not None:
            log.warning("batchmill queue %s: the balancer's plan is ignored: %s", name, error)
            return None
        return plan

    def _loads(self) -> list[float]:
        """The load of each partition since the last call."""
        now = [(p.offered, p.drained, p.busy_ns) for p in self._layout.partitions]
        before = self._last_counts + [(0, 0, 0)] * (len(now) - len(self._last_counts))
        self._last_counts = now
        grown = [
            [new - old for new, old in zip(counts, last, strict=True)]
            for counts, last in zip(now, before, strict=True)
        ]
        return partition_loads(*zip(*grown, strict=True))
