"""What the tests of the pipeline share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def forget_commit(checkpoint: Path) -> None:
    """Take the mark off the newest batch that is done: it will be run again."""
    books = checkpoint / "books.jsonl"
    *lines, mark = books.read_text().splitlines(keepends=True)
    assert mark.startswith('{"done"'), mark
    books.write_text("".join(lines))


class QueryLog:
    """What Spark has noted of the queries that ended since this was made."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._before = {query.executionId() for query in self._queries()}

    def rows_read(self, folder: Path) -> int:
        """How many rows Spark has read from the Parquet files in a folder, repeated ones too.

        What it reads from its cache does not count. The session must not abbreviate what it says
        of files: see ``spark.sql.maxMetadataStringLength``.
        """
        return sum(
            rows
            for query in self._queries()
            if query.executionId() not in self._before
            for rows in self._scanned(query.executionId(), f"{folder}/")
        )

    def _scanned(self, query: int, path: str) -> Iterator[int]:
        values = self._store.executionMetrics(query)
        for node in _items(self._store.planGraph(query).allNodes()):
            if node.name().startswith("Scan parquet") and path in node.desc():
                for metric in _items(node.metrics()):
                    value = values.get(metric.accumulatorId())
                    if metric.name() == "number of output rows" and value.isDefined():
                        yield int(value.get().replace(",", ""))

    def _queries(self) -> Iterator[Any]:
        # Spark notes in a thread of its own.
        self._spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
        return _items(self._store.executionsList())

    @property
    def _store(self) -> Any:
        return self._spark._jsparkSession.sharedState().statusStore()


def _items(sequence: Any) -> Iterator[Any]:
    """The items of a sequence of Scala's."""
    return (sequence.apply(place) for place in range(sequence.size()))
