"""Other processes in tests: a script, a forked child, and one that is listened to and killed."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import batchmill
from tests.kit.paths import ROOT
from tests.kit.threads import WAIT_S

PATIENCE_S = 150.0
"""How long a process may take to say what it must say, on a machine that has much else to do."""


SOURCE = str(Path(batchmill.__file__).parents[1])
"""Where the package under test is, for scripts that run in an interpreter of their own."""


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Life:
    """A process group. All that it says on its standard output is kept in ``lines``."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self._rest = b""
        self._log = log
        self._over = False
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=dict(env),
                start_new_session=True,
            )
        self.pid = self._process.pid

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def hear(self, pattern: str, nth: int = 1, seconds: float = PATIENCE_S) -> bool:
        """Wait until it has said ``nth`` lines that match, from here on; False if time is up.

        It is an error if it ends before.
        """
        deadline = time.monotonic() + seconds
        heard = len(self.lines)
        while True:
            while heard < len(self.lines):
                nth -= re.fullmatch(pattern, self.lines[heard]) is not None
                heard += 1
                if nth == 0:
                    return True
            if not self._readable(deadline):
                return False
            assert self._read(), f"it ended, before it said {pattern!r}:\n{self.report()}"

    def must_hear(self, pattern: str, nth: int = 1) -> None:
        """As :meth:`hear`, and it is an error if time is up."""
        assert self.hear(pattern, nth), f"it did not say {pattern!r}:\n{self.report()}"

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

    def report(self) -> str:
        """What it has said last, and its log's last lines."""
        errors = self._log.read_text("utf-8", "replace").splitlines()[-40:]
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
    source: str, *, options: Sequence[str] = (), timeout_s: float = 60.0
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
