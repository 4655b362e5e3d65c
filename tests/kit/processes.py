"""Other processes in tests: a script, a forked child, one whose output is read; state files.

And commands that need no process of their own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from unittest import mock

import batchmill
from batchmill.files import read_json
from tests.kit.files import ROOT
from tests.kit.threads import PATIENCE_S, WAIT_S, until


def wait_for_json(path: Path, *keys: str, timeout_s: float = PATIENCE_S) -> Any:
    """The value at ``keys`` in the JSON file of another process, once it is there and true.

    Without keys, the whole object. A state file is never read without waiting for it: its process
    may not have written it yet.
    """

    def value() -> Any:
        content: Any = read_json(path)
        for key in keys:
            content = content.get(key) if isinstance(content, dict) else None
        return content

    return until(value, f"{path} has {'.'.join(keys) or 'content'}", timeout_s)


def running_pid(supervisor: Path, name: str, timeout_s: float = PATIENCE_S) -> int:
    """The id of a process of a run, once its ``supervisor.json`` says that it is running."""

    def pid() -> Any:
        process = (read_json(supervisor) or {}).get("processes", {}).get(name, {})
        return process.get("pid") if process.get("state") == "running" else None

    return int(until(pid, f"{name} is running", timeout_s))


SOURCE = str(Path(batchmill.__file__).parents[1])
"""Where the package under test is, for scripts that run in an interpreter of their own."""


_BELOW_EPHEMERAL = range(20_000, 32_000)
"""Ports that the system gives to nobody who did not ask for them: free now, free later."""
_RESERVED: list[int] = []
"""Locks on files, which end with this process."""


def free_ports(count: int) -> tuple[int, ...]:
    """Ports of the loopback that nobody listens on, nor will until this process has ended.

    For servers that cannot be given port 0, and those that are to come back at the same port. A
    locked file for each keeps other test processes from choosing the same.
    """
    folder = Path(tempfile.gettempdir(), f"batchmill-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    ports: list[int] = []
    while len(ports) < count:
        port = random.choice(_BELOW_EPHEMERAL)
        lock = os.open(folder / str(port), os.O_RDWR | os.O_CREAT)
        with socket.socket() as probe:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                probe.bind(("127.0.0.1", port))
            except OSError:
                os.close(lock)
                continue
        _RESERVED.append(lock)
        ports.append(port)
    return tuple(ports)


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def pause_process(pid: int) -> None:
    """Stop a process (SIGSTOP), and wait until each of its threads stands still.

    The signal stops a thread only when that thread next takes signals: on a busy machine others of
    the process go on for a while after ``kill`` has returned.
    """
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _thread_states(pid) <= set("TtZX"), f"all threads of {pid} stand still")


def _thread_states(pid: int) -> set[str]:
    """The states of a process's threads, in the letters of ``/proc``."""
    states: set[str] = set()
    for stat in Path(f"/proc/{pid}/task").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            states.add(stat.read_text("utf-8", "replace").rpartition(")")[2].split()[0])
    return states


