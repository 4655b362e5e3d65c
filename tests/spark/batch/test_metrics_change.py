"""Metrics that come, go and change between restarts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from batchmill.sources import Grain
from batchmill.store import Store, StoredMetric, open_store
from tests.kit.pipelines import (
    Stored,
    counted,
    differences,
    endpoint_events,
    expected_of,
    pipeline,
    sqlite,
    stored,
    write_segment,
)
from tests.oracle.catalog import Row

KEPT = "kept = from(Endpoint.latency).longAvg(); tally = from(Endpoint.latency).percentile2(10);"
ADDED = "added = from(Endpoint.latency).percentile2(1); more = from(Endpoint.*).cpm();"
GOES = "goes = from(Endpoint.latency).max();"
FIRST = "changes = from(Endpoint.latency).sum();"
SECOND = "changes = from(Endpoint.latency).filter(status == true).sum();"

RUNS = (KEPT + GOES + FIRST, KEPT + ADDED + SECOND, KEPT + GOES + FIRST + ADDED)
"""The scripts of three runs: one goes and comes back, one changes and changes back, two come."""


class Runs:
    """A store after the three runs, each with rows of its own in the same buckets."""

    def __init__(self, store: Store, rows: list[list[Row]]) -> None:
        self.store = store
        self.rows = rows

    def after(self, *runs: int) -> list[Row]:
        return [row for run in runs for row in self.rows[run]]

    def of(self, name: str) -> Stored:
        """The values of a metric as it is now."""
        return {key: value for key, value in stored(self.store).items() if key[0] == name}

    def versions(self, name: str) -> list[Stored]:
        """The values of each version of a metric, oldest first."""
        metrics = [
            metric for metric in self.store.metrics(include_retired=True) if metric.name == name
        ]
        return [
            self._values(result) for result in sorted(metrics, key=lambda result: result.version)
        ]

    def _values(self, metric: StoredMetric) -> Stored:
        return {
            (metric.name, grain.value, value.bucket, value.entity_id): value.value
            for grain in Grain
            for value in self.store.values(metric, grain=grain)
        }


@pytest.fixture(scope="module")
def runs(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Three runs with three scripts, over the same minutes."""
    folder = tmp_path_factory.mktemp("change")
    every = endpoint_events(90)
    rows = [every[number::3] for number in range(3)]
    for number, oal in enumerate(RUNS):
        write_segment(folder / "spool", "Endpoint", rows[number], str(number), number)
        with pipeline(spark, folder, oal=oal) as running:
            (report,) = running.run_available()
            assert (report.number, report.stats.rows) == (number, 30)
    with open_store(sqlite(folder)) as store:
        yield Runs(store, rows)


def test_a_metric_that_stays_has_all_its_history(runs: Runs) -> None:
    """Others came and went; its values are those of all rows, in minute, hour and day."""
    wanted = expected_of(runs.after(0, 1, 2), KEPT)
    assert differences(runs.of("kept") | runs.of("tally"), wanted) == []


def test_a_new_metric_starts_with_the_rows_that_come_after_it(runs: Runs) -> None:
    """Nothing is recounted for it: it knows the rows of the runs that it was in."""
    wanted = expected_of(runs.after(1, 2), ADDED)
    assert differences(runs.of("added") | runs.of("more"), wanted) == []


def test_a_removed_metric_keeps_its_history(runs: Runs) -> None:
    """It can still be read as it was, and what came after its removal is not in it."""
    before = runs.versions("goes")[0]
    assert differences(before, expected_of(runs.after(0), GOES)) == []


def test_a_metric_that_comes_back_starts_anew(runs: Runs) -> None:
    """Its gap cannot be filled, so it is a new version beside the old one."""
    _, again = runs.versions("goes")
    assert differences(again, expected_of(runs.after(2), GOES)) == []
    assert runs.of("goes") == again


def test_a_changed_metric_does_not_mix_with_what_it_was(runs: Runs) -> None:
    """Each definition has its own rows, also after it is changed back."""
    first, second, third = runs.versions("changes")
    assert differences(first, expected_of(runs.after(0), FIRST)) == []
    assert differences(second, expected_of(runs.after(1), SECOND)) == []
    assert differences(third, expected_of(runs.after(2), FIRST)) == []


def test_only_the_metrics_of_the_last_script_are_active(runs: Runs) -> None:
    """What the script does not have is not computed."""
    active = {metric.name for metric in runs.store.metrics()}
    assert active == {"kept", "tally", "goes", "changes", "added", "more"}
    retired = [metric for metric in runs.store.metrics(include_retired=True) if not metric.active]
    assert sorted(metric.name for metric in retired) == ["changes", "changes", "goes"]


def test_rows_are_read_once_whatever_the_scripts(runs: Runs) -> None:
    """No restart with another script reads a segment again."""
    assert counted(runs.store, "rows") == {("Endpoint", ""): 90}
