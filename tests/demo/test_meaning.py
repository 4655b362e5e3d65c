"""What a pipeline sees of the simulated shop, by the oracle: every source that spans can give."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from batchmill.demo import INSTANCES, Step, plan
from batchmill.spans import KnownHosts, compact, link
from batchmill.spool import SPAN_COLUMNS, SpanBatch, span_table
from tests.oracle.spans import SpanEvents, spans_to_events
from tests.oracle.topn import expected_topn

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def spans() -> Rows:
    """The spans of a minute of the shop, as they are spooled."""
    rows: Rows = []

    def write(step: Step, trace: int, parent: str | None, begin: datetime) -> None:
        span_id = f"{len(rows) + 1:016x}"
        rows.append(
            {
                "trace_id": f"{trace + 1:032x}",
                "span_id": span_id,
                "parent_span_id": parent,
                "name": step.name,
                "kind": step.kind,
                "time": begin + timedelta(microseconds=step.start_us),
                "end_time": begin + timedelta(microseconds=step.end_us),
                "status": "ERROR" if step.error else "UNSET",
                "service": step.service,
                "resource": {"service.instance.id": step.instance},
                "attributes": {key: str(value) for key, value in step.attributes},
            }
        )
        for child in step.children:
            write(child, trace, span_id, begin)

    midnight = datetime(2026, 1, 1, tzinfo=UTC)
    for request in plan(7, 20, 60):
        write(
            request.root, request.index, None, midnight + timedelta(microseconds=request.offset_us)
        )
    return rows


@pytest.fixture(scope="module")
def seen(spans: Rows) -> SpanEvents:
    """What the oracle makes of them."""
    return spans_to_events(spans)


def test_every_source_of_spans_appears(seen: SpanEvents) -> None:
    """Services, instances, endpoints, relations, databases, cache and queue all have rows."""
    assert {
        *("Service", "ServiceInstance", "Endpoint"),
        *("ServiceRelation", "ServiceInstanceRelation", "EndpointRelation"),
        *("DatabaseAccess", "CacheAccess", "MQAccess", "MQEndpointAccess"),
    } <= set(seen.events)
    assert {row["name"] for row in seen.events["Service"]} == set(INSTANCES)
    assert {row["type"] for row in seen.events["Service"]} == {"HTTP", "RPC", "MQ"}
    assert {row["operation"] for row in seen.events["CacheAccess"]} == {"Read", "Write"}
    assert {row["operation"] for row in seen.events["MQAccess"]} == {"Produce", "Consume"}
    assert {row["status"] for row in seen.events["Service"]} == {True, False}


def test_nothing_stays_unresolved(seen: SpanEvents) -> None:
    """Every parent is there, and every call says where it went."""
    assert seen.counters["unresolved"] == 0


def test_relations_show_the_map_of_the_shop(seen: SpanEvents) -> None:
    """Who calls whom, visitors and what sends no spans included."""
    pairs = {
        (row["sourceServiceName"], row["destServiceName"]) for row in seen.events["ServiceRelation"]
    }
    assert {
        ("User", "gateway"),
        ("gateway", "web"),
        ("web", "catalogue"),
        ("web", "cart"),
        ("web", "checkout"),
        ("checkout", "cart"),
        ("checkout", "payment"),
        ("checkout", "shipping"),
        ("checkout", "mail"),
        ("checkout", "kafka.shop:9092"),
        ("payment", "bank.example:443"),
        ("catalogue", "products-db.shop:5432"),
        ("shipping", "parcels-db.shop:3306"),
        ("gateway", "redis.shop:6379"),
    } <= pairs


def test_servers_outside_are_on_the_map_at_once(spans: Rows) -> None:
    """The bank and the mail relay send no spans, and a demo is over before a call has waited."""
    segment = span_table(SpanBatch({name: [row[name] for row in spans] for name in SPAN_COLUMNS}))
    relations = link(compact(segment), None, 1, hosts=KnownHosts()).relations.to_pylist()
    pairs = {(row["sourceService"], row["destService"]) for row in relations}
    assert {("payment", "bank.example:443"), ("mail", "relay.example:443")} <= pairs


def test_slow_statements_have_records(spans: Rows) -> None:
    """Above the default thresholds there are statements of databases, and commands of the cache."""
    streams = {key[0] for key in expected_topn(spans)}
    assert {
        "top_n_database_statement",
        "top_n_service_database_statement",
        "top_n_cache_read_command",
    } <= streams
