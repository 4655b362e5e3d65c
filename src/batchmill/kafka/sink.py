"""The sink: batches of spans in, messages in a topic, and an answer once the broker has them.

The one module with a thread: it serves librdkafka's callbacks, and so is the one on which futures
are answered, and producers that are of no use any more are replaced.

Guarantees
    * A future is answered only after every message of its batch is acknowledged by all replicas in
      sync. Everything that was taken is, or its future fails: nothing in between.
    * A message is written once however often librdkafka has to send it; the messages of a trace
      are in one partition, in the order of the batches and of the spans in them.
    * Whatever the broker does, nothing here waits for it but ``check`` and ``close``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from confluent_kafka import KafkaError, KafkaException, Producer

from batchmill import lifecycle
from batchmill.kafka import client
from batchmill.kafka.address import KafkaAddress
from batchmill.kafka.errors import KafkaWriteError
from batchmill.kafka.load import Load
from batchmill.kafka.messages import Message, encode
from batchmill.kafka.settings import KafkaSettings
from batchmill.kafka.trouble import Trouble
from batchmill.spool import (
    SPAN_SOURCE,
    Judgement,
    Level,
    Measure,
    Overloaded,
    SpanBatch,
    SpoolClosedError,
)

log = logging.getLogger("batchmill.kafka")

_POLL_S = 0.1
_ASK_S = 5.0
_RESERVED_BYTES = 1_000
"""Of the largest message, for what Kafka adds to a value: the key, and heads."""
_LEAST_LIMIT = 2_000
_RELINK_S = 1.0
"""A new producer at most so often: what made the old one useless may still be so."""


@dataclass(frozen=True, slots=True)
class KafkaStats:
    """A sink at one moment, and its counters since the start.

    While no submit is under way, ``submitted_rows == written_rows + failed_rows + queue_rows``.
    Refused rows are none of those.
    """

    level: Level
    submitted_rows: int
    """Spans that were taken."""
    written_rows: int
    """Spans that the broker has acknowledged."""
    failed_rows: int
    """Spans whose future failed; some of them may be in the topic all the same."""
    refused_rows: int
    """Spans that were not taken, since too much waited already or the broker was away."""
    refused: Mapping[Level, int]
    """Batches that were not taken, by level."""
    failures: Mapping[str, int]
    """Batches whose future failed, by librdkafka's name for the reason."""
    queue_rows: int
    """Spans that wait for the broker."""
    queue_bytes: int
    """The size of their messages."""
    messages: int
    """Messages acknowledged."""
    written_bytes: int
    """Their size, before compression."""


