"""What attributes mean: every entry of the documented table, and spans of real clients."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from batchmill.spans.meaning import ADDRESSES, MEANINGS
from batchmill.spans.sources import direct_rows
from batchmill.spool import ATTRIBUTE_COLUMNS
from tests.kit.files import ROOT
from tests.kit.otlp import real_spans
from tests.kit.spark import in_order, span
from tests.oracle.spans import SpanEvents, destination_of, spans_to_events
from tests.spans.kit import compacted, rows_of, sorted_rows

Entry = tuple[str, ...]
"""An attribute, or a host's and its port's."""
PORT = "7"


class Sight(NamedTuple):
    """Where a meaning can be seen: the column that it changes, and two values that it can have."""

    column: str
    values: tuple[str, str]
    seen: tuple[Any, Any]
    kind: str = "CLIENT"
    beside: tuple[str, ...] = ()
    """Attributes that a span must have as well."""


TEXTS = ("first", "second")
PLACES = (f"first:{PORT}", f"second:{PORT}")
SIGHTS = {
    "peer": Sight("peer", TEXTS, TEXTS),
    "address": Sight("peer", TEXTS, PLACES),
    "namespace": Sight("store", TEXTS, TEXTS, beside=("db.system",)),
    "system": Sight("system", TEXTS, TEXTS),
    "operation": Sight("cache_operation", ("GET", "SET"), ("Read", "Write"), beside=("cache",)),
    "statement": Sight("statement", TEXTS, TEXTS, beside=("db.system",)),
    "messaging": Sight("broker", TEXTS, TEXTS, "PRODUCER"),
    "topic": Sight("broker_endpoint", TEXTS, TEXTS, "PRODUCER", ("messaging.system",)),
    "message operation": Sight(
        *("kind", ("receive", "process"), ("INTERNAL", "CONSUMER"), "CONSUMER"),
        ("messaging.system",),
    ),
    "HTTP": Sight("type", TEXTS, ("HTTP", "HTTP"), "SERVER"),
    "HTTP status": Sight("httpResponseStatusCode", ("200", "404"), (200, 404), "SERVER"),
    "RPC": Sight("type", TEXTS, ("RPC", "RPC"), "SERVER", ("http.route",)),
    "RPC status": Sight("rpcStatusCode", ("OK", "2"), ("OK", "2"), "SERVER"),
    "model call": Sight("type", TEXTS, ("GenAI", "GenAI"), "SERVER"),
    "provider": Sight("provider", TEXTS, TEXTS),
    "model": Sight("model", TEXTS, TEXTS),
    "input tokens": Sight("input_tokens", ("1", "2"), (1, 2), beside=("gen_ai.operation.name",)),
    "output tokens": Sight("output_tokens", ("1", "2"), (1, 2), beside=("gen_ai.operation.name",)),
}


def documented() -> dict[str, list[Entry]]:
    """The rows of the documentation: a meaning, and its attributes in their order."""
    page = (ROOT / "docs" / "sources.md").read_text("utf-8")
    section = page.partition("\n### Attributes\n")[2].partition("\n### ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {
        meaning.strip(): [tuple(re.findall(r"`([^`]+)`", entry)) for entry in keys.split(",")]
        for meaning, keys, _ in rows[2:]
    }


def attributes(entry: Entry, value: str) -> dict[str, str]:
    """What a client sends that says ``value`` with this entry."""
    if entry[0] in ("url.full", "http.url") and value in TEXTS:
        return {entry[0]: f"https://user:secret@{value}:{PORT}/path?x=http://other:1"}
    return {entry[0]: value, **dict.fromkeys(entry[1:], PORT)}


def cases(meaning: str, entries: list[Entry]) -> Iterator[tuple[dict[str, str], Any]]:
    """Attributes of spans, and what must be seen of them."""
    sight = SIGHTS[meaning]
    first, second = sight.values
    for place, entry in enumerate(entries):
        yield attributes(entry, first), sight.seen[0]
        for later in entries[place + 1 :]:
            yield attributes(later, second) | attributes(entry, first), sight.seen[0]
            blank = dict.fromkeys(entry, " \t")
            yield blank | attributes(later, second), sight.seen[1]


def test_the_table_is_what_the_code_reads() -> None:
    """Every meaning with its attributes, in the same order; each has a column of segments."""
    rows = documented()
    address = [tuple(key for key in entry if key) for entry in ADDRESSES]
    assert rows.pop("address") == address
    assert rows == {meaning: [(key,) for key in keys] for meaning, keys in MEANINGS.items()}
    named = {key for entry in address for key in entry}.union(*MEANINGS.values())
    assert named == set(ATTRIBUTE_COLUMNS)


def test_each_attribute_of_the_table_has_its_meaning() -> None:
    """Alone it gives the meaning; beside a later one it wins, and if it is blank, loses."""
    given = [
        (meaning, facts, seen)
        for meaning, entries in documented().items()
        for facts, seen in cases(meaning, entries)
    ]
    spans = []
    for number, (meaning, facts, _) in enumerate(given):
        sight = SIGHTS[meaning]
        beside = dict.fromkeys(sight.beside, "x")
        if beside.pop("cache", None):
            beside["db.system"] = "redis"
        spans.append(span(str(number), sight.kind, attributes=beside | facts))
    rows = {row["span_id"]: row for row in rows_of(compacted(spans))}
    assert len(rows) == len(given) > 150
    wrong = [
        (meaning, facts, rows[str(number)][SIGHTS[meaning].column], seen)
        for number, (meaning, facts, seen) in enumerate(given)
        if rows[str(number)][SIGHTS[meaning].column] != seen
    ]
    assert wrong == []


DIRECT = (
    *("Service", "ServiceInstance", "Endpoint", "DatabaseAccess", "CacheAccess"),
    *("GenAIProviderAccess", "GenAIModelAccess"),
)

URL = "http.url"
SAME_PLACE = {
    "shop.example:443": [
        {"server.address": "shop.example", "server.port": "443"},
        {"server.address": "shop.example", "url.full": "https://shop.example/cart"},
        {"net.peer.name": "shop.example", URL: "HTTPS://shop.example"},
        {URL: "https://shop.example?next=http://x:1/"},
        {URL: "https://me:p@ss@shop.example#top"},
        {"url.full": "/cart", URL: "https://shop.example:443/cart"},
        {URL: "https://shop.example:/", "net.sock.peer.addr": "10.0.0.7"},
    ],
    "[::1]:8080": [
        {"server.address": "::1", "server.port": "8080"},
        {URL: "http://[::1]:8080/"},
        {"net.peer.ip": "::1", "net.peer.port": "8080"},
    ],
    "cache:6379": [
        {"server.address": "cache", "server.port": "6379", "network.peer.address": "10.0.0.7"},
        {"network.peer.address": "cache", "network.peer.port": "6379"},
        {"url.full": "redis://:secret@cache:6379/0", "net.sock.peer.name": "other"},
    ],
    "db": [{"server.address": "db"}, {"url.full": "postgresql://db/shop"}, {"net.peer.name": "db"}],
    None: [{"server.port": "1"}, {"url.full": "file:///x"}, {URL: "nonsense"}, {URL: "http://"}],
}


def test_a_place_has_one_name_however_it_is_written() -> None:
    """Old and new attributes, URLs with and without a port, user or path, IPv6."""
    written = [(name, facts) for name, all_facts in SAME_PLACE.items() for facts in all_facts]
    spans = [span(str(n), "CLIENT", attributes=facts) for n, (_, facts) in enumerate(written)]
    rows = {row["span_id"]: row["peer"] for row in rows_of(compacted(spans))}
    assert [rows[str(n)] for n in range(len(written))] == [name for name, _ in written]
    assert [destination_of(facts) for _, facts in written] == [name for name, _ in written]


@pytest.fixture(scope="module")
def seen() -> SpanEvents:
    """What the oracle makes of the spans of real clients."""
    return spans_to_events(real_spans())


def test_spans_of_real_clients_equal_the_oracle(seen: SpanEvents) -> None:
    """Every row of every event type that takes one span."""
    actual = direct_rows(compacted(real_spans()), DIRECT)
    assert actual.keys() == {source for source in DIRECT if seen.events.get(source)}
    for source, table in actual.items():
        wanted = [{name: row[name] for name in table.column_names} for row in seen.events[source]]
        assert sorted_rows(table) == in_order(wanted), source


def test_the_map_of_real_clients(seen: SpanEvents) -> None:
    """PostgreSQL, Redis, Kafka and HTTP servers of one machine are nodes of their own."""
    calls = Counter(
        (row["sourceServiceName"], row["destServiceName"], row["destLayer"])
        for row in seen.events["ServiceRelation"]
        if row["detectPoint"] == "CLIENT"
    )
    assert calls == {
        ("go-map", "go-map", "GENERAL"): 2,
        ("java-map", "kafka", "VIRTUAL_MQ"): 2,
        ("java-map", "node-map", "GENERAL"): 2,
        ("java-map", "orders", "VIRTUAL_DATABASE"): 7,
        # The Java agents alone were told what PostgreSQL is called.
        ("java-map", "orders-db", "VIRTUAL_DATABASE"): 2,
        ("java-recv", "kafka", "VIRTUAL_MQ"): 2,
        ("java-recv", "orders", "VIRTUAL_DATABASE"): 5,
        ("java-recv", "orders-db", "VIRTUAL_DATABASE"): 2,
        ("node-map", "127.0.0.1:25432", "VIRTUAL_DATABASE"): 2,
        ("node-map", "127.0.0.1:26379", "VIRTUAL_CACHE"): 4,
        ("node-map", "py-map", "GENERAL"): 4,
        ("py-ext-new", "localhost:7109", "UNDEFINED"): 2,
        ("py-ext-old", "localhost:7109", "UNDEFINED"): 2,
        ("py-map", "127.0.0.1:25432", "VIRTUAL_DATABASE"): 2,
        ("py-map", "go-map", "GENERAL"): 2,
        ("py-map", "sqlite", "VIRTUAL_DATABASE"): 6,
        ("tg-grpc_gzip", "tg-grpc_gzip", "GENERAL"): 6,
    }
    stores = {source: Counter[str]() for source in ("DatabaseAccess", "CacheAccess")}
    for source, names in stores.items():
        names.update(row["name"] for row in seen.events[source])
    virtual = Counter({dest: 0 for _, dest, _ in calls})
    for (_, dest, layer), count in calls.items():
        virtual[dest] += count if layer in ("VIRTUAL_DATABASE", "VIRTUAL_CACHE") else 0
    assert +virtual == stores["DatabaseAccess"] + stores["CacheAccess"]
    # Only the lookup of a name, which has no address of a server.
    assert seen.counters == {
        "unresolved_parent": 0,
        "unresolved_destination": 1,
        "unresolved": 1,
    }


def test_messages_of_real_clients_count_once(seen: SpanEvents) -> None:
    """Four messages to six consumers, two of them with a span for receiving as well."""
    messages = Counter(
        (row["name"], row["operation"], row["transmissionLatency"])
        for row in seen.events["MQAccess"]
    )
    assert messages == {
        ("kafka", "Produce", 0): 4,
        ("kafka", "Consume", 7): 1,
        ("kafka", "Consume", 14): 1,
        ("kafka", "Consume", 65): 1,
        ("kafka", "Consume", 524): 1,
        ("kafka", "Consume", None): 2,
    }
    consumed = [row for row in seen.events["Endpoint"] if row["type"] == "MQ"]
    assert len(consumed) == 6
