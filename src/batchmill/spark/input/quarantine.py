"""The quarantine: a folder beside the spool for segments and rows that cannot be used.

    <quarantine>/<Source>/<segment>.parquet           a segment that cannot be read, as it was
    <quarantine>/<Source>/<segment>.parquet.reason    why, in one line
    <quarantine>/<Source>/rows-<stream>-<batch>/*.parquet    rows that do not fit, with `_reason`
    <quarantine>/<Source>/deltas-<stream>-<batch>.parquet    deltas that do not fit, likewise

Names follow from the batch, so a batch that is run again writes the same files. Until a batch has
all of its rows they lie in ``<quarantine>/.<stream>-<batch>/``.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.files import sync
from batchmill.spark.errors import PipelineError
from batchmill.spark.failures import disk_full_error, is_disk_full
from batchmill.spark.input.rows import REASON
from batchmill.spark.input.segments import BadSegment, local_path

log = logging.getLogger("batchmill.spark")


class Quarantine:
    """Keeps segments and rows that cannot be used, with the reason."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add_segment(self, bad: BadSegment) -> None:
        """Copy a segment and write its reason; just the reason if it cannot be copied."""
        folder = self.folder / bad.source
        name = bad.path.rsplit("/", 1)[-1]
        why = f"{bad.reason}: {bad.detail}\n{bad.path}\n"
        with explain_unwritable(self.folder, f"the segment {bad.path} ({bad.reason})"):
            folder.mkdir(parents=True, exist_ok=True)
            path = local_path(bad.path)
            if path is not None and bad.reason != "missing":
                _copy(path, folder / name)
            (folder / f"{name}.reason").write_text(why, "utf-8")
        log.warning("segment %s quarantined (%s): %s", bad.path, bad.reason, bad.detail)

    def add_rows(self, stream: str, number: int, files: Iterable[tuple[str, str]]) -> None:
        """Take files of rows that do not fit, given with their event types, from the tasks.

        They replace those of an earlier attempt.
        """
        by_source: dict[str, list[str]] = {}
        for source, file in files:
            by_source.setdefault(source, []).append(file)
        for source, own in by_source.items():
            folder = self.folder / source / f"rows-{stream}-{number}"
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
        shutil.rmtree(self.staging(stream, number), ignore_errors=True)

    def staging(self, stream: str, number: int) -> Path:
        """Where the tasks of a batch write rows that do not fit, each event type in a folder."""
        return self.folder / f".{stream}-{number}"

    def add_deltas(
        self, source: str, stream: str, number: int, deltas: pa.Table, reason: str
    ) -> None:
        """Write deltas that do not fit."""
        target = self.folder / source / f"deltas-{stream}-{number}.parquet"
        reasons = pa.array([reason] * deltas.num_rows, pa.string())
        with explain_unwritable(self.folder, f"deltas of {source}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(deltas.append_column(REASON, reasons), target)


@contextlib.contextmanager
def explain_unwritable(folder: Path, what: str) -> Iterator[None]:
    """Raise :class:`PipelineError` in place of what the system says of a folder."""
    try:
        yield
    except OSError as error:
        raise disk_full_error(error, [folder]) or PipelineError(
            f"{what} must be written, but {folder} cannot be ({error}): let this user write there, "
            "then start again; nothing of the batch was committed, and it will be tried again"
        ) from error


def _write(table: pa.Table, target: Path) -> None:
    """Write a file as a whole, durably."""
    part = target.with_name(f".{target.name}.part")
    pq.write_table(table, part)
    sync(part)
    part.replace(target)
    sync(target.parent)


def _copy(path: str, target: Path) -> None:
    """Copy as a whole or not at all: a copy of an earlier run of the batch stays.

    Durably, since the segment itself may be removed once its batch is in the store.
    """
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(path, part)
        sync(part)
        part.replace(target)
        sync(target.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        if is_disk_full(error):
            raise
        log.warning("segment %s cannot be copied, only its reason is kept: %s", path, error)
