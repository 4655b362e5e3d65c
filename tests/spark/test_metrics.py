"""The metrics of a store as a DataFrame."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from batchmill.sources import Grain, UnknownNameError, bucket_start
from batchmill.spark import metrics
from batchmill.store import Value, open_store
from tests.kit.pipelines import SMALL, endpoint_events, pipeline, write_segment
from tests.kit.stores import MINUTE, Backend, Measurement, Writer


def rows_of(values: list[Value]) -> list[tuple[object, ...]]:
    """Values as the rows of a frame."""
    return sorted(
        (value.metric, value.entity_id, bucket_start(value.bucket), str(label), float(number))
        for value in values
        for label, number in (
            value.value.items() if isinstance(value.value, dict) else [(None, value.value)]
        )
    )


def test_a_frame_has_the_values_of_the_store(
    spark: SparkSession, tmp_path: Path, backend: Backend
) -> None:
    """Of both backends, all metrics or some, by grain and time."""
    write_segment(tmp_path / "spool", "Endpoint", endpoint_events(60, days=2))
    with pipeline(spark, tmp_path, oal=SMALL, store=backend.url) as running:
        running.run_available()
    with open_store(backend.url, create=False) as store:
        names = [metric.name for metric in store.metrics()]
        times = [bucket_start(value.bucket) for value in store.values("ep_cpm")]
        noon = times[len(times) // 2]
        for grain, start, end in (
            (Grain.MINUTE, None, None),
            (Grain.MINUTE, noon, noon + timedelta(hours=9)),
            (Grain.HOUR, Grain.DAY.bucket(noon), None),
            (Grain.DAY, None, noon),
        ):
            wanted = [
                value
                for name in names
                for value in store.values(name, grain=grain, start=start, end=end)
            ]
            assert wanted
            frame = metrics(spark, backend.url, grain=grain, start=start, end=end)
            rows = frame.toArrow().to_pylist()
            keys = ("metric", "entity_id", "time", "label", "value")
            assert sorted(
                (*(row[key] for key in keys[:3]), str(row["label"]), row["value"]) for row in rows
            ) == rows_of(wanted)
            assert {row["grain"] for row in rows} == {grain.value}
            assert {row["source"] for row in rows} == {"Endpoint"}
    one = metrics(spark, backend.url, names[0], grain="day")
    assert one.select("metric").distinct().toArrow().to_pylist() == [{"metric": names[0]}]
    with pytest.raises(UnknownNameError, match="no_such"):
        metrics(spark, backend.url, "no_such")


def test_a_rate_is_divided_by_the_minutes_with_data(spark: SparkSession, tmp_path: Path) -> None:
    """With ``covered``, as by the store; else by all minutes of the hour."""
    url = f"sqlite:///{tmp_path}/metrics.db"
    with open_store(url) as store:
        calls = [Measurement(1, minute=MINUTE + at) for at in range(12) for _ in range(10)]
        Writer(store, script="cpm = from(Endpoint.*).cpm();").write(*calls)
    for covered, rate in ((True, 10.0), (False, 2.0)):
        [row] = metrics(spark, url, "cpm", grain="hour", covered=covered).collect()
        assert row["value"] == rate
