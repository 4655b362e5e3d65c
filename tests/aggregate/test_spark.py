"""Spark and the kernel side by side: the same states, and one store that both write to."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from batchmill.store import open_store
from tests.aggregate.kit import Kernel
from tests.kit.pipelines import (
    EVERY_FUNCTION,
    EVERY_SOURCE,
    contents,
    differences,
    every_events,
    expected,
    pipeline,
    sqlite,
    write_spool,
)


def test_spark_and_the_kernel_fill_one_store(spark: SparkSession, tmp_path: Path) -> None:
    """Half of the rows by each: cell by cell the states of the half are equal, and then all of
    them together what the oracle expects."""
    events = every_events(21, EVERY_SOURCE, 80)
    first, second = ({name: rows[n::2] for name, rows in events.items()} for n in range(2))
    kernel = Kernel(EVERY_FUNCTION)
    write_spool(first, tmp_path / "spool", 1)
    with pipeline(spark, tmp_path) as running:
        running.run_available()
    (tmp_path / "alone").mkdir()
    with open_store(sqlite(tmp_path / "alone"), ttl_days=365) as alone:
        kernel.commit(alone, kernel.make(first))
        states, values = contents(alone)
    spark_states, spark_values = contents(sqlite(tmp_path))
    assert len(states) > 1000
    assert differences(spark_states, states) == []
    assert differences(spark_values, values) == []
    with open_store(sqlite(tmp_path), ttl_days=365) as both:
        kernel.commit(both, kernel.make(second))
        assert differences(contents(both)[1], expected(events)) == []
