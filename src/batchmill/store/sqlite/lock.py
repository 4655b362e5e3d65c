"""The lock of a stream's writer: a file beside the database that the operating system locks.

It is gone the moment its process is, however that ends. The file stays: removing it could take
away the lock that another process is just about to hold.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from batchmill.store.errors import StoreReadOnlyError


class WriterLock:
    """A lock that is held."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def take(cls, database: Path, stream: str, url: str) -> WriterLock | None:
        """Lock a stream; None if somebody has it, be it in this process."""
        import fcntl  # not on every system, and only writers need it

        path = lock_path(database, stream)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreReadOnlyError(url, f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return cls(handle)

    @staticmethod
    def is_held(database: Path, stream: str) -> bool:
        """Whether somebody has a stream's lock; also where there is no telling."""
        import fcntl

        try:
            handle = os.open(lock_path(database, stream), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def release(self) -> None:
        """Let go of it."""
        os.close(self._handle)


def lock_path(database: Path, stream: str) -> Path:
    """The lock file of a stream; different for different streams, whatever their names."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", stream)[:40]
    mark = hashlib.sha256(stream.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return database.with_name(f"{database.name}.{plain}-{mark}.lock")
