"""The pipeline on a real standalone cluster: a master, two workers, executors of their own."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.files import ROOT
from tests.kit.jvm import java_missing

pytest.importorskip("pyspark")

from batchmill.spark import PipelineSettings
from tests.kit.pipeline_driver import SPAN_WAIT_S
from tests.kit.pipelines import (
    MIXED_OAL,
    differences,
    expected_whole,
    mixed_spool,
    pipeline,
    whole,
)
from tests.system.cluster.spark_cluster import CONF, WORKERS, Cluster, driver, driver_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.slow(50),
    pytest.mark.timeout(600),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]

BATCHES = 7
KILLED_AT = 2
"""The worker is killed while the batch of that number is being made."""

PROBE = """
import json, sys

def probe(_):
    import os
    import sys
    facts = {"folder": os.getcwd(), "pid": os.getpid(), "bare": bool(sys.flags.no_site)}
    try:
        import batchmill
        from batchmill.sources import builtin_catalog
        facts["file"] = os.path.abspath(batchmill.__file__)
        facts["sources"] = len(builtin_catalog().sources)
    except ImportError as error:
        facts["error"] = str(error)
    yield facts

def report(session):
    reports = session.sparkContext.parallelize(range(4), 4).mapPartitions(probe).collect()
    print(json.dumps(reports))
    session.stop()

from pyspark.sql import SparkSession
master, conf = sys.argv[1], json.loads(sys.argv[2])
builder = SparkSession.builder.master(master)
for key, value in conf.items():
    builder = builder.config(key, value)
report(builder.getOrCreate())
from batchmill.spark.runtime.session import lease
report(lease(master, conf=conf).session)
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that is gone after the tests, whatever came of it."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def cluster(servers: Cluster) -> Cluster:
    """The cluster, with all of its workers, whatever the test before did to it."""
    if servers.alive() < WORKERS:
        servers.stop()
        servers.start()
    return servers


def test_the_package_ships_to_executors_by_itself(cluster: Cluster, tmp_path: Path) -> None:
    """Executors whose Python has no batchmill import it from what the session sent them."""
    python = bare_python(tmp_path)

    without, shipped = probe(cluster, python)

    assert all(facts["bare"] for facts in (*without, *shipped))
    assert [facts["error"] for facts in without] == ["No module named 'batchmill'"] * 4
    homes = [cluster.work_folder(number) for number in range(WORKERS)]
    for facts in shipped:
        file = Path(facts["file"])
        assert any(file.is_relative_to(home) for home in homes), facts
        assert file.parent.parent.name == "batchmill.zip"
        assert facts["sources"] > 40


def test_a_worker_killed_mid_run_changes_nothing(
    cluster: Cluster, tmp_path: Path, spark: SparkSession
) -> None:
    """On two executors, one of which dies with its worker on the way: the store is exact."""
    events = mixed_spool(tmp_path / "spool", random.Random(5), typed=1, spans=4)
    url = f"sqlite:///{tmp_path / 'metrics.db'}"

    with driver(cluster, tmp_path, url) as life:
        life.must_hear(rf"batch {KILLED_AT - 1}: .*")
        executors = [cluster.executors(number) for number in range(WORKERS)]
        assert [len(pids) for pids in executors] == [1, 1], "executors are not processes of workers"
        cores = [app["cores"] for app in cluster.facts()["activeapps"]]
        life.hear(rf"batch {KILLED_AT}: .*", seconds=0.3)
        cluster.workers[0].kill()
        before = len(life.lines)
        life.must_hear(rf"batch {BATCHES - 1}: .*")
        cluster.wait_until(lambda: cluster.alive() == WORKERS - 1, "the master misses the worker")
        survivors = cluster.executors(1)
        life.end()

    assert cores == [WORKERS]
    assert survivors == executors[1]
    assert not _runs(executors[0][0])
    done = [line.partition(":")[0] for line in life.lines if line.startswith("batch ")]
    assert done == [f"batch {number}" for number in range(BATCHES)]
    assert before < len(life.lines) - 3, "it was nearly over when the worker was killed"
    settings = PipelineSettings(ttl_days=365, span_wait_s=SPAN_WAIT_S)
    with pipeline(spark, tmp_path, oal=MIXED_OAL, settings=settings) as here:
        here.settle(everything=True)
    assert differences(whole(url), expected_whole(MIXED_OAL, events)) == []


def probe(cluster: Cluster, python: Path) -> list[list[dict[str, Any]]]:
    """What a small job learns about batchmill on executors without batchmill and with it."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, cluster.url, json.dumps(CONF)],
        cwd=ROOT,
        env={**driver_environment(), "PYSPARK_PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-2:]]


def bare_python(folder: Path) -> Path:
    """This Python without site-packages: nothing is installed there."""
    file = folder / "bare-python"
    file.write_text(f'#!/bin/sh\nexec "{sys._base_executable}" -S "$@"\n')  # type: ignore[attr-defined]
    file.chmod(0o755)
    return file


def _runs(pid: int) -> bool:
    done = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    # A process that nobody has waited for yet is dead all the same.
    return bool(done.stdout.strip()) and not done.stdout.startswith("Z")
