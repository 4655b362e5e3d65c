"""Rows of events in segments: what is read, converted, and invalid, and why; without Spark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill import Client
from batchmill.aggregate import TIMESTAMP, Aggregator
from batchmill.oal import load
from batchmill.sources import (
    Entity,
    Field,
    FieldType,
    SourceType,
    builtin_catalog,
    service,
    source,
    source_of,
)
from batchmill.spark.input.rows import (
    REASON,
    CheckedRows,
    ColumnTypeError,
    check_rows,
    check_schema,
    open_segment,
    read_rows,
)
from tests.kit.events import BASKET, NOON, Basket, Mood, segments
from tests.kit.threads import WAIT_S
from tests.oracle.generate import to_table
from tests.spark.kit import LATEST, TEXT, listed, reasons, replaced, written

ENDPOINT = builtin_catalog().source("Endpoint")
NEEDED = frozenset({"name", "serviceName", "serviceLayer", "latency", "status", "tags", "tag"})
ODD = SourceType(
    "Odd",
    {
        "id": Field("id", FieldType("string")),
        "load": Field("load", FieldType("double")),
        "count": Field("count", FieldType("int"), required=True),
        "parts": Field(
            "parts",
            FieldType(
                "struct",
                "Parts",
                fields=(
                    Field("note", FieldType("string")),
                    Field("sizes", FieldType("list", item=FieldType("long"))),
                ),
            ),
        ),
    },
    Entity("given", {"field": "id"}),
)
"""An event type with what ``Endpoint`` has not."""


def endpoints(count: int = 3) -> pa.Table:
    """Valid rows of Endpoint."""
    rows = [
        {
            "time": NOON - timedelta(seconds=number),
            "name": f"/{number}",
            "serviceName": "shop",
            "serviceLayer": "GENERAL",
            "latency": number,
            "status": True,
            "tags": ["a", None],
            "tag": {"n": "1"},
        }
        for number in range(count)
    ]
    return to_table("Endpoint", rows)


def read(path: Path, kind: SourceType = ENDPOINT, needed: Collection[str] = NEEDED) -> CheckedRows:
    """The rows of a file."""
    with pa.OSFile(str(path)) as file, open_segment(file, kind) as opened:
        return read_rows(opened, kind, needed, LATEST)


def every_way(
    table: pa.Table, folder: Path, kind: SourceType = ENDPOINT, needed: Collection[str] = NEEDED
) -> CheckedRows:
    """What a table becomes, the same whether it is in memory or in a file of several groups."""
    in_memory = check_rows(kind, needed, table, LATEST)
    path = written(table, folder / "every.parquet", row_group_size=2)
    from_file = read(path, kind, needed)
    with pq.ParquetFile(path) as file:  # not opened by open_segment
        plain = read_rows(file, kind, needed, LATEST)
    for other in (from_file, plain):
        assert other.rows.schema == in_memory.rows.schema
        assert other.rows.to_pylist() == in_memory.rows.to_pylist()
        assert reasons(other) == reasons(in_memory)
        assert str(listed(other.invalid)) == str(listed(in_memory.invalid))  # may have NaN
    return in_memory


# What the spool and the client write.


def test_spark_is_not_needed() -> None:
    """Rows are read in processes that have no other use for it."""
    code = "import sys, batchmill.spark.input.rows; sys.exit('pyspark' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


@pytest.mark.parametrize("name", sorted(builtin_catalog().sources))
def test_every_event_type_is_read(tmp_path: Path, name: str) -> None:
    """With the schema of the catalog, structs and lists and maps included."""
    kind = builtin_catalog().source(name)
    event: dict[str, Any] = {"time": NOON, **dict.fromkeys(kind.required, 1)}
    with Client(tmp_path) as client:
        client.emit(event, name)
    (path,) = segments(tmp_path)
    needed = [column.column for column in kind.fields.values()]
    checked = read(path, kind, needed)
    assert checked.rows.column_names == ["time", *needed]
    if "field" not in kind.entity.roles:
        assert checked.rows.num_rows == 1
    for wanted in kind.arrow_schema():
        actual = checked.rows.schema.field(wanted.name).type
        assert (pa.string() if actual == TEXT else actual) == wanted.type


@source(entity=service("shop"))
@dataclass(frozen=True)
class RowSale:
    shop: str
    cents: int
    time: datetime = NOON
    mood: Mood = Mood.GOOD
    basket: Basket = BASKET
    labels: dict[str, str] = field(default_factory=dict)


def test_events_of_an_own_class_are_read(tmp_path: Path) -> None:
    """An application's own class has the columns that the pipeline expects of it."""
    with Client(tmp_path) as client:
        client.emit(RowSale("a", 1))
    (path,) = segments(tmp_path)
    kind = source_of(RowSale)
    checked = read(path, kind, [column.column for column in kind.fields.values()])
    (row,) = checked.rows.to_pylist()
    assert row == {
        "time": NOON,
        "shop": "a",
        "cents": 1,
        "mood": "GOOD",
        "basket": {"items": 3, "note": None},
        "labels": [],
    }


