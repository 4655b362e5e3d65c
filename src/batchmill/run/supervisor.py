"""Starts processes, watches them, restarts those that die, and stops them in order.

What to do about a death is decided by :func:`decide`, a pure function. Everything else runs on the
thread that calls :meth:`Supervisor.poll`; one more thread for each process only copies its output
to a log, which rotates.
"""

from __future__ import annotations

import enum
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Protocol, Self

from batchmill.errors import BatchmillError
from batchmill.files import read_json
from batchmill.waiters import back_off_ms
from batchmill.wording import count_of

TAIL = 15
"""How many of a process's last lines are remembered."""
_LONGEST_LINE = 8192


class LineLog(Protocol):
    """Where the output of a process goes."""

    def write(self, line: str) -> None:
        """Add a line. Any thread may call it."""


class RotatingLog:
    """A log file; past ``limit`` bytes it becomes ``NAME.1``, and so on, up to ``files`` of them.

    Any thread may write. Lines that a full disk does not take are counted, and their number is
    logged once it takes lines again: a log never stops a run.
    """

    def __init__(self, path: Path, *, limit: int, files: int) -> None:
        self._path = path
        self._limit = limit
        self._files = files
        self._lock = threading.Lock()
        self._lost = 0

    def write(self, line: str) -> None:
        """Add a line, with the time."""
        with self._lock:
            try:
                if self._lost:
                    self._append(f"({count_of(self._lost, 'line')} could not be written here)")
                    self._lost = 0
                self._append(line)
            except OSError:
                self._lost += 1

    def _append(self, line: str) -> None:
        text = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ} {line}\n".encode("utf-8", "replace")
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(handle).st_size
            if not size or size + len(text) <= self._limit:
                os.write(handle, text)
                return
        finally:
            os.close(handle)
        self._rotate()
        self._append(line)

    def _rotate(self) -> None:
        names = [self._path, *(Path(f"{self._path}.{n}") for n in range(1, self._files))]
        if len(names) == 1:
            self._path.unlink()
        for newer, older in reversed(list(itertools.pairwise(names))):
            if newer.exists():
                newer.replace(older)


class OutputReader(threading.Thread):
    """Reads a process's output line by line until the last writer has closed it."""

    def __init__(self, stream: IO[bytes], name: str, on_line: Callable[[str], None]) -> None:
        super().__init__(name=f"batchmill-log-{name}", daemon=True)
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._stream = stream
        self._on_line = on_line
        self.start()

    def run(self) -> None:
        """Read; a line that is too long is cut into pieces."""
        with self._stream:
            while raw := self._stream.readline(_LONGEST_LINE):
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                if line:
                    self.tail.append(line)
                    self._on_line(line)


USAGE = 2
"""The exit code of a command whose arguments or settings are not valid."""
_CHILD = Path(__file__).with_name("child.py")
_LAST_OUTPUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How a process that died is restarted."""

    initial_s: float = 0.5
    max_s: float = 10.0
    multiplier: float = 2.0
    failed_max_s: float = 60.0
    """The longest delay after starts that failed."""
    stable_s: float = 30.0
    """After so long a time of being ready, earlier deaths no longer count."""
    failed_starts: int = 5
    """An essential process that never ran is not started again after so many failed starts."""


@dataclass(frozen=True)
class Death:
    """The end of a process that was not asked to end."""

    code: int
    """Its exit code; negative: the signal that killed it."""
    ready_s: float | None
    """How long it had been ready; None: it never was."""


@dataclass(frozen=True)
class Record:
    """A process's deaths so far."""

    deaths: int = 0
    """In a row, without a stable time between them."""
    failed_starts: int = 0
    """In a row: it ended by itself before it was ready."""
    has_run: bool = False
    """Whether it was ever ready."""


@dataclass(frozen=True)
class Decision:
    """What to do about a death."""

    record: Record
    delay_s: float | None
    """When to restart; None: not at all, it would only fail again."""


def decide(
    policy: RestartPolicy, record: Record, death: Death, *, essential: bool = False
) -> Decision:
    """Whether and when to restart a process.

    Only an ``essential`` process that has never been ready is given up: after some failed starts,
    or at once if it refuses its arguments, as it would refuse them again. A SIGKILL from outside
    says nothing about whether it could start.
    """
    if death.ready_s is not None:
        stable = death.ready_s >= policy.stable_s
        record = Record(deaths=1 if stable else record.deaths + 1, has_run=True)
    elif death.code == -signal.SIGKILL:
        record = replace(record, deaths=record.deaths + 1)
    else:
        record = Record(record.deaths + 1, record.failed_starts + 1, record.has_run)
    hopeless = death.code == USAGE or record.failed_starts >= policy.failed_starts
    if essential and record.failed_starts and not record.has_run and hopeless:
        return Decision(record, None)
    max_s = policy.failed_max_s if record.failed_starts else policy.max_s
    return Decision(record, back_off_ms(policy.initial_s, max_s, policy.multiplier, record.deaths))


