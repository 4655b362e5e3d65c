"""Processes that are started, watched, started again when they die, and ended in order.

What to do about a death is decided by :func:`judge`, which knows no processes. All the rest is run
by one thread, the one that calls :meth:`Supervisor.look`; beside it each process has a thread that
does nothing but carry its output to a log.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from batchmill.backoff import back_off_ms
from batchmill.errors import BatchmillError
from batchmill.run.home import read_json
from batchmill.run.log import Pump, RotatingLog

TICK_S = 0.1
USAGE = 2
"""The exit code of a command that was told something it does not take."""
_LEASH = Path(__file__).with_name("child.py")
_LAST_WORDS_S = 2.0


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How a process that died is started again."""

    initial_s: float = 0.5
    max_s: float = 10.0
    multiplier: float = 2.0
    stable_s: float = 30.0
    """Ready for so long, and earlier deaths are forgotten."""
    failed_starts: int = 5
    """So many starts in a row that came to nothing are enough."""


@dataclass(frozen=True)
class Death:
    """How a process ended that nobody had asked to."""

    code: int
    """Its exit code; negative: the signal that killed it."""
    ready_s: float | None
    """How long it had been ready; None: it never was."""


@dataclass(frozen=True)
class Record:
    """What a process has behind it."""

    deaths: int = 0
    """In a row, without a stable time between them."""
    failed_starts: int = 0
    """In a row: it ended by itself before it was ready."""


@dataclass(frozen=True)
class Verdict:
    """What to do about a death."""

    record: Record
    delay_s: float | None
    """When to start it again; None: not at all, it would only fail again."""


def judge(policy: RestartPolicy, record: Record, death: Death) -> Verdict:
    """What to do about a death.

    Somebody who kills a process (SIGKILL) says nothing about whether it could start. A process that
    does not take what it was told will not take it the next time.
    """
    if death.ready_s is not None:
        stable = death.ready_s >= policy.stable_s
        record = Record(deaths=1 if stable else record.deaths + 1)
    elif death.code == -signal.SIGKILL:
        record = replace(record, deaths=record.deaths + 1)
    else:
        record = Record(record.deaths + 1, record.failed_starts + 1)
    if record.failed_starts >= policy.failed_starts:
        return Verdict(record, None)
    if record.failed_starts and death.code == USAGE:
        return Verdict(record, None)
    delay = back_off_ms(policy.initial_s, policy.max_s, policy.multiplier, record.deaths)
    return Verdict(record, delay)


