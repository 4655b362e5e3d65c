"""Reads a Kafka topic as a stream: each batch's messages are decoded into segments.

Spark's Python workers decode a message once, into Parquet files under the checkpoint, which the
batch then reads like those of a spool. The files can be made again from the topic, and are removed
when the next batch begins. A message of deltas is a file of its own, named by its place in
the topic. A message in another format is kept in the spans' files as it came, and goes to the
quarantine with the invalid rows.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from batchmill.files import write_whole
from batchmill.kafka import (
    KafkaAddress,
    behind,
    check_readable,
    deltas_in,
    java_options,
    span_rows,
)
from batchmill.spark.input.base import Unread
from batchmill.spark.input.rows import SPAN
from batchmill.spark.input.segments import spark_path
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.settings import PipelineSettings

_SCHEMA = from_arrow_schema(span_rows([]).schema)
_COLUMNS = ("value", "partition", "offset")
_MESSAGES_AT_ONCE = 1000
_POLL_S = 1.0
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
        checkpoint: Checkpoint,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """``options`` are librdkafka's; they are translated for Kafka's Java client."""
        self._address = address
        self._checkpoint = checkpoint
        self._options = dict(options or {})
        self._staging = checkpoint.folder / "kafka"

    @property
    def name(self) -> str:
        """The address."""
        return str(self._address)

    @property
    def poll_s(self) -> float:
        """Often: only the pipeline reports how much of a topic is unread."""
        return _POLL_S

    def stream(self, spark: SparkSession, settings: PipelineSettings) -> DataFrame:
        """The messages; the first time, from the topic's beginning."""
        check_readable(self._address, self._options)
        return (
            spark.readStream.format("kafka")
            .options(**java_options(self._options).options)
            .option("kafka.bootstrap.servers", self._address.bootstrap)
            .option("subscribe", self._address.topic)
            .option("startingOffsets", "earliest")
            .option("failOnDataLoss", str(not settings.skip_lost).lower())
            .option("maxOffsetsPerTrigger", settings.max_batch_messages)
            .load()
            .select(*_COLUMNS)
        )

    def segments(self, batch: DataFrame, number: int) -> Sequence[str]:
        """Decode the batch's messages into segments, replacing those of an earlier attempt."""
        self._clear(keep=str(number))
        folder = self._staging / str(number)
        spans, deltas = folder / SPAN.name, folder / "deltas"
        rows = batch.select(*_COLUMNS).mapInArrow(_decoder(deltas), _SCHEMA)
        rows.write.mode("overwrite").parquet(spark_path(spans))
        paths = (*spans.glob("*.parquet"), *deltas.glob("*/*.parquet"))
        return [spark_path(path) for path in sorted(paths)]

    def unread(self, last: int | None, now: float) -> Unread:
        """By a request to the broker, within seconds."""
        done: Mapping[int, int] = {}
        if last is not None:
            done = self._checkpoint.kafka_offsets(last, self._address.topic) or {}
        lag = behind(self._address, done, now, self._options)
        return Unread(lag.messages, 0, lag.oldest_s)

    def remove_read(self, last: int | None) -> None:
        """Remove the files of batches that are in the store and that Spark has marked as done."""
        done = self._checkpoint.committed
        if last is not None and done is not None:
            self._clear(until=min(last, done))

    def explain(self, failure: BaseException) -> str | None:
        """A message for lost messages and for a refused login."""
        if any(sign in str(failure) for sign in _REFUSED):
            return (
                f"{self.name} refuses the login of batchmill now: correct the user, the password "
                "and the certificates of --kafka-config, and start again"
            )
        if not any(sign in str(failure) for sign in _LOST):
            return None
        return (
            f"{self.name} no longer has messages that were not read: its retention is shorter than "
            "the time that the pipeline was down, or the topic was created again. Spans that were "
            "acknowledged are lost. Give the topic a longer retention; to continue with what is "
            f"there, start once with --skip-lost. Spark says: {str(failure).splitlines()[0]}"
        )

    def _clear(self, *, keep: str = "", until: int | None = None) -> None:
        with contextlib.suppress(FileNotFoundError):
            for folder in list(self._staging.iterdir()):
                if folder.name != keep and (until is None or int(folder.name) <= until):
                    shutil.rmtree(folder, ignore_errors=True)
