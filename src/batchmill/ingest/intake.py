"""The way of a request's body to durable storage: what HTTP and gRPC have in common."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from batchmill.errors import ConfigError, check_ints
from batchmill.http import ServerSettings
from batchmill.ingest import responses
from batchmill.ingest.decode import (
    JSON,
    PROTOBUF,
    BadRequest,
    Limits,
    TooLarge,
    Unsupported,
    check_held,
    decode_traces,
    decompress,
    otlp_from_json,
)
from batchmill.ingest.responses import Refusal, Rejected
from batchmill.ingest.stats import ReceiverStats
from batchmill.kafka import MessageTooLargeError
from batchmill.spool import (
    SPAN_SOURCE,
    BadRowsError,
    Level,
    Overloaded,
    Pressure,
    SpanSink,
    SpoolClosedError,
)
from batchmill.wording import count_of

TRACES, LOGS, METRICS = "traces", "logs", "metrics"
DISCARD, REFUSE, FORWARD = "discard", "refuse", "forward"
METRICS_MODES = (DISCARD, REFUSE)
LOGS_MODES = (DISCARD, REFUSE, FORWARD)


@dataclass(frozen=True, kw_only=True)
class ReceiverSettings(ServerSettings):
    """Where a receiver listens, for whom, and how much it takes at a time."""

    http_port: int = 4318
    """0: any free one."""
    grpc_port: int = 4317
    max_connections: int = 1000
    """Open at a time, for each protocol; one more is refused."""
    max_requests: int = 2000
    """In progress at a time; one more is answered 503, unless a slow one can be ended for it."""
    max_bytes: int = 256 * 2**20
    """Of bodies in memory at a time; a sender that needs more is answered 503."""
    max_header_bytes: int = 16 * 2**10
    idle_s: float = 60.0
    """A connection without a request is closed after this."""
    silent_s: float = 5.0
    """A request of which no byte arrives for this long is ended."""
    store_s: float = 60.0
    """A request whose spans are not durable after this is answered 503."""
    decoders: int = 1
    """Threads that decode. The decoder in Python runs on one at a time anyway."""
    drain_s: float = 10.0
    """How long requests in progress may take after ``stop()``."""
    metrics: str = DISCARD
    """What requests with metrics get: ``discard`` answers success, ``refuse`` an error."""
    logs: str = ""
    """The same for logs, or ``forward``; by default that where there is a forwarder of logs, else
    ``discard``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ints(self, 1, "decoders")
        if self.metrics not in METRICS_MODES:
            raise ConfigError("metrics", self.metrics, " or ".join(METRICS_MODES))
        if self.logs and self.logs not in LOGS_MODES:
            raise ConfigError("logs", self.logs, " or ".join(LOGS_MODES))


T = TypeVar("T")

log = logging.getLogger("batchmill.ingest")

_ALONE_S = 1.0
"""A sender is alone when nobody else has sent for this long."""
_MOMENT_S = 0.5
"""A request that arrives in this time is not slow."""
_LARGE_BYTES = 2**20
"""A body of more than this, some 30 ms of work for the decoder in Python, is large."""


class Forwarder(Protocol):
    """Gets copies of requests, beside the sink."""

    def reserve(self, size: int) -> bool:
        """Make room for a body that may be offered later; False: there is none."""
        ...

    def release(self, size: int) -> None:
        """Give back the room of a body that is not offered."""
        ...

    def offer(
        self, body: bytes, content_type: str, items: int, *, is_reserved: bool = False
    ) -> None:
        """Take a decompressed body, or drop it; never waits. Called by any thread."""
        ...

    def drop(self, items: int) -> None:
        """Count what was not offered because there was no room to reserve."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Counters for the status."""
        ...


class _LargeBody(Exception):
    """A body turned out to be large when it was decompressed; it has been put back."""


@dataclass(frozen=True, slots=True)
class _DecodedRequest:
    """A decoded request whose spans are on their way to the sink."""

    rejected: Rejected
    stored: Future[Any] | None
    """Resolves once the spans are durable; None if there are none."""