def exit_text(code: int) -> str:
    """An exit code in words.

    >>> exit_text(3), exit_text(-9)
    ('exit code 3', 'SIGKILL')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class GaveUpError(BatchmillError, RuntimeError):
    """The first start of an essential process failed."""

    name: str
    why: str
    lines: Sequence[str]
    """Its last output."""

    def __str__(self) -> str:
        output = "".join(f"\n  {line}" for line in self.lines) or " none"
        return f"{self.name} {self.why}. Its last output:{output}"


class State(enum.Enum):
    """The state of a process."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    ENDED = "ended"
    FAILED = "failed"


ALIVE = (State.STARTING, State.RUNNING, State.STOPPING)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """How to start a process, and what it means when it ends."""

    name: str
    arguments: Sequence[str]
    """Of the ``batchmill`` command."""
    target: str = "batchmill"
    """Or the path of a Python file to run instead."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own."""
    ready_line: str | None = None
    """It is ready once its output has a line with this text,"""
    ready_file: Path | None = None
    """or once this file has its process id as ``pid``; without either, at once."""
    restart: bool = True
    """Whether it is restarted when it ends; False: it has a task, and ends when that is done."""
    essential: bool = False
    """Whether the run ends if its first start fails; any other process is started for ever."""
    title: str = ""
    """What the user knows it by, if not by its name."""
    handles: Sequence[int] = ()
    """Open files that it inherits."""


