"""Acknowledged spans per second of a receiver of one process and of two: ``--processes``.

    python -m benchmarks.ingest.processes [--rounds N] [--seconds S]

Senders and receivers share the cores, so the senders must cost little: one process with raw
sockets, which sends requests that were made beforehand, again and again. The processor time of the
receiver and of the senders, and what everything else on the machine used, is measured with it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from batchmill.files import read_json
from benchmarks.ingest.bodies import bodies, random_of
from benchmarks.ingest.receiver import running, scratch
from benchmarks.kit.machine import cpu_s
from benchmarks.kit.report import Table, say, spread

COMPILED, PYTHON = "compiled", "python"
SPANS = 500
"""In a request."""
CONNECTIONS = 96
WARM_UP_S = 2.0
GOAL = 1.6
_DISTINCT = 4
_REMOVE_S = 0.5


@dataclass
class Turn:
    """One receiver, for some seconds."""

    rate: float
    """Acknowledged spans a second."""
    cores: float
    """Processor seconds of the receiver, a second."""
    sender_cores: float
    other_cores: float
    """Of everything else on the machine."""
    shares: list[float]
    """Of the receiver's processes in its processor time, the parent first."""

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the receiver for a million spans."""
        return self.cores / self.rate * 1e6

    @property
    def sender_cpu_s(self) -> float:
        """The same of the senders."""
        return self.sender_cores / self.rate * 1e6


@dataclass
class Processes:
    """The turns by decoder and number of processes."""

    seconds: float
    turns: dict[str, dict[int, list[Turn]]] = field(default_factory=dict)

    def ratios(self, decoder: str) -> list[float]:
        """How many times the spans a second of one process, within each round."""
        one, two = self.turns[decoder][1], self.turns[decoder][2]
        return [turn.rate / single.rate for single, turn in zip(one, two, strict=True)]

    def ratio(self, decoder: str) -> float:
        return median(self.ratios(decoder))

    def tables(self) -> list[Table]:
        rows = []
        for decoder, by_count in self.turns.items():
            ratios = self.ratios(decoder)
            for count, turns in by_count.items():
                several = count > 1
                rows.append(
                    [
                        f"{decoder} decoder, {count} process{'es' if several else ''}",
                        f"{median(turn.rate for turn in turns):,.0f}",
                        spread((turn.rate / 1000 for turn in turns), 1),
                        f"{median(ratios):.2f}x" if several else "",
                        spread(ratios) if several else "",
                        f"{median(turn.cores for turn in turns):.2f}",
                        f"{median(turn.sender_cores for turn in turns):.2f}",
                        f"{median(turn.other_cores for turn in turns):.2f}",
                        f"{median(turn.cpu_s for turn in turns):.1f}",
                        f"{median(turn.sender_cpu_s for turn in turns):.1f}",
                    ]
                )
        rounds = len(next(iter(self.turns.values()))[1])
        return [
            Table(
                "Processes of a receiver",
                f"Acknowledged spans per second over HTTP, {SPANS:,} spans a request,"
                f" {CONNECTIONS} connections of one cheap sender, {rounds} rounds of"
                f" {self.seconds:g} s in turns, on {os.cpu_count()} cores. Cores: processor seconds"
                " a second of the receiver, of the sender, and of everything else on the machine:"
                " where the last is not small, the ratio only says who gets how much of a busy"
                " machine."
                " Then processor seconds for a million spans.",
                [
                    *("case", "spans/s", "thousands", "ratio", "range"),
                    *("cores", "sender", "others", "cpu/M", "sender/M"),
                ],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "cases": [
                {
                    "decoder": decoder,
                    "ratios": self.ratios(decoder),
                    **{str(count): [vars(turn) for turn in turns] for count, turns in by.items()},
                }
                for decoder, by in self.turns.items()
            ],
        }


def measure(*, rounds: int, seconds: float) -> Processes:
    """Take turns."""
    result = Processes(seconds)
    with scratch() as folder, _sender() as sender:
        for decoder in (COMPILED, PYTHON):
            turns = result.turns[decoder] = {1: [], 2: []}
            with contextlib.ExitStack() as stack:
                receivers = {
                    count: stack.enter_context(
                        _receiver(folder / f"{decoder}-{count}", count, decoder)
                    )
                    for count in turns
                }
                for number in range(rounds):
                    say(f"processes: {decoder} decoder, round {number + 1} of {rounds}")
                    # Who goes first changes.
                    for count in list(turns)[:: 1 if number % 2 else -1]:
                        turns[count].append(_turn(sender, receivers[count], seconds))
    return result


@dataclass
class _Receiver:
    """A receiver that runs."""

    pid: int
    http: str
    home: Path

    def pids(self) -> list[int]:
        """Of all its processes, the parent first."""
        status = read_json(self.home / "run" / "ingest.json") or {}
        return [self.pid, *(worker["pid"] for worker in status.get("workers", ()))]


@contextlib.contextmanager
def _receiver(home: Path, processes: int, decoder: str) -> Iterator[_Receiver]:
    """Run one. Segments are removed, as a pipeline would that keeps up."""
    home.mkdir()
    command = [sys.executable, "-m", "batchmill", "ingest", "--home", str(home)]
    command += ["--http-port", "0", "--grpc-port", "0", "--processes", str(processes)]
    over = threading.Event()

    def remove() -> None:
        while not over.wait(_REMOVE_S):
            for segment in (home / "spool" / "Span").glob("[!.]*.parquet"):
                segment.unlink()

    removing = threading.Thread(target=remove, daemon=True)
    with (
        mock.patch.dict(os.environ, {"BATCHMILL_DECODER": decoder}),
        running(command, home) as receiver,
    ):
        removing.start()
        try:
            yield _Receiver(receiver.pid, receiver.http, home)
        finally:
            over.set()
            removing.join()


def _turn(sender: Any, receiver: _Receiver, seconds: float) -> Turn:
    """Send for the warm-up and some seconds more; only the latter count."""
    sender.send((receiver.http, WARM_UP_S, seconds))
    sender.recv()  # the warm-up is over
    pids = receiver.pids()
    before, busy, began = [cpu_s(pid) for pid in pids], _busy_s(), time.monotonic()
    spans, sender_cpu_s = sender.recv()
    took = time.monotonic() - began
    used = [cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
    others = _busy_s() - busy - sum(used) - sender_cpu_s
    return Turn(
        rate=spans / took,
        cores=sum(used) / took,
        sender_cores=sender_cpu_s / took,
        other_cores=max(0.0, others / took),
        shares=[part / (sum(used) or 1.0) for part in used],
    )


def _busy_s() -> float:
    """Processor seconds that the machine has used."""
    user, nice, system, _, _, irq, soft, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _sender() -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_send_turns, args=(there,), daemon=True)
    process.start()
    try:
        yield here
    finally:
        here.send(None)
        process.join(10)


def _send_turns(pipe: Any) -> None:
    """The process of the sender."""
    requests = []
    for body in bodies(_DISTINCT, SPANS):
        data = body.fresh(random_of(0), time.time_ns())
        head = "POST /v1/traces HTTP/1.1\r\nhost: h\r\ncontent-type: application/x-protobuf\r\n"
        requests.append(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    while (turn := pipe.recv()) is not None:
        address, *phases = turn
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            links = [
                stack.enter_context(contextlib.closing(_Link(address, requests, number)))
                for number in range(CONNECTIONS)
            ]
            for link in links:
                selector.register(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
            _send_for(selector, phases[0])
            pipe.send(None)
            before, cpu_s = sum(link.answered for link in links), time.process_time()
            _send_for(selector, phases[1])
            answered = sum(link.answered for link in links) - before
            pipe.send((answered * SPANS, time.process_time() - cpu_s))


def _send_for(selector: selectors.BaseSelector, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            link: _Link = key.data
            wanted = link.advance()
            if wanted != key.events:
                selector.modify(link.socket, wanted, link)


class _Link:
    """A connection that sends a request, waits for the response, and so on."""

    def __init__(self, address: str, requests: list[bytes], number: int) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setblocking(False)
        self.answered = 0
        self._requests = requests
        self._number = number
        self._rest = memoryview(requests[number % len(requests)])

    def advance(self) -> int:
        """Send or receive what can be at the moment; the events to wait for then."""
        with contextlib.suppress(BlockingIOError):
            while self._rest:
                self._rest = self._rest[self.socket.send(self._rest) :]
            # A response of success is short, and comes in one piece.
            answer = self.socket.recv(65536)
            status = answer[9:12]
            if status == b"200":
                self.answered += 1
            elif status != b"503":
                raise RuntimeError(f"the receiver answered {answer[:200]!r}")
            self._number += 1
            self._rest = memoryview(self._requests[self._number % len(self._requests)])
            return selectors.EVENT_WRITE
        return selectors.EVENT_WRITE if self._rest else selectors.EVENT_READ

    def close(self) -> None:
        self.socket.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    result = measure(rounds=given.rounds, seconds=given.seconds)
    for table in result.tables():
        print(table.render())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
