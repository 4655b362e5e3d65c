"""A topic in Kafka as a stream: each batch's messages become segments, and then it is as ever.

A message is decoded once, by Spark's Python workers, into Parquet files under the checkpoint;
several passes over a batch read those, without Python. They can be made again from the topic, and
are gone when the next batch begins. What is no message of ours stays in them as it came, and goes
to the quarantine with the rows that do not fit.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from batchmill.kafka import (
    KafkaAddress,
    behind,
    check_readable,
    java_options,
    span_rows,
)
from batchmill.spark.input.inputs import Unread
from batchmill.spark.input.schema import SPAN, span_type
from batchmill.spark.input.segments import spark_path
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.settings import PipelineSettings
from batchmill.spool import FOREIGN

_SCHEMA = span_type().add(FOREIGN, T.BinaryType())
_MESSAGES = 1000
"""So many are decoded at a time."""
_LOOK_S = 1.0
_LOST = ("KAFKA_DATA_LOSS", "some data may have been missed", "Some data may have been lost")
_REFUSED = ("SaslAuthenticationException", "SslAuthenticationException")


def packages() -> dict[str, str]:
    """The Spark setting that has Spark fetch its connector to Kafka."""
    connector = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"
    return {"spark.jars.packages": connector}


def _decoded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for first in range(0, batch.num_rows, _MESSAGES):
            values = batch.column("value").slice(first, _MESSAGES).to_pylist()
            yield from span_rows(values).to_batches()


class KafkaInput:
    """The messages of a topic. Spark keeps the books on which offsets belong to which batch."""

    def __init__(
        self,
        address: KafkaAddress,
        checkpoint: Checkpoint,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """``options`` are librdkafka's; Spark gets what they are for Kafka's Java client."""
        self._address = address
        self._checkpoint = checkpoint
        self._options = dict(options or {})
        self._staging = checkpoint.folder / "kafka"

    @property
    def name(self) -> str:
        """The address."""
        return str(self._address)

    @property
    def look_s(self) -> float:
        """Often: anybody can look into a spool's folder, but of a topic only the pipeline tells."""
        return _LOOK_S

    def stream(self, spark: SparkSession, settings: PipelineSettings) -> DataFrame:
        """The messages; from the topic's beginning, the first time."""
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
            .select("value")
        )

    def segments(self, batch: DataFrame, number: int) -> Sequence[str]:
        """Decode the batch's messages into segments, in place of any that an earlier try left."""
        self._clear(keep=str(number))
        folder = self._staging / str(number) / SPAN.name
        rows = batch.select("value").mapInArrow(_decoded, _SCHEMA)
        rows.write.mode("overwrite").parquet(spark_path(folder))
        return [spark_path(each) for each in sorted(folder.glob("*.parquet"))]

    def unread(self, last: int | None, now: float) -> Unread:
        """By asking the broker, within seconds."""
        done: Mapping[int, int] = {}
        if last is not None:
            done = self._checkpoint.kafka_offsets(last, self._address.topic) or {}
        found = behind(self._address, done, now, self._options)
        return Unread(found.messages, 0, found.oldest_s)

    def forget(self, last: int | None) -> None:
        """The files of batches that are in the store, and done in Spark's books."""
        done = self._checkpoint.committed
        if last is not None and done is not None:
            self._clear(until=min(last, done))

    def explain(self, failure: BaseException) -> str | None:
        """That messages are lost, or a login refused, which Spark says in its own words."""
        if any(each in str(failure) for each in _REFUSED):
            return (
                f"{self.name} does not let batchmill in any more: put the user, the password and "
                "the certificates of --kafka-config right, and start again"
            )
        if not any(each in str(failure) for each in _LOST):
            return None
        return (
            f"{self.name} no longer has messages that were not read: its retention is shorter than "
            "the pipeline was away, or somebody made the topic anew. Spans that were acknowledged "
            "are lost. Give the topic a longer retention; to go on with what is there, start once "
            f"with --skip-lost. Spark says: {str(failure).splitlines()[0]}"
        )

    def _clear(self, *, keep: str = "", until: int | None = None) -> None:
        with contextlib.suppress(FileNotFoundError):
            for each in list(self._staging.iterdir()):
                if each.name != keep and (until is None or int(each.name) <= until):
                    shutil.rmtree(each, ignore_errors=True)
