"""Embedded for longer: killed again and again, forked under load, beside a Spark pipeline."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.files import ROOT

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from batchmill import Embedded
from tests.kit.pipelines import (
    EVERY_FUNCTION,
    EVERY_SOURCE,
    differences,
    every_events,
    expected,
    pipeline,
    sqlite,
    stored,
    write_spool,
)
from tests.kit.processes import Child, Life
from tests.kit.stores import Backend
from tests.kit.threads import WAIT_S, spawn, until
from tests.oracle.catalog import Row
from tests.workers.kit import MillSale, embedded, totals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow(45)

ROUNDS = 5
PERIOD_S = 0.2
EMITTER = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.oracle.catalog import Row
from tests.workers.kit import MillSale, embedded
mill = embedded(url, l1_period_s={PERIOD_S}, l2_period_s={PERIOD_S})
emitted = 0
while True:
    emitted += mill.emit_many([MillSale("a", 1)] * 10, timeout=60)
    print(time.monotonic(), emitted, mill.stats().commits, flush=True)
    time.sleep(0.005)
"""


def test_a_killed_process_loses_the_periods_at_most(backend: Backend) -> None:
    """What came before the last two periods, and the longest pause between commits, is there."""
    before = 0
    rng = random.Random(1)
    for _ in range(ROUNDS):
        with Life.of_script(EMITTER, url=backend.url) as process:
            process.must_hear(r"\S+ \d+ [1-9]\d*")  # it has committed
            process.hear("nothing that it says", seconds=rng.uniform(0.5, 1.5))
            process.kill()
        lines = [line.split() for line in process.lines if line.count(" ") == 2]
        seen = [(float(at), int(emitted), int(commits)) for at, emitted, commits in lines]
        count, cents = totals(backend.url)
        assert count == cents
        committed, before = count - before, count
        commits = [at for (_, _, old), (at, _, new) in pairwise(seen) if new > old]
        slowest = max(later - early for early, later in pairwise((seen[0][0], *commits)))
        last = seen[-1][0] - 2 * PERIOD_S - slowest
        assert committed >= max((emitted for at, emitted, _ in seen if at < last), default=0)


def test_a_server_that_forks_workers(backend: Backend) -> None:
    """Forks while all threads work; workers are ended by SIGTERM; nothing lost, nothing twice."""
    deadline_s = time.monotonic() + 8
    with embedded(backend.url, l1_period_s=0.002, l2_period_s=0.002, l1_chunk=50) as mill:

        def emit() -> int:
            rounds = 0
            while time.monotonic() < deadline_s:
                mill.emit_many([MillSale("parent", 1)] * 20, timeout=WAIT_S)
                rounds += 1
            return 20 * rounds

        def work() -> None:
            for _ in range(50):
                assert mill.emit_many([MillSale("worker", 1)] * 10, timeout=WAIT_S) == 10
            signal.sigwait({signal.SIGTERM})
            assert mill.close()
            assert mill.stats().committed == 500

        emitting = [spawn(emit) for _ in range(2)]
        children: list[Child] = []
        # Inherited: a worker is told by sigwait() alone.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            while time.monotonic() < deadline_s and len(children) < 25:
                children.append(Child(work))
                commits = mill.stats().commits
                until(lambda: mill.stats().commits > commits, "a commit")  # noqa: B023
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for child in children:
            os.kill(child.pid, signal.SIGTERM)
        for child in children:
            child.succeeds()
        parents = sum(future.result() for future in emitting)
    assert mill.stats().committed == parents
    assert totals(backend.url)[0] == parents + 500 * len(children)


def test_beside_a_spark_pipeline(spark: SparkSession, tmp_path: Path) -> None:
    """Both add to the same metrics of one store, at the same time: the sum is exact."""
    events = every_events(5, EVERY_SOURCE, 200)
    halves: tuple[dict[str, list[Row]], ...] = ({}, {})
    for name, rows in events.items():
        halves[0][name], halves[1][name] = list(rows[::2]), list(rows[1::2])
    write_spool(halves[0], tmp_path / "spool", files=3)
    with (
        Embedded(oal=EVERY_FUNCTION, store=sqlite(tmp_path), ttl_days=3650) as mill,
        pipeline(spark, tmp_path) as running,
    ):
        run = spawn(running.run_available)
        for name, rows in halves[1].items():
            for row in rows:
                assert mill.emit(row, name)
            assert mill.flush(WAIT_S)
        run.result()
    assert differences(stored(sqlite(tmp_path)), expected(events)) == []
