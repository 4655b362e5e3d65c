"""A topic in the spool's place: the same results, the same guarantees."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("confluent_kafka")

from pyspark.sql import SparkSession

from batchmill import Client
from batchmill.client import EdgeSettings
from batchmill.errors import ConfigError
from batchmill.kafka import (
    KafkaAddress,
    KafkaLoginError,
    KafkaLostError,
    KafkaSink,
    KafkaTopicError,
    MessageRange,
    message_range,
    read_messages,
)
from batchmill.spark import BatchReport, Pipeline, PipelineError, PipelineSettings
from batchmill.spool import SPAN_SOURCE
from batchmill.traces import KeepSettings, SpanReader, TraceQuery
from tests.kit.jvm import java_missing
from tests.kit.pipelines import (
    NOW,
    OF_SPANS,
    START,
    contents,
    counted,
    differences,
    every_events,
    expected,
    local,
    pipeline,
    quarantined_rows,
    stored,
    top_expected,
    top_of,
)
from tests.kit.servers.kafka import Broker, private_broker, send, span_batch
from tests.kit.threads import PATIENCE_S, until
from tests.kit.traces.segments import made_span
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans
from tests.oracle.spans import spans_to_events
from tests.oracle.topn import expected_topn

pytestmark = [
    pytest.mark.slow(70),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]

AHEAD = datetime.fromtimestamp(NOW, UTC) + timedelta(days=1)
SPANS = random_spans(5, 90, start=START, days=1)


def reading(
    spark: SparkSession, folder: Path, broker: Broker, topic: str, **given: Any
) -> Pipeline:
    """A pipeline that reads a topic, some messages at a time."""
    few = PipelineSettings(ttl_days=365, max_batch_messages=given.pop("messages", 12))
    source = given.pop("source", f"kafka://{broker.bootstrap}/{topic}")
    given.setdefault("oal", OF_SPANS)
    return pipeline(spark, folder, spool=None, source=source, settings=few, **given)


def check(running: Pipeline, spans: Any = SPANS) -> None:
    """The store is the oracle's."""
    running.settle(everything=True)
    assert (
        differences(stored(running.store), expected(spans_to_events(spans).events, OF_SPANS)) == []
    )
    assert top_of(running.store) == top_expected(expected_topn(spans))
    assert counted(running.store, "rows")["Span", ""] == len(spans)


def test_spans_of_a_topic_give_the_store_of_the_oracle(
    spark: SparkSession, tmp_path: Path, kafka: Broker
) -> None:
    """In several batches, from several partitions, and by two pipelines one after the other.

    A sender that did not hear the answer sends again: dedup works as with a spool.
    """
    topic = kafka.new_topic(partitions=3)
    first = send(kafka, topic, SPANS[:60])
    with reading(spark, tmp_path, kafka, topic, dedup_s=600) as running:
        assert running.progress().unread_segments == first
        assert len(running.run_available()) > 1
        assert running.progress().unread_segments == 0
    send(kafka, topic, SPANS[60:])
    send(kafka, topic, SPANS[:40])
    with reading(spark, tmp_path, kafka, topic, dedup_s=600) as running:
        assert running.progress().unread_segments > 0
        assert running.progress().lag_s >= 0
        running.run_available()
        check(running)
        assert counted(running.store, "duplicates") == {("Span", "same trace and span id"): 40}
        # What a batch was decoded into is gone.
        assert list((tmp_path / "checkpoint" / "kafka").glob("*")) == []


def test_any_split_of_the_messages_makes_the_same_store(
    spark: SparkSession, tmp_path: Path, kafka: Broker
) -> None:
    """In one batch or many, of one partition or several, in another order: states and values."""
    made = []
    for number, (partitions, messages, step) in enumerate(((1, 1000, 1), (3, 25, -1))):
        topic = kafka.new_topic(partitions=partitions)
        for at in range(0, len(SPANS), 30)[::step]:
            send(kafka, topic, SPANS[at : at + 30])
        folder = tmp_path / str(number)
        folder.mkdir()
        with reading(spark, folder, kafka, topic, messages=messages) as running:
            assert (len(running.run_available()) > 1) is (messages < 1000)
            check(running)
            made.append((contents(running.store), top_of(running.store)))
    assert made[0] == made[1]


