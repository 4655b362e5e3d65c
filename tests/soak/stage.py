"""The processes of a soak: the run, the side road with PostgreSQL, an export peer, a small disk.

Two roads: *main* is a whole ``batchmill run``, whose store is SQLite; *side* is a receiver and a
pipeline of their own, whose store is PostgreSQL. What ends is started again, as an init system
would. All state is on one small disk, which can be full.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from batchmill.alerts import DEMO_RULES
from batchmill.files import read_json
from batchmill.run import Home
from tests.kit.files import ROOT, leave_no_room, resize, small_disk
from tests.kit.processes import free_ports
from tests.kit.servers.postgres import Postgres, make_postgres
from tests.kit.threads import PATIENCE_S
from tests.soak.schedule import PIPELINES, Plan

TOKEN = "soak"
SOURCE = Path(__file__).parent
DISK_KIB = 3 * 2**20
_POLL_S = 0.5


class Service:
    """A process that is started again whenever it ends, until it is told to stop."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self._command, self._log, self._env = command, log, env
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopping = False
        self.starts = 0

    @property
    def pid(self) -> int:
        """Of the current process; 0: there is none."""
        with self._lock:
            running = self._process is not None and self._process.poll() is None
            return self._process.pid if running and self._process is not None else 0

    def keep(self) -> None:
        """Start it if it does not run."""
        with self._lock:
            if self._stopping or (self._process is not None and self._process.poll() is None):
                return
            self.starts += 1
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=ROOT,
                    env=dict(self._env),
                    start_new_session=True,
                )

    def stop(self, wait_s: float) -> int | None:
        """End it in order; its exit code, None: it had to be killed."""
        with self._lock:
            self._stopping = True
            process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            return process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """End it at once."""
        self._stopping = True
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)


class Clock:
    """A wall clock of other processes that can be moved while they run: see ``clock.c``."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "clock", folder / "clock.so"
        self.set(0)
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE / "clock.c", "-ldl"],
            check=True,
            capture_output=True,
        )
        self.environment = {"LD_PRELOAD": str(library), "SOAK_CLOCK": str(self._file)}

    def set(self, seconds: float) -> None:
        """Let it be so wrong from now on."""
        with self._file.open("r+b" if self._file.exists() else "wb", buffering=0) as file:
            file.write(struct.pack("q", round(seconds)))


class Peer:
    """Where an exporter and alerts send to: it takes all, or is slow, refuses or is gone."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.mode = ""
        self.requests = 0
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def target(self) -> str:
        """As an exporter names it."""
        return f"otlp+http://127.0.0.1:{self.port}"

    @property
    def webhook(self) -> str:
        """For alerts."""
        return f"http://127.0.0.1:{self.port}/alerts"

    def open(self) -> None:
        """Listen."""
        if self._server is not None:
            return
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                peer.requests += 1
                if peer.mode == "slow":
                    time.sleep(4)
                self.send_response(503 if peer.mode == "refuses" else 200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *_: object) -> None:
                pass  # the exporter was killed

        self._server = Server(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,))
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


@dataclass
class Stage:
    """Everything that runs, while :func:`stage` is entered."""

    folder: Path
    scratch: Path
    """For temporary files of all processes but the pipelines; not on the small disk."""
    home: Home
    side: Home
    ports: tuple[int, int]
    side_ports: tuple[int, int]
    web_port: int
    store_urls: dict[str, str]
    services: dict[str, Service]
    peer: Peer
    postgres: Postgres | None
    disk: bool
    """Whether the disk can be filled."""
    clock: Clock | None
    """Moves the clock of the processes; None: it cannot be moved."""
    notes: list[str] = field(default_factory=list)
    """What is left out, and why."""
    _end: threading.Event = field(default_factory=threading.Event)

    @property
    def homes(self) -> dict[str, Home]:
        """By road."""
        return {"main": self.home, "side": self.side}

    @property
    def listeners(self) -> dict[str, tuple[int, int]]:
        """The ports of HTTP and gRPC of all that can be attacked."""
        return {"ingest": self.ports, "side-ingest": self.side_ports, "web": (self.web_port, 0)}

    def possible(self, plan: Plan) -> Plan:
        """The plan without what cannot happen here."""
        missing = {"disk"} if not self.disk else set()
        missing |= {"machine clock"} if self.clock is None else set()
        side_road = self.postgres is not None
        return replace(plan, without=plan.without | missing, side_road=side_road)

    def pids(self) -> dict[str, int]:
        """The ids of all processes by the names of ``schedule.VICTIMS``; only those that run."""
        pids = {name: service.pid for name, service in self.services.items()}
        pids["supervisor"] = pids.pop("run")
        own = self._supervised(pids["supervisor"])
        pids |= own
        if guards := _guards(own.values()):
            pids["guard"] = guards[0]
        for name in PIPELINES:
            below = _below(pids.get(name, 0))
            pids |= {f"{name}-{process}": pid for process, pid in below.items()}
        return {name: pid for name, pid in pids.items() if pid and _exists(pid)}

    def guards(self) -> list[int]:
        """All of them; :meth:`pids` has the first."""
        return _guards(self._supervised(self.services["run"].pid).values())

    def _supervised(self, supervisor: int) -> dict[str, int]:
        """What the supervisor has started, by its report."""
        report = read_json(self.home.supervisor) or {}
        known = report.get("processes", {}) if report.get("pid") == supervisor else {}
        return {name: int(entry.get("pid") or 0) for name, entry in known.items()}

    def keep_alive(self) -> None:
        """Start again what has ended, until the end."""
        while not self._end.wait(_POLL_S):
            for service in self.services.values():
                service.keep()

    def fill_disk(self) -> None:
        """Leave no room on the disk of all state."""
        leave_no_room(self.folder)

    def free_disk(self) -> None:
        """The opposite."""
        resize(self.folder, DISK_KIB)

    def move_clock(self, seconds: float) -> None:
        """The processes' clocks are so wrong from now on."""
        assert self.clock is not None
        self.clock.set(seconds)

    def stop(self, wait_s: float) -> dict[str, int | None]:
        """End all services in order; their exit codes."""
        self._end.set()
        return {name: service.stop(wait_s) for name, service in self.services.items()}


