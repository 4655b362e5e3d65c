"""The columns that spans are reduced to: against the oracle's meaning of a span, and by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.spans.columns import STATEMENT_LIMIT, calls, compact, serves
from batchmill.spans.meaning import ADDRESSES
from batchmill.spans.texts import WHITESPACE
from batchmill.spool import ATTRIBUTE_COLUMNS
from tests.kit.spark import span
from tests.oracle import spans as oracle
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans
from tests.spans.kit import compacted, encoded, rows_of, segment

TEXT = pa.dictionary(pa.int32(), pa.string())
MAP = pa.map_(pa.string(), pa.string())
SCHEMA = {
    **dict.fromkeys(("trace_id", "span_id", "parent_span_id"), pa.string()),
    **dict.fromkeys(("name", "kind"), TEXT),
    "time": pa.timestamp("us", tz="UTC"),
    "latency": pa.int32(),
    "latencyMicros": pa.int64(),
    "status": pa.bool_(),
    **dict.fromkeys(("service", "instance", "type"), TEXT),
    "httpResponseStatusCode": pa.int32(),
    "rpcStatusCode": TEXT,
    "tags": pa.list_(pa.string()),
    "tag": MAP,
    **dict.fromkeys(("peer", "peer_layer", "store", "system", "cache_operation"), TEXT),
    **dict.fromkeys(("statement", "broker", "broker_endpoint", "provider", "model"), TEXT),
    **dict.fromkeys(("input_tokens", "output_tokens"), pa.int64()),
}

# Nothing that the oracle reads in its own way, such as white space that is not of ASCII.
KINDS = ("SERVER", "CLIENT", "PRODUCER", "CONSUMER", "INTERNAL", "?", None)
NAMES = ("GET /", "pg-pool.connect", "reconnect", "carpool", "set x", "hget k", "é connection")
WORDS = (
    *("", " \t", "\u3000", "x", "\xa0x", "redis", "Memcached", "pg", "kafka", "RECEIVE", "Poll"),
    *("send", "Publish", "process", "GET k", "  del k", "connect", " CONNECT ", "SELECT 1"),
    *("200", "+12", "-7", "0012", "2147483648", "9223372036854775808", "1.5", " 3", "3\n", "x" * 9),
    "é" * (STATEMENT_LIMIT + 1),
)
HOSTS = ("shop", "::1", "[::1]", "a:b", " ")
URLS = (
    *("http://shop/x", "HTTPS://u:p@shop?q=a://b:1", "https://[::1]/", "http://[::1]:81", "/cart"),
    *("redis://:secret@cache:6379/0", "redis://cache", "file:///x", "http://é:7", " ", "http://"),
)
KEYS = (*ATTRIBUTE_COLUMNS, "other", "größe")
URL_KEYS = tuple(key for key, port in ADDRESSES if port is None)
HOST_KEYS = tuple(key for key, port in ADDRESSES if port is not None)
PORT_KEYS = tuple(port for _, port in ADDRESSES if port is not None)


class Spans:
    """Spans with any of the attributes that have a meaning; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def span(self) -> Row:
        """One of them."""
        rng = self._rng
        attributes = self._some(KEYS, WORDS, 6)
        attributes |= self._some(HOST_KEYS, HOSTS, 2)
        attributes |= self._some(PORT_KEYS, ("8080", " "), 2)
        attributes |= self._some(URL_KEYS, URLS, 2)
        made = span(
            "s",
            name=rng.choice(NAMES),
            us=rng.choice((-3, 0, 999, 1000, 2_500_000)),
            status=rng.choice(("OK", "ERROR", "UNSET", None)),
            service=rng.choice((None, "shop", " ", "\u2003a")),
            parent_span_id=rng.choice((None, "", "p")),
            resource=self._some(("service.instance.id", "host.name"), WORDS, 2),
            attributes=attributes,
        )
        return made | {"kind": rng.choice(KINDS)}

    def _some(self, keys: Sequence[str], values: Sequence[str], most: int) -> dict[str, str]:
        rng = self._rng
        return {key: rng.choice(values) for key in rng.sample(keys, rng.randint(0, most))}


