"""What is in a segment, and that the pipeline's reader takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.sources import builtin_catalog
from batchmill.spool import BadRowsError, EventBatch, Spool
from batchmill.spool.rows import SpanTable, encode, event_tables, span_table, table_of
from tests.kit.events import START, numbers_in, spans
from tests.kit.threads import WAIT_S


def test_spans_come_back_as_they_went(tmp_path: Path) -> None:
    """Every column, maps and moments too, across batches that share a segment."""
    batches = [spans([1, 2]), spans([3], parent_span_id=["00000000000000ff"], attributes=[{}])]
    table = pa.concat_tables([span_table(batch) for batch in batches])
    rows = pq.read_table(_file(tmp_path, table)).to_pylist()
    assert [row["span_id"] for row in rows] == [f"{n:016x}" for n in (1, 2, 3)]
    assert rows[0]["resource"] == [("service.name", "shop"), ("host.name", "a")]
    assert [row["attributes"] for row in rows] == [
        [("http.status", "1")],
        [("http.status", "2")],
        [],
    ]
    assert [row["parent_span_id"] for row in rows] == [None, None, "00000000000000ff"]
    assert table.column("time").cast("int64").to_pylist() == [START + n for n in (1, 2, 3)]
    assert rows[0]["end_time"].tzinfo is not None


def test_resources_may_be_shared_or_not() -> None:
    """Rows that share a dict, rows that do not, and rows with none read the same."""
    one, other = {"service.name": "a"}, {"service.name": "b", "host.name": "h"}
    dicts = [one, other, one, one, {"service.name": "a"}, one, one, {}, one]
    for few in (dicts, dicts[1:3]):
        table = span_table(spans(range(len(few)), resource=few, attributes=few))
        for column in ("resource", "attributes"):
            assert table.column(column).to_pylist() == [list(row.items()) for row in few]


def test_well_known_attributes_are_columns() -> None:
    """They leave the map, and nothing is lost: absent is null, empty is empty; a resource keeps
    its own."""
    attributes: list[dict[str, str]] = [
        {"a": "1", "http.route": "/x", "b": "2", "server.port": ""},
        {},
        {"http.route": "/y"},
        {"a": ""},
    ]
    resources = [{"host.name": "h", "x": "y"}, {}, {"host.name": ""}, {"service.instance.id": "i"}]
    table = span_table(spans(range(4), resource=resources, attributes=attributes))
    assert table["attributes"].to_pylist() == [[("a", "1"), ("b", "2")], [], [], [("a", "")]]
    assert table["http_route"].to_pylist() == ["/x", None, "/y", None]
    assert table["server_port"].to_pylist() == ["", None, None, None]
    assert table["db_system"].null_count == 4
    assert table["host_name"].to_pylist() == ["h", None, "", None]
    assert table["service_instance_id"].to_pylist() == [None, None, None, "i"]
    assert [dict(row) for row in table["resource"].to_pylist()] == resources


@pytest.mark.parametrize("wrong", [None, {"http.route": 5}, {"a": 5}, {"http.route": "\ud800"}])
def test_attributes_that_do_not_fit_are_refused(wrong: Any) -> None:
    """Whether they have a column or not."""
    batch = spans([1], attributes=[wrong])
    with pytest.raises(BadRowsError):
        SpanTable(batch)


def test_events_come_back_as_they_went() -> None:
    """Numbers, truths, texts, lists and maps; what is not given is null."""
    convert = event_tables(builtin_catalog().source("Endpoint"))
    rows: list[dict[str, Any]] = [
        {"time": START, "name": "GET /", "latency": 5, "status": True, "tags": ["a:b"]},
        {"time": START + 1},
    ]
    back = convert([EventBatch(rows)]).to_pylist()
    assert [row["latency"] for row in back] == [5, None]
    assert [row["status"] for row in back] == [True, None]
    assert back[0]["tags"] == ["a:b"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"latency": "slow"},
        {"latency": 1.5},
        {"latency": True},
        {"latency": 1 << 40},
        {"status": 1},
        {"name": 5},
        {"name": "\ud800"},
        {"tags": "a"},
        {"time": 1 << 70},
        {"sideCar": {"nope": 1}},
        {"sideCar": 3},
    ],
    ids=str,
)
def test_a_row_that_does_not_fit_fails_alone(wrong: dict[str, Any]) -> None:
    """Others that were to share its segment do not suffer."""
    convert = event_tables(builtin_catalog().source("Endpoint"))
    good = {"time": START, "name": "GET /"}
    batches = [EventBatch([good]), EventBatch([{**good, **wrong}]), EventBatch([good])]
    converted = table_of("Endpoint", batches, convert)
    assert converted.table is not None
    assert (converted.table.num_rows, list(converted.errors)) == (2, [1])
    assert "docs/sources.md" in str(converted.errors[1])


def test_spans_that_do_not_fit_fail_alone(tmp_path: Path) -> None:
    """Be it through the whole spool: the others' futures are answered with their segment."""
    poison = [
        spans([2], name=["\ud800"]),
        spans([3], time=["noon"]),
        spans([4], resource=[[("a", "b")]]),
    ]
    with Spool(tmp_path, linger_s=60) as spool:
        futures = [spool.submit("Span", batch) for batch in (spans([1]), *poison, spans([5]))]
        assert spool.flush(WAIT_S)
        errors = [future.exception(WAIT_S) for future in futures]
        stats = spool.stats()
    assert [type(error) for error in errors] == [type(None), *[BadRowsError] * 3, type(None)]
    assert numbers_in([futures[0].result()]) == [1, 5]
    assert (stats.written_rows, stats.failed_rows) == (2, 3)


def test_a_segment_of_nothing_but_poison_is_not_written(tmp_path: Path) -> None:
    """There would be nothing in it."""
    with Spool(tmp_path, linger_s=0) as spool:
        error = spool.submit("Span", spans([1], time=["noon"])).exception(WAIT_S)
    assert isinstance(error, BadRowsError)
    assert list(tmp_path.rglob("*.parquet*")) == []


@pytest.mark.parametrize("calls", [1, 2])
def test_too_little_memory_is_not_the_rows_fault(calls: int) -> None:
    """Whoever sent them may send them again: they are not told that their rows are bad."""
    coming: list[Exception] = [ValueError("one of them is bad")] * (calls - 1)

    def convert(_: Any) -> Any:
        raise coming.pop() if coming else pa.ArrowMemoryError("malloc")

    with pytest.raises(MemoryError):
        table_of("Endpoint", [EventBatch([{}])], convert)


def _file(folder: Path, table: Any) -> Path:
    path = folder / "segment.parquet"
    path.write_bytes(encode(table))
    return path
