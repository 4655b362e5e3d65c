"""Runs a command of ``batchmill run`` so that it cannot outlive its supervisor.

``python -P child.py LEASH TARGET ARGUMENT…`` is started in a session of its own. ``LEASH`` is
the number of the reading end of a pipe whose other end the supervisor alone holds, and nobody ever
writes: it ends when the supervisor does, however that happens. A guard, forked off before anything
is loaded, waits for that and then kills the whole group: the command, and what it started (a JVM).
On Linux the kernel kills the command itself, too, should the guard be gone.

``TARGET`` is ``batchmill`` or the path of a Python file. Run by its path: nothing of batchmill is
loaded before the guard is there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Put the guard in place, then be the command."""
    leash, target = int(sys.argv[1]), sys.argv[2]
    parent = os.getppid()
    if os.fork() == 0:
        _guard(leash)
    os.close(leash)
    _die_with(parent)
    sys.argv = sys.argv[2:]
    if target == "batchmill":
        if importlib.util.find_spec("batchmill") is None:  # the supervisor runs from a source tree
            sys.path.append(str(Path(__file__).resolve().parents[2]))
        runpy.run_module("batchmill", run_name="__main__")
    else:
        runpy.run_path(target, run_name="__main__")


def _guard(leash: int) -> NoReturn:
    """Wait for the supervisor's end, then end the group; its own end takes the guard along."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the log's pipe belongs to the command
        os.dup2(nothing, stream)
    while os.read(leash, 1):
        pass
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _die_with(parent: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # another C library: the guard will do
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)


if __name__ == "__main__":
    main()
