"""Spans in segments: their columns, their attributes, what is invalid and why; without Spark."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill.aggregate import TIMESTAMP
from batchmill.spans import compact
from batchmill.spark.input.rows import (
    KEYS,
    REASON,
    SPAN,
    CheckedRows,
    ColumnTypeError,
    check_spans,
    open_segment,
    read_spans,
)
from batchmill.spark.input.segments import reason_for
from batchmill.spool import ATTRIBUTE_COLUMNS, FOREIGN, RESOURCE_COLUMNS, SPAN_SCHEMA, Spool
from tests.kit.events import NOON, segments, spans
from tests.kit.threads import WAIT_S
from tests.oracle.generate import random_spans, to_table
from tests.spark.kit import LATEST, TEXT, listed, reasons, replaced, written

WELL_KNOWN = [*RESOURCE_COLUMNS.values(), *ATTRIBUTE_COLUMNS.values()]
POOL = pa.proxy_memory_pool(pa.default_memory_pool())
"""Counts what is allocated; it lives as long as what is allocated from it."""


def span_table(count: int = 3, **columns: Any) -> pa.Table:
    """Valid spans without columns of well-known attributes; ``columns`` are added or replaced."""
    start = pa.array([LATEST - 1000] * count, pa.int64()).view(TIMESTAMP)
    table = pa.table(
        {
            "time": start,
            "end_time": start,
            "trace_id": [f"t{number}" for number in range(count)],
            "span_id": [f"s{number}" for number in range(count)],
        }
    )
    for name, column in columns.items():
        table = replaced(table, name, column)
    return table


def read_span_file(path: Path, *, maps: bool = True) -> CheckedRows:
    """The spans of a file."""
    with pa.OSFile(str(path)) as file, open_segment(file, SPAN) as opened:
        return read_spans(opened, LATEST, maps=maps)


def overwrite(path: Path, column: str) -> None:
    """Spoil the pages of a column; the footer stays whole."""
    group = pq.read_metadata(path).row_group(0)
    chunks = (group.column(number) for number in range(group.num_columns))
    chunk = next(chunk for chunk in chunks if chunk.path_in_schema == column)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + chunk.total_compressed_size] = b"\xa5" * chunk.total_compressed_size
    path.write_bytes(content)


def test_the_columns_of_a_span() -> None:
    """Those of a segment; the two moments are read apart from the other fields."""
    names = [column.name for column in SPAN_SCHEMA if column.kind != "time"]
    assert list(SPAN.fields) == names + WELL_KNOWN
    assert list(KEYS) == WELL_KNOWN
    assert SPAN.required == ("trace_id", "span_id")


@pytest.mark.parametrize("maps", [True, False])
def test_spans_of_a_spool_are_read(tmp_path: Path, maps: bool) -> None:
    """With every column; the attributes that have none of their own only on demand."""
    with Spool(tmp_path, linger_s=0) as spool:
        spool.submit("Span", spans(range(5))).result(WAIT_S)
    (path,) = segments(tmp_path)
    checked = read_span_file(path, maps=maps)
    assert checked.invalid is None
    types = {"time": TIMESTAMP, "id": pa.string(), "map": pa.map_(TEXT, TEXT)}
    wanted = {
        column.name: types.get(column.kind, TEXT)
        for column in SPAN_SCHEMA
        if maps or column.kind != "map"
    }
    assert {column.name: column.type for column in checked.rows.schema} == {
        **wanted,
        **dict.fromkeys(WELL_KNOWN, TEXT),
    }
    assert checked.rows["span_id"].to_pylist() == [f"{number:016x}" for number in range(5)]
    assert checked.rows["host_name"].to_pylist() == ["a"] * 5
    if maps:
        assert checked.rows["attributes"].to_pylist()[4] == [("http.status", "4")]


@pytest.mark.parametrize("wrong", [0, 50])
def test_texts_that_repeat_are_in_memory_once(tmp_path: Path, wrong: int) -> None:
    """Little on the disk, which would be 124 MB with each text as often as it is in a row."""
    entries = [(f"key {number}", f"{number:04}" * 1024) for number in range(127)]
    maps = pa.array([entries] * 100, pa.map_(pa.string(), pa.string()))
    table = span_table(100, attributes=maps, resource=maps)
    ids = [None if number < wrong else f"s{number}" for number in range(100)]
    table = replaced(table, "span_id", pa.array(ids, pa.string()))
    table = replaced(table, "http_url", pa.array(["/a" * 100_000] * 100))
    path = written(
        table,
        tmp_path / "repeating.parquet",
        row_group_size=30,
        store_schema=False,
        compression="zstd",
    )
    assert path.stat().st_size < 2**18
    usual = pa.default_memory_pool()
    pa.set_memory_pool(POOL)
    try:
        checked = read_span_file(path)
        compact(checked.rows, keys={"key 3"})
    finally:
        pa.set_memory_pool(usual)
    assert POOL.max_memory() < 16 * 2**20
    assert len(listed(checked.invalid)) == wrong
    assert checked.rows["attributes"].to_pylist() == [entries] * (100 - wrong)
    if wrong:
        assert checked.invalid is not None
        assert checked.invalid["resource"].to_pylist() == [entries] * wrong


def test_no_spans_and_no_times() -> None:
    """Without spans there are no attributes to look up; spans without a time are still counted."""
    no_maps = pa.array([], pa.map_(pa.string(), pa.string()))
    assert check_spans(span_table(0, attributes=no_maps), LATEST).rows.num_rows == 0
    timeless = span_table(1, attributes=pa.array([[("db.name", "a")]], no_maps.type), time=None)
    assert reasons(check_spans(timeless, LATEST)) == {"no time": 1}


def test_spans_are_invalid_without_ids_and_end(tmp_path: Path) -> None:
    """And if they are no spans at all, before any other reason."""
    spoiled = span_table(6)
    start = spoiled["time"].to_pylist()
    for name, number in (("end_time", 1), ("trace_id", 2), ("span_id", 3), ("time", 4)):
        values = spoiled[name].to_pylist()
        values[number] = None
        spoiled = replaced(spoiled, name, pa.array(values, spoiled[name].type))
    values = [None] * 4 + [b"\xff\x00", None]
    spoiled = replaced(spoiled, FOREIGN, pa.array(values, pa.binary()))
    wanted = ["no end_time", "no trace_id", "no span_id", "not a message of spans"]
    path = written(spoiled, tmp_path / "spans.parquet", row_group_size=4)
    for checked in (check_spans(spoiled, LATEST), read_span_file(path, maps=False)):
        assert [row[REASON] for row in listed(checked.invalid)] == wanted
        assert listed(checked.invalid)[3][FOREIGN] == b"\xff\x00"
        assert checked.rows["span_id"].to_pylist() == ["s0", "s5"]
        assert checked.rows["time"].to_pylist() == [start[0]] * 2
        assert FOREIGN not in checked.rows.column_names


ATTRIBUTES = [
    [("http.route", "/a"), ("other", "x"), ("http.route", "/b")],
    None,
    [("db.system", None), ("db.name", "orders")],
    [],
]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
@pytest.mark.parametrize("maps", [True, False])
def test_attributes_without_a_column_are_in_the_map(
    tmp_path: Path, maps: bool, kind: pa.DataType
) -> None:
    """Of two equal keys the first counts; a column that is there is the truth, even if null."""
    column = pa.map_(kind, kind)
    hosts = pa.array([[("host.name", "h1")], [("host.name", "h2")], [], None], column)
    table = span_table(
        4,
        attributes=pa.array(ATTRIBUTES, column),
        resource=hosts,
        db_name=pa.nulls(4, pa.string()),
        db_system=pa.nulls(4),
    )
    path = written(table, tmp_path / "maps.parquet", row_group_size=3)
    tables = [read_span_file(path, maps=maps).rows]
    if maps:
        tables.append(check_spans(table, LATEST).rows)
        around = pa.concat_tables([table, table, table]).combine_chunks()
        tables.append(check_spans(around.slice(4, 4), LATEST).rows)
    for rows in tables:
        assert rows["http_route"].to_pylist() == ["/a", None, None, None]
        assert rows["host_name"].to_pylist() == ["h1", "h2", None, None]
        assert rows["db_name"].null_count == rows["db_system"].null_count == 4
        assert {rows.schema.field(name).type for name in WELL_KNOWN} == {TEXT}
        assert ("attributes" in rows.column_names) is maps
        if maps:
            assert rows["attributes"].to_pylist() == ATTRIBUTES


def test_attributes_are_those_of_the_valid_spans(tmp_path: Path) -> None:
    """Also where invalid ones are between them, and where entries lie under a null."""
    entries = pa.array(["/0", "/1", "/2"])
    keys = pa.array(["http.route"] * 3)
    maps = pa.MapArray.from_arrays(
        pa.array([0, 1, 2, 3], pa.int32()), keys, entries, mask=pa.array([False, False, True])
    )
    table = span_table(3, attributes=maps, span_id=pa.array([None, "s1", "s2"]))
    checked = check_spans(table, LATEST)
    assert checked.rows["http_route"].to_pylist() == ["/1", None]
    assert reasons(checked) == {"no span_id": 1}


def test_spans_of_the_oracle_are_the_same_from_a_file_and_from_memory(tmp_path: Path) -> None:
    """Whole, and with the looked-up attributes alike."""
    table = to_table("Span", random_spans(3, 200, start=NOON - timedelta(days=2), days=1))
    checked = check_spans(table, LATEST)
    path = written(table, tmp_path / "spans.parquet", row_group_size=50)
    from_file = read_span_file(path)
    assert from_file.rows.schema == checked.rows.schema
    assert from_file.rows.to_pylist() == checked.rows.to_pylist()
    rows = table.to_pylist()
    for name, (column, key) in KEYS.items():
        wanted = [dict(row[column] or ()).get(key) for row in rows]
        assert checked.rows[name].to_pylist() == wanted


def test_attributes_of_another_type_are_refused(tmp_path: Path) -> None:
    """Also where no metric looks into the map."""
    table = span_table(1, attributes=pa.array(["{}"]))
    path = written(table, tmp_path / "text.parquet")
    with pytest.raises(ColumnTypeError, match="attributes: string, where map<string,string> is"):
        read_span_file(path, maps=False)


# What is not read, and what cannot be.


def test_a_column_without_a_value_is_not_read(tmp_path: Path) -> None:
    """If the file's statistics say so: its pages may hold anything."""
    table = span_table(3, db_name=pa.nulls(3, pa.string()), kind=pa.array(["SERVER"] * 3))
    path = written(table, tmp_path / "nulls.parquet", compression="zstd")
    overwrite(path, "db_name")
    rows = read_span_file(path, maps=False).rows
    assert rows["db_name"].null_count == 3
    assert rows["kind"].to_pylist() == ["SERVER"] * 3


def test_a_corrupt_page_is_an_error_of_the_file(tmp_path: Path) -> None:
    """The error that is raised says that the file is corrupt, whatever rows were good."""
    path = written(
        span_table(kind=pa.array(["a", "b", "c"])), tmp_path / "bad.parquet", compression="zstd"
    )
    overwrite(path, "kind")
    with pytest.raises((pa.ArrowException, OSError)) as raised:
        read_span_file(path, maps=False)
    assert reason_for(raised.value) == "corrupt"
