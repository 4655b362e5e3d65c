"""The driver is killed again and again, with its JVM; the store is still that of the oracle."""

from __future__ import annotations

import faulthandler
import json
import random
from collections import Counter
from pathlib import Path

import grpc
import pytest

from tests.kit.jvm import java_missing

pytest.importorskip("pyspark")
pytest.importorskip("confluent_kafka")

from batchmill.outbox import Outbox
from batchmill.store import open_store
from tests.kit.exporters import NAME, QUICK, added_up, exporter_of, last_totals, running, stored
from tests.kit.otlp import GrpcReceiver, Verdict
from tests.kit.pipelines import (
    MIXED_OAL,
    QUICK_SPARK,
    START,
    differences,
    expected_whole,
    mixed_spool,
    whole,
    write_segment,
)
from tests.kit.servers.kafka import Broker, send
from tests.kit.threads import until
from tests.oracle.generate import random_spans
from tests.system.kills.driver import KilledRun, shots

pytestmark = [
    pytest.mark.slow(220),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]

SUMMED = ("ep_count", "ep_codes", "relation_from")
"""Metrics whose increments add up."""
NOT_TAKEN = Verdict(grpc.StatusCode.UNAVAILABLE)
ANSWER_LOST = Verdict(grpc.StatusCode.UNAVAILABLE, taken=True)


@pytest.fixture(autouse=True)
def no_stacks_on_the_way() -> None:
    """These take minutes; pytest would print every thread's stack before their time is up."""
    faulthandler.cancel_dump_traceback_later()


def test_a_killed_driver_leaves_the_store_of_the_oracle(tmp_path: Path) -> None:
    """Killed at random moments, before, inside and after commits, in its hardest configuration.

    A spool of events, deltas and spans, some spans delivered twice (they count once), segments
    removed once they are read, and an exporter to a collector that loses requests and answers. In
    the end the store is the oracle's, the spool is empty, and the collector has every commit:
    totals are the store's, and increments, each commit's once, add up to them.
    """
    rng = random.Random(4)
    events = mixed_spool(tmp_path / "spool", rng, typed=10, spans=7, deltas=4)
    again = rng.sample(events["Span"], 40)
    write_segment(tmp_path / "spool", "Span", again, "again")
    url = f"sqlite:///{tmp_path / 'metrics.db'}"
    outbox = Outbox.open(tmp_path / "checkpoint")
    luck = random.Random(12)

    def judge(number: int) -> Verdict:
        return luck.choice((Verdict(), Verdict(), NOT_TAKEN, ANSWER_LOST))

    run = KilledRun(tmp_path, url, dedup_s=600, remove_read=True, outbox=True)
    with open_store(url, ttl_days=365) as store, GrpcReceiver(judge) as receiver:
        with running(exporter_of(store, outbox, receiver.target, QUICK)):
            deaths = run.kill_at(shots(rng, at_any_time=5, making=6, inside=7, after=5, settling=2))
            until(lambda: not store.outbox(outbox.place), "all is exported")
        points = receiver.points()
        totals = stored(store)
        counters = {key[0]: n for key, n in store.counters().items() if key[1] == NAME}

    moments = Counter(death.moment for death in deaths)
    assert len(deaths) == 25
    assert min(moments[f"{when} a commit"] for when in ("before", "inside", "after")) >= 2, moments
    assert run.made_again, "no batch was lost and made again"
    assert run.replayed, "no batch was replayed that the store had already"

    wanted = expected_whole(MIXED_OAL, events)
    wanted["counter", "duplicates", "Span", "same trace and span id"] = len(again)
    # The oracle knows nothing of exporters.
    held = {key: n for key, n in whole(url).items() if key[:2] not in _counters(counters)}
    assert differences(held, wanted) == []
    progress = json.loads((tmp_path / "checkpoint" / "progress.json").read_text())
    assert (progress["spans"], progress["duplicates"]) == (len(events["Span"]), len(again))
    assert list((tmp_path / "spool").rglob("*.parquet")) == []

    assert last_totals(points) == totals
    for name in SUMMED:
        total = {key: n for key, n in totals.items() if key[0] == f"batchmill.{name}"}
        assert added_up(points, name) == total, name
        assert total
    commits = {point.commit for point in points} - {""}
    assert commits == {f"{outbox.place}/{number}" for number in range(1, len(commits) + 1)}
    # The file of a commit that was killed is removed by the next life.
    assert list(outbox.folder.glob("*/*.arrow")) == []
    assert counters.keys() == {"exported values", "export retries"}


def _counters(names: dict[str, int]) -> set[tuple[str, str]]:
    return {("counter", name) for name in names}


def test_a_driver_killed_between_kafka_and_postgresql(
    tmp_path: Path, kafka: Broker, postgres_url: str
) -> None:
    """Spans of a topic, a store on a server: killed around commits, the store is exact."""
    topic = kafka.new_topic(partitions=2)
    spans = random_spans(3, 80, start=START)
    for number in range(0, len(spans), 25):
        send(kafka, topic, spans[number : number + 25])
    run = KilledRun(
        tmp_path,
        postgres_url,
        source=f"kafka://{kafka.bootstrap}/{topic}",
        batch_messages=6,
        conf=QUICK_SPARK,
    )
    rng = random.Random(11)
    deaths = run.kill_at(shots(rng, at_any_time=0, making=1, inside=1, after=1, settling=0))
    assert len(deaths) == 3
    assert "inside a commit" in {death.moment for death in deaths}
    assert differences(whole(postgres_url), expected_whole(MIXED_OAL, {"Span": spans})) == []
