"""Which class is handled by whom, on which lane, in which partition, drained by which task.

Guarantees
    * ``Partition.owner`` is the only record of who drains what. It changes under ``lock`` alone, as
      do growth, rebalancing and the closing of the gate: none of them can meet another halfway.
    * A class (or key bucket) that has a partition keeps it. Growth only makes room for later ones,
      so it can never put a class's new items ahead of its old ones.
    * A partition is handed over by the task that gives it up, between two of its cycles.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Sequence

from batchmill.errors import ConfigError, HandlerExistsError, QueueClosedError, QueueConflictError
from batchmill.queue import placement
from batchmill.queue.config import BatchQueueSettings
from batchmill.queue.handler import Handler, Receiver, identity_of
from batchmill.queue.partition import Lane, Partition
from batchmill.queue.policy import check_positive
from batchmill.queue.selector import KEY_BUCKETS, TypeHash, type_hash_of
from batchmill.queue.stats import PartitionMove
from batchmill.queue.task import DrainTask

_LAST_MOVES = 8


class Layout:
    """The partitions of a queue, their owners, and the handlers behind them."""

    def __init__(
        self, name: str, config: BatchQueueSettings, tasks: Sequence[DrainTask], partitions: int
    ) -> None:
        self.name = name
        self.config = config
        self.tasks = tasks
        self.lock = threading.Lock()
        self.version = 0  # goes up whenever tasks should look again
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
        self._by_type = isinstance(config.selector, TypeHash)
        self._buckets: list[Partition | None] = [None] * KEY_BUCKETS
        self._buckets_of: list[int] = []
        self.direct: Receiver | None = None
        if config.consumer is not None:
            exclusive = config.serialize or len(tasks) == 1
            self.direct = Receiver(config.consumer, exclusive=exclusive)
        self.partitions: list[Partition] = []
        for owner in placement.deal(partitions, len(tasks)):
            self._add_partition(tasks[owner])
        if self.direct is not None and self.direct.on_idle is not None:
            self.partitions[0].idlers = (self.direct,)

    def receivers(self) -> list[Receiver]:
        """Everybody who handles something."""
        return [self.direct] if self.direct is not None else list(self._receivers.values())

    def add_handler(self, cls: type, handler: Handler, weight: float) -> None:
        """Register, growing the partitions where the policy says so."""
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
            receiver = self._known_receivers.get(identity_of(handler))
            if receiver is None:
                receiver = Receiver(handler, exclusive=True)
                self._known_receivers[identity_of(handler)] = receiver
            self._receivers[identity_of(handler)] = receiver
            self._grow(self._total_weight + weight)
            home = self._home_of(cls, weight)
            for lane in self._lanes_of(cls):
                lane.receiver = receiver
            if receiver.on_idle is not None and not receiver.classes:
                home.idlers = (*home.idlers, receiver)
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
                        partition.idlers = tuple(r for r in partition.idlers if r is not receiver)
                    self.tasks[0].farewells.append(receiver)
            self.version += 1
        self.tasks[0].wake()
        return True

    def lane_of_type(self, cls: type) -> Lane:
        """The lane of a class where the class decides; a class nobody registered is hashed."""
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

    def partition_of_bucket(self, bucket: int) -> Partition:
        """The partition of a key bucket: the one with the fewest buckets, then for good."""
        known = self._buckets[bucket]
        if known is not None:
            return known
        with self.lock:
            partition = self._buckets[bucket]
            if partition is None:
                missing = len(self.partitions) - len(self._buckets_of)
                self._buckets_of.extend([0] * missing)
                index = placement.least(self._buckets_of)
                self._buckets_of[index] += 1
                partition = self._buckets[bucket] = self.partitions[index]
            return partition

    def depth(self) -> int:
        """Items in all partitions."""
        return sum([partition.used for partition in self.partitions])

    def owners(self) -> tuple[int, ...]:
        """The task of each partition."""
        return tuple(partition.owner.index for partition in self.partitions)

    def ask_to_move(self, plan: Sequence[int]) -> set[DrainTask]:
        """Note who should own what, under ``lock``; the tasks that have something to give up."""
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
        """Give what ``task`` was asked to give up to its new owners; what it owns from now on.

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
            partition.wake_all()  # a handler that waits there may now wait for itself
        return version, owned

    def close(self) -> None:
        """Let no item and no handler in any more; calling it again does no harm."""
        with self.lock:
            self.closed = True
            for partition in self.partitions:
                partition.next_owner = None
                partition.close()

    def after_fork_in_child(self) -> None:
        """Empty partitions, free locks; handlers and places stay as they were."""
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
        partition = Partition(len(self.partitions), self.config.buffer_size, owner)
        if self.direct is not None:
            partition.add_lane(None, self.direct)
        self.partitions.append(partition)

    def _grow(self, weight: float) -> None:
        threads = len(self.tasks)
        wanted = self.config.partitions.resolve(threads, weight)
        while len(self.partitions) < wanted:
            self._add_partition(self.tasks[placement.owner_for_new(self.owners(), threads)])

    def _home_of(self, cls: type, weight: float) -> Partition:
        """The partition of a newly registered class; its owner also tells the handler of idleness.

        Where the selector decides, a class has no partition of its own, and any will do.
        """
        if not self._by_type:
            return self.partitions[len(self._weights) % len(self.partitions)]
        lane = self.lanes.get(cls)
        if lane is None:
            index = placement.least([partition.weight for partition in self.partitions])
            lane = self.lanes[cls] = self.partitions[index].add_lane(cls, None)
        lane.partition.weight += weight
        return lane.partition

    def _lane_in(self, partition: Partition, cls: type) -> Lane:
        if self.direct is not None:
            lane = partition.lanes[0]
        else:
            known = [lane for lane in partition.lanes if lane.cls is cls]
            if known:
                lane = known[0]
            else:
                lane = partition.add_lane(cls, self._receiver_of(cls))
                self.version += 1  # tasks look at a list of lanes of their own
        partition.routes[cls] = lane.route
        return lane

    def _lanes_of(self, cls: type) -> list[Lane]:
        if self._by_type:
            return [self.lanes[cls]] if cls in self.lanes else []
        return [lane for part in self.partitions for lane in part.lanes if lane.cls is cls]

    def _receiver_of(self, cls: type) -> Receiver | None:
        for receiver in self._receivers.values():
            if cls in receiver.classes:
                return receiver
        return None
