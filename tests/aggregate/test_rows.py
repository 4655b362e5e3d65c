"""Rows: which are invalid and why, nulls, filters, casts, and the Arrow types that are read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from batchmill import sources
from batchmill.aggregate import Aggregator, Deltas
from batchmill.aggregate.columns import log_buckets
from batchmill.errors import ConfigError
from batchmill.oal import LogBucketed, Tally, load
from batchmill.sources import Grain, builtin_catalog
from tests.aggregate.kit import Kernel, content
from tests.kit.pipelines import EVERY_FUNCTION, START, every_events, with_column
from tests.oracle.catalog import Row
from tests.oracle.generate import to_table
from tests.oracle.rows import parse_integer, passes
from tests.oracle.script import read_script

ENDPOINT = builtin_catalog().source("Endpoint")
TEXTS = ("0", "+5", "-4", "x", "", " 3", "3 ", "3\n", "2.5", "1e3", "٣", "+", "--1", "0x1f", "1_0")


NANOS = "internalRequestLatencyNanos"
NUMBERS = st.sampled_from((-(2**63), 0, 2**63 - 1))
FILTERS = (
    "status == true",
    "status != true",
    "status in [true]",
    "status == null",
    "latency > 9",
    "latency >= 2147483648",
    "latency < 99999999999",
    "latency != 99999999999",
    "latency == 4294967306",
    "httpResponseStatusCode in [200, 404, 99999999999]",
    f"sideCar.{NANOS} == 9223372036854775807",
    f"sideCar.{NANOS} < 9223372036854775807",
    f"sideCar.{NANOS} <= 0",
    f"sideCar.{NANOS} != null",
    "type == RequestType.HTTP",
    "type in [RequestType.HTTP, RequestType.gRPC]",
    'rpcStatusCode != "é"',
    'rpcStatusCode in ["", "💳"]',
    'name like "a%"',
    'name like "%s"',
    'name like "%/%"',
    'name like "%"',
    'name like "a"',
    'name like ""',
    'tags contain "é"',
    'tags not contain "é"',
    'tag["n"] == ""',
    'tag["k"] == null',
)


def endpoint(**fields: Any) -> Row:
    """A row of Endpoint."""
    return {"time": START, "name": "e", "serviceName": "s", "latency": 1, **fields}


def count(filter_: str, table: pa.Table) -> int:
    """How many rows of Endpoint pass a filter."""
    metrics = load(f"m = from(Endpoint.*).filter({filter_}).count();")
    deltas = Aggregator(ENDPOINT, metrics).make(table).deltas
    return sum(value for column in deltas.totals.values() for value in column.tolist())


def total(expression: str, table: pa.Table) -> Any:
    """The only state of a metric of rows of Endpoint in one bucket."""
    kernel = Kernel(f"m = from({expression};")
    deltas = kernel.aggregators["Endpoint"].make(table).deltas
    states = kernel.states({"Endpoint": deltas})
    return next(state for key, (state,) in states.items() if key[1] is Grain.DAY)


def same(one: Deltas, other: Deltas) -> bool:
    """Whether deltas hold the same."""
    return content(one) == content(other)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"time": None}, "no time"),
        ({"time": datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)}, "time before 1970"),
        ({"time": START + timedelta(microseconds=1)}, "time too far ahead"),
        ({"latency": None}, "no latency"),
        ({"time": None, "latency": None}, "no time"),
    ],
)
def test_invalid_rows_are_counted_by_reason(changed: dict[str, Any], reason: str) -> None:
    """A row counts under one reason, the first that applies; the valid rows are aggregated."""
    schema = ENDPOINT.arrow_schema()
    rows = [endpoint(), endpoint(**changed), endpoint(name="f"), endpoint(**changed)]
    aggregator = Aggregator(ENDPOINT, load("m = from(Endpoint.latency).sum();"))
    latest = int(START.timestamp() * 1_000_000)
    made = aggregator.make(pa.Table.from_pylist(rows, schema=schema), latest_us=latest)
    assert made.invalid == {reason: 2}
    assert same(made.deltas, aggregator.make(to_table("Endpoint", rows[::2])).deltas)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 2.0**62])
def test_doubles_that_cannot_be_summed_make_a_row_invalid(number: float) -> None:
    """Not a number, infinite, or larger than what is exact; inside a struct, too."""

    @dataclasses.dataclass(frozen=True)
    class Inner:
        value: float

    @dataclasses.dataclass(frozen=True)
    class Measured:
        name: str
        value: float | None
        inner: Inner | None

    sources.source(entity=sources.service("name"))(Measured)
    source = sources.source_of(Measured)
    events = [
        Measured("a", number, None),
        Measured("a", None, Inner(number)),
        Measured("a", 2.5, None),
    ]
    rows = [{**sources.row_of(event), "time": START} for event in events]
    oal = "a = from(Measured.value).sum(); b = from(Measured.inner.value).maxDouble();"
    made = Aggregator(source, load(oal)).make(
        pa.Table.from_pylist(rows, schema=source.arrow_schema())
    )
    assert made.invalid == {
        "value: not a finite number": 1,
        "inner.value: not a finite number": 1,
    }
    assert made.deltas.rows.tolist() == [1]


def test_a_batch_without_a_valid_row() -> None:
    """All are counted, and the deltas are empty."""
    kernel = Kernel(EVERY_FUNCTION)
    table = to_table("Endpoint", [endpoint()] * 3)
    for column in ("time", "latency"):
        made = kernel.aggregators["Endpoint"].make(table.drop_columns(column))
        assert made.invalid == {f"no {column}": 3}
        assert kernel.states({"Endpoint": made.deltas}) == {}


def test_an_entity_without_its_id_is_invalid() -> None:
    """Nothing says whose row it is."""
    source = builtin_catalog().source("ServiceInstanceJVMCPU")
    rows = [{"time": START, "id": id_, "usePercent": 1.0} for id_ in ("a", None)]
    table = pa.Table.from_pylist(rows, schema=source.arrow_schema())
    aggregator = Aggregator(source, load("m = from(ServiceInstanceJVMCPU.usePercent).sum();"))
    assert aggregator.make(table).invalid == {"no id": 1}
    assert aggregator.make(table.drop_columns("id")).invalid == {"no id": 2}


def test_null_roles_are_entities_of_their_own() -> None:
    """No name and an empty name are two groups of rows, and one entity of the store."""
    kernel = Kernel("m = from(Endpoint.*).count();")
    rows = [endpoint(name=name) for name in (None, "", "a", None)]
    deltas = kernel.make({"Endpoint": rows})
    assert len(deltas["Endpoint"]) == 3
    minutes = {key[3]: state for key, state in kernel.states(deltas).items()}
    assert sorted(minutes.values()) == [(1,), (3,)]


@given(
    names=st.lists(
        st.tuples(st.sampled_from((None, "", "a", "b")), st.sampled_from((None, "s"))),
        min_size=1,
        max_size=7,
    ),
    start=st.integers(0, 2),
    encoded=st.booleans(),
)
def test_rows_are_grouped_by_every_role(
    names: Sequence[tuple[str | None, str | None]], start: int, encoded: bool
) -> None:
    """Nulls among equal texts, columns of one text, slices, and dictionaries of any kind."""
    rows = [endpoint(name=name, serviceName=service) for name, service in names]
    table = to_table("Endpoint", rows)
    if encoded:
        indices = [
            ("b", "a", "", "a").index(name) if name is not None else None for name, _ in names
        ]
        twice = pa.DictionaryArray.from_arrays(
            pa.array(indices, pa.int8()), pa.array(["b", "a", "", "a"])
        )
        table = table.set_column(table.column_names.index("name"), "name", twice)
    aggregator = Kernel("m = from(Endpoint.*).count();").aggregators["Endpoint"]
    deltas = aggregator.make(table.slice(start)).deltas
    groups = zip(*(deltas.roles[place].to_pylist() for place in (2, 0)), strict=True)
    assert dict(zip(groups, deltas.rows.tolist(), strict=True)) == Counter(names[start:])


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_read_as_whole_numbers(text: str) -> None:
    """Only digits with a sign, as the oracle reads them."""
    table = to_table("Endpoint", [endpoint(tag={"n": text})])
    assert total('(str->long)Endpoint.tag["n"]).sum()', table) == parse_integer(text)


@pytest.mark.parametrize("bits", [32, 64])
def test_texts_beyond_the_range_are_null(bits: int) -> None:
    """The last number on both sides is read, and however many zeros are before it."""
    kind = {32: "int", 64: "long"}[bits]
    expression = f'(str->{kind})Endpoint.tag["n"]).sum()'
    last = 2 ** (bits - 1) - 1
    for text, number in (
        (str(last), last),
        (str(last + 1), None),
        (str(-last - 1), -last - 1),
        (str(-last - 2), None),
        ("0" * 9000 + str(last), last),
        ("9" * 9000, None),
    ):
        assert total(expression, to_table("Endpoint", [endpoint(tag={"n": text})])) == number


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "name": st.none() | st.text("a/%s", max_size=3),
                "latency": st.sampled_from((-(2**31), -1, 0, 10, 2**31 - 1)),
                "status": st.none() | st.booleans(),
                "httpResponseStatusCode": st.none() | st.sampled_from((-1, 0, 200, 404)),
                "rpcStatusCode": st.none() | st.sampled_from(("", "0", "é", "💳")),
                "type": st.none() | st.sampled_from(("HTTP", "RPC")),
                "tags": st.none() | st.lists(st.none() | st.sampled_from(("a", "é")), max_size=3),
                "tag": st.none() | st.dictionaries(st.sampled_from("nk"), st.text(max_size=2)),
                "sideCar": st.none() | st.fixed_dictionaries({NANOS: st.none() | NUMBERS}),
            }
        ),
        min_size=1,
        max_size=8,
    ),
    start=st.integers(0, 3),
)
def test_filters_mean_what_the_oracle_means(rows: Sequence[Row], start: int) -> None:
    """On nulls at every step, on limits of types, on dictionaries, and on a part of a table."""
    oal = "".join(
        f"m{n} = from(Endpoint.*).filter({filter_}).count();" for n, filter_ in enumerate(FILTERS)
    )
    given_rows = [endpoint(**row) for row in rows]
    aggregator = Aggregator(ENDPOINT, load(oal))
    table = to_table("Endpoint", given_rows).slice(start)
    place = table.column_names.index("name")
    encoded = table.set_column(place, "name", table["name"].dictionary_encode())
    for deltas in (aggregator.make(table).deltas, aggregator.make(encoded).deltas):
        for metric in read_script(oal):
            (column,) = aggregator.plan.cells[metric.name]
            wanted = sum(passes(row, metric.filters) for row in given_rows[start:])
            assert sum(deltas.totals[column].tolist()) == wanted, metric.filters


def test_labels_that_are_not_texts() -> None:
    """A whole number and a bool as a script writes them."""
    rows = [endpoint(status=status, latency=n) for n, status in enumerate((True, False, None))]
    table = to_table("Endpoint", rows)
    assert total("Endpoint.*).labelCount(status)", table) == {"true": 1, "false": 1}
    assert total("Endpoint.*).labelCount(latency)", table) == {"0": 1, "1": 1, "2": 1}
    assert total("Endpoint.*).labelAvg(status, latency)", table) == {
        "true": (0, 1),
        "false": (1, 1),
    }


def test_slices_chunks_and_dictionaries_are_read() -> None:
    """Whatever the buffers behind a table: the same rows give the same deltas."""
    rows = every_events(3, ["Endpoint"], 80)["Endpoint"]
    kernel = Kernel(EVERY_FUNCTION)
    aggregator = kernel.aggregators["Endpoint"]
    table = to_table("Endpoint", rows)
    whole = aggregator.make(table).deltas
    texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
    encoded = table
    for name in texts:
        place = table.column_names.index(name)
        encoded = encoded.set_column(place, name, table[name].dictionary_encode())
    chunks = pa.concat_tables([encoded.slice(0, 7), encoded.slice(7, 0), encoded.slice(7)])
    for same_rows in (encoded, chunks, table.to_batches()[0]):
        assert same(aggregator.make(same_rows).deltas, whole)
    around = pa.concat_tables([table.slice(50), table, table.slice(0, 9)]).combine_chunks()
    assert same(aggregator.make(around.slice(30, 80)).deltas, whole)
    for rows_given in (table, encoded):
        parts = [aggregator.make(rows_given.slice(start, 23)).deltas for start in range(0, 80, 23)]
        assert same(aggregator.merge(parts), whole)
    mixed = [aggregator.make(encoded.slice(0, 23)).deltas, aggregator.make(table.slice(23)).deltas]
    assert same(aggregator.merge(mixed), whole)


def test_values_below_null_structs_and_lists_do_not_count() -> None:
    """Arrow may keep values under a null; they are not there."""
    side = pa.array([5, 7], pa.int64())
    names = ["internalErrorCode", "internalRequestLatencyNanos", "internalResponseLatencyNanos"]
    text = pa.array(["x", "y"])
    structs = pa.StructArray.from_arrays([text, side, side], names, mask=pa.array([True, False]))
    table = with_column([endpoint()] * 2, "sideCar", structs, structs.type)
    assert total("Endpoint.sideCar.internalRequestLatencyNanos).sum()", table) == 7
    assert count("sideCar.internalRequestLatencyNanos == null", table) == 1
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 2, 3], pa.int32()),
        pa.array(["a", "b", "a"]),
        mask=pa.array([True, False, False]),
    )
    table = with_column([endpoint()] * 3, "tags", lists, lists.type)
    assert count('tags contain "a"', table) == 1
    assert count('tags not contain "a"', table) == 1


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("latency", [1, 2], pa.int8()),
        ("latency", [1, 2], pa.int64()),
        ("latency", [1, 2], pa.uint32()),
        ("name", ["a", "é"], pa.large_string()),
        ("name", ["a", "é"], pa.dictionary(pa.int8(), pa.large_string())),
        ("tags", [["a"], None], pa.large_list(pa.large_string())),
        ("tag", [[("n", "7")], []], pa.map_(pa.large_string(), pa.large_string())),
        ("rpcStatusCode", [None, None], pa.null()),
        (
            "sideCar",
            [{"internalErrorCode": "x"}, None],
            pa.struct([("internalErrorCode", pa.string())]),
        ),
        (
            "sideCar",
            [{"internalRequestLatencyNanos": 3}, None],
            pa.struct([("internalRequestLatencyNanos", pa.uint32())]),
        ),
    ],
    ids=str,
)
def test_other_types_of_the_same_values(name: str, values: list[Any], kind: pa.DataType) -> None:
    """Columns as common writers make them are read like those of the event type."""
    rows = [endpoint(), endpoint(name="/s")]
    aggregator = Kernel(EVERY_FUNCTION).aggregators["Endpoint"]
    made = aggregator.make(with_column(rows, name, values, kind))
    wanted_type = ENDPOINT.fields[name].type.arrow_type()
    wanted = aggregator.make(with_column(rows, name, values, wanted_type))
    assert made.invalid == wanted.invalid == {}
    assert same(made.deltas, wanted.deltas)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Kolkata"])
def test_starts_in_any_unit_and_zone(unit: str, zone: str | None) -> None:
    """The moment counts; one without a zone is in UTC."""
    start = int(START.timestamp()) * {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}[unit]
    table = with_column([endpoint()], "time", pa.array([start], pa.timestamp(unit, zone)), None)
    aggregator = Aggregator(ENDPOINT, load("m = from(Endpoint.*).count();"))
    assert aggregator.make(table).deltas.starts.tolist() == [START.timestamp() // 60]


def test_a_number_too_large_for_an_int_makes_a_row_invalid() -> None:
    """In a column of wider numbers, the rows that fit are counted."""
    table = with_column(
        [endpoint()] * 4, "latency", [2**31 - 1, 2**31, -(2**31), -(2**31) - 1], pa.int64()
    )
    aggregator = Aggregator(ENDPOINT, load("m = from(Endpoint.latency).sum();"))
    made = aggregator.make(table)
    assert made.invalid == {"latency: too large for an int": 2}
    assert [column.tolist() for column in made.deltas.totals.values()] == [[-1]]


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("latency", ["1"], pa.string()),
        ("latency", [1.0], pa.float64()),
        ("name", [b"a"], pa.binary()),
        ("status", [1], pa.int32()),
        ("time", ["now"], pa.string()),
    ],
)
def test_a_column_of_another_kind_is_refused(
    name: str, values: list[Any], kind: pa.DataType
) -> None:
    """The error names the column, and what it must be."""
    aggregator = Kernel(EVERY_FUNCTION).aggregators["Endpoint"]
    with pytest.raises(ConfigError, match=rf"column {name}: {kind}.*columns of Endpoint"):
        aggregator.make(with_column([endpoint()], name, values, kind))


def test_columns_that_no_metric_reads_are_ignored() -> None:
    """They may be missing, or of any type."""
    aggregator = Aggregator(ENDPOINT, load("m = from(Endpoint.latency).sum();"))
    table = to_table("Endpoint", [endpoint()])
    few = table.select(["time", "name", "serviceName", "serviceLayer", "latency"])
    odd = with_column([endpoint()], "tags", [7], pa.int8())
    assert same(aggregator.make(few).deltas, aggregator.make(table).deltas)
    assert same(aggregator.make(odd).deltas, aggregator.make(table).deltas)


def test_microseconds_come_from_milliseconds_where_rows_have_none() -> None:
    """Without the column, without a value in it, and with one that is larger than any time."""
    calls = builtin_catalog().source("GenAIModelAccess")
    script = "sum = from(GenAIModelAccess.latencyMicros).sum();"
    [metric] = load(script)
    most = (2**63 - 1) // 1000 * 1000

    def total(**columns: list[int | None]) -> Any:
        rows = len(columns["latency"])
        table = pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()})
        table = table.append_column("time", pa.array([START] * rows, pa.timestamp("us", "UTC")))
        made = Aggregator(calls, [metric]).make(table)
        assert not made.invalid
        upper, lower = (column.tolist() for column in made.deltas.totals.values())
        return (upper[0] << 32) + lower[0]

    assert total(latency=[3, 4]) == 7000
    assert total(latency=[3, 4], latencyMicros=[None, 4999]) == 7999
    assert total(latency=[2**62]) == most
    assert total(latency=[-(2**62)]) == -most


@given(st.lists(st.integers(-5, 2**63 - 1) | st.integers(0, 62).map(lambda n: 2**n - 1)))
def test_log_buckets_are_those_of_the_language(values: list[int]) -> None:
    """Also beyond what a float holds exactly."""
    [metric] = load("p = from(Service.latencyMicros).percentileLog();")
    [state] = metric.states
    assert isinstance(state, Tally)
    assert isinstance(state.key, LogBucketed)
    buckets = log_buckets(np.array(values, np.int64))
    assert buckets.tolist() == [state.key.of(value) for value in values]
