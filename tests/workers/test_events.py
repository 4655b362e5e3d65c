"""How events are read as columns: every value exactly, whatever its class and size."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from batchmill.aggregate import Aggregator
from batchmill.oal import load
from batchmill.sources import service, source
from batchmill.workers.events import EventReader
from tests.workers.kit import NOON

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FAR_AHEAD_US = 2**62
BERLIN = ZoneInfo("Europe/Berlin")
MIXED = [1, 2**40, None]


class Size(enum.IntEnum):
    """Whole numbers that are not plain ones."""

    SMALL = 1


@source(entity=service("shop"))
@dataclass(frozen=True)
class ReadSale:
    """An event with a field of every kind of number."""

    shop: str
    cents: int | None = 1
    weight: float | None = 1.0
    paid: bool | None = True
    time: datetime = NOON


@pytest.fixture
def reader() -> EventReader:
    """Reads sales for metrics of all fields."""
    metrics = load("""
    read_cents = from(ReadSale.cents).sum();
    read_weight = from(ReadSale.weight).doubleAvg();
    read_paid = from(ReadSale.*).percent(paid == true);
    """)
    source_type = metrics.catalog.source("ReadSale")
    return EventReader(Aggregator(source_type, metrics.by_source()["ReadSale"]).plan)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("cents", [0, 1, -1, 2**31 - 1, -(2**31)]),
        ("cents", [2**31, -(2**31) - 1, 2**63 - 1, -(2**63)]),
        ("cents", MIXED),
        ("cents", [np.int64(3), 4]),
        ("weight", [0.1, -0.0, 1e308, 5e-324, math.inf]),
        ("weight", [1, 2.5, None]),
        ("paid", [True, False, True]),
        ("paid", [True, None]),
    ],
)
def test_values_are_read_exactly(reader: EventReader, field: str, values: list[Any]) -> None:
    """Numbers of the usual classes, which are read in a quick way, and all others."""
    read = reader.read([ReadSale("a", **{field: value}) for value in values], FAR_AHEAD_US)
    assert not read.invalid
    column = read.table[field].to_pylist()
    assert column == values
    assert [math.copysign(1, value or 1) for value in column] == [
        math.copysign(1, value or 1) for value in values
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cents", True),
        ("cents", 1.0),
        ("cents", "1"),
        ("cents", 2**63),
        ("cents", Size.SMALL),
        ("cents", b"i\x01\x00\x00\x00"),
        ("weight", "1.0"),
        ("paid", 1),
        ("paid", "T"),
        ("paid", ord("T")),
    ],
)
def test_a_value_of_another_class_is_left_out(
    reader: EventReader, field: str, value: object
) -> None:
    """It is counted; the events before and after it are read."""
    sale: Any = ReadSale
    events = [ReadSale("a"), sale("b", **{field: value}), ReadSale("c")]
    read = reader.read(events, FAR_AHEAD_US)
    assert read.table["shop"].to_pylist() == ["a", "c"]
    assert read.invalid == {f"{field}: a value of the wrong type": 1}


@pytest.mark.parametrize(
    "moments",
    [
        [NOON, NOON + timedelta(seconds=59, microseconds=999_999), NOON + timedelta(minutes=1)],
        [NOON - timedelta(microseconds=1), NOON],
        [datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), EPOCH],
        [NOON, NOON.astimezone(timezone(timedelta(hours=5, minutes=30))) + timedelta(minutes=3)],
        # The same time of day twice, as clocks are set back.
        [datetime(2026, 10, 25, 2, 30, second, fold=fold, tzinfo=BERLIN)
         for second, fold in ((10, 1), (20, 0))],
        [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)],
    ],
)  # fmt: skip
def test_moments_of_several_minutes_are_exact(reader: EventReader, moments: list[datetime]) -> None:
    """To the microsecond, in any time zone, also before 1970."""
    read = reader.read([ReadSale("a", time=moment) for moment in moments], FAR_AHEAD_US)
    micros = read.table["time"].cast("int64").to_pylist()
    assert micros == [(moment - EPOCH) // timedelta(microseconds=1) for moment in moments]
    assert not read.invalid


def test_moments_of_one_minute_stay_in_it(reader: EventReader) -> None:
    """They may all get the same moment."""
    moments = [NOON + timedelta(seconds=59), NOON, NOON + timedelta(microseconds=1)]
    read = reader.read([ReadSale("a", time=moment) for moment in moments], FAR_AHEAD_US)
    minutes = {moment.replace(second=0, microsecond=0) for moment in read.table["time"].to_pylist()}
    assert minutes == {NOON}