class Process:
    """A process that is started, and restarted when it dies."""

    def __init__(
        self, spec: Spec, policy: RestartPolicy, log: LineLog, say: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.state = State.ENDED
        self.restarts = 0
        self.code: int | None = None
        """How it ended last."""
        self.lines: list[str] = []
        """The last lines of its output."""
        self.reason = ""
        """Why it does not run; empty if it does."""
        self.pid: int | None = None
        self.started: float | None = None
        """When it was last started, in seconds since 1970."""
        self._policy = policy
        self._log = log
        self._say = say
        self._record = Record()
        self._due_s = 0.0
        self._ready_s = 0.0
        self._ready_line_seen = False
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        """Closed by this process's end: see child.py."""
        self._output: OutputReader | None = None

    @property
    def failed_starts(self) -> int:
        """How many starts in a row have failed."""
        return self._record.failed_starts

    def start(self, inherit: int | None) -> None:
        """Start it; ``inherit`` is the handle of the lock that it holds as long as it runs."""
        reading, self._pipe = os.pipe()
        spec = self.spec
        lock = () if inherit is None else (inherit,)
        handles = ",".join(map(str, (reading, *spec.handles)))
        self._ready_line_seen = False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD), handles, spec.target, *spec.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(reading, *lock, *spec.handles),
                env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.environment},
                start_new_session=True,
            )
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(reading)
        assert self._process.stdout is not None
        self._output = OutputReader(self._process.stdout, spec.name, self._on_line)
        self.pid, self.started = self._process.pid, time.time()
        self.state = State.STARTING
        self._log.write(f"--- started as process {self.pid}")

    def poll(self, now_s: float, inherit: int | None) -> None:
        """Update its state; restart it if that is due."""
        if self.state is State.RESTARTING and now_s >= self._due_s:
            self._restart(now_s, inherit)
        if self.state not in ALIVE:
            return
        code = self._reap()
        if code is None:
            if self.state is State.STARTING and self._is_ready():
                self.state, self._ready_s, self.reason = State.RUNNING, now_s, ""
                self._record = replace(self._record, failed_starts=0, has_run=True)
            return
        self._log.write(f"--- ended: {exit_text(code)}")
        self.code = code
        if self.state is State.STOPPING or not self.spec.restart:
            self.state = State.ENDED
            return
        ready_s = now_s - self._ready_s if self.state is State.RUNNING else None
        self._died(Death(code, ready_s), now_s)

    def terminate(self) -> None:
        """Ask it to end, once; it is not restarted."""
        if self.state in (State.STARTING, State.RUNNING) and self._process is not None:
            self.state = State.STOPPING
            # Not Popen's terminate(), which reaps a process that has ended by itself; see _reap().
            os.kill(self._process.pid, signal.SIGTERM)
        elif self.state is State.RESTARTING:
            self.state = State.ENDED

    def kill(self) -> None:
        """Kill it and all that it started."""
        if self._process is not None:
            if self.state in ALIVE:
                self.state = State.STOPPING
            # Not reaped yet, so the process id is still its own.
            _kill_group(self._process.pid)
            self.code = self._reap(wait=True)
        self.state = State.FAILED if self.state is State.FAILED else State.ENDED

    def report(self) -> dict[str, Any]:
        """Its state, for ``supervisor.json``."""
        return {
            "pid": self.pid,
            "state": self.state.value,
            "started": self.started,
            "restarts": self.restarts,
            "failed_starts": self.failed_starts,
            "exit": None if self.code is None else exit_text(self.code),
            "reason": self.reason or None,
        }

    def postpone(self, error: OSError, now_s: float) -> None:
        """Try later: there is no memory or no process id left, for now."""
        self.state, self._due_s = State.RESTARTING, now_s + self._policy.max_s
        self.reason = f"could not be started ({error})"
        self._say(f"{self.spec.name} {self.reason}: trying again")

    def _restart(self, now_s: float, inherit: int | None) -> None:
        try:
            self.start(inherit)
        except OSError as error:
            self.postpone(error, now_s)
        else:
            self.restarts += 1

    def _died(self, death: Death, now_s: float) -> None:
        decision = decide(self._policy, self._record, death, essential=self.spec.essential)
        self._record = decision.record
        name, how, starts = self.spec.name, exit_text(death.code), decision.record.failed_starts
        in_a_row = f", {starts} times in a row" if starts > 1 else ""
        if decision.delay_s is None:
            self.state = State.FAILED
            raise GaveUpError(name, f"did not start ({how}){in_a_row}", tuple(self.lines))
        self.state, self._due_s = State.RESTARTING, now_s + decision.delay_s
        self.reason = self._last_words(death)
        if not starts:
            self._say(f"{name} died ({how}): starting it again in {decision.delay_s:g} s")
        elif starts <= 3 or starts.bit_count() == 1:  # not a line for each try, for days
            title = self.spec.title or name
            again = f"trying again in {decision.delay_s:g} s"
            self._say(f"{title} unavailable: {self.reason}{in_a_row}; {again}")

    def _last_words(self, death: Death) -> str:
        """How it ended, and the last line of its output, which says why."""
        how = exit_text(death.code)
        if death.ready_s is not None or death.code < 0 or not self.lines:
            return how
        last = self.lines[-1].removeprefix(f"batchmill {self.spec.name}: ")
        refused = death.code == USAGE and last != self.lines[-1]
        return last if refused else f"{how}: {last}"

    def _reap(self, *, wait: bool = False) -> int | None:
        """The exit code once it has ended, and then kill what it started; None while it runs."""
        process = self._process
        if process is None:
            return self.code
        options = os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)
        if os.waitid(os.P_PID, process.pid, options) is None:
            return None
        # Not reaped yet, so the group's id is still its own: a JVM may be left in it.
        _kill_group(process.pid)
        code = process.wait()
        os.close(self._pipe)
        self._process = self.pid = None
        if self._output is not None:
            self._output.join(_LAST_OUTPUT_S)
            self.lines = list(self._output.tail)
        return code

    def _on_line(self, line: str) -> None:
        # On the output's thread.
        self._log.write(line)
        if self.spec.ready_line is not None and self.spec.ready_line in line:
            self._ready_line_seen = True

    def _is_ready(self) -> bool:
        if self.spec.ready_line is not None:
            return self._ready_line_seen
        if self.spec.ready_file is not None:
            return (read_json(self.spec.ready_file) or {}).get("pid") == self.pid
        return True


class Supervisor:
    """All processes of a run. Use it as a context: what still runs at its end is killed."""

    def __init__(
        self,
        *,
        inherit: int,
        log: Callable[[str], RotatingLog],
        say: Callable[[str], None],
        policy: RestartPolicy | None = None,
    ) -> None:
        self.processes: dict[str, Process] = {}
        self._inherit = inherit
        self._make_log = log
        self._say = say
        self._policy = policy or RestartPolicy()

    def start(self, spec: Spec) -> Process:
        """Start a process, and watch it from now on."""
        process = Process(spec, self._policy, self._make_log(spec.name), self._say)
        self.processes[spec.name] = process
        try:
            process.start(self._inherit)
        except OSError as error:
            if spec.essential or not spec.restart:
                raise
            process.postpone(error, time.monotonic())
        return process

    def poll(self) -> None:
        """Note deaths and restart what is due; :class:`GaveUpError` for a failed first start."""
        now_s = time.monotonic()
        for process in self.processes.values():
            process.poll(now_s, self._inherit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # all gone; macOS raises the second for a group of zombies
