"""The quarantine: a folder beside the spool for segments and rows that cannot be used.

    <quarantine>/<Source>/<segment>.parquet           a segment that cannot be read, as it was
    <quarantine>/<Source>/<segment>.parquet.reason    why, in one line
    <quarantine>/<Source>/rows-<stream>-<batch>/*.parquet    rows that do not fit, with `_reason`
    <quarantine>/<Source>/deltas-<stream>-<batch>.parquet    deltas that do not fit, likewise

Names follow from the batch, so a batch that is run again writes the same files. Until a batch has
all of its rows they lie in ``<quarantine>/.<stream>-<batch>/``. If it grows beyond a limit, of
bytes or of entries, the oldest is removed.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from batchmill.files import sync
from batchmill.spark.errors import PipelineError
from batchmill.spark.failures import disk_full_error, is_disk_full
from batchmill.spark.files.paths import (
    AnyPath,
    Entry,
    copy_file,
    entries_in,
    file_at,
    is_uri,
    local_only,
    remove_tree,
    write_whole,
)
from batchmill.spark.files.remote import write_invalid
from batchmill.spark.input.rows import REASON
from batchmill.spark.input.segments import QUARANTINED, BadSegment, local_path
from batchmill.wording import count_of

log = logging.getLogger("batchmill.spark")

_REASON = ".reason"
MOST_ENTRIES = 10_000
"""So many segments, deltas and folders of rows are kept: each takes some KiB of the disk."""
_ABANDONED_S = 86_400.0
"""What nobody has written for so long was left by a process that was killed."""


class Quarantine:
    """Keeps segments and rows that cannot be used, with the reason."""

    def __init__(self, folder: AnyPath, spark: SparkSession | None = None) -> None:
        """``spark`` opens what is not on this machine."""
        self.folder = folder
        self._spark = spark
        self._has_grown = True

    def add_segment(self, bad: BadSegment) -> None:
        """Copy a segment and write its reason; just the reason if it cannot be copied."""
        folder = self.folder / bad.source
        name = bad.path.rsplit("/", 1)[-1]
        why = f"{bad.reason}: {bad.detail}\n{bad.path}\n"
        with explain_unwritable(self.folder, f"the segment {bad.path} ({bad.reason})"):
            folder.mkdir(parents=True, exist_ok=True)
            if bad.reason != "missing":
                self._copy(file_at(bad.path, self._spark), folder / name)
            write_whole(folder / f"{name}{_REASON}", why.encode(), durable=False)
        self._has_grown = True
        log.warning("segment %s quarantined (%s): %s", bad.path, bad.reason, bad.detail)

    def add_rows(self, stream: str, number: int, files: Iterable[tuple[str, str]]) -> None:
        """Take files of rows that do not fit, given with their event types, from the tasks.

        They replace those of an earlier attempt.
        """
        by_source: dict[str, list[str]] = {}
        for source, file in files:
            by_source.setdefault(source, []).append(file)
        for source, own in by_source.items():
            folder = self.rows(source, stream, number)
            assert isinstance(folder, Path)
            with explain_unwritable(self.folder, f"rows of {source}"):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                for at, file in enumerate(own):
                    Path(file).rename(folder / f"{at}.parquet")
                sync(folder)
                sync(folder.parent)
            self._has_grown = True
        self.clear_staging(stream, number)

    def add_blobs(
        self, source: str, stream: str, number: int, blobs: DataFrame, schemas: Sequence[bytes]
    ) -> None:
        """Write the rows that do not fit among blobs of tasks, on another file system."""
        write_invalid(blobs, source, schemas, self.rows(source, stream, number))
        self._has_grown = True

    def clear_staging(self, stream: str, number: int) -> None:
        """Remove what the tasks of an earlier attempt have left."""
        staging = self.staging(stream, number)
        if isinstance(staging, Path):
            remove_tree(staging)

    def rows(self, source: str, stream: str, number: int) -> AnyPath:
        """The folder of a batch's rows that do not fit."""
        return self.folder / source / f"{QUARANTINED}{stream}-{number}"

    def staging(self, stream: str, number: int) -> AnyPath:
        """Where the tasks of a batch write rows that do not fit, each event type in a folder."""
        return self.folder / f".{stream}-{number}"

    def trim(self, most: int) -> int:
        """Remove the oldest of what it keeps, so that ``most`` bytes are left; how many bytes went.

        So it is with more than :data:`MOST_ENTRIES`, and what killed processes have left goes. A
        reason without a copy stays as long as its segment is in the spool. Another file system than
        this machine's is only listed if something was added since the last call.
        """
        if not self._has_grown and not isinstance(self.folder, Path):
            return 0
        self._has_grown = False
        try:
            return self._trim(most)
        except OSError:
            self._has_grown = True
            raise

    def _trim(self, most: int) -> int:
        kept = sorted(self._kept(), key=lambda entry: entry.mtime)
        total, count = sum(entry.size for entry in kept), len(kept)
        removed = 0
        for entry in kept:
            if total - removed <= most and count <= MOST_ENTRIES:
                break
            path = entry.path
            if path.name.endswith(_REASON) and self._is_needed(path):
                continue
            removed += entry.size
            count -= 1
            remove_tree(path)
            remove_tree(path.with_name(f"{path.name}{_REASON}"))
        if removed:
            log.warning(
                "%s has reached %s, or %s: the oldest %s were removed. They stay in the counters",
                self.folder,
                count_of(most, "byte"),
                count_of(MOST_ENTRIES, "entry", "entries"),
                count_of(removed, "byte"),
            )
        return removed

    def _kept(self) -> list[Entry]:
        """Segments, deltas, folders of rows, and reasons alone, with the size of what is in them.

        What was being written a day ago is removed: no batch takes so long.
        """
        kept = []
        for source in entries_in(self.folder):
            _remove_abandoned(source)
            if _is_hidden(source) or not source.is_dir:
                continue
            entries = entries_in(source.path)
            names = {entry.path.name for entry in entries}
            for entry in entries:
                name = entry.path.name
                _remove_abandoned(entry)
                if _is_hidden(entry) or (
                    name.endswith(_REASON) and name.removesuffix(_REASON) in names
                ):
                    continue
                if entry.is_dir:
                    files = entries_in(entry.path)
                    size = sum(file.size for file in files)
                    newest = max((file.mtime for file in files), default=entry.mtime)
                    kept.append(Entry(entry.path, True, size, newest))
                else:
                    kept.append(entry)
        return kept

    def _is_needed(self, reason: AnyPath) -> bool:
        """Whether the segment of a reason alone may be in the spool: it would be removed."""
        _, _, name = reason.read_bytes().decode("utf-8", "replace").strip().rpartition("\n")
        if is_uri(name):
            return self._spark is None or file_at(name, self._spark).exists()
        path = local_path(name)
        return path is None or Path(path).exists()

    def add_deltas(
        self, source: str, stream: str, number: int, deltas: pa.Table, reason: str
    ) -> None:
        """Write deltas that do not fit."""
        target = self.folder / source / f"deltas-{stream}-{number}.parquet"
        reasons = pa.array([reason] * deltas.num_rows, pa.string())
        with explain_unwritable(self.folder, f"deltas of {source}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            sink = pa.BufferOutputStream()
            pq.write_table(deltas.append_column(REASON, reasons), sink)
            write_whole(target, sink.getvalue().to_pybytes())
        self._has_grown = True

    def _copy(self, source: AnyPath, target: AnyPath) -> None:
        """Copy as a whole or not at all: a copy of an earlier run of the batch stays.

        Durably, since the segment itself may be removed once its batch is in the store.
        """
        try:
            copy_file(source, target)
        except OSError as error:
            if is_disk_full(error):
                raise
            log.warning("segment %s cannot be copied, only its reason is kept: %s", source, error)


def _is_hidden(entry: Entry) -> bool:
    return entry.path.name.startswith(".")


def _remove_abandoned(entry: Entry) -> None:
    if _is_hidden(entry) and time.time() - entry.mtime > _ABANDONED_S:
        remove_tree(entry.path)


@contextlib.contextmanager
def explain_unwritable(folder: AnyPath, what: str) -> Iterator[None]:
    """Raise :class:`PipelineError` in place of what the system says of a folder."""
    try:
        yield
    except OSError as error:
        raise disk_full_error(error, local_only(folder)) or PipelineError(
            f"{what} must be written, but {folder} cannot be ({error}): let this user write there, "
            "then start again; nothing of the batch was committed, and it will be tried again"
        ) from error
