"""Reads a spool as a stream of segments, and removes those that were read."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from batchmill.files import read_json, sync, write_json
from batchmill.spark.input.base import Unread
from batchmill.spark.input.segments import local_path, spark_path
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.settings import PipelineSettings

log = logging.getLogger("batchmill.spark")

_FILES = "path string, modificationTime timestamp, length bigint, content binary"
_POLL_S = 10.0
_MAX_FILE_AGE = "36500d"
"""Spark ignores files that are older than the newest one by more than this."""
_REMOVED = "removed.json"


class SpoolInput:
    """The segments of a folder."""

    def __init__(
        self, folder: Path, checkpoint: Checkpoint, remove_from: Path | None = None
    ) -> None:
        """``remove_from``: the quarantine, if segments that were read are to be removed."""
        self._folder = folder
        self._checkpoint = checkpoint
        self._remover = (
            None if remove_from is None else SegmentRemover(folder, checkpoint, remove_from)
        )
        self._lag = SpoolLag(folder, checkpoint)

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._folder)

    @property
    def poll_s(self) -> float:
        """Seldom: anybody can look into the folder."""
        return _POLL_S

    def stream(self, spark: SparkSession, settings: PipelineSettings) -> DataFrame:
        """The names of new segments; their content is read per batch."""
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
        """From Spark's log of files; from the batch itself if the log cannot be read."""
        logged = self._checkpoint.files_of(number)
        return [row.path for row in batch.collect()] if logged is None else logged

    def unread(self, last: int | None, now: float) -> Unread:
        """By listing the folder."""
        return self._lag.unread(last, now)

    def remove_read(self, last: int | None) -> None:
        """Remove segments that were read, if the pipeline is set to do so."""
        if self._remover is not None:
            self._remover.remove(last)

    def explain(self, failure: BaseException) -> str | None:
        """None: errors about files are explained where they are read."""
        return None


class SpoolLag:
    """Finds the segments of a spool that are not in the store yet; not thread-safe.

    It remembers those that were read and still exist.
    """

    def __init__(self, spool: Path, checkpoint: Checkpoint) -> None:
        self._spool = spool
        self._checkpoint = checkpoint
        self._read: set[str] = set()
        self._until = -1

    def unread(self, last: int | None, now: float) -> Unread:
        """What is still to be read when ``last`` is the last batch in the store."""
        present = {entry.path: entry for entry in _segments(str(self._spool))}
        until = None if last is None else self._checkpoint.log_offset(last)
        if until is not None and until > self._until:
            names = self._checkpoint.logged(self._until, until)
            if names is not None:
                self._read.update(path for name in names if (path := local_path(name)))
                self._until = until
        self._read &= present.keys()
        count, size, oldest = 0, 0, now
        for path, entry in present.items():
            if path in self._read:
                continue
            try:
                stat = entry.stat()
            except FileNotFoundError:
                continue
            count += 1
            size += stat.st_size
            oldest = min(oldest, stat.st_mtime)
        return Unread(count, size, now - oldest)


class SegmentRemover:
    """Removes the segments of one stream's spool that were read. May be used by several threads.

    A batch is committed to the store first, and marked as done by Spark after that. In between
    Spark may ask for it again, so its segments stay. They are removed when the next batch begins,
    when the stream ends, and from time to time while it is idle. How far removal has come is kept
    beside the checkpoint, so segments that a crash leaves behind are removed after the restart.

    A quarantined segment is removed as well, since the quarantine has a copy; where it could not be
    copied, it stays.
    """

    def __init__(self, spool: Path, checkpoint: Checkpoint, quarantine: Path) -> None:
        self._spool = spool
        self._checkpoint = checkpoint
        self._quarantine = quarantine
        self._file = checkpoint.folder / _REMOVED
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._until = _offset_in(self._file)

    def remove(self, last: int | None) -> int:
        """Remove what can be, if ``last`` is the last batch in the store; how many were removed."""
        with self._lock:
            done = self._checkpoint.committed
            if done is None or last is None:
                return 0
            until = self._checkpoint.log_offset(min(done, last))
            if until is None or until <= self._until:
                return 0
            paths = self._checkpoint.logged(self._until, until)
            if paths is None:
                return 0
            removed, left = self._remove(paths)
            if not left:
                # After a power cut no file may reappear that is recorded as removed.
                for folder in {path.parent for path in removed}:
                    with contextlib.suppress(FileNotFoundError):  # removed by somebody else
                        sync(folder)
                write_json(self._file, {"offset": until}, durable=True)
                self._until = until
            return len(removed)

    def _remove(self, names: list[str]) -> tuple[list[Path], int]:
        """The segments that are removed now, and how many could not be."""
        removed, left = [], 0
        for name in names:
            path = self._path_in_spool(name)
            if path is None or self._is_only_copy(path):
                continue
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                left += 1
                self._warn(name, f"cannot be removed ({error}): let this user write its folder")
                continue
            removed.append(path)
        return removed, left

    def _path_in_spool(self, name: str) -> Path | None:
        """The segment, if it lies in this spool: the log may be that of another one."""
        local = local_path(name)
        if local is None:
            return None
        path = Path(local)
        return path if self._spool in path.parents and ".." not in path.parts else None

    def _is_only_copy(self, path: Path) -> bool:
        """Whether it was quarantined, but the quarantine has only the reason."""
        copy = self._quarantine / path.parent.name / path.name
        if copy.exists() or not copy.with_name(f"{path.name}.reason").exists():
            return False
        if path.exists():
            self._warn(str(path), "stays: it was quarantined, but the quarantine has no copy of it")
        return True

    def _warn(self, path: str, what: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            log.warning("the segment %s, which is in the store, %s", path, what)


def _offset_in(file: Path) -> int:
    """Up to which offset segments are removed; -1 if unknown: the whole log is checked then."""
    offset = (read_json(file) or {}).get("offset")
    return offset if isinstance(offset, int) else -1


def _segments(folder: str) -> Iterator[os.DirEntry[str]]:
    """The files that Spark finds: at any depth, but no name that begins with ``.`` or ``_``."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir():
            yield from _segments(entry.path)
        elif entry.name.endswith(".parquet"):
            yield entry
