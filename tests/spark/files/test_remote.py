"""What Spark writes for the tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from batchmill.spark.files.remote import write_invalid
from batchmill.spark.shuffle import SCHEMA, Blob, Kind, write_blobs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_invalid_rows_are_written_with_plain_texts(spark: SparkSession, tmp_path: Path) -> None:
    """Though blobs have texts that repeat, also those in maps, once."""
    texts = pa.array(["a", "b"] * 250).dictionary_encode()
    maps = pa.MapArray.from_arrays(pa.array(range(0, 501, 2), pa.int32()), texts, texts)
    rows = pa.table({"name": texts[:250], "tags": pa.chunked_array([maps[:9], maps[9:]])})
    blobs = write_blobs(Blob.of(Kind.INVALID, rows, source="Span"))
    frame = spark.createDataFrame(pa.Table.from_batches(blobs, SCHEMA))
    write_invalid(frame, "Span", [rows.schema.serialize().to_pybytes()], tmp_path / "rows")
    written = spark.read.parquet(str(tmp_path / "rows")).toArrow()
    assert written.schema.field("tags").type == pa.map_(pa.string(), pa.string())
    assert written.to_pylist() == rows.to_pylist()
