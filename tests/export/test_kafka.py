"""Metrics to a real Kafka broker: in order by entity, and nothing lost while the broker is away."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("confluent_kafka", reason="install it: pip install 'batchmill[kafka]'")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from tests.kit.exporters import (
    QUICK,
    Mill,
    check_all_arrived,
    last_totals,
    measurements,
    one,
    running,
    stored,
)
from tests.kit.otlp import Point, points_of
from tests.kit.servers.kafka import Broker
from tests.kit.threads import until

__all__ = ["one"]

SETTINGS = dataclasses.replace(QUICK, timeout_s=2.0, drain_s=10.0)


def target(broker: Broker, topic: str) -> str:
    """The address of a topic."""
    return f"kafka://{broker.bootstrap}/{topic}"


def points(broker: Broker, topic: str) -> list[Point]:
    """All points in a topic; each message speaks of the entity that is its key, and no other."""
    all_points: list[Point] = []
    for record in broker.read(topic):
        some = points_of(ExportMetricsServiceRequest.FromString(record.value))
        assert {point.entity for point in some} == {record.key.decode()}
        all_points += some
    return all_points


def test_every_change_arrives_by_entity(one: Mill, kafka: Broker) -> None:
    """Over several partitions, the last total of each value is the store's."""
    topic = kafka.new_topic(partitions=3)
    exporter = one.exporter(target(kafka, topic), SETTINGS)
    with running(exporter):
        for number in range(6):
            one.commit(*measurements(number, 12, [f"e{number}" for number in range(6)]))
            until(lambda: exporter.stats().waiting.files == 0)
    check_all_arrived(one, points(kafka, topic))
    assert len({record.partition for record in kafka.read(topic)}) > 1


def test_a_broker_that_was_stopped_gets_everything(one: Mill, kafka: Broker) -> None:
    """Commits go on meanwhile, and each try is counted."""
    topic = kafka.new_topic()
    exporter = one.exporter(target(kafka, topic), SETTINGS)
    with running(exporter):
        one.commit(*measurements(0))
        until(lambda: exporter.stats().waiting.files == 0)
        kafka.stop()
        for number in range(1, 4):
            one.commit(*measurements(number))
        until(lambda: sum(exporter.stats().retries.values()) > 0)
        assert len(one.files()) == 3
        kafka.start()
        until(lambda: exporter.stats().waiting.files == 0)
    check_all_arrived(one, points(kafka, topic))
    assert sum(one.counted("export retries").values()) > 0


def test_a_broker_that_stands_still_holds_up_nobody(one: Mill, kafka: Broker) -> None:
    """What it did not acknowledge in time is sent again when it goes on."""
    topic = kafka.new_topic()
    exporter = one.exporter(target(kafka, topic), SETTINGS)
    with running(exporter):
        one.commit(*measurements(0))
        until(lambda: exporter.stats().waiting.files == 0)
        kafka.pause()
        try:
            for number in range(1, 4):
                one.commit(*measurements(number))
            until(lambda: sum(exporter.stats().retries.values()) > 0)
        finally:
            kafka.resume()
        until(lambda: exporter.stats().waiting.files == 0)
    check_all_arrived(one, points(kafka, topic))


def test_a_topic_that_is_not_there_is_reported(one: Mill, kafka: Broker) -> None:
    """And what is to be sent waits until somebody makes it."""
    exporter = one.exporter(target(kafka, "missing-topic"), SETTINGS)
    one.commit(*measurements(0))
    with running(exporter):
        until(lambda: "UNKNOWN" in exporter.stats().failing)
        kafka.create_topic("missing-topic")
        until(lambda: exporter.stats().waiting.files == 0)
    assert last_totals(points(kafka, "missing-topic")) == stored(one.store)


def test_a_wrong_password_keeps_everything_waiting(one: Mill, kafka: Broker) -> None:
    """And the reason is told; with the right one all of it arrives."""
    topic = kafka.new_topic()
    address = f"kafka://{kafka.login}/{topic}"
    wrong = dataclasses.replace(
        SETTINGS, kafka_options=kafka.login_options("wr0ng-password"), timeout_s=1.0, drain_s=1.0
    )
    exporter = one.exporter(address, wrong)
    one.commit(*measurements(0))
    with running(exporter):
        until(lambda: exporter.stats().failing.startswith("AUTHENTICATION"))
    assert exporter.stats().waiting.files == 1
    right = dataclasses.replace(SETTINGS, kafka_options=kafka.login_options())
    exporter = one.exporter(address, right)
    with running(exporter):
        until(lambda: exporter.stats().waiting.files == 0)
    assert last_totals(points(kafka, topic)) == stored(one.store)
