"""Deltas as Arrow tables: what is refused, and why; how much memory they take."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

import pyarrow as pa

from batchmill import sources
from batchmill.aggregate import Aggregator, DeltasError, SourcePlan, from_arrow, is_deltas, to_arrow
from batchmill.oal import load
from batchmill.sources import Field, FieldType, Grain, SourceType, builtin_catalog
from tests.aggregate.kit import content
from tests.kit.pipelines import START, endpoint_events
from tests.oracle.generate import to_table

ENDPOINT = builtin_catalog().source("Endpoint")
OAL = """
cpm = from(Endpoint.*).cpm();
p = from(Endpoint.latency).percentile2(10);
apdex = from(Endpoint.latency).apdex(serviceName, status);
"""


def plan(oal: str = OAL, source: SourceType = ENDPOINT, **settings: Any) -> SourcePlan:
    """The plan of a script of one source."""
    return Aggregator(source, load(oal), **settings).plan


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """Deltas of twenty rows."""
    aggregator = Aggregator(ENDPOINT, load(OAL))
    return to_arrow(
        aggregator.make(to_table("Endpoint", endpoint_events(20))).deltas, aggregator.plan
    )


def reason(table: pa.Table, own: SourcePlan) -> str:
    """Why deltas are refused."""
    with pytest.raises(DeltasError) as raised:
        from_arrow(table, own)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert "the same version, script and settings" in str(raised.value)
    return raised.value.reason


def test_a_table_says_whether_it_holds_deltas(table: pa.Table) -> None:
    """By its schema, which a file keeps."""
    assert is_deltas(table.schema)
    assert not is_deltas(to_table("Endpoint", endpoint_events(1)).schema)
    assert not is_deltas(pa.schema([("a", pa.int8())], metadata={"other": "x"}))


def test_the_metric_that_differs_is_named(table: pa.Table) -> None:
    """Another definition, one that is missing here, and one that is missing there."""
    other = OAL.replace("percentile2(10)", "percentile2(5)").replace("cpm =", "rate =")
    assert reason(table, plan(other)) == (
        "cpm: from(Endpoint.*).cpm(), here not defined; "
        "p: from(Endpoint.latency).percentile2(10), here from(Endpoint.latency).percentile2(5); "
        "rate: not defined, here from(Endpoint.*).cpm()"
    )


def test_the_order_and_spelling_of_a_script_do_not_matter(table: pa.Table) -> None:
    """The same metrics in other words give the same deltas."""
    lines = OAL.strip().replace("percentile2(10)", "percentile2( 10 )").splitlines()
    read = from_arrow(table, plan("\n".join(reversed(lines))))
    assert content(read) == content(from_arrow(table, plan()))


def test_other_apdex_thresholds_are_refused(table: pa.Table) -> None:
    """They are in the counts already; without an apdex they make no difference."""
    assert "apdex thresholds {}, here {'orders': 100}" in reason(
        table, plan(apdex_ms={"orders": 100})
    )
    oal = "cpm = from(Endpoint.*).cpm();"
    aggregator = Aggregator(ENDPOINT, load(oal), apdex_ms={"orders": 100})
    made = aggregator.make(to_table("Endpoint", endpoint_events(5))).deltas
    read = from_arrow(to_arrow(made, aggregator.plan), plan(oal))
    assert content(read) == content(made)


def test_other_tables_and_versions_are_refused(table: pa.Table) -> None:
    """Rows, deltas of another source, and deltas of another version."""
    assert reason(to_table("Endpoint", endpoint_events(1)), plan()) == "these are no deltas"
    service = builtin_catalog().source("Service")
    other = plan("m = from(Service.*).cpm();", service)
    assert reason(table, other) == "they are of Endpoint"
    ((key, text),) = table.schema.metadata.items()
    newer = table.replace_schema_metadata({key: text.replace(b'"format": 1', b'"format": 9')})
    assert "format 9" in reason(newer, plan())


def test_fields_of_another_type_are_refused() -> None:
    """The same script over an event type that was defined in another way."""

    def aggregator(role: str, kind: FieldType) -> Aggregator:
        fields = [Field("shop", FieldType("string")), Field("till", FieldType("string"))]
        source = SourceType(
            "Weighed",
            {field.name: field for field in (*fields, Field("weight", kind))},
            sources.service(role),
        )
        catalog = builtin_catalog().with_source(source)
        return Aggregator(source, load("m = from(Weighed.weight).sum();", catalog))

    own = aggregator("shop", FieldType("long"))
    rows = pa.table({"time": pa.array([START]), "shop": ["a"], "weight": [7]})
    table = to_arrow(own.make(rows).deltas, own.plan)
    assert content(from_arrow(table, own.plan)) == content(own.make(rows).deltas)
    double = aggregator("shop", FieldType("double")).plan
    assert reason(table, double) == "field weight: long, here double"
    till = aggregator("till", FieldType("long")).plan
    assert reason(table, till) == "entities by ['shop'], here by ['till']"


def test_the_grain_travels_with_the_deltas(table: pa.Table) -> None:
    """Hours that were rolled up elsewhere are hours here."""
    aggregator = Aggregator(ENDPOINT, load(OAL))
    hours = aggregator.roll_up(from_arrow(table, aggregator.plan), Grain.HOUR)
    read = from_arrow(to_arrow(hours, aggregator.plan), aggregator.plan)
    assert read.grain is Grain.HOUR
    assert content(read) == content(hours)


def test_memory_is_that_of_the_columns() -> None:
    """nbytes grows with entities and keys, and not with the rows that they were made of."""
    aggregator = Aggregator(ENDPOINT, load(OAL))
    table = to_table("Endpoint", endpoint_events(50))
    once = aggregator.make(table).deltas
    often = aggregator.make(pa.concat_tables([table] * 20)).deltas
    assert often.nbytes <= 1.1 * once.nbytes
    assert aggregator.make(table.slice(0, 5)).deltas.nbytes < once.nbytes / 2
