"""Whose fault a failure is: told from what Python, Spark and the JVM say of it.

A failed batch costs a segment only if the segment is to blame. Everything else is raised: Spark
stopped, a worker lost, a disk full, no more files to be opened. Those pass, and the data is good.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from batchmill.errors import BatchmillError
from batchmill.spark.errors import PipelineError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_WORDS = ("No space left on device", "Disk quota exceeded")
_OF_A_FILE = "FAILED_READ_FILE"
"""Spark's word for every failure inside the reading of a file."""
_NOT_OF_ITS_CONTENT = (
    *_FULL_WORDS,
    "FILE_NOT_EXIST",
    "UNSUPPORTED_FILE_SYSTEM",
    "FileNotFoundException",
    "NoSuchFileException",
    "AccessControlException",
    "AccessDeniedException",
    "Permission denied",
    "Too many open files",
    "Input/output error",
    "Stale file handle",
    "Cannot allocate memory",
    "OutOfMemoryError",
    "java.net.",
    "Connection re",
    "TimeoutException",
    "InterruptedException",
    "InterruptedIOException",
    "ClosedByInterruptException",
    "ClosedChannelException",
    "TaskKilledException",
    "SparkContext",
)
"""Failures while a file was read that say nothing about what is in it. This machine has just read
the same file from one end to the other, so it is there, and may be read."""
_DEEPEST = 20


def told(error: BaseException) -> str:
    """All that an error and its causes say, in Python and in the JVM; without the stacks."""
    lines: list[str] = []
    one: BaseException | None = error
    while one is not None and len(lines) < _DEEPEST:
        lines += [f"{type(one).__name__}: {one}", str(getattr(one, "_stackTrace", None) or "")]
        lines += _told_by_java(
            getattr(one, "_origin", None) or getattr(one, "java_exception", None)
        )
        one = one.__cause__
    return "\n".join(
        line for each in lines for line in each.splitlines() if line and not _is_frame(line)
    )


def blames_the_file(text: str) -> bool:
    """Whether a failure, as :func:`told`, comes from what is in the file that was read."""
    return _OF_A_FILE in text and not any(each in text for each in _NOT_OF_ITS_CONTENT)


def is_full(error: BaseException) -> bool:
    """Whether a disk has no more room."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    text = told(error)
    return any(each in text for each in _FULL_WORDS)


def no_room(error: BaseException, folders: Iterable[Path]) -> PipelineError | None:
    """The error to be raised instead if a disk is full; None if it is not.

    ``folders`` are those that were written to: the one with the least room left is named.
    """
    if not is_full(error):
        return None
    free, folder = min((_free_bytes(each), str(each)) for each in folders)
    return PipelineError(
        f"a disk is full: make room in {folder} ({free:,} bytes are free there now), then start "
        "again; nothing of the batch was committed, and it will be tried anew"
    )


@contextlib.contextmanager
def telling_full_disks(*folders: Path) -> Iterator[None]:
    """Raise :func:`no_room` in place of what Spark or Python say of a full disk."""
    try:
        yield
    except BatchmillError:
        raise
    except Exception as error:
        if (full := no_room(error, folders)) is None:
            raise
        raise full from error


def spark_folders(spark: SparkSession) -> list[Path]:
    """Where Spark puts what it shuffles, as far as this machine knows."""
    known = os.environ.get("SPARK_LOCAL_DIRS") or spark.sparkContext.getConf().get(
        "spark.local.dir", tempfile.gettempdir()
    )
    return [Path(each.strip()) for each in str(known).split(",") if each.strip()]


def _told_by_java(error: Any) -> list[str]:
    """A Java exception and its causes; as far as they can be asked, should the JVM be gone."""
    lines: list[str] = []
    try:
        while error is not None and len(lines) < _DEEPEST:
            lines.append(f"{error.getClass().getName()}: {error.getMessage()}")
            error = error.getCause()
    except (Py4JError, OSError) as gone:
        lines.append(f"{type(gone).__name__}: {gone}")
    return lines


def _is_frame(line: str) -> bool:
    return line.lstrip().startswith(("at ", "... "))


def _free_bytes(folder: Path) -> int:
    for each in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(each).free
    return 0
