"""Logs that begin anew when they are large, and the thread that fills one from a process."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

TAIL = 15
"""How many of a process's last lines are remembered."""
_LONGEST_LINE = 8192


class RotatingLog:
    """A log file; past ``limit`` bytes it becomes ``NAME.1``, and so on up to ``files`` of them.

    May be written by any thread. A disk that is full takes nothing more, and stops nobody; how many
    lines it did not take is said once it does again.
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
                    self._append(f"({self._lost} lines could not be written here)")
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


class Pump(threading.Thread):
    """Reads what a process says, line by line, until nobody can say anything any more."""

    def __init__(self, stream: IO[bytes], name: str, hear: Callable[[str], None]) -> None:
        super().__init__(name=f"batchmill-log-{name}", daemon=True)
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._stream = stream
        self._hear = hear
        self.start()

    def run(self) -> None:
        """Read; a line without an end is cut into pieces."""
        with self._stream:
            while raw := self._stream.readline(_LONGEST_LINE):
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                if line:
                    self.tail.append(line)
                    self._hear(line)
