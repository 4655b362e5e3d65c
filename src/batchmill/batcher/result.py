"""The result of an item, what a backend returns, and the errors of a batcher."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from batchmill.errors import BatchmillError
from batchmill.pressure import ThresholdLevel
from batchmill.wording import count_of

if TYPE_CHECKING:
    # Of every type checker's own; where nothing tells them, they are Any.
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
    R = TypeVar("R", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")
    R = TypeVar("R")


class Outcome(enum.Enum):
    """The three ways an item can end."""

    SUCCESS = "success"
    FAILURE = "failure"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class ItemResult(Generic[T, R]):
    """The result of one submitted item; it has the item whatever the outcome.

    ``T`` is the item's type, ``R`` that of the backend's result.
    """

    item: T
    """The item as it was submitted."""
    outcome: Outcome
    """Success, failure, or dropped under pressure."""
    value: R = None  # type: ignore[assignment]
    """What the backend returned for it, on success; else None."""
    error: BaseException | None = None
    """What went wrong, on failure."""
    level: ThresholdLevel | None = None
    """The threshold level that dropped it."""

    @property
    def is_success(self) -> bool:
        """Whether the backend took it."""
        return self.outcome is Outcome.SUCCESS

    @property
    def is_failure(self) -> bool:
        """Whether it failed, was rejected, or ran out of time."""
        return self.outcome is Outcome.FAILURE

    @property
    def is_dropped(self) -> bool:
        """Whether a threshold dropped it: not a success, and not an error."""
        return self.outcome is Outcome.DROPPED

    if not TYPE_CHECKING:  # Python 3.11 knows no defaults: ItemResult[str] is ItemResult[str, Any]

        def __class_getitem__(cls, types):
            types = types if isinstance(types, tuple) else (types, Any)
            return super(ItemResult, cls).__class_getitem__(types)

    def unwrap(self) -> R:
        """The backend's value; raises the error of a failure, and DroppedError if dropped."""
        if self.outcome is Outcome.SUCCESS:
            return self.value
        if self.error is not None:
            raise self.error
        raise DroppedError(self.level)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a backend returns for a batch: one result per item, in the order of the items.

    A result that is an exception instance marks that one item failed.
    """

    results: Sequence[Any]


class DroppedError(BatchmillError, RuntimeError):
    """The result of a dropped item was unwrapped."""

    level: ThresholdLevel | None

    def __str__(self) -> str:
        where = self.level.name if self.level is not None else "a threshold"
        return f"the item was dropped at {where}: look at is_dropped before unwrap()"


class BackendContractError(BatchmillError, TypeError):
    """A backend returned something that does not match the batch."""

    expected: int
    """Items in the batch."""
    answer: str
    """What the backend returned instead."""

    def __str__(self) -> str:
        return (
            f"the backend was given {count_of(self.expected, 'item')} and returned {self.answer}: "
            "it must return one result per item, in order"
        )


class BatcherClosedError(BatchmillError, RuntimeError):
    """The batcher is closed; the item was not passed to the backend."""

    what: str = "it accepts no more items"
    template = "the batcher is closed: {what}"


class DeadlineExceededError(BatchmillError, TimeoutError):
    """An item's deadline passed before it reached the backend."""

    waited_s: float
    template = "the item waited {waited_s:.3f} s, past its deadline, and was not sent"


class CircuitOpenError(BatchmillError, ConnectionError):
    """The circuit breaker is open; ``retry_after`` is in seconds."""

    retry_after: float
    template = (
        "the circuit breaker is open after repeated backend failures: "
        "the next trial is in {retry_after:.3g} s"
    )
