"""How full a sink is and what it accepts: no thread, no broker, and a clock moved by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.kafka import KafkaSettings
from batchmill.pressure import ThresholdLevel
from batchmill.spool import Gauge, Level, Overloaded, SpoolClosedError, SpoolSettings, Unread
from batchmill.spool.gauge import SegmentBacklog
from batchmill.testing import ManualClock

LOG = logging.getLogger("batchmill.spool")
SETTINGS = SpoolSettings(
    capacity_rows=100,
    capacity_bytes=1000,
    unread_warning=10,
    unread_critical=20,
    unread_critical_plus=30,
    min_free_bytes=5,
    retry_after_s=2,
)


class FixedBacklog(SegmentBacklog):
    """A backlog that is what a test says."""

    def refresh(self) -> bool:
        return False

    def fill(self, unread: int = 0, free: int | None = None) -> None:
        self._set(Unread(1, unread, 0.0))
        self.free = free


@pytest.fixture
def clock() -> ManualClock:
    """Stands still until it is moved."""
    return ManualClock()


@pytest.fixture
def gauge(clock: ManualClock) -> Gauge:
    """The gauge of a Kafka sink: nothing waits yet, and there is no backlog."""
    settings = KafkaSettings(capacity_rows=100, capacity_bytes=10_000, retry_after_s=1.0)
    return topic_gauge(settings, clock)


def topic_gauge(settings: KafkaSettings, clock: ManualClock) -> Gauge:
    """As a Kafka sink makes it."""
    return Gauge(
        "topic",
        "kafka://one:9092/spans",
        settings,
        unit="span",
        waiting="for the broker",
        log=LOG,
        clock=clock.now,
    )


def spool_gauge(backlog: SegmentBacklog, settings: SpoolSettings, clock: ManualClock) -> Gauge:
    """As a spool makes it."""
    return Gauge(
        "spool",
        "/spool",
        settings,
        backlog,
        unit="row",
        waiting="to be written",
        log=LOG,
        clock=clock.now,
    )


@pytest.mark.parametrize(
    ("load", "level"),
    [
        ({}, Level.NORMAL),
        ({"rows": 49}, Level.NORMAL),
        ({"rows": 50}, Level.WARNING),
        ({"rows": 100}, Level.CRITICAL),
        ({"rows": 150}, Level.CRITICAL_PLUS),
        ({"size": 500}, Level.WARNING),
        ({"size": 1000}, Level.CRITICAL),
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
def test_the_worst_counts(tmp_path: Path, clock: ManualClock, load: Any, level: Level) -> None:
    """Rows, bytes, unread bytes, room on the disk and a disk that fails: each alone is enough."""
    backlog = FixedBacklog(tmp_path, SETTINGS, LOG)
    gauge = spool_gauge(backlog, SETTINGS, clock)
    gauge.admit(load.get("rows", 0), load.get("size", 0))
    backlog.fill(load.get("unread", 0), load.get("free"))
    if "fault" in load:
        gauge.fail(load["fault"])
    pressure = gauge.pressure()
    assert pressure.level is gauge.level() is gauge.stats().level is level
    assert bool(pressure.why) is (level >= Level.CRITICAL)


@pytest.mark.parametrize("field", ["queue rows", "queue bytes", "unread bytes"])
@pytest.mark.parametrize("capacity", [1, 7, 100, 1999])
def test_measures_tell_where_levels_begin(
    tmp_path: Path, clock: ManualClock, field: str, capacity: int
) -> None:
    """To the row and the byte: one less is a lower level."""
    settings = SpoolSettings(
        capacity_rows=capacity,
        capacity_bytes=capacity,
        unread_warning=capacity,
        unread_critical=2 * capacity,
        unread_critical_plus=3 * capacity,
    )

    def gauge_at(value: int) -> Gauge:
        backlog = FixedBacklog(tmp_path, settings, LOG)
        gauge = spool_gauge(backlog, settings, clock)
        gauge.admit(value * (field == "queue rows"), value * (field == "queue bytes"))
        backlog.fill(value * (field == "unread bytes"))
        return gauge

    def measure(gauge: Gauge) -> Any:
        return next(measure for measure in gauge.measures() if measure.name == field)

    known = measure(gauge_at(0))
    assert known.value == 0
    for level, begins in (
        (Level.WARNING, known.warning),
        (Level.CRITICAL, known.critical),
        (Level.CRITICAL_PLUS, known.critical_plus),
    ):
        assert gauge_at(begins).level() >= level
        assert gauge_at(begins - 1).level() < level
        assert measure(gauge_at(begins)).value == begins


def test_half_is_warning_and_all_of_it_critical(gauge: Gauge) -> None:
    """Of the spans, and of the bytes of their messages."""
    gauge.admit(7, 90)
    rows, size = gauge.measures()
    assert (rows.name, rows.value, rows.warning, rows.critical) == ("queue rows", 7, 50, 100)
    assert (size.name, size.value, size.critical_plus) == ("queue bytes", 90, 15_000)


def test_a_refusal_says_why_and_for_how_long(tmp_path: Path, clock: ManualClock) -> None:
    """At CRITICAL_PLUS twice as long."""
    backlog = FixedBacklog(tmp_path, SETTINGS, LOG)
    gauge = spool_gauge(backlog, SETTINGS, clock)
    backlog.fill(unread=20)
    with pytest.raises(Overloaded, match="the pipeline is behind") as refused:
        gauge.admit(1, 1)
    assert refused.value.retry_after_s == 2
    backlog.fill(unread=30)
    assert gauge.pressure().retry_after_s == 4
    error = Overloaded(Level.CRITICAL, 2, "x")
    assert str(error) == "refused at CRITICAL: x; try again in 2 seconds"
    assert str(Overloaded(Level.CRITICAL, 1.0, "x")).endswith("try again in 1 second")


def test_a_refusal_counts_what_waits(gauge: Gauge) -> None:
    """In the unit of the sink, with what is allowed."""
    gauge.admit(100, 2**20)
    assert gauge.pressure().why == (
        "100 spans (1.0 MiB) waiting for the broker, with 100 spans and 0.0 MiB allowed"
    )


def test_levels_are_those_of_pressure() -> None:
    """With a word for none."""
    assert [Level[threshold_level.name].value for threshold_level in ThresholdLevel] == [1, 2, 3]
    assert [threshold_level.value for threshold_level in ThresholdLevel] == [1, 2, 3]
    assert Level.NORMAL < ThresholdLevel.WARNING


def test_after_a_failure_one_batch_may_try_at_a_time(gauge: Gauge, clock: ManualClock) -> None:
    """None for a while, then one, then none again, until something is stored."""
    gauge.admit(1, 10)
    gauge.fail("the broker is away")
    gauge.settle(1, 10, stored=False)
    with pytest.raises(Overloaded, match="the broker is away"):
        gauge.check(1)
    clock.advance(1.0)
    assert gauge.level() is Level.NORMAL
    gauge.check(1)
    gauge.admit(1, 10)
    assert gauge.level() is Level.CRITICAL
    with pytest.raises(Overloaded):
        gauge.admit(1, 10)
    gauge.settle(1, 10, stored=True)
    gauge.admit(1, 10)
    assert gauge.level() is Level.NORMAL


def test_counters_balance(gauge: Gauge) -> None:
    """Submitted is written, failed and waiting; refused is none of those."""
    gauge.admit(60, 10)
    gauge.admit(40, 10)
    with pytest.raises(Overloaded):
        gauge.admit(5, 10)
    gauge.settle(60, 10, stored=True)
    gauge.settle(10, 5, stored=False)
    stats = gauge.stats()
    assert (stats.written_rows, stats.failed_rows, stats.queue_rows) == (60, 10, 30)
    assert stats.submitted_rows == 100
    assert (stats.level, stats.queue_bytes) == (Level.NORMAL, 5)
    assert (stats.refused_rows, stats.refused) == (5, {Level.CRITICAL: 1})


def test_once_closed_nothing_is_accepted(gauge: Gauge) -> None:
    """What waits then is still settled."""
    gauge.admit(1, 10)
    gauge.close()
    with pytest.raises(SpoolClosedError):
        gauge.admit(1, 10)
    assert not gauge.idle
    gauge.settle(1, 10, stored=True)
    assert gauge.idle


def test_the_folder_is_scanned_every_100_ms(tmp_path: Path, clock: ManualClock) -> None:
    """What this process writes counts at once, what others write or remove at the next scan."""
    limits = SpoolSettings(
        unread_warning=10, unread_critical=20, unread_critical_plus=30, min_free_bytes=0
    )
    backlog = SegmentBacklog(tmp_path, limits, LOG, clock.now)
    gauge = spool_gauge(backlog, limits, clock)
    assert gauge.level() is Level.NORMAL
    (tmp_path / "Span").mkdir()
    segment = tmp_path / "Span" / "1-a.parquet"
    segment.write_bytes(b"x" * 25)
    clock.advance(0.099)
    assert gauge.level() is Level.NORMAL
    clock.advance(0.011)
    assert gauge.level() is Level.CRITICAL
    backlog.wrote(5)
    assert gauge.level() is Level.CRITICAL_PLUS
    segment.unlink()
    clock.advance(0.19)
    assert gauge.level() is Level.NORMAL


def test_a_level_is_logged_once(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """Not for each batch that meets it; and a depth that wavers around it is one stay."""
    gauge = topic_gauge(KafkaSettings(capacity_rows=10), clock)
    for _ in range(6):
        gauge.admit(1, 1)
    for _ in range(5):
        gauge.settle(1, 1, stored=True)
        gauge.admit(1, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "topic kafka://one:9092/spans: queue rows: WARNING"
    ]


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
