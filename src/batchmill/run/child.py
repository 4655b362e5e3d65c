"""Runs one command of ``batchmill run`` so that it cannot outlive the supervisor.

``python -P child.py HANDLES TARGET ARGUMENT…`` is started in a session of its own. Of ``HANDLES``,
numbers with commas between them, the first is the reading end of a pipe. The supervisor alone has
the writing end and never writes, so reading ends when the supervisor does, however that happens. A
guard process, forked before anything is loaded, waits for that and then kills the whole process
group: the command, and what it started (a JVM). On Linux the kernel kills the command as well, in
case the guard is gone. The other handles are the command's alone: the guard closes them, so that
their other ends see when the command has.

``TARGET`` is ``batchmill`` or the path of a Python file. This file is run by its path, so that
nothing of batchmill is loaded before the guard exists.
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
    """Fork the guard, then run the command in this process."""
    (pipe, *handles), target = map(int, sys.argv[1].split(",")), sys.argv[2]
    parent = os.getppid()
    if os.fork() == 0:
        for handle in handles:
            os.close(handle)
        _guard(pipe)
    os.close(pipe)
    _die_with(parent)
    sys.argv = sys.argv[2:]
    if target == "batchmill":
        if importlib.util.find_spec("batchmill") is None:  # the supervisor runs from a source tree
            sys.path.append(str(Path(__file__).resolve().parents[2]))
        runpy.run_module("batchmill", run_name="__main__")
    else:
        runpy.run_path(target, run_name="__main__")


def _guard(pipe: int) -> NoReturn:
    """Wait for the supervisor's end, then kill the process group, and the guard with it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the output belongs to the command: its end must be seen
        os.dup2(null, stream)
    while os.read(pipe, 1):
        pass
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _die_with(parent: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # another C library: the guard is enough
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)


if __name__ == "__main__":
    main()
