"""A pipeline whose machine has a wrong clock for a while: nothing is removed, nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from batchmill.sources import Grain
from batchmill.spark import Pipeline, PipelineSettings
from batchmill.store import EXPIRED, Batch, Store, minute_of
from tests.kit.pipelines import NOW, SMALL, counted, endpoint_events, pipeline, write_segment

TTL = 7
OFF = timedelta(days=40)
(EVENT,) = endpoint_events(1)


class Crash(BaseException):
    """The end of a process."""


class Machine:
    """A pipeline on a machine with a clock that can be set."""

    def __init__(self, spark: SparkSession, folder: Path, url: str) -> None:
        self.now = datetime.fromtimestamp(NOW, UTC)
        self._spark = spark
        self._folder = folder
        self._url = url
        self._segments = 0

    def open(self) -> Pipeline:
        """The pipeline, started anew."""
        options: dict[str, Any] = {"oal": SMALL, "store": self._url}
        settings = PipelineSettings(ttl_days=TTL, max_batch_files=1)
        return pipeline(
            self._spark,
            self._folder,
            **options,
            settings=settings,
            clock=lambda: self.now.timestamp(),
        )

    def add(self, ages: Sequence[float] = (0,)) -> None:
        """A segment with an event so many days before what the clock says, each."""
        rows = [{**EVENT, "time": self.now - timedelta(days=age)} for age in ages]
        number = self._segments
        write_segment(self._folder / "spool", "Endpoint", rows, str(number), number)
        self._segments += 1


def days(store: Store) -> list[int]:
    """The days that a store has values of."""
    return [value.bucket for value in store.values("ep_cpm", grain=Grain.DAY)]


@pytest.fixture(params=["sqlite", "postgres"])
def machine(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Machine:
    """One for each kind of store."""
    url = f"sqlite:///{tmp_path / 'metrics.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
    return Machine(spark, tmp_path, url)


@pytest.mark.parametrize(
    ("machine", "off"),
    [
        pytest.param("sqlite", OFF, id="sqlite-ahead"),
        pytest.param("postgres", -OFF, id="postgres-behind"),
        pytest.param("sqlite", -OFF, id="sqlite-behind", marks=pytest.mark.system),
        pytest.param("postgres", OFF, id="postgres-ahead", marks=pytest.mark.system),
    ],
    indirect=["machine"],
)
def test_a_clock_that_is_wrong_for_a_batch_changes_nothing(machine: Machine, off: Any) -> None:
    """The week stays; rows with the wrong clock are kept, those with the right one count on."""
    with machine.open() as running:
        machine.add(range(TTL + 1))
        running.run_available()
        week = days(running.store)
        machine.now += off
        machine.add()
        running.run_available()
        assert set(week) < set(days(running.store))
        machine.now -= off
        machine.add()
        running.run_available()
        assert counted(running.store, EXPIRED) == {}
        assert counted(running.store, "quarantined") == {}
        assert counted(running.store, "late") == {}
        assert counted(running.store, "rows") == {("Endpoint", ""): TTL + 3}
        doubtful = minute_of((machine.now + off).timestamp()) // 10_000
        assert {*days(running.store)} == {*week, doubtful}
        assert running.store.newest_minute() == minute_of(machine.now.timestamp())


@pytest.mark.parametrize(
    ("machine", "behind"),
    [
        pytest.param("sqlite", 40, id="sqlite"),
        pytest.param("sqlite", 5 / 24, id="sqlite-hours"),
        pytest.param("postgres", 40, id="postgres", marks=pytest.mark.system),
    ],
    indirect=["machine"],
)
def test_a_clock_that_is_behind_refuses_nothing(
    machine: Machine, behind: float, caplog: pytest.LogCaptureFixture
) -> None:
    """What is sent with the right time counts at once; a sender that is ahead is still wrong, also
    once the clock is right again."""
    with machine.open() as running:
        machine.add(range(TTL + 1))
        running.run_available()
        week = days(running.store)
    machine.now -= timedelta(days=behind)
    with machine.open() as running:
        for hours in (0.5, 1, 1.5):
            machine.add([-behind - hours / 24])
            running.run_available()
        assert "is behind what the store trusted" in caplog.text
        (doubt,) = running.store.clock().doubts(machine.now.timestamp())
        assert "if it was ahead" in doubt
        machine.add([-behind - 9])
        running.run_available()
        assert counted(running.store, "quarantined") == {("Endpoint", "time too far ahead"): 1}
    machine.now += timedelta(days=behind, hours=2)
    with machine.open() as running:
        machine.add([0, -behind])
        running.run_available()
        assert running.store.clock().behind_s(machine.now.timestamp()) == 0
        assert counted(running.store, "quarantined") == {("Endpoint", "time too far ahead"): 2}
        assert counted(running.store, EXPIRED) == {}
        assert counted(running.store, "rows") == {("Endpoint", ""): TTL + 5}
        assert len(list(running.store.values("ep_cpm", grain=Grain.MINUTE))) == TTL + 5
        assert days(running.store) == week
        assert running.store.newest_minute() == minute_of(machine.now.timestamp())


def test_a_clock_that_was_ahead_does_not_admit_wrong_senders(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its minutes are in the store, but nobody trusted it."""
    machine = Machine(spark, tmp_path, f"sqlite:///{tmp_path / 'metrics.db'}")
    with machine.open() as running:
        for step in (timedelta(), OFF, -OFF):
            machine.now += step
            machine.add()
            running.run_available()
        machine.add([-39])
        running.run_available()
        assert counted(running.store, "quarantined") == {("Endpoint", "time too far ahead"): 1}


