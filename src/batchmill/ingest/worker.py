"""A receiver that is one of several processes: its share of the limits, and its link to the parent.

The parent, ``run/receivers.py``, owns the ports and the status. It hands accepted connections
to the workers, gets the status of each, and tells all of them the total.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from batchmill.errors import ConfigError
from batchmill.http import Taker
from batchmill.ingest.decode import Limits
from batchmill.ingest.intake import ReceiverSettings

_SHARED = ("max_connections", "max_requests", "max_bytes")
"""The limits that are for all workers together."""
SILENT_S = 30.0
"""A worker, or the parent, that has not reported for this long hangs."""
_FIRST_TOTAL_S = 5.0


@dataclass(frozen=True)
class Place:
    """Which of the workers a process is, and the handles and ports that it got from the parent."""

    number: int
    """From 1 on."""
    count: int
    http_connections: int
    """The handle from which HTTP connections are taken,"""
    grpc_connections: int
    """that for gRPC,"""
    reports: int
    """and that of the socket for status and total."""
    http_port: int
    grpc_port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The place in a worker's command line; see ``str()``."""
        return cls(*map(int, text.split(",")))

    def __str__(self) -> str:
        return ",".join(map(str, dataclasses.astuple(self)))

    def share(self, whole: int) -> int:
        """This worker's part of a limit; the parts of all workers add up to ``whole``."""
        return whole // self.count + (self.number <= whole % self.count)

    def settings(self, settings: ReceiverSettings) -> ReceiverSettings:
        """The settings of this worker, made of those of the whole receiver."""
        shares: dict[str, Any] = {name: self.share(getattr(settings, name)) for name in _SHARED}
        return dataclasses.replace(
            settings, http_port=self.http_port, grpc_port=self.grpc_port, **shares
        )


def check_shares(settings: ReceiverSettings, limits: Limits, processes: int) -> None:
    """Raise ConfigError if the limits are too small to be divided among so many processes."""
    limits_of_one = (
        *(("max_connections", 1), ("max_requests", 1)),
        ("max_bytes", limits.max_body_bytes),
    )
    for name, least in limits_of_one:
        most = getattr(settings, name) // least
        if processes > most:
            allowed = f"at most {most}, as each process takes its part of {name}"
            raise ConfigError("processes", processes, allowed)


class ParentLink:
    """A worker's link to the parent. Any thread may call any method."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.http_connections = Taker(socket.socket(fileno=place.http_connections))
        self.grpc_connections = Taker(socket.socket(fileno=place.grpc_connections))
        self._reports = socket.socket(fileno=place.reports)
        self._lock = threading.Lock()
        self._has_total = threading.Event()
        self._total: dict[str, Any] = {}
        self._total_at = time.monotonic()
        self._reading = threading.Thread(
            target=self._read, name="batchmill-ingest-total", daemon=True
        )
        self._reading.start()

    def report(self, status: Mapping[str, Any]) -> None:
        """Tell the parent the status of this worker."""
        line = json.dumps(status).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):  # the parent is gone: this ends, too
            self._reports.sendall(line)

    def total(self) -> dict[str, Any]:
        """The newest status of all workers together; waits for the first one."""
        self._has_total.wait(_FIRST_TOTAL_S)
        return self._total

    def faults(self) -> Sequence[str]:
        """What hangs: another worker, or the parent."""
        silent_s = time.monotonic() - self._total_at
        if silent_s > SILENT_S:
            return [f"the parent process has not reported for {silent_s:.0f} s"]
        return [
            f"worker {number} has not reported for {worker['silent_s']:.0f} s"
            for number, worker in enumerate(self._total.get("workers", ()), 1)
            if worker["silent_s"] > SILENT_S
        ]

    def close(self) -> None:
        """End the link."""
        self.http_connections.close()
        self.grpc_connections.close()
        with contextlib.suppress(OSError):  # the parent was first
            self._reports.shutdown(socket.SHUT_RDWR)
        self._reading.join()

    def _read(self) -> None:
        with (
            self._reports,
            self._reports.makefile("rb") as lines,
            contextlib.suppress(OSError, ValueError),
        ):
            for line in lines:
                self._total, self._total_at = json.loads(line), time.monotonic()
                self._has_total.set()
