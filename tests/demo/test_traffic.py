"""``batchmill demo`` as users run it, and its parts, with the real SDK and real receivers."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import batchmill

pytest.importorskip("opentelemetry.sdk", reason="needs the extra demo")

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from batchmill.demo import INSTANCES, LastWords, Sender, SentSpans, Shop, make_exporter, plan
from tests.kit.otlp import TraceReceiver, Verdict, spans_of
from tests.kit.processes import run_here
from tests.kit.threads import PATIENCE_S, until

DEMO = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has it ignored
sys.argv = ["batchmill", "demo", *sys.argv[1:]]
from batchmill.cli import main
sys.exit(main())
"""
WITHOUT_THE_SDK = 'import sys; sys.modules["opentelemetry.sdk.trace"] = None\n' + DEMO
REFUSED = Verdict(status=503)


@functools.cache
def shop_spans(seed: int, begin_ns: int = 10**18) -> Sequence[ReadableSpan]:
    """The SDK's spans of ten seconds of the plan."""
    kept = InMemorySpanExporter()
    shop = Shop(seed, SimpleSpanProcessor(kept))
    for request in plan(seed, 20, 10):
        shop.play(request, begin_ns)
    return kept.get_finished_spans()


def test_same_seed_gives_the_same_spans_at_another_time() -> None:
    """Ids, attributes and all times but for the begin of the run are the seed's."""

    def facts(begin_ns: int) -> list[Any]:
        spans = []
        for span in shop_spans(5, begin_ns):
            known = json.loads(span.to_json())
            for key in ("start_time", "end_time", "events"):
                del known[key]
            assert span.start_time is not None
            assert span.end_time is not None
            spans.append((known, span.start_time - begin_ns, span.end_time - begin_ns))
        return spans

    assert facts(10**18) == facts(10**18 + 123_456_789)


def test_parents_are_spans_of_the_same_trace() -> None:
    """Every parent is there, in the same trace; ids are unique; all processes have a resource."""
    spans = shop_spans(5)
    contexts = {span.context.span_id: span.context.trace_id for span in spans if span.context}
    assert len(contexts) == len(spans)
    for span in spans:
        assert span.context is not None
        if span.parent is not None:
            assert contexts[span.parent.span_id] == span.context.trace_id
    seen = {
        (span.resource.attributes["service.name"], span.resource.attributes["service.instance.id"])
        for span in spans
    }
    assert seen == {(service, one) for service, all_ in INSTANCES.items() for one in all_}


def test_spans_are_the_plan_s() -> None:
    """Each step is a span with its name, kind, attributes, length and status."""
    planned = sorted(
        (step.instance, step.kind, step.name, step.duration_us, bool(step.error), step.attributes)
        for request in plan(5, 20, 10)
        for step, _ in request.root.family()
    )
    made = sorted(
        (
            str(span.resource.attributes["service.instance.id"]),
            span.kind.name,
            span.name,
            ((span.end_time or 0) - (span.start_time or 0)) // 1000,
            not span.status.is_ok,
            tuple((span.attributes or {}).items()),
        )
        for span in shop_spans(5)
    )
    assert made == planned