def test_rows_that_an_empty_store_refused_come_back(spark: SparkSession, tmp_path: Path) -> None:
    """It cannot know that its clock is behind; with the right one, the quarantine is a backfill."""
    machine = Machine(spark, tmp_path, f"sqlite:///{tmp_path / 'metrics.db'}")
    machine.add([-40, -40, 0])
    with machine.open() as running:
        running.run_available()
        machine.add([-40])
        running.run_available()
        assert counted(running.store, "quarantined") == {("Endpoint", "time too far ahead"): 3}
    machine.now += OFF
    with machine.open() as running:
        for _ in range(2):
            running.backfill(tmp_path / "spool-quarantine")
            assert counted(running.store, "rows") == {("Endpoint", ""): 4}


def test_a_batch_is_repeated_with_the_clock_of_its_plan(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was planned with a wrong clock, and is repeated with the right one: the rows count once,
    and expiry does not follow the plan."""
    with machine.open() as running:
        machine.add(range(TTL + 1))
        running.run_available()
        week = days(running.store)
    machine.now += OFF
    machine.add()

    def die(store: Store, batch: Batch) -> Any:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", die)
        with pytest.raises(Crash), machine.open() as running:
            running.run_available()
    machine.now -= OFF
    machine.add()
    with machine.open() as running:
        assert [report.applied for report in running.run_available()] == [True, True]
        assert counted(running.store, "rows") == {("Endpoint", ""): TTL + 3}
        assert counted(running.store, "quarantined") == {}
        assert days(running.store)[:-1] == week
        doubts = running.progress().clock.doubts(machine.now.timestamp())  # type: ignore[union-attr]
        assert len(doubts) == 1
        assert "40 days ahead of the clock" in doubts[0]


@pytest.mark.parametrize(
    ("ttl_days", "expired"), [(60, {}), (TTL, {("Endpoint", "older than the TTL"): 1})]
)
def test_a_backfill_of_last_month(
    spark: SparkSession, tmp_path: Path, ttl_days: int, expired: dict[Any, int]
) -> None:
    """It is kept with a TTL that is long enough, and counts as expired with a shorter one."""
    machine = Machine(spark, tmp_path, f"sqlite:///{tmp_path / 'metrics.db'}")
    machine.add()
    old = {**EVENT, "time": machine.now - timedelta(days=30)}
    write_segment(tmp_path / "old", "Endpoint", [old])
    settings = PipelineSettings(ttl_days=ttl_days)
    with pipeline(spark, tmp_path, oal=SMALL, settings=settings) as running:
        running.run_available()
        running.backfill(tmp_path / "old")
        assert counted(running.store, EXPIRED) == expired
        assert len(days(running.store)) == 2 - len(expired)
