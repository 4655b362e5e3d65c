"""Segments: the Parquet files of a spool, read with care for what may be wrong with them.

A file that cannot be read is quarantined, with the reason. A fault that is not the file's (too many
open files, an I/O error) quarantines nothing: the batch fails and is tried again.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.fs

from batchmill.spark.errors import PipelineError

if TYPE_CHECKING:
    from batchmill.spark.files.paths import AnyPath

_T = TypeVar("_T")

QUARANTINED = "rows-"
"""How folders of quarantined rows begin."""
_RETRY_AFTER_S = (0.05, 0.2, 0.8)
"""Pauses before a file is read again after a fault that is not the file's."""
FILE_FAULTS = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EACCES: "not permitted",
    errno.EPERM: "not permitted",
    errno.EISDIR: "unreadable",
    errno.ELOOP: "unreadable",
    errno.ENAMETOOLONG: "unreadable",
}
"""Errors of the system that are the file's fault, with the reason in counters and quarantine."""
_TOO_MANY = "raise the limit of open files (ulimit -n), or have fewer of them open"
_ADVICE = {
    errno.EMFILE: _TOO_MANY,
    errno.ENFILE: _TOO_MANY,
    errno.ENOMEM: "give the process more memory",
}


@dataclass(frozen=True)
class BadSegment:
    """A file that cannot be used, and why."""

    path: str
    source: str
    reason: str
    """A few fixed words, for the counter."""
    detail: str
    rows: int = 0


def read_segment(
    path: str, use: Callable[[pa.NativeFile], _T], content: pa.Buffer | None = None
) -> _T | BadSegment:
    """What ``use`` returns for a file, or what is wrong with the file.

    ``content`` is what is in it, if Spark has read it already.

    After a fault that is not the file's it is read again, then :class:`PipelineError` is raised:
    the data may be good.
    """
    pauses = iter(_RETRY_AFTER_S)
    while True:
        try:
            with _open(path) if content is None else pa.BufferReader(content) as file:
                return use(file)
        except (pa.ArrowException, OSError, UnicodeError, MemoryError) as error:
            if (reason := reason_for(error)) is not None:
                detail = f"{type(error).__name__}: {error}".splitlines()[0]
                return BadSegment(path, source_of(path), reason, detail)
            if (pause := next(pauses, None)) is None:
                raise _unavailable(path, error) from error
        time.sleep(pause)


def reason_for(error: Exception) -> str | None:
    """Why a file that gave this error is quarantined; None if it is not the file's fault.

    pyarrow's errors about a file's content carry no error number.
    """
    if isinstance(error, MemoryError):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return FILE_FAULTS.get(error.errno)
    return "corrupt"


def source_of(path: str) -> str:
    """The name of the folder that a segment lies in; rows of the quarantine have one of their batch
    in between."""
    *_, above, folder, _ = ("", *path.rstrip("/").split("/"))
    return above if folder.startswith(QUARANTINED) else folder


def spark_path(path: AnyPath, *, glob: bool = False) -> str:
    """The name of a path for Spark, which needs no encoding.

    With ``glob``, for places where Spark takes a pattern: special characters are escaped.
    """
    text = str(path)
    if glob:
        text = "".join(f"\\{char}" if char in "\\*?[]{}" else char for char in text)
    return f"file:{text}" if isinstance(path, Path) else text


def local_path(path: str) -> str | None:
    """The local path of a file that Spark names; None if the file is not on this machine."""
    if path.startswith("file:"):
        return "/" + path.removeprefix("file:").lstrip("/")
    return path if path.startswith("/") else None


def _unavailable(path: str, error: Exception) -> PipelineError:
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    advice = _ADVICE.get(number or 0, "look after the disk, or what it is reached through")
    return PipelineError(
        f"the segment {path} cannot be read now ({error}): {advice}, then start again; nothing of "
        "the batch was committed, and it will be tried again"
    )


def _open(path: str) -> pa.NativeFile:
    return pyarrow.fs.LocalFileSystem().open_input_file(local_path(path) or path)