@contextlib.contextmanager
def stage(
    work: Path,
    *,
    without: frozenset[str],
    options: Sequence[str],
    env: Mapping[str, str],
    side_road: bool = True,
) -> Iterator[Stage]:
    """Start everything; nothing of it is left in the end. ``options`` are those of pipelines."""
    with contextlib.ExitStack() as stack:
        notes: list[str] = []
        folder, disk = work / "disk", "disk" not in without
        if disk:
            try:
                stack.enter_context(small_disk(folder, DISK_KIB))
            except pytest.skip.Exception as skipped:
                disk = False
                notes.append(f"the disk is not filled: {skipped}")
        folder.mkdir(exist_ok=True)
        postgres = make_postgres() if side_road else None
        if postgres is not None:
            stack.callback(postgres.drop_all)
        elif side_road:
            notes.append("no side road: PostgreSQL is not installed")
        clock, environment = _clock(work, without, notes), dict(os.environ)
        environment |= {"SPARK_LOCAL_IP": "127.0.0.1", "BATCHMILL_TOKEN": TOKEN, **env}
        scratch = work / "tmp"
        scratch.mkdir(exist_ok=True)
        environment["TMPDIR"] = str(scratch)
        if clock is not None:
            environment |= clock.environment
        http, grpc, web, page, peer_port, side_http, side_grpc = free_ports(7)
        peer = Peer(peer_port)
        peer.open()
        stack.callback(peer.close)
        home, side = Home(folder / "home"), Home(folder / "side")
        batchmill = (sys.executable, "-m", "batchmill")
        commands: dict[str, list[str]] = {
            "run": [
                *(*batchmill, "run", f"--home={home.folder}", "--drain=120"),
                *(f"--http-port={http}", f"--grpc-port={grpc}", f"--web-port={web}"),
                *(f"--export-to={peer.target}", f"--export-to=prometheus://127.0.0.1:{page}"),
                *(f"--alerts={DEMO_RULES}", f"--alerts-to={peer.webhook}"),
                *options,
            ]
        }
        store_urls = {"main": home.store_url}
        if postgres is not None:
            side.prepare()
            store_urls["side"] = postgres.new_database()
            commands["side-ingest"] = [
                *(*batchmill, "ingest", f"--home={side.folder}"),
                *(f"--http-port={side_http}", f"--grpc-port={side_grpc}"),
            ]
            commands["side-pipeline"] = [
                *(*batchmill, "pipeline", f"--spool={side.spool}", f"--store={store_urls['side']}"),
                *(f"--checkpoint={side.checkpoint}", f"--quarantine={side.quarantine}"),
                *(f"--temporary={side.temporary}", "--remove-read", "--dedup=10m", *options),
            ]
        # On the small disk as well: a process must not end because it cannot write its log.
        logs = folder / "logs"
        logs.mkdir(exist_ok=True)
        stack.callback(shutil.copytree, logs, work / "logs", dirs_exist_ok=True)
        services = {
            name: Service(command, logs / f"{name}.log", environment)
            for name, command in commands.items()
        }
        for service in services.values():
            stack.callback(service.kill)
        made = Stage(
            folder, scratch, home, side, (http, grpc), (side_http, side_grpc), web, store_urls,
            services, peer, postgres, disk, clock, notes,
        )  # fmt: skip
        keeper = threading.Thread(target=made.keep_alive, name="keeper")
        keeper.start()
        stack.callback(keeper.join)
        stack.callback(made._end.set)
        yield made


def _clock(work: Path, without: frozenset[str], notes: list[str]) -> Clock | None:
    if "machine clock" in without:
        return None
    try:
        return Clock(work)
    except (OSError, subprocess.SubprocessError) as error:
        notes.append(f"the machine's clock is not moved: clock.c cannot be compiled: {error}")
        return None


def _below(pid: int) -> dict[str, int]:
    """The JVM below a pipeline, Python's daemon below that, and its youngest worker."""
    below: dict[str, int] = {}
    for name, program in (("jvm", "java"), ("daemon", "python"), ("worker", "python")):
        own = [child for child in started_by(pid) if comm(child).startswith(program)]
        if not own:
            break
        pid = below[name] = own[-1]
    return below


def _guards(pids: Iterable[int]) -> list[int]:
    """The guards of processes: each has forked it before anything else."""
    own = [next(iter(started_by(pid)), 0) for pid in pids]
    return [pid for pid in own if comm(pid).startswith("python")]


def started_by(pid: int) -> list[int]:
    """The processes that one has started, oldest first."""
    own: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            own += map(int, (task / "children").read_text().split())
    return own


def children(pid: int) -> list[int]:
    """The processes that one has started, and those that they have."""
    below = [pid]
    for parent in below:
        below += started_by(parent)
    return below[1:]


def comm(pid: int) -> str:
    """The name of a process's program; empty if there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _exists(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
