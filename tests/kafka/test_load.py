"""Who is let in, by what waits and after a failure: no broker, no thread, and a clock by hand."""

from __future__ import annotations

import pytest

from batchmill.kafka import KafkaSettings
from batchmill.kafka.load import Load
from batchmill.spool import Level, Overloaded, SpoolClosedError
from batchmill.testing import ManualClock

SETTINGS = KafkaSettings(capacity_rows=100, capacity_bytes=10_000, retry_after_s=1.0)


@pytest.fixture
def clock() -> ManualClock:
    """Stands still until it is moved."""
    return ManualClock()


@pytest.fixture
def load(clock: ManualClock) -> Load:
    """Nothing waits yet."""
    return Load("kafka://one:9092/spans", SETTINGS, clock.now)


@pytest.mark.parametrize(
    ("rows", "size", "level"),
    [
        (49, 4_999, Level.NORMAL),
        (50, 0, Level.WARNING),
        (0, 5_000, Level.WARNING),
        (100, 0, Level.CRITICAL),
        (1, 10_000, Level.CRITICAL),
        (150, 0, Level.CRITICAL_PLUS),
    ],
)
def test_the_level_is_that_of_rows_or_bytes(load: Load, rows: int, size: int, level: Level) -> None:
    """Whichever is the fuller of the two."""
    load.admit(rows, size)
    assert load.level() is level
    load.settle(rows, size, 1)
    assert load.level() is Level.NORMAL


def test_measures_tell_what_waits_and_where_levels_begin(load: Load) -> None:
    """In spans, and in bytes of their messages."""
    load.admit(7, 90)
    rows, size = load.measures()
    assert (rows.name, rows.value, rows.warning, rows.critical) == ("queue rows", 7, 50, 100)
    assert (size.name, size.value, size.critical_plus) == ("queue bytes", 90, 15_000)


def test_after_a_failure_one_is_let_in_at_a_time(load: Load, clock: ManualClock) -> None:
    """Nobody for a while, then one, then nobody again, until something is acknowledged."""
    load.admit(1, 10)
    load.failed("the broker is away")
    load.settle(1, 10, 1, "_MSG_TIMED_OUT")
    with pytest.raises(Overloaded, match="the broker is away"):
        load.check(1)
    clock.advance(1.0)
    load.check(1)
    load.admit(1, 10)
    with pytest.raises(Overloaded):
        load.admit(1, 10)
    load.settle(1, 10, 1)
    load.admit(1, 10)
    assert load.level() is Level.NORMAL


def test_counters_balance(load: Load) -> None:
    """Submitted is written, failed and waiting; refused is none of those."""
    load.admit(60, 10)
    load.admit(40, 10)
    with pytest.raises(Overloaded):
        load.admit(5, 10)
    load.settle(60, 10, 3)
    load.settle(10, 5, 1, "_MSG_TIMED_OUT")
    level, counts, rows, size = load.snapshot()
    assert counts.submitted_rows == counts.written_rows + counts.failed_rows + rows == 100
    assert (level, rows, size) == (Level.NORMAL, 30, 5)
    assert (counts.refused_rows, counts.refused) == (5, {Level.CRITICAL: 1})
    assert (counts.messages, counts.failures) == (3, {"_MSG_TIMED_OUT": 1})


def test_once_closed_nobody_is_let_in(load: Load) -> None:
    """What waits then is still settled."""
    load.admit(1, 10)
    load.close()
    with pytest.raises(SpoolClosedError):
        load.admit(1, 10)
    assert not load.idle
    load.settle(1, 10, 1)
    assert load.idle
