"""Senders in separate processes: each connection sends, waits for the response, sends again."""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.ingest.bodies import Body, JsonBody, bodies, random_of

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
HTTP, GRPC, JSON = "HTTP", "gRPC", "HTTP with JSON"
_PATIENCE_S = 60.0
_LONGEST_PAUSE_S = 1.0

Send = Callable[[bytes], float | None]
"""Sends a request; None once it is acknowledged, else the seconds to wait before trying again."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent, and how."""

    protocol: str
    address: str
    spans: int
    """A request."""
    connections: int
    """Of all processes together."""
    seconds: float
    rate: float = 0.0
    """Spans a second, of all connections together; 0: as many as are taken."""
    distinct: int = 4
    """Requests that each process has made beforehand."""


@dataclass
class Sent:
    """What became of it."""

    answers: list[tuple[float, float, int]] = field(default_factory=list)
    """When an acknowledgement came (monotonic), how long it took, how many spans it was for."""
    refused: int = 0
    errors: list[str] = field(default_factory=list)
    cpu_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0

    def add(self, other: Sent) -> None:
        self.answers += other.answers
        self.refused += other.refused
        self.errors += other.errors
        self.cpu_s += other.cpu_s
        self.began = min(self.began or other.began, other.began)
        self.ended = max(self.ended, other.ended)

    def spans(self) -> int:
        """Acknowledged in all."""
        return sum(spans for _, _, spans in self.answers)

    def rate(self, warm_up_s: float) -> float:
        """Acknowledged spans a second after the warm-up, until the senders were told to stop."""
        since = self.began + warm_up_s
        spans = sum(spans for at, _, spans in self.answers if since <= at <= self.ended)
        return spans / (self.ended - since)

    def waits(self, warm_up_s: float) -> list[float]:
        """How long each answer took, sorted, after the warm-up."""
        since = self.began + warm_up_s
        return sorted(took for at, took, _ in self.answers if at >= since)


def percentile(values: list[float], share: float) -> float:
    """Of sorted values: that share of them is at most this."""
    return values[max(0, -(-len(values) * round(share * 1000) // 1000) - 1)] if values else 0.0


class Senders:
    """Processes that send what they are told, again and again."""

    def __init__(self, processes: int = 2) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(processes):
            here, there = context.Pipe()
            process = context.Process(target=_run, args=(there, number), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def start(self, load: Load) -> None:
        """Begin; :meth:`result` waits for the end."""
        count = len(self._pipes)
        for number, pipe in enumerate(self._pipes):
            share = load.connections // count + (number < load.connections % count)
            pipe.send((load, share))

    def result(self) -> Sent:
        """What became of it."""
        whole = Sent()
        for pipe in self._pipes:
            whole.add(pipe.recv())
        return whole

    def run(self, load: Load) -> Sent:
        """Send all of it."""
        self.start(load)
        return self.result()

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)


def _run(pipe: Connection, number: int) -> None:
    """A process of senders."""
    made: dict[tuple[int, bool], list[Body] | list[JsonBody]] = {}
    turn = 0
    while (order := pipe.recv()) is not None:
        load, connections = order
        turn += 1
        key = load.spans, load.protocol == JSON
        if key not in made:
            prepared = bodies(load.distinct, load.spans, seed=number)
            made[key] = [JsonBody(body) for body in prepared] if key[1] else prepared
        pipe.send(_send_all(load, connections, made[key], (number, turn)))


def _send_all(
    load: Load, connections: int, made: Sequence[Body | JsonBody], who: tuple[int, int]
) -> Sent:
    results = [Sent() for _ in range(connections)]
    gate = threading.Barrier(connections + 1)
    until = [0.0]
    threads = [
        threading.Thread(
            target=_send, args=(load, result, made, (*who, n), gate, until), daemon=True
        )
        for n, result in enumerate(results)
    ]
    for thread in threads:
        thread.start()
    cpu = time.process_time()
    gate.wait(_PATIENCE_S)
    whole = Sent(began=time.monotonic())
    until[0] = whole.began + load.seconds
    gate.wait(_PATIENCE_S)
    for thread in threads:
        thread.join()
    for result in results:
        result.began = whole.began
        whole.add(result)
    whole.cpu_s, whole.ended = time.process_time() - cpu, until[0]
    return whole


def _send(
    load: Load,
    result: Sent,
    made: Sequence[Body | JsonBody],
    who: tuple[int, int, int],
    gate: threading.Barrier,
    until: list[float],
) -> None:
    """One connection: what is refused is sent again, after the pause that was asked for."""
    # Process ids make ids unique to a run of the benchmark as well.
    rng = random_of(time.time_ns(), *who)
    interval = load.spans * load.connections / load.rate if load.rate else 0.0
    try:
        with connected(load.protocol, load.address) as send:
            gate.wait(_PATIENCE_S)
            gate.wait(_PATIENCE_S)
            due = time.monotonic() + interval * float(rng.random())
            number = 0
            while True:
                if interval:
                    time.sleep(max(0.0, min(due, until[0]) - time.monotonic()))
                    due += interval
                if time.monotonic() >= until[0]:
                    break
                body = made[number % len(made)]
                number += 1
                _deliver(send, body.fresh(rng, time.time_ns()), body.spans, result)
    except Exception as error:  # noqa: BLE001 - it is told at the end
        result.errors.append(f"{type(error).__name__}: {error}")
        gate.abort()


def _deliver(send: Send, data: bytes, spans: int, result: Sent) -> None:
    began = time.monotonic()
    while (pause := send(data)) is not None:
        result.refused += 1
        time.sleep(min(pause, _LONGEST_PAUSE_S))
    now = time.monotonic()
    result.answers.append((now, now - began, spans))


@contextlib.contextmanager
def connected(protocol: str, address: str) -> Iterator[Send]:
    """A connection of its own."""
    if protocol != GRPC:
        content = "application/json" if protocol == JSON else "application/x-protobuf"
        link = http.client.HTTPConnection(address, timeout=_PATIENCE_S)
        with contextlib.closing(link):
            link.connect()
            yield lambda data: _post(link, data, content)
    else:
        import grpc

        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, options) as channel:
            grpc.channel_ready_future(channel).result(_PATIENCE_S)
            call = channel.unary_unary(EXPORT)
            yield lambda data: _call(call, data)


def _post(link: http.client.HTTPConnection, data: bytes, content: str) -> float | None:
    link.request("POST", "/v1/traces", data, {"content-type": content})
    answer = link.getresponse()
    text = answer.read()
    if answer.status == 200:
        return None
    if answer.status == 503:
        return float(answer.getheader("retry-after") or 1)
    raise RuntimeError(f"the receiver answered {answer.status}: {text[:200]!r}")


def _call(call: Any, data: bytes) -> float | None:
    import grpc

    try:
        call(data, timeout=_PATIENCE_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return 1.0
        raise
    return None
