"""Where kept spans lie, and the columns of their files.

    <folder>/hour=2026-11-17T19/<rows>-<unique>.parquet    spans that began in this hour (UTC)
    <folder>/.incoming/<segment>.parquet                    segments that were committed just now
    <folder>/.stats.json                                    what is kept, and what was dropped
    <folder>/.change.json                                   a change of files that is under way
    <folder>/.export.lock                                   locked by a copy of them to Iceberg

A file is sorted by trace id, and its groups of rows have the least and the greatest one in their
statistics: whoever looks for a trace reads one small group of each file, be it with this package,
DuckDB or Spark. All names that begin with a point are hidden from Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from batchmill.errors import check_int, check_number

HOUR_US = 3_600_000_000
INCOMING, STATS, CHANGE = ".incoming", ".stats.json", ".change.json"
_PREFIX = "hour="
_FORM = "%Y-%m-%dT%H"
MEBIBYTE = 2**20

_MAP = pa.map_(pa.string(), pa.string())
SCHEMA = pa.schema(
    [
        ("trace_id", pa.string()),
        ("span_id", pa.string()),
        ("parent_span_id", pa.string()),
        ("time", pa.timestamp("us", tz="UTC")),
        ("duration_us", pa.int64()),
        ("service", pa.string()),
        ("name", pa.string()),
        ("kind", pa.string()),
        ("status", pa.string()),
        ("status_message", pa.string()),
        ("instance", pa.string()),
        ("resource", _MAP),
        ("attributes", _MAP),
        ("events", pa.string()),
    ]
)
"""The columns of a kept span, which docs/traces.md explains."""
MAPS = ("resource", "attributes")
MAP_PATHS = tuple(f"{name}.key_value.{part}" for name in MAPS for part in ("key", "value"))
"""The Parquet columns of the maps."""
REPEATING = (
    *("service", "name", "kind", "status", "status_message", "instance", "events"),
    *MAP_PATHS,
)
"""Parquet columns whose texts repeat, and have a dictionary in the files."""


@dataclass(frozen=True, kw_only=True)
class KeepSettings:
    """How long spans are kept, and how much of the disk they may take."""

    max_age_h: float = 24.0
    """Spans that began longer ago than that are dropped."""
    max_bytes: int = 2048 * MEBIBYTE
    """Beyond it the oldest spans are dropped."""

    def __post_init__(self) -> None:
        check_number("max_age_h", self.max_age_h, 0.01)
        check_int("max_bytes", self.max_bytes, 1)


@dataclass(frozen=True)
class KeptFile:
    """A file of spans."""

    path: Path
    hour_us: int | None
    """The start of its hour, in microseconds since 1970; None: a segment of any hours."""
    rows: int
    """0: not known."""

    @property
    def sorted(self) -> bool:
        """Whether it is in its hour, and sorted by trace id."""
        return self.hour_us is not None


def hour_folder(folder: Path, hour_us: int) -> Path:
    """The folder of an hour."""
    name = datetime.fromtimestamp(hour_us // 1_000_000, UTC).strftime(_FORM)
    return folder / f"{_PREFIX}{name}"


def list_files(folder: Path) -> list[KeptFile]:
    """All files of spans, the newest hour first, and segments before them."""
    files = [KeptFile(path, None, 0) for path in sorted((folder / INCOMING).glob("*.parquet"))]
    for hour_us, place in sorted(_hours(folder), reverse=True):
        files += [
            KeptFile(path, hour_us, rows_of(path)) for path in sorted(place.glob("[!.]*.parquet"))
        ]
    return files


def _hours(folder: Path) -> Iterator[tuple[int, Path]]:
    for place in folder.glob(f"{_PREFIX}*"):
        try:
            moment = datetime.strptime(place.name.removeprefix(_PREFIX), _FORM)
        except ValueError:  # somebody else's
            continue
        yield int(moment.replace(tzinfo=UTC).timestamp()) * 1_000_000, place


def rows_of(path: Path) -> int:
    """How many rows a file has, by its name."""
    text = path.name.partition("-")[0]
    return int(text) if text.isdecimal() else 0
