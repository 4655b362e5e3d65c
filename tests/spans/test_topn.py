"""The slowest statements, and how often each ran."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill import ConfigError
from batchmill.aggregate import SlowThresholds, TopNThresholds, normalise
from batchmill.sources import service_id
from batchmill.spans.ids import hash64, part_of
from batchmill.spans.topn import (
    RECORD_SCHEMA,
    STATEMENT_SCHEMA,
    merge_statements,
    merge_topn,
    statement_stats,
    topn_records,
)
from tests.kit.spark import in_order, span
from tests.oracle.generate import random_spans
from tests.oracle.topn import Record, Runs, TopN, TopNKey, expected_topn
from tests.spans.tables import compacted, in_chunks, without_dictionaries

MINUTE = 202603011200
PG = {"db.system": "postgresql", "server.address": "db"}
MONGO = {"db.system": "x", "db.system.name": "mongodb", "peer.service": "docs"}
REDIS = {"db.system": "redis", "peer.service": "kv"}
MEMCACHED = {"db.system": "memcached", "peer.service": "mem"}


def ran(ms: int, facts: dict[str, str], text: str | None = None, **changes: Any) -> dict[str, Any]:
    """A statement that ran for so many milliseconds."""
    attributes = facts | ({} if text is None else {"db.query.text": text})
    changes.setdefault("us", ms * 1000)
    return span(changes.pop("id", "s"), "CLIENT", attributes=attributes, **changes)


def test_statements_above_the_threshold_of_their_system_are_records() -> None:
    """Each stream with its entity; exactly at the threshold is not slow."""
    spans = [
        ran(201, PG, "select 1"),
        ran(200, PG, "fast"),
        ran(0, PG, "barely", us=200_999),
        ran(101, MONGO, "find"),
        ran(100, MONGO, "fast"),
        ran(102, MONGO | {"db.system.name": "MongoDB"}, "find all"),
        ran(11, REDIS, "GET a", service="cart"),
        ran(10, REDIS, "GET b"),
        ran(12, REDIS, None, name="SET x", trace_id=None, id=None),
        ran(13, REDIS | {"db.system": "Redis"}, "GET c"),
        ran(99, REDIS, "PING"),
        ran(21, MEMCACHED, "gets 5"),
        ran(20, MEMCACHED, "gets 5"),
        ran(999, PG, "old" * 1000, at=-1),
        ran(999, {"db.system": "postgresql"}, "a producer's") | {"kind": "PRODUCER"},
    ]
    limits = TopNThresholds(
        database=SlowThresholds.parse("default:200,mongodb:100"),
        cache=SlowThresholds.parse(" REDIS: 10 , default:20"),
    )
    table = topn_records(compacted(spans), 50, limits)
    assert table.schema == RECORD_SCHEMA
    long = "old" * 666 + "ol"
    expected = [
        record("database_statement", "db:5432", 0, 201, "select 1", "select ?"),
        record("service_database_statement", "shop", 1, 201, "select 1", "select ?"),
        record("database_statement", "docs", 0, 101, "find", "find"),
        record("service_database_statement", "shop", 1, 101, "find", "find"),
        record("database_statement", "docs", 0, 102, "find all", "find all"),
        record("service_database_statement", "shop", 1, 102, "find all", "find all"),
        record("cache_read_command", "kv", 0, 11, "GET a", "GET a"),
        record("cache_read_command", "kv", 0, 13, "GET c", "GET c"),
        record("cache_write_command", "kv", 0, 12, "SET x", "SET x", trace_id="", span_id=""),
        record("cache_read_command", "mem", 0, 21, "gets 5", "gets ?"),
    ]
    before = {"minute": 202603011159, "time_us": 1772366399999999}
    expected += [
        record("database_statement", "db:5432", 0, 999, long, long, **before),
        record("service_database_statement", "shop", 1, 999, long, long, **before),
    ]
    assert in_order(table.to_pylist()) == in_order(expected)


def record(
    stream: str, entity: str, normal: int, ms: int, text: str, normalised: str, **changes: Any
) -> dict[str, Any]:
    """A record of the first minute."""
    return {
        "stream": f"top_n_{stream}",
        "entity": service_id(entity, bool(normal)),
        "minute": MINUTE,
        "latency": ms,
        "time_us": 1772366400000000,
        "trace_id": "t1",
        "span_id": "s",
        "statement": text,
        "normalised": normalised,
    } | changes


def test_the_n_slowest_are_kept_exactly_and_every_run_is_counted() -> None:
    """Against sorting a list: many ties, so that start time, trace id, span id and text decide."""
    rng = random.Random(3)
    spans = [
        ran(
            rng.choice((5, 201, 202, 203)),
            rng.choice((PG, PG | {"server.address": "db2"})),
            f"update t set a = {number} where b = {rng.choice('xy')}",
            id=f"s{rng.randint(0, 3)}",
            trace_id=f"t{rng.randint(0, 3)}",
            at=rng.randint(0, 2) + rng.choice((0, 60_000_000)),
            service=rng.choice(("shop", "cart")),
        )
        for number in range(400)
    ]
    table = compacted(spans)
    kept = topn_records(table, 7).to_pylist()
    counted = statement_stats(table)
    assert counted.schema == STATEMENT_SCHEMA
    groups: dict[tuple[str, str, int], list[tuple[Any, ...]]] = {}
    runs: Counter[tuple[str, str, int, str]] = Counter()
    times: Counter[tuple[str, str, int, str]] = Counter()
    for row in spans:
        ms = round((row["end_time"] - row["time"]).total_seconds() * 1000)
        minute = int(row["time"].strftime("%Y%m%d%H%M"))
        text = row["attributes"]["db.query.text"]
        us = round(row["time"].timestamp()) * 1_000_000 + row["time"].microsecond
        for stream, entity in (
            (
                "top_n_database_statement",
                service_id(f"{row['attributes']['server.address']}:5432", False),
            ),
            ("top_n_service_database_statement", service_id(row["service"], True)),
        ):
            place = (stream, entity, minute)
            normalised = re.sub("[0-9]+", "?", text)
            runs[*place, normalised] += 1
            times[*place, normalised] += ms
            if ms > 200:
                order = (-ms, us, row["trace_id"], row["span_id"], text)
                groups.setdefault(place, []).append(order)
    best = [(*place, *order) for place, orders in groups.items() for order in sorted(orders)[:7]]
    columns = ("stream", "entity", "minute", "latency", "time_us", "trace_id", "span_id")
    records = [(*(row[column] for column in columns), row["statement"]) for row in kept]
    assert sorted(records) == sorted((*row[:3], -row[3], *row[4:]) for row in best)
    keys = ("stream", "entity", "minute", "normalised")
    rows = counted.to_pylist()
    assert {tuple(row[key] for key in keys): row["runs"] for row in rows} == runs
    assert {tuple(row[key] for key in keys): row["total_ms"] for row in rows} == times


@pytest.mark.system
@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 150),
    n=st.sampled_from((1, 2, 3, 50)),
    parts=st.integers(1, 4),
)
def test_random_spans_whole_and_in_parts_give_what_the_oracle_says(
    seed: int, size: int, n: int, parts: int
) -> None:
    """Few different latencies and starts, so that there are ties; parts by trace, merged."""
    rng = random.Random(seed)
    start = datetime(2026, 3, 1, 12, tzinfo=UTC)
    spans = random_spans(seed, size, start=start, days=1)
    for row in spans:
        row["time"] = start + timedelta(seconds=rng.choice((0, 0, 59, 60)))
        row["end_time"] = row["time"] + timedelta(milliseconds=rng.choice((9, 11, 150, 201, 300)))
    table = compacted(spans)
    expected = {key: top for key, top in expected_topn(spans, n=n).items() if key[1] == "minute"}
    if parts == 1:
        records, statements = topn_records(table, n), statement_stats(table)
    else:
        numbers = part_of(hash64(table["trace_id"]), parts)
        pieces = [table.filter(pa.array(numbers == number)) for number in range(parts)]
        records = merge_topn([topn_records(piece, n) for piece in pieces], n)
        statements = merge_statements([statement_stats(piece) for piece in pieces])
    assert records.schema == RECORD_SCHEMA
    assert statements.schema == STATEMENT_SCHEMA
    assert oracle_form(records, statements) == expected


def oracle_form(records: pa.Table, statements: pa.Table) -> dict[TopNKey, TopN]:
    """Records as the oracle has them, with the runs of their texts."""
    runs: dict[tuple[str, str, int], dict[str, Runs]] = defaultdict(dict)
    for row in statements.to_pylist():
        place = (row["stream"], row["entity"], row["minute"])
        assert row["normalised"] not in runs[place]
        runs[place][row["normalised"]] = Runs(row["runs"], row["total_ms"])
    tops: dict[Any, TopN] = {}
    for row in records.to_pylist():
        place = (row["stream"], row["entity"], row["minute"])
        top = tops.setdefault((place[0], "minute", place[2], place[1]), TopN([], {}))
        time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=row["time_us"])
        top.records.append(
            Record(row["entity"], row["statement"], row["latency"], row["trace_id"], time)
        )
        top.runs[row["normalised"]] = runs[place][row["normalised"]]
    return tops


def test_it_does_not_matter_how_texts_are_held() -> None:
    """As strings, as dictionaries, in chunks with dictionaries of their own; slices of those."""
    table = compacted(random_spans(8, 400, days=1))
    whole = topn_records(table, 3), statement_stats(table)
    expected = [in_order(part.to_pylist()) for part in whole]
    assert min(map(len, expected)) > 10
    for other in (without_dictionaries(table), in_chunks(table, 150)):
        parts = topn_records(other, 3), statement_stats(other)
        assert [in_order(part.to_pylist()) for part in parts] == expected
    half, plain = table[200:], without_dictionaries(table)[200:]
    assert in_order(topn_records(half, 3).to_pylist()) == in_order(
        topn_records(plain, 3).to_pylist()
    )


def test_entities_are_services_by_the_names_that_count() -> None:
    """Names that are cut to the same text are one entity; a store and a service are two."""
    long = "x" * 70
    spans = [
        ran(300, PG | {"server.address": long + "1"}, "a", service=long + "2"),
        ran(400, PG | {"server.address": long + "2"}, "a", service=long + "1", id="s2"),
    ]
    rows = statement_stats(compacted(spans)).to_pylist()
    assert {(row["entity"], row["runs"], row["total_ms"]) for row in rows} == {
        (service_id(long, False), 2, 700),
        (service_id(long, True), 2, 700),
    }
    kept = topn_records(compacted(spans), 1).to_pylist()
    assert [row["latency"] for row in kept] == [400, 400]


def test_no_statements_give_empty_tables() -> None:
    """No spans, spans without a store, no parts."""
    for table in (compacted([]), compacted([span("1"), ran(99, REDIS, "PING")])):
        assert topn_records(table).equals(RECORD_SCHEMA.empty_table())
        assert statement_stats(table).equals(STATEMENT_SCHEMA.empty_table())
    assert merge_topn([], 5).equals(RECORD_SCHEMA.empty_table())
    assert merge_statements([]).equals(STATEMENT_SCHEMA.empty_table())


NORMALISED = {
    "select * from t where a = 'x' and b=12": "select * from t where a = ? and b=?",
    "a = 'it''s' or b = '' or c = ''''": "a = ? or b = ? or c = ?",
    "  Select\n\t 1 \r\n": "Select ?",
    "t1.c2 = 3 and x4y = 5_6 and _7 = é8": "t1.c2 = ? and x4y = 5_6 and _7 = é?",
    "1.5 -2 +3e10 4.5E-6 .7 8. 0xFF 0x 9.8.7": "? -? +? ? .? ?. ? 0x ?.?",
    "a in (1, 2,3) and b IN( 'x' ,'y') and c In (?)": "a in (?) and b IN (?) and c In (?)",
    "a in ($1, $2) and b = $3": "a in (?) and b = ?",
    "min (1, 2) and in (select 1) and in (a, 1)": "min (?, ?) and in (select ?) and in (a, ?)",
    "open 'quote 1": "open 'quote ?",
    "two  spaces 'kept  not' [id  1]": "two spaces ? [id ?]",
    "'$1 \\' || 2": "? || ?",
    # As long as a statement can be.
    "in (" + "1," * 997 + "1)": "in (?)",
    "'" * 2000: "?",
    "x" + "'" * 1999: "x?'",
    "('a', 'b'), " * 166: ("(?, ?), " * 166).strip(),
    "9" * 2000: "?",
    "1e" * 1000: "1e" * 1000,
}


def test_statements_that_differ_in_values_only_are_one() -> None:
    """The normalised text of records and of runs."""
    table = compacted(ran(300, PG, text) for text in NORMALISED)
    records = topn_records(table).to_pylist()
    assert {row["statement"]: row["normalised"] for row in records} == NORMALISED
    runs = [row["normalised"] for row in statement_stats(table).to_pylist()]
    assert Counter(runs) == dict.fromkeys(NORMALISED.values(), 2)
    assert [normalise(text) for text in ("", " " * 2000)] == ["", ""]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "which '' is not"),
        ("default", "which 'default' is not"),
        ("default:200,,x:1", "which '' is not"),
        ("default:-1", "which 'default:-1' is not"),
        ("default:2.5", "which 'default:2.5' is not"),
        ("default:²", "which 'default:²' is not"),
        (":5,default:1", "which ':5' is not"),
        ("mongodb:100", "no default"),
        ("default:1,x:2,x:3", "'x' is there twice"),
        ("default:1,X:2,x:3", "'x' is there twice"),
    ],
)
def test_wrong_thresholds_are_refused(text: str, why: str) -> None:
    """The message has the text, and says what is wrong with it."""
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        SlowThresholds.parse(text)
    assert caught.value.value == text


def test_thresholds_by_system() -> None:
    """By system in any case, else the default; wrong numbers are refused."""
    limits = SlowThresholds.parse("default:200, MONGODB:100,a'b:7")
    spans = [
        ran(limit + more, PG | {"db.system": system}, f"{system} {more}")
        for system, limit in (("mongodb", 100), ("MongoDB", 100), ("a'b", 7), ("z", 200))
        for more in (0, 1)
    ]
    records = topn_records(compacted(spans), thresholds=TopNThresholds(database=limits))
    slow = set(records["statement"].to_pylist())
    assert slow == {"mongodb 1", "MongoDB 1", "a'b 1", "z 1"}
    for wrong in (0, True, 2.5):
        with pytest.raises(ConfigError, match="at least 1"):
            topn_records(compacted([]), wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="at least 1"):
            merge_topn([], wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="0 or more"):
        SlowThresholds(-1)
    with pytest.raises(ConfigError, match="one is there twice"):
        SlowThresholds(1, {"Redis": 1, "redis": 2})
