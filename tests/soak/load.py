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
import numpy.typing as npt
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks.ingest.bodies import SPREAD_NS, Body, Made, trace
from tests.kit.ingest import PROTOBUF
from tests.soak.balance import ClockMove, Request, Sent, sent_of
from tests.soak.verdict import Attempt

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
DAY_NS = 86_400 * 10**9
MINUTE_NS = 60 * 10**9
_ANSWER_S = 10.0
_RETRY_S = 0.3
_TICK_S = 0.05
_NEW_BODY_S = 2.0
_BODIES = 24
_WAITING = 300
"""Requests that may wait for a sender; at the limit, the rate is not reached: see ``missed``."""


@dataclass
class Parcel:
    """A request that is to be acknowledged."""

    body: bytes
    spans: int
    calls: dict[int, int]
    """Spans that are calls of a service, by the minute of their own time."""
    skew_days: int = 0
    made_s: float = field(default_factory=time.time)
    acknowledged_s: float | None = None
    repeated: int = 0

    def facts(self) -> Request:
        """For the books."""
        return Request(
            made_s=self.made_s,
            acknowledged_s=self.acknowledged_s,
            spans=self.spans,
            calls=self.calls,
            repeated=self.repeated,
            skew_days=self.skew_days,
        )


@dataclass
class Bodies:
    """Requests of which each has traces of its own, and some names that nobody has used before."""

    seed: int
    new_names: float
    in_a_request: int = 400
    """At least so many spans: a request has whole traces."""

    def __post_init__(self) -> None:
        self._rng = random.Random(f"bodies {self.seed}")
        self._ids = np.random.default_rng([self.seed, 7])
        self._made = [self._make() for _ in range(_BODIES)]
        self._next = 0

    def renew(self) -> None:
        """Replace the oldest body by one with new names."""
        self._made[self._next % _BODIES] = self._make()
        self._next += 1

    def parcel(self, skew_days: int = 0, machine_skew_s: float = 0.0) -> Parcel:
        """The next request, whose spans end about now by the sender's clock."""
        body, starts_ns = self._rng.choice(self._made)
        now_ns = time.time_ns() + skew_days * DAY_NS + int(machine_skew_s * 1e9)
        minutes = (starts_ns + (now_ns - SPREAD_NS)) // MINUTE_NS
        calls = dict(Counter(minutes.tolist()))
        return Parcel(body.fresh(self._ids, now_ns), body.spans, calls, skew_days)

    def _make(self) -> tuple[Body, npt.NDArray[np.int64]]:
        """A body, and when in it each call of a service starts."""
        spans: list[Made] = []
        while len(spans) < self.in_a_request:
            spans += trace(self._rng, self._rng.randrange(SPREAD_NS))
        # Whole traces and no part of one: no call waits for a partner that never comes.
        spans = [self._renamed(span) for span in spans]
        served = [span.start_ns for span in spans if span.kind == Span.SPAN_KIND_SERVER]
        return Body(spans), np.asarray(served, np.int64)

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
        *,
        plain: float,
        senders: tuple[int, int] = (24, 8),
    ) -> None:
        """``plain``: spans a second; where the rate is above that, it is a burst."""
        self._http_port, self._grpc_port = ports
        self._token = token
        self._rate = rate
        self._bodies = bodies
        self._plain = plain
        self._parcels: list[Parcel] = []
        self._waiting: queue.Queue[Parcel] = queue.Queue(_WAITING)
        self._over = threading.Event()
        self._gone = threading.Event()
        self._lock = threading.Lock()
        self._bursting = False
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
        self.moves: list[ClockMove] = []
        """When it was."""
        self.attempts: list[Attempt] = []
        """When a request was sent, each time, and whether it was acknowledged."""

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
        """All counters so far.

        ``missed`` spans were ``due``, and not made, as too many waited; with ``burst_``, in bursts.
        ``burst_acknowledged`` are those whose answer came while a burst lasted.
        """
        with self._lock:
            return dict(self._counts)

    def sent(self) -> Sent:
        """The senders' side of the balance."""
        return sent_of((parcel.facts() for parcel in self._parcels), self.moves)

    def _pace(self) -> None:
        start = last = renewed = time.monotonic()
        due = 0.0
        number = 0
        while not self._over.wait(_TICK_S):
            now = time.monotonic()
            rate = self._rate(now - start)
            due += rate * (now - last)
            last = now
            if now - renewed > _NEW_BODY_S:
                self._bodies.renew()
                renewed = now
            self._bursting = rate > self._plain
            burst = "burst_" if self._bursting else ""
            while due >= self._bodies.in_a_request:
                number += 1
                skew = self.skew_days if number % 10 == 0 else 0
                parcel = self._bodies.parcel(skew, self.machine_skew_s)
                due -= parcel.spans
                # Counted first: a sender may have acknowledged it before put() returns.
                self._note(spans=parcel.spans, **{f"{burst}due": parcel.spans})
                self._parcels.append(parcel)
                try:
                    self._waiting.put_nowait(parcel)
                except queue.Full:
                    self._parcels.pop()
                    rest = max(0, int(due))
                    due = 0.0
                    missed = {f"{burst}missed": parcel.spans + rest, f"{burst}due": rest}
                    self._note(spans=-parcel.spans, **missed)
        self._bursting = False

    def _note(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _next(self) -> Iterator[Parcel]:
        while not self._gone.is_set():
            try:
                yield self._waiting.get(timeout=_RETRY_S)
            except queue.Empty:
                if self._over.is_set() and not self._pacer.is_alive():
                    return

    def _deliver(self, parcel: Parcel, send: Callable[[bytes], str]) -> None:
        """Send a request until it is acknowledged; each try has an outcome."""
        while not self._gone.is_set():
            start = time.monotonic()
            outcome = send(parcel.body)
            self.attempts.append(Attempt(start, outcome == "ok"))
            self._note(**{f"{outcome} requests": 1})
            if outcome == "ok":
                parcel.acknowledged_s = time.time()
                parcel.body = b""
                self._note(acknowledged=parcel.spans)
                if self._bursting:
                    self._note(burst_acknowledged=parcel.spans)
                return
            if outcome == "unclear":  # it may have been stored
                parcel.repeated += 1
            self._gone.wait(_RETRY_S)

    def _send_http(self) -> None:
        headers = {"content-type": PROTOBUF, "authorization": f"Bearer {self._token}"}
        link: http.client.HTTPConnection | None = None

        def send(body: bytes) -> str:
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
                link.request("POST", "/v1/traces", body, headers)
                answer = link.getresponse()
                said = answer.read()
            except (OSError, http.client.HTTPException):
                link.close()
                link = None
                return "unclear"
            if answer.status == 200:
                return "partial" if said else "ok"
            return "refused" if answer.status == 503 else f"odd {answer.status}"

        for parcel in self._next():
            self._deliver(parcel, send)
        if link is not None:
            link.close()

    def _send_grpc(self) -> None:
        metadata = (("authorization", f"Bearer {self._token}"),)
        options = (("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_retries", 0))
        with grpc.insecure_channel(f"127.0.0.1:{self._grpc_port}", options) as channel:
            call = channel.unary_unary(TRACES)

            def send(body: bytes) -> str:
                try:
                    said = call(body, timeout=_ANSWER_S, metadata=metadata)
                except grpc.RpcError as error:
                    code = error.code()
                    # Without a connection, and refused with a reason, it says UNAVAILABLE as well.
                    unclear = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                    with contextlib.suppress(AttributeError):
                        if dict(error.trailing_metadata() or ()).get("grpc-status-details-bin"):
                            return "refused"
                    return "unclear" if code in unclear else f"odd {code.name}"
                return "partial" if said else "ok"

            for parcel in self._next():
                self._deliver(parcel, send)
