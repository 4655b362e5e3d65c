"""The settings of a queue, and the types that they take.

All are frozen and check themselves: a :class:`ConfigError` names the field, its value and what is
allowed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, runtime_checkable

from batchmill.callables import check_plain
from batchmill.cores import available_cores
from batchmill.errors import ConfigError
from batchmill.queue.strategies import Balancer, PartitionSelector, Selector

if TYPE_CHECKING:
    # Of every type checker's own; where nothing tells T, it is Any, and no annotation is needed.
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")

_YEAR_MS = 365 * 24 * 3600 * 1000


def check_count(field: str, value: object, least: int = 1) -> int:
    """``value`` as an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(field, value, f"a whole number of at least {least}")
    return value


def check_positive(field: str, value: object) -> float:
    """``value`` as a finite float above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(field, value, "a number above 0")
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(field, value, "a finite number above 0")
    return float(value)


def check_ms(field: str, value: object) -> float:
    """``value`` as a time in milliseconds, above zero and at most a year."""
    checked = check_positive(field, value)
    if checked > _YEAR_MS:
        raise ConfigError(field, value, f"at most a year, {_YEAR_MS:,} ms")
    return checked


@dataclass(frozen=True, slots=True)
class ThreadPolicy:
    """How many drain threads a queue or a shared scheduler gets; never fewer than one.

    Make one with :meth:`fixed`, :meth:`cpu_cores`, :meth:`cpu_cores_with_base` or
    :meth:`io_bound`.
    """

    kind: Literal["fixed", "cpu_cores", "io_bound"]
    base: int
    per_core: float

    def __post_init__(self) -> None:
        check_count("base", self.base, least=0 if self.kind == "cpu_cores" else 1)

    @staticmethod
    def fixed(count: int) -> ThreadPolicy:
        """Exactly ``count`` threads, whatever the machine."""
        return ThreadPolicy("fixed", check_count("count", count), 0.0)

    @staticmethod
    def cpu_cores(multiplier: float) -> ThreadPolicy:
        """``multiplier`` threads per core, rounded half up: 0.25 on 8 cores is 2."""
        return ThreadPolicy("cpu_cores", 0, check_positive("multiplier", multiplier))

    @staticmethod
    def cpu_cores_with_base(base: int, multiplier: float) -> ThreadPolicy:
        """``base`` threads and ``multiplier`` more per core: (1, 0.25) on 8 cores is 3."""
        check_count("base", base, least=0)
        return ThreadPolicy("cpu_cores", base, check_positive("multiplier", multiplier))

    @staticmethod
    def io_bound(count: int) -> ThreadPolicy:
        """Exactly ``count`` threads for handlers that mostly wait (sockets, disks, databases).

        The count is how many waits should overlap, so it has nothing to do with cores and may be
        far above them. It resolves like :meth:`fixed`; the name tells the reader why.
        """
        return ThreadPolicy("io_bound", check_count("count", count), 0.0)

    def resolve(self, cores: int | None = None) -> int:
        """The number of threads on ``cores`` cores, at least 1.

        By default the cores are those that this process may use: by its affinity, and by the CPU
        quota of its container.
        """
        if cores is None:
            cores = available_cores()
        return max(1, self.base + math.floor(self.per_core * cores + 0.5))

    def __str__(self) -> str:
        if self.kind != "cpu_cores":
            return f"{self.kind}({self.base})"
        if self.base:
            return f"cpu_cores_with_base({self.base}, {self.per_core:g})"
        return f"cpu_cores({self.per_core:g})"


@dataclass(frozen=True, slots=True)
class PartitionPolicy:
    """How many partitions a queue has.

    Make one with :meth:`fixed`, :meth:`thread_multiply` or :meth:`adaptive`.
    """

    kind: Literal["fixed", "thread_multiply", "adaptive"]
    count: int

    def __post_init__(self) -> None:
        check_count("count", self.count)

    @staticmethod
    def fixed(count: int) -> PartitionPolicy:
        """Exactly ``count`` partitions."""
        return PartitionPolicy("fixed", check_count("count", count))

    @staticmethod
    def thread_multiply(multiplier: int) -> PartitionPolicy:
        """``multiplier`` partitions for every drain thread."""
        return PartitionPolicy("thread_multiply", check_count("multiplier", multiplier))

    @staticmethod
    def adaptive(multiplier: int = 25) -> PartitionPolicy:
        """Grows as handlers register: one partition each up to ``multiplier`` per thread.

        Past that, one for two handlers, rounded half up. A handler counts by its weight.
        """
        return PartitionPolicy("adaptive", check_count("multiplier", multiplier))

    def resolve(self, threads: int, weighted_handlers: float = 0) -> int:
        """The number of partitions for ``threads`` threads and handlers of that total weight.

        >>> PartitionPolicy.adaptive().resolve(8, 500)
        350
        """
        if self.kind == "fixed":
            return self.count
        if self.kind == "thread_multiply":
            return self.count * threads
        # Weights are summed as floats: 100 handlers of 0.05 must count as 5, not as 5.0000001.
        handlers = round(weighted_handlers, 6)
        if handlers <= 0:
            return threads
        one_to_one = threads * self.count
        if handlers <= one_to_one:
            return math.ceil(handlers)
        return one_to_one + math.floor((handlers - one_to_one) / 2 + 0.5)

    def __str__(self) -> str:
        return f"{self.kind}({self.count})"


class BufferStrategy(enum.Enum):
    """What ``produce`` does when the partition is full."""

    BLOCKING = "blocking"
    """``produce`` waits for room: nothing is dropped."""

    IF_POSSIBLE = "if_possible"
    """``produce`` returns False and the item is dropped, counted under ``full``.

    It first waits up to a millisecond for a drain thread that was not scheduled yet; while the
    queue makes no progress it refuses at once.
    """


@runtime_checkable
class HandlerConsumer(Protocol[T]):
    """Takes batches of one class (or, as a queue's ``consumer``, of all classes).

    Calls to one handler never overlap within a queue, whichever threads make them, and that
    includes the optional methods below. (A direct ``consumer`` on several drain threads is the
    one exception: it runs concurrently unless the queue was made with ``serialize=True``.)

    * ``on_idle(self)``: called each time the drain thread finds nothing to do, with the queue's
      back-off between calls. The place to pass on what was merged.
    * ``on_shutdown(self)``: called once, after the last batch. Without it the handler gets one
      last ``on_idle``.
    """

    def consume(self, batch: list[T], /) -> object:
        """Handle ``batch``; an exception marks all of it failed. The list is yours to keep."""


Handler: TypeAlias = HandlerConsumer[T] | Callable[[list[T]], object]


class QueueErrorHandler(Protocol):
    """An error handler that is an object."""

    def on_error(self, batch: list[Any], error: BaseException, /) -> object:
        """A handler raised ``error`` on ``batch``, which is empty for ``on_idle``."""


ErrorHandler: TypeAlias = Callable[[list[Any], BaseException], object] | QueueErrorHandler


class Verdict(Protocol):
    """A guard's decision about one item."""

    @property
    def accepted(self) -> bool:
        """Whether the item may be put."""

    @property
    def retry_after_s(self) -> float | None:
        """If not accepted: after how long to ask again, or None for never."""

    @property
    def reason(self) -> str:
        """If never: the reason under which the drop is counted."""


class Guard(Protocol):
    """Accepts or rejects items by the depth of the queue."""

    @property
    def free_below(self) -> int:
        """Depths below this one need no decision."""

    def judge(self, item: Any, depth: int, attempt: int) -> Verdict:
        """The decision about ``item``, made for the ``attempt``-th time."""

    def holds(self, verdict: Any, depth: int) -> bool:
        """Whether an acceptance is still valid at ``depth``."""

    def observe(self, depth: int) -> None:
        """Record the present depth."""

    def add_listener(self, listener: Any) -> None:
        """Have a listener called with every event from now on."""

    def remove_listener(self, listener: Any) -> bool:
        """Call a listener no more; False when it is not there."""

    def close(self) -> None:
        """The queue has drained."""


class GuardFactory(Protocol):
    """What ``BatchQueueSettings.thresholds`` takes."""

    def guard(self, name: str) -> Guard:
        """A guard for the queue of that name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchQueueSettings(Generic[T]):
    """The settings of a :class:`BatchQueue`; ``T`` is what its ``consumer`` takes.

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

    consumer: Handler[T] | None = None
    """Takes every batch, whatever the classes in it; excludes ``add_handler``."""

    serialize: bool = False
    """Whether calls of ``consumer`` on several drain threads are kept apart."""

    error_handler: ErrorHandler | None = None
    """Called with batch and error when a handler raises; without it the error is logged.

    A callable, or an object with ``on_error(batch, error)``.
    """

    max_batch: int = 2_000
    """Items in one handler call at most; the rest waits until the other classes had their turn."""

    linger_ms: float = 0
    """How long items may wait for others, so that handlers get fuller batches; 0: not at all.

    Counted from when the drain thread sees the first of them. A batch of ``max_batch`` items, a
    full partition, ``flush`` and ``shutdown`` do not wait.
    """

    min_idle_ms: float = 1
    """First wait of an idle drain thread that has ``on_idle`` handlers to call.

    Producers wake a drain thread, so no item waits for this; it is how soon a handler that merges
    is called again after its last items.
    """

    max_idle_ms: float = 50
    """Longest such wait; each idle cycle doubles it up to here.

    A handler that flushes by a period, such as 500 ms, does so at most this much late. A queue
    without ``on_idle`` handlers does not wake at all.
    """

    balancer: Balancer | None = None
    """Moves partitions between drain threads as load shifts; ignored with a single thread."""

    rebalance_interval_ms: float = 10_000
    """How often the balancer is asked while there is traffic."""

    shutdown_timeout_ms: float = 30_000
    """How long ``shutdown()`` waits for the final drain."""

    thresholds: GuardFactory | None = None
    """Pressure handling by total depth: a ``batchmill.pressure.QueueThresholdSettings``."""

    def __post_init__(self) -> None:
        check_count("buffer_size", self.buffer_size)
        check_count("max_batch", self.max_batch)
        if self.linger_ms != 0:
            check_ms("linger_ms", self.linger_ms)
        for name in ("min_idle_ms", "max_idle_ms", "rebalance_interval_ms", "shutdown_timeout_ms"):
            check_ms(name, getattr(self, name))
        one_of_two = "given, or else shared_scheduler: exactly one of the two"
        pair = "a pair of a non-empty name and a ThreadPolicy"
        at_least = f"at least min_idle_ms, {self.min_idle_ms:g}"
        consumes = callable(self.consumer) or _none_or_has(self.consumer, "consume")
        reports = callable(self.error_handler) or _none_or_has(self.error_handler, "on_error")
        for name, valid, allowed in (
            ("threads", (self.threads is None) != (self.shared_scheduler is None), one_of_two),
            ("threads", isinstance(self.threads, ThreadPolicy | None), "a ThreadPolicy"),
            ("shared_scheduler", _none_or_scheduler(self.shared_scheduler), pair),
            ("partitions", isinstance(self.partitions, PartitionPolicy), "a PartitionPolicy"),
            ("selector", callable(self.selector), "a callable (item, count) -> int"),
            ("strategy", isinstance(self.strategy, BufferStrategy), "a BufferStrategy"),
            ("consumer", consumes, "a callable, or an object with consume(batch)"),
            ("serialize", isinstance(self.serialize, bool), "True or False"),
            ("error_handler", reports, "a callable (batch, error), or has on_error(batch, error)"),
            ("max_idle_ms", self.max_idle_ms >= self.min_idle_ms, at_least),
            ("balancer", _none_or_has(self.balancer, "assign"), "a DrainBalancer"),
            ("thresholds", _none_or_has(self.thresholds, "guard"), "a QueueThresholdSettings"),
        ):
            if not valid:
                raise ConfigError(name, getattr(self, name), allowed)
        for name, method in (("consumer", "consume"), ("error_handler", "on_error")):
            value = getattr(self, name)
            check_plain(name, getattr(value, method, value))


def _none_or_has(value: object, method: str = "__call__") -> bool:
    return value is None or callable(getattr(value, method, None))


def _none_or_scheduler(value: object) -> bool:
    match value:
        case None:
            return True
        case (str(name), ThreadPolicy()):
            return isinstance(value, tuple) and name != ""
    return False
