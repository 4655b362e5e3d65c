"""Senders of a soak: spans at a rate that changes, with new names all the time.

A request is sent until it is acknowledged, by HTTP or gRPC, so that in the end every span that was
ever sent is either counted or has a reason.
"""

from __future__ import annotations

import contextlib
import http.client
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self

import grpc
import numpy as np
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks.ingest_bodies import Body, Made, trace
from tests.kit.ingest import PROTOBUF
from tests.soak.balance import Sent

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
IN_A_REQUEST = 400
DAYS_NS = 40 * 86_400 * 10**9
_ANSWER_S = 10.0
_RETRY_S = 0.3
_TICK_S = 0.05
_NEW_BODY_S = 2.0
_BODIES = 24
_WAITING = 300
"""Requests that may wait for a sender; at the limit, the rate is not reached: see ``missed``."""


@dataclass(frozen=True)
class Request:
    """A request that is to be acknowledged."""

    body: bytes
    spans: int
    served: int
    skew_days: int = 0


@dataclass
class Bodies:
    """Requests of which each has traces of its own, and some names that nobody has used before."""

    seed: int
    new_names: float
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))

    def __post_init__(self) -> None:
        self._rng = random.Random(f"bodies {self.seed}")
        self._ids = np.random.default_rng([self.seed, 7])
        self._made = [self._make() for _ in range(_BODIES)]
        self._next = 0

    def renew(self) -> None:
        """Replace the oldest body by one with new names."""
        self._made[self._next % _BODIES] = self._make()
        self._next += 1

    def request(self, skew_days: int = 0, machine_skew_s: float = 0.0) -> Request:
        """The next request, whose spans end about now by the sender's clock."""
        body, served = self._rng.choice(self._made)
        now_ns = time.time_ns() + skew_days * DAYS_NS // 40 + int(machine_skew_s * 1e9)
        return Request(body.fresh(self._ids, now_ns), body.spans, served, skew_days)

    def _make(self) -> tuple[Body, int]:
        spans: list[Made] = []
        while len(spans) < IN_A_REQUEST:
            spans += trace(self._rng, self._rng.randrange(500_000_000))
        # Whole traces and no part of one: no call waits for a partner that never comes.
        spans = [self._renamed(span) for span in spans]
        return Body(spans), sum(span.kind == Span.SPAN_KIND_SERVER for span in spans)

    def _renamed(self, span: Made) -> Made:
        if span.kind != Span.SPAN_KIND_SERVER or self._rng.random() >= self.new_names:
            return span
        letters = "".join(self._rng.choices("bcdfghklmnprstvz", k=10))
        route = f"/new/{letters}"
        attributes = {**span.attributes, "http.route": route, "url.path": route}
        return replace(span, name=f"GET {route}", attributes=attributes)


