"""The quarantine: a folder beside the spool for what does not fit, each with its reason.

    <quarantine>/<Source>/<segment>.parquet           a segment that cannot be read, as it was
    <quarantine>/<Source>/<segment>.parquet.reason    why, in one line
    <quarantine>/<Source>/rows-<stream>-<batch>/      rows that do not fit, with `_reason`

Names follow from the batch, so a batch that is run again writes the same files over again.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from pyspark.sql import DataFrame

from batchmill.spark.errors import PipelineError
from batchmill.spark.input.segments import BadSegment, local_path, spark_path
from batchmill.spark.runtime.faults import is_full, no_room
from batchmill.spark.spans.carry import make_durable

log = logging.getLogger("batchmill.spark")


class Quarantine:
    """Sets segments and rows aside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def segment(self, bad: BadSegment) -> None:
        """Copy a segment here, with its reason. One that cannot be copied leaves just that."""
        folder = self.folder / bad.source
        name = bad.path.rsplit("/", 1)[-1]
        why = f"{bad.reason}: {bad.detail}\n{bad.path}\n"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = local_path(bad.path)
            if path is not None and bad.reason != "missing":
                _copy(path, folder / name)
            (folder / f"{name}.reason").write_text(why, "utf-8")
        except OSError as error:
            raise no_room(error, [self.folder]) or PipelineError(
                f"the segment {bad.path} is to be set aside ({bad.reason}), but {folder} cannot be "
                f"written ({error}): let this user write there, then start again"
            ) from error
        log.warning("segment %s set aside (%s): %s", bad.path, bad.reason, bad.detail)

    def rows(self, source: str, stream: str, number: int | str, rows: DataFrame) -> Path:
        """Write rows that do not fit; where to."""
        target = self.folder / source / f"rows-{stream}-{number}"
        rows.write.mode("overwrite").parquet(spark_path(target))
        make_durable(target)
        return target


def _sync(path: Path) -> None:
    """Have the disk keep it: the segment itself may be removed once its batch is in the store."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy(path: str, target: Path) -> None:
    """As a whole or not at all: what an earlier run of the batch has put there stays."""
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(path, part)
        _sync(part)
        part.replace(target)
        _sync(target.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        if is_full(error):
            raise
        log.warning("segment %s cannot be copied, just its reason is kept: %s", path, error)
