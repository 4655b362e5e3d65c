"""One exporter of a name at a time: a file in the outbox that the operating system locks."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from batchmill.export.errors import ExporterInUseError


@contextlib.contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """Be the one exporter of that name; gone with the process, however that ends."""
    import fcntl  # not on every system

    mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    handle = os.open(folder / f"exporter-{mark}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExporterInUseError(name, str(folder)) from None
        yield
    finally:
        os.close(handle)
