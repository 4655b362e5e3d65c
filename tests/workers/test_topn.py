"""Slow statements: the N slowest exactly, whatever the order and the split they come in."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from batchmill import ConfigError
from batchmill.store import open_store
from batchmill.workers import Statement
from tests.kit.pipelines import START, differences, top_expected, top_of
from tests.kit.stores import Backend
from tests.kit.threads import WAIT_S
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans
from tests.oracle.spans import (
    attributes_of,
    cache_operation,
    database_system,
    destination_of,
    is_cache,
    is_database_call,
    latency_ms,
    service_of,
    statement_of,
)
from tests.oracle.topn import expected_topn
from tests.workers.kit import NOON, embedded


def statement(span: Row) -> Statement | None:
    """The statement that a span tells of, if it does."""
    attributes = attributes_of(span)
    if not is_database_call(span):
        return None
    return Statement(
        span["time"],
        service_of(span),
        destination_of(attributes) or "",
        latency_ms(span),
        statement_of(span),
        database_system(attributes) or "",
        cache_operation(span) if is_cache(attributes) else None,  # type: ignore[arg-type]
        span["trace_id"],
        span["span_id"],
    )


@pytest.mark.parametrize("seed", [3, 4])
def test_statements_equal_the_oracle(backend: Backend, seed: int) -> None:
    """In random order, by two instances, with flushes in between; also with fewer kept."""
    n, slow_database, slow_cache = (50, "default:200,mongodb:100", "default:20,redis:10")
    if seed == 4:
        n, slow_database, slow_cache = (3, "default:20,mongodb:5", "default:2")
    settings = {"top_n": n, "slow_database_ms": slow_database, "slow_cache_ms": slow_cache}
    spans = random_spans(seed, 1500, start=START)
    statements = [made for span in spans if (made := statement(span)) is not None]
    rng = random.Random(seed)
    rng.shuffle(statements)
    with embedded(backend.url, **settings) as one, embedded(backend.url, **settings) as other:
        while statements:
            mill, count = rng.choice((one, other)), rng.randrange(1, 200)
            some, statements = statements[:count], statements[count:]
            assert mill.emit_many(some, timeout=WAIT_S) == len(some)
            if rng.random() < 0.3:
                assert mill.flush(WAIT_S)
    for stats in (one.stats(), other.stats()):
        assert stats.statements == stats.statements_accepted > 0
    wanted = top_expected(expected_topn(spans, slow_database, slow_cache, n))
    assert wanted
    with backend.open() as store:
        assert differences(top_of(store), wanted) == []


def test_statements_are_counted(tmp_path: Path) -> None:
    """Those too far ahead of the clock are invalid; after close they are dropped."""
    url = f"sqlite:///{tmp_path}/metrics.db"
    call = Statement(NOON, "shop", "db", 300, "SELECT 1")
    ahead = Statement(datetime.now(UTC) + timedelta(days=2), "shop", "db", 300, "SELECT 1")
    mill = embedded(url)
    assert mill.emit(call)
    assert mill.emit_many([call, ahead]) == 2
    assert mill.close()
    assert not mill.emit(call)
    stats = mill.stats()
    assert (stats.statements_accepted, stats.statements, stats.statements_invalid) == (3, 2, 1)
    assert (stats.statements_dropped, stats.statements_waiting) == ({"stopped": 1}, 0)
    with open_store(url) as store:
        assert store.counters()["invalid", "Statement", "time too far ahead"] == 1
        [record] = [record for record in store.top("top_n_database_statement") if record.rank == 1]
    assert (record.entity_name, record.runs) == ("db", 2)


def test_texts_that_a_database_cannot_hold(backend: Backend) -> None:
    """A NUL, and a long text: the other statements are not lost with them."""
    with embedded(backend.url) as mill:
        mill.emit(Statement(NOON, "shop", "db", 300, "SELECT '\0' FROM a\0b", trace_id="t\0"))
        mill.emit(Statement(NOON, "shop", "db", 301, "x" * 5000))
    assert mill.stats().statements == 2
    with backend.open() as store:
        records = store.top("top_n_database_statement")
    assert len(records[0].statement) == 2000


def test_a_statement_is_checked() -> None:
    """A time zone, and a whole number of milliseconds."""
    with pytest.raises(ConfigError, match="time zone"):
        Statement(datetime(2026, 1, 1), "shop", "db", 1, "SELECT 1")
    with pytest.raises(ConfigError, match="latency"):
        Statement(NOON, "shop", "db", -1, "SELECT 1")