class Intake:
    """Decodes bodies and stores their spans, a bounded number of requests and bytes at a time.

    All methods are called on the event loop. Decoding and submitting to the sink run on threads
    of its own, so that a large body does not hold up the others.
    """

    def __init__(
        self,
        sink: SpanSink,
        limits: Limits,
        settings: ReceiverSettings,
        stats: ReceiverStats,
        forwarders: Mapping[str, Forwarder] | None = None,
    ) -> None:
        self.limits = limits
        self.settings = settings
        self.stats = stats
        self.forwarders = forwarders or {}
        """By signal: traces are forwarded once they are durable, logs at once."""
        logs = settings.logs or (FORWARD if LOGS in self.forwarders else DISCARD)
        if logs == FORWARD and LOGS not in self.forwarders:
            raise ConfigError("logs", logs, "used with a forwarder of logs: set export_logs")
        self._modes = {METRICS: settings.metrics, LOGS: logs}
        self.draining = False
        self.requests = 0
        """Requests in progress."""
        self.waiting = 0
        """Of those, requests whose spans wait to become durable."""
        self.bytes = 0
        """Bytes of bodies in memory, and of those that are being decoded without compression."""
        self._counting = threading.Lock()
        """Guards ``bytes``."""
        self._sink = sink
        self._decoders = ThreadPoolExecutor(settings.decoders, "batchmill-ingest-decode")
        self._large_decoder = ThreadPoolExecutor(1, "batchmill-ingest-decode-large")
        most = min(limits.max_decompressed_bytes, _LARGE_BYTES)
        self._small_limits = replace(limits, max_decompressed_bytes=most)
        self._reads: dict[Body, asyncio.Timeout] = {}
        """Requests whose body is arriving, the oldest first."""
        self._discarded: set[str] = set()
        self._senders = Senders()

    def take(self, signal: str) -> Take | None:
        """The method that takes requests of a signal; None if they are refused."""
        if signal == TRACES:
            return self.take_traces
        match self._modes.get(signal, REFUSE):
            case "forward":
                return self.take_logs
            case "discard":
                return functools.partial(self._discard, signal)
        return None

    @contextmanager
    def admit(self, sender: str = "") -> Iterator[Body]:
        """Count a request in progress, before its body is read; raises `Refusal`.

        ``sender`` is the address that it came from, with the port.
        """
        if self.draining:
            raise responses.draining()
        if self._sink.level() >= Level.CRITICAL_PLUS:
            raise _overloaded(self._sink.pressure(), unread=True)
        if self.requests >= self.settings.max_requests and not self._end_a_read():
            what = f"{count_of(self.requests, 'request')} in progress already"
            raise responses.busy(what)
        self.requests += 1
        body = Body(self, sender)
        try:
            yield body
        finally:
            self.requests -= 1
            body.release()
            self._hurry()  # what gathered while the segment of this request was written

    @asynccontextmanager
    async def reading(self, body: Body, began: float) -> AsyncIterator[None]:
        """Refuse a request whose body has not arrived ``request_s`` after ``began``.

        The same if none of it arrives for ``silent_s``, or if others need its place. Once the
        receiver drains, the time is shorter.
        """
        deadline = began + self.settings.request_s
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                self._reads[body] = timeout
                body.wait_for_more(timeout, deadline)
                try:
                    yield
                finally:
                    body.wait_for_more(None, deadline)
                    del self._reads[body]
        except TimeoutError:
            if self.draining:
                raise responses.draining() from None
            if body.ended_for_others:
                what = f"{count_of(self.requests, 'request')} in progress, and this one was slow"
                raise responses.busy(what) from None
            now = asyncio.get_running_loop().time()
            settings = self.settings
            silent = now < deadline and settings.silent_s < settings.request_s
            raise responses.too_slow(
                settings.silent_s if silent else settings.request_s, silent=silent
            ) from None

    def drain(self) -> None:
        """Refuse new requests; bodies that are being read have a quarter of ``drain_s`` left."""
        self.draining = True
        soon = asyncio.get_running_loop().time() + self.settings.drain_s / 4
        for body in self._reads:
            body.read_until(soon)

    def _end_a_read(self) -> bool:
        """End a request that is slow to arrive, of the address that has the most; whether it did.

        Only one that has had a moment to arrive, or else one of which nothing has arrived: others
        are no slower than the new one.
        """
        now = asyncio.get_running_loop().time()
        reads = [
            body
            for body, timeout in self._reads.items()
            if not timeout.expired() and not body.ended_for_others
        ]
        slow = [body for body in reads if body.began + _MOMENT_S < now]
        slow = slow or [body for body in reads if not body.bytes]
        if not slow:
            return False
        counts = Counter(body.address for body in slow)
        worst = max(slow, key=lambda body: counts[body.address])  # the first, so the oldest
        worst.ended_for_others = True
        worst.read_until(now)
        return True

    def close(self) -> None:
        """End the threads, once they have finished their current work."""
        self._decoders.shutdown(wait=True)
        self._large_decoder.shutdown(wait=True)

    async def take_traces(self, body: Body, encoding: str, content_type: str) -> Rejected:
        """Decode and store spans; returns once they are durable, or raises `Refusal`."""
        if self._sink.level() >= Level.CRITICAL:
            raise _overloaded(self._sink.pressure(), unread=False)
        self._senders.sent(body.sender, time.monotonic())
        submitted = await self._run(self._submit_traces, body, encoding, content_type)
        body.release()  # the sink counts what waits there
        if submitted.stored is not None:
            self.waiting += 1
            try:
                self._hurry()
                await self._until_durable(submitted.stored)
            finally:
                self.waiting -= 1
        return submitted.rejected

    def _hurry(self) -> None:
        """Have spans stored at once when all senders wait for it: no more come before that."""
        if self.waiting and self.waiting == self.requests:
            self._sink.hurry(alone=self._senders.alone(time.monotonic()))

    async def take_logs(self, body: Body, encoding: str, content_type: str) -> Rejected:
        """Forward log records; raises `Refusal` for a body that has none."""
        await self._run(self._forward_logs, body, encoding, content_type)
        return Rejected()

    async def _discard(self, signal: str, body: Body, encoding: str, content_type: str) -> Rejected:
        """Count a request and forget it: its sender need not know that nobody reads it."""
        self.stats.discard(signal)
        if signal not in self._discarded:
            self._discarded.add(signal)
            log.warning(
                "%s are answered with success and discarded, now and from here on, as this "
                "receiver keeps traces: set OTEL_%s_EXPORTER=none at the sender to save the work, "
                "or --%s refuse here",
                *(signal, signal.upper(), signal),
            )
        return Rejected()

    async def _run(
        self,
        work: Callable[[Body, str, str, bool], T],
        body: Body,
        encoding: str,
        content_type: str,
    ) -> T:
        # Large bodies have a thread of their own, so that small ones do not wait for them, and
        # only one of them at a time is in memory without its compression.
        loop = asyncio.get_running_loop()
        if body.decompressed_bytes(encoding) <= _LARGE_BYTES:
            with suppress(_LargeBody):
                return await loop.run_in_executor(
                    self._decoders, work, body, encoding, content_type, False
                )
        return await loop.run_in_executor(
            self._large_decoder, work, body, encoding, content_type, True
        )

    @contextmanager
    def _decompressed(self, body: Body, encoding: str, large: bool) -> Iterator[tuple[int, bytes]]:
        """The size of a body as it was sent, and the body, which counts meanwhile."""
        sent = body.take()
        try:
            plain = decompress(sent, encoding, self.limits if large else self._small_limits)
        except TooLarge:
            if large:
                raise
            body.put_back(sent)
            raise _LargeBody from None
        more = 0 if plain is sent else len(plain)
        self.count(more)
        try:
            yield len(sent), plain
        finally:
            self.count(-more)

    def count(self, size: int) -> None:
        """Add to the bytes in memory; any thread may."""
        with self._counting:
            self.bytes += size

    def _submit_traces(
        self, body: Body, encoding: str, content_type: str, large: bool
    ) -> _DecodedRequest:
        with (
            _refusing_bad_bodies(),
            self._decompressed(body, encoding, large) as (sent, plain),
        ):
            packed = self._sink.takes_packed
            decoded = decode_traces(plain, content_type, self.limits, packed=packed)
            check_held(decoded.batch.weight, decoded.written_bytes, sent, packed=packed)
        spans = len(decoded.batch)
        self.stats.received(spans, decoded.rejections, decoded.cuts)
        rejected = Rejected(decoded.rejected, decoded.reason)
        if not spans:
            return _DecodedRequest(rejected, None)
        # Until the spans are durable, the body counts as the forwarder's.
        forwarder = self.forwarders.get(TRACES)
        copy = plain if forwarder is not None and forwarder.reserve(len(plain)) else None
        del plain
        try:
            stored = self._sink.submit(SPAN_SOURCE, decoded.batch)
        except Exception as error:  # noqa: BLE001 - each becomes a response
            self._settle(spans, copy, content_type, durable=False)
            raise _not_stored(error) from None

        def settle(stored: Future[Any]) -> None:
            durable = not stored.cancelled() and not stored.exception()
            self._settle(spans, copy, content_type, durable=durable)

        # A callback, so that spans are counted even if their sender has disconnected.
        stored.add_done_callback(settle)
        # Without the batch: the sink has what it needs of it, and the rest can be freed.
        return _DecodedRequest(rejected, stored)

    def _settle(self, spans: int, copy: bytes | None, content_type: str, *, durable: bool) -> None:
        """Count spans, and forward the copy of their request if they are durable."""
        self.stats.settled(spans, durable)
        forwarder = self.forwarders.get(TRACES)
        if forwarder is None:
            return
        if copy is None:
            if durable:
                forwarder.drop(spans)
        elif durable:
            forwarder.offer(copy, content_type, spans, is_reserved=True)
        else:
            forwarder.release(len(copy))

    def _forward_logs(self, body: Body, encoding: str, content_type: str, large: bool) -> None:
        with _refusing_bad_bodies(), self._decompressed(body, encoding, large) as (_, plain):
            if content_type == JSON:
                plain = otlp_from_json(plain, LOGS, self.limits)
            try:
                logs = ExportLogsServiceRequest.FromString(plain)
            except DecodeError as error:
                raise BadRequest(str(error)) from None
        records = sum(
            len(scope.log_records)
            for resource in logs.resource_logs
            for scope in resource.scope_logs
        )
        self.forwarders[LOGS].offer(plain, PROTOBUF, records)

    async def _until_durable(self, stored: Future[Any]) -> None:
        # Shielded: a sender that disconnects must not cancel what the sink works on.
        inner = asyncio.wrap_future(stored)
        inner.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(self.settings.store_s):
                await asyncio.shield(inner)
        except TimeoutError:
            late = f"they were not durable within {self.settings.store_s:g} s"
            raise responses.not_stored(late) from None
        except asyncio.CancelledError:
            if inner.cancelled():  # by the sink, not this task
                raise responses.not_stored("the spool gave up") from None
            raise
        except Exception as error:  # noqa: BLE001 - each becomes a response
            raise _not_stored(error) from None


