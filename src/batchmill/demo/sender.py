"""Makes the spans of planned requests with the OpenTelemetry SDK, and sends them.

Every process of the shop has a tracer provider and a resource of its own; the parent of a span in
another process travels in a ``traceparent`` header, as it would between machines. Begin and end of
a span are given: nothing sleeps inside a request.

The SDK's own batch processor drops spans when its queue is full or an export fails, and logs that
at best. The one here blocks whoever ends a span instead, and retries until the receiver has
acknowledged or a time is over; so its counts balance: what was sent was acknowledged, or failed.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from batchmill import __version__
from batchmill.demo.steps import INSTANCES, Request, Step


class SeededIds(IdGenerator):
    """Ids that depend only on the seed and the number of the request."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._chance = random.Random(f"{seed}:ids")

    def begin(self, request: int) -> None:
        """Make the ids of this request from now on."""
        self._chance = random.Random(f"{self._seed}:{request}:ids")

    def generate_span_id(self) -> int:
        """64 bits, not all of them 0."""
        return self._chance.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        """128 bits, not all of them 0."""
        return self._chance.getrandbits(128) or 1


class Shop:
    """Makes the spans of planned requests and passes them to a processor as they end."""

    def __init__(self, seed: int, processor: SpanProcessor) -> None:
        self._ids = SeededIds(seed)
        self._header = TraceContextTextMapPropagator()
        self._tracers: dict[str, trace.Tracer] = {}
        for service, instances in INSTANCES.items():
            for instance in instances:
                about = {
                    "service.name": service,
                    "service.namespace": "shop",
                    "service.instance.id": instance,
                    "service.version": __version__,
                    "host.name": f"{instance}.shop",
                }
                provider = TracerProvider(
                    sampler=ALWAYS_ON,
                    resource=Resource(about),
                    id_generator=self._ids,
                    shutdown_on_exit=False,
                )
                provider.add_span_processor(processor)
                self._tracers[instance] = provider.get_tracer("batchmill.demo", __version__)

    def play(self, request: Request, begin_ns: int) -> None:
        """Make the spans of a request; the run began at ``begin_ns`` since 1970."""
        self._ids.begin(request.index)
        self._play(request.root, None, Context(), begin_ns + request.offset_us * 1000)

    def _play(self, step: Step, parent: Step | None, context: Context, begin_ns: int) -> None:
        if parent is not None and parent.service != step.service:
            header: dict[str, str] = {}
            self._header.inject(header, context)
            context = self._header.extract(header, Context())
        end_ns = begin_ns + step.end_us * 1000
        span = self._tracers[step.instance].start_span(
            step.name,
            context,
            trace.SpanKind[step.kind],
            dict(step.attributes),
            start_time=begin_ns + step.start_us * 1000,
        )
        for child in step.children:
            self._play(child, step, trace.set_span_in_context(span, Context()), begin_ns)
        if step.error:
            span.add_event("exception", {"exception.message": step.error}, end_ns)
            span.set_status(trace.StatusCode.ERROR, step.error)
        span.end(end_ns)


CAPACITY = 20_000
BATCH = 2_048
"""Spans in one request: well below the 4 MiB that a gRPC server accepts."""
LINGER_S = 0.2
PATIENCE_S = 60.0
_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_LOGGER = "opentelemetry"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class SentSpans:
    """The counts of a sender."""

    sent: int
    acknowledged: int

    @property
    def failed(self) -> int:
        """Not acknowledged. The receiver may have some of them: its answer may have been lost."""
        return self.sent - self.acknowledged


