"""A pipeline whose folders are on an HDFS: the same results, the same care for bad input."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from batchmill.spark import PipelineError, PipelineSettings
from batchmill.spark.files.paths import HadoopPath, remove_tree
from tests.kit.pipeline_driver import SPAN_WAIT_S
from tests.kit.pipelines import (
    MIXED_OAL,
    NOW,
    counted,
    differences,
    expected_whole,
    mixed_spool,
    pipeline,
    sqlite,
    whole,
    write_segment,
)
from tests.kit.servers.hadoop import Hdfs, names_in, upload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = PipelineSettings(ttl_days=365, span_wait_s=SPAN_WAIT_S, max_batch_files=4)

pytestmark = [pytest.mark.slow(60), pytest.mark.system]


def given(root: str, **changes: Any) -> dict[str, Any]:
    """A pipeline's arguments with all folders on an HDFS."""
    places = {name: f"{root}/{name}" for name in ("spool", "checkpoint", "quarantine")}
    return {"oal": MIXED_OAL, "settings": SETTINGS, "dedup_s": 86_400.0, **places, **changes}


def test_bad_input_on_hdfs_is_set_aside(tmp_path: Path, spark: SparkSession, hdfs: Hdfs) -> None:
    """Corrupt and empty segments, one that is gone, and invalid rows; the others count."""
    root = hdfs.new_folder()
    events = mixed_spool(tmp_path / "spool", random.Random(3), typed=2, spans=2)
    rows = [
        {**row, "time": datetime.fromtimestamp(NOW, UTC) + timedelta(days=9)}
        for row in events["Endpoint"][:3]
    ]
    write_segment(tmp_path / "spool", "Endpoint", rows, "ahead [1]")
    write_segment(tmp_path / "spool", "Endpoint", rows, "gone")
    upload(spark, tmp_path / "spool", f"{root}/spool")
    spool = HadoopPath(f"{root}/spool", lambda: spark)
    (spool / "Endpoint" / "bad {x}.parquet").write(b"nothing")
    (spool / "Endpoint" / "empty.parquet").write(b"")

    with pipeline(spark, tmp_path, **given(root, remove_read=True)) as running:
        choose = running.store.newest_minute

        def lose(*, until_s: float | None = None) -> int | None:
            remove_tree(spool / "Endpoint" / "gone.parquet")
            return choose(until_s=until_s)

        running.store.newest_minute = lose  # type: ignore[method-assign]
        reports = running.run_available()
        running.settle(everything=True)
        quarantined = counted(running.store, "quarantined segment")

    assert sum(report.stats.quarantined_rows for report in reports) == 3
    assert quarantined == {("Endpoint", "corrupt"): 2, ("Endpoint", "missing"): 1}
    left = differences(whole(sqlite(tmp_path)), expected_whole(MIXED_OAL, events))
    assert all("quarantined" in line for line in left[:-1]), left
    kept = names_in(spark, f"{root}/quarantine")
    assert [name for name in kept if "/rows-" not in name] == [
        "Endpoint/bad {x}.parquet",
        "Endpoint/bad {x}.parquet.reason",
        "Endpoint/empty.parquet",
        "Endpoint/empty.parquet.reason",
        "Endpoint/gone.parquet.reason",
    ]
    table = spark.read.parquet(f"{root}/quarantine/Endpoint/rows-*").toArrow()
    assert table.num_rows == 3
    assert set(table["_reason"].to_pylist()) == {"time too far ahead"}
    assert sorted(table["latency"].to_pylist()) == sorted(row["latency"] for row in rows)
    assert names_in(spark, f"{root}/spool") == []


def test_state_on_hdfs_is_read_with_other_parts(
    tmp_path: Path, spark: SparkSession, hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans wait and are known again when the next session divides traces otherwise."""
    root = hdfs.new_folder()
    events = mixed_spool(tmp_path / "spool", random.Random(6), typed=1, spans=4)
    again = events["Span"][::3]
    late = tmp_path / "late"
    (late / "Span").mkdir(parents=True)
    for file in sorted((tmp_path / "spool" / "Span").iterdir())[2:]:
        file.rename(late / "Span" / f"late {file.name}")
    write_segment(late, "Span", again, "again", order=10**6)
    reports = []
    for parts, folder in ((16, tmp_path / "spool"), (24, late)):
        upload(spark, folder, f"{root}/spool")
        monkeypatch.setattr("batchmill.spark.batch.maker.parts_for", lambda _, own=parts: own)
        with pipeline(spark, tmp_path, **given(root)) as running:
            reports += running.run_available()
    with pipeline(spark, tmp_path, **given(root)) as running:
        running.settle(everything=True)

    assert sum(report.stats.duplicates for report in reports) == len(again)
    wanted = expected_whole(MIXED_OAL, events)
    wanted["counter", "duplicates", "Span", "same trace and span id"] = len(again)
    assert differences(whole(sqlite(tmp_path)), wanted) == []


def test_lost_state_on_hdfs_stops_the_stream(
    tmp_path: Path, spark: SparkSession, hdfs: Hdfs
) -> None:
    """Whether a folder is gone, or only a file in it: nothing is counted twice silently."""
    root = hdfs.new_folder()
    events = mixed_spool(tmp_path / "spool", random.Random(2), typed=1, spans=2)
    upload(spark, tmp_path / "spool", f"{root}/spool")
    with pipeline(spark, tmp_path, **given(root)) as running:
        running.run_available()
    before = whole(sqlite(tmp_path))
    write_segment(tmp_path / "late", "Span", events["Span"][:9], "late")
    upload(spark, tmp_path / "late", f"{root}/spool")
    name = next(name for name in names_in(spark, f"{root}/checkpoint") if "/ids/part" in name)
    file = HadoopPath(f"{root}/checkpoint/{name}", lambda: spark)
    file.unlink()

    for damaged, said in ((file, "it holds"), (file.parent, "it is gone")):
        remove_tree(damaged)
        with (
            pipeline(spark, tmp_path, **given(root)) as running,
            pytest.raises(PipelineError, match=said),
        ):
            running.run_available()
    assert whole(sqlite(tmp_path)) == before


@pytest.mark.parametrize("local", ["spool", "checkpoint", "quarantine"])
def test_folders_of_both_kinds_go_together(
    tmp_path: Path, spark: SparkSession, hdfs: Hdfs, local: str
) -> None:
    """Each may be local while the others are not; a backfill's folder is a URI as well."""
    root = hdfs.new_folder()
    events = mixed_spool(tmp_path / "spool", random.Random(4), typed=1, spans=1)
    upload(spark, tmp_path / "spool", f"{root}/{'old' if local == 'checkpoint' else 'spool'}")
    (tmp_path / "spool" / "Endpoint" / "bad.parquet").write_bytes(b"nothing")
    arguments = given(root, **{local: tmp_path / local})
    with pipeline(spark, tmp_path, **arguments) as running:
        if local == "checkpoint":
            assert running.count_segments(f"{root}/old") == running.backfilled(f"{root}/old") + 4
            running.backfill(f"{root}/old")
            assert running.backfilled(f"{root}/old") == 4
            assert running.backfill(f"{root}/old") == []
        else:
            running.run_available()
            running.settle(everything=True)
        left = differences(whole(sqlite(tmp_path)), expected_whole(MIXED_OAL, events))
    if local == "spool":
        assert [line for line in left if "corrupt" not in line] == ["… 1 in all"]
        kept = names_in(spark, f"{root}/quarantine")
        assert kept == ["Endpoint/bad.parquet", "Endpoint/bad.parquet.reason"]
    else:
        assert left == []
