"""A batch that hangs while the pipeline reports: the status says which one, and for how long.

``tests/run/test_status.py`` has the bound, and the cases that status distinguishes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from batchmill.cli import main
from batchmill.files import read_json, write_json
from batchmill.run import Home
from batchmill.spark import PipelineSettings
from batchmill.store import Batch, CommitResult, open_store
from tests.kit.pipelines import (
    SMALL,
    differences,
    endpoint_events,
    expected_of,
    pipeline,
    stored,
    write_segment,
)
from tests.kit.threads import Gate, until

ROWS = endpoint_events(60)
TARGET_S = 0.001
"""Five times as much is over at once."""


def test_a_commit_that_hangs_is_in_the_status(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By its number and since when, until it has come to its end."""
    monkeypatch.setattr("batchmill.spark.input.spool._POLL_S", 0.05)
    home = Home(tmp_path / "home")
    home.prepare()
    pipeline_state = {"state": "running", "pid": os.getpid()}
    processes = {"ingest": {"state": "running"}, "pipeline": pipeline_state}
    write_json(home.supervisor, {"written_at": time.time() + 3600, "processes": processes})
    write_segment(home.spool, "Endpoint", ROWS)
    monkeypatch.setattr(sys, "argv", ["batchmill", "status", f"--home={home.folder}", "--json"])

    def status() -> dict[str, Any]:
        main()
        return dict(json.loads(capsys.readouterr().out))

    with (
        home.locked(),
        open_store(home.store_url) as store,
        pipeline(
            spark,
            tmp_path,
            oal=SMALL,
            store=store,
            spool=home.spool,
            checkpoint=home.checkpoint,
            settings=PipelineSettings(target_batch_s=TARGET_S, ttl_days=3650),
            clock=time.time,
        ) as running,
        Gate() as gate,
    ):
        commit = store.commit

        def hold(batch: Batch) -> CommitResult:
            gate.wait()
            return commit(batch)

        monkeypatch.setattr(store, "commit", hold)
        began = time.time()
        running.start(0.0)
        gate.wait_entered()
        shown: Any = until(lambda: (read_json(home.progress) or {}).get("running"))
        assert (shown["batch"], shown["usual_s"]) == (0, TARGET_S)
        assert began - 1 < shown["since"] < time.time() + 1

        monkeypatch.setattr("batchmill.run.state.LONG_BATCH_S", 1e9)
        assert status()["long_batch"] is None
        monkeypatch.setattr("batchmill.run.state.LONG_BATCH_S", 0.0)
        report = until(lambda: (now := status())["long_batch"] and now)
        assert (report["health"], report["long_batch"]["batch"]) == ("degraded", 0)
        reasons = "; ".join(report["reasons"])
        assert "batch 0 has been running for " in reasons
        assert "it waits for batch 0" in reasons
        assert "not responding" not in reasons

        gate.open()
        until(lambda: status()["last_batch"] == 0 and status()["pipeline"]["running"] is None)
        assert status()["long_batch"] is None
        assert differences(stored(store), expected_of(ROWS)) == []
