"""The sink against a real broker: what is acknowledged, refused, failed and recovered."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError, KafkaException

from batchmill import ConfigError
from batchmill.kafka import (
    KafkaSettings,
    KafkaSink,
    KafkaTopicError,
    KafkaWriteError,
    MessageTooLargeError,
)
from batchmill.spool import SPAN_SOURCE, Level, Overloaded, SpoolClosedError
from tests.kafka.kit import batch_of, noise, row, rows_in
from tests.kit.servers.kafka import Broker
from tests.kit.threads import WAIT_S, until

QUICK = KafkaSettings(delivery_timeout_s=1.0, retry_after_s=0.1, linger_s=0.001)
"""For a broker that is not there: it is given up soon."""
NOBODY = "kafka://127.0.0.1:9/spans"
"""No broker has that port."""


FIRST = 99
"""The span that a sink is tried with."""


@contextlib.contextmanager
def ready_sink(kafka: Broker, topic: str) -> Iterator[KafkaSink]:
    """A sink that gives up soon, and has had an answer already: a fresh broker takes its time."""
    with KafkaSink(address(kafka, topic), QUICK) as sink:
        until(lambda: was_taken(sink, FIRST))
        yield sink


def address(kafka: Broker, topic: str) -> str:
    """Where a topic of the broker is."""
    return f"kafka://{kafka.bootstrap}/{topic}"


def numbers(kafka: Broker, topic: str) -> list[int]:
    """The spans in a topic, by the number in their ids."""
    return [int(span["span_id"], 16) for span in rows_in(kafka.read(topic))]


def put(sink: KafkaSink, *spans: int, **changes: Any) -> Future[None]:
    """Hand over spans by number."""
    return sink.submit(SPAN_SOURCE, batch_of([row(span, **changes) for span in spans]))


def test_spans_come_back_as_they_were(kafka: Broker) -> None:
    """Every column, through the broker and compressed, is what was handed over."""
    topic = kafka.new_topic()
    rows = [row(number, trace=7, attributes={"ü": noise(50, number)}) for number in range(1, 50)]
    with KafkaSink(address(kafka, topic)) as sink:
        sink.submit(SPAN_SOURCE, batch_of(rows)).result(WAIT_S)
    assert rows_in(kafka.read(topic)) == rows


def test_what_is_acknowledged_is_in_the_topic(kafka: Broker) -> None:
    """At the moment the future is done, before the sink is closed."""
    topic = kafka.new_topic()
    with KafkaSink(address(kafka, topic)) as sink:
        put(sink, 1).result(WAIT_S)
        assert numbers(kafka, topic) == [1]


def test_a_trace_is_in_one_partition_in_order(kafka: Broker) -> None:
    """Over many requests and eight partitions; and all partitions have some."""
    topic = kafka.new_topic(partitions=8)
    rng = random.Random(3)
    rows = [row(number, trace=rng.randint(1, 60)) for number in range(1, 1001)]
    with KafkaSink(address(kafka, topic)) as sink:
        sent = [sink.submit(SPAN_SOURCE, batch_of(rows[at : at + 7])) for at in range(0, 1000, 7)]
        for future in sent:
            future.result(WAIT_S)
    records = kafka.read(topic)
    homes = {(record.key, record.partition) for record in records}
    assert len(homes) == 60
    assert {partition for _, partition in homes} == set(range(8))
    order: dict[str, list[int]] = {}
    for span in rows_in(records):
        order.setdefault(span["trace_id"], []).append(int(span["span_id"], 16))
    assert all(numbers_of_trace == sorted(numbers_of_trace) for numbers_of_trace in order.values())
    assert sorted(
        number for numbers_of_trace in order.values() for number in numbers_of_trace
    ) == list(range(1, 1001))


def test_a_key_is_placed_as_java_places_it(kafka: Broker) -> None:
    """Producers of either kind put a trace into the same partition (murmur2 of its id)."""
    topic = kafka.new_topic(partitions=8)
    with KafkaSink(address(kafka, topic)) as sink:
        put(sink, 1, trace=0x0AF7651916CD43DD8448EB211C80319C).result(WAIT_S)
    (record,) = kafka.read(topic)
    assert record.partition == murmur2(record.key) % 8


def test_nothing_is_acknowledged_while_the_broker_stands_still(kafka: Broker) -> None:
    """The future waits for the broker, and is done when that goes on."""
    topic = kafka.new_topic()
    with KafkaSink(address(kafka, topic)) as sink:
        put(sink, 1).result(WAIT_S)
        kafka.pause()
        waiting = put(sink, 2)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        kafka.resume()
        waiting.result(WAIT_S)
    assert numbers(kafka, topic) == [1, 2]


def test_what_waits_is_bounded(kafka: Broker) -> None:
    """WARNING at half, CRITICAL at full: then nothing is taken until the broker goes on."""
    topic = kafka.new_topic()
    with KafkaSink(address(kafka, topic), capacity_rows=10) as sink:
        put(sink, 1).result(WAIT_S)
        kafka.pause()
        taken = [put(sink, *range(2, 7))]
        assert sink.level() is Level.WARNING
        taken.append(put(sink, *range(7, 12)))
        assert sink.level() is Level.CRITICAL
        assert "10 spans" in sink.pressure().why
        with pytest.raises(Overloaded) as refused:
            put(sink, 12)
        assert refused.value.retry_after_s > 0
        kafka.resume()
        for future in taken:
            future.result(WAIT_S)
        assert sink.level() is Level.NORMAL
        stats = sink.stats()
    assert (stats.written_rows, stats.refused_rows, stats.queue_rows) == (11, 1, 0)
    assert stats.refused == {Level.CRITICAL: 1}
    assert numbers(kafka, topic) == list(range(1, 12))


def test_bytes_are_bounded_as_well(kafka: Broker) -> None:
    """A few large spans are as much as many small ones."""
    topic = kafka.new_topic()
    with KafkaSink(address(kafka, topic), capacity_bytes=10_000) as sink:
        put(sink, 1).result(WAIT_S)
        kafka.pause()
        taken = put(sink, 2, attributes={"text": noise(11_000)})
        assert sink.level() is Level.CRITICAL
        kafka.resume()
        taken.result(WAIT_S)


def test_a_broker_that_is_gone_and_back_is_noticed(kafka: Broker) -> None:
    """Nobody has to do anything: what failed is told, and what comes after the start is taken."""
    topic = kafka.new_topic()
    with ready_sink(kafka, topic) as sink:
        kafka.stop()
        with pytest.raises(KafkaWriteError) as failed:
            put(sink, 2).result(WAIT_S)
        assert failed.value.code == "_MSG_TIMED_OUT"
        assert sink.level() is Level.CRITICAL
        assert topic in sink.pressure().why
        kafka.start()
        until(lambda: was_taken(sink, 3))
        assert sink.level() is Level.NORMAL
        stats = sink.stats()
    assert {FIRST, 3} <= set(numbers(kafka, topic))
    assert stats.failures["_MSG_TIMED_OUT"] >= 1
    assert stats.submitted_rows == stats.written_rows + stats.failed_rows


def test_a_dead_broker_keeps_few_waiting() -> None:
    """After the first failure a sender is refused at once, but for one now and then."""
    with KafkaSink(NOBODY, QUICK, retry_after_s=60.0) as sink:
        with pytest.raises(KafkaWriteError):
            put(sink, 1).result(WAIT_S)
        with pytest.raises(Overloaded, match="does not take messages"):
            put(sink, 2)


def test_a_span_that_the_topic_cannot_hold_is_reported(kafka: Broker) -> None:
    """Once the topic's limit is known, before anything is sent; others are taken."""
    topic = kafka.new_topic(max_message_bytes="20000")
    with KafkaSink(address(kafka, topic)) as sink:
        sink.check()
        with pytest.raises(MessageTooLargeError, match=topic):
            put(sink, 1, attributes={"text": noise(40_000)})
        rows = [row(number, attributes={"text": noise(1_000, number)}) for number in range(2, 102)]
        sink.submit(SPAN_SOURCE, batch_of(rows)).result(WAIT_S)
    assert rows_in(kafka.read(topic)) == rows