def test_deltas_beside_spans_of_a_topic(spark: SparkSession, tmp_path: Path, kafka: Broker) -> None:
    """Clients that aggregate send to the topic of the spans: the store has both, once.

    Those of one with another script are quarantined, with a reason.
    """
    topic = kafka.new_topic(partitions=3)
    address = f"kafka://{kafka.bootstrap}/{topic}"
    send(kafka, topic, SPANS[:45])
    rows = every_events(3, ["Service"], 80)["Service"]
    hour = EdgeSettings(period_s=3600)
    for some in (rows[:30], rows[30:]):
        with Client(address, aggregate=OF_SPANS, edge=hour) as client:
            client.emit_many([_without_nulls(row) for row in some], "Service")
    with Client(address, aggregate="cpm = from(Service.*).count();", edge=hour) as client:
        client.emit_many([_without_nulls(row) for row in rows[:7]], "Service")
    send(kafka, topic, SPANS[45:])
    with reading(spark, tmp_path, kafka, topic, messages=25) as running:
        assert len(running.run_available()) > 1
        running.settle(everything=True)
        events = dict(spans_to_events(SPANS).events)
        events["Service"] = [*events["Service"], *rows]
        assert differences(stored(running.store), expected(events, OF_SPANS)) == []
        assert counted(running.store, "rows")["Span", ""] == len(SPANS)
        assert counted(running.store, "quarantined") == {("Service", "other metrics"): 7}
        (reason,) = (local(running.quarantine) / "Service").glob("*.reason")
        assert "cpm: from(Service.*).count(), here from(Service.*).cpm()" in reason.read_text()


