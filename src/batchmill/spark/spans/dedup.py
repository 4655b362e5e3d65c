"""Deduplication: a span that is delivered twice counts once.

A sender that did not receive our answer sends again. So the (trace id, span id) of every span that
counted is kept in an index of files beside the checkpoint: written before the commit that names
them, so that a batch that is run again starts from the same ones.

A span that is in the index does not count again. Of several in one batch, one counts: the first in
an order of all columns in use, which does not depend on files or partitions. A span that lacks one
of the ids is never a duplicate.

Nearly every batch has no duplicates at all. So one narrow query looks for ids that occur again, and
only if there are some, the spans with those ids are sorted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.functions import broadcast, expr

from batchmill.spark.input.reader import read_parquet, write_parquet
from batchmill.spark.input.segments import spark_path
from batchmill.spark.spans.pending import check_files
from batchmill.store import Carry

REASON = "same trace and span id"
"""The reason of the counter ``duplicates``; one for all, so that it does not depend on batches."""

FOLDER = "seen"
_SLOTS = 4
"""Only files of one quarter of the window are merged: no id is kept longer than that beyond it."""
_LARGE = 1_000_000
"""From this many ids on, several files are written."""
_KEY = ["trace_id", "span_id"]
INDEX_SCHEMA = T.StructType([T.StructField(column, T.StringType()) for column in _KEY])


def is_index_file(file: Carry) -> bool:
    """Whether a file of an earlier batch belongs to the dedup index, by its folder."""
    return file.path.rstrip("/").split("/")[-2:-1] == [FOLDER]


def expired(files: Iterable[Carry], tick: int, window_ms: int) -> list[Carry]:
    """The files whose ids are older than the window."""
    return [file for file in files if file.arrived_ms <= tick - window_ms]


def to_merge(
    files: Sequence[Carry], *, tick: int, rows: int, window_ms: int, expire: bool
) -> list[Carry]:
    """Which ``files``, oldest first, to merge into one with the ``rows`` of this ``tick``.

    The newest ones, as long as none is more than twice as large as all after it: the rest shrink
    from file to file, so their number grows with the logarithm of the number of batches, and so
    does how often an id is written.
    """
    slot_ms = max(1, window_ms // _SLOTS)
    merged: list[Carry] = []
    total = rows
    for file in reversed(files):
        if expire and file.arrived_ms // slot_ms != tick // slot_ms:
            break
        if file.rows > 2 * total:
            break
        merged.insert(0, file)
        total += file.rows
    return merged


def repeated_ids(new: DataFrame, index: DataFrame | None, *, small: bool) -> DataFrame:
    """The ids of ``new`` that occur more than once, or in the ``index``: ``known`` then.

    ``small``: there are so few new ids that they are broadcast, and the index is not shuffled.
    """
    ids = new.where("trace_id IS NOT NULL AND span_id IS NOT NULL").select(*_KEY)
    either = ids.selectExpr(*_KEY, "1 AS fresh")
    if index is not None:
        again = index.join(broadcast(ids) if small else ids, _KEY, "left_semi")
        either = either.unionAll(again.selectExpr(*_KEY, "0 AS fresh"))
    counted = either.groupBy(*_KEY).agg(expr("MIN(fresh) = 0 AS known"), expr("COUNT(1) AS n"))
    return counted.where("n > 1").select(*_KEY, "known")


def drop_repeated(new: DataFrame, repeated: DataFrame) -> DataFrame:
    """``new`` without spans whose id is ``known``, and with one span of each other repeated id."""
    single = new.join(repeated, _KEY, "left_anti")
    several = new.join(repeated.where("NOT known"), _KEY, "left_semi")
    order = ", ".join(_sortable(column) for column in new.schema)
    first = several.selectExpr(
        "*", f"ROW_NUMBER() OVER (PARTITION BY trace_id, span_id ORDER BY {order}) AS _place"
    ).where("_place = 1")
    return single.unionByName(first.drop("_place"))


def _sortable(column: T.StructField) -> str:
    name = f"`{column.name}`"
    return f"SORT_ARRAY(MAP_ENTRIES({name}))" if isinstance(column.dataType, T.MapType) else name


class DedupIndex:
    """Drops spans that were delivered before, and writes the ids of those that count."""

    def __init__(self, spark: SparkSession, folder: Path, window_s: float) -> None:
        self._spark = spark
        self.folder = folder
        self.window_ms = int(window_s * 1000)

    def drop_duplicates(
        self,
        new: DataFrame,
        files: Sequence[Carry],
        persist: Callable[[DataFrame], DataFrame],
        *,
        small: bool,
    ) -> DataFrame:
        """``new`` itself if it has no duplicates; otherwise the spans of it that count."""
        check_files(
            files, "id of a span that was counted", "ids of spans that were counted",
            "be counted again",
        )  # fmt: skip
        index = self._read(files) if files else None
        repeated = persist(repeated_ids(new, index, small=small))
        return new if repeated.isEmpty() else persist(drop_repeated(new, repeated))

    def write(
        self,
        new: DataFrame,
        rows: int,
        files: Sequence[Carry],
        *,
        number: int,
        tick: int,
        expire: bool,
    ) -> tuple[Carry, list[Carry]]:
        """Write the ids of ``new``; the file, and those of ``files`` that were merged into it."""
        merged = to_merge(files, tick=tick, rows=rows, window_ms=self.window_ms, expire=expire)
        ids = new.select(*_KEY)
        if merged:
            ids = ids.unionAll(self._read(merged))
        total = rows + sum(file.rows for file in merged)
        if total < _LARGE:
            ids = ids.coalesce(1)
        target = self.folder / f"{number}-{uuid.uuid4().hex[:8]}"
        write_parquet(ids, target)
        return Carry(spark_path(target), number, tick, total), merged

    def _read(self, files: Sequence[Carry]) -> DataFrame:
        return read_parquet(self._spark, INDEX_SCHEMA, [file.path for file in files])