def test_valid_rows_are_what_the_aggregation_takes(tmp_path: Path) -> None:
    """Nothing more to convert, and no row that it would sort out."""
    aggregator = Aggregator(ENDPOINT, load("m = from(Endpoint.latency).sum();"))
    table = replaced(endpoints(), "latency", pa.array([1, 2**31, 3], pa.int64()))
    made = aggregator.make(every_way(table, tmp_path).rows)
    assert not made.invalid
    assert made.deltas.rows.tolist() == [1, 1]


# Types.

TEXTS = pa.dictionary(pa.int8(), pa.string())
LONG_TEXTS = pa.dictionary(pa.int32(), pa.large_string())
CODE, NANOS = "internalErrorCode", "internalRequestLatencyNanos"
SAME_VALUES: Mapping[str, tuple[str, Sequence[Any], pa.DataType]] = {
    "a narrower number": ("latency", [1, None, 3], pa.int8()),
    "an unsigned number": ("latency", [1, 200, 3], pa.uint8()),
    "a wider number": ("latency", [1, -(2**31), 2**31 - 1], pa.int64()),
    "a wider unsigned number": ("latency", [1, 2, 2**31 - 1], pa.uint32()),
    "numbers as a dictionary": ("latency", [1, 2, 1], pa.dictionary(pa.int8(), pa.int32())),
    "long texts": ("name", ["a", None, "é"], pa.large_string()),
    "a dictionary": ("name", ["a", None, "a"], TEXTS),
    "a dictionary of long texts": ("name", ["a", "b", None], LONG_TEXTS),
    "a dictionary where texts are expected": ("rpcStatusCode", ["0", "0", "1"], TEXTS),
    "a long list": ("tags", [["a", None], None, []], pa.large_list(pa.large_string())),
    "a list of dictionaries": ("tags", [["a"], ["b", "a"], []], pa.list_(TEXTS)),
    "a map of long texts": ("tag", [[("n", "1")], None, []], pa.map_(*[pa.large_string()] * 2)),
    "fewer members": ("sideCar", [{CODE: "x"}, None, {}], pa.struct([(CODE, pa.string())])),
    "other members": (
        "sideCar",
        [{"more": 1, NANOS: 3}, None, {}],
        pa.struct([("more", pa.int8()), (NANOS, pa.uint32())]),
    ),
}


@pytest.mark.parametrize("which", SAME_VALUES)
def test_types_that_common_writers_produce_are_converted(tmp_path: Path, which: str) -> None:
    """The same rows as with the catalog's own type, in that type."""
    name, values, kind = SAME_VALUES[which]
    needed = NEEDED - {"latency"} | {name}
    declared = ENDPOINT.fields[name].type.arrow_type()
    checked = every_way(
        replaced(endpoints(), name, pa.array(values, kind)), tmp_path, needed=needed
    )
    plain = check_rows(
        ENDPOINT, needed, replaced(endpoints(), name, pa.array(values, declared)), LATEST
    )
    assert checked.rows.schema == plain.rows.schema
    assert checked.rows.to_pylist() == plain.rows.to_pylist()
    assert reasons(checked) == reasons(plain)


def test_a_null_in_a_dictionary_is_a_null(tmp_path: Path) -> None:
    """Whether the row has no text, or the text it has is null."""
    ids = pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array(["a", None]))
    table = pa.table({"time": [NOON] * 3, "id": ids, "count": [1, 2, 3]})
    checked = check_rows(ODD, ["id", "count"], table, LATEST)
    assert reasons(checked) == {"no id": 2}
    assert checked.rows["id"].to_pylist() == ["a"]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
