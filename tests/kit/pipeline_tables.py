"""Segments of Endpoint with columns of any kind, for the tests of odd and bad input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.spark import PipelineSettings
from tests.oracle.catalog import Row
from tests.oracle.segments import to_table

ONE_AT_A_TIME = PipelineSettings(ttl_days=365, max_batch_files=1)


def write_table(folder: Path, name: str, table: pa.Table, **options: Any) -> Path:
    """One segment of Endpoint, of any columns."""
    path = folder / "Endpoint" / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def with_column(rows: Sequence[Row], name: str, values: Sequence[Any], kind: Any) -> pa.Table:
    """Rows of Endpoint as a table, one column of it replaced or added."""
    table = to_table("Endpoint", rows)
    column = pa.array(values, kind)
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, column)
    return table.append_column(name, column)