def _without_nulls(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def test_a_batch_that_comes_again_changes_nothing(
    spark: SparkSession, tmp_path: Path, kafka: Broker
) -> None:
    """It fails after its commit, and Spark asks for it again in the next pipeline."""

    def fail(report: BatchReport) -> None:
        raise KeyError("pulled the plug")

    topic = kafka.new_topic()
    send(kafka, topic, SPANS)
    with (
        reading(spark, tmp_path, kafka, topic, on_batch=fail) as running,
        pytest.raises(KeyError, match="pulled the plug"),
    ):
        running.run_available()
    with reading(spark, tmp_path, kafka, topic) as running:
        applied = [report.applied for report in running.run_available()]
        assert applied == [False, *[True] * (len(applied) - 1)]
        check(running)


def test_what_does_not_fit_is_set_aside(spark: SparkSession, tmp_path: Path, kafka: Broker) -> None:
    """With its reason and a counter; the stream goes on.

    What is no message of ours, with its bytes; and a span that lies too far ahead, among others of
    its trace: the rest of them counts.
    """
    topic = kafka.new_topic()
    odd = [b"\xff\xff\xff", b'{"json": 1}', b""]
    ahead = {**SPANS[0], "span_id": f"{1:016x}", "time": AHEAD, "end_time": AHEAD}
    send(kafka, topic, [*SPANS, ahead], raw=odd)
    with reading(spark, tmp_path, kafka, topic, messages=1000) as running:
        running.run_available()
        check(running)
        quarantined = counted(running.store, "quarantined")
        rows = quarantined_rows(local(running.quarantine))
    assert quarantined.pop(("Span", "not a message of spans")) == 3
    assert sum(quarantined.values()) == 1
    values = [bytes(row["_value"]) for row in rows if row.get("_value") is not None]
    assert sorted(values) == sorted(odd)
    (row,) = [row for row in rows if row.get("_value") is None]
    assert row["span_id"] == ahead["span_id"]


def test_a_broker_that_goes_and_comes_back(spark: SparkSession, tmp_path: Path) -> None:
    """While a stream runs: it waits, and continues by itself; nothing is lost or counted twice."""
    with private_broker() as broker:
        topic = broker.new_topic(partitions=2)
        send(broker, topic, SPANS[:45])
        reports: list[int] = []

        def note(report: BatchReport) -> None:
            reports.append(report.stats.rows)

        with reading(spark, tmp_path, broker, topic, on_batch=note, messages=1000) as running:
            running.start(0.1)
            assert not running.await_end(0.1)
            until(lambda: reports, "the first batch")
            broker.stop()
            assert not running.await_end(2.0)
            broker.start()
            send(broker, topic, SPANS[45:])
            until(
                lambda: counted(running.store, "rows").get(("Span", ""), 0) == 90,
                "all spans are in",
            )
            assert not running.await_end(0)
        with reading(spark, tmp_path, broker, topic) as running:
            check(running)


def test_no_broker_and_no_topic_are_reported(
    spark: SparkSession, tmp_path: Path, kafka: Broker
) -> None:
    """With what to do, before anything is begun."""
    with (
        reading(spark, tmp_path, kafka, "nobody-made-it") as running,
        pytest.raises(KafkaTopicError, match=r"no topic nobody-made-it .* create it"),
    ):
        running.run_available()
    with pytest.raises(ConfigError, match="not both"):
        pipeline(spark, tmp_path, source="kafka://localhost:9092/spans")


def test_a_topic_behind_tls_and_a_login(spark: SparkSession, tmp_path: Path) -> None:
    """Writer and reader take the same librdkafka options; a wrong password is an error."""
    with private_broker(tls=shutil.which("openssl") is not None) as broker:
        topic = broker.new_topic(partitions=2)
        source = f"kafka://{broker.login}/{topic}"
        with KafkaSink(source, options=broker.login_options()) as sink:
            sink.submit(SPAN_SOURCE, span_batch(SPANS)).result(PATIENCE_S)
        wrong = broker.login_options("wrong")
        with (
            reading(spark, tmp_path, broker, topic, source=source, kafka_options=wrong) as running,
            pytest.raises(KafkaLoginError, match="correct the user, the password"),
        ):
            running.run_available()
        right = broker.login_options()
        with reading(
            spark, tmp_path, broker, topic, source=source, kafka_options=right, messages=1000
        ) as running:
            assert len(running.run_available()) == 1
            assert running.progress().unread_segments == 0
            check(running)


def test_messages_that_the_topic_has_lost_are_reported(
    spark: SparkSession, tmp_path: Path, kafka: Broker
) -> None:
    """Spans were acknowledged and are gone unread: that is an error, not a gap."""
    topic = kafka.new_topic()
    send(kafka, topic, SPANS[:30])
    with reading(spark, tmp_path, kafka, topic, messages=10) as running:
        running.run_available()
    kafka.delete_records(topic)
    send(kafka, topic, SPANS[30:60])
    kafka.delete_records(topic)
    send(kafka, topic, SPANS[60:])
    with (
        reading(spark, tmp_path, kafka, topic) as running,
        pytest.raises(PipelineError, match=r"no longer has .* were not read"),
    ):
        running.run_available()


def test_ranges_of_messages_are_read_whole(kafka: Broker) -> None:
    """Of several partitions at once; what was deleted since is an error, or skipped on demand."""
    topic = kafka.new_topic(partitions=2)
    address = KafkaAddress.parse(f"kafka://{kafka.bootstrap}/{topic}")
    send(kafka, topic, SPANS[:60])

    def read(first: int, skip_lost: bool = False) -> list[tuple[int, int]]:
        ranges = [
            MessageRange(part, first, end) for part, (_, end) in message_range(address).items()
        ]
        several = read_messages(address, ranges, {}, skip_lost=skip_lost)
        return sorted((own.partition, own.offset) for some in several for own in some)

    def there(first: int) -> list[tuple[int, int]]:
        ends = message_range(address).items()
        return [(part, at) for part, (low, end) in ends for at in range(max(low, first), end)]

    assert len(there(1)) > 4
    assert read(1) == there(1)
    kafka.delete_records(topic)  # of partition 0
    with pytest.raises(KafkaLostError, match="partition 0 was to be read from 1 to"):
        read(1)
    assert read(1, skip_lost=True) == there(1)
    assert {part for part, _ in there(1)} == {1}
    send(kafka, topic, SPANS[60:])
    assert read(1, skip_lost=True) == there(1)
    assert {part for part, _ in there(1)} == {0, 1}


def test_spans_of_a_topic_are_kept(spark: SparkSession, tmp_path: Path, kafka: Broker) -> None:
    """With keep_spans they can be searched and read as those of a spool, with their events."""
    event = {"time": 1_709_208_000_000_000, "name": "retry", "attributes": {"n": "2"}}
    traced = made_span(7, 1, name="GET /kept", events=[event], user__id="7 8")
    topic = kafka.new_topic(partitions=2)
    send(kafka, topic, [*SPANS, traced])
    keeping = {"keep_spans": tmp_path / "traces", "keep": KeepSettings(max_age_h=1e6)}
    with reading(spark, tmp_path, kafka, topic, **keeping) as running:
        assert len(running.run_available()) > 1
    reader = SpanReader(tmp_path / "traces")
    assert (reader.stats().spans, reader.stats().dropped) == (len(SPANS) + 1, {})
    always: dict[str, Any] = {"start_us": 0, "end_us": int(NOW) * 1_000_000, "limit": 500}
    result = reader.search(TraceQuery(**always, kind="SERVER"))
    served = {span["trace_id"] for span in [*SPANS, traced] if span["kind"] == "SERVER"}
    assert {trace.trace_id for trace in result.traces} == served
    (trace,) = reader.search(TraceQuery(**always, attributes={"user.id": "7 8"})).traces
    read = reader.trace(trace.trace_id)
    assert read is not None
    assert [(span.name, list(span.events)) for span in read.spans] == [("GET /kept", [event])]