def test_moments_in_any_unit_and_zone(tmp_path: Path, unit: str, zone: str | None) -> None:
    """The moment counts; one without a zone is in UTC."""
    scale = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}[unit]
    seconds = int(NOON.timestamp())
    starts = pa.array([seconds * scale, None, 0], pa.int64()).view(pa.timestamp(unit, zone))
    checked = every_way(replaced(endpoints(), "time", starts), tmp_path)
    assert checked.rows["time"].type == TIMESTAMP
    assert checked.rows["time"].to_pylist() == [NOON, datetime.fromtimestamp(0, UTC)]
    assert reasons(checked) == {"no time": 1}


def test_parts_of_a_microsecond_are_cut_off_toward_1970(tmp_path: Path) -> None:
    """Less than a microsecond before 1970 is 1970."""
    starts = pa.array([-999, -1000, LATEST * 1000 + 999], pa.int64()).view(pa.timestamp("ns"))
    checked = every_way(replaced(endpoints(), "time", starts), tmp_path)
    assert checked.rows["time"].cast(pa.int64()).to_pylist() == [0, LATEST]
    assert reasons(checked) == {"time before 1970": 1}


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_moments_beyond_the_range_of_microseconds_are_invalid(tmp_path: Path, unit: str) -> None:
    """They do not come round to a moment that is valid."""
    starts = pa.array([2**62, -(2**62), 1], pa.int64()).view(pa.timestamp(unit, "UTC"))
    checked = check_rows(ENDPOINT, NEEDED, replaced(endpoints(), "time", starts), LATEST)
    assert reasons(checked) == {"time too far ahead": 1, "time before 1970": 1}


def test_old_timestamps_are_read(tmp_path: Path) -> None:
    """INT96, which holds moments that 64 bits of nanoseconds do not."""
    far = NOON.replace(year=2600)
    table = replaced(endpoints(), "time", pa.array([NOON, far, None], pa.timestamp("us")))
    path = written(table, tmp_path / "old.parquet", use_deprecated_int96_timestamps=True)
    checked = read(path)
    assert checked.rows["time"].to_pylist() == [NOON]
    assert [(row[REASON], row["time"]) for row in listed(checked.invalid)] == [
        ("time too far ahead", far),
        ("no time", None),
    ]


