"""A request's body on its way to a durable segment: what HTTP and gRPC have in common."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from batchmill.ingest import answers
from batchmill.ingest.answers import Refused
from batchmill.ingest.decode.gzip import decompress
from batchmill.ingest.decode.limits import BadRequest, Limits, TooLarge, Unsupported
from batchmill.ingest.decode.request import decode_traces
from batchmill.ingest.figures import Figures
from batchmill.ingest.settings import GRPC_MESSAGE_BYTES, ReceiverSettings
from batchmill.kafka import MessageTooLargeError
from batchmill.spool import (
    SPAN_SOURCE,
    BadRowsError,
    Judgement,
    Level,
    Measure,
    Overloaded,
    SpanBatch,
    SpoolClosedError,
)

log = logging.getLogger("batchmill.ingest")

TRACES, LOGS = "traces", "logs"
Rejected: TypeAlias = tuple[int, str]
"""How many spans of a request were rejected, and why."""

_LARGE_BYTES = 2**20
"""A body of more than this, some 30 ms of work, is large."""


class SinkStats(Protocol):
    """What a receiver's status tells of a spool; the rest it tells if it is there."""

    @property
    def level(self) -> Level:
        """How much pressure there is."""
        ...

    @property
    def queue_rows(self) -> int:
        """Spans taken and not durable yet."""
        ...

    @property
    def submitted_rows(self) -> int:
        """Spans taken since the start."""
        ...

    @property
    def failed_rows(self) -> int:
        """Of those, spans that did not become durable."""
        ...

    @property
    def refused_rows(self) -> int:
        """Spans that were not taken."""
        ...


class SpanSink(Protocol):
    """What a receiver needs of a spool, or of what is in its place."""

    def level(self) -> Level:
        """How much pressure there is: at CRITICAL and above, nothing is taken. Cheap."""
        ...

    def judge(self) -> Judgement:
        """The level, and what a sender who is refused hears."""
        ...

    def submit(self, source: str, batch: SpanBatch) -> Future[Any]:
        """Take a batch; the future resolves once it is durable."""
        ...

    def hurry(self) -> bool:
        """All senders wait: write what there is, if it is worth it."""
        ...

    def measures(self) -> Sequence[Measure]:
        """What makes the level: depths, and where their levels begin."""
        ...

    def stats(self) -> SinkStats:
        """The spool at this moment."""
        ...


class Onward(Protocol):
    """Who gets requests as they came, beside the spool."""

    def offer(self, body: bytes, content_type: str, items: int) -> None:
        """Take a body, uncompressed, or drop it; never waits. Called by any thread."""
        ...

    def figures(self) -> Mapping[str, Any]:
        """What became of it, for the status."""
        ...


