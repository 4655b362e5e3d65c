"""Turns planned requests into spans of the OpenTelemetry SDK.

Every process of the shop has a tracer provider and a resource of its own; the parent of a span in
another process travels in a ``traceparent`` header, as it would between machines. Begin and end of
a span are given: nothing sleeps inside a request.
"""

from __future__ import annotations

import random

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
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
