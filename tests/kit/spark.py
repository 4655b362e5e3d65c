"""One Spark session for all tests that need one, small and quick to start; spans for it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.jvm import iceberg_jars, java_missing, jvm_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two local cores. Tests share it: they leave its settings as they found them.

    Being of session scope it is set up before a test's threads are counted, so that the threads
    that py4j keeps are nobody's leak.
    """
    pytest.importorskip("pyspark")
    if (missing := java_missing()) is not None:
        pytest.skip(missing)
    from pyspark.sql import SparkSession

    with contextlib.ExitStack() as undo:
        undo.enter_context(_environment("PYSPARK_PYTHON", sys.executable))
        undo.enter_context(_environment("SPARK_LOCAL_IP", "127.0.0.1"))
        undo.enter_context(_environment("SPARK_SUBMIT_OPTS", jvm_options()))
        session = (
            SparkSession.builder.master("local[2]")
            .appName("batchmill tests")
            .config("spark.driver.memory", "1g")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.ansi.enabled", "false")
            .config("spark.jars", iceberg_jars())
            .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
            .getOrCreate()
        )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


EPOCH = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
"""When the first span of a test starts, unless it says otherwise."""


def span(span_id: str | None, kind: str = "SERVER", **changes: Any) -> dict[str, Any]:
    """A span of service ``shop``; ``at`` is its start in µs after EPOCH, ``us`` its length."""
    start = EPOCH + timedelta(microseconds=changes.pop("at", 0))
    made: dict[str, Any] = {
        "trace_id": "t1",
        "span_id": span_id,
        "parent_span_id": None,
        "name": f"op {span_id}",
        "kind": kind,
        "time": start,
        "end_time": start + timedelta(microseconds=changes.pop("us", 5000)),
        "status": "UNSET",
        "service": "shop",
        "resource": {},
        "attributes": {},
    }
    assert changes.keys() <= made.keys()
    return made | changes


def in_order(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows in an order that depends on nothing but what is in them."""
    return sorted((dict(sorted(row.items())) for row in rows), key=repr)
