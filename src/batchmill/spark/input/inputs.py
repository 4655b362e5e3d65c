"""Where a stream's events come from, and what is known of those that were not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession

from batchmill.spark.settings import PipelineSettings


@dataclass(frozen=True)
class Unread:
    """What no commit has yet."""

    segments: int = 0
    """Segments of a spool, or messages of a topic."""
    bytes: int = 0
    """The size of the segments; 0 for a topic, which does not tell."""
    oldest_s: float = 0.0
    """How long the oldest of them has been there; 0 if there is none."""


class Input(Protocol):
    """A source of segments that Spark reads as a stream, and keeps the books on."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def look_s(self) -> float:
        """How often what is unread is to be told while no batch comes."""
        ...

    def stream(self, spark: SparkSession, settings: PipelineSettings) -> DataFrame:
        """What the query reads."""
        ...

    def segments(self, batch: DataFrame, number: int) -> Sequence[str]:
        """The segments of a batch, as Spark names them; the same ones whenever it is repeated."""
        ...

    def unread(self, last: int | None, now: float) -> Unread:
        """What is left to be read when ``last`` is the last batch in the store."""
        ...

    def forget(self, last: int | None) -> None:
        """Remove what the batches up to ``last`` needed, if that is for this input to do.

        Called by several threads. Raises OSError if something could not be removed yet.
        """
        ...

    def explain(self, failure: BaseException) -> str | None:
        """What the operator is told of a failure that Spark's text does not make clear; or None."""
        ...
