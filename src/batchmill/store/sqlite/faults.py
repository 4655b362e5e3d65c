"""What SQLite's faults mean to whoever runs the store."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from batchmill.store.errors import (
    NotAStoreError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreMissingError,
    StoreReadOnlyError,
)
from batchmill.store.retry import TransientError

NO_ROOM_BYTES = 1024 * 1024
"""With less than this left, a failed write is a full disk, whatever SQLite calls it."""


@contextlib.contextmanager
def translated(url: str, path: Path) -> Iterator[None]:
    """Raise what a fault means in place of the fault."""
    try:
        yield
    except sqlite3.Error as fault:
        raise meaning(fault, url, path) from fault


def meaning(fault: sqlite3.Error, url: str, path: Path) -> Exception:
    """The error that a fault is; the fault itself if it is a mistake of ours."""
    code = getattr(fault, "sqlite_errorcode", None)
    why = str(fault)
    if code is None:
        return StoreClosedError(url) if "closed database" in why else fault
    # The lower byte is the kind, what is above it tells more.
    kind = code & 0xFF
    error: StoreError | None = None
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        transient = TransientError(why)
        transient.__cause__ = fault
        return transient
    if kind == sqlite3.SQLITE_FULL or (kind == sqlite3.SQLITE_IOERR and is_full(_free(path))):
        error = StoreFullError(str(path), _free(path), why)
    elif kind in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        error = StoreReadOnlyError(url, why)
    elif kind in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        error = NotAStoreError(url, why)
    elif kind == sqlite3.SQLITE_CANTOPEN:
        error = StoreReadOnlyError(url, why) if path.parent.is_dir() else StoreMissingError(url)
        if path.is_dir():
            error = NotAStoreError(url, "it is a folder")
    return error or fault


def is_full(free_bytes: int | None) -> bool:
    """Whether so little room explains a failed write; None: nobody knows how much there is.

    >>> is_full(0), is_full(None)
    (True, False)
    """
    return free_bytes is not None and free_bytes < NO_ROOM_BYTES


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:
        return None
