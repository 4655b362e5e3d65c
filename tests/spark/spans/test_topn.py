"""The slowest statements, and how often each ran."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from batchmill import ConfigError
from batchmill.sources import service_id
from tests.kit.spark import compact_frame, in_order, rows_of, span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark")

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


def test_statements_above_the_threshold_of_their_system_are_records(spark: SparkSession) -> None:
    """Each stream with its entity; exactly at the threshold is not slow."""
    from batchmill.aggregate import SlowThresholds, TopNThresholds
    from batchmill.spark.spans.topn import topn_records

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
    records = rows_of(topn_records(compact_frame(spark, spans), 50, limits))
    long = "old" * 666 + "ol"
    expected = [
        record("database_statement", "db", 0, 201, "select 1", "select ?"),
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
        record("database_statement", "db", 0, 999, long, long, **before),
        record("service_database_statement", "shop", 1, 999, long, long, **before),
    ]
    assert records == in_order(expected)


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


def test_the_n_slowest_are_kept_exactly_and_every_run_is_counted(spark: SparkSession) -> None:
    """Against sorting a list: many ties, so that start time, trace id and span id decide."""
    from batchmill.spark.spans.topn import statement_stats, topn_records

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
    frame = compact_frame(spark, spans)
    kept = rows_of(topn_records(frame, 7))
    counted = rows_of(statement_stats(frame))
    groups: dict[tuple[str, str, int], list[tuple[Any, ...]]] = {}
    runs: Counter[tuple[str, str, int, str]] = Counter()
    times: Counter[tuple[str, str, int, str]] = Counter()
    for row in spans:
        ms = round((row["end_time"] - row["time"]).total_seconds() * 1000)
        minute = int(row["time"].strftime("%Y%m%d%H%M"))
        text = row["attributes"]["db.query.text"]
        us = round(row["time"].timestamp()) * 1_000_000 + row["time"].microsecond
        for stream, entity in (
            ("top_n_database_statement", service_id(row["attributes"]["server.address"], False)),
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
    assert {tuple(row[key] for key in keys): row["runs"] for row in counted} == runs
    assert {tuple(row[key] for key in keys): row["total_ms"] for row in counted} == times


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
    "": "",
    # As long as a statement can be: no pattern may run out of stack.
    "in (" + "1," * 997 + "1)": "in (?)",
    "'" * 2000: "?",
    "x" + "'" * 1999: "x?'",
    "('a', 'b'), " * 166: ("(?, ?), " * 166).strip(),
    " " * 2000: "",
    "9" * 2000: "?",
    "1e" * 1000: "1e" * 1000,
}


def test_statements_that_differ_in_values_only_are_one(spark: SparkSession) -> None:
    """The normalised text, in Spark and by the same patterns in Python."""
    from batchmill.aggregate import normalise
    from batchmill.spark.spans import topn

    frame = spark.createDataFrame([(text,) for text in NORMALISED], "text string")
    texts = [row[0] for row in frame.selectExpr(topn.normalise("text")).collect()]
    assert texts == list(NORMALISED.values())
    assert [normalise(text) for text in NORMALISED] == list(NORMALISED.values())


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
    from batchmill.aggregate import SlowThresholds

    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        SlowThresholds.parse(text)
    assert caught.value.value == text


def test_thresholds_by_system(spark: SparkSession) -> None:
    """By system in any case, else the default; odd names survive the way into SQL."""
    from batchmill.aggregate import SlowThresholds
    from batchmill.spark.spans.topn import threshold_sql, topn_records

    limits = SlowThresholds.parse("default:200, MONGODB:100,a'b:7")
    sql = threshold_sql(limits, "s")
    systems = ["mongodb", "MongoDB", "a'b", "z"]
    frame = spark.createDataFrame([(system,) for system in [*systems, None]], "s string")
    assert [row[0] for row in frame.selectExpr(sql).collect()] == [100, 100, 7, 200, 200]
    assert [limits.of(system) for system in systems] == [100, 100, 7, 200]
    with pytest.raises(ConfigError, match="at least 1"):
        topn_records(compact_frame(spark, []), 0)
    with pytest.raises(ConfigError, match="0 or more"):
        SlowThresholds(-1)
    with pytest.raises(ConfigError, match="one is there twice"):
        SlowThresholds(1, {"Redis": 1, "redis": 2})
