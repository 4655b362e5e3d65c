"""The home folder of a run: where each file is, and the locks that keep a second run out.

Both locks belong to the operating system, so they are gone with their holders, however these end.
``supervisor.lock`` is the supervisor's alone. ``processes.lock`` is inherited by every process that
the supervisor starts, so it is free only when all of them are gone: a run that follows a killed one
waits for that.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from batchmill.errors import BatchmillError
from batchmill.files import FileLock, read_json, remove_stale_temporaries, write_json

LEFTOVERS_S = 20.0
"""How long a run waits for the processes of a killed one to end."""
_POLL_S = 0.05


class HomeInUseError(BatchmillError, RuntimeError):
    """Another run uses the folder."""

    home: str
    why: str
    template = "{home} is in use: {why}"


class HomeError(BatchmillError, OSError):
    """The folder cannot be created or written."""

    home: str
    why: str
    template = "{home} cannot be used: {why}. Name another folder with --home"


class HomeSourceError(BatchmillError, RuntimeError):
    """The folder was used with another source."""

    home: str
    was: str
    now: str
    template = (
        "{home} was used with {was}, and its checkpoint belongs to that; this run has {now}. "
        "Give it a folder of its own: --home"
    )


class Home:
    """The home folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spool = folder / "spool"
        """Segments that were acknowledged and not read yet."""
        self.quarantine = folder / "spool-quarantine"
        """Rows and segments that the pipeline could not use."""
        self.checkpoint = folder / "checkpoint"
        """Spark's checkpoint."""
        self.progress = self.checkpoint / "progress.json"
        """The pipeline's report."""
        self.database = folder / "metrics.db"
        self.store_url = f"sqlite:///{self.database}"
        self.traces = folder / "traces"
        """Spans that are kept for people who look at traces."""
        self.log = folder / "log"
        self.temporary = folder / "tmp"
        """The pipeline's temporary files."""
        self.source = folder / "source.json"
        """Whether a spool or a topic lies between ingest and pipeline."""
        self.run = folder / "run"
        """The reports of all other processes."""
        self.supervisor = self.run / "supervisor.json"
        self.ingest = self.run / "ingest.json"
        self.web = self.run / "web.json"
        self.alerts = self.run / "alerts.json"

    def export(self, name: str) -> Path:
        """The report of an exporter, by its name as a process."""
        return self.run / f"{name}.json"

    def prepare(self) -> None:
        """Create the folders that are missing, readable by their owner alone."""
        with self._usable():
            for folder in (self.folder, self.run, self.log, self.spool):
                folder.mkdir(0o700, parents=True, exist_ok=True)

    def check_writable(self) -> None:
        """Raise :class:`HomeError` unless files can be made in every folder that is there."""
        folders = (self.folder, self.run, self.log, self.spool, self.checkpoint, self.quarantine)
        for folder in folders:
            if folder.exists():
                with self._usable(), tempfile.TemporaryFile(dir=folder, prefix=".check-"):
                    pass

    @contextlib.contextmanager
    def locked(self, wait_s: float = LEFTOVERS_S) -> Iterator[int]:
        """Lock the folder; yields the lock's file handle, which the processes are to inherit.

        Raises :class:`HomeInUseError` at once if another run has the folder, and after ``wait_s``
        if processes of a killed run are still there.
        """
        with contextlib.ExitStack() as locks:
            own = self._lock("supervisor.lock")
            if own is None:
                raise HomeInUseError(
                    str(self.folder),
                    f"another `batchmill run` {self._pid()}uses it. Stop that one first, or give "
                    "this one a folder of its own: --home",
                )
            locks.enter_context(own)
            deadline = time.monotonic() + wait_s
            while (shared := self._lock("processes.lock")) is None:
                if time.monotonic() > deadline:
                    raise HomeInUseError(
                        str(self.folder),
                        f"processes of a killed run are still there after {wait_s:g} s. "
                        f"{self.supervisor} has their process ids: end them, then start again",
                    )
                time.sleep(_POLL_S)
            locks.enter_context(shared)
            for folder in (self.folder, self.run):
                remove_stale_temporaries(folder)
            yield shared.handle

    def is_locked(self) -> bool:
        """Whether a supervisor is running on it."""
        with contextlib.suppress(OSError):
            return FileLock.is_taken(self.run / "supervisor.lock")
        return False

    def bind_source(self, topic: str | None) -> None:
        """Note that the run has this topic, or None: a spool; raises if another run had another.

        Spark's checkpoint of the one means nothing for the other, and what waits in the one would
        never be read. A topic is known by its name alone: brokers move.
        """
        known = read_json(self.source)
        now = "a spool" if topic is None else f"the topic {topic.rpartition('/')[2]}"
        if known is not None:
            was = str(known.get("source"))
        else:
            was = "a spool" if self.checkpoint.exists() else now
        if was != now:
            raise HomeSourceError(str(self.folder), was, now)
        if known is None:
            write_json(self.source, {"source": now})

    def _lock(self, name: str) -> FileLock | None:
        with self._usable():
            return FileLock.take(self.run / name)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            raise HomeError(str(self.folder), f"{error.strerror or error}{where}") from error

    def _pid(self) -> str:
        pid = (read_json(self.supervisor) or {}).get("pid")
        return f"(process {pid}) " if isinstance(pid, int) else ""