def meaning(row: Row) -> dict[str, Any]:
    """The columns of a span, from what the oracle knows of it."""
    attributes, kind = oracle.attributes_of(row), oracle.kind_of(row)
    is_serving, is_calling = kind in oracle.ENTRY_KINDS, kind in oracle.EXIT_KINDS
    destination = oracle.destination_of(attributes)
    in_store, is_message = oracle.is_database_call(row), oracle.is_message(row)
    virtual: dict[str, list[Row]] = {}
    for source, virtual_row in oracle._virtual_rows(row, None):
        virtual.setdefault(source, []).append(virtual_row)
    peers = dict(oracle._peer_rows(row)) if is_calling else {}
    (cached,) = virtual.get("CacheAccess", [{}])
    (queued,) = virtual.get("MQEndpointAccess", [{}])
    (model_access,) = virtual.get("GenAIModelAccess", [{}])
    return {
        **{name: row[name] or None for name in ("trace_id", "span_id", "parent_span_id")},
        "name": row["name"],
        "kind": kind,
        "time": row["time"],
        **oracle._outcome(row),
        "service": oracle.service_of(row),
        "instance": oracle.instance_of(row),
        "tags": [f"{key}:{attributes[key]}" for key in sorted(attributes)] if is_serving else None,
        "tag": attributes if is_serving else None,
        "peer": destination if is_calling else None,
        "peer_layer": peers["ServiceRelation"]["destLayer"] if peers else None,
        "store": destination if in_store else None,
        "system": oracle.first(attributes, *oracle.DATABASE_KEYS) if in_store else None,
        "cache_operation": cached.get("operation"),
        "statement": oracle.statement_of(row)[:STATEMENT_LIMIT] if in_store else None,
        "broker": destination if is_message else None,
        "broker_endpoint": queued.get("endpoint"),
        "provider": model_access.get("serviceName"),
        "model": model_access.get("modelName"),
        "input_tokens": model_access.get("inputTokens"),
        "output_tokens": model_access.get("outputTokens"),
    }


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 400))
def test_columns_of_any_spans_equal_the_oracle(seed: int, chunks: int, count: int) -> None:
    """Whatever attributes they have, and however their columns are stored."""
    made = Spans(seed)
    spans = [made.span() for _ in range(count)]
    table = segment(spans)
    rows = rows_of(compact(encoded(table, chunks) if chunks else table))
    for row, given_span in zip(rows, spans, strict=True):
        assert row == meaning(given_span), given_span


def test_columns_of_random_traces_equal_the_oracle() -> None:
    """Traces that look like those of real services."""
    spans = random_spans(11, 2000)
    assert rows_of(compacted(spans)) == [meaning(row) for row in spans]


def test_the_columns_are_always_the_same() -> None:
    """Of these types, in this order and in one piece; also without rows, or without texts."""
    for spans in ([], [span("a")], [span("a", "CLIENT", name=None)] * 3):
        table = compacted(spans)
        assert table.column_names == list(SCHEMA)
        assert dict(zip(table.column_names, table.schema.types, strict=True)) == SCHEMA
        assert {column.num_chunks for column in table.columns} == {1}


def test_a_dictionary_has_each_text_once() -> None:
    """Also where texts of several columns meet, are cut, or come twice in a dictionary."""
    long = "x" * STATEMENT_LIMIT
    facts = (
        {"db.statement": f"{long}1"},
        {"db.query.text": f"{long}2"},
        {"server.address": "pg", "server.port": "1"},
        {"peer.service": "pg:1"},
    )
    table = segment(
        span(str(number), "CLIENT", name=long, attributes={"db.system": "pg"} | fact)
        for number, fact in enumerate(facts)
    )
    twice = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 0]), ["shop", "shop", None])
    table = table.set_column(table.schema.get_field_index("service"), "service", twice)
    made = compact(table)
    for name in ("statement", "peer", "store", "service"):
        values = made[name].chunk(0).dictionary.to_pylist()
        assert len(values) == len(set(values)), name
    assert made["statement"].to_pylist() == [long] * 4
    assert made["peer"].to_pylist() == ["pg", "pg", "pg:1", "pg:1"]
    assert made["service"].to_pylist() == ["shop", "shop", "unknown_service", "shop"]


def test_a_code_of_rpc_has_at_most_64_characters() -> None:
    """A longer one is cut: metrics keep codes, and a batch would have them once for each text."""
    codes = ["OK", "x" * 64, "ü" * 64 + "1", "ü" * 64 + "2"]
    spans = [span(code, attributes={"rpc.grpc.status_code": code}) for code in codes]
    table = compacted(spans)
    assert table["rpcStatusCode"].to_pylist() == ["OK", "x" * 64, "ü" * 64, "ü" * 64]
    assert len(table["rpcStatusCode"].chunk(0).dictionary) == 3
    assert rows_of(table) == [meaning(row) for row in spans]


def test_many_distinct_texts() -> None:
    """Those that no span has any more, because its kind has no such column, are dropped."""
    count = 500
    spans = [
        span(
            str(number),
            ("SERVER", "CLIENT", "INTERNAL")[number % 3],
            attributes={"db.system": "pg", "db.statement": f"select {number}"},
        )
        for number in range(count)
    ]
    table = compacted(spans)
    wanted = [f"select {number}" if number % 3 == 1 else None for number in range(count)]
    assert table["statement"].to_pylist() == wanted
    assert len(table["statement"].chunk(0).dictionary) == sum(text is not None for text in wanted)


@pytest.mark.parametrize("character", [*WHITESPACE, "\u200b", "\x00", "\x7f", "\u180e", "x"])
def test_blank_is_what_python_strips(character: str) -> None:
    """A name of nothing else is none."""
    (row,) = rows_of(compacted([span("a", service=character * 2)]))
    assert row["service"] == (character * 2 if (character * 2).strip() else "unknown_service")


