"""Reads a Kafka topic as a stream: each batch's messages are decoded into segments.

Spark's Python workers decode a message once, into Parquet files under the checkpoint, which the
batch then reads like those of a spool. The files can be made again from the topic, and are removed
when the batch is done. A message of deltas is a file of its own, named by its place in
the topic. A message in another format is kept in the spans' files as it came, and goes to the
quarantine with the invalid rows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyspark
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from batchmill.files import write_whole
from batchmill.kafka import (
    KafkaAddress,
    KafkaReadError,
    KafkaTopicError,
    behind,
    check_readable,
    deltas_in,
    java_options,
    message_range,
    span_rows,
)
from batchmill.spark.errors import PipelineError
from batchmill.spark.input.base import Choice, Unread
from batchmill.spark.input.choice import Pace, share
from batchmill.spark.input.rows import SPAN
from batchmill.spark.input.segments import spark_path
from batchmill.spark.runtime.books import Books, Plan
from batchmill.spark.settings import PipelineSettings

log = logging.getLogger("batchmill.spark")

_SCHEMA = from_arrow_schema(span_rows([]).schema)
_COLUMNS = ("value", "partition", "offset")
_MESSAGES_AT_ONCE = 1000
_POLL_S = 1.0
_LEAST = 10_000
"""A batch of fewer messages is not made smaller to be quicker."""
_LOST = ("KAFKA_DATA_LOSS", "some data may have been missed", "Some data may have been lost")
_REFUSED = ("SaslAuthenticationException", "SslAuthenticationException")


def connector_conf() -> dict[str, str]:
    """The Spark setting that makes Spark download its connector to Kafka."""
    connector = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"
    return {"spark.jars.packages": connector}


def _decoder(folder: Path) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function that decodes messages to rows of spans, and writes deltas to files.

    A task that runs again writes the same files.
    """

    def decode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for first in range(0, batch.num_rows, _MESSAGES_AT_ONCE):
                some = batch.slice(first, _MESSAGES_AT_ONCE)
                yield from span_rows(_without_deltas(some, folder)).to_batches()

    return decode


def _without_deltas(messages: pa.RecordBatch, folder: Path) -> list[bytes | None]:
    """The other messages; those of deltas are written to a folder."""
    others = []
    columns = (messages[name].to_pylist() for name in _COLUMNS)
    for value, partition, offset in zip(*columns, strict=True):
        deltas = deltas_in(value)
        if deltas is None:
            others.append(value)
            continue
        place = folder / deltas.source
        place.mkdir(parents=True, exist_ok=True)
        write_whole(place / f"{partition}-{offset}.parquet", deltas.parquet, mode=0o644)
    return others


