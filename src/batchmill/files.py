"""Files that are replaced whole, synced to the disk, and locked by the operating system."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

_OWN = "batchmill-"
"""Prefix of the folders that belong to one process."""
STALE_S = 60.0
"""A temporary file older than this was left by a process that was killed."""


def write_whole(path: Path, data: bytes | str, *, durable: bool = False, mode: int = 0o600) -> None:
    """Put ``data`` in the place of ``path``: readers see the old content or the new, never a part.

    With ``durable``, the new content survives a power cut once this returns.
    """
    temporary = _write_temporary(path, data, durable=durable, mode=mode)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def create_whole(path: Path, data: bytes | str, *, mode: int = 0o600) -> bool:
    """Create ``path`` durably with ``data``; False if it exists, and then it stays as it is.

    Of several processes that do this at once, exactly one gets True.
    """
    temporary = _write_temporary(path, data, durable=True, mode=mode)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    sync(path.parent)
    return True


def remove_stale_temporaries(folder: Path) -> None:
    """Remove what processes that were killed while they wrote have left in a folder."""
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()


def free_bytes(folder: str | Path) -> int | None:
    """What is left on the disk of ``folder`` for this user; None where the system does not tell."""
    try:
        disk = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    return disk.f_bavail * disk.f_frsize


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file durably: ``target`` is there as a whole, or not at all."""
    fill_whole(target, lambda part: shutil.copyfile(source, part))


def fill_whole(target: Path, fill: Callable[[Path], object]) -> None:
    """Create ``target`` durably, as a whole or not at all.

    ``fill`` writes its content to the path that it gets.
    """
    part = target.with_name(f".{target.name}.part")
    try:
        fill(part)
        sync(part)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(target.parent)


def write_json(
    path: Path, content: Mapping[str, Any], *, durable: bool = False, mode: int = 0o600
) -> None:
    """Put a JSON object in the place of ``path``; see :func:`write_whole`."""
    write_whole(path, json.dumps(content), durable=durable, mode=mode)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file, or something else in it."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def sync(path: Path | str) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and Path(path).is_dir():
        return  # a folder cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FileLock:
    """An exclusive lock on a file, held by this process until :meth:`release` or its end.

    The file stays. Only who has locked it may remove it: see :func:`remove_free_locks`.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle
        """The open file: a child process that inherits it holds the lock, too."""

    @classmethod
    def take(cls, path: Path, *, mode: int = 0o600) -> FileLock | None:
        """Lock ``path``, created if missing; None if it is locked, even by this process."""
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
            if not try_lock(handle):
                os.close(handle)
                return None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.stat()):
                    return cls(handle)
            os.close(handle)  # somebody has removed it meanwhile

    @staticmethod
    def is_taken(path: Path) -> bool:
        """Whether the lock on ``path`` is held; False if there is no such file."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(handle, shared=True)
        finally:
            os.close(handle)

    def release(self) -> None:
        """Give the lock up."""
        os.close(self.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def try_lock(handle: int, *, shared: bool = False) -> bool:
    """Lock an open file without waiting; False if it is locked. True where there are no locks."""
    try:
        import fcntl
    except ImportError:  # not on every system
        return True
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_free_locks(folder: Path, pattern: str) -> None:
    """Remove the lock files of a folder that nobody holds."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # of another user
            lock = FileLock.take(path)
            if lock is not None:
                with lock:
                    path.unlink()


def own_folder(parent: Path) -> Path:
    """A new folder in ``parent`` for this process alone, until it ends, however it ends.

    Those of processes that have ended are removed; what others have in ``parent`` is not touched.
    """
    parent.mkdir(0o700, parents=True, exist_ok=True)
    for file in parent.glob(f"{_OWN}*.lock"):
        lock = None
        with contextlib.suppress(PermissionError):  # of another user
            lock = FileLock.take(file)
        if lock is not None:
            with lock:
                shutil.rmtree(file.with_suffix(""), ignore_errors=True)
                file.unlink(missing_ok=True)
    while True:
        folder = parent / f"{_OWN}{uuid.uuid4().hex[:12]}"
        # Another process that starts may think that this file was left behind, and remove it.
        if FileLock.take(folder.with_suffix(".lock")) is not None:
            folder.mkdir(0o700)
            return folder  # the lock is held until this process ends


def _write_temporary(path: Path, data: bytes | str, *, durable: bool, mode: int) -> Path:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(handle, "wb") as stream:  # noqa: PTH123 - an open handle
            stream.write(data.encode() if isinstance(data, str) else data)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return temporary
