"""What a pipeline can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchmill.errors import ConfigError
from batchmill.spark.spans.thresholds import SlowThresholds

MEBIBYTE = 2**20
_LONGEST_TRIGGER_S = 86_400.0
_LONGEST_DEDUP_S = 7 * 86_400.0
TRIGGER = "seconds, from 0 up to a day, or Spark's notation for a time, such as '10 seconds'"
"""What a trigger may be, for errors."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """The settings of a pipeline beyond where its parts are. They check themselves."""

    apdex_ms: Mapping[str, int] = field(default_factory=dict)
    """The apdex threshold T by service name; 500 ms where a service is not named."""
    max_batch_bytes: int = 128 * MEBIBYTE
    """How much one micro-batch reads at most; what it takes in memory grows with it. A single
    larger segment is a batch of its own."""
    max_batch_files: int | None = None
    """How many segments one micro-batch reads at most; if set, it replaces the limit in bytes."""
    max_batch_messages: int = 200_000
    """How many messages of a Kafka topic one micro-batch reads at most; each holds the spans of one
    trace that came in one request."""
    skip_lost: bool = False
    """Go on when a Kafka topic no longer has messages that were not read yet."""
    small_batch_rows: int = 200_000
    """Up to so many rows planning a batch takes longer than running it: then event types are
    aggregated together, and plans do not adapt to what they find."""
    max_ahead_s: float = 3600.0
    """How far ahead of the clock an event may start; further ahead it is set aside."""
    late_after_minutes: int = 5
    """A row this many minutes behind the newest one of earlier batches is counted as late."""
    span_wait_s: float = 300.0
    """How long a span waits for its parent or child to arrive."""
    slow_database_ms: str = "default:200,mongodb:100"
    """Above how many milliseconds a database statement is slow, by system."""
    slow_cache_ms: str = "default:20,redis:10"
    """Above how many milliseconds a cache command is slow, by system."""
    top_n: int = 50
    """How many of the slowest are kept for each entity and bucket."""
    ttl_days: int = 7
    """How many days before the newest event a bucket is kept."""

    def __post_init__(self) -> None:
        _whole("max_batch_bytes", self.max_batch_bytes, 1)
        if self.max_batch_files is not None:
            _whole("max_batch_files", self.max_batch_files, 1)
        _whole("max_batch_messages", self.max_batch_messages, 1)
        _whole("small_batch_rows", self.small_batch_rows, 0)
        _at_least("max_ahead_s", self.max_ahead_s, 0)
        _whole("late_after_minutes", self.late_after_minutes, 0)
        _at_least("span_wait_s", self.span_wait_s, 0)
        _whole("top_n", self.top_n, 1)
        _whole("ttl_days", self.ttl_days, 1)
        for name, ms in self.apdex_ms.items():
            _whole(f"apdex_ms[{name!r}]", ms, 1)
        SlowThresholds.parse(self.slow_database_ms)
        SlowThresholds.parse(self.slow_cache_ms)


def dedup_window(seconds: float | None) -> float | None:
    """For how long a span that is delivered again is recognised, if that is one; None: not."""
    # `not <=` also refuses nan.
    if seconds is not None and (isinstance(seconds, bool) or not 1 <= seconds <= _LONGEST_DEDUP_S):
        raise ConfigError("dedup_s", seconds, "seconds, from 1 up to a week; or None")
    return seconds


def every(trigger: float | str) -> str:
    """How often a stream looks for segments, in Spark's notation; seconds, or that notation."""
    if isinstance(trigger, str):
        return trigger
    # `not <=` also refuses nan.
    if isinstance(trigger, bool) or not 0 <= trigger <= _LONGEST_TRIGGER_S:
        raise ConfigError("trigger", trigger, TRIGGER)
    return f"{round(trigger * 1000)} milliseconds"


def _whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(name, value, f"a whole number, {least} or more")


def _at_least(name: str, value: float, least: float) -> None:
    # `not >=` also refuses nan.
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise ConfigError(name, value, f"a number, {least} or more")
