"""The folder with all state of ``batchmill run``: what lies where, and who has it.

Two locks of the operating system, gone with their holders however these end. One is the
supervisor's alone. The other is handed on to every process that it starts, so that it is free only
when all of them are gone: a run after one that was killed waits for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill.errors import BatchmillError

LEFTOVERS_S = 20.0
_POLL_S = 0.05


class HomeInUseError(BatchmillError, RuntimeError):
    """Another run has the folder; carries ``home`` and ``why``."""

    def __init__(self, home: str, why: str) -> None:
        super().__init__(home, why)
        self.home = home
        self.why = why

    def __str__(self) -> str:
        return f"{self.home} is in use: {self.why}"


class HomeError(BatchmillError, OSError):
    """The folder cannot be made or written; carries ``home`` and ``why``."""

    def __init__(self, home: str, why: str) -> None:
        super().__init__(home, why)
        self.home = home
        self.why = why

    def __str__(self) -> str:
        return f"{self.home} cannot be used: {self.why}. Name another folder with --home"


class HomeSourceError(BatchmillError, RuntimeError):
    """The folder belongs to another road; carries ``home``, ``was`` and ``now``."""

    def __init__(self, home: str, was: str, now: str) -> None:
        super().__init__(home, was, now)
        self.home = home
        self.was = was
        self.now = now

    def __str__(self) -> str:
        return (
            f"{self.home} is the folder of a run with {self.was}, and its books are on that; this "
            f"one has {self.now}. Give this one a folder of its own: --home"
        )


@dataclass(frozen=True)
class Home:
    """What lies where."""

    folder: Path

    @property
    def spool(self) -> Path:
        """What was acknowledged and not read yet."""
        return self.folder / "spool"

    @property
    def quarantine(self) -> Path:
        """What does not fit."""
        return self.folder / "spool-quarantine"

    @property
    def checkpoint(self) -> Path:
        """Spark's own books."""
        return self.folder / "checkpoint"

    @property
    def progress(self) -> Path:
        """What the pipeline tells of itself."""
        return self.checkpoint / "progress.json"

    @property
    def database(self) -> Path:
        """The store's file."""
        return self.folder / "metrics.db"

    @property
    def store_url(self) -> str:
        """The store's address."""
        return f"sqlite:///{self.database}"

    @property
    def log(self) -> Path:
        """The processes' logs."""
        return self.folder / "log"

    @property
    def run(self) -> Path:
        """What the processes tell of themselves."""
        return self.folder / "run"

    @property
    def supervisor(self) -> Path:
        """What the supervisor tells of itself and of the others."""
        return self.run / "supervisor.json"

    @property
    def ingest(self) -> Path:
        """What ingest tells of itself."""
        return self.run / "ingest.json"

    @property
    def source(self) -> Path:
        """Whether there is a spool or a topic between ingest and pipeline."""
        return self.folder / "source.json"

    @property
    def web(self) -> Path:
        """What the server of the pages tells of itself."""
        return self.run / "web.json"

    def export(self, name: str) -> Path:
        """What an exporter tells of itself, by its name as a process."""
        return self.run / f"{name}.json"

    def prepare(self) -> None:
        """Make the folders that are not there; nobody else may look into them."""
        try:
            for each in (self.folder, self.run, self.log, self.spool):
                each.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise HomeError(str(self.folder), error.strerror or str(error)) from error

    @contextlib.contextmanager
    def locked(self, wait_s: float = LEFTOVERS_S) -> Iterator[int]:
        """Have the folder; the answer is the lock that the processes are to inherit.

        A run that is going on is refused at once. What is left of one that was killed is on its
        way out, and is waited for.
        """
        with contextlib.ExitStack() as stack:
            own = self._open("supervisor.lock")
            stack.callback(os.close, own)
            if not _take(own):
                raise HomeInUseError(
                    str(self.folder),
                    f"another `batchmill run` {self._pid()}has it. Stop that one first, or give "
                    "this one a folder of its own: --home",
                )
            shared = self._open("processes.lock")
            stack.callback(os.close, shared)
            deadline = time.monotonic() + wait_s
            while not _take(shared):
                if time.monotonic() > deadline:
                    raise HomeInUseError(
                        str(self.folder),
                        f"processes of a run that was killed are still there after {wait_s:g} s. "
                        f"{self.run / 'supervisor.json'} has their numbers: end them, then start "
                        "again",
                    )
                time.sleep(_POLL_S)
            yield shared

    def belong_to(self, topic: str | None) -> None:
        """Be the folder of a run with a spool, or with that topic; raises if it is another's.

        What Spark has written down on the one means nothing for the other, and what waits in the
        one would not be read. A topic is known by its name: brokers move.
        """
        told = read_json(self.source)
        now = "a spool" if topic is None else f"the topic {topic.rpartition('/')[2]}"
        if told is not None:
            was = str(told.get("source"))
        else:
            was = "a spool" if self.checkpoint.exists() else now
        if was != now:
            raise HomeSourceError(str(self.folder), was, now)
        if told is None:
            write_json(self.source, {"source": now})

    def is_locked(self) -> bool:
        """Whether a supervisor has it."""
        import fcntl

        try:
            handle = os.open(self.run / "supervisor.lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def _open(self, name: str) -> int:
        try:
            return os.open(self.run / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HomeError(str(self.folder), error.strerror or str(error)) from error

    def _pid(self) -> str:
        pid = (read_json(self.supervisor) or {}).get("pid")
        return f"(process {pid}) " if isinstance(pid, int) else ""


def read_json(path: Path) -> dict[str, Any] | None:
    """An object from a file; None: there is none, or nothing that can be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Put a file in place of an older one, whole."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False, encoding="utf-8"
    ) as file:
        json.dump(content, file)
    Path(file.name).replace(path)


def _take(handle: int) -> bool:
    import fcntl  # not on every system

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
