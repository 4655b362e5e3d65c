"""The expected results, and the check of every contender against them after its timed run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from batchmill.sources import Grain
from batchmill.store import open_store

Key: TypeAlias = tuple[str, int, str]
"""Grain, bucket (minutes, hours or days since 1970), endpoint."""
States: TypeAlias = tuple[int, int, int, int, int, int, Mapping[int, int]]
"""Count, sum, maximum, successful, satisfied, tolerated, and the counts by latency bucket."""
Results: TypeAlias = dict[Key, States]

EVERY_MINUTES = 10
"""All hours and days are compared, and of the minutes one in so many."""
MINUTES_OF = {"minute": 1, "hour": 60, "day": 1440}
_FORMATS = {"minute": "%Y%m%d%H%M", "hour": "%Y%m%d%H", "day": "%Y%m%d"}


class Disagreement(Exception):
    """Two contestants came to different results: their times mean nothing."""


def compare(name: str, actual: Results, expected: Results) -> int:
    """How many values were compared; raises Disagreement at the first that differs."""
    if actual.keys() != expected.keys():
        odd = sorted(actual.keys() ^ expected.keys())
        raise Disagreement(f"{name}: {len(odd)} missing or unexpected rows, such as {odd[0]}")
    for key, states in expected.items():
        if actual[key] != states:
            raise Disagreement(f"{name}: {key} is {actual[key]} where {states} is expected")
    return len(expected)


def is_compared(grain: str, bucket: int) -> bool:
    """Whether rows of this bucket are looked at."""
    return grain != "minute" or bucket % EVERY_MINUTES == 0


def from_rows(grain: str, rows: Iterable[Sequence[Any]]) -> Iterator[tuple[Key, States]]:
    """Rows of bucket, endpoint, six numbers and a tally, as results."""
    for bucket, name, *numbers, tally in rows:
        if is_compared(grain, bucket):
            yield (grain, bucket, name), (*map(int, numbers), tally_of(tally))  # type: ignore[misc]


def tally_of(tally: str | Iterable[Any]) -> dict[int, int]:
    """Counts by bucket, from ``12:3,14`` or a list of pairs; what is double is added up."""
    counts: dict[int, int] = {}
    for entry in tally.split(",") if isinstance(tally, str) else tally:
        if isinstance(entry, str):
            bucket, _, count = entry.partition(":")
        else:
            bucket, count = entry["b"], entry["n"]
        counts[int(bucket)] = counts.get(int(bucket), 0) + int(count or 1)
    return counts


def stored_by_ours(file: Path) -> Results:
    """What the pipeline's store holds, by its own way of reading."""
    results: Results = {}
    with open_store(f"sqlite:///{file}", create=False) as store:
        for grain in Grain:
            read = {
                metric: {
                    (row.bucket, row.entity_name): row.states
                    for bucket in _buckets(grain)
                    for row in store.states(metric, grain=grain, start=bucket, end=bucket)
                }
                for metric in ("resp_time", "max", "sla", "apdex", "percentile", "cpm")
                for metric in (f"endpoint_{metric}",)
            }
            for (bucket, name), (total, n) in read["endpoint_resp_time"].items():
                at = (bucket, name)
                ok, all_of_sla = read["endpoint_sla"][at]
                satisfied, tolerated, all_of_apdex = read["endpoint_apdex"][at]
                assert {n} == {all_of_sla, all_of_apdex, *read["endpoint_cpm"][at]}
                (greatest,), (tally,) = read["endpoint_max"][at], read["endpoint_percentile"][at]
                states = (n, total, greatest, ok, satisfied, tolerated, dict(tally))
                results[grain.value, _since_1970(grain, bucket), name] = states
    return results


def _buckets(grain: Grain) -> list[int | None]:
    """The buckets to ask the store for; None stands for all."""
    if grain is not Grain.MINUTE:
        return [None]
    from benchmarks.pipeline.data import MINUTES, START

    first = int(START.timestamp()) // 60
    return [
        grain.bucket(datetime.fromtimestamp(minute * 60, UTC))
        for minute in range(first, first + MINUTES)
        if is_compared("minute", minute)
    ]


def _since_1970(grain: Grain, bucket: int) -> int:
    start = datetime.strptime(str(bucket), _FORMATS[grain.value]).replace(tzinfo=UTC)
    return int(start.timestamp()) // 60 // MINUTES_OF[grain.value]
