"""The settings of a dispatcher: frozen, keyword-only, checked when made."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from batchmill.callables import check_plain
from batchmill.cores import available_cores
from batchmill.errors import ConfigError
from batchmill.flows.assignment import Assignment, LeastLoaded

if TYPE_CHECKING:
    # Of every type checker's own; where nothing tells T, it is Any, and no annotation is needed.
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")

FlowIdOf: TypeAlias = Callable[[Any], Hashable | None]
IsFinished: TypeAlias = Callable[[Any], object]

MOST_WORKERS = 8
"""The default never starts more workers than this, however many cores there are."""


class Backpressure(enum.Enum):
    """What ``dispatch`` does when there is no room for its signal."""

    BLOCK = "block"
    """``dispatch`` waits for room: nothing is dropped, and flows of other workers go on."""

    DROP_OLDEST = "drop_oldest"
    """The oldest queued signal makes room for the new one; finish signals go last."""

    DROP_NEWEST = "drop_newest"
    """``dispatch`` returns False at once and the new signal is dropped."""


def default_worker_count() -> int:
    """One worker for each core that this process may use, eight at most."""
    return min(available_cores(), MOST_WORKERS)


class FlowHandler(Protocol[T]):
    """A handler as an object; a callable that takes a batch will do too."""

    def consume(self, batch: list[T], /) -> object:
        """Handle ``batch``; an exception marks all of it failed. The list is yours to keep."""


class FlowErrorHandler(Protocol[T]):
    """An error handler as an object; a callable ``(batch, error)`` will do too."""

    def on_error(self, batch: list[T], error: BaseException, /) -> object:
        """The handler has raised ``error`` on ``batch``."""


Handler: TypeAlias = FlowHandler[T] | Callable[[list[T]], object]
ErrorHandler: TypeAlias = FlowErrorHandler[T] | Callable[[list[T], BaseException], object]


def method_or_self(field: str, value: Any, method: str, signature: str) -> Callable[..., object]:
    """The method of that name if the object has it, else the object itself, which is callable."""
    calls: tuple[object, ...] = (getattr(value, method, None), value)
    for call in calls:
        if callable(call):
            check_plain(field, call)
            return call
    allowed = f"a callable {signature}, or an object with a method {method}{signature}"
    raise ConfigError(field, value, allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowSettings:
    """The settings of a :class:`FlowDispatcher`.

    >>> FlowSettings(worker_count=4).worker_queue_capacity
    8192
    """

    worker_count: int = field(default_factory=default_worker_count)
    """Worker threads, each with a queue of its own; by default one per core, eight at most.

    Cores are counted by the process's affinity and by the CPU quota of its container.
    """

    ingress_capacity: int = 65_536
    """Signals that the ingress buffer holds, which all workers share; 0: no buffer.

    A signal whose worker's queue is full waits there, and moves up in its turn. Backpressure begins
    when the buffer is full too.
    """

    worker_queue_capacity: int = 8_192
    """Signals queued at most for one worker."""

    batch_max: int = 128
    """Signals in one handler call at most."""

    backpressure: Backpressure = Backpressure.BLOCK
    """What happens to a signal for which there is no room."""

    assignment: Assignment = field(default_factory=LeastLoaded)
    """The rule that chooses the worker of a new flow."""

    flow_id: FlowIdOf = field(default_factory=lambda: operator.attrgetter("flow_id"))
    """The flow of a signal, hashable; by default its attribute ``flow_id``.

    None: the signal belongs to no flow, goes to the workers in turn and has no order.
    """

    finished: IsFinished | None = None
    """Whether a signal is the last one of its flow; without it only ``complete()`` ends a flow."""

    idle_ttl: float | None = 300.0
    """Seconds after which a flow with nothing pending is forgotten; None: never."""

    max_flows: int | None = 100_000
    """Flows known at most at a time; None: no bound."""

    close_timeout: float = 30.0
    """Seconds that ``close()`` drains for by default; also at interpreter exit."""

    def __post_init__(self) -> None:
        _check_count("worker_count", self.worker_count)
        _check_count("ingress_capacity", self.ingress_capacity, least=0)
        _check_count("worker_queue_capacity", self.worker_queue_capacity)
        _check_count("batch_max", self.batch_max)
        if not isinstance(self.backpressure, Backpressure):
            raise ConfigError("backpressure", self.backpressure, "a Backpressure")
        if not callable(getattr(self.assignment, "pick", None)):
            raise ConfigError(
                "assignment", self.assignment, "an object with a method pick(workers)"
            )
        if not callable(self.flow_id):
            raise ConfigError("flow_id", self.flow_id, "a callable signal -> hashable or None")
        if self.finished is not None and not callable(self.finished):
            raise ConfigError("finished", self.finished, "a callable signal -> bool, or None")
        if self.idle_ttl is not None:
            _check_seconds("idle_ttl", self.idle_ttl, " above 0, or None")
        if self.max_flows is not None:
            _check_count("max_flows", self.max_flows, ", or None")
        _check_seconds("close_timeout", self.close_timeout, " above 0")


def _check_count(name: str, value: object, otherwise: str = "", *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(name, value, f"a whole number of at least {least}{otherwise}")


def _check_seconds(name: str, value: object, bound: str) -> None:
    allowed = f"a finite number of seconds{bound}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(name, value, allowed)
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(name, value, allowed)
