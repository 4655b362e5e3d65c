"""Parts of batches are committed on a cluster, of which everything is killed at some moment."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.jvm import java_missing

pytest.importorskip("pyspark")
pytest.importorskip("psycopg")

import psycopg

from batchmill.store import open_store
from tests.kit.pipelines import MIXED_OAL, differences, expected_whole, mixed_spool, whole
from tests.kit.servers.postgres import Postgres
from tests.kit.threads import until
from tests.system.cluster.spark_cluster import WORKERS, Cluster
from tests.system.kills.cluster import CONF, KINDS, KillStats, kill_all
from tests.system.kills.driver import say, start_driver

pytestmark = [
    pytest.mark.slow(110),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that is gone after the tests, whatever came of it."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def cluster(servers: Cluster) -> Cluster:
    """The cluster, with all of its workers, whatever the test before did to it."""
    # It takes minutes on a busy machine; pytest would print every thread's stack meanwhile.
    faulthandler.cancel_dump_traceback_later()
    servers.wait_until(lambda: servers.alive() == WORKERS, "the workers are there")
    return servers


GATE = """
CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.part % 4 > 0 THEN PERFORM pg_advisory_xact_lock_shared(7); END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER gate BEFORE INSERT ON part_commit FOR EACH ROW EXECUTE FUNCTION gate();
"""
"""All tasks of four but the first wait until the test lets them go on."""


def test_stages_that_run_again_after_some_parts_are_committed(
    cluster: Cluster, tmp_path: Path, postgres: Postgres, postgres_url: str
) -> None:
    """With an executor, the output of earlier stages is lost that the last tasks need.

    One task has committed its parts, one waits inside its commit on each executor, and one has not
    begun when the executor is killed: Spark runs the earlier stages again.
    """
    events = mixed_spool(tmp_path / "spool", random.Random(6), typed=2, spans=4)
    size = sum(path.stat().st_size for path in (tmp_path / "spool").rglob("*.parquet"))
    with open_store(postgres_url):  # the tables are there then
        postgres.execute(GATE, postgres_url.rpartition("/")[2])
    # No task begins before both executors are there: each then has output that is needed.
    both = {"spark.cores.max": str(WORKERS), "spark.scheduler.minRegisteredResourcesRatio": "1.0"}
    options = {"master": cluster.url, "conf": {**CONF, **both}, "task_bytes": -(-size // 4)}

    def waiting() -> int:
        rows = database.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        )
        return int(rows.fetchall()[0][0])

    def recorded() -> set[int]:
        return {part for (part,) in database.execute("SELECT part FROM part_commit")}

    with (
        psycopg.connect(postgres_url, autocommit=True) as database,
        start_driver(tmp_path, postgres_url, 1, **options) as life,
    ):
        database.execute("SELECT pg_advisory_lock(7)")
        life.must_hear("ready")
        life.tell("go")
        until(lambda: waiting() == WORKERS, life.report)
        assert recorded() == {0, 4, 8, 12}
        (victim,) = cluster.executors(0)
        os.kill(victim, signal.SIGKILL)
        database.execute("SELECT pg_advisory_unlock(7)")
        life.must_hear("done")
        life.end()

    assert any(line.startswith("batch 0 rerun") for line in life.lines), life.lines
    opened = [line for line in life.lines if line.startswith("batch 0 opened")]
    assert opened == ["batch 0 opened, 0"]
    assert differences(whole(postgres_url), expected_whole(MIXED_OAL, events)) == []


def test_everything_is_killed_at_random_moments(
    cluster: Cluster, tmp_path: Path, postgres: Postgres
) -> None:
    """A short round of ``python -m tests.system.kills.cluster``: one kill of each kind."""
    stats = KillStats()
    kill_all(tmp_path / "run", cluster, postgres, seed=3, count=len(KINDS), stats=stats)
    say(stats.report())
    assert stats.killed.total() >= 6, "it was through before most kills"
    assert stats.half.total() > 0, "no batch was half committed when something was killed"
