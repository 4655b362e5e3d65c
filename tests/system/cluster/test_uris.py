"""Spool, checkpoint and quarantine on file systems that are not local: HDFS, and an S3 endpoint."""

from __future__ import annotations

import faulthandler
import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.jvm import java_missing

pytest.importorskip("pyspark")

from tests.kit.pipelines import (
    MIXED_OAL,
    QUICK_SPARK,
    differences,
    expected_whole,
    mixed_spool,
    whole,
    write_segment,
)
from tests.kit.servers.hadoop import Bucket, Hdfs, names_in, upload
from tests.system.cluster.spark_cluster import WORKERS, Cluster, driver, need_hiding
from tests.system.kills.driver import KilledRun, shots, start_driver

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


@dataclass(frozen=True)
class Shared:
    """A folder that every machine reaches, of a file system or an object store."""

    kind: str
    """``hdfs`` or ``s3``."""
    uri: str
    conf: Mapping[str, str]
    """What Spark needs to open it."""
    upload: Callable[[Path], None]
    """Copies a spool into its ``spool``."""
    names: Callable[[str], list[str]]
    """The files below one of its folders, in order."""


@pytest.fixture(params=["hdfs", "s3"])
def shared(request: pytest.FixtureRequest, spark: SparkSession) -> Shared:
    """One of each kind."""
    if request.param == "hdfs":
        hdfs: Hdfs = request.getfixturevalue("hdfs")
        root = hdfs.new_folder()
        return Shared(
            "hdfs",
            root,
            {},
            lambda spool: upload(spark, spool, f"{root}/spool"),
            lambda folder: names_in(spark, f"{root}/{folder}"),
        )
    s3: Bucket = request.getfixturevalue("s3")
    key = uuid.uuid4().hex[:12]
    return Shared(
        "s3",
        f"{s3.url}/{key}",
        s3.conf,
        lambda spool: s3.upload(spool, f"{key}/spool"),
        lambda folder: s3.names(f"{key}/{folder}"),
    )


def test_executors_share_nothing_but_the_file_system_and_the_driver(
    tmp_path: Path, shared: Shared, postgres_url: str
) -> None:
    """Executors that cannot see the driver's folder; a worker is killed on the way.

    They have the jars for S3 from the driver.
    """
    need_hiding()
    own = tmp_path / "driver"
    own.mkdir()
    events = mixed_spool(own / "spool", random.Random(5), typed=1, spans=4)
    shared.upload(own / "spool")
    places = {name: f"{shared.uri}/{name}" for name in ("spool", "checkpoint", "quarantine")}

    with (
        Cluster(tmp_path, hidden=own) as cluster,
        driver(cluster, own, postgres_url, shared.conf, **places, dedup="1h") as life,
    ):
        life.must_hear(r"batch 0: .*")  # executors get the jars first
        life.must_hear(r"batch 1: .*")
        for number in range(WORKERS):
            (pid,) = cluster.executors(number)
            assert list(Path(f"/proc/{pid}/root{own}").iterdir()) == []
        cluster.workers[0].kill()
        life.must_hear(r"batch 6: .*")
        life.end()

    conf = {**QUICK_SPARK, **shared.conf}
    with start_driver(own, postgres_url, 1, dedup_s=3600, conf=conf, **places) as life:
        life.must_hear("ready")
        life.tell("go")
        life.must_hear("done")  # also with the spans that waited
        life.end()
    assert differences(whole(postgres_url), expected_whole(MIXED_OAL, events)) == []
    assert not (own / "checkpoint").exists()


@pytest.mark.parametrize(("ci", "outcome"), [("1", "Failed"), ("", "Skipped")])
def test_where_folders_cannot_be_hidden_ci_fails(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: str
) -> None:
    """Elsewhere the test is skipped; either way it is said why."""
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BaseException, match="folders cannot be hidden") as ended:
        need_hiding()
    assert ended.typename == outcome


SHOTS = {
    "hdfs": {"at_any_time": 0, "making": 1, "inside": 2, "after": 1, "settling": 1},
    "s3": {"at_any_time": 0, "making": 0, "inside": 1, "after": 1, "settling": 0},
}
"""How often drivers are killed at which moments."""


def test_a_killed_driver_continues(
    tmp_path: Path, shared: Shared, request: pytest.FixtureRequest
) -> None:
    """Killed before, inside and after commits: each event counts once, the spool is empty.

    In HDFS beside PostgreSQL; in S3, where there is no rename, beside SQLite and less often.
    """
    if shared.kind == "hdfs":
        url = request.getfixturevalue("postgres_url")
    else:
        url = f"sqlite:///{tmp_path / 'metrics.db'}"
    rng = random.Random(7)
    events = mixed_spool(tmp_path / "spool", rng, typed=3, spans=4, deltas=1)
    again = rng.sample(events["Span"], 40)
    write_segment(tmp_path / "spool", "Span", again, "again")
    shared.upload(tmp_path / "spool")
    places = {name: f"{shared.uri}/{name}" for name in ("spool", "checkpoint")}

    conf = {**QUICK_SPARK, **shared.conf}
    run = KilledRun(tmp_path, url, dedup_s=600, remove_read=True, conf=conf, **places)
    deaths = run.kill_at(shots(rng, **SHOTS[shared.kind]))

    assert len(deaths) == sum(SHOTS[shared.kind].values())
    assert run.made_again or not SHOTS[shared.kind]["making"], "no batch was lost and made again"
    wanted = expected_whole(MIXED_OAL, events)
    wanted["counter", "duplicates", "Span", "same trace and span id"] = len(again)
    assert differences(whole(url), wanted) == []
    assert shared.names("spool") == []
    assert [name for name in shared.names("checkpoint") if not name.startswith("state/")] == [
        "batchmill.json",
        "books.jsonl",
        "progress.json",
    ]
