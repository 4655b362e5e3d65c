"""Log files that rotate, and the thread that copies a process's output into one."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from batchmill.wording import count_of

TAIL = 15
"""How many of a process's last lines are remembered."""
_LONGEST_LINE = 8192


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