def test_everything_is_acknowledged_though_every_third_request_is_refused() -> None:
    """The balance is what the receiver has: every span once, and none is lost to a 503.

    Nothing ends in the future.
    """
    with TraceReceiver(lambda number: REFUSED if number % 3 == 0 else Verdict()) as receiver:
        done = run_demo("--endpoint", receiver.endpoint, "--seconds=2", "--rate=60", "--seed=7")
        balance = the_balance(done)
        spans = receiver.spans()
    expected = list(plan(7, 60, 2))
    assert done.returncode == 0
    assert 503 in receiver.statuses
    assert receiver.paths == {"/v1/traces"}
    assert len({span.span_id for _, span in spans}) == len(spans) == balance["sent"]
    assert balance["sent"] == sum(1 for request in expected for _ in request.root.family())
    assert (balance["acknowledged"], balance["failed"]) == (balance["sent"], 0)
    assert balance["requests"] == len(expected)
    assert balance["seconds"] >= 2
    # Spans are sent after they have ended, by the clock of those who read them.
    for request, received_ns in zip(receiver.requests, receiver.received_ns, strict=True):
        assert max(span.end_time_unix_nano for _, span in spans_of(request)) < received_ns


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot send a process Ctrl-C alone")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_early_with_a_true_balance(number: signal.Signals) -> None:
    """After Ctrl-C, or SIGTERM, what was sent is still brought home; the figures are true."""
    with (
        TraceReceiver() as receiver,
        subprocess.Popen(
            [*command(), "--endpoint", receiver.endpoint, "--forever", "--rate=80"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            text=True,
        ) as demo,
    ):
        assert receiver.arrived.wait(PATIENCE_S)
        demo.send_signal(number)
        out, _ = demo.communicate(timeout=PATIENCE_S)
        spans = receiver.spans()
    balance = json.loads(out)
    assert demo.returncode == 0
    assert balance["sent"] == balance["acknowledged"] == len(spans) > 0
    assert balance["failed"] == 0
    assert balance["requests"] == len({span.trace_id for _, span in spans})


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot send a process Ctrl-C alone")
def test_second_interrupt_leaves_the_rest_and_says_how_much() -> None:
    """Whoever does not want to wait for a receiver that takes nothing still gets the figures."""
    with (
        TraceReceiver(lambda number: REFUSED) as receiver,
        subprocess.Popen(
            [*command(), "--endpoint", receiver.endpoint, "--forever", "--rate=80"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            text=True,
        ) as demo,
    ):
        assert receiver.arrived.wait(PATIENCE_S)
        demo.send_signal(signal.SIGINT)
        assert demo.stderr is not None
        assert any("Ctrl-C again" in line for line in demo.stderr)
        demo.send_signal(signal.SIGINT)
        out, _ = demo.communicate(timeout=PATIENCE_S)
    balance = json.loads(out)
    assert demo.returncode == 130
    assert balance["failed"] == balance["sent"] > balance["acknowledged"] == 0


def test_over_grpc() -> None:
    """With --grpc the same spans go to a gRPC receiver, which refuses the first request."""
    with grpc_receiver() as (endpoint, received):
        done = run_demo("--grpc", "--endpoint", endpoint, "--seconds=1", "--rate=60", "--seed=7")
    count = sum(len(spans_of(request)) for request in received)
    balance = the_balance(done)
    assert done.returncode == 0
    assert balance["sent"] == balance["acknowledged"] == count > 0


def test_nobody_listening_is_said_at_once() -> None:
    """Without a receiver it fails with the address and what to do, not with a traceback."""
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        code, out, errors = run_here("demo", "--endpoint", endpoint)
    assert (code, out) == (1, "")
    assert f"nothing listens at {endpoint}" in errors
    assert "batchmill run" in errors
    assert "Traceback" not in errors


def test_missing_sdk_is_named() -> None:
    """Without the SDK it fails and says what to install."""
    done = run_demo(program=WITHOUT_THE_SDK)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install 'batchmill[demo]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_disabled_sdk_is_named() -> None:
    """Where the environment switches the SDK off, it says so instead of sending nothing."""
    code, _, errors = run_here("demo", OTEL_SDK_DISABLED="true")
    assert code == 1
    assert "OTEL_SDK_DISABLED" in errors


@pytest.mark.parametrize(
    ("option", "value"),
    [("--seconds", "0"), ("--rate", "nan"), ("--endpoint", "4318"), ("--endpoint", "http://a:b")],
)
def test_bad_options_are_refused_by_name(option: str, value: str) -> None:
    """An option that makes no sense is refused with its name, the value and what is allowed."""
    code, _, errors = run_here("demo", f"{option}={value}")
    assert code == 2
    assert f"{option}: {value!r} is not valid: it must be" in errors


def test_receiver_that_never_takes_them_is_given_up_on() -> None:
    """When patience is over the spans count as failed, and those that end later do not wait."""
    with TraceReceiver(lambda number: Verdict(status=400)) as receiver, LastWords() as words:
        exporter, rejected = make_exporter(receiver.endpoint, grpc=False)
        sender = Sender(exporter, rejected=rejected, capacity=1, linger_s=0, patience_s=0)
        for span in shop_spans(5)[:50]:
            sender.on_end(span)
        sender.close()
    assert sender.given_up
    assert sender.counts() == SentSpans(50, 0)
    assert sender.counts().failed == 50
    assert "400" in words.text


def test_spans_refused_one_by_one_are_not_acknowledged() -> None:
    """A partial success acknowledges the rest only."""
    with TraceReceiver(lambda number: Verdict(rejected=2 if number == 1 else 0)) as receiver:
        exporter, rejected = make_exporter(receiver.endpoint, grpc=False)
        sender = Sender(exporter, rejected=rejected, batch=10, linger_s=60)
        for span in shop_spans(5)[:20]:
            sender.on_end(span)
        sender.close()
    assert sender.counts() == SentSpans(20, 18)


class Slow(SpanExporter):
    """Answers when the shop has run into the bound, or has nothing more."""

    def __init__(self, bound: int, total: int) -> None:
        self.bound, self.total = bound, total
        self.sender: Sender | None = None
        self.ready = threading.Event()
        self.most = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert self.ready.wait(PATIENCE_S)
        self.most = max(self.most, until(self._waiting_spans))
        return SpanExportResult.SUCCESS

    def _waiting_spans(self) -> int:
        """How many spans wait, once the bound is reached or all are there; 0 until then."""
        assert self.sender is not None
        counts = self.sender.counts()
        reached = counts.failed >= min(self.bound, self.total - counts.acknowledged)
        return counts.failed if reached else 0


def test_memory_is_bounded_by_making_the_shop_wait() -> None:
    """No more than a batch, the capacity and the span that waits are held at any time."""
    slow = Slow(bound=5 + 10 + 1, total=100)
    slow.sender = sender = Sender(slow, capacity=10, batch=5, linger_s=60)
    slow.ready.set()
    for span in shop_spans(5)[:100]:
        sender.on_end(span)
    sender.close()
    assert slow.most == slow.bound
    assert sender.counts() == SentSpans(100, 100)


class Clumsy(SpanExporter):
    """Raises the first time, as an exporter must not."""

    def __init__(self) -> None:
        self.calls = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.calls += 1
        if self.calls == 1:
            raise OSError("no route")
        return SpanExportResult.SUCCESS


def test_exporter_that_raises_is_tried_again() -> None:
    """An exception is a failure like any other; whoever watches is told why."""
    retries: list[tuple[int, str]] = []
    with LastWords() as words:
        sender = Sender(Clumsy(), on_retry=lambda spans: retries.append((spans, words.text)))
        sender.on_end(shop_spans(5)[0])
        sender.close()
    assert sender.counts() == SentSpans(1, 1)
    [(spans, why)] = retries
    assert spans == 1
    assert "no route" in why


@contextmanager
def grpc_receiver() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A gRPC receiver that is not available for the first request; what it acknowledged."""
    received: list[ExportTraceServiceRequest] = []
    calls: list[int] = []

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
            calls.append(1)
            if len(calls) == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
            received.append(request)
            return ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    register(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", received
    finally:
        server.stop(None).wait()


def command(program: str = DEMO) -> list[str]:
    """The demo as a program that listens to Ctrl-C."""
    return [sys.executable, "-c", program]


def environment() -> dict[str, str]:
    """This process's, without settings of OpenTelemetry, with the package to be found."""
    source = str(Path(batchmill.__file__).parent.parent)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return ours | {"PYTHONPATH": source}


def run_demo(*arguments: str, program: str = DEMO) -> subprocess.CompletedProcess[str]:
    """Run it to its end with its output in pipes."""
    return subprocess.run(
        [*command(program), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def the_balance(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one line that standard output has."""
    [line] = done.stdout.splitlines()
    balance: dict[str, Any] = json.loads(line)
    assert list(balance) == ["sent", "acknowledged", "failed", "requests", "seconds"]
    return balance
