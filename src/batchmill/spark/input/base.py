"""What every input of a stream offers, whether a spool or a Kafka topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession

from batchmill.spark.settings import PipelineSettings


@dataclass(frozen=True)
class Unread:
    """Input that is not committed yet."""

    segments: int = 0
    """Segments of a spool, or messages of a topic."""
    bytes: int = 0
    """The size of the segments; 0 for a topic, whose size is not known."""
    oldest_s: float = 0.0
    """The age of the oldest of them; 0 if there is none."""


class Input(Protocol):
    """A source of segments that Spark reads as a stream; Spark logs what belongs to which batch."""

    @property
    def name(self) -> str:
        """Where the events come from, for messages."""
        ...

    @property
    def poll_s(self) -> float:
        """How often to look for unread input while no batch comes, in seconds."""
        ...

    def stream(self, spark: SparkSession, settings: PipelineSettings) -> DataFrame:
        """The frame that the streaming query reads."""
        ...

    def segments(self, batch: DataFrame, number: int) -> Sequence[str]:
        """The segments of a batch, as Spark names them; the same ones whenever it is repeated."""
        ...

    def unread(self, last: int | None, now: float) -> Unread:
        """What is still to be read when ``last`` is the last batch in the store."""
        ...

    def remove_read(self, last: int | None) -> None:
        """Remove what only the batches up to ``last`` needed, if this input is to be cleaned up.

        Called by several threads. Raises OSError if something could not be removed yet.
        """
        ...

    def explain(self, failure: BaseException) -> str | None:
        """A message for the operator where Spark's own is unclear; None if there is none."""
        ...
