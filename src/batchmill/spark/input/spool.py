"""A spool as a stream: the names of its segments, as they come."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from batchmill.spark.input.inputs import Unread
from batchmill.spark.input.removal import ReadSegments
from batchmill.spark.input.segments import local_path, spark_path
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.settings import PipelineSettings

_FILES = "path string, modificationTime timestamp, length bigint, content binary"
_LOOK_S = 10.0
_MAX_FILE_AGE = "36500d"
"""Spark forgets files that are older than the newest by more than this, and then ignores them."""


class SpoolInput:
    """The segments of a folder. Spark keeps the books on which file belongs to which batch."""

    def __init__(
        self, folder: Path, checkpoint: Checkpoint, remove_from: Path | None = None
    ) -> None:
        """``remove_from``: the quarantine, if segments that were read are to be removed."""
        self._folder = folder
        self._checkpoint = checkpoint
        self._read = None if remove_from is None else ReadSegments(folder, checkpoint, remove_from)
        self._lag = Lag(folder, checkpoint)

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._folder)

    @property
    def look_s(self) -> float:
        """Seldom: who wants to know looks at the folder."""
        return _LOOK_S

    def stream(self, spark: SparkSession, settings: PipelineSettings) -> DataFrame:
        """The names of new segments; what is in them is read per batch."""
        files, size = settings.max_batch_files, settings.max_batch_bytes
        limit = {"maxBytesPerTrigger": size} if files is None else {"maxFilesPerTrigger": files}
        return (
            spark.readStream.format("binaryFile")
            .schema(_FILES)
            .options(
                pathGlobFilter="*.parquet",
                recursiveFileLookup="true",
                maxFileAge=_MAX_FILE_AGE,
                **limit,
            )
            .load(spark_path(self._folder, glob=True))
            .select("path")
        )

    def segments(self, batch: DataFrame, number: int) -> Sequence[str]:
        """From Spark's own books; if they cannot be read, as Spark hands them over."""
        known = self._checkpoint.files_of(number)
        return [row.path for row in batch.collect()] if known is None else known

    def unread(self, last: int | None, now: float) -> Unread:
        """By a look at the folder."""
        return self._lag.unread(last, now)

    def forget(self, last: int | None) -> None:
        """Remove segments that were read, if that is asked for."""
        if self._read is not None:
            self._read.remove(last)

    def explain(self, failure: BaseException) -> str | None:
        """Nothing: what can go wrong with files is told where they are read."""
        return None


class Lag:
    """Which segments of a spool are not in the store yet; one thread at a time.

    It remembers those that were read and are still there.
    """

    def __init__(self, spool: Path, checkpoint: Checkpoint) -> None:
        self._spool = spool
        self._checkpoint = checkpoint
        self._read: set[str] = set()
        self._until = -1

    def unread(self, last: int | None, now: float) -> Unread:
        """What is left to be read when ``last`` is the last batch in the store."""
        present = {each.path: each for each in _segments(str(self._spool))}
        until = None if last is None else self._checkpoint.log_offset(last)
        if until is not None and until > self._until:
            names = self._checkpoint.logged(self._until, until)
            if names is not None:
                self._read.update(path for each in names if (path := local_path(each)))
                self._until = until
        self._read &= present.keys()
        count, size, oldest = 0, 0, now
        for path, entry in present.items():
            if path in self._read:
                continue
            try:
                found = entry.stat()
            except FileNotFoundError:
                continue
            count += 1
            size += found.st_size
            oldest = min(oldest, found.st_mtime)
        return Unread(count, size, now - oldest)


def _segments(folder: str) -> Iterator[os.DirEntry[str]]:
    """As Spark finds them: at any depth, but for names that begin with a dot or an underscore."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for each in entries:
        if each.name.startswith((".", "_")):
            continue
        if each.is_dir():
            yield from _segments(each.path)
        elif each.name.endswith(".parquet"):
            yield each
