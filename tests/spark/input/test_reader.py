"""The pipeline's reader understands what the spool and the client write; without Spark."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import types as T

from batchmill import Client
from batchmill.sources import SourceType, builtin_catalog, service, source, source_of
from batchmill.spark.input.reader import SPAN, Projection, project
from batchmill.spark.input.reader import SPAN_SCHEMA as SPARK_SPAN_SCHEMA
from batchmill.spark.input.segments import inspect, spark_path
from batchmill.spool import (
    ATTRIBUTE_COLUMNS,
    RESOURCE_COLUMNS,
    SPAN_COLUMNS,
    SPAN_SCHEMA,
    Spool,
)
from tests.kit.events import segments, spans
from tests.kit.threads import WAIT_S

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


class Mood(enum.Enum):
    GOOD = 1
    BAD = 2


@dataclass(frozen=True)
class Basket:
    items: int
    note: str | None = None


@source(entity=service("shop"))
@dataclass(frozen=True)
class ReaderSale:
    shop: str
    cents: int
    time: datetime = NOON
    mood: Mood = Mood.GOOD
    basket: Basket = Basket(3)
    labels: dict[str, str] = field(default_factory=dict)


def projection(folder: Path, kind: SourceType, rows: int) -> Projection:
    """How the only segment in a folder is read: with all columns of its event type."""
    good, bad = inspect([spark_path(path) for path in segments(folder)])
    assert bad == []
    assert [(segment.source, segment.rows) for segment in good] == [(kind.name, rows)]
    return project(kind, [column.column for column in kind.fields.values()], good[0].schema)


SPARK_TYPES = {
    "time": T.TimestampType(),
    "id": T.StringType(),
    "text": T.StringType(),
    "map": T.MapType(T.StringType(), T.StringType()),
}


def test_the_columns_of_a_span_are_read() -> None:
    """As they are in a segment; the two moments are read apart from the other fields."""
    well_known = [*RESOURCE_COLUMNS.values(), *ATTRIBUTE_COLUMNS.values()]
    assert {column.name: column.dataType for column in SPARK_SPAN_SCHEMA} == {
        column.name: SPARK_TYPES[column.kind] for column in SPAN_SCHEMA
    } | dict.fromkeys(well_known, T.StringType())
    names = [column.name for column in SPAN_SCHEMA if column.kind != "time"]
    assert list(SPAN.fields) == names + well_known
    assert SPAN.required == ("trace_id", "span_id")


def test_spans_of_a_spool_are_read(tmp_path: Path) -> None:
    """With every column."""
    with Spool(tmp_path, linger_s=0) as spool:
        spool.submit("Span", spans(range(5))).result(WAIT_S)
    read = projection(tmp_path, SPAN, 5)
    assert {column.name for column in read.schema} == {
        *SPAN_COLUMNS,
        *RESOURCE_COLUMNS.values(),
        *ATTRIBUTE_COLUMNS.values(),
    }


@pytest.mark.parametrize("name", sorted(builtin_catalog().sources))
def test_every_event_type_is_read(tmp_path: Path, name: str) -> None:
    """With the schema of the catalog, structs and lists and maps included."""
    kind = builtin_catalog().source(name)
    event: dict[str, Any] = {"time": NOON, **dict.fromkeys(kind.required, 1)}
    with Client(tmp_path) as client:
        client.emit(event, name)
    assert projection(tmp_path, kind, 1).columns


def test_events_of_an_own_class_are_read(tmp_path: Path) -> None:
    """An application's own class has the columns that the pipeline expects of it."""
    with Client(tmp_path) as client:
        client.emit(ReaderSale("a", 1))
    assert len(projection(tmp_path, source_of(ReaderSale), 1).columns) == 6