def test_durations_that_do_not_fit_are_the_longest() -> None:
    """An int has milliseconds up to 24 days; a clock that went back gives 0."""
    spans = [span("a", us=us) for us in (-1, 1999, 2147483646999, 2147483647999, 2**52)]
    table = compacted(spans)
    assert table["latency"].to_pylist() == [0, 1, 2147483646, 2147483647, 2147483647]
    assert table["latencyMicros"].to_pylist() == [
        *(0, 1999, 2147483646999, 2147483647999, 2147483647999),
    ]


COMMANDS = {
    "\x0b get\x0bk": "Read",
    "\xa0get k": "Others",
    "ﬆrlen k": "Read",
    "\u017fet k": "Write",
    "\x1fget": "Others",
    "get": "Read",
    "\u3000": "Others",
}


def test_a_command_ends_at_white_space_of_ascii() -> None:
    """And it may be written in letters whose capital ones are those of a command."""
    spans = [
        span(text, "CLIENT", name=text, attributes={"db.system": "redis"}) for text in COMMANDS
    ]
    rows = rows_of(compacted(spans))
    assert {row["span_id"]: row["cache_operation"] for row in rows} == COMMANDS


HTTP = {"http.route": "/a", "a.b": "1", "z": " ", "größe": "x"}


@pytest.mark.parametrize(
    ("keys", "attributes", "tag"),
    [
        (None, HTTP, HTTP),
        (None, {}, {}),
        ((), HTTP, None),
        (("a.b",), HTTP, {"a.b": "1"}),
        (("http.route", "z"), HTTP, {"http.route": "/a", "z": " "}),
        (("absent", "größe"), HTTP, {"absent": None, "größe": "x"}),
        (("absent", "http.url"), HTTP, None),
    ],
)
def test_tags_have_the_keys_that_are_asked_for(
    keys: tuple[str, ...] | None, attributes: dict[str, str], tag: dict[str, str | None] | None
) -> None:
    """Null where a span has none of them, or does not serve."""
    spans = [
        span("bare"),
        span("call", "CLIENT", attributes=attributes),
        span("served", attributes=attributes),
        span("received", "CONSUMER", attributes=attributes | {"messaging.operation": "receive"}),
    ]
    rows = {row["span_id"]: row for row in rows_of(compacted(spans, keys=keys))}
    assert rows["served"]["tag"] == tag
    tags = None if tag is None else [f"{key}:{tag[key] or ''}" for key in sorted(tag)]
    assert rows["served"]["tags"] == tags
    assert rows["bare"]["tag"] == ({} if keys is None else None)
    assert rows["call"]["tag"] is rows["received"]["tags"] is None


def test_tags_of_a_part_of_a_table() -> None:
    """A slice of a larger table, with attributes that are null, repeated, or in a column, too."""
    attributes = pa.array(
        [[("a", "0")], None, [("a", "1"), ("b", "2"), ("a", "3")], [("http.route", "old")], []], MAP
    )
    table = segment(span(str(number), attributes={"http.route": "/"}) for number in range(5))
    table = table.set_column(table.schema.get_field_index("attributes"), "attributes", attributes)
    rows = rows_of(compact(table.slice(1)))
    assert [row["tags"] for row in rows] == [
        *(["http.route:/"], ["a:3", "b:2", "http.route:/"], ["http.route:/"]),
        ["http.route:/"],
    ]
    rows = rows_of(compact(table.slice(1), keys=("a",)))
    assert [row["tags"] for row in rows] == [None, ["a:1"], None, None]


def test_maps_are_not_needed_for_well_known_keys() -> None:
    """A batch is read without its maps where nothing else is asked for."""
    table = segment([span("a", attributes=HTTP)]).drop_columns(["attributes", "resource"])
    assert compact(table, keys=())["tags"].to_pylist() == [None]
    assert compact(table, keys=("http.route",))["tags"].to_pylist() == [["http.route:/a"]]


def test_who_serves_and_who_calls() -> None:
    """By the kind that a span has in the end."""
    table = compacted(span(str(kind), kind) for kind in KINDS if kind)
    np.testing.assert_array_equal(serves(table), [True, False, False, True, False, False])
    np.testing.assert_array_equal(calls(table), [False, True, True, False, False, False])


@pytest.mark.parametrize("system", ["postgresql", "redis", "Kafka"])
def test_the_usual_port_may_be_left_out(system: str) -> None:
    """A database, a cache or a broker has one name, whether or not a client tells its port."""
    ports = {"postgresql": "5432", "redis": "6379", "Kafka": "9092"}
    key = "messaging.system" if system == "Kafka" else "db.system.name"
    with_port = {"server.address": "orders", "server.port": ports[system], key: system}
    spans = [
        span(str(number), "CLIENT", attributes=attributes)
        for number, attributes in enumerate((with_port, {key: system, "server.address": "orders"}))
    ]
    places = compacted(spans)["peer"].to_pylist()
    assert places == [f"orders:{ports[system]}"] * 2