class KafkaSink:
    """Puts spans into a topic; a receiver takes it in place of a spool.

    Any thread may submit. ``options`` of the settings are librdkafka's own.

    >>> with KafkaSink("kafka://broker:9092/spans") as sink:  # doctest: +SKIP
    ...     sink.submit("Span", batch).result()
    """

    fork_order = 3

    def __init__(
        self,
        address: KafkaAddress | str,
        settings: KafkaSettings | None = None,
        **changes: Any,
    ) -> None:
        """``changes`` are settings by name: ``KafkaSink(address, linger_s=0.05)``."""
        self.address = KafkaAddress.parse(address) if isinstance(address, str) else address
        self.settings = dataclasses.replace(settings or KafkaSettings(), **changes)
        self._name = str(self.address)
        self._load = Load(self._name, self.settings)
        self._lock = threading.Lock()
        self._limit = self.settings.max_message_bytes
        self._limit_asked = False
        self._trouble = Trouble()
        self._deadline = float("inf")
        self._cut_short = False
        self._next_link = 0.0
        self._link = self._new_link()
        self._links = [self._link]
        """The one in use last; before it those that still have something under way."""
        self._thread = threading.Thread(target=self._run, name="batchmill-kafka", daemon=True)
        self._thread.start()
        lifecycle.track(self)

    def check(self, timeout: float = _ASK_S) -> None:
        """Look whether the topic is there; raises KafkaTopicError if it is known not to be.

        Raises KafkaLoginError if the broker refuses the login. A broker that does not answer may be
        on its way: that is no error; senders are told to wait until it is there.
        """
        why = client.check_topic(self._link.producer, self.address, timeout, self._trouble)
        if why:
            self._load.failed(f"{self._name} is not there yet ({why})")
        else:
            self._fit(client.topic_limit(self.address, self.settings, timeout))

    def submit(self, source: str, batch: SpanBatch) -> Future[None]:
        """Hand over spans; the future is done once the broker has acknowledged all of them.

        Never waits. Raises :class:`Overloaded` from CRITICAL on, BadRowsError, SpoolClosedError,
        and MessageTooLargeError for a span that no message can hold; the future fails with
        KafkaWriteError, Overloaded or SpoolClosedError. It cannot be cancelled.
        """
        if source != SPAN_SOURCE or not isinstance(batch, SpanBatch):
            raise TypeError(f"a topic takes {SPAN_SOURCE} as a SpanBatch, not {source!r}")
        batch.check()
        answer: Future[None] = Future()
        answer.set_running_or_notify_cancel()
        self._load.check(len(batch))
        messages = encode(batch, self._limit - _RESERVED_BYTES, self.address.topic)
        if not messages:  # it is as safe as it will ever be
            answer.set_result(None)
            return answer
        size = sum([len(each.value) for each in messages])
        self._load.admit(len(batch), size)
        with self._lock:
            link = self._link
            link.open += 1
        self._produce(link, messages, _Sending(self, link, answer, len(messages), len(batch), size))
        return answer

    def level(self) -> Level:
        """How much pressure there is: from CRITICAL on, batches are refused."""
        return self._load.level()

    def judge(self) -> Judgement:
        """The level of this moment, and what a sender who is refused hears."""
        return self._load.judge()

    def hurry(self) -> bool:
        """Nothing to hurry: a message lingers for milliseconds."""
        return False

    def measures(self) -> tuple[Measure, ...]:
        """What makes the level of this moment: each depth, and where its levels begin."""
        return self._load.measures()

    def stats(self) -> KafkaStats:
        """Level and counters of this moment."""
        level, counts, rows, size = self._load.snapshot()
        return KafkaStats(level=level, queue_rows=rows, queue_bytes=size, **vars(counts))

    def close(self, timeout: float | None = None) -> bool:
        """Take no more, wait for the broker, answer everything; True when that was in time.

        After ``timeout`` seconds (default: ``close_timeout_s``) the futures of what is not
        acknowledged fail with SpoolClosedError.
        """
        self._begin_close(timeout)
        self._thread.join()
        return not self._cut_short

    @property
    def closed(self) -> bool:
        """Whether it takes no more batches."""
        return self._load.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<KafkaSink {self._name!r} {'closed' if self.closed else 'open'}>"

    def begin_close(self) -> None:
        """Take nothing more."""
        self._begin_close(None)

    def await_close(self) -> None:
        """Wait for what is under way."""
        self._thread.join()

    def after_fork_in_child(self) -> None:
        """librdkafka's threads are the parent's: in the child the sink is closed."""
        for link in self._links:
            # To free it would wait for threads that are not here.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(link.producer))
        self._lock = threading.Lock()
        self._load = Load(self._name, self.settings)
        self._load.close()
        self._thread = threading.Thread()
        self._thread.start()

    def _begin_close(self, timeout: float | None) -> None:
        patience = self.settings.close_timeout_s if timeout is None else timeout
        self._deadline = min(self._deadline, time.monotonic() + patience)
        self._load.close()

    def _new_link(self) -> Link:
        link = Link()
        link.producer = client.make_producer(
            self.address, self.settings, self._limit, functools.partial(self._told, link)
        )
        return link

    def _produce(self, link: Link, messages: list[Message], sending: _Sending) -> None:
        topic, produce, delivered = self.address.topic, link.producer.produce, sending.delivered
        for number, message in enumerate(messages):
            try:
                produce(topic, message.value, message.key, on_delivery=delivered)
            except BufferError:
                sending.give_up(len(messages) - number, KafkaError(KafkaError._QUEUE_FULL))
                return
            except KafkaException as error:
                sending.give_up(len(messages) - number, error.args[0])
                return

    # What follows runs on the thread, but for give_up() -> finished().

    def _run(self) -> None:
        while not (self._load.closed and self._load.idle):
            late = time.monotonic() >= self._deadline
            self._cut_short = self._cut_short or late
            try:
                self._serve(late)
            except Exception:
                log.exception("serving %s failed; going on", self._name)
        self._load.end()

    def _serve(self, late: bool) -> None:
        for link in self._links:
            if link.broken or late:
                link.producer.purge()  # everything in it fails
            link.producer.poll(_POLL_S if link is self._link else 0)
        with self._lock:
            self._links = [each for each in self._links if each.open or each is self._link]
        if self._link.broken and not late and time.monotonic() >= self._next_link:
            log.error("a new producer for %s: the old one cannot go on", self._name)
            self._next_link = time.monotonic() + _RELINK_S
            self._relink()
        if self._limit_asked and not late:
            self._limit_asked = False
            asked = client.topic_limit(self.address, self.settings, _ASK_S)
            self._fit(self._limit // 2 if asked is None else asked)

    def _relink(self) -> None:
        link = self._new_link()
        with self._lock:
            self._links.append(link)
            self._link = link

    def _fit(self, limit: int | None) -> None:
        """Keep to what the topic takes."""
        if limit is None:
            return
        limit = max(_LEAST_LIMIT, min(limit, self.settings.max_message_bytes))
        if limit != self._limit:
            self._limit = limit
            log.warning("messages for %s have at most %d bytes from now on", self._name, limit)
            self._relink()

    def _told(self, link: Link, error: KafkaError) -> None:
        self._trouble(error)
        link.broken = link.broken or _is_fatal(error)

    def finished(self, sending: _Sending) -> None:
        """All messages of a batch have met their fate."""
        error, failure = sending.error, ""
        answer: Exception | None = None
        if error is not None:
            failure = str(error.name())
            answer = self._answer(sending.link, error)
        self._load.settle(sending.rows, sending.size, sending.messages, failure)
        with self._lock:
            sending.link.open -= 1
        # Counted before the submitter hears of it.
        if answer is None:
            self._trouble.forget()
            sending.answer.set_result(None)
        else:
            sending.answer.set_exception(answer)

    def _answer(self, link: Link, error: KafkaError) -> Exception:
        code = error.code()
        if code in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT) and self.closed:
            return SpoolClosedError(self._name)
        if code == KafkaError._QUEUE_FULL:
            why = "the producer's own queue is full"
            self._load.failed(f"{self._name}: {why}")
            return Overloaded(Level.CRITICAL, self.settings.retry_after_s, why)
        if code == KafkaError.MSG_SIZE_TOO_LARGE and link is self._link:
            self._limit_asked = True  # by one that keeps to the limit of now
        link.broken = link.broken or _is_fatal(error)
        said, heard = str(error.str()), self._trouble.text
        detail = f"{said}; {heard}" if heard and heard != said else said
        # A login that is refused shows in each message as time that was up.
        name = self._trouble.name if self._trouble.refused else str(error.name())
        answer = KafkaWriteError(self._name, name, detail)
        self._load.failed(str(answer))
        return answer