class Senders:
    """Whether one sender is alone: nobody else has sent for ``_ALONE_S``.

    With many senders this is rare, so that their spans go on sharing segments.
    """

    def __init__(self) -> None:
        self._sender = ""
        self._sent_at = self._other_at = -math.inf

    def sent(self, sender: str, now: float) -> None:
        """Note a request with spans."""
        if sender != self._sender:
            self._other_at = self._sent_at
            self._sender = sender
        self._sent_at = now

    def alone(self, now: float) -> bool:
        """Whether the sender of the newest request is alone."""
        return now - self._other_at > _ALONE_S


Take: TypeAlias = Callable[["Body", str, str], Awaitable[Rejected]]
"""What takes a request of a signal: the body, its encoding and its content type."""


class Body:
    """The body of one request, counted in the intake's bytes until released."""

    def __init__(self, intake: Intake, sender: str) -> None:
        self.sender = sender
        self.address = sender.rpartition(":")[0]
        self.began = asyncio.get_running_loop().time()
        self.ended_for_others = False
        """Whether it was slow to arrive, and others needed its place."""
        self._intake = intake
        self._parts: list[bytes] = []
        self._timeout: asyncio.Timeout | None = None
        self._deadline = 0.0
        self.bytes = 0

    def wait_for_more(self, timeout: asyncio.Timeout | None, deadline: float) -> None:
        """Be read until ``timeout``, which is put off by each part, up to ``deadline``."""
        self._timeout, self._deadline = timeout, deadline
        self._put_off()

    def read_until(self, when: float) -> None:
        """Let it arrive until then at most."""
        self._deadline = min(self._deadline, when)
        self._put_off()

    def _put_off(self) -> None:
        if self._timeout is not None and not self._timeout.expired():
            silent = asyncio.get_running_loop().time() + self._intake.settings.silent_s
            self._timeout.reschedule(min(silent, self._deadline))

    def add(self, part: bytes) -> None:
        """Append a part; raises `Refusal` if all requests together have too many bytes."""
        intake, size = self._intake, len(part)
        if intake.bytes + size > intake.settings.max_bytes:
            what = f"{intake.bytes >> 20} MiB of requests are in memory"
            raise responses.busy(what)
        intake.count(size)
        self.bytes += size
        self._parts.append(part)
        if size:
            self._put_off()

    def take(self) -> bytes:
        """The whole body, once: the caller has the only reference."""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def put_back(self, body: bytes) -> None:
        """Replace the collected parts by ``body``, for another :meth:`take`."""
        self._parts = [body]

    def decompressed_bytes(self, encoding: str) -> int:
        """About the size of the body once decompressed, before that is known.

        An honest sender has put it at the end of a gzip body; others are some eight times larger.
        """
        if not encoding:
            return self.bytes
        if "gzip" not in encoding:
            return 8 * self.bytes
        return max(self.bytes, int.from_bytes(b"".join(self._parts[-4:])[-4:], "little"))

    def release(self) -> None:
        """Free the body; it may be called twice."""
        self._parts = []
        self._intake.count(-self.bytes)
        self.bytes = 0


