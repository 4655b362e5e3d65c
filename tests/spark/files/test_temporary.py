"""Temporary files of a pipeline that runs: what Spark shuffles, and what else it writes."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

import pytest

from tests.kit.jvm import java_missing, jvm_options
from tests.kit.pipelines import OF_SPANS, QUICK_SPARK, START, sqlite, write_segment
from tests.kit.processes import Life
from tests.kit.threads import until
from tests.oracle.generate import random_spans

WARM, MORE = 5, 30
"""Batches until Spark has everything that it keeps, and after that."""


@pytest.mark.slow(30)
@pytest.mark.system
@pytest.mark.skipif(java_missing() is not None, reason=java_missing() or "")
def test_temporary_files_do_not_grow_with_batches(tmp_path: Path) -> None:
    """After 35 batches there are no more files, and no more bytes, than after five; none is left
    of a shuffle.

    Spark itself removes the files of a shuffle when the JVM collects its garbage, and has it do so
    every two minutes: not in this test.
    """
    spans = random_spans(3, 70, start=START, days=1)
    spool, temporary = tmp_path / "spool", tmp_path / "tmp"
    script = tmp_path / "metrics.oal"
    script.write_text(OF_SPANS)
    conf = {**QUICK_SPARK, "spark.cleaner.periodicGC.interval": "1h"}
    command = [
        *(sys.executable, "-m", "batchmill", "pipeline", f"--oal={script}", f"--spool={spool}"),
        *(f"--store={sqlite(tmp_path)}", f"--checkpoint={tmp_path / 'checkpoint'}"),
        *(f"--temporary={temporary}", "--remove-read", "--dedup=10m", "--ttl-days=365"),
        *("--master=local[2]", "--trigger=0.05"),
        *(f"--conf={key}={value}" for key, value in conf.items()),
    ]
    environment = os.environ | {"SPARK_SUBMIT_OPTS": jvm_options(), "SPARK_LOCAL_IP": "127.0.0.1"}
    with Life(command, tmp_path / "errors", environment) as life:
        for batch in range(WARM + MORE):
            if batch == WARM:
                files, size = in_use(temporary)
                assert files > 0
            write_segment(spool, "Span", spans[batch :: WARM + MORE], str(batch), batch)
            life.must_hear(rf"batch {batch}: .*")

        def is_bounded() -> bool:
            now = in_use(temporary)
            return now[0] <= files and now[1] <= size and not [*temporary.rglob("shuffle_*")]

        until(is_bounded, lambda: f"{in_use(temporary)} files and bytes, {(files, size)} before")


def in_use(folder: Path) -> tuple[int, int]:
    """How many files there are below a folder, and how many bytes they have."""
    sizes = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # it was just removed
            status = path.stat()
            if not stat.S_ISDIR(status.st_mode):
                sizes.append(status.st_size)
    return len(sizes), sum(sizes)