class Life:
    """A process that is told and heard by lines; as a context manager, it is killed at the end.

    ``lines`` has what it wrote to its standard output so far. It is the leader of a process group,
    and killed with all of it. Its errors go to the file ``log``, or where this process's go.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.lines: list[str] = []
        self._heard = 0
        self._rest = b""
        self._log = log
        self._over = False
        with contextlib.ExitStack() as stack:
            errors = None if log is None else stack.enter_context(log.open("wb"))
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=None if env is None else dict(env),
                start_new_session=True,
            )
        self.pid = self._process.pid

    @classmethod
    def of_script(cls, source: str, **values: str) -> Self:
        """A process that runs Python code; ``values`` are variables that it finds."""
        given = json.dumps(json.dumps(values))
        header = f"import sys, json\nglobals().update(json.loads({given}))\n"
        return cls([sys.executable, "-c", header + source])

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._over and self._process.poll() is None

    @property
    def over(self) -> bool:
        """Whether :meth:`kill` or :meth:`end` has seen its end."""
        return self._over

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def hear(self, pattern: str, nth: int = 1, seconds: float = PATIENCE_S) -> bool:
        """Wait until it has said ``nth`` lines that match; False if time is up.

        Only lines after the last match of an earlier call count. It is an error if it ends before.
        """
        deadline = time.monotonic() + seconds
        line = self._heard
        while True:
            while line < len(self.lines):
                nth -= re.fullmatch(pattern, self.lines[line]) is not None
                line += 1
                if nth == 0:
                    self._heard = line
                    return True
            if not self._readable(deadline):
                return False
            assert self._read(), f"it ended, before it said {pattern!r}:\n{self.report()}"

    def must_hear(self, pattern: str, nth: int = 1) -> None:
        """As :meth:`hear`, and it is an error if time is up."""
        assert self.hear(pattern, nth), f"it did not say {pattern!r}:\n{self.report()}"

    def listen(self, seconds: float = 0.0) -> bool:
        """Hear what it says within that time; False: it has ended."""
        deadline = time.monotonic() + seconds
        while self._readable(deadline):
            if not self._read():
                return False
        return True

    def kill(self) -> None:
        """SIGKILL for it and all that it started, unless it is over; what it said last is heard."""
        if not self._over:
            # Not waited for yet, so the number is still its own.
            os.killpg(self.pid, signal.SIGKILL)
            self._hear_out()
            self._close()

    def end(self, expected: int = 0) -> None:
        """Wait until it ends by itself, and with that exit code."""
        self._hear_out()
        code = self._close()
        assert code == expected, f"exit code {code}:\n{self.report()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def report(self, lines: int = 40) -> str:
        """What it has said last, and its log's last lines."""
        errors = self._log.read_text("utf-8", "replace").splitlines()[-lines:] if self._log else []
        return "\n".join(["said:", *self.lines[-15:], "log:", *errors])

    def _hear_out(self) -> None:
        # A child of it, such as its JVM, has the same standard output: its end is the end of all.
        deadline = time.monotonic() + PATIENCE_S
        while self._readable(deadline):
            if not self._read():
                return
        raise AssertionError(f"something of it still lives:\n{self.report()}")

    def _readable(self, deadline: float) -> bool:
        assert self._process.stdout is not None
        wait = max(0.0, deadline - time.monotonic())
        return bool(select.select([self._process.stdout], [], [], wait)[0])

    def _read(self) -> bool:
        assert self._process.stdout is not None
        some = os.read(self._process.stdout.fileno(), 65536)
        *lines, self._rest = (self._rest + some).split(b"\n")
        self.lines += [line.decode() for line in lines]
        return bool(some)

    def _close(self) -> int:
        self._over = True
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        return self._process.wait(PATIENCE_S)


def run_script(
    source: str, *, options: Sequence[str] = (), timeout_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """Run ``source`` in a new interpreter; one that does not end in time fails the test."""
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=dict(os.environ, PYTHONPATH=SOURCE),
        check=False,
    )


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked child of this process; it has to be JSON."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    assert text, "the child failed; its traceback is above"
    return json.loads(text)


class Child:
    """A forked process that runs ``work``; it exits with 0, or prints its error and exits 1."""

    def __init__(self, work: Callable[[], object]) -> None:
        sys.stderr.flush()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)  # type: ignore[arg-type]
                work()
                code = 0
            except BaseException:  # noqa: BLE001 - nothing may get out of the child into the tests
                traceback.print_exc(file=sys.__stderr__)
                sys.__stderr__.flush()  # type: ignore[union-attr]
            finally:
                os._exit(code)

    def succeeds(self) -> None:
        """Wait for the child to exit with 0, in time."""
        pidfd = os.pidfd_open(self.pid)
        try:
            ended = bool(select.select([pidfd], [], [], 2 * WAIT_S)[0])
        finally:
            os.close(pidfd)
        if not ended:
            os.kill(self.pid, signal.SIGUSR1)  # it prints where it hangs
            threading.Event().wait(0.2)
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        assert ended, "the child hangs"
        assert os.waitstatus_to_exitcode(status) == 0


def run_here(*words: str, **variables: str) -> tuple[int, str, str]:
    """Run ``batchmill`` in the process of the test: the exit code, the output, and the errors.

    For errors that end a command before it starts. ``variables`` are set in its environment.
    """
    from batchmill.cli import main

    out, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["batchmill", *words]),
        mock.patch.dict(os.environ, variables),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            code = main()
        except SystemExit as end:  # of argparse
            code = int(end.code or 0)
    return code, out.getvalue(), errors.getvalue()
