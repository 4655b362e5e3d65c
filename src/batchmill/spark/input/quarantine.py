"""The quarantine: a folder beside the spool for segments and rows that cannot be used.

    <quarantine>/<Source>/<segment>.parquet           a segment that cannot be read, as it was
    <quarantine>/<Source>/<segment>.parquet.reason    why, in one line
    <quarantine>/<Source>/rows-<stream>-<batch>/*.parquet    rows that do not fit, with `_reason`
    <quarantine>/<Source>/deltas-<stream>-<batch>.parquet    deltas that do not fit, likewise

Names follow from the batch, so a batch that is run again writes the same files. Until a batch has
all of its rows they lie in ``<quarantine>/.<stream>-<batch>/``. If it grows beyond a limit, the
oldest is removed.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from batchmill.files import sync
from batchmill.spark.errors import PipelineError
from batchmill.spark.failures import disk_full_error, is_disk_full
from batchmill.spark.files.paths import (
    AnyPath,
    copy_file,
    file_at,
    local_only,
    remove_tree,
    write_whole,
)
from batchmill.spark.input.rows import REASON
from batchmill.spark.input.segments import BadSegment
from batchmill.wording import count_of

log = logging.getLogger("batchmill.spark")


class Quarantine:
    """Keeps segments and rows that cannot be used, with the reason."""

    def __init__(self, folder: AnyPath, spark: SparkSession | None = None) -> None:
        """``spark`` opens what is not on this machine."""
        self.folder = folder
        self._spark = spark

    def add_segment(self, bad: BadSegment) -> None:
        """Copy a segment and write its reason; just the reason if it cannot be copied."""
        folder = self.folder / bad.source
        name = bad.path.rsplit("/", 1)[-1]
        why = f"{bad.reason}: {bad.detail}\n{bad.path}\n"
        with explain_unwritable(self.folder, f"the segment {bad.path} ({bad.reason})"):
            folder.mkdir(parents=True, exist_ok=True)
            if bad.reason != "missing":
                self._copy(file_at(bad.path, self._spark), folder / name)
            write_whole(folder / f"{name}.reason", why.encode(), durable=False)
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
        self.clear_staging(stream, number)

    def clear_staging(self, stream: str, number: int) -> None:
        """Remove what the tasks of an earlier attempt have left."""
        staging = self.staging(stream, number)
        if isinstance(staging, Path):
            remove_tree(staging)

    def rows(self, source: str, stream: str, number: int) -> AnyPath:
        """The folder of a batch's rows that do not fit."""
        return self.folder / source / f"rows-{stream}-{number}"

    def staging(self, stream: str, number: int) -> AnyPath:
        """Where the tasks of a batch write rows that do not fit, each event type in a folder."""
        return self.folder / f".{stream}-{number}"

    def trim(self, most: int) -> int:
        """Remove the oldest of what it keeps, so that ``most`` bytes are left; how many bytes went.

        A segment of which there is only the reason stays: it is still in the spool. Nothing is
        removed from other file systems than this machine's, which have rules of their own for that.
        """
        kept = sorted(self._kept(self.folder)) if isinstance(self.folder, Path) else []
        total = sum(size for _, size, _ in kept)
        removed = 0
        for _, size, path in kept:
            if total - removed <= most:
                break
            removed += size
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
                path.with_name(f"{path.name}.reason").unlink(missing_ok=True)
        if removed:
            log.warning(
                "%s has reached %s: the oldest %s were removed. They stay in the counters",
                self.folder,
                count_of(most, "byte"),
                count_of(removed, "byte"),
            )
        return removed

    def _kept(self, folder: Path) -> Iterator[tuple[float, int, Path]]:
        """Segments, deltas and folders of rows: their age, their size and their place."""
        for path in folder.glob("[!.]*/[!.]*"):
            with contextlib.suppress(OSError):  # gone since
                if path.is_dir():
                    size = sum(file.stat().st_size for file in path.iterdir())
                    yield path.stat().st_mtime, size, path
                elif path.suffix != ".reason":
                    yield path.stat().st_mtime, path.stat().st_size, path

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
