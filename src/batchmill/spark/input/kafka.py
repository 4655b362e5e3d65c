"""Reads a Kafka topic as a stream: each batch's messages are decoded into segments.

Tasks read the messages with librdkafka, not with Spark's connector, which does not exist for every
version of Spark. They decode each message once, into Parquet files under the checkpoint, which the
batch then reads like those of a spool. The files can be made again from the topic, and are removed
when the batch is done. A message of deltas is a file of its own, named by its place in
the topic. A message in another format is kept in the spans' files as it came, and goes to the
quarantine with the invalid rows.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from batchmill.errors import BatchmillError
from batchmill.files import write_whole
from batchmill.kafka import (
    KafkaAddress,
    KafkaLostError,
    KafkaMessage,
    KafkaReadError,
    KafkaTopicError,
    MessageRange,
    behind,
    check_readable,
    deltas_in,
    divide,
    message_range,
    read_messages,
    span_rows,
)
from batchmill.spark.errors import BatchTooLargeError, PipelineError
from batchmill.spark.failures import explain_task_error
from batchmill.spark.files.paths import AnyPath, is_uri, remove_tree, segments_in
from batchmill.spark.input.base import Choice, Unread
from batchmill.spark.input.books import Books, Plan
from batchmill.spark.input.choice import Pace, Segment, share
from batchmill.spark.input.rows import SPAN
from batchmill.spark.input.segments import spark_path
from batchmill.spark.settings import PipelineSettings
from batchmill.traces import SpanKeeper

log = logging.getLogger("batchmill.spark")

_POLL_S = 1.0
_LEAST = 10_000
"""A batch of fewer messages is not made smaller to be quicker."""
_RECENT = 8
"""Of so many batches it is remembered how many rows a message had."""
_ANY = 2**62
_FEWEST = 2_000
"""So many messages are read by one task, and not by several."""


@dataclass(frozen=True)
class _FetchStep:
    """Reads ranges of messages, decodes them to rows of spans, and writes deltas to files.

    A task that runs again writes the same files. Without a folder there may be no deltas.
    """

    address: KafkaAddress
    ranges: Sequence[Sequence[MessageRange]]
    """By task."""
    folder: Path | None
    """Where the files of deltas go; None: there may be none."""
    skip_lost: bool
    options: Mapping[str, str] = field(repr=False)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of the tasks with these numbers."""
        for batch in batches:
            for task in batch[0].to_pylist():
                yield from self._rows(self.ranges[task])

    def _rows(self, ranges: Sequence[MessageRange]) -> Iterator[pa.RecordBatch]:
        try:
            for messages in read_messages(
                self.address, ranges, self.options, skip_lost=self.skip_lost
            ):
                yield from span_rows(self._without_deltas(messages)).to_batches()
        except BatchmillError as error:
            raise PipelineError(str(error)) from error

    def _without_deltas(self, messages: Sequence[KafkaMessage]) -> list[bytes | None]:
        """The other messages; those of deltas are written to a folder."""
        others = []
        for partition, offset, value in messages:
            deltas = deltas_in(value)
            if deltas is None:
                others.append(value)
                continue
            if self.folder is None:
                raise PipelineError(
                    "the topic has deltas of applications, which need a checkpoint in a local "
                    "folder that the executors share: start with one, or let the applications send "
                    "rows"
                )
            place = self.folder / deltas.source
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
        keeper: SpanKeeper | None = None,
        *,
        max_rows: Callable[[], int] = lambda: _ANY,
    ) -> None:
        """``options`` are librdkafka's; ``keeper`` takes the files of spans that are not needed any
        more. ``max_rows``: the most rows of a batch, unless the settings say it."""
        self._keeper = keeper
        self._usual_rows = max_rows
        self._rows_of_message: deque[float] = deque(maxlen=_RECENT)
        """How many rows a message of the last batches had, on average."""
        self._refused: Plan | None = None
        """The last plan that turned out to have too many rows."""
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
    def _max_rows(self) -> int:
        return self._settings.max_batch_rows or self._usual_rows()

    @property
    def waiting(self) -> bool:
        """Whether there are messages that are not chosen yet."""
        return bool(self._waiting)

    def choose(self, pace: Pace) -> Choice | None:
        """The oldest messages of each partition."""
        if not self._waiting:
            return None
        most = min(self._settings.max_batch_messages, pace.ceiling or _ANY)
        if self._rows_of_message:
            most = min(most, max(1, int(self._max_rows / max(self._rows_of_message))))
        chosen = share(self._waiting, pace.limit(most, _LEAST))
        self._waiting = {
            partition: (chosen[partition][1], end)
            for partition, (_, end) in self._waiting.items()
            if end > chosen[partition][1]
        }
        messages = sum(end - first for first, end in chosen.values())
        backlog = messages if self._waiting else 0
        return Choice(messages, topic=self._address.topic, offsets=chosen, backlog=backlog)

    def halve(self, plan: Plan) -> tuple[Plan, int] | None:
        """The first half of the messages of each partition."""
        messages = sum(end - first for first, end in plan.offsets.values())
        half = share(plan.offsets, messages // 2)
        if half == plan.offsets:  # one message of each partition
            half = dict(list(half.items())[: len(half) // 2])
        if not half:
            return None
        # The files of deltas are named by their messages: those of the other half must not stay.
        self._clear()
        return replace(plan, offsets=half), sum(end - first for first, end in half.values())

    def segments(self, plan: Plan) -> Sequence[str]:
        """Decode the batch's messages into segments, replacing those of an earlier attempt.

        Raises :class:`BatchTooLargeError` if they have too many rows, once for a plan: if it cannot
        be divided, it is tried all the same.
        """
        self._clear(keep=str(plan.batch))
        folder = self._staging / str(plan.batch)
        spans, deltas = folder / SPAN.name, folder / "deltas"
        ranges = [MessageRange(part, *both) for part, both in sorted(plan.offsets.items())]
        messages = sum(own.end - own.first for own in ranges)
        cores = max(1, self._spark.sparkContext.defaultParallelism)
        groups = divide(ranges, max(_FEWEST, -(-messages // cores)))
        local = deltas if isinstance(deltas, Path) else None
        step = _FetchStep(self._address, groups, local, self._settings.skip_lost, self._options)
        numbers = self._spark.range(0, len(groups), 1, max(1, len(groups)))
        with explain_task_error():
            rows = numbers.mapInArrow(step, self._spark.createDataFrame(span_rows([])).schema)
            rows.write.mode("overwrite").parquet(spark_path(spans))
        names, segments = segments_in(folder)
        self._check_rows(plan, messages, sum(map(_rows_in, segments)))
        return sorted(name if is_uri(name) else spark_path(Path(name)) for name in names)

    def _check_rows(self, plan: Plan, messages: int, rows: int) -> None:
        """Remember how many rows the messages have; raise if they are too many for a batch."""
        # Nobody knows it before they are read: a message has the spans of a trace in one request.
        self._rows_of_message.append(max(1, rows) / max(1, messages))
        if rows > self._max_rows and messages > 1 and plan != self._refused:
            self._refused = plan
            raise BatchTooLargeError(rows, self._max_rows)

    def unread(self, last: int | None, now: float) -> Unread:
        """By a request to the broker, within seconds."""
        done = self._books.offsets(self._address.topic, last)
        lag = behind(self._address, done, now, self._options)
        return Unread(lag.messages, 0, lag.oldest_s, lag.messages, lag.oldest_s)

    def remove_read(self) -> None:
        """Remove the files of batches that are done."""
        if self._books.done is not None:
            self._clear(until=self._books.done)

    def _lose(self, partition: int, first: int, low: int, high: int) -> None:
        """Messages are gone, or the topic is another one of the same name."""
        what = f"partition {partition} was read up to {first:,} and now has {low:,} to {high:,}"
        if not self._settings.skip_lost:
            raise PipelineError(str(KafkaLostError(self.name, what)))
        log.warning("%s no longer has messages that were not read: %s", self.name, what)

    def _clear(self, *, keep: str = "", until: int | None = None) -> None:
        with contextlib.suppress(FileNotFoundError):
            folders: list[AnyPath] = [*self._staging.iterdir()]
            for folder in folders:
                if folder.name != keep and (until is None or int(folder.name) <= until):
                    self._keep(folder)
                    remove_tree(folder)

    def _keep(self, folder: AnyPath) -> None:
        """Give the spans of a batch that is done to the keeper."""
        done = self._books.done
        if self._keeper is None or done is None or int(folder.name) > done:
            return
        if isinstance(folder, Path):
            for path in sorted((folder / SPAN.name).glob("[!._]*.parquet")):
                with contextlib.suppress(FileNotFoundError):
                    self._keeper.take(path)


def _rows_in(segment: Segment) -> int:
    """How many rows a file has; about, if it is not on this machine or cannot be read."""
    if is_uri(segment.path):
        return segment.rows
    try:
        return int(pq.read_metadata(segment.path).num_rows)
    except (pa.ArrowException, OSError):
        return segment.rows  # deltas that are none: the task that reads them sets them aside
