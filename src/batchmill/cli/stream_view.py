"""What ``batchmill pipeline`` and ``batchmill backfill`` say, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchmill.errors import BatchmillError

if TYPE_CHECKING:
    from batchmill.spark import BatchReport

_LONGEST_ERROR = 300


def batch_line(report: BatchReport) -> str:
    """A batch in one line."""
    if not report.applied:
        return f"batch {report.number}: in the store already"
    stats, result = report.stats, report.result
    parts = [
        f"batch {report.number}: {stats.rows:,} rows from {stats.segments:,} segments, "
        f"{result.merged:,} deltas, {report.spark_s + report.store_s:.2f} s "
        f"(Spark {report.spark_s:.2f}, store {report.store_s:.2f})"
    ]
    for count, what in (
        (stats.late, "late"),
        (stats.duplicates, "spans delivered before"),
        (result.expired, "older than the TTL"),
        (sum(_unused([report]).values()), "rows that no metric reads"),
        (stats.quarantined_rows, "rows set aside"),
        (stats.quarantined_segments, "segments set aside"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    return "; ".join(parts)


def summary(reports: Sequence[BatchReport], total: int, before: int, quarantine: Path) -> str:
    """What came of a backfill of a folder with ``total`` segments, ``before`` of them in before."""
    if not total:
        return "nothing to add: the folder has no segments (*.parquet)"
    applied = [each for each in reports if each.applied]
    if not applied and before < total:
        return "nothing was added"
    if not applied:
        return f"nothing to add: the folder's segments ({total:,}) are in the store already"
    rows = sum(each.stats.rows for each in applied)
    parts = [f"{rows:,} rows added" if rows else "no rows added"]
    parts[0] += f" from {sum(each.given for each in applied):,} segments"
    expired = sum(each.result.expired for each in applied)
    if expired:
        parts.append(f"{expired:,} of them are older than the TTL, and left out")
    if unused := _unused(applied):
        names = ", ".join(sorted(unused))
        parts.append(f"{sum(unused.values()):,} rows of {names}, which no metric reads")
    odd_rows = sum(each.stats.quarantined_rows for each in applied)
    odd = sum(each.stats.quarantined_segments for each in applied)
    if odd or odd_rows:
        what = [f"{odd_rows:,} rows"] if odd_rows else []
        what += [f"{odd:,} segments"] if odd else []
        parts.append(f"{' and '.join(what)} set aside in {quarantine}, with their reasons")
    return "; ".join(parts)


def error_line(command: str, error: BaseException) -> str:
    """What went wrong and what to do, in one line; our own errors say both."""
    if isinstance(error, BatchmillError):
        return f"batchmill {command}: {error}"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    told = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if len(told) > _LONGEST_ERROR:
        told = f"{told[:_LONGEST_ERROR]}…"
    return (
        f"batchmill {command}: failed ({told}). What is not committed is read again by the next "
        "run: put right what is named here and start again; --verbose shows the details"
    )


def _unused(reports: Sequence[BatchReport]) -> Counter[str]:
    found: Counter[str] = Counter()
    for report in reports:
        for (what, source, _), rows in report.result.counters.items():
            if what == "unused":
                found[source] += rows
    return found
