"""The settings of a queue: frozen, keyword-only, checked when made."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from batchmill.errors import ConfigError
from batchmill.queue.balancer import Balancer
from batchmill.queue.gate import GuardFactory
from batchmill.queue.handler import ErrorHandler, Handler
from batchmill.queue.policy import PartitionPolicy, ThreadPolicy, check_count, check_ms
from batchmill.queue.selector import PartitionSelector, Selector


class BufferStrategy(enum.Enum):
    """What a producer meets when the partition is full."""

    BLOCKING = "blocking"
    """``produce`` waits for room: nothing is dropped."""

    IF_POSSIBLE = "if_possible"
    """``produce`` answers False and the item is dropped, counted under ``full``.

    It first gives a drain thread that just had no turn up to a millisecond; while the queue makes
    no progress it refuses at once.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchQueueSettings:
    """The settings of a :class:`BatchQueue`.

    >>> BatchQueueSettings(threads=ThreadPolicy.fixed(1)).buffer_size
    10000
    """

    threads: ThreadPolicy | None = None
    """Drain threads of the queue's own. Exactly one of this and ``shared_scheduler`` is set."""

    shared_scheduler: tuple[str, ThreadPolicy] | None = None
    """Name and size of a scheduler shared with other queues of the same manager."""

    partitions: PartitionPolicy = field(default_factory=lambda: PartitionPolicy.fixed(1))
    """How many partitions; each is one bounded buffer drained by one thread at a time."""

    selector: Selector = field(default_factory=PartitionSelector.type_hash)
    """Which partition an item goes to."""

    buffer_size: int = 10_000
    """Items a partition holds at most."""

    strategy: BufferStrategy = BufferStrategy.BLOCKING
    """What happens to a producer when the partition is full."""

    consumer: Handler | None = None
    """Takes every batch, whatever the classes in it; excludes ``add_handler``."""

    serialize: bool = False
    """Whether calls of ``consumer`` on several drain threads are kept apart."""

    error_handler: ErrorHandler | None = None
    """Called with batch and error when a handler raises; without it the error is logged."""

    max_batch: int = 2_000
    """Items in one handler call at most; what remains waits until the others had their turn."""

    min_idle_ms: float = 1
    """First wait of an idle drain thread that has ``on_idle`` handlers to call."""

    max_idle_ms: float = 50
    """Longest such wait; each idle cycle doubles it up to here."""

    balancer: Balancer | None = None
    """Moves partitions between drain threads as load shifts; ignored with a single thread."""

    rebalance_interval_ms: float = 10_000
    """How often the balancer is asked while there is traffic."""

    shutdown_timeout_ms: float = 30_000
    """How long ``shutdown()`` waits for the final drain."""

    thresholds: GuardFactory | None = None
    """Pressure handling by total depth: a ``batchmill.pressure.QueueThresholdSettings``."""

    def __post_init__(self) -> None:
        if (self.threads is None) == (self.shared_scheduler is None):
            raise ConfigError(
                "threads", self.threads, "given, or else shared_scheduler: exactly one of the two"
            )
        if self.threads is not None and not isinstance(self.threads, ThreadPolicy):
            raise ConfigError("threads", self.threads, "a ThreadPolicy")
        if self.shared_scheduler is not None:
            _check_scheduler(self.shared_scheduler)
        if not isinstance(self.partitions, PartitionPolicy):
            raise ConfigError("partitions", self.partitions, "a PartitionPolicy")
        if not callable(self.selector):
            raise ConfigError("selector", self.selector, "a callable (item, count) -> int")
        check_count("buffer_size", self.buffer_size)
        if not isinstance(self.strategy, BufferStrategy):
            raise ConfigError("strategy", self.strategy, "a BufferStrategy")
        if self.error_handler is not None and not callable(self.error_handler):
            raise ConfigError("error_handler", self.error_handler, "a callable (batch, error)")
        if self.consumer is not None and not (
            callable(self.consumer) or callable(getattr(self.consumer, "consume", None))
        ):
            raise ConfigError(
                "consumer", self.consumer, "a callable, or an object with consume(batch)"
            )
        if not isinstance(self.serialize, bool):
            raise ConfigError("serialize", self.serialize, "True or False")
        check_count("max_batch", self.max_batch)
        check_ms("min_idle_ms", self.min_idle_ms)
        check_ms("max_idle_ms", self.max_idle_ms)
        if self.max_idle_ms < self.min_idle_ms:
            raise ConfigError(
                "max_idle_ms", self.max_idle_ms, f"at least min_idle_ms, {self.min_idle_ms:g}"
            )
        if self.balancer is not None and not callable(getattr(self.balancer, "assign", None)):
            raise ConfigError("balancer", self.balancer, "a DrainBalancer")
        check_ms("rebalance_interval_ms", self.rebalance_interval_ms)
        check_ms("shutdown_timeout_ms", self.shutdown_timeout_ms)
        if self.thresholds is not None and not callable(getattr(self.thresholds, "guard", None)):
            raise ConfigError("thresholds", self.thresholds, "a QueueThresholdSettings")


def _check_scheduler(value: object) -> None:
    allowed = "a pair of a non-empty name and a ThreadPolicy"
    if not isinstance(value, tuple) or len(value) != 2:
        raise ConfigError("shared_scheduler", value, allowed)
    name, policy = value
    if not isinstance(name, str) or not name or not isinstance(policy, ThreadPolicy):
        raise ConfigError("shared_scheduler", value, allowed)