REFUSED: Mapping[str, tuple[str, pa.Array, str]] = {
    "a text": ("latency", pa.array(["1"]), "latency: string, where int is"),
    "a fraction": ("latency", pa.array([1.0]), "latency: double, where int is"),
    "a wider dictionary": (
        "latency",
        pa.array([1]).dictionary_encode(),
        "latency: dictionary<values=int64, indices=int32, ordered=0>, where int is",
    ),
    "bytes": ("name", pa.array([b"a"]), "name: binary, where string is"),
    "a number": ("status", pa.array([1]), "status: int64, where bool is"),
    "a list of numbers": ("tags", pa.array([[1]]), "tags: list<.*int64>, where list<string> is"),
    "a struct": ("tag", pa.array([{"n": "1"}]), "tag: struct<n: string>, where map<string,string>"),
    "numbers as times": ("time", pa.array([1]), "time: int64, where timestamp.us, tz=UTC. is"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_a_column_of_another_type_is_refused(tmp_path: Path, which: str) -> None:
    """The error names the column, its type, and the one that is expected."""
    name, column, message = REFUSED[which]
    table = replaced(endpoints(1), name, column)
    with pytest.raises(ColumnTypeError, match=f"^column {message}"):
        check_schema(ENDPOINT, NEEDED, table.schema)
    with pytest.raises(ColumnTypeError, match=f"^column {message}"):
        check_rows(ENDPOINT, NEEDED, table, LATEST)
    if not pa.types.is_dictionary(column.type):  # a file holds only texts as dictionaries
        with pytest.raises(ColumnTypeError, match=f"^column {message}"):
            read(written(table, tmp_path / "refused.parquet"))


def test_a_column_that_is_not_needed_may_be_of_any_type(tmp_path: Path) -> None:
    """It is left out of an invalid row, and makes no row invalid."""
    odd = replaced(endpoints(), "httpResponseStatusCode", pa.array(["200"] * 3))
    odd = replaced(odd, "rpcStatusCode", pa.array(["5"] * 3))
    odd = replaced(odd, "latency", pa.array([None, 1, 2], pa.int32()))
    checked = every_way(odd, tmp_path)
    assert "rpcStatusCode" not in checked.rows.column_names
    (row,) = listed(checked.invalid)
    assert row["rpcStatusCode"] == "5"
    assert "httpResponseStatusCode" not in row
    wide = replaced(odd, "httpResponseStatusCode", pa.array([2**40] * 3))
    checked = every_way(wide, tmp_path)
    assert reasons(checked) == {"no latency": 1}
    assert listed(checked.invalid)[0]["httpResponseStatusCode"] == 2**40


def test_names_differ_by_capitals(tmp_path: Path) -> None:
    """A column in capitals is another one."""
    table = endpoints().append_column("LATENCY", pa.array(["x"] * 3))
    assert every_way(table, tmp_path).rows["latency"].to_pylist() == [0, 1, 2]


# Columns that are not there.


def test_columns_that_are_missing_are_null(tmp_path: Path) -> None:
    """As those of nulls without a type are; the rows of all segments have one schema."""
    table = endpoints()
    few = every_way(replaced(table.drop_columns(["tags", "tag"]), "name", None), tmp_path).rows
    nulls = every_way(replaced(table, "tags", pa.nulls(3)), tmp_path).rows
    whole = every_way(table, tmp_path).rows
    assert few.schema == nulls.schema == whole.schema
    assert few["tags"].null_count == few["name"].null_count == nulls["tags"].null_count == 3
    assert pa.concat_tables([few, nulls, whole]).combine_chunks()["name"].to_pylist() == [
        *[None] * 3,
        *["/0", "/1", "/2"] * 2,
    ]


@pytest.mark.parametrize("name", ["time", "latency"])
@pytest.mark.parametrize("column", [None, pa.nulls(3), pa.nulls(3, pa.int64())])
def test_without_a_required_column_no_row_is_valid(
    tmp_path: Path, name: str, column: pa.Array | None
) -> None:
    """Missing, or nothing in it."""
    if column is not None and name == "time" and not pa.types.is_null(column.type):
        column = column.view(TIMESTAMP)
    checked = every_way(replaced(endpoints(), name, column), tmp_path)
    assert checked.rows.num_rows == 0
    assert reasons(checked) == {f"no {name}": 3}


def test_no_rows_and_no_columns(tmp_path: Path) -> None:
    """An empty file has no rows of either kind; rows without any column are still counted."""
    assert every_way(endpoints(0), tmp_path).rows.num_rows == 0
    nothing = pa.table({"other": [1, 2]})
    checked = every_way(nothing, tmp_path)
    assert checked.rows.num_rows == 0
    assert reasons(checked) == {"no time": 2}


# Invalid rows.


def test_rows_are_invalid_for_the_first_reason_that_applies(tmp_path: Path) -> None:
    """The time before the columns, and those in the order of the catalog."""
    rows = [
        (NOON, "a", 1.5, 1, None),
        (None, None, float("nan"), None, "no time"),
        (datetime(1969, 12, 31, tzinfo=UTC), None, None, None, "time before 1970"),
        (NOON + timedelta(microseconds=1), None, None, None, "time too far ahead"),
        (NOON, None, float("nan"), None, "no id"),
        (NOON, "a", float("nan"), None, "load: not a finite number"),
        (NOON, "a", -float("inf"), 2**31, "load: not a finite number"),
        (NOON, "a", 2.0**62, 1, "load: not a finite number"),
        (NOON, "a", None, -(2**31) - 1, "count: too large for an int"),
        (NOON, "a", -(2.0**61), None, "no count"),
        (NOON, "b", None, 2**31 - 1, None),
    ]
    times, ids, loads, counts, wanted = zip(*rows, strict=True)
    table = pa.table(
        {
            "time": pa.array(times, TIMESTAMP),
            "id": pa.array(ids),
            "load": pa.array(loads),
            "count": pa.array(counts, pa.int64()),
        }
    )
    checked = every_way(table, tmp_path, ODD, ["id", "load", "count"])
    assert [row[REASON] for row in listed(checked.invalid)] == [text for text in wanted if text]
    assert checked.rows["id"].to_pylist() == ["a", "b"]
    assert checked.rows["count"].type == pa.int32()
    # A number that is too large is still to be seen.
    assert [row["count"] for row in listed(checked.invalid)] == [
        count for count, reason in zip(counts, wanted, strict=True) if reason
    ]


def test_narrow_fractions_are_checked(tmp_path: Path) -> None:
    """Also those in a dictionary."""
    numbers = pa.array([0.5, float("inf"), 0.5], pa.float32())
    for column in (numbers, numbers.dictionary_encode()):
        table = pa.table(
            {"time": [NOON] * 3, "id": ["a"] * 3, "load": column, "count": pa.array([1] * 3)}
        )
        checked = every_way(table, tmp_path, ODD, ["id", "load", "count"])
        assert reasons(checked) == {"load: not a finite number": 1}
        assert checked.rows["load"].to_pylist() == [0.5, 0.5]
        assert checked.rows["load"].type == pa.float64()


def test_invalid_rows_are_kept_whole(tmp_path: Path) -> None:
    """With the columns that were not needed, from whatever part of a file."""
    table = endpoints(9)
    latencies = pa.array([None if number in (3, 8) else number for number in range(9)], pa.int32())
    table = replaced(table, "latency", latencies)
    table = replaced(table, "rpcStatusCode", pa.array([f"c{number}" for number in range(9)]))
    table = replaced(table, "colour", pa.array(["red"] * 9))
    checked = every_way(table, tmp_path, needed=["latency"])
    assert checked.rows.column_names == ["time", "latency"]
    assert checked.rows["latency"].to_pylist() == [0, 1, 2, 4, 5, 6, 7]
    assert checked.invalid is not None
    names = [name for name in ENDPOINT.arrow_schema().names if name in table.column_names]
    assert checked.invalid.column_names == [*names, REASON]
    assert checked.invalid.drop_columns(REASON).to_pylist() == (
        table.select(names).take(pa.array([3, 8])).to_pylist()
    )


def test_rows_can_come_back_from_the_quarantine(tmp_path: Path) -> None:
    """What was too far ahead is valid once its time has come."""
    table = endpoints()
    early = check_rows(ENDPOINT, NEEDED, table, LATEST - 60_000_000)
    assert reasons(early) == {"time too far ahead": 3}
    assert early.invalid is not None
    again = read(written(early.invalid, tmp_path / "again.parquet"))
    assert again.invalid is None
    assert again.rows.to_pylist() == check_rows(ENDPOINT, NEEDED, table, LATEST).rows.to_pylist()


# Texts that are no UTF-8.

LATIN = pa.array([b"caf\xe9", b"ok", b"\xe2\x82", None], pa.binary()).view(pa.string())
CLEAN = ["caf\ufffd", "ok", "\ufffd", None]


@pytest.mark.parametrize("encoded", [False, True])
def test_text_that_is_no_utf8_is_made_valid(tmp_path: Path, encoded: bool) -> None:
    """In names and labels, and in the rows of the quarantine."""
    texts = LATIN.dictionary_encode() if encoded else LATIN
    table = endpoints(4)
    for name in ("name", "rpcStatusCode"):
        table = replaced(table, name, texts)
    table = replaced(table, "latency", pa.array([1, 2, 3, None], pa.int32()))
    needed = {*NEEDED, "rpcStatusCode"}
    checked = every_way(table, tmp_path, needed=needed)
    checked.rows.validate(full=True)
    for name in ("name", "rpcStatusCode"):
        assert checked.rows[name].to_pylist() == CLEAN[:3]
    checked = every_way(replaced(table, "latency", None), tmp_path, needed=needed)
    assert checked.invalid is not None
    checked.invalid.validate(full=True)
    assert checked.invalid["name"].to_pylist() == CLEAN


def test_texts_inside_lists_maps_and_structs_are_made_valid(tmp_path: Path) -> None:
    """With all that is around them."""
    offsets = pa.array([0, 2, 2, 3, 4], pa.int32())
    table = replaced(endpoints(4), "tags", pa.ListArray.from_arrays(offsets, LATIN))
    keys = pa.array([b"\xff", b"k", b"k", b"k"], pa.binary()).view(pa.string())
    table = replaced(table, "tag", pa.MapArray.from_arrays(offsets, keys, LATIN))
    checked = every_way(table, tmp_path)
    checked.rows.validate(full=True)
    assert checked.rows["tags"].to_pylist() == [CLEAN[:2], [], ["\ufffd"], [None]]
    assert checked.rows["tag"].to_pylist() == [
        [("\ufffd", "caf\ufffd"), ("k", "ok")],
        [],
        [("k", "\ufffd")],
        [("k", None)],
    ]
    sizes = pa.array([[1, 2], None, [3], []], pa.list_(pa.int64()))
    parts = pa.StructArray.from_arrays([LATIN, sizes], ["note", "sizes"])
    odd = pa.table({"time": [NOON] * 4, "id": ["a"] * 4, "parts": parts, "count": [1] * 4})
    checked = every_way(odd, tmp_path, ODD, ["id", "count", "parts"])
    assert [row["note"] for row in checked.rows["parts"].to_pylist()] == CLEAN
    assert [row["sizes"] for row in checked.rows["parts"].to_pylist()] == sizes.to_pylist()
