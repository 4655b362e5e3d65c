"""Sums that outgrow 64 bits, from the rows to the value."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from pyspark.sql import SparkSession

from batchmill.sources import Grain
from batchmill.store import open_store
from tests.kit.pipelines import compiled, endpoint_events, sqlite, write_segment

SCRIPT = """
total = from((str->long)Endpoint.tag["n"]).sum();
mean = from((str->long)Endpoint.tag["n"]).longAvg();
by_name = from(Endpoint.*).labelAvg(serviceName, sideCar.internalRequestLatencyNanos);
cpu = from(ServiceInstanceJVMCPU.usePercent).sumDouble();
"""
GREATEST, LEAST = 2**63 - 1, -(2**63)
LARGEST_DOUBLE = 2.0**61


def test_sums_outgrow_64_bits(spark: SparkSession, tmp_path: Path) -> None:
    """In one batch and over batches, in one minute and rolled up: exact, above and below zero."""
    (one,) = endpoint_events(1)
    start = one["time"].replace(minute=0, second=0, microsecond=0)
    rows = [
        {
            **one,
            "time": start + timedelta(minutes=minute),
            "tag": {"n": str(LEAST if minute == 2 else GREATEST)},
            "sideCar": {**(one["sideCar"] or {}), "internalRequestLatencyNanos": GREATEST},
        }
        for minute in (0, 0, 0, 1, 2, 2)
    ]
    cpu = [
        {"time": start, "id": "i", "name": "i", "serviceName": "s", "usePercent": LARGEST_DOUBLE}
        for _ in range(8)
    ]
    for number in range(2):
        write_segment(tmp_path / "spool", "Endpoint", rows, str(number), number)
        write_segment(tmp_path / "spool", "ServiceInstanceJVMCPU", cpu, str(number), number)
        with compiled(spark, tmp_path, oal=SCRIPT) as running:
            running.run_available()
    with open_store(sqlite(tmp_path)) as store:
        assert [each.value for each in store.values("total")] == [
            6 * GREATEST,
            2 * GREATEST,
            4 * LEAST,
        ]
        (day,) = store.values("total", grain=Grain.DAY)
        assert day.value == 8 * GREATEST + 4 * LEAST
        assert [each.value for each in store.values("mean")] == [GREATEST, GREATEST, LEAST]
        (averages,) = store.values("by_name", grain=Grain.HOUR)
        assert averages.value == {f"{{n={one['serviceName']}}}": GREATEST}
        assert [each.value for each in store.values("cpu")] == [16 * LARGEST_DOUBLE]
