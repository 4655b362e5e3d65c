"""What every input of a stream offers, whether a spool or a Kafka topic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from batchmill.spark.input.books import Plan
from batchmill.spark.input.choice import Pace


@dataclass(frozen=True)
class Unread:
    """Input that is not committed yet."""

    segments: int = 0
    """Segments of a spool, or messages of a topic."""
    bytes: int = 0
    """The size of the segments; 0 for a topic, whose size is not known."""
    oldest_s: float = 0.0
    """The age of the oldest of them; 0 if there is none."""
    rows: int = 0
    """How many rows the segments have, about; for a topic, messages."""
    new_s: float = 0.0
    """The age of the oldest of them that was written after all that is committed: so old is what
    readers see. 0 if there is none."""


@dataclass(frozen=True)
class Choice:
    """The input that a batch is to have; see :class:`batchmill.spark.input.books.Plan`."""

    amount: int
    """How much it is, in what the pace of batches is measured in."""
    segments: tuple[str, ...] = ()
    topic: str = ""
    offsets: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    backlog: int = 0
    """How many rows or messages of it are of a backlog: more waits than it may take."""
    settled: float | None = None
    """Older input waits while newer was read: all that was written before this time was read, in
    seconds since 1970. None: it is read in order."""


class Input(Protocol):
    """Where the segments of a stream come from; the books say what was read of it."""

    @property
    def name(self) -> str:
        """Where the events come from, for messages."""
        ...

    @property
    def poll_s(self) -> float:
        """How often to look for unread input while no batch comes, in seconds."""
        ...

    def check(self) -> None:
        """Raise an error if it cannot be read now."""
        ...

    def look(self, *, patient: bool) -> None:
        """Find out what waits to be read. With ``patient``, nothing does if it cannot be reached
        now; and what is new may be chosen before what is old."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether something was found that is not chosen yet."""
        ...

    def choose(self, pace: Pace) -> Choice | None:
        """The input of the next batch; None if nothing waits."""
        ...

    def halve(self, plan: Plan) -> tuple[Plan, int] | None:
        """A plan for about half of the input, and how many rows or messages that is.

        The rest waits again. None if it cannot be divided.
        """
        ...

    def segments(self, plan: Plan) -> Sequence[str]:
        """The segments of a batch, as Spark names them; the same ones whenever it is repeated."""
        ...

    def unread(self, last: int | None, now: float) -> Unread:
        """What is still to be read when ``last`` is the last batch in the store."""
        ...

    def remove_read(self) -> None:
        """Remove what only batches that are done needed, if this input is to be cleaned up.

        Called by several threads. Raises OSError if something could not be removed yet.
        """
        ...
