"""Settings of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from batchmill.aggregate import AggregationSettings
from batchmill.errors import ConfigError, check_int, check_number

MEBIBYTE = 2**20
_LONGEST_TRIGGER_S = 86_400.0
_LONGEST_DEDUP_S = 7 * 86_400.0
TRIGGER = "seconds, from 0 up to a day, or Spark's notation for a time, such as '10 seconds'"
"""The allowed values of a trigger, for error messages."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(AggregationSettings):
    """The settings of a pipeline, apart from the places that it reads and writes."""

    max_batch_bytes: int = 128 * MEBIBYTE
    """The most bytes that one micro-batch reads; its memory grows with it. A single larger segment
    is a batch of its own."""
    max_batch_files: int | None = None
    """The most segments that one micro-batch reads; if set, it replaces the limit in bytes."""
    max_batch_messages: int = 200_000
    """The most messages of a Kafka topic that one micro-batch reads; each holds the spans of one
    trace that came in one request."""
    skip_lost: bool = False
    """Continue when a Kafka topic no longer has messages that were not read yet."""
    late_after_minutes: int = 5
    """A row is counted as late if it is this many minutes behind the newest row of earlier
    batches."""
    span_wait_s: float = 300.0
    """How long a span waits for its parent or child to arrive."""
    ttl_days: int = 7
    """How many days before the newest event a bucket is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("max_batch_bytes", self.max_batch_bytes, 1)
        if self.max_batch_files is not None:
            check_int("max_batch_files", self.max_batch_files, 1)
        check_int("max_batch_messages", self.max_batch_messages, 1)
        check_int("late_after_minutes", self.late_after_minutes, 0)
        check_number("span_wait_s", self.span_wait_s, 0)
        check_int("ttl_days", self.ttl_days, 1)


def check_dedup_s(seconds: float | None) -> float | None:
    """Return the dedup window if it is valid; None switches deduplication off."""
    # `not <=` also refuses nan.
    if seconds is not None and (isinstance(seconds, bool) or not 1 <= seconds <= _LONGEST_DEDUP_S):
        raise ConfigError("dedup_s", seconds, "seconds, from 1 up to a week; or None")
    return seconds


def trigger_interval(trigger: float | str) -> str:
    """Convert a trigger, in seconds or in Spark's notation, to Spark's notation."""
    if isinstance(trigger, str):
        return trigger
    # `not <=` also refuses nan.
    if isinstance(trigger, bool) or not 0 <= trigger <= _LONGEST_TRIGGER_S:
        raise ConfigError("trigger", trigger, TRIGGER)
    return f"{round(trigger * 1000)} milliseconds"
