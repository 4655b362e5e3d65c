"""The peers: a textbook streaming job, a hand-written batch query, DuckDB; all exact."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import duckdb
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from benchmarks.pipeline.check import Results, from_rows
from benchmarks.pipeline.data import SOURCE

SCHEMA = (
    "time timestamp, name string, serviceName string, serviceLayer string, latency int,"
    " status boolean, httpResponseStatusCode int, type string"
)
NUMBERS = ("n", "total", "greatest", "ok", "satisfied", "tolerated")
STATES = (
    "COUNT(1) AS n",
    "SUM(latency) AS total",
    "MAX(latency) AS greatest",
    "COUNT_IF(status) AS ok",
    "COUNT_IF(status AND latency <= 500) AS satisfied",
    "COUNT_IF(status AND latency > 500 AND latency <= 2000) AS tolerated",
)
AGAIN = ", ".join(
    f"{'MAX' if column == 'greatest' else 'SUM'}({column}) AS {column}" for column in NUMBERS
)
"""The same states, from states."""


TUNED = {
    # Lists are collected. Above 128 groups, Spark would sort every row.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "10000000",
    "spark.sql.codegen.maxFields": "2000",
    # The JVM does not compile longer methods.
    "spark.sql.codegen.hugeMethodLimit": "8000",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
}
"""Settings that make these queries faster; whoever writes them has to find them."""


def _session(spark: SparkSession, partitions: int, *, tuned: bool) -> SparkSession:
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", str(partitions))
    for key, value in TUNED.items() if tuned else ():
        session.conf.set(key, value)
    return session


@dataclass
class Textbook:
    """Watermark, one stateful aggregation by minute, an upsert for each micro-batch.

    Exact latency buckets within the limits of streaming: as a ``list`` in the state, or as one more
    column of the key (``key``). Hours and days are made of the stored minutes, where all of them
    are at hand: update mode hands out whole minutes, not what was added to them.

    It runs with Spark's defaults, but for the number of partitions, for which 200 would be absurd
    here; ``tuned``, with :data:`TUNED` as well.
    """

    spark: SparkSession
    tally: str = "list"
    partitions: int = 1
    files: int = 1_000_000
    tuned: bool = False

    @property
    def name(self) -> str:
        """What to call it."""
        return "textbook job, tuned" if self.tuned else "textbook job"

    def run(self, spool: Path, work: Path) -> float:
        """The seconds it took."""
        session = _session(self.spark, self.partitions, tuned=self.tuned)
        # No batch of its own for the watermark after the last one: to the peer's favour.
        session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        with contextlib.closing(self._create(work / "textbook.db")) as database:
            started = perf_counter()
            query = (
                self._aggregated(session, spool)
                .writeStream.outputMode("update")
                .foreachBatch(lambda batch, _: self._store(batch, database))
                .option("checkpointLocation", (work / "checkpoint").as_uri())
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            return perf_counter() - started

    def results(self, work: Path) -> Results:
        """What came of the run in that folder."""
        results: Results = {}
        numbers = ", ".join(NUMBERS)
        if self.tally == "key":
            numbers, text = AGAIN, "GROUP_CONCAT(b || ':' || n) FROM {} GROUP BY bucket, name"
        else:
            text = "tally FROM {}"
        with contextlib.closing(sqlite3.connect(work / "textbook.db")) as database:
            for grain in ("minute", "hour", "day"):
                sql = f"SELECT bucket, name, {numbers}, {text.format(grain)}"
                results |= from_rows(grain, database.execute(sql))
        return results

    def _aggregated(self, session: SparkSession, spool: Path) -> DataFrame:
        events = (
            session.readStream.schema(SCHEMA)
            .option("maxFilesPerTrigger", self.files)
            .parquet(str(spool / SOURCE))
            .withWatermark("time", "10 minutes")
        )
        keys = ["WINDOW(time, '1 minute') AS w", "serviceName", "name"]
        if self.tally == "key":
            keys.append("latency DIV 10 AS b")
        states = (
            STATES if self.tally == "key" else (*STATES, "COLLECT_LIST(latency DIV 10) AS list")
        )
        events.createOrReplaceTempView("events")
        grouped = session.sql(
            f"SELECT {', '.join((*keys, *states))} FROM events"
            f" GROUP BY {', '.join(key.split(' AS ')[0] for key in keys)}"
        )
        last = "b" if self.tally == "key" else "ARRAY_JOIN(list, ',') AS tally"
        return grouped.selectExpr(
            "UNIX_SECONDS(w.start) DIV 60 AS bucket", "serviceName", "name", *NUMBERS, last
        )

    def _create(self, file: Path) -> sqlite3.Connection:
        database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        # As in the pipeline's store.
        for setting in (
            "page_size = 8192", "journal_mode = WAL", "synchronous = FULL",
            "cache_size = -65536", "temp_store = MEMORY",
        ):  # fmt: skip
            database.execute(f"PRAGMA {setting}")
        last, key = ("b INTEGER", ", b") if self.tally == "key" else ("tally TEXT", "")
        numbers = ", ".join(f"{column} INTEGER" for column in NUMBERS)
        for grain in ("minute", "hour", "day"):
            database.execute(
                f"CREATE TABLE {grain} (bucket INTEGER, serviceName TEXT, name TEXT, {numbers},"
                f" {last}, PRIMARY KEY (bucket, serviceName, name{key})) WITHOUT ROWID"
            )
        return database

    def _store(self, batch: DataFrame, database: sqlite3.Connection) -> None:
        table = batch.toArrow()
        if not table.num_rows:
            return
        key = ("bucket", "serviceName", "name", *(("b",) if self.tally == "key" else ()))
        updates = ", ".join(
            f"{column} = excluded.{column}" for column in table.column_names if column not in key
        )
        hours = sorted({bucket // 60 for bucket in table["bucket"].unique().to_pylist()})
        days = sorted({hour // 24 for hour in hours})
        database.execute("BEGIN IMMEDIATE")
        database.executemany(
            f"INSERT INTO minute ({', '.join(table.column_names)}) VALUES"
            f" ({', '.join('?' * table.num_columns)})"
            f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {updates}",
            zip(*(column.to_pylist() for column in table.columns), strict=True),
        )
        last = "b" if self.tally == "key" else "GROUP_CONCAT(tally)"
        group = ", b" if self.tally == "key" else ""
        for grain, below, per, buckets in (
            ("hour", "minute", 60, hours),
            ("day", "hour", 24, days),
        ):
            database.executemany(
                f"REPLACE INTO {grain} SELECT bucket / {per}, serviceName, name, {AGAIN}, {last}"
                f" FROM {below} WHERE bucket BETWEEN ? AND ? GROUP BY serviceName, name{group}",
                [(bucket * per, bucket * per + per - 1) for bucket in buckets],
            )
        database.execute("COMMIT")


# The position of each key's first occurrence in the sorted list tells how often it is there.
_COUNTED = """
SELECT bucket, serviceName, name, {numbers}, ARRAY_JOIN(TRANSFORM(starts, (i, j) ->
    CONCAT(list[i], ':', COALESCE(GET(starts, j + 1), SIZE(list)) - i)), ',') AS tally
