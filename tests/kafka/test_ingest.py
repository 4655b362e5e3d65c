"""OTLP senders, a receiver and a real broker, while one of them is killed, stopped or paused."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")
pytest.importorskip("grpc")
pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("uvicorn")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from batchmill.ingest import Receiver, ReceiverSettings
from batchmill.kafka import KafkaSink
from batchmill.spool import Level
from tests.kafka.kit import noise, rows_in
from tests.kit.ingest import PROTOBUF, Answer, ask, ingest, request
from tests.kit.otlp import Traffic
from tests.kit.processes import free_port
from tests.kit.servers.kafka import Broker
from tests.kit.threads import PATIENCE_S, until

pytestmark = pytest.mark.slow(35)

IN_A_REQUEST = 5
REQUESTS = 120
BODIES = [
    request(*range(at, at + IN_A_REQUEST), trace=1 + at % 17)
    for at in range(1, REQUESTS * IN_A_REQUEST, IN_A_REQUEST)
]
EVERY_SPAN = set(range(1, REQUESTS * IN_A_REQUEST + 1))


class Brisk(Traffic):
    """Senders that wait less between requests."""

    PACE_S = 0.01


def spans_in(kafka: Broker, topic: str) -> set[int]:
    """The spans in a topic, by number."""
    return {int(span["span_id"], 16) for span in rows_in(kafka.read(topic))}


def sent(numbers: list[int]) -> set[int]:
    """The spans of requests that were acknowledged."""
    return {
        span
        for number in numbers
        for span in range(number * IN_A_REQUEST + 1, (number + 1) * IN_A_REQUEST + 1)
    }


def test_a_request_ends_in_the_topic(kafka: Broker, tmp_path: Path) -> None:
    """Over HTTP, through the command; no spool is made, and the status tells of the spans."""
    topic = kafka.new_topic(partitions=2)
    with ingest(tmp_path, "--to", f"kafka://{kafka.bootstrap}/{topic}") as running:
        assert running.post(request(1, 2)).status == 200
        assert running.metric("acknowledged_spans_total") == 2
        assert spans_in(kafka, topic) == {1, 2}
    assert not (tmp_path / "spool").exists()
    assert running.status()["acknowledged_spans"] == 2
    assert "unread_bytes" not in running.status()


def test_a_topic_that_is_not_there_ends_the_command(kafka: Broker, tmp_path: Path) -> None:
    """With a message that says what to do."""
    command = [sys.executable, "-m", "batchmill", "ingest", "--home", str(tmp_path)]
    done = subprocess.run(
        [*command, "--http-port=0", "--grpc-port=0", f"--to=kafka://{kafka.bootstrap}/nothing"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "there is no topic nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broker_that_comes_later_is_waited_for(kafka: Broker, tmp_path: Path) -> None:
    """Ingest starts without it, says so, and answers 503; then all goes well by itself."""
    topic = kafka.new_topic()
    kafka.stop()
    with ingest(tmp_path, f"--to=kafka://{kafka.bootstrap}/{topic}") as running:
        refused = running.post(request(1))
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1
        until(lambda: "is not there yet" in running.stderr())
        until(lambda: "batches are refused" in running.stderr())
        until(lambda: running.status()["level"] == "CRITICAL")
        kafka.start()
        until(lambda: running.post(request(2)).status == 200)
        until(lambda: running.status()["level"] == "NORMAL")
        until(lambda: "writing works again" in running.stderr())
    assert 2 in spans_in(kafka, topic)


def test_a_span_too_large_for_the_topic_is_answered(kafka: Broker, tmp_path: Path) -> None:
    """413: the sender does not send it again."""
    topic = kafka.new_topic(max_message_bytes="20000")
    body = large_request(40_000)
    with ingest(tmp_path, f"--to=kafka://{kafka.bootstrap}/{topic}") as running:
        answer = running.post(body)
        assert answer.status == 413
        assert b"max.message.bytes" in answer.body
        assert running.post(request(2)).status == 200
    assert spans_in(kafka, topic) == {2}


def test_killed_at_any_moment_it_has_what_was_acknowledged(kafka: Broker, tmp_path: Path) -> None:
    """SIGKILL, four times, into traffic: every span that a sender was told of is in the topic."""
    topic = kafka.new_topic(partitions=3)
    rng = random.Random(8)
    port = free_port()
    traffic = Brisk(port, BODIES, 4, seed=9)
    with traffic.going():
        for _ in range(4):
            with ingest(
                tmp_path, f"--to=kafka://{kafka.bootstrap}/{topic}", f"--http-port={port}"
            ) as running:
                traffic.release()
                time.sleep(rng.uniform(0, 0.5))  # the moment itself is what is random
                running.process.kill()
            known = sent(list(traffic.acknowledged))
            assert known <= spans_in(kafka, topic)
        with ingest(tmp_path, f"--to=kafka://{kafka.bootstrap}/{topic}", f"--http-port={port}"):
            traffic.finish()
            until(traffic.is_done)
    assert traffic.odd == []
    assert spans_in(kafka, topic) == EVERY_SPAN


def test_a_broker_killed_and_started_again_loses_nothing(kafka: Broker) -> None:
    """Senders hear 503 meanwhile; then it goes on by itself."""
    with nothing_lost(kafka, delivery_timeout_s=2.0) as (traffic, _, _):
        kafka.kill()
        traffic.release()
        until(lambda: traffic.faults > 20)
        kafka.start()


def test_a_paused_broker_is_answered_with_503(kafka: Broker) -> None:
    """As soon as the bound is reached, with Retry-After; then all is taken, and nothing lost."""
    with nothing_lost(kafka, capacity_rows=50) as (_, sink, port):
        kafka.pause()
        held = [threading.Thread(target=post, args=(port, body)) for body in BODIES[:12]]
        for thread in held:
            thread.start()
        until(lambda: sink.level() >= Level.CRITICAL)
        refused = post(port, BODIES[0])
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1
        kafka.resume()
        for thread in held:
            thread.join()


@contextlib.contextmanager
def nothing_lost(kafka: Broker, **settings: Any) -> Iterator[tuple[Brisk, KafkaSink, int]]:
    """Senders at work while something is done to the broker; in the end it has every span."""
    topic = kafka.new_topic(partitions=3)
    with receiving(kafka, topic, retry_after_s=0.1, **settings) as (sink, port):
        traffic = Brisk(port, BODIES, 2, seed=4)
        with traffic.going():
            traffic.release()
            until(lambda: len(traffic.acknowledged) > 5)
            yield traffic, sink, port
            traffic.finish()
            until(traffic.is_done)
    assert traffic.odd == []
    assert spans_in(kafka, topic) == EVERY_SPAN


@contextlib.contextmanager
def receiving(kafka: Broker, topic: str, **settings: Any) -> Iterator[tuple[KafkaSink, int]]:
    """A receiver in this process, for settings that the command has no flags for; its port."""
    with KafkaSink(f"kafka://{kafka.bootstrap}/{topic}", **settings) as sink:
        receiver = Receiver(sink, ReceiverSettings(http_port=0, grpc_port=0))
        ready = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(receiver.serve(ready.set)))
        thread.start()
        try:
            assert ready.wait(PATIENCE_S)
            yield sink, int(receiver.http_address.rpartition(":")[2])
        finally:
            receiver.stop()
            thread.join()


def post(port: int, body: bytes) -> Answer:
    """Send a request to a receiver in this process."""
    return ask(("127.0.0.1", port), "POST", "/v1/traces", body, {"content-type": PROTOBUF})


def large_request(n: int) -> bytes:
    """A request with a span whose attributes have so many letters."""
    message = ExportTraceServiceRequest.FromString(request(1))
    span = message.resource_spans[0].scope_spans[0].spans[0]
    for number in range(0, n, 1000):
        span.attributes.add(key=f"text {number}").value.string_value = noise(1000, number)
    return bytes(message.SerializeToString())
