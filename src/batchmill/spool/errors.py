"""What can go wrong on the way to the disk."""

from __future__ import annotations

import errno

from batchmill.errors import BatchmillError
from batchmill.spool.level import Level

_ADVICE = {
    errno.ENOSPC: "make room on the disk, or let the pipeline catch up",
    errno.EDQUOT: "make room in the quota, or let the pipeline catch up",
    errno.EROFS: "mount the disk for writing",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files",
    errno.ENOENT: "put the folder back; it was removed while the spool was open",
}


class Overloaded(BatchmillError, RuntimeError):
    """A batch was refused, since too much waits already.

    Carries ``level`` (CRITICAL or CRITICAL_PLUS), ``retry_after_s`` and ``why``.
    """

    def __init__(self, level: Level, retry_after_s: float, why: str) -> None:
        super().__init__(level, retry_after_s, why)
        self.level = level
        self.retry_after_s = retry_after_s
        self.why = why

    def __str__(self) -> str:
        return (
            f"refused at {self.level.name}: {self.why}; try again in {self.retry_after_s:g} seconds"
        )


class SpoolWriteError(BatchmillError, OSError):
    """A segment could not be written; carries ``folder``, ``number`` (errno) and ``detail``.

    Nothing of it was acknowledged. Whoever sent it may send it again.
    """

    def __init__(self, folder: str, number: int | None, detail: str) -> None:
        super().__init__(folder, number, detail)
        self.folder = folder
        self.number = number
        self.detail = detail

    def __str__(self) -> str:
        advice = _ADVICE.get(self.number or 0, "look after the disk")
        return f"no segment can be written in {self.folder} ({self.detail}): {advice}; then resend"


class SpoolClosedError(BatchmillError, RuntimeError):
    """The spool is closed; carries ``folder``."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.folder = folder

    def __str__(self) -> str:
        return f"the spool {self.folder} is closed, so nothing was written: open a new one"


class BadRowsError(BatchmillError, ValueError):
    """Rows do not fit the columns of their type; carries ``source`` and ``detail``."""

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(source, detail)
        self.source = source
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"not written, since it does not fit the type {self.source}: {self.detail}; "
            f"docs/sources.md lists its fields, and batchmill.sources.catalog() has them"
        )