FROM (SELECT *, FILTER(SEQUENCE(0, SIZE(list) - 1), i -> i = 0 OR list[i] <> list[i - 1]) AS starts
FROM (SELECT bucket, serviceName, name, {numbers}, SORT_ARRAY(list) AS list
FROM (SELECT UNIX_MICROS(time) DIV 60000000 AS bucket, serviceName, name, {states},
    COLLECT_LIST(latency DIV 10) AS list FROM events GROUP BY 1, 2, 3)))
"""
_BUCKETS_FIRST = """
SELECT bucket, serviceName, name, {again}, COLLECT_LIST(STRUCT(b, n)) AS tally
FROM (SELECT UNIX_MICROS(time) DIV 60000000 AS bucket, serviceName, name, latency DIV 10 AS b,
    {states} FROM events GROUP BY 1, 2, 3, 4)
GROUP BY 1, 2, 3
"""


@dataclass
class BatchQuery:
    """One batch query, written by hand, tuned; the result is made in full, and goes nowhere.

    ``lists`` are counted after grouping; ``buckets`` before. ``cached``:
    the minutes are kept in memory for the hours and days; otherwise Spark may reuse their shuffle.
    """

    spark: SparkSession
    tally: str = "lists"
    cached: bool = True
    partitions: int = 2
    to_arrow: bool = False
    name: str = "batch query"
    table: pa.Table | None = None

    def run(self, spool: Path, work: Path) -> float:
        """The seconds it took."""
        session = _session(self.spark, self.partitions, tuned=True)
        self.table = None
        started = perf_counter()
        with self._query(session, spool) as query:
            if self.to_arrow:
                self.table = query.toArrow()
            else:
                query.write.format("noop").mode("overwrite").save()
            return perf_counter() - started

    def results(self, work: Path) -> Results:
        """What the last run with ``to_arrow`` came to."""
        assert self.table is not None
        results: Results = {}
        columns = ["bucket", "name", *NUMBERS, "tally"]
        for grain in ("minute", "hour", "day"):
            part = self.table.filter(pa.compute.equal(self.table["grain"], grain))
            results |= from_rows(
                grain, zip(*(part[column].to_pylist() for column in columns), strict=True)
            )
        return results

    @contextlib.contextmanager
    def _query(self, session: SparkSession, spool: Path) -> Iterator[DataFrame]:
        session.read.schema(SCHEMA).parquet(str(spool / SOURCE)).createOrReplaceTempView("events")
        sql = _COUNTED if self.tally == "lists" else _BUCKETS_FIRST
        minutes = session.sql(
            sql.format(states=", ".join(STATES), numbers=", ".join(NUMBERS), again=AGAIN)
        )
        if self.cached:
            minutes = minutes.persist()
        minutes.createOrReplaceTempView("minutes")
        joined = "COLLECT_LIST(tally)"
        joined = f"ARRAY_JOIN({joined}, ',')" if self.tally == "lists" else f"FLATTEN({joined})"
        rolled = [
            f"SELECT '{grain}' AS grain, bucket DIV {per} AS bucket, serviceName, name, {AGAIN},"
            f" {joined} AS tally FROM minutes GROUP BY 2, 3, 4"
            for grain, per in (("hour", 60), ("day", 1440))
        ]
        try:
            yield session.sql(
                " UNION ALL ".join(["SELECT 'minute' AS grain, * FROM minutes", *rolled])
            )
        finally:
            if self.cached:
                minutes.unpersist()


@dataclass
class DuckDb:
    """The same with DuckDB, in this process, into Arrow tables."""

    name: str = "DuckDB"
    tables: tuple[pa.Table, ...] = ()

    def run(self, spool: Path, work: Path) -> float:
        """The seconds it took."""
        self.tables = ()
        started = perf_counter()
        with duckdb.connect() as database:
            states = ", ".join(STATES).replace("DIV", "//")
            database.execute(
                "CREATE TEMP TABLE counted AS SELECT epoch_us(time) // 60000000 AS bucket,"
                f" serviceName, name, latency // 10 AS b, {states}"
                f" FROM '{spool / SOURCE}/*.parquet' GROUP BY ALL"
            )
            self.tables = tuple(
                database.sql(
                    f"SELECT bucket, serviceName, name, {AGAIN},"
                    " LIST(STRUCT_PACK(b := b, n := n)) AS tally FROM"
                    f" (SELECT bucket // {per} AS bucket, serviceName, name, b, {AGAIN}"
                    " FROM counted GROUP BY ALL) GROUP BY ALL"
                ).to_arrow_table()
                for per in (1, 60, 1440)
            )
        return perf_counter() - started

    def results(self, work: Path) -> Results:
        """What the last run came to."""
        results: Results = {}
        columns = ["bucket", "name", *NUMBERS, "tally"]
        for grain, table in zip(("minute", "hour", "day"), self.tables, strict=True):
            rows: Any = zip(*(table[column].to_pylist() for column in columns), strict=True)
            results |= from_rows(grain, rows)
        return results


def flavours(spark: SparkSession) -> Iterator[BatchQuery]:
    """The ways to write the batch query."""
    for tally, cached in itertools.product(("lists", "buckets"), (True, False)):
        yield BatchQuery(spark, tally, cached)
