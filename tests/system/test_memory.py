"""A backlog whose first batch takes more memory than there is, for real."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.kit.jvm import java_missing, jvm_options

pytest.importorskip("pyspark")
pytest.importorskip("grpc")

from batchmill.run import Home, read_counted
from batchmill.store import open_store
from tests.kit.pipelines import QUICK_SPARK, counted, differences, expected, sqlite, stored
from tests.kit.processes import Life, free_ports
from tests.kit.spark import span
from tests.kit.threads import PATIENCE_S, until
from tests.oracle.catalog import Row
from tests.oracle.generate import to_table
from tests.oracle.spans import spans_to_events

pytestmark = [
    pytest.mark.slow(60),
    pytest.mark.timeout(900),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]

OAL = """
calls = from(Endpoint.*).cpm();
latency = from(Service.latency).percentile2(10);
"""
"""Of rows that need no partner: nothing waits for one when the backlog is worked off."""
SEGMENTS, SPANS = 24, 100
LONG_S = 4 * PATIENCE_S
"""For several tries, and several starts of Spark."""
SMALL_BASE = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""What a process has reserved before it does anything is then the same on every machine."""


@pytest.fixture(autouse=True)
def no_stacks_on_the_way() -> None:
    """It takes long; pytest would print every thread's stack before its time is up."""
    faulthandler.cancel_dump_traceback_later()


def fill(spool: Path, mib: int) -> list[Row]:
    """Small files of spans with so much text in all: names that are long and easy to compress."""
    folder = spool / "Span"
    folder.mkdir(parents=True)
    start = datetime.now(UTC) - timedelta(hours=1)
    text = "x" * (mib * 2**20 // (SEGMENTS * SPANS))
    spans = []
    for segment in range(SEGMENTS):
        rows = [
            span(
                f"{number:016x}",
                trace_id=f"{number:032x}",
                name=f"GET /export {text}{number}",
                time=(begin := start + timedelta(milliseconds=10 * number)),
                end_time=begin + timedelta(microseconds=number),
            )
            for number in range(segment * SPANS, (segment + 1) * SPANS)
        ]
        name = f"{1_700_000_000_000_000 + segment}-{segment:08x}-{SPANS}.parquet"
        pq.write_table(to_table("Span", rows), folder / name, compression="zstd")
        # Of a name, an entity has the beginning only.
        spans += [{**row, "name": row["name"][:1000]} for row in rows]
    return spans


def check(url: str, spans: list[Row]) -> None:
    """Compare a store with the oracle: each span is in it once."""
    with open_store(url) as store:
        assert differences(stored(store), expected(spans_to_events(spans).events, OAL)) == []
        assert counted(store, "rows")["Span", ""] == len(spans)


def options(folder: Path, conf: Mapping[str, str]) -> list[str]:
    """Options of both commands."""
    script = folder / "metrics.oal"
    script.write_text(OAL)
    return [f"--oal={script}", *(f"--conf={key}={value}" for key, value in conf.items())]


def test_a_batch_whose_tasks_run_out_of_memory_is_worked_off_in_pieces(tmp_path: Path) -> None:
    """They die twice, of a limit of the system (RLIMIT_AS); pieces get through, each span once."""
    spans = fill(tmp_path / "spool", mib=140)
    # Spark sets the limit of its Python processes.
    conf = {"spark.driver.memory": "1g", "spark.executor.pyspark.memory": "1200m"}
    command = [
        *(sys.executable, "-m", "batchmill", "pipeline", "--once", "--master=local[1]"),
        *(f"--spool={tmp_path / 'spool'}", f"--store={sqlite(tmp_path)}"),
        *(f"--checkpoint={tmp_path / 'checkpoint'}", *options(tmp_path, conf)),
    ]
    environment = {**os.environ, **SMALL_BASE, "SPARK_SUBMIT_OPTS": jvm_options()}
    errors = tmp_path / "errors"
    with Life(command, errors, environment) as life:
        until(lambda: not life.listen(), life.report, LONG_S)
        life.end()
    log = errors.read_text("utf-8", "replace")
    assert len(re.findall(r"batch 0 takes too much memory: .*", log)) >= 2
    assert "batch 0 was begun 2 times and did not come to its end: it is made smaller" in log
    assert sum(line.startswith("batch ") for line in life.lines) >= 2
    check(sqlite(tmp_path), spans)


def test_a_batch_in_which_the_jvm_runs_out_of_memory_is_worked_off_in_pieces(
    tmp_path: Path,
) -> None:
    """It dies of it twice, and the run starts it again, without anybody's help."""
    home = Home(tmp_path / "home")
    spans = fill(home.spool, mib=110)
    ports = free_ports(2)
    command = [
        *(sys.executable, "-m", "batchmill", "run", "--no-web", f"--home={home.folder}"),
        *(f"--http-port={ports[0]}", f"--grpc-port={ports[1]}", "--master=local[1]"),
        *("--keep-spans=off", *options(tmp_path, QUICK_SPARK)),
    ]
    # Beside the heap. Of 64 MiB or more that a task gets it has more than twice as much there.
    java = f"{jvm_options()} -XX:MaxDirectMemorySize=160m"
    environment = {**os.environ, **SMALL_BASE, "SPARK_SUBMIT_OPTS": java}

    def log() -> str:
        return (home.log / "pipeline.log").read_text("utf-8", "replace")

    with Life(command, tmp_path / "errors", environment) as life:
        everything = len(spans)
        until(lambda: read_counted(home.store_url).spans == everything, life.report, LONG_S)
        os.kill(life.pid, signal.SIGTERM)
        life.end()
    assert log().count("the JVM of Spark ended in batch 0: it ran out of memory") >= 2
    assert "batch 0 was begun 2 times and did not come to its end: it is made smaller" in log()
    check(home.store_url, spans)
