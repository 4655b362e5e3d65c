"""The Kafka sink: batches of spans in, messages in a topic, and an answer once the broker has them.

It has one thread, which serves librdkafka's callbacks: it answers the futures, and replaces
producers that cannot go on.

Guarantees
    * A future is done only after every message of its batch is acknowledged by all replicas in
      sync. Everything that was accepted is acknowledged, or its future fails.
    * A message is written once, however often librdkafka has to send it; the messages of a trace
      are in one partition, in the order of the batches and of the spans in them.
    * Whatever the broker does, only ``check`` and ``close`` wait for it.
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
from typing import Any

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer

from batchmill import lifecycle
from batchmill.kafka import client
from batchmill.kafka.client import ConnectionErrors
from batchmill.kafka.errors import KafkaWriteError
from batchmill.kafka.messages import Message, encode, encode_deltas
from batchmill.kafka.settings import KafkaAddress, KafkaSettings
from batchmill.spool import (
    SPAN_SOURCE,
    Gauge,
    GaugedSink,
    Level,
    Overloaded,
    PackedSpans,
    SinkStats,
    SpanBatch,
    SpoolClosedError,
)

log = logging.getLogger("batchmill.kafka")

_POLL_S = 0.1
_ASK_S = 5.0
_RESERVED_BYTES = 1_000
"""Of the largest message, for what Kafka adds to a value: the key, and headers."""
_LEAST_LIMIT = 2_000
_REPLACE_EVERY_S = 1.0
"""A new producer at most this often: the reason the old one failed may still be there."""


@dataclass(frozen=True, kw_only=True)
class KafkaStats(SinkStats):
    """A Kafka sink at one moment, and its counters since the start; see :class:`SinkStats`."""

    kind = "topic"
    failures: Mapping[str, int]
    """Batches whose future failed, by librdkafka's name for the reason."""
    messages: int
    """Messages acknowledged."""
    written_bytes: int
    """Their size, before compression."""


