"""New entities beyond the limit are counted under overflow entities; no row is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from batchmill.outbox import OutboxSettings
from batchmill.sources import Grain
from batchmill.spark import PipelineSettings
from batchmill.store import Batch, Store
from batchmill.testing import ManualClock
from tests.kit.exporters import listed_changes
from tests.kit.pipelines import NOW, START, counted, pipeline, sqlite, write_segment
from tests.kit.spark import span
from tests.oracle.catalog import Row

OAL = "ep = from(Endpoint.*).count();"
TOO_MANY = "too many new entities in a minute"
STORE_FULL = "too many entities in the store"
LIMIT = 20


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that the driver commits to, and one that tasks do."""
    if request.param == "sqlite":
        return sqlite(tmp_path)
    return str(request.getfixturevalue("postgres_url"))


def settings(**given: Any) -> PipelineSettings:
    """Each segment is a batch; few new entities."""
    return PipelineSettings(
        **{"ttl_days": 365, "max_batch_files": 1, "max_new_entities": LIMIT, **given}
    )


def events(first: int, count: int, service: str = "shop") -> list[Row]:
    """Events of so many endpoints, one each."""
    row = {"time": START, "serviceName": service, "serviceLayer": "GENERAL", "latency": 1}
    return [row | {"name": f"/e{n:04}"} for n in range(first, first + count)]


def names(store: Store) -> set[str]:
    """The names of all endpoints."""
    return {entity.name for entity in store.entities("endpoint")}


def total(store: Store, grain: Grain = Grain.MINUTE) -> int:
    """How many events were counted."""
    counts = [value.value for value in store.values("ep", grain=grain)]
    return sum(count for count in counts if isinstance(count, int))


def test_what_is_over_the_limit_is_counted_under_overflow(
    spark: SparkSession, tmp_path: Path, url: str
) -> None:
    """No more new entities than the limit, all rows counted, and said where they came from."""
    write_segment(tmp_path / "spool", "Endpoint", events(0, 500))
    with pipeline(spark, tmp_path, oal=OAL, store=url, settings=settings()) as running:
        (report,) = running.run_available()
        store = running.store
        assert len(names(store) - {"overflow"}) <= LIMIT
        assert [total(store, grain) for grain in Grain] == [500, 500, 500]
        (rows,) = counted(store, "overflow").values()
        assert counted(store, "overflow") == {("Endpoint", TOO_MANY): rows}
        assert rows == 500 - len(names(store) - {"overflow"})
        (offender,) = report.stats.overflow.offenders
        assert (offender.parent, offender.rows) == ("endpoints of shop", rows)
        assert running.progress().overflow_rows == rows


def test_batches_of_a_minute_have_one_limit_together(
    spark: SparkSession, tmp_path: Path, url: str
) -> None:
    """The third batch comes a minute later, and brings as many new entities again."""
    clock = ManualClock(NOW)
    for number in range(3):
        rows = events(100 * number, 100)
        write_segment(tmp_path / "spool", "Endpoint", rows, str(number), number)
    counts = []
    options: dict[str, Any] = {"oal": OAL, "store": url, "settings": settings()}
    with pipeline(spark, tmp_path, clock=clock.now, **options) as running:

        def note(report: Any) -> None:
            counts.append(len(names(running.store)))
            if len(counts) == 2:
                clock.advance(60)

        running.on_batch = note
        running.run_available()
        assert total(running.store) == 300
    # Services named overflow, too, where the parts of a task had no place left for shop's.
    assert counts[0] <= LIMIT + 1
    assert counts[1] <= LIMIT + 1
    assert counts[1] < counts[2] <= 2 * LIMIT + 1


def test_known_entities_are_not_limited(spark: SparkSession, tmp_path: Path, url: str) -> None:
    """All 60 endpoints are there before; then only the new ones are too many, for the store."""
    write_segment(tmp_path / "spool", "Endpoint", events(0, 60), "0", 0)
    free = settings(max_new_entities=0)
    with pipeline(spark, tmp_path, oal=OAL, store=url, settings=free) as running:
        running.run_available()
        assert len(names(running.store)) == 60
        assert counted(running.store, "overflow") == {}
    write_segment(tmp_path / "spool", "Endpoint", events(0, 460), "1", 1)
    full = settings(max_entities=70)
    with pipeline(spark, tmp_path, oal=OAL, store=url, settings=full) as running:
        running.run_available()
        named = {value.entity_name: value.value for value in running.store.values("ep")}
        assert {named[f"/e{n:04}"] for n in range(60)} == {2}
        assert len(names(running.store)) <= 70 + 1
        assert ("Endpoint", STORE_FULL) in counted(running.store, "overflow")
        assert total(running.store) == 520


class Crash(BaseException):
    """The end of a process."""


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The driver ends before the books of a batch are committed."""

    def crash(store: Store, batch: Batch) -> Any:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", crash)
        yield patch


@pytest.mark.parametrize("export", [False, True])
def test_a_batch_that_is_repeated_counts_once(
    spark: SparkSession, tmp_path: Path, url: str, crashing: pytest.MonkeyPatch, export: bool
) -> None:
    """Parts that were committed keep their names, for exporters as well."""
    write_segment(tmp_path / "spool", "Endpoint", events(0, 500))
    options: dict[str, Any] = {"oal": OAL, "store": url, "settings": settings()}
    if export:
        options["outbox"] = OutboxSettings()
    with pytest.raises(Crash), pipeline(spark, tmp_path, **options) as running:
        running.run_available()
    crashing.undo()
    with pipeline(spark, tmp_path, **options) as running:
        running.run_available()
        store = running.store
        assert total(store) == 500
        assert len(names(store) - {"overflow"}) <= LIMIT
        values = {(value.bucket, value.entity_id): value.value for value in store.values("ep")}
        if export:
            assert listed_changes(store, tmp_path / "checkpoint", "ep") == values
        (rows,) = counted(store, "overflow").values()
        assert rows == 500 - len(names(store) - {"overflow"})


def test_names_with_ids_are_one_endpoint_unless_they_are_kept(
    spark: SparkSession, tmp_path: Path
) -> None:
    """``normalise_names`` is on by default."""
    rows = [span(f"{n:016}", name=f"GET /orders/{n}") for n in range(5)]
    endpoints = []
    for keep in (False, True):
        folder = tmp_path / str(keep)
        write_segment(folder / "spool", "Span", rows)
        given = settings(normalise_names=not keep)
        with pipeline(spark, folder, oal=OAL, settings=given) as running:
            running.run_available()
            endpoints.append(names(running.store))
    assert endpoints == [{"GET /orders/{id}"}, {f"GET /orders/{n}" for n in range(5)}]
