"""Recognises a full disk, and a lack of memory, in what Python, Spark and the JVM report."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from batchmill.errors import BatchmillError
from batchmill.files import free_bytes
from batchmill.spark.errors import PipelineError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded")
_NO_MEMORY = (
    *("OutOfMemoryError", "GC overhead limit exceeded", "MemoryError", "Cannot allocate memory"),
    # A process was killed, by the system for example.
    *("Python worker exited unexpectedly", "ExecutorLostFailure", "exit code 137"),
    "spark.driver.maxResultSize",
)
_MOST_CAUSES = 20
_TASK_ERROR = re.compile(
    rf"^{PipelineError.__module__}\.{PipelineError.__name__}: (.+)$", re.MULTILINE
)
"""The last line of a traceback that a task has left."""


def error_text(error: BaseException) -> str:
    """The messages of an error and its causes, in Python and in the JVM, without the stacks."""
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(lines) < _MOST_CAUSES:
        lines += [
            f"{type(cause).__name__}: {cause}",
            str(getattr(cause, "_stackTrace", None) or ""),
            *_java_messages(
                getattr(cause, "_origin", None) or getattr(cause, "java_exception", None)
            ),
        ]
        cause = cause.__cause__
    return "\n".join(
        line for text in lines for line in text.splitlines() if line and not _is_frame(line)
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk caused the error."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    text = error_text(error)
    return any(sign in text for sign in _FULL_TEXTS)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is what a batch ends with that takes more memory than there is."""
    if isinstance(error, MemoryError):
        return True
    text = error_text(error)
    return any(sign in text for sign in _NO_MEMORY)


def disk_full_error(error: BaseException, folders: Iterable[Path]) -> PipelineError | None:
    """The error to raise in place of ``error`` if a disk is full; None if none is.

    ``folders`` are those that were written to; the message names the one with the least free space.
    """
    if not is_disk_full(error):
        return None
    sizes = [(_free_bytes(folder), str(folder)) for folder in folders]
    where = "a disk is full: make room there"
    if sizes:
        free, folder = min(sizes)
        where = f"a disk is full: make room in {folder} ({free:,} bytes are free there now)"
    return PipelineError(
        f"{where}, then start again; nothing of the batch was committed, and it will be tried again"
    )


@contextlib.contextmanager
def explain_task_error() -> Iterator[None]:
    """Raise the :class:`PipelineError` that a task has raised, not Spark's account of it."""
    try:
        yield
    except PySparkException as error:
        own = _TASK_ERROR.findall(error_text(error))
        if not own:
            raise
        raise PipelineError(own[-1]) from error


@contextlib.contextmanager
def explain_full_disk(*folders: Path) -> Iterator[None]:
    """Raise :func:`disk_full_error` in place of what Spark or Python report about a full disk."""
    try:
        yield
    except BatchmillError:
        raise
    except Exception as error:
        if (full := disk_full_error(error, folders)) is None:
            raise
        raise full from error


def spark_local_folders(spark: SparkSession) -> list[Path]:
    """Where Spark writes shuffle files, as far as this machine knows."""
    folders = os.environ.get("SPARK_LOCAL_DIRS") or spark.conf.get(
        "spark.local.dir", tempfile.gettempdir()
    )
    return [Path(folder.strip()) for folder in str(folders).split(",") if folder.strip()]


def _java_messages(error: Any) -> list[str]:
    """The messages of a Java exception and its causes; fewer if the JVM does not answer."""
    lines: list[str] = []
    try:
        while error is not None and len(lines) < _MOST_CAUSES:
            lines.append(f"{error.getClass().getName()}: {error.getMessage()}")
            error = error.getCause()
    except (Py4JError, OSError) as gone:
        lines.append(f"{type(gone).__name__}: {gone}")
    return lines


def _is_frame(line: str) -> bool:
    return line.lstrip().startswith(("at ", "... "))


def _free_bytes(folder: Path) -> int:
    """What is left for a folder that may not exist yet."""
    known = map(free_bytes, (folder, *folder.parents))
    return next((free for free in known if free is not None), 0)