class KafkaSink(GaugedSink):
    """Puts spans into a topic; a receiver uses it in place of a spool.

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
        self._gauge = Gauge(
            "topic", self._name, self.settings, unit="span", waiting="for the broker", log=log
        )
        self._lock = threading.Lock()
        self._messages = self._written_bytes = 0
        self._failures: dict[str, int] = {}
        self._limit = self.settings.max_message_bytes
        self._limit_unknown = False
        """Whether a message was too large, so that the topic must be asked for its limit."""
        self._errors = ConnectionErrors()
        self._deadline = float("inf")
        self._cut_short = False
        self._next_replacement = 0.0
        self._link = self._new_link()
        self._links = [self._link]
        """The one in use comes last; before it those that still have batches under way."""
        self._thread = threading.Thread(target=self._run, name="batchmill-kafka", daemon=True)
        self._thread.start()
        lifecycle.track(self)

    def check(self, timeout: float = _ASK_S) -> None:
        """Ask whether the topic exists; raises KafkaTopicError if the broker says it does not.

        Raises KafkaLoginError if the broker refuses the login. A broker that does not answer may
        still be starting, which is no error: batches are refused until it is there.
        """
        why = client.check_topic(self._link.producer, self.address, timeout, self._errors)
        if why:
            self._gauge.fail(f"{self._name} is not there yet ({why})")
        else:
            self._fit(client.topic_limit(self.address, self.settings, timeout))

    def submit(self, source: str, batch: SpanBatch | PackedSpans) -> Future[None]:
        """Accept spans; the future is done once the broker has acknowledged all of them.

        Never waits. Raises :class:`Overloaded` from CRITICAL on, BadRowsError, SpoolClosedError,
        and MessageTooLargeError for a span that no message can hold; the future fails with
        KafkaWriteError, Overloaded or SpoolClosedError. It cannot be cancelled.
        """
        if source != SPAN_SOURCE or not isinstance(batch, (SpanBatch, PackedSpans)):
            raise TypeError(f"a topic takes {SPAN_SOURCE} as a SpanBatch, not {source!r}")
        batch.check()
        answer: Future[None] = Future()
        answer.set_running_or_notify_cancel()
        self._gauge.check(len(batch))
        messages = encode(batch.unpacked(), self._limit - _RESERVED_BYTES, self.address.topic)
        if not messages:  # nothing to write
            answer.set_result(None)
            return answer
        return self._send(messages, answer, accepted=False)

    def submit_deltas(self, source: str, deltas: pa.Table) -> Future[None]:
        """Send deltas of an event type; the future is done once the broker has acknowledged them.

        ``deltas`` is a table of :func:`batchmill.aggregate.to_arrow`. Their events were accepted
        before, so they are refused at no level. Raises SpoolClosedError, and MessageTooLargeError
        for the states of an entity's minute that no message can hold. If the future fails, the
        deltas may be in the topic nevertheless.
        """
        answer: Future[None] = Future()
        answer.set_running_or_notify_cancel()
        limit = self._limit - _RESERVED_BYTES
        messages = encode_deltas(source, deltas, limit, self.address.topic)
        return self._send(messages, answer, accepted=True)

    def _send(
        self, messages: list[Message], answer: Future[None], *, accepted: bool
    ) -> Future[None]:
        size = sum([len(message.value) for message in messages])
        rows = sum([message.spans for message in messages])
        self._gauge.admit(rows, size, accepted=accepted)
        with self._lock:
            link = self._link
            link.open += 1
        self._produce(link, messages, _Sending(self, link, answer, len(messages), rows, size))
        return answer

    def hurry(self, *, alone: bool = False) -> bool:
        """Does nothing: a message lingers for milliseconds only."""
        return False

    def stats(self) -> KafkaStats:
        """A snapshot of what waits, and of the counters since the start.

        While the broker takes nothing the level is CRITICAL, even when one batch may try again.
        """
        stats = self._gauge.stats()
        if self._gauge.fault:
            stats = dataclasses.replace(stats, level=max(stats.level, Level.CRITICAL))
        with self._lock:
            return KafkaStats(
                **vars(stats),
                failures=dict(self._failures),
                messages=self._messages,
                written_bytes=self._written_bytes,
            )

    def close(self, timeout: float | None = None) -> bool:
        """Accept no more, wait for the broker, answer everything; True when that was in time.

        After ``timeout`` seconds (default: ``close_timeout_s``) the futures of what is not
        acknowledged fail with SpoolClosedError.
        """
        self._begin_close(timeout)
        self._thread.join()
        return not self._cut_short

    def __repr__(self) -> str:
        return f"<KafkaSink {self._name!r} {'closed' if self.closed else 'open'}>"

    def begin_close(self) -> None:
        """Accept nothing more."""
        self._begin_close(None)

    def await_close(self) -> None:
        """Wait for what is under way."""
        self._thread.join()

    def after_fork_in_child(self) -> None:
        """librdkafka's threads are the parent's: in the child the sink is closed."""
        for link in self._links:
            # Freeing it would wait for threads that do not exist here.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(link.producer))
        self._lock = threading.Lock()
        self._messages = self._written_bytes = 0
        self._failures = {}
        self._gauge.reset()
        self._gauge.close()
        self._thread = threading.Thread()
        self._thread.start()

    def _begin_close(self, timeout: float | None) -> None:
        patience = self.settings.close_timeout_s if timeout is None else timeout
        self._deadline = min(self._deadline, time.monotonic() + patience)
        self._gauge.close()

    def _new_link(self) -> Link:
        link = Link()
        link.producer = client.make_producer(
            self.address, self.settings, self._limit, functools.partial(self._on_error, link)
        )
        return link

    def _produce(self, link: Link, messages: list[Message], sending: _Sending) -> None:
        topic, produce, delivered = self.address.topic, link.producer.produce, sending.delivered
        # The producer copies a message, so it is let go of: all of them are in memory once.
        messages.reverse()
        while messages:
            message = messages.pop()
            try:
                produce(topic, message.value, message.key or None, on_delivery=delivered)
            except BufferError:
                sending.give_up(len(messages) + 1, KafkaError(KafkaError._QUEUE_FULL))
                return
            except KafkaException as error:
                sending.give_up(len(messages) + 1, error.args[0])
                return

    # What follows runs on the thread, except for give_up() -> finished().

    def _run(self) -> None:
        while not (self._gauge.closed and self._gauge.idle):
            late = time.monotonic() >= self._deadline
            self._cut_short = self._cut_short or late
            try:
                self._serve(late)
            except Exception:
                log.exception("serving %s failed; going on", self._name)
        self._gauge.end()

    def _serve(self, late: bool) -> None:
        for link in self._links:
            if link.broken or late:
                link.producer.purge()  # fails everything in it
            link.producer.poll(_POLL_S if link is self._link else 0)
        with self._lock:
            self._links = [link for link in self._links if link.open or link is self._link]
        if self._link.broken and not late and time.monotonic() >= self._next_replacement:
            log.error("a new producer for %s: the old one cannot go on", self._name)
            self._next_replacement = time.monotonic() + _REPLACE_EVERY_S
            self._replace_producer()
        if self._limit_unknown and not late:
            self._limit_unknown = False
            limit = client.topic_limit(self.address, self.settings, _ASK_S)
            self._fit(self._limit // 2 if limit is None else limit)

    def _replace_producer(self) -> None:
        link = self._new_link()
        with self._lock:
            self._links.append(link)
            self._link = link

    def _fit(self, limit: int | None) -> None:
        """Keep to the size of messages that the topic takes."""
        if limit is None:
            return
        limit = max(_LEAST_LIMIT, min(limit, self.settings.max_message_bytes))
        if limit != self._limit:
            self._limit = limit
            log.warning("messages for %s have at most %d bytes from now on", self._name, limit)
            self._replace_producer()

    def _on_error(self, link: Link, error: KafkaError) -> None:
        self._errors(error)
        link.broken = link.broken or _is_fatal(error)

    def finished(self, sending: _Sending) -> None:
        """All messages of a batch are acknowledged or lost; called once for each batch."""
        error = sending.error
        answer = None if error is None else self._answer(sending.link, error)
        self._gauge.settle(sending.rows, sending.size, stored=error is None)
        with self._lock:
            sending.link.open -= 1
            if error is None:
                self._messages += sending.messages
                self._written_bytes += sending.size
            else:
                reason = str(error.name())
                self._failures[reason] = self._failures.get(reason, 0) + 1
        # Counted before the submitter gets its answer.
        if answer is None:
            self._errors.clear()
            sending.answer.set_result(None)
        else:
            sending.answer.set_exception(answer)

    def _answer(self, link: Link, error: KafkaError) -> Exception:
        code = error.code()
        if code in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT) and self.closed:
            return SpoolClosedError(self._name)
        if code == KafkaError._QUEUE_FULL:
            why = "the producer's own queue is full"
            self._gauge.fail(f"{self._name}: {why}")
            return Overloaded(Level.CRITICAL, self.settings.retry_after_s, why)
        if code == KafkaError.MSG_SIZE_TOO_LARGE and link is self._link:
            self._limit_unknown = True  # the current producer kept to the limit that was known
        link.broken = link.broken or _is_fatal(error)
        text, cause = str(error.str()), self._errors.text
        detail = f"{text}; {cause}" if cause and cause != text else text
        # Where a login is refused, each message only says that its time was up.
        name = self._errors.name if self._errors.refused else str(error.name())
        answer = KafkaWriteError(self._name, name, detail)
        self._gauge.fail(str(answer))
        return answer


class Link:
    """A producer, and how many batches are under way in it."""

    producer: Producer

    def __init__(self) -> None:
        self.open = 0
        """Batches that are not answered yet. Guarded by the sink's lock."""
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
        """Count the last ``n`` messages as lost without trying them."""
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