class Link:
    """A producer, and what is under way through it."""

    producer: Producer

    def __init__(self) -> None:
        self.open = 0
        """Batches that are not answered yet. Under the sink's lock."""
        self.broken = False
        """Whether it can never send again."""


class _Sending:
    """One batch on its way."""

    __slots__ = ("_left", "_lock", "_sink", "answer", "error", "link", "messages", "rows", "size")

    def __init__(
        self,
        sink: KafkaSink,
        link: Link,
        answer: Future[None],
        messages: int,
        rows: int,
        size: int,
    ) -> None:
        self.link = link
        self.answer = answer
        self.messages = messages
        self.rows = rows
        self.size = size
        self.error: KafkaError | None = None
        self._sink = sink
        self._left = messages
        self._lock = threading.Lock()

    def delivered(self, error: KafkaError | None, _message: object) -> None:
        """One message is acknowledged, or lost."""
        self._count(1, error)

    def give_up(self, n: int, error: KafkaError) -> None:
        """The last ``n`` messages will not even be tried."""
        self._count(n, error)

    def _count(self, n: int, error: KafkaError | None) -> None:
        with self._lock:
            self._left -= n
            if error is not None and self.error is None:
                self.error = error
            last = not self._left
        if last:
            self._sink.finished(self)


def _is_fatal(error: KafkaError) -> bool:
    return bool(error.fatal()) or error.code() == KafkaError._FATAL
