"""Settings of a pipeline."""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchmill.aggregate import AggregationSettings
from batchmill.errors import ConfigError, check_int, check_number

MEBIBYTE = 2**20
_LONGEST_TRIGGER_S = 86_400.0
_LONGEST_DEDUP_S = 7 * 86_400.0
_UNITS = {"millisecond": 0.001, "ms": 0.001, "second": 1, "minute": 60, "hour": 3600, "day": 86_400}
_TIME = re.compile(
    r"\s*(?:interval\s+)?(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|millisecond|second|minute|hour|day)s?\s*"
)
TRIGGER = "seconds, from 0 up to a day, or a time such as '10 seconds' or '1 minute'"
"""The allowed values of a trigger, for error messages."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(AggregationSettings):
    """The settings of a pipeline, apart from the places that it reads and writes."""

    max_batch_bytes: int = 128 * MEBIBYTE
    """The most bytes that one micro-batch reads. A single larger segment is a batch of its own."""
    max_batch_files: int | None = None
    """The most segments that one micro-batch reads; if set, it replaces the limit in bytes and
    ``target_batch_s``."""
    max_batch_rows: int | None = None
    """The most rows that one micro-batch reads, spans for example; None: as many as fit into the
    memory of Spark's JVM, see ``batchmill.spark.runtime.session.rows_for``."""
    max_batch_messages: int = 200_000
    """The most messages of a Kafka topic that one micro-batch reads; each holds the spans of one
    trace that came in one request."""
    target_batch_s: float = 10.0
    """How long a micro-batch is to take: how much one reads follows the pace of the last ones,
    within the limits. Beside a backlog it is half of that, and what is new comes first. Batches of
    a backfill take as much as they may."""
    max_quarantine_bytes: int = 1024 * MEBIBYTE
    """How much the quarantine keeps; beyond it the oldest is removed."""
    skip_lost: bool = False
    """Continue when a Kafka topic no longer has messages that were not read yet."""
    late_after_minutes: int = 5
    """A row is counted as late if it is this many minutes behind the newest row of earlier
    batches."""
    span_wait_s: float = 300.0
    """How long a span waits for its parent or child to arrive."""
    ttl_days: int = 7
    """How many days before the newest event a bucket is kept, as far as the clock confirms it."""
    max_new_entities: int = 5_000
    """How many new entities of an event type a minute may bring, by the clock of the pipeline; what
    is over it is counted under entities named ``overflow``. 0: no limit."""
    max_entities: int = 1_000_000
    """How many entities of a kind (services, endpoints, calls between services, …) the store may
    have; new ones beyond it are counted under ``overflow``, too. 0: no limit."""
    normalise_names: bool = True
    """Whether ids in names of spans that look like URLs are replaced by ``{id}``, unless the span
    has ``http.route``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("max_batch_bytes", self.max_batch_bytes, 1)
        if self.max_batch_files is not None:
            check_int("max_batch_files", self.max_batch_files, 1)
        if self.max_batch_rows is not None:
            check_int("max_batch_rows", self.max_batch_rows, 1)
        check_int("max_batch_messages", self.max_batch_messages, 1)
        check_int("max_quarantine_bytes", self.max_quarantine_bytes, 0)
        check_number("target_batch_s", self.target_batch_s, 0)
        check_int("late_after_minutes", self.late_after_minutes, 0)
        check_number("span_wait_s", self.span_wait_s, 0)
        check_int("ttl_days", self.ttl_days, 1)
        check_int("max_new_entities", self.max_new_entities, 0)
        check_int("max_entities", self.max_entities, 0)


def check_dedup_s(seconds: float | None) -> float | None:
    """Return the dedup window if it is valid; None switches deduplication off."""
    # `not <=` also refuses nan.
    if seconds is not None and (isinstance(seconds, bool) or not 1 <= seconds <= _LONGEST_DEDUP_S):
        raise ConfigError("dedup_s", seconds, "seconds, from 1 up to a week; or None")
    return seconds


def check_name(name: str) -> str:
    """Return the name of a stream if it is valid."""
    if not name or not all(char.isalnum() or char in "-_" for char in name):
        raise ConfigError("name", name, "letters, digits, - and _")
    return name


def trigger_seconds(trigger: float | str) -> float:
    """A trigger in seconds; it may be given as a text with units."""
    seconds = _seconds(trigger) if isinstance(trigger, str) else trigger
    # `not <=` also refuses nan.
    if isinstance(seconds, bool) or seconds is None or not 0 <= seconds <= _LONGEST_TRIGGER_S:
        raise ConfigError("trigger", trigger, TRIGGER)
    return float(seconds)


def _seconds(text: str) -> float | None:
    """The seconds of a text such as ``"1 minute 30 seconds"``; None if it is none."""
    parts = list(_TIME.finditer(text.lower()))
    if not parts or "".join(part[0] for part in parts) != text.lower():
        return None
    return sum(float(part["number"]) * _UNITS[part["unit"]] for part in parts)