class Load:
    """Sends spans to one receiver while it is entered.

    ``senders``: how many with HTTP and with gRPC. Each waits for its answer, for the linger of a
    segment (0.2 s) at least, so that 50 requests a second take a dozen.
    """

    def __init__(
        self,
        ports: tuple[int, int],
        token: str,
        rate: Callable[[float], float],
        bodies: Bodies,
        senders: tuple[int, int] = (24, 8),
    ) -> None:
        self._http_port, self._grpc_port = ports
        self._token = token
        self._rate = rate
        self._bodies = bodies
        self._waiting: queue.Queue[Request] = queue.Queue(_WAITING)
        self._over = threading.Event()
        self._gone = threading.Event()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._pacer = threading.Thread(target=self._pace, name="pacer")
        self._senders = [
            threading.Thread(target=target, name="sender")
            for target, count in zip((self._send_http, self._send_grpc), senders, strict=True)
            for _ in range(count)
        ]
        self.skew_days = 0
        """The clock of a sender is so wrong; one request in ten is that sender's."""
        self.machine_skew_s = 0.0
        """The clock of the machine is so wrong."""

    def __enter__(self) -> Self:
        for thread in (self._pacer, *self._senders):
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._gone.set()
        for thread in (self._pacer, *self._senders):
            thread.join()

    def finish(self) -> None:
        """Make no new requests; those that wait are sent until they are acknowledged."""
        self._over.set()

    def is_done(self) -> bool:
        """Whether all were acknowledged, after :meth:`finish`."""
        return self._over.is_set() and not self._pacer.is_alive() and self.pending() == 0

    def pending(self) -> int:
        """Spans that were sent, or are about to be, and are not acknowledged."""
        with self._lock:
            return self._counts["spans"] - self._counts["acknowledged"]

    def counts(self) -> dict[str, int]:
        """All counters so far; ``missed``: spans that were not made, as too many waited."""
        with self._lock:
            return dict(self._counts)

    def sent(self) -> Sent:
        """The senders' side of the balance."""
        counts = self.counts()
        names = Sent.__dataclass_fields__
        return Sent(**{name: counts.get(name, 0) for name in names})

    def _pace(self) -> None:
        start = last = renewed = time.monotonic()
        due = 0.0
        number = 0
        while not self._over.wait(_TICK_S):
            now = time.monotonic()
            due += self._rate(now - start) * (now - last)
            last = now
            if now - renewed > _NEW_BODY_S:
                self._bodies.renew()
                renewed = now
            while due >= IN_A_REQUEST:
                number += 1
                skew = self.skew_days if number % 10 == 0 else 0
                request = self._bodies.request(skew, self.machine_skew_s)
                due -= request.spans
                # Counted first: a sender may have acknowledged it before put() returns.
                self._note(spans=request.spans, served=request.served, **_skewed(request, ""))
                try:
                    self._waiting.put_nowait(request)
                except queue.Full:
                    gone = {"spans": request.spans, "served": request.served}
                    gone |= _skewed(request, "")
                    self._note(**{name: -count for name, count in gone.items()})
                    self._note(missed=request.spans + max(0, int(due)))
                    due = 0.0

    def _note(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _requests(self) -> Iterator[Request]:
        while not self._gone.is_set():
            try:
                yield self._waiting.get(timeout=_RETRY_S)
            except queue.Empty:
                if self._over.is_set() and not self._pacer.is_alive():
                    return

    def _deliver(self, request: Request, send: Callable[[Request], str]) -> None:
        """Send a request until it is acknowledged; each try has an outcome."""
        while not self._gone.is_set():
            outcome = send(request)
            self._note(**{f"{outcome} requests": 1})
            if outcome == "ok":
                self._note(acknowledged=request.spans)
                return
            if outcome == "unclear":  # it may have been stored
                self._note(repeated=request.spans, **_skewed(request, "repeated_"))
            self._gone.wait(_RETRY_S)

    def _send_http(self) -> None:
        headers = {"content-type": PROTOBUF, "authorization": f"Bearer {self._token}"}
        link: http.client.HTTPConnection | None = None

        def send(request: Request) -> str:
            nonlocal link
            try:
                if link is None:
                    link = http.client.HTTPConnection(
                        "127.0.0.1", self._http_port, timeout=_ANSWER_S
                    )
                    link.connect()
            except OSError:
                link = None
                return "no connection"
            try:
                link.request("POST", "/v1/traces", request.body, headers)
                answer = link.getresponse()
                said = answer.read()
            except (OSError, http.client.HTTPException):
                link.close()
                link = None
                return "unclear"
            if answer.status == 200:
                return "partial" if said else "ok"
            return "refused" if answer.status == 503 else f"odd {answer.status}"

        for request in self._requests():
            self._deliver(request, send)
        if link is not None:
            link.close()

    def _send_grpc(self) -> None:
        metadata = (("authorization", f"Bearer {self._token}"),)
        options = (("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_retries", 0))
        with grpc.insecure_channel(f"127.0.0.1:{self._grpc_port}", options) as channel:
            call = channel.unary_unary(TRACES)

            def send(request: Request) -> str:
                try:
                    said = call(request.body, timeout=_ANSWER_S, metadata=metadata)
                except grpc.RpcError as error:
                    code = error.code()
                    # Without a connection, and refused with a reason, it says UNAVAILABLE as well.
                    unclear = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                    with contextlib.suppress(AttributeError):
                        if dict(error.trailing_metadata() or ()).get("grpc-status-details-bin"):
                            return "refused"
                    return "unclear" if code in unclear else f"odd {code.name}"
                return "partial" if said else "ok"

            for request in self._requests():
                self._deliver(request, send)


def _skewed(request: Request, prefix: str) -> dict[str, int]:
    """The counters of a request whose sender's clock is wrong."""
    if request.skew_days > 0:
        counts = {"ahead": request.spans} | ({} if prefix else {"served_ahead": request.served})
    elif request.skew_days < 0:
        counts = {"behind": request.spans} | ({} if prefix else {"served_behind": request.served})
    else:
        return {}
    return {f"{prefix}{name}": count for name, count in counts.items()}
