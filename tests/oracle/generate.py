"""Everything that makes test data, under one roof: the same for the same seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.oracle.catalog import Row
from tests.oracle.random_events import random_events
from tests.oracle.random_spans import random_spans

__all__ = ["random_events", "random_spans", "write_segments"]


def write_segments(
    events: Mapping[str, Sequence[Row]], folder: Path, files_per_source: int, seed: int
) -> list[Path]:
    """Write `<folder>/<source>/<n>.parquet`; spans are the source `Span`. Needs pyarrow."""
    from tests.oracle import segments

    return segments.write_segments(events, folder, files_per_source, seed)
