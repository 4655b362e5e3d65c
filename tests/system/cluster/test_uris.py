"""Spool, checkpoint and quarantine on file systems that are not local: HDFS, and an S3 endpoint."""

from __future__ import annotations

import faulthandler
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.jvm import java_missing

pytest.importorskip("pyspark")

from batchmill.spark import PipelineSettings
from tests.kit.pipeline_driver import SPAN_WAIT_S
from tests.kit.pipelines import (
    MIXED_OAL,
    QUICK_SPARK,
    differences,
    expected_whole,
    mixed_spool,
    pipeline,
    whole,
    write_segment,
)
from tests.kit.servers.hadoop import Bucket, Hdfs, names_in, upload
from tests.system.cluster.spark_cluster import WORKERS, Cluster, can_hide, driver
from tests.system.kills.driver import KilledRun, shots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.slow(140),
    pytest.mark.timeout(900),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]


@pytest.fixture(autouse=True)
def no_stacks_on_the_way() -> None:
    """These take minutes; pytest would print every thread's stack before their time is up."""
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.skipif(not can_hide(), reason="folders cannot be hidden: unshare --mount fails here")
def test_executors_share_nothing_but_the_file_system_and_the_driver(
    tmp_path: Path, spark: SparkSession, hdfs: Hdfs, postgres_url: str
) -> None:
    """Executors that cannot see the driver's folder; a worker is killed on the way."""
    own, root = tmp_path / "driver", hdfs.new_folder()
    own.mkdir()
    events = mixed_spool(own / "spool", random.Random(5), typed=1, spans=4)
    upload(spark, own / "spool", f"{root}/spool")
    places = {name: f"{root}/{name}" for name in ("spool", "checkpoint", "quarantine")}

    with (
        Cluster(tmp_path, hidden=own) as cluster,
        driver(cluster, own, postgres_url, **places, dedup="1h") as life,
    ):
        life.must_hear(r"batch 1: .*")
        for number in range(WORKERS):
            (pid,) = cluster.executors(number)
            assert list(Path(f"/proc/{pid}/root{own}").iterdir()) == []
        cluster.workers[0].kill()
        life.must_hear(r"batch 6: .*")
        life.end()

    settings = PipelineSettings(ttl_days=365, span_wait_s=SPAN_WAIT_S)
    with pipeline(
        spark, own, oal=MIXED_OAL, settings=settings, store=postgres_url, dedup_s=3600.0, **places
    ) as here:
        here.settle(everything=True)
    assert differences(whole(postgres_url), expected_whole(MIXED_OAL, events)) == []
    assert not (own / "checkpoint").exists()


def test_a_killed_driver_continues_from_hdfs(
    tmp_path: Path, spark: SparkSession, hdfs: Hdfs, postgres_url: str
) -> None:
    """Killed before, inside and after commits: each event counts once, the spool is empty."""
    root = hdfs.new_folder()
    rng = random.Random(7)
    events = mixed_spool(tmp_path / "spool", rng, typed=3, spans=4, deltas=1)
    again = rng.sample(events["Span"], 40)
    write_segment(tmp_path / "spool", "Span", again, "again")
    upload(spark, tmp_path / "spool", f"{root}/spool")
    places = {"spool": f"{root}/spool", "checkpoint": f"{root}/checkpoint"}

    run = KilledRun(tmp_path, postgres_url, dedup_s=600, remove_read=True, **places)
    deaths = run.kill_at(shots(rng, at_any_time=0, making=1, inside=2, after=1, settling=1))

    assert len(deaths) == 5
    assert run.made_again, "no batch was lost and made again"
    wanted = expected_whole(MIXED_OAL, events)
    wanted["counter", "duplicates", "Span", "same trace and span id"] = len(again)
    assert differences(whole(postgres_url), wanted) == []
    assert names_in(spark, f"{root}/spool") == []
    left = names_in(spark, f"{root}/checkpoint")
    assert [name for name in left if not name.startswith("state/")] == [
        "batchmill.json",
        "books.jsonl",
        "progress.json",
    ]


def test_a_killed_driver_continues_from_s3(tmp_path: Path, s3: Bucket) -> None:
    """The same with an object store, where there is no rename."""
    rng = random.Random(8)
    events = mixed_spool(tmp_path / "spool", rng, typed=2, spans=3, deltas=1)
    again = rng.sample(events["Span"], 20)
    write_segment(tmp_path / "spool", "Span", again, "again")
    for file in sorted((tmp_path / "spool").rglob("*.parquet")):
        s3.put(f"spool/{file.relative_to(tmp_path / 'spool')}", file.read_bytes())
    url = f"sqlite:///{tmp_path / 'metrics.db'}"
    places = {"spool": f"{s3.url}/spool", "checkpoint": f"{s3.url}/checkpoint"}

    run = KilledRun(
        tmp_path, url, dedup_s=600, remove_read=True, conf={**QUICK_SPARK, **s3.conf}, **places
    )
    deaths = run.kill_at(shots(rng, at_any_time=0, making=0, inside=1, after=1, settling=0))

    assert len(deaths) == 2
    wanted = expected_whole(MIXED_OAL, events)
    wanted["counter", "duplicates", "Span", "same trace and span id"] = len(again)
    assert differences(whole(url), wanted) == []
    assert "checkpoint/books.jsonl" in s3.names()
    assert [key for key in s3.names() if key.endswith(".parquet") and "spool" in key] == []
