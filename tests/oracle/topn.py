"""The slowest statements of each entity and bucket, and how often and how long each of them ran."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from tests.oracle.catalog import GRAINS, Grain, Row, bucket_of, service_id
from tests.oracle.spans import (
    attributes_of,
    cache_operation,
    database_system,
    destination_of,
    is_cache,
    is_database_call,
    latency_ms,
    service_of,
    statement_of,
)

DATABASE_THRESHOLDS = "default:200,mongodb:100"
CACHE_THRESHOLDS = "default:20,redis:10"
STATEMENT_LIMIT = 2000

# stream, grain, bucket, entity id
TopNKey = tuple[str, Grain, int, str]


class Record(NamedTuple):
    entity: str
    statement: str
    latency: int
    trace_id: str
    time: datetime


class Runs(NamedTuple):
    """All executions, slow or not, of one normalised statement in its entity and bucket."""

    times: int
    total_ms: int


@dataclass(frozen=True)
class TopN:
    records: list[Record]
    runs: dict[str, Runs]


class _Run(NamedTuple):
    record: Record
    span_id: str
    slow: bool


def expected_topn(
    spans: Sequence[Row],
    database_thresholds: str = DATABASE_THRESHOLDS,
    cache_thresholds: str = CACHE_THRESHOLDS,
    n: int = 50,
) -> dict[TopNKey, TopN]:
    """The `n` slowest of every stream, grain, bucket and entity that has a slow one."""
    gathered: defaultdict[TopNKey, list[_Run]] = defaultdict(list)
    databases, caches = parse_thresholds(database_thresholds), parse_thresholds(cache_thresholds)
    for span in spans:
        limits = caches if is_cache(attributes_of(span)) else databases
        for stream, entity in _streams(span):
            system = database_system(attributes_of(span)) or ""
            slow = latency_ms(span) > limits.get(system, limits["default"])
            run = _Run(_record(span, entity), span["span_id"], slow)
            for grain in GRAINS:
                gathered[stream, grain, bucket_of(span["time"], grain), entity].append(run)
    return {
        key: _top(every, n) for key, every in gathered.items() if any(run.slow for run in every)
    }


def parse_thresholds(text: str) -> dict[str, int]:
    """`default:200,mongodb:100` as milliseconds by system."""
    pairs = (part.split(":") for part in text.split(","))
    return {system.strip(): int(limit) for system, limit in pairs}


def normalise(statement: str) -> str:
    """The statement without its literals, so that its executions can be told as one."""
    text = re.sub(r"'(?:[^']|'')*'", "?", statement)
    # Hexadecimal, decimal with fraction and exponent, and placeholders such as $1.
    number = r"0x[0-9a-f]+|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
    text = re.sub(rf"(?<!\w)\$?(?:{number})(?!\w)", "?", text, flags=re.ASCII | re.IGNORECASE)
    text = re.sub(r"\s+", " ", text, flags=re.ASCII).strip(" ")
    return re.sub(r"(?<!\w)(in) ?\( ?\?[?, ]*\)", r"\1 (?)", text, flags=re.ASCII | re.IGNORECASE)


def _streams(span: Row) -> Iterator[tuple[str, str]]:
    """The streams that a span may have a record in, each with the record's entity."""
    attributes = attributes_of(span)
    if not is_database_call(span):
        return
    virtual = service_id(destination_of(attributes), "VIRTUAL_DATABASE")
    if not is_cache(attributes):
        yield "top_n_database_statement", virtual
        yield "top_n_service_database_statement", service_id(service_of(span), "GENERAL")
    elif (operation := cache_operation(span)) != "Others":
        yield f"top_n_cache_{operation.lower()}_command", virtual


def _record(span: Row, entity: str) -> Record:
    statement = statement_of(span)[:STATEMENT_LIMIT]
    return Record(entity, statement, latency_ms(span), span["trace_id"], span["time"])


def _top(every: Sequence[_Run], n: int) -> TopN:
    ordered = sorted(
        (run for run in every if run.slow),
        key=lambda run: (-run.record.latency, run.record.time, run.record.trace_id, run.span_id),
    )
    kept = [run.record for run in ordered[:n]]
    runs = {normalise(record.statement): Runs(0, 0) for record in kept}
    for run in every:
        text = normalise(run.record.statement)
        if text in runs:
            times, total_ms = runs[text]
            runs[text] = Runs(times + 1, total_ms + run.record.latency)
    return TopN(kept, runs)
