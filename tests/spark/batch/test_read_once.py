"""A batch reads and prepares each span of its segments once, whatever is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from batchmill.spark import PipelineSettings
from tests.kit.pipelines import INTERPRETED, OF_SPANS, START, counted, pipeline, write_segment
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans
from tests.spark.kit import QueryLog

pytestmark = pytest.mark.slow

SPANS = random_spans(5, 240, start=START, days=1)
OAL = f"{OF_SPANS} store = from(DatabaseAccess.latency).max();"
WHOLE_PATHS = INTERPRETED | {"spark.sql.maxMetadataStringLength": "100000"}
"""Otherwise Spark abbreviates the names of files where it describes how it reads them."""


@pytest.mark.parametrize("dedup_s", [None, 600.0], ids=["plain", "dedup"])
@pytest.mark.parametrize(
    "small",
    [pytest.param(200_000, id="small", marks=pytest.mark.system), pytest.param(0, id="large")],
)
def test_a_batch_reads_each_segment_once(
    spark: SparkSession, tmp_path: Path, small: int, dedup_s: float | None
) -> None:
    """With several sources, TopN and files of earlier batches; with duplicates and without."""
    spool = tmp_path / "spool"
    settings = PipelineSettings(ttl_days=365, small_batch_rows=small)
    again = 40
    batches: list[list[Row]] = [SPANS[:100], [*SPANS[100:], *SPANS[:again]]]
    with pipeline(
        spark,
        tmp_path,
        oal=OAL,
        settings=settings,
        spark_conf=WHOLE_PATHS,
        dedup_s=dedup_s,
    ) as running:
        for number, spans in enumerate(batches):
            for part in range(2):
                write_segment(spool, "Span", spans[part::2], f"{number}-{part}", number)
            queries = QueryLog(spark)
            (report,) = running.run_available()
            assert report.stats.segments == 2
            assert queries.rows_read(spool / "Span") == len(spans)
        dropped = again if dedup_s else 0
        assert counted(running.store, "rows")["Span", ""] == len(SPANS) + again - dropped