class KafkaInput:
    """The messages of a topic."""

    def __init__(
        self,
        address: KafkaAddress,
        books: Books,
        settings: PipelineSettings,
        spark: SparkSession,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """``options`` are librdkafka's; they are translated for Kafka's Java client."""
        self._address = address
        self._books = books
        self._settings = settings
        self._spark = spark
        self._options = dict(options or {})
        self._staging = books.folder / "kafka"
        self._waiting: dict[int, tuple[int, int]] = {}
        self._fault = ""

    @property
    def name(self) -> str:
        """The address."""
        return str(self._address)

    @property
    def poll_s(self) -> float:
        """Often: only the pipeline reports how much of a topic is unread."""
        return _POLL_S

    def check(self) -> None:
        """Ask a broker for the topic."""
        check_readable(self._address, self._options)

    def look(self, *, patient: bool) -> None:
        """Ask the brokers for the newest messages; the first time, all of the topic wait."""
        self._waiting = {}
        try:
            there = message_range(self._address, self._options)
        except (KafkaReadError, KafkaTopicError) as error:
            if not patient:
                raise
            if str(error) != self._fault:  # once, not at every look while a broker is down
                log.warning("waiting for the topic: %s", error)
            self._fault = str(error)
            return
        self._fault = ""
        read = self._books.offsets(self._address.topic)
        for partition in sorted({*there, *read}):
            low, high = there.get(partition, (0, 0))
            first = read.get(partition, low)
            if not low <= first <= high:
                self._lose(partition, first, low, high)
                first = low
            if high > first:
                self._waiting[partition] = first, high

    @property
    def waiting(self) -> bool:
        """Whether there are messages that are not chosen yet."""
        return bool(self._waiting)

    def choose(self, pace: Pace) -> Choice | None:
        """The oldest messages of each partition."""
        if not self._waiting:
            return None
        most = self._settings.max_batch_messages
        chosen = share(self._waiting, pace.limit(most, _LEAST))
        self._waiting = {
            partition: (chosen[partition][1], end)
            for partition, (_, end) in self._waiting.items()
            if end > chosen[partition][1]
        }
        messages = sum(end - first for first, end in chosen.values())
        return Choice(messages, topic=self._address.topic, offsets=chosen)

    def segments(self, plan: Plan) -> Sequence[str]:
        """Decode the batch's messages into segments, replacing those of an earlier attempt."""
        self._clear(keep=str(plan.batch))
        folder = self._staging / str(plan.batch)
        spans, deltas = folder / SPAN.name, folder / "deltas"
        first, end = (
            json.dumps({plan.topic: {part: both[at] for part, both in plan.offsets.items()}})
            for at in (0, 1)
        )
        messages = (
            self._spark.read.format("kafka")
            .options(**java_options(self._options).options)
            .option("kafka.bootstrap.servers", self._address.bootstrap)
            .option("assign", json.dumps({plan.topic: list(plan.offsets)}))
            .option("startingOffsets", first)
            .option("endingOffsets", end)
            .option("failOnDataLoss", str(not self._settings.skip_lost).lower())
            .load()
        )
        rows = messages.select(*_COLUMNS).mapInArrow(_decoder(deltas), _SCHEMA)
        rows.write.mode("overwrite").parquet(spark_path(spans))
        paths = (*spans.glob("*.parquet"), *deltas.glob("*/*.parquet"))
        return [spark_path(path) for path in sorted(paths)]

    def unread(self, last: int | None, now: float) -> Unread:
        """By a request to the broker, within seconds."""
        done = self._books.offsets(self._address.topic, last)
        lag = behind(self._address, done, now, self._options)
        return Unread(lag.messages, 0, lag.oldest_s)

    def remove_read(self) -> None:
        """Remove the files of batches that are done."""
        if self._books.done is not None:
            self._clear(until=self._books.done)

    def explain(self, failure: BaseException) -> str | None:
        """A message for lost messages and for a refused login."""
        if any(sign in str(failure) for sign in _REFUSED):
            return (
                f"{self.name} refuses the login of batchmill now: correct the user, the password "
                "and the certificates of --kafka-config, and start again"
            )
        if not any(sign in str(failure) for sign in _LOST):
            return None
        return self._lost(f"Spark says: {str(failure).splitlines()[0]}")

    def _lose(self, partition: int, first: int, low: int, high: int) -> None:
        """Messages are gone, or the topic is another one of the same name."""
        what = f"partition {partition} was read up to {first:,} and now has {low:,} to {high:,}"
        if not self._settings.skip_lost:
            raise PipelineError(self._lost(what))
        log.warning("%s no longer has messages that were not read: %s", self.name, what)

    def _lost(self, what: str) -> str:
        return (
            f"{self.name} no longer has messages that were not read: its retention is shorter than "
            "the time that the pipeline was down, or the topic was created again. Spans that were "
            "acknowledged are lost. Give the topic a longer retention; to continue with what is "
            f"there, start once with --skip-lost. In detail: {what}"
        )

    def _clear(self, *, keep: str = "", until: int | None = None) -> None:
        with contextlib.suppress(FileNotFoundError):
            for folder in list(self._staging.iterdir()):
                if folder.name != keep and (until is None or int(folder.name) <= until):
                    shutil.rmtree(folder, ignore_errors=True)
