"""The quarantine: a folder beside the spool for what does not fit, each with its reason.

    <quarantine>/<Source>/<segment>.parquet           a segment that cannot be read, as it was
    <quarantine>/<Source>/<segment>.parquet.reason    why, in one line
    <quarantine>/<Source>/rows-<stream>-<batch>/      rows that do not fit, with `_reason`

Names follow from the batch, so a batch that is run again writes the same files over again.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from pyspark.sql import DataFrame

from batchmill.spark._segments import BadSegment, local_path, spark_path

log = logging.getLogger("batchmill.spark")


class Quarantine:
    """Sets segments and rows aside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def segment(self, bad: BadSegment) -> None:
        """Copy a segment here, with its reason. One that is gone leaves just the reason."""
        folder = self.folder / bad.source
        folder.mkdir(parents=True, exist_ok=True)
        name = bad.path.rsplit("/", 1)[-1]
        path = local_path(bad.path)
        if path is not None and bad.reason != "missing":
            try:
                shutil.copyfile(path, folder / name)
            except FileNotFoundError:
                log.warning("segment %s went away before it could be set aside", bad.path)
        (folder / f"{name}.reason").write_text(f"{bad.reason}: {bad.detail}\n{bad.path}\n", "utf-8")
        log.warning("segment %s set aside (%s): %s", bad.path, bad.reason, bad.detail)

    def rows(self, source: str, stream: str, number: int | str, rows: DataFrame) -> Path:
        """Write rows that do not fit; where to."""
        target = self.folder / source / f"rows-{stream}-{number}"
        rows.write.mode("overwrite").parquet(spark_path(target))
        return target
