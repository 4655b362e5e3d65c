"""How much waits, against how much may. No thread, no disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.pressure import ThresholdLevel
from batchmill.spool import Level, Overloaded, SpoolSettings
from batchmill.spool.gauge import Gauge
from batchmill.spool.thresholds import Fault, Load, Thresholds

SETTINGS = SpoolSettings(
    capacity_rows=100,
    capacity_bytes=1000,
    unread_warning=10,
    unread_critical=20,
    unread_critical_plus=30,
    min_free_bytes=5,
    retry_after_s=2,
)
CALM = Load(rows=0, bytes=0, unread=0, free=None)


@pytest.mark.parametrize(
    ("load", "level"),
    [
        ({}, Level.NORMAL),
        ({"rows": 49}, Level.NORMAL),
        ({"rows": 50}, Level.WARNING),
        ({"rows": 100}, Level.CRITICAL),
        ({"rows": 150}, Level.CRITICAL_PLUS),
        ({"bytes": 500}, Level.WARNING),
        ({"bytes": 1000}, Level.CRITICAL),
        ({"unread": 9}, Level.NORMAL),
        ({"unread": 10}, Level.WARNING),
        ({"unread": 20}, Level.CRITICAL),
        ({"unread": 30}, Level.CRITICAL_PLUS),
        ({"free": 4}, Level.CRITICAL),
        ({"free": 5}, Level.NORMAL),
        ({"fault": "broken"}, Level.CRITICAL),
        ({"fault": "broken", "rows": 150}, Level.CRITICAL_PLUS),
        ({"rows": 50, "unread": 20}, Level.CRITICAL),
    ],
)
def test_the_worst_counts(load: dict[str, Any], level: Level) -> None:
    """Rows, bytes, unread bytes, room on the disk and a disk that fails: each alone is enough."""
    judgement = Thresholds(SETTINGS).judge(CALM._replace(**load))
    assert judgement.level is level
    assert bool(judgement.why) is (level >= Level.CRITICAL)


@pytest.mark.parametrize("field", ["rows", "bytes", "unread"])
@pytest.mark.parametrize("capacity", [1, 7, 100, 1999])
def test_measures_tell_where_levels_begin(field: str, capacity: int) -> None:
    """To the row and the byte: one less is a lower level."""
    settings = dataclasses.replace(SETTINGS, capacity_rows=capacity, capacity_bytes=capacity)
    thresholds = Thresholds(settings)
    number = ("rows", "bytes", "unread").index(field)
    measure = thresholds.measures(CALM)[number]
    assert measure.value == 0
    for level, begins in (
        (Level.WARNING, measure.warning),
        (Level.CRITICAL, measure.critical),
        (Level.CRITICAL_PLUS, measure.critical_plus),
    ):
        there: dict[str, Any] = {field: begins}
        before: dict[str, Any] = {field: begins - 1}
        load = CALM._replace(**there)
        assert thresholds.level(load) >= level
        assert thresholds.level(CALM._replace(**before)) < level
        assert thresholds.measures(load)[number].value == begins


def test_a_refusal_says_why_and_for_how_long() -> None:
    """At CRITICAL_PLUS twice as long."""
    thresholds = Thresholds(SETTINGS)
    judgement = thresholds.judge(CALM._replace(unread=20))
    assert "the pipeline is behind" in judgement.why
    assert judgement.retry_after_s == 2
    assert thresholds.judge(CALM._replace(unread=30)).retry_after_s == 4
    error = Overloaded(judgement.level, judgement.retry_after_s, "x")
    assert str(error) == "refused at CRITICAL: x; try again in 2 seconds"


def test_levels_are_those_of_pressure() -> None:
    """With a word for none."""
    assert [Level[each.name].value for each in ThresholdLevel] == [1, 2, 3]
    assert [each.value for each in ThresholdLevel] == [1, 2, 3]
    assert Level.NORMAL < ThresholdLevel.WARNING


def test_after_a_fault_one_may_try_at_a_time() -> None:
    """Else everybody would be let in to fail, or nobody would ever notice that it is over."""
    fault = Fault(hold_s=2)
    assert not fault.holds(0)
    fault.failed("full", now=10)
    assert [fault.holds(10), fault.holds(11.9), fault.holds(12)] == [True, True, False]
    fault.admitted(now=12)
    assert [fault.holds(12), fault.holds(14)] == [True, False]
    assert fault.cleared()
    assert not fault.holds(12)
    assert not fault.cleared()


def test_a_spool_with_a_fault_lets_one_batch_in_after_a_while(tmp_path: Path) -> None:
    """And the level says CRITICAL only while nobody is let in."""
    now = [0.0]
    gauge = Gauge(tmp_path, SpoolSettings(min_free_bytes=0, retry_after_s=1), lambda: now[0])
    gauge.failed("the disk is full")
    with pytest.raises(Overloaded, match="the disk is full"):
        gauge.admit(1, 1)
    now[0] = 1.0
    assert gauge.level() is Level.NORMAL
    gauge.admit(1, 1)
    assert gauge.level() is Level.CRITICAL
    gauge.wrote(10)
    assert gauge.level() is Level.NORMAL


def test_the_folder_is_looked_at_every_100_ms(tmp_path: Path) -> None:
    """What this process writes counts at once, what others write or remove at the next look."""
    now = [0.0]
    limits = SpoolSettings(
        unread_warning=10, unread_critical=20, unread_critical_plus=30, min_free_bytes=0
    )
    gauge = Gauge(tmp_path, limits, lambda: now[0])
    assert gauge.level() is Level.NORMAL
    (tmp_path / "Span").mkdir()
    segment = tmp_path / "Span" / "1-a.parquet"
    segment.write_bytes(b"x" * 25)
    now[0] = 0.099
    assert gauge.level() is Level.NORMAL
    now[0] = 0.11
    assert gauge.level() is Level.CRITICAL
    gauge.wrote(5)
    assert gauge.level() is Level.CRITICAL_PLUS
    segment.unlink()
    now[0] = 0.3
    assert gauge.level() is Level.NORMAL


def test_a_level_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not for each batch that meets it; and a depth that trembles there is one stay."""
    settings = SpoolSettings(capacity_rows=10, min_free_bytes=0)
    gauge = Gauge(tmp_path, settings)
    for _ in range(6):
        gauge.admit(1, 1)
    for _ in range(5):
        gauge.settle(1, 1, written=True)
        gauge.admit(1, 1)
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == 1
    assert told[0].endswith("what waits to be written: WARNING")


@pytest.mark.parametrize(
    "wrong",
    [
        {"linger_s": -1},
        {"max_rows": 0},
        {"capacity_rows": True},
        {"unread_warning": 5, "unread_critical": 4, "unread_critical_plus": 6},
        {"min_free_bytes": -1},
        {"retry_after_s": float("nan")},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    """When made, by name."""
    with pytest.raises(ConfigError, match=r"=.* is not valid"):
        SpoolSettings(**wrong)
