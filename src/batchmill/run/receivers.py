"""``batchmill ingest --processes N``: a parent that runs N receivers as one.

The parent listens on both ports and hands each connection to the worker with the fewest. It
restarts workers that die, adds their statuses up, and tells the total to all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchmill.errors import BatchmillError, ConfigError
from batchmill.files import write_json
from batchmill.http import Giver, handover_pair, host_port, listen
from batchmill.ingest import Place, ReceiverSettings, ended_status, total_status
from batchmill.run.signals import POLL_S
from batchmill.run.supervisor import (
    ALIVE,
    GaveUpError,
    Process,
    RestartPolicy,
    Spec,
    State,
    exit_text,
)

log = logging.getLogger("batchmill.ingest")

_STATUS_S = 1.0
_FULL_S = 0.05
_LAST_REPORT_S = 2.0
_LONGEST_REPORT = 16 * 2**20
_ENDED_WELL = (0, -signal.SIGTERM)
"""The latter: it was asked to end before it had begun."""


class WorkerError(BatchmillError, RuntimeError):
    """A receiver of several processes ended, since one of them cannot be kept running."""

    name: str
    why: str
    template = (
        "{name} {why}, so all of them were ended: its last lines, above or in ingest's log, say why"
    )


class Receivers:
    """Takes spans over HTTP and gRPC in several processes, until stopped.

    ``serve()`` runs on the caller's event loop and returns once every worker has drained.
    """

    def __init__(
        self,
        processes: int,
        settings: ReceiverSettings,
        arguments: Sequence[str],
        *,
        status_path: Path,
    ) -> None:
        """``arguments`` are those of the ``batchmill`` command; workers get one more.

        Raises ConfigError if the system cannot hand connections to other processes.
        """
        if not sys.platform.startswith("linux"):
            # Elsewhere the kind of socket that connections are handed over by is missing.
            raise ConfigError("processes", processes, "1 on systems other than Linux")
        self.settings = settings
        self.http_address = ""
        self.grpc_address = ""
        self._status_path = status_path
        self._started = time.time()
        self._stopping = False
        self._complete = False
        self._reported_s = 0.0
        self._failure: BatchmillError | None = None
        self._status_failed = False
        self._workers = [
            Worker(number, processes, arguments, self._tell) for number in range(1, processes + 1)
        ]
        self._past: list[dict[str, Any]] = []

    def stop(self) -> None:
        """Ask ``serve()`` to drain and return; called on its event loop."""
        self._stopping = True

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Take spans until stopped; ``ready`` is called once all workers run."""
        settings = self.settings
        settings.access.ssl_context()  # a certificate that cannot be read is found here, once
        with contextlib.ExitStack() as stack:
            http = stack.enter_context(listen(settings.bind, settings.http_port, "http_port"))
            grpc = stack.enter_context(listen(settings.bind, settings.grpc_port, "grpc_port"))
            ports = http.getsockname()[1], grpc.getsockname()[1]
            self.http_address = host_port(settings.bind, ports[0])
            self.grpc_address = host_port(settings.bind, ports[1])
            for worker in self._workers:
                stack.callback(worker.kill)
                worker.ports = ports
                worker.start(None)
            await self._run((http, grpc), ready)
        if self._failure is not None:
            raise self._failure

    async def _run(
        self, listeners: Sequence[socket.socket], ready: Callable[[], None] | None
    ) -> None:
        while not self._stopping and any(w.state is not State.RUNNING for w in self._workers):
            await self._poll()
        if not self._stopping:
            self._complete = True
            self._report()
            if ready is not None:
                ready()
            accepting = [
                asyncio.create_task(self._accept(listener, protocol))
                for protocol, listener in enumerate(listeners)
            ]
            try:
                while not self._stopping:
                    await self._poll()
                    for task in accepting:
                        if task.done():
                            task.result()  # a bug there ends the receiver
            finally:
                for task in accepting:
                    task.cancel()
        for listener in listeners:
            listener.close()
        await self._drain()

    async def _drain(self) -> None:
        log.info("draining")
        draining = [worker for worker in self._workers if worker.state in ALIVE]
        for worker in self._workers:
            worker.terminate()
        self._report()
        while any(worker.state in ALIVE for worker in self._workers):
            await self._poll()
        self._report()
        for worker in draining:
            if worker.code not in _ENDED_WELL and self._failure is None:
                how = exit_text(worker.code or 0)
                self._failure = WorkerError(worker.spec.name, f"did not drain ({how})")

    async def _poll(self) -> None:
        """Note deaths, restart and report what is due, then pause."""
        for worker in self._workers:
            try:
                worker.poll(time.monotonic(), None)
            except GaveUpError as error:
                self._failure = WorkerError(error.name, error.why)
                self.stop()
            if worker.state not in ALIVE:
                last = await worker.disconnect()
                if last:
                    self._past = [total_status((), [*self._past, ended_status(last)])]
        if time.monotonic() - self._reported_s >= _STATUS_S:
            self._report()
        await asyncio.sleep(POLL_S)

    async def _accept(self, listener: socket.socket, protocol: int) -> None:
        """Hand connections to the workers; without a worker they wait in the port's backlog."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # sock_accept does not yield while clients are waiting
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of file descriptors, most likely
                log.warning("cannot accept connections: %s", error)
                await asyncio.sleep(0.2)
                continue
            with client:
                await self._hand_over(client, protocol)

    async def _hand_over(self, client: socket.socket, protocol: int) -> None:
        while True:
            if self._give(client, protocol):
                return
            await asyncio.sleep(_FULL_S)

    def _give(self, client: socket.socket, protocol: int) -> bool:
        workers = [
            worker
            for worker in self._workers
            if worker.givers and worker.state is State.RUNNING and not worker.has_died()
        ]
        # The limit of connections is one for each protocol.
        workers.sort(key=lambda worker: (worker.connections(protocol), worker.connections()))
        return any(worker.givers[protocol].give(client) for worker in workers)

    def status(self) -> dict[str, Any]:
        """The total of all workers, as in the status file."""
        states = {worker.state for worker in self._workers}
        state = "restarting" if states - {State.RUNNING} else "running"
        return {
            "name": "ingest",
            "pid": os.getpid(),
            "started": self._started,
            "state": "draining" if self._stopping else state,
            "http": self.http_address,
            "grpc": self.grpc_address,
            **total_status([w.status for w in self._workers if w.status], self._past),
            "restarts": sum(worker.restarts for worker in self._workers),
            "workers": [worker.summary() for worker in self._workers],
        }

    def _report(self) -> None:
        """Write the status file, and tell the workers; not before all of them have run once."""
        if not self._complete:
            return
        self._reported_s = time.monotonic()
        status = self.status()
        telemetry = {
            str(number): worker.status["telemetry"]
            for number, worker in enumerate(self._workers, 1)
            if worker.status
        }
        line = json.dumps(status | {"telemetry": telemetry}).encode() + b"\n"
        for worker in self._workers:
            worker.tell(line)
        try:
            self._status_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(self._status_path, status)
            self._status_failed = False
        except OSError as error:  # a full disk must not end the receiver
            if not self._status_failed:
                log.warning("cannot write the status file: %s", error)
            self._status_failed = True

    def _tell(self, text: str) -> None:
        log.warning("%s", text)


class Worker(Process):
    """One of the receivers, with a link to it that begins anew with each start."""

    def __init__(
        self, number: int, count: int, arguments: Sequence[str], say: Callable[[str], None]
    ) -> None:
        # A worker that does not start the first time is an error of the settings.
        policy = RestartPolicy(failed_starts=1)
        name = f"worker {number}"
        spec = Spec(name=name, arguments=(), essential=True)
        super().__init__(spec, policy, _Echo(name), say)
        self.ports = (0, 0)
        self.givers: Sequence[Giver] = ()
        """For HTTP and for gRPC."""
        self.status: dict[str, Any] = {}
        """Its newest report since its start."""
        self._number = number
        self._count = count
        self._arguments = arguments
        self._reports: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reported_s = 0.0

    def start(self, inherit: int | None) -> None:
        """Start it with a new link."""
        http, its_http = handover_pair()
        grpc, its_grpc = handover_pair()
        reports, its_reports = socket.socketpair()
        with its_http, its_grpc, its_reports:
            handles = (its_http.fileno(), its_grpc.fileno(), its_reports.fileno())
            place = Place(self._number, self._count, *handles, *self.ports)
            arguments = [*self._arguments, "--worker", str(place)]
            self.spec = replace(self.spec, arguments=arguments, handles=handles)
            try:
                super().start(inherit)
            except BaseException:
                for link in (http, grpc, reports):
                    link.close()
                raise
        self.givers, self._reported_s = (Giver(http), Giver(grpc)), time.monotonic()
        self._reading = asyncio.get_running_loop().create_task(self._read(reports))

    def connections(self, protocol: int | None = None) -> int:
        """How many connections it has open, of one protocol or of both."""
        for giver in self.givers:
            giver.update()
        chosen = self.givers if protocol is None else self.givers[protocol : protocol + 1]
        return sum(giver.open for giver in chosen)

    def tell(self, line: bytes) -> None:
        """Send the total, unless it has not read the last ones."""
        if self._writer is not None and not self._writer.transport.get_write_buffer_size():
            self._writer.write(line)

    async def disconnect(self) -> dict[str, Any]:
        """End the link to a worker that has ended; its last report, once."""
        for giver in self.givers:
            giver.close()
        self.givers = ()
        if self._reading is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reading, _LAST_REPORT_S)
            self._reading = None
        last, self.status = self.status, {}
        return last

    def has_died(self) -> bool:
        """Whether it has ended since the last ``poll()``."""
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return self.pid is None or os.waitid(os.P_PID, self.pid, options) is not None

    def summary(self) -> dict[str, Any]:
        """What the total says of it."""
        status = self.status
        return {
            "pid": self.pid,
            "state": self.state.value,
            "restarts": self.restarts,
            "silent_s": round(time.monotonic() - self._reported_s, 1) if self.status else 0.0,
            "received_spans": status.get("received_spans", 0),
            "acknowledged_spans": status.get("acknowledged_spans", 0),
            "connections": self.connections(),
        }

    def _is_ready(self) -> bool:
        return bool(self.status)

    async def _read(self, reports: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=reports, limit=_LONGEST_REPORT)
        self._writer = writer
        try:
            with contextlib.suppress(OSError, ValueError):  # a report that is none
                while line := await reader.readline():
                    if line.endswith(b"\n"):  # else it died in the middle
                        self.status, self._reported_s = json.loads(line), time.monotonic()
        finally:
            self._writer = None
            writer.close()


class _Echo:
    """Passes the output of a worker on."""

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, line: str) -> None:
        # In one piece: the output of several workers comes on several threads.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{self._name}: {line}\n")
