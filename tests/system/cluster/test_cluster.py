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
    pytest.mark.timeout(600),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]

KILLED_AT = 3
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

master, with_batchmill, conf = sys.argv[1], sys.argv[2] == "shipped", json.loads(sys.argv[3])
if with_batchmill:
    from batchmill.spark.runtime.session import lease
    session = lease(master, conf=conf).session
else:
    from pyspark.sql import SparkSession
    builder = SparkSession.builder.master(master)
    for key, value in conf.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
reports = session.sparkContext.parallelize(range(4), 4).mapPartitions(probe).collect()
print(json.dumps(reports))
session.stop()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that is gone after the test, whatever came of it."""
    with Cluster(tmp_path) as made:
        yield made


def test_the_package_ships_to_executors_by_itself(cluster: Cluster, tmp_path: Path) -> None:
    """Executors whose Python has no batchmill import it from what the session sent them."""
    python = bare_python(tmp_path)

    without = probe(cluster, "plain", python)
    shipped = probe(cluster, "shipped", python)

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
    events = mixed_spool(tmp_path / "spool", random.Random(5), typed=2, spans=4)
    url = f"sqlite:///{tmp_path / 'metrics.db'}"

    with driver(cluster, tmp_path, url) as life:
        life.must_hear(rf"batch {KILLED_AT - 1}: .*")
        executors = [cluster.executors(number) for number in range(WORKERS)]
        assert [len(pids) for pids in executors] == [1, 1], "executors are not processes of workers"
        cores = [app["cores"] for app in cluster.facts()["activeapps"]]
        life.hear(rf"batch {KILLED_AT}: .*", seconds=0.3)
        cluster.workers[0].kill()
        before = len(life.lines)
        life.must_hear(r"batch 9: .*")
        cluster.wait_until(lambda: cluster.alive() == WORKERS - 1, "the master misses the worker")
        survivors = cluster.executors(1)
        life.end()

    assert cores == [WORKERS]
    assert survivors == executors[1]
    assert not _runs(executors[0][0])
    done = [line.partition(":")[0] for line in life.lines if line.startswith("batch ")]
    assert done == [f"batch {number}" for number in range(10)]
    assert before < len(life.lines) - 3, "it was nearly over when the worker was killed"
    settings = PipelineSettings(ttl_days=365, span_wait_s=SPAN_WAIT_S)
    with pipeline(spark, tmp_path, oal=MIXED_OAL, settings=settings) as here:
        here.settle(everything=True)
    assert differences(whole(url), expected_whole(MIXED_OAL, events)) == []


def probe(cluster: Cluster, kind: str, python: Path) -> list[dict[str, Any]]:
    """What a small job learns about batchmill on the executors."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, cluster.url, kind, json.dumps(CONF)],
        cwd=ROOT,
        env={**driver_environment(), "PYSPARK_PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return reports


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