@contextmanager
def _refusing_bad_bodies() -> Iterator[None]:
    """Turn the errors of decoding into refusals."""
    try:
        yield
    except _LargeBody:
        raise
    except Unsupported as error:
        raise responses.wrong_encoding(str(error)) from None
    except BadRequest as error:
        raise responses.malformed(str(error)) from None
    except TooLarge as error:
        raise responses.too_large(str(error)) from None
    except MemoryError:
        raise responses.busy("the receiver is out of memory") from None
    except Exception as error:  # a bug in the decoder, which only these bytes can have caused
        log.exception("a body could not be decoded")
        what = f"the body could not be decoded ({type(error).__name__})"
        raise responses.malformed(what) from None


def _overloaded(pressure: Pressure, *, unread: bool) -> Refusal:
    # The pressure may have dropped since the level was read: then it is a short wait.
    level = max(pressure.level, Level.CRITICAL_PLUS if unread else Level.CRITICAL)
    why = pressure.why or "too much waits already"
    return responses.overloaded(level.name, why, pressure.retry_after_s or 1.0, unread=unread)


def _not_stored(error: Exception) -> Refusal:
    match error:
        case Overloaded():
            return responses.overloaded(error.level.name, error.why, error.retry_after_s)
        case SpoolClosedError():
            return responses.draining()
        case BadRowsError():
            return responses.malformed(str(error))
        case MessageTooLargeError():
            return responses.too_large(str(error))
    log.error("spans were not stored, and their sender is asked to retry: %s", error)
    return responses.not_stored(str(error))