def test_an_unknown_size_limit_is_learnt_from_the_broker(kafka: Broker) -> None:
    """The broker refuses a message: its sender tries again, and hears why, or is taken."""
    topic = kafka.new_topic(max_message_bytes="20000")
    with ready_sink(kafka, topic) as sink:
        with pytest.raises(KafkaWriteError) as failed:
            put(sink, 1, attributes={"text": noise(40_000)}).result(WAIT_S)
        assert failed.value.code == "MSG_SIZE_TOO_LARGE"
        until(lambda: is_too_large(sink, 1, attributes={"text": noise(40_000)}))
        until(lambda: was_taken(sink, 2))
    assert numbers(kafka, topic)[-1] == 2


def test_a_full_queue_in_the_client_is_pressure(kafka: Broker) -> None:
    """The sender hears 503; what was in the queue already is delivered; then it goes on."""
    topic = kafka.new_topic()
    with ready_sink(kafka, topic) as sink:
        make_faulty(sink, after=1, error=BufferError("full"))
        rows = [row(1, trace=1), row(2, trace=2)]
        with pytest.raises(Overloaded):
            sink.submit(SPAN_SOURCE, batch_of(rows)).result(WAIT_S)
        until(lambda: was_taken(sink, 3))
        stats = sink.stats()
    assert numbers(kafka, topic) == [FIRST, 1, 3]
    assert stats.failures["_QUEUE_FULL"] == 1
    assert stats.submitted_rows == stats.written_rows + stats.failed_rows


