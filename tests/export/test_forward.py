"""Traces and logs handed on to a real Kafka broker: never waited for, every drop counted."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from pathlib import Path

import pytest

pytest.importorskip("confluent_kafka", reason="install it: pip install 'batchmill[kafka]'")

import grpc
from confluent_kafka import Consumer, TopicPartition
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceStub
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from batchmill.errors import ConfigError
from batchmill.export import KafkaForwarder, Target
from batchmill.export.trace_split import split_by_trace
from tests.kit.ingest import JSON, PROTOBUF, QUICK, ingest, request, request_json, span_id
from tests.kit.servers.kafka import Broker
from tests.kit.threads import PATIENCE_S, WAIT_S, until

FOUR = {"stringValue": "four"}
NOBODY = Target.parse("kafka://127.0.0.1:1/topic")


def messages(broker: Broker, topic: str) -> list[bytes]:
    """What is in a topic of one partition."""
    return [value for _, value in records(broker, topic)]


def records(broker: Broker, topic: str) -> list[tuple[bytes | None, bytes]]:
    """The same with their keys."""
    settings = {"bootstrap.servers": broker.bootstrap, "group.id": "nobody"}
    pairs: list[tuple[bytes | None, bytes]] = []
    with contextlib.closing(Consumer({**settings, "enable.auto.commit": False})) as consumer:
        place = TopicPartition(topic, 0, 0)
        offsets = consumer.get_watermark_offsets(place, timeout=PATIENCE_S)
        assert offsets is not None
        consumer.assign([place])
        for _ in range(offsets[1]):
            message = consumer.poll(PATIENCE_S)
            assert message is not None
            assert message.error() is None
            pairs.append((message.key(), message.value() or b""))
    return pairs


def ids_in(broker: Broker, topic: str) -> list[str]:
    """The spans in a topic."""
    return [id_ for body in messages(broker, topic) for id_ in ids_of(body)]


def ids_of(body: bytes) -> list[str]:
    """The spans of a request."""
    return [
        span.span_id.hex()
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def logs(*bodies: str) -> bytes:
    """A request with records of logs."""
    message = ExportLogsServiceRequest()
    records = message.resource_logs.add().scope_logs.add().log_records
    for body in bodies:
        records.add().body.string_value = body
    return bytes(message.SerializeToString())


def test_logs_are_handed_on(kafka: Broker, tmp_path: Path) -> None:
    """Over HTTP, as protobuf or JSON, and over gRPC; without a key, and what is none is refused."""
    topic = kafka.new_topic()
    target = f"kafka://{kafka.bootstrap}/{topic}"
    with ingest(tmp_path / "home", *QUICK, "--export-logs", target) as running:
        body = gzip.compress(logs("one", "two"))
        assert running.post(body, path="/v1/logs", content_encoding="gzip").status == 200
        with grpc.insecure_channel(running.grpc) as channel:
            LogsServiceStub(channel).Export(  # type: ignore[no-untyped-call]
                ExportLogsServiceRequest.FromString(logs("three")), timeout=PATIENCE_S
            )
        text = json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [{"body": FOUR}]}]}]})
        answer = running.post(text.encode(), JSON, path="/v1/logs")
        assert (answer.status, answer.json()) == (200, {})
        assert running.post(b"nonsense", path="/v1/logs").status == 400
        assert running.post(b"nonsense", JSON, path="/v1/logs").status == 400
        assert running.post(b"x", "text/plain", path="/v1/logs").status == 415
        until(lambda: running.status()["forwarded"]["logs"]["sent"] == 4)
        assert running.status()["forwarded"]["logs"]["dropped"] == {}
    expected = [logs("one", "two"), logs("three"), logs("four")]
    assert records(kafka, topic) == [(None, message) for message in expected]


def test_what_is_stored_is_handed_on(kafka: Broker, tmp_path: Path) -> None:
    """As it came, without its compression; logs that nobody wants are discarded."""
    topic = kafka.new_topic()
    target = f"kafka://{kafka.bootstrap}/{topic}"
    with ingest(tmp_path / "home", *QUICK, "--export-traces", target) as running:
        assert running.post(logs("one"), path="/v1/logs").status == 200
        for number in range(1, 6):
            assert running.post(request(number)).status == 200
        until(lambda: running.status()["forwarded"]["traces"]["sent"] == 5)
        stats = running.status()["forwarded"]["traces"]
    assert (stats["offered"], stats["dropped"]) == (5, {})
    assert sorted(messages(kafka, topic)) == [request(number) for number in range(1, 6)]


def test_each_trace_is_a_message_with_its_key(kafka: Broker, tmp_path: Path) -> None:
    """As ingest's own messages have it: a trace is in one partition; so is one that came in JSON.

    A span that ingest rejects is handed on with the others, and counts as nothing.
    """
    topic = kafka.new_topic()
    mixed = ExportTraceServiceRequest.FromString(request(1, 2, 0))
    for number in (3, 4):
        mixed.MergeFromString(request(number, trace=number))
    with ingest(
        tmp_path / "home", *QUICK, "--export-traces", f"kafka://{kafka.bootstrap}/{topic}"
    ) as running:
        assert running.post(mixed.SerializeToString()).status == 200
        assert running.post(request_json(5), JSON).status == 200
        until(lambda: running.status()["forwarded"]["traces"]["sent"] == 5)
        assert running.status()["forwarded"]["traces"]["offered"] == 5
    ids_by_trace: dict[int, list[str]] = {}
    for key, body in records(kafka, topic):
        assert key is not None
        ids_by_trace.setdefault(int.from_bytes(key, "big"), []).extend(ids_of(body))
    ids = [span_id(number) for number in range(6)]
    assert ids_by_trace == {1: [ids[1], ids[2], ids[0], ids[5]], 3: [ids[3]], 4: [ids[4]]}


@pytest.mark.system
def test_a_broker_that_is_away_holds_up_no_sender(tmp_path: Path) -> None:
    """Spans are acknowledged as ever; at the end those not handed on are counted."""
    with ingest(tmp_path / "home", *QUICK, "--export-traces", str(NOBODY)) as running:
        for number in range(1, 6):
            assert running.post(request(number)).status == 200
        assert running.post(request_json(6), JSON).status == 200
        until(lambda: running.status()["forwarded"]["traces"]["in_hand"] == 6)
        assert running.status()["forwarded"]["traces"]["dropped"] == {}
        assert len(running.spans()) == 6


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    """By bytes and by number; what is offered is sent, dropped or in hand."""
    forwarder = KafkaForwarder(NOBODY, max_bytes=1000, timeout_s=1)
    for _ in range(12):
        forwarder.offer(b"x" * 100, PROTOBUF, 2)
    forwarder.offer(b"{}", "text/plain", 5)
    stats = forwarder.stats()
    assert stats["dropped"] == {"too many bytes in hand": 4, "neither protobuf nor JSON": 5}
    assert stats["in_hand_bytes"] == 1000
    forwarder.close(0.1)
    stats = forwarder.stats()
    assert stats["offered"] == 29 == sum(stats["dropped"].values())
    assert (stats["sent"], stats["in_hand"], stats["in_hand_bytes"]) == (0, 0, 0)


def test_what_traces_share_counts_once_for_each() -> None:
    """Cut by trace a request may get larger than it was: it keeps to the bound, and is counted."""
    message = ExportTraceServiceRequest.FromString(request(1))
    for number in range(2, 11):
        extra = ExportTraceServiceRequest.FromString(request(number, trace=number))
        message.resource_spans[0].scope_spans.extend(extra.resource_spans[0].scope_spans)
    message.resource_spans[0].resource.attributes.add(key="text").value.string_value = "x" * 1000
    forwarder = KafkaForwarder(NOBODY, max_bytes=5000, timeout_s=1)
    forwarder.offer(message.SerializeToString(), PROTOBUF, 10)
    until(lambda: forwarder.stats()["dropped"] == {"too many bytes in hand": 6})
    stats = forwarder.stats()
    assert (stats["offered"], stats["in_hand"]) == (10, 4)
    assert 4000 < stats["in_hand_bytes"] <= 5000
    forwarder.close(0.1)


def test_json_that_is_no_otlp_is_dropped_and_counted() -> None:
    """Ingest refuses it; who hands it over otherwise has it counted."""
    forwarder = KafkaForwarder(NOBODY, timeout_s=1)
    for body in (b"[]", b"nonsense", b'{"resourceSpans": 7}'):
        forwarder.offer(body, JSON, 2)
    until(lambda: forwarder.stats()["dropped"] == {"JSON that is not OTLP": 6})
    assert forwarder.stats()["in_hand_bytes"] == 0
    forwarder.close(0.1)


def test_a_body_that_ends_early_is_no_request() -> None:
    """It is told, and never read past its end; whole, it is one."""
    body = request(1) + request(2, trace=2)
    ids = [trace.to_bytes(16, "big") for trace in (1, 2)]
    assert [trace.trace_id for trace in split_by_trace(body)] == ids
    for end in range(1, len(body)):
        with contextlib.suppress(ValueError):
            assert sum(trace.spans for trace in split_by_trace(body[:end])) < 2


def test_a_full_queue_drops_and_never_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its strategy is IF_POSSIBLE."""
    started, release = threading.Event(), threading.Event()

    def hold(self: KafkaForwarder, message: object) -> bool:
        started.set()
        assert release.wait(WAIT_S)
        self._settle(1, 1, "held by the test")
        return True

    monkeypatch.setattr(KafkaForwarder, "_put", hold)
    forwarder = KafkaForwarder(NOBODY, buffer_size=3)
    forwarder.offer(b"x", PROTOBUF, 1)
    assert started.wait(WAIT_S)
    for _ in range(10):
        forwarder.offer(b"x", PROTOBUF, 1)
    assert forwarder.stats()["dropped"]["queue full"] >= 7
    release.set()
    forwarder.close()
    stats = forwarder.stats()
    assert stats["offered"] == 11 == sum(stats["dropped"].values())


def test_a_broker_that_stood_still_gets_what_waited(kafka: Broker) -> None:
    """Within its time and its bound."""
    topic = kafka.new_topic()
    forwarder = KafkaForwarder(Target.parse(f"kafka://{kafka.bootstrap}/{topic}"))
    forwarder.offer(request(1), PROTOBUF, 1)
    until(lambda: forwarder.stats()["sent"] == 1)
    kafka.pause()
    try:
        forwarder.offer(request(2), PROTOBUF, 1)
        assert forwarder.stats()["in_hand"] == 1
    finally:
        kafka.resume()
    until(lambda: forwarder.stats()["sent"] == 2)
    forwarder.close()
    assert ids_in(kafka, topic) == [span_id(1), span_id(2)]


def test_only_kafka_takes_traces() -> None:
    """And the error says so."""
    with pytest.raises(ConfigError, match="kafka://"):
        KafkaForwarder(Target.parse("otlp+grpc://host"))