def told(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class GaveUpError(BatchmillError, RuntimeError):
    """A process cannot be kept running; carries ``name``, ``why`` and its last ``lines``."""

    def __init__(self, name: str, why: str, lines: Sequence[str]) -> None:
        super().__init__(name, why, tuple(lines))
        self.name = name
        self.why = why
        self.lines = tuple(lines)

    def __str__(self) -> str:
        said = "".join(f"\n  {each}" for each in self.lines) or " nothing"
        return f"{self.name} {self.why}. It said last:{said}"


class State(enum.Enum):
    """Where a process is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    ENDED = "ended"
    FAILED = "failed"


ALIVE = (State.STARTING, State.RUNNING, State.STOPPING)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A process that is to run."""

    name: str
    arguments: Sequence[str]
    """Of the ``batchmill`` command."""
    target: str = "batchmill"
    """Or the path of a Python file to run instead."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What is added to this process's own."""
    ready_line: str | None = None
    """It is ready once it has said a line with this in it,"""
    ready_file: Path | None = None
    """or once this file has its number as ``pid``; without either, at once."""
    keep: bool = True
    """Whether its end is a death; False: it has a task, and is through with it some time."""
    vital: bool = True
    """Whether the others are of no use without it; False: if it cannot be kept, they go on."""


class Process:
    """A process and its lives, one after the other."""

    def __init__(
        self, spec: Spec, policy: RestartPolicy, log: RotatingLog, say: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.state = State.ENDED
        self.restarts = 0
        self.code: int | None = None
        """How its last life ended."""
        self.lines: list[str] = []
        """What it said last."""
        self.pid: int | None = None
        self.started: float | None = None
        """When this life began, in seconds since 1970."""
        self._policy = policy
        self._log = log
        self._say = say
        self._record = Record()
        self._due_s = 0.0
        self._ready_s = 0.0
        self._heard_ready = False
        self._process: subprocess.Popen[bytes] | None = None
        self._leash = -1
        self._pump: Pump | None = None

    def start(self, inherit: int) -> None:
        """Begin a life; ``inherit`` is the lock that it holds as long as it lives."""
        leash, self._leash = os.pipe()
        spec = self.spec
        self._heard_ready = False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_LEASH), str(leash), spec.target, *spec.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(leash, inherit),
                env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.environment},
                start_new_session=True,
            )
        except OSError:
            os.close(self._leash)
            raise
        finally:
            os.close(leash)
        assert self._process.stdout is not None
        self._pump = Pump(self._process.stdout, spec.name, self._hear)
        self.pid, self.started = self._process.pid, time.time()
        self.state = State.STARTING
        self._log.write(f"--- started as process {self.pid}")

    def look(self, now_s: float, inherit: int) -> None:
        """Note what has become of it; start it again if that is due."""
        if self.state is State.RESTARTING and now_s >= self._due_s:
            self._start_again(now_s, inherit)
        if self.state not in ALIVE:
            return
        code = self._reap()
        if code is None:
            if self.state is State.STARTING and self._is_ready():
                self.state, self._ready_s = State.RUNNING, now_s
            return
        self._log.write(f"--- ended: {told(code)}")
        self.code = code
        if self.state is State.STOPPING or not self.spec.keep:
            self.state = State.ENDED
            return
        ready_s = now_s - self._ready_s if self.state is State.RUNNING else None
        self._died(Death(code, ready_s), now_s)

    def terminate(self) -> None:
        """Ask it to end; it is not started again."""
        if self.state in ALIVE and self._process is not None:
            self.state = State.STOPPING
            self._process.terminate()
        elif self.state is State.RESTARTING:
            self.state = State.ENDED

    def kill(self) -> None:
        """End it and all that it started, at once."""
        if self._process is not None:
            if self.state in ALIVE:
                self.state = State.STOPPING
            # Not waited for yet, so the number is still its own.
            _kill_group(self._process.pid)
            self.code = self._reap(wait=True)
        self.state = State.FAILED if self.state is State.FAILED else State.ENDED

    def figures(self) -> dict[str, Any]:
        """What can be told of it."""
        return {
            "pid": self.pid,
            "state": self.state.value,
            "started": self.started,
            "restarts": self.restarts,
            "exit": None if self.code is None else told(self.code),
        }

    def _start_again(self, now_s: float, inherit: int) -> None:
        try:
            self.start(inherit)
        except OSError as error:  # no memory or no process numbers left, for now
            self._due_s = now_s + self._policy.max_s
            self._say(f"{self.spec.name} could not be started ({error}): trying again")
        else:
            self.restarts += 1

    def _died(self, death: Death, now_s: float) -> None:
        verdict = judge(self._policy, self._record, death)
        self._record = verdict.record
        name, how = self.spec.name, told(death.code)
        if verdict.delay_s is not None:
            self.state, self._due_s = State.RESTARTING, now_s + verdict.delay_s
            self._say(f"{name} died ({how}): starting it again in {verdict.delay_s:g} s")
            return
        self.state = State.FAILED
        times = verdict.record.failed_starts
        why = f"did not start ({how})" + (f", {times} times in a row" if times > 1 else "")
        error = GaveUpError(name, why, self.lines)
        if self.spec.vital:
            raise error
        self._say(f"{error}\n{name} stays away; all else goes on")

    def _reap(self, *, wait: bool = False) -> int | None:
        """The exit code, once it is over; then whatever it started is gone, too."""
        process = self._process
        if process is None:
            return self.code
        options = os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)
        if os.waitid(os.P_PID, process.pid, options) is None:
            return None
        # Not waited for yet, so the group's number is still its own: a JVM may be left in it.
        _kill_group(process.pid)
        code = process.wait()
        os.close(self._leash)
        self._process = self.pid = None
        if self._pump is not None:
            self._pump.join(_LAST_WORDS_S)
            self.lines = list(self._pump.tail)
        return code

    def _hear(self, line: str) -> None:
        # In the pump's thread.
        self._log.write(line)
        if self.spec.ready_line is not None and self.spec.ready_line in line:
            self._heard_ready = True

    def _is_ready(self) -> bool:
        if self.spec.ready_line is not None:
            return self._heard_ready
        if self.spec.ready_file is not None:
            return (read_json(self.spec.ready_file) or {}).get("pid") == self.pid
        return True


class Supervisor:
    """All processes of a run. Use it as a context: what is left at its end is killed."""

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
        process.start(self._inherit)
        return process

    def look(self) -> None:
        """Note deaths, start again what is due; :class:`GaveUpError` if one cannot be kept."""
        now_s = time.monotonic()
        for each in self.processes.values():
            each.look(now_s, self._inherit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.processes.values():
            each.kill()


class Signals:
    """While entered, Ctrl-C and its like are counted, and wake up :meth:`wait`."""

    WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}
        self._ends = (-1, -1)

    def wait(self, seconds: float = TICK_S) -> None:
        """Let time pass, until a signal comes at most."""
        readable, _, _ = select.select([self._ends[0]], [], [], seconds)
        if readable:
            os.read(self._ends[0], 64)

    def _note(self, number: int, frame: object) -> None:
        self.count += 1
        with contextlib.suppress(BlockingIOError):  # full: it will wake up anyway
            os.write(self._ends[1], b"!")

    def __enter__(self) -> Self:
        self._ends = os.pipe()
        os.set_blocking(self._ends[1], False)
        for each in self.WATCHED:
            if signal.getsignal(each) is signal.SIG_IGN and each != signal.SIGTERM:
                continue  # nohup, or a shell's background job: not to be stopped by these
            self._before[each] = signal.signal(each, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for each in self._ends:
            os.close(each)


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # all gone; macOS says so of a group of zombies in the second way