class Intake:
    """Takes bodies, a bounded number of requests and bytes at a time.

    All methods are called on the event loop; decoding and the hand-over to the spool run on
    threads of its own, so that a large body does not hold up the others.
    """

    def __init__(
        self,
        spool: SpanSink,
        limits: Limits,
        settings: ReceiverSettings,
        figures: Figures,
        onward: Mapping[str, Onward] | None = None,
    ) -> None:
        self.onward = onward or {}
        """Who gets requests, by signal: traces once they are durable, logs at once."""
        self.limits = limits
        self.settings = settings
        self.figures = figures
        self.draining = False
        self.requests = 0
        self.waiting = 0
        """Of the requests, those whose spans wait for a segment."""
        self.bytes = 0
        self._spool = spool
        self._pool = ThreadPoolExecutor(settings.decoders, "batchmill-ingest-decode")
        self._for_large = ThreadPoolExecutor(1, "batchmill-ingest-decode-large")
        self._reading: set[asyncio.Timeout] = set()
        self._grpc_reading = 0

    def level(self) -> str:
        """The name of the spool's level."""
        return self._spool.level().name

    @contextmanager
    def admitted(self) -> Iterator[Hold]:
        """Let one more request in, before any of its body is read; raises ``Refused``."""
        if self.draining:
            raise Refused(answers.draining())
        if self._spool.level() >= Level.CRITICAL_PLUS:
            raise Refused(_refusal(self._spool.judge(), unread=True))
        if self.requests >= self.settings.max_requests:
            raise Refused(answers.busy(f"{self.requests} requests are under way"))
        self.requests += 1
        hold = Hold(self)
        try:
            yield hold
        finally:
            self.requests -= 1
            hold.let_go()

    @contextmanager
    def grpc_reading(self) -> Iterator[None]:
        """One gRPC message is being received: how large it is shows only when it is there."""
        if (self._grpc_reading + 1) * GRPC_MESSAGE_BYTES > self.settings.max_bytes:
            raise Refused(answers.busy(f"{self._grpc_reading} gRPC messages are on their way"))
        self._grpc_reading += 1
        try:
            yield
        finally:
            self._grpc_reading -= 1

    @contextmanager
    def in_time(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """A body is read under ``timeout``; draining makes it shorter."""
        self._reading.add(timeout)
        try:
            yield
        finally:
            self._reading.discard(timeout)

    def drain(self) -> None:
        """Take no more requests; senders that are still sending have a moment left."""
        self.draining = True
        soon = asyncio.get_running_loop().time() + self.settings.drain_s / 4
        for each in self._reading:
            when = each.when()
            if not each.expired() and (when is None or when > soon):
                each.reschedule(soon)

    def out_of_time(self) -> Refused:
        """What a sender is told whose body did not arrive in time."""
        if self.draining:
            return Refused(answers.draining())
        return Refused(answers.too_slow(self.settings.request_s))

    def close(self) -> None:
        """End the threads; what they do now is finished first."""
        self._pool.shutdown(wait=True)
        self._for_large.shutdown(wait=True)

    async def take(self, hold: Hold, encoding: str, content_type: str) -> Rejected:
        """Decode and store; returns once that is durable, or raises ``Refused``."""
        if self._spool.level() >= Level.CRITICAL:
            raise Refused(_refusal(self._spool.judge(), unread=False))
        loop = asyncio.get_running_loop()
        rejected, stored = await loop.run_in_executor(
            self._thread_for(hold, encoding), self._decode_and_submit, hold, encoding, content_type
        )
        hold.let_go()  # what waits in the spool is counted there
        if stored is not None:
            self.waiting += 1
            try:
                if self.waiting == self.requests:
                    self._spool.hurry()
                await self._durable(stored)
            finally:
                self.waiting -= 1
        return rejected

    def _thread_for(self, hold: Hold, encoding: str) -> ThreadPoolExecutor:
        # Whoever sends little does not wait for what others sent much of.
        size = hold.plain_bytes() if encoding else hold.bytes
        return self._for_large if size > _LARGE_BYTES else self._pool

    def _decode_and_submit(
        self, hold: Hold, encoding: str, content_type: str
    ) -> tuple[Rejected, Future[Any] | None]:
        try:
            plain = decompress(hold.body(), encoding, self.limits)
            decoded = decode_traces(plain, content_type, self.limits)
        except Unsupported as error:
            raise Refused(answers.wrong_encoding(str(error))) from None
        except BadRequest as error:
            raise Refused(answers.malformed(str(error))) from None
        except TooLarge as error:
            raise Refused(answers.too_large(str(error))) from None
        except MemoryError:
            raise Refused(answers.busy("the receiver is out of memory")) from None
        except Exception as error:  # only these bytes can be the cause
            log.exception("a body could not be decoded, and the decoder does not say why")
            what = f"the body could not be decoded ({type(error).__name__})"
            raise Refused(answers.malformed(what)) from None
        spans = len(decoded.batch)
        self.figures.received(spans, decoded.rejections, decoded.cuts)
        rejected = decoded.rejected, decoded.reason
        if not spans:
            return rejected, None
        try:
            stored = self._spool.submit(SPAN_SOURCE, decoded.batch)
        except Exception as error:  # noqa: BLE001 - each becomes an answer
            self.figures.settled(spans, False)
            raise _not_stored(error) from None
        # Here, so that they are counted even if their sender has left.
        kept = plain if TRACES in self.onward else b""
        stored.add_done_callback(functools.partial(self._settled, spans, kept, content_type))
        # Without the batch: the spool has it in another form, and this one can go.
        return rejected, stored

    def _settled(self, spans: int, plain: bytes, content_type: str, stored: Future[Any]) -> None:
        durable = not stored.cancelled() and not stored.exception()
        self.figures.settled(spans, durable)
        if durable and TRACES in self.onward:
            self.onward[TRACES].offer(plain, content_type, spans)

    async def hand_on_logs(self, hold: Hold, encoding: str, content_type: str) -> None:
        """Hand on the body of a request with logs; what is none is ``Refused``."""
        loop = asyncio.get_running_loop()
        thread = self._thread_for(hold, encoding)
        await loop.run_in_executor(thread, self._hand_on_logs, hold, encoding, content_type)

    def _hand_on_logs(self, hold: Hold, encoding: str, content_type: str) -> None:
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

        from batchmill.ingest.decode.transcode import otlp_from_json

        try:
            plain = decompress(hold.body(), encoding, self.limits)
            if content_type == answers.JSON:
                plain = otlp_from_json(plain, LOGS, self.limits)
            found = ExportLogsServiceRequest.FromString(plain)
        except Unsupported as error:
            raise Refused(answers.wrong_encoding(str(error))) from None
        except (BadRequest, DecodeError) as error:
            raise Refused(answers.malformed(str(error))) from None
        except TooLarge as error:
            raise Refused(answers.too_large(str(error))) from None
        records = sum(
            len(scope.log_records) for each in found.resource_logs for scope in each.scope_logs
        )
        self.onward[LOGS].offer(plain, answers.PROTOBUF, records)

    async def _durable(self, stored: Future[Any]) -> None:
        # Shielded: whoever leaves early must not cancel what the spool works on.
        inner = asyncio.wrap_future(stored)
        inner.add_done_callback(lambda each: each.cancelled() or each.exception())
        try:
            async with asyncio.timeout(self.settings.store_s):
                await asyncio.shield(inner)
        except TimeoutError:
            late = f"they were not durable within {self.settings.store_s:g} s"
            raise Refused(answers.not_stored(late)) from None
        except asyncio.CancelledError:
            if inner.cancelled():  # by the spool, not this task
                raise Refused(answers.not_stored("the spool gave up")) from None
            raise
        except Exception as error:  # noqa: BLE001 - each becomes an answer
            raise _not_stored(error) from None


class Hold:
    """The body of one request, as long as it is needed."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._parts: list[bytes] = []
        self.bytes = 0

    def add(self, part: bytes) -> None:
        """One more part; raises ``Refused`` if that is too much for all requests together."""
        intake, count = self._intake, len(part)
        if intake.bytes + count > intake.settings.max_bytes:
            what = f"{intake.bytes >> 20} MiB of requests are in memory"
            raise Refused(answers.busy(what))
        intake.bytes += count
        self.bytes += count
        self._parts.append(part)

    def body(self) -> bytes:
        """All of it, once: the caller has the only reference."""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def plain_bytes(self) -> int:
        """What a body in gzip will be without it: it says so in its last bytes, if it is honest."""
        return max(self.bytes, int.from_bytes(b"".join(self._parts[-4:])[-4:], "little"))

    def starts_with(self, prefix: bytes) -> bool:
        """How it begins."""
        return bool(self._parts) and self._parts[0].startswith(prefix)

    def let_go(self) -> None:
        """It is not needed any more."""
        self._parts = []
        self._intake.bytes -= self.bytes
        self.bytes = 0


def _refusal(judged: Judgement, *, unread: bool) -> answers.Refusal:
    # It may have become better since it was asked for the level: then it is a short wait.
    level = max(judged.level, Level.CRITICAL_PLUS if unread else Level.CRITICAL)
    why = judged.why or "too much waits already"
    return answers.overloaded(level.name, why, judged.retry_after_s or 1.0, unread=unread)


def _not_stored(error: Exception) -> Refused:
    if isinstance(error, Overloaded):
        return Refused(answers.overloaded(error.level.name, error.why, error.retry_after_s))
    if isinstance(error, SpoolClosedError):
        return Refused(answers.draining())
    if isinstance(error, BadRowsError):
        return Refused(answers.malformed(str(error)))
    if isinstance(error, MessageTooLargeError):
        return Refused(answers.too_large(str(error)))
    log.error("spans were not stored, and their sender is told so: %s", error)
    return Refused(answers.not_stored(str(error)))
