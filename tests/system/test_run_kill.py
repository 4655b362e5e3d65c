"""The whole road, from OTLP clients to the store, while its processes are killed."""

from __future__ import annotations

import faulthandler
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.kit.jvm import java_missing

pytest.importorskip("pyspark")
pytest.importorskip("grpc")
pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("uvicorn")

from pyspark.sql import SparkSession

from batchmill.oal import core_script
from batchmill.run import Home, spool_backlog
from batchmill.spark import Pipeline
from tests.kit.otlp import Traffic, as_received, nearly_in_order, otlp, sizes
from tests.kit.pipelines import MIXED_OAL, differences, expected_whole, whole
from tests.kit.processes import free_ports
from tests.oracle.generate import random_spans
from tests.system.kills.run import Road, Strike, few_strikes, many_strikes, say

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]

SOAK = bool(os.environ.get("BATCHMILL_SOAK"))
SCRIPT = core_script().read_text("utf-8") if SOAK else MIXED_OAL
"""A driver that was just started takes 20 s for its first batch of all core metrics."""
SOAK_S = 120.0
IN_A_REQUEST = 5
LONG_AGO = datetime(2025, 6, 1, 22, 57, tzinfo=UTC)
"""No test's clock is before that."""
SAME = ("counter", "duplicates", "Span", "same trace and span id")


@pytest.fixture(autouse=True)
def no_stacks_on_the_way() -> None:
    """It takes minutes; pytest would print every thread's stack before its time is up."""
    faulthandler.cancel_dump_traceback_later()


def test_whatever_is_killed_the_store_is_that_of_the_oracle(
    spark: SparkSession, tmp_path: Path
) -> None:
    """SIGKILL of ingest, driver and supervisor: every span counts, and counts once."""
    rng = random.Random(5)
    strikes = many_strikes(rng, 60) if SOAK else few_strikes(rng)
    made = as_received(random_spans(11, 4000 if SOAK else 600, start=LONG_AGO))
    # Partners are not far apart: none of them waits for the other for minutes.
    spans = nearly_in_order(made, len(made) // 5, rng)
    requests = [spans[at : at + IN_A_REQUEST] for at in range(0, len(spans), IN_A_REQUEST)]
    home = Home(tmp_path / "home")
    http_port, grpc_port = free_ports(2)
    bodies = [otlp(request) for request in requests]
    traffic = Traffic(http_port, bodies, min(20, len(strikes)), seed=6)
    script = tmp_path / "metrics.oal"
    script.write_text(SCRIPT, "utf-8")
    road = Road(home, (http_port, grpc_port), script)
    with road.going(), traffic.going():
        road.await_ingest()
        kill(road, traffic, strikes)
        traffic.finish()
        road.until(traffic.is_done)
        road.await_pipeline()
        road.end()
    assert spool_backlog(home.spool).count == 0, road.report()
    settle(spark, home, script)

    assert traffic.odd == []
    assert {"ingest", "pipeline", "supervisor"} == set(road.died)
    content = whole(home.store_url)
    again = sizes(requests, traffic.acknowledged) - len(spans)
    say(
        f"{Counter(road.died)}; {traffic.faults} requests not answered; {len(spans)} spans, "
        f"{again} acknowledged again, {content.get(SAME, 0)} dropped as duplicates"
    )
    assert content.pop(SAME) >= again  # also what was stored, and its answer lost
    assert content["counter", "rows", "Span", ""] == len(spans)
    events = {"Span": spans}
    assert differences(content, expected_whole(SCRIPT, events)) == []


def kill(road: Road, traffic: Traffic, strikes: Sequence[Strike]) -> None:
    """A portion of the traffic, then a strike into it, and so on."""
    end_s = time.monotonic() + SOAK_S
    for strike in strikes:
        traffic.release()
        road.strike(strike)
        if SOAK and time.monotonic() > end_s:
            break


def settle(spark: SparkSession, home: Home, script: Path) -> None:
    """No more comes: let go of spans that wait for a partner."""
    with Pipeline(
        oal=script,
        spool=home.spool,
        store=home.store_url,
        checkpoint=home.checkpoint,
        quarantine=home.quarantine,
        spark=spark,
        dedup_s=600,
        remove_read=True,
    ) as pipeline:
        pipeline.run_available()
        pipeline.settle(everything=True)