class LastWords(logging.Handler):
    """While entered, keeps the last message that the exporter logged, and hides it from others."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = "the receiver did not acknowledge"
        self._logger = logging.getLogger(_LOGGER)
        self._propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.text = record.getMessage()

    def __enter__(self) -> Self:
        self._propagate, self._logger.propagate = self._logger.propagate, False
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagate


class Sender(SpanProcessor):
    """Exports spans in batches on its own thread; holds at most ``capacity`` of them.

    ``rejected`` returns how many spans the receiver has refused so far in requests that it
    acknowledged. ``on_retry`` is called on the sender's thread, with the number of spans, when a
    batch must be sent again.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        rejected: Callable[[], int] = lambda: 0,
        on_retry: Callable[[int], None] = lambda spans: None,
        capacity: int = CAPACITY,
        batch: int = BATCH,
        linger_s: float = LINGER_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._exporter = exporter
        self._rejected = rejected
        self._on_retry = on_retry
        self._capacity, self._batch = capacity, batch
        self._linger_s, self._patience_s = linger_s, patience_s
        self._changed = threading.Condition()
        self._waiting: deque[ReadableSpan] = deque()
        self._sent = self._acknowledged = 0
        self._closing = False
        self._latest_s = float("inf")
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batchmill-demo", daemon=True)
        self._thread.start()

    @property
    def given_up(self) -> bool:
        """Whether a batch was not acknowledged in time: all the rest has failed."""
        return self._given_up.is_set()

    def counts(self) -> SentSpans:
        """The counts so far; those of a closed sender are final."""
        with self._changed:
            return SentSpans(self._sent, self._acknowledged)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing to do yet."""

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span; blocks while too many are held, unless the sender has given up."""
        with self._changed:
            self._sent += 1
            self._changed.wait_for(lambda: len(self._waiting) < self._capacity or self.given_up)
            if not self.given_up:
                self._waiting.append(span)
                self._changed.notify_all()

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Send what is still held, for at most that long, and end."""
        with self._changed:
            self._closing = True
            self._latest_s = min(self._latest_s, time.monotonic() + patience_s)
            self._changed.notify_all()
        self._thread.join()
        self._exporter.shutdown()

    def abandon(self) -> None:
        """End at once; what is not acknowledged by now has failed."""
        self._given_up.set()
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()
        self._exporter.shutdown()

    def _run(self) -> None:
        while batch := self._next():
            before = self._rejected()
            if not self._deliver(batch):
                self._given_up.set()
                with self._changed:
                    self._waiting.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._acknowledged += len(batch) - (self._rejected() - before)

    def _next(self) -> list[ReadableSpan]:
        """The next batch: full, or after the linger time; empty when nothing more comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._changed.wait_for(
                lambda: len(self._waiting) >= self._batch or self._closing, self._linger_s
            )
            taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            self._changed.notify_all()
            return taken

    def _deliver(self, batch: list[ReadableSpan]) -> bool:
        """Whether the receiver acknowledged in time."""
        until_s = time.monotonic() + self._patience_s
        tries = 0
        while not self._exported(batch):
            if self.given_up or time.monotonic() >= min(until_s, self._latest_s):
                return False
            self._on_retry(len(batch))
            self._given_up.wait(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1
        return True

    def _exported(self, batch: list[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - it must not raise, nor end the thread if it does
            logging.getLogger(_LOGGER).error("the exporter failed: %r", error)
            return False


def make_exporter(endpoint: str, *, grpc: bool) -> tuple[SpanExporter, Callable[[], int]]:
    """An exporter, and a function that counts the spans refused in acknowledged requests.

    The SDK's gRPC exporter does not pass that part of the answer on: there it is 0.
    """
    return (_over_grpc(endpoint), lambda: 0) if grpc else _over_http(endpoint)


def _over_grpc(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint, insecure=urlsplit(endpoint).scheme == "http")


def _over_http(endpoint: str) -> tuple[SpanExporter, Callable[[], int]]:
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    rejected = 0

    def on_response(response: requests.Response, *_: Any, **__: Any) -> None:
        nonlocal rejected
        if response.status_code == 200:
            rejected += rejected_spans(response.content)

    session = requests.Session()
    session.hooks["response"].append(on_response)
    parts = urlsplit(endpoint)
    if parts.hostname in LOOPBACK:
        session.trust_env = False  # a proxy would ask its own 127.0.0.1
    url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    return OTLPSpanExporter(url, session=session), lambda: rejected


def rejected_spans(answer: bytes) -> int:
    """The spans that an OTLP answer counts as refused."""
    try:
        response = ExportTraceServiceResponse.FromString(answer)
    except DecodeError:  # not protobuf, but it acknowledges
        return 0
    return int(response.partial_success.rejected_spans)
