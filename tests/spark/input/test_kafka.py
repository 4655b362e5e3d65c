"""How many messages of a topic go into a batch; the reading itself is tested with a real broker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("confluent_kafka")

from batchmill.kafka import KafkaAddress
from batchmill.spark import PipelineSettings
from batchmill.spark.errors import BatchTooLargeError
from batchmill.spark.input import kafka
from batchmill.spark.input.books import Account, Books, Plan
from batchmill.spark.input.choice import Pace, Segment
from batchmill.spark.input.kafka import KafkaInput


@pytest.fixture
def topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KafkaInput:
    """A topic with many messages; a batch may have 1,000 rows."""
    monkeypatch.setattr(kafka, "message_range", lambda *_: {0: (0, 10**6), 1: (0, 10**6)})
    address = KafkaAddress(("localhost:9092",), "spans")
    spark: Any = None
    source = KafkaInput(
        address, Books(tmp_path, Account()), PipelineSettings(), spark, max_rows=lambda: 1_000
    )
    source.look(patient=False)
    return source


def plan(messages: int) -> Plan:
    """A batch of so many messages."""
    return Plan(0, 0.0, 1, topic="spans", offsets={0: (0, messages)})


def test_batches_are_bounded_by_the_rows_of_their_messages(topic: KafkaInput) -> None:
    """By those of the last batches with the most rows in a message; at first nothing is known."""
    pace = Pace(None)
    first = topic.choose(pace)
    assert first is not None
    assert first.amount == PipelineSettings().max_batch_messages
    for messages, rows in ((100, 400), (100, 100)):
        topic._check_rows(plan(messages), messages, rows)
    later = topic.choose(pace)
    assert later is not None
    assert later.amount == 250
    topic._check_rows(plan(1), 1, 5_000)  # one message cannot be divided
    least = topic.choose(pace)
    assert least is not None
    assert least.amount == 2  # one of each partition


def test_messages_with_too_many_rows_are_refused_once(topic: KafkaInput) -> None:
    """So that the batch is divided; if it cannot be, it is run as it is."""
    large = plan(100)
    with pytest.raises(BatchTooLargeError, match="1,001 rows, more than the 1,000"):
        topic._check_rows(large, 100, 1_001)
    topic._check_rows(large, 100, 1_001)
    half = topic.halve(large)
    assert half is not None
    with pytest.raises(BatchTooLargeError):
        topic._check_rows(half[0], 50, 1_001)


def test_files_of_batches_that_are_done_are_removed(topic: KafkaInput, tmp_path: Path) -> None:
    """Only those of the current batch stay; what a killed task was writing goes with them."""
    books = topic._books
    books.open()
    for number in range(5):
        place = tmp_path / "kafka" / str(number)
        (place / "Span").mkdir(parents=True)
        for name in ("part-0.parquet", ".part-1.parquet.1f.tmp"):
            (place / "Span" / name).write_bytes(b"x" * 1000)
        books.begin(replace(plan(1), batch=number))
        topic.remove_read()
        assert [path.name for path in (tmp_path / "kafka").iterdir()] == [str(number)]
        books.finish(number)
    topic.remove_read()
    assert list((tmp_path / "kafka").iterdir()) == []


def test_deltas_that_cannot_be_read_stop_nothing(tmp_path: Path) -> None:
    """The task that reads them sets them aside, as it does those of a spool."""
    path = tmp_path / "deltas.parquet"
    path.write_bytes(b"no Parquet")
    assert kafka._rows_in(Segment(0.0, str(path), size=10, rows=7)) == 7
