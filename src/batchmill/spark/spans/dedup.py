"""A span that is delivered twice counts once: which ids were seen, and which spans go.

A sender that did not hear our answer sends again. So the (trace id, span id) of every span that
counted is kept in files beside the checkpoint, as waiting spans are (see :mod:`.trace`): written
before the commit that names them, so that a batch that is run again starts from the same ones.

A span seen in an earlier batch counts no more. Of several in one batch, the first in an order of
all that is ever used of a span counts: it does not depend on files or partitions. A span without
both ids is nobody's double.

Nearly every batch has no doubles at all. So one narrow query looks for ids that occur again, and
only if there are some, their spans, and no others, are sorted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.functions import broadcast, expr

from batchmill.spark.input.reader import read_parquet
from batchmill.spark.input.segments import spark_path
from batchmill.spark.spans import carry as carry_module
from batchmill.store import Carry

REASON = "same trace and span id"
"""Of the counter ``duplicates``; one for all, so that the split into batches does not tell."""

FOLDER = "seen"
_SLOTS = 4
"""Only files of one quarter of the window are merged: no id is kept longer than that beyond it."""
_LARGE = 1_000_000
"""So many ids are written as several files."""
_KEY = ["trace_id", "span_id"]
SEEN_SCHEMA = T.StructType([T.StructField(each, T.StringType()) for each in _KEY])


def is_seen(carry: Carry) -> bool:
    """Whether a file that was carried over holds ids, not spans that wait: its folder tells."""
    return carry.path.rstrip("/").split("/")[-2:-1] == [FOLDER]


def expired(files: Iterable[Carry], tick: int, window_ms: int) -> list[Carry]:
    """The files whose ids may come again and count."""
    return [each for each in files if each.arrived_ms <= tick - window_ms]


def to_merge(
    alive: Sequence[Carry], *, tick: int, rows: int, window_ms: int, expire: bool
) -> list[Carry]:
    """Those of ``alive``, oldest first, that go into one file with the ``rows`` of this ``tick``.

    The newest ones, as long as none is more than twice as large as all after it: what is left
    shrinks from file to file, so their number grows with the logarithm of the number of batches,
    and so does how often an id is written.
    """
    slot_ms = max(1, window_ms // _SLOTS)
    merged: list[Carry] = []
    total = rows
    for each in reversed(alive):
        if expire and each.arrived_ms // slot_ms != tick // slot_ms:
            break
        if each.rows > 2 * total:
            break
        merged.insert(0, each)
        total += each.rows
    return merged


def repeated(new: DataFrame, seen: DataFrame | None, *, small: bool) -> DataFrame:
    """The ids of ``new`` that occur more than once, or among those ``seen``: ``known`` then.

    ``small``: so few new ids that each core can have all of them; the seen ones then stay where
    they are.
    """
    ids = new.where("trace_id IS NOT NULL AND span_id IS NOT NULL").select(*_KEY)
    either = ids.selectExpr(*_KEY, "1 AS fresh")
    if seen is not None:
        again = seen.join(broadcast(ids) if small else ids, _KEY, "left_semi")
        either = either.unionAll(again.selectExpr(*_KEY, "0 AS fresh"))
    found = either.groupBy(*_KEY).agg(expr("MIN(fresh) = 0 AS known"), expr("COUNT(1) AS n"))
    return found.where("n > 1").select(*_KEY, "known")


def without(new: DataFrame, found: DataFrame) -> DataFrame:
    """``new`` without those that are ``known``, and with one of each other id that is repeated."""
    single = new.join(found, _KEY, "left_anti")
    several = new.join(found.where("NOT known"), _KEY, "left_semi")
    order = ", ".join(_comparable(each) for each in new.schema)
    first = several.selectExpr(
        "*", f"ROW_NUMBER() OVER (PARTITION BY trace_id, span_id ORDER BY {order}) AS _place"
    ).where("_place = 1")
    return single.unionByName(first.drop("_place"))


def _comparable(field: T.StructField) -> str:
    name = f"`{field.name}`"
    return f"SORT_ARRAY(MAP_ENTRIES({name}))" if isinstance(field.dataType, T.MapType) else name


class SeenIds:
    """Drops spans that were delivered before, and writes down the ids of those that count."""

    def __init__(self, spark: SparkSession, folder: Path, window_s: float) -> None:
        self._spark = spark
        self.folder = folder
        self.window_ms = int(window_s * 1000)

    def clean(
        self,
        new: DataFrame,
        files: Sequence[Carry],
        keep: Callable[[DataFrame], DataFrame],
        *,
        small: bool,
    ) -> DataFrame:
        """``new`` itself if nothing in it was delivered before; otherwise what of it counts."""
        carry_module.check(files, "ids of spans that were counted", "be counted again")
        found = keep(repeated(new, self._read(files) if files else None, small=small))
        return new if found.isEmpty() else keep(without(new, found))

    def write(
        self,
        new: DataFrame,
        rows: int,
        alive: Sequence[Carry],
        *,
        number: int,
        tick: int,
        expire: bool,
    ) -> tuple[Carry, list[Carry]]:
        """Write down the ids of ``new``; the file, and those whose ids went into it."""
        merged = to_merge(alive, tick=tick, rows=rows, window_ms=self.window_ms, expire=expire)
        ids = new.select(*_KEY)
        if merged:
            ids = ids.unionAll(self._read(merged))
        total = rows + sum(each.rows for each in merged)
        if total < _LARGE:
            ids = ids.coalesce(1)
        target = self.folder / f"{number}-{uuid.uuid4().hex[:8]}"
        ids.write.parquet(spark_path(target))
        carry_module.make_durable(target)
        return Carry(spark_path(target), number, tick, total), merged

    def _read(self, files: Sequence[Carry]) -> DataFrame:
        return read_parquet(self._spark, SEEN_SCHEMA, [each.path for each in files])
