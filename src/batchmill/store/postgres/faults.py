"""What PostgreSQL's faults mean to whoever runs the store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from batchmill.errors import MissingExtraError
from batchmill.store.errors import (
    StoreFullError,
    StoreReadOnlyError,
    StoreRefusedError,
)
from batchmill.store.retry import TransientError

if TYPE_CHECKING:
    import psycopg

TRANSIENT_CLASSES = ("08", "40")
"""Connection lost; transaction rolled back: a deadlock, a conflict of two transactions."""
TRANSIENT = {
    "53300",  # too many connections
    "55P03",  # a lock was not to be had
    "57P01",  # shut down by the administrator
    "57P02",  # the server crashed
    "57P03",  # it is starting up
    "57P05",  # idle for too long
    "25P03",
}
DISK_FULL = "53100"
READ_ONLY = {"25006", "42501"}
REFUSED = ("authentication failed", "no pg_hba.conf entry", "does not exist", "no password")
"""What a server says that will say the same the next time; such faults have no code."""


@contextlib.contextmanager
def translated(url: str) -> Iterator[None]:
    """Raise what a fault means in place of the fault."""
    try:
        import psycopg
    except ImportError as error:
        raise MissingExtraError("a PostgreSQL store", "postgres", str(error)) from error
    try:
        yield
    except psycopg.Error as fault:
        raise meaning(fault, url) from fault


def meaning(fault: psycopg.Error, url: str) -> Exception:
    """The error that a fault is; the fault itself if it is a mistake of ours."""
    import psycopg

    why = " ".join(str(fault).split())
    code = fault.sqlstate
    if code is None:
        if isinstance(fault, psycopg.OperationalError):
            if "FATAL" in why and any(each in why for each in REFUSED):
                return StoreRefusedError(url, why)
            return TransientError(why)
        return fault
    if code.startswith("28"):
        return StoreRefusedError(url, why)
    if code in TRANSIENT or code[:2] in TRANSIENT_CLASSES:
        return TransientError(why)
    if code == DISK_FULL:
        return StoreFullError(url, None, why)
    if code in READ_ONLY:
        return StoreReadOnlyError(url, why)
    return fault