def test_a_producer_that_cannot_go_on_is_replaced(kafka: Broker) -> None:
    """A fatal error ends librdkafka's producer, not the sink."""
    topic = kafka.new_topic()
    fatal = KafkaException(KafkaError(KafkaError._FATAL, "made up", fatal=True))
    with ready_sink(kafka, topic) as sink:
        make_faulty(sink, after=0, error=fatal, times=10**9)
        with pytest.raises(KafkaWriteError):
            put(sink, 1).result(WAIT_S)
        until(lambda: was_taken(sink, 2))
    assert numbers(kafka, topic) == [FIRST, 2]


def test_closing_waits_for_what_is_under_way(kafka: Broker) -> None:
    """All of it is acknowledged; after that nothing is taken."""
    topic = kafka.new_topic()
    sink = KafkaSink(address(kafka, topic), linger_s=0.2)
    taken = [put(sink, number) for number in range(1, 20)]
    assert sink.close()
    assert all(future.done() and future.exception() is None for future in taken)
    with pytest.raises(SpoolClosedError):
        put(sink, 20)
    assert numbers(kafka, topic) == list(range(1, 20))


def test_closing_does_not_wait_for_ever() -> None:
    """Without a broker, what is under way fails when the time is up."""
    sink = KafkaSink(NOBODY)
    taken = put(sink, 1)
    assert not sink.close(timeout=0.1)
    assert isinstance(taken.exception(0), SpoolClosedError)
    assert sink.stats().queue_rows == 0


def test_a_topic_that_is_not_there_is_reported(kafka: Broker) -> None:
    """With the command that makes it; the broker here makes none by itself."""
    with (
        KafkaSink(address(kafka, "nothing")) as sink,
        pytest.raises(KafkaTopicError, match=r"kafka-topics\.sh --create --topic nothing"),
    ):
        sink.check(timeout=WAIT_S)


def test_a_broker_that_is_not_there_yet_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """It may come: that is logged, and senders will be told to wait."""
    with KafkaSink(NOBODY) as sink:
        sink.check(timeout=0.2)
    assert "is not there yet" in caplog.text


def test_an_option_that_librdkafka_does_not_know_is_reported() -> None:
    """By its name, as a setting that is not valid."""
    with pytest.raises(ConfigError, match=r"no\.such\.thing"):
        KafkaSink(NOBODY, options={"no.such.thing": "1"})


def test_a_forked_child_has_a_closed_sink(kafka: Broker) -> None:
    """librdkafka does not survive a fork: the child is told, ends, and the parent goes on."""
    topic = kafka.new_topic()
    with KafkaSink(address(kafka, topic)) as sink:
        put(sink, 1).result(WAIT_S)
        child = os.fork()
        if not child:
            try:
                put(sink, 2)
            except SpoolClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        put(sink, 3).result(WAIT_S)
    assert numbers(kafka, topic) == [1, 3]


class Faulty:
    """A producer that works, but for some calls of ``produce``."""

    def __init__(self, real: Any, after: int, error: Exception, times: int = 1) -> None:
        self._real = real
        self._good = after
        self._bad = times
        self._error = error

    def produce(self, *arguments: Any, **named: Any) -> None:
        if self._good:
            self._good -= 1
        elif self._bad:
            self._bad -= 1
            raise self._error
        self._real.produce(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def make_faulty(sink: KafkaSink, **faults: Any) -> None:
    """Give a sink a producer whose faults no broker would bring about."""
    producer: Any = Faulty(sink._link.producer, **faults)
    sink._link.producer = producer


def was_taken(sink: KafkaSink, number: int) -> bool:
    """Whether a span got through now."""
    try:
        put(sink, number).result(WAIT_S)
    except (Overloaded, KafkaWriteError):
        return False
    return True


def is_too_large(sink: KafkaSink, number: int, **changes: Any) -> bool:
    """Whether a span is refused for its size now."""
    try:
        put(sink, number, **changes).result(WAIT_S)
    except MessageTooLargeError:
        return True
    except (Overloaded, KafkaWriteError):
        return False
    return False


def murmur2(data: bytes) -> int:
    """Kafka's hash of a key, as its Java client has it, made positive."""
    word, factor = 0xFFFFFFFF, 0x5BD1E995
    digest = 0x9747B28C ^ len(data)
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        part = int.from_bytes(data[at : at + 4], "little") * factor & word
        part = (part ^ part >> 24) * factor & word
        digest = digest * factor & word ^ part
    if rest := data[whole:]:
        digest = (digest ^ int.from_bytes(rest, "little")) * factor & word
    digest = (digest ^ digest >> 13) * factor & word
    return (digest ^ digest >> 15) & 0x7FFFFFFF
