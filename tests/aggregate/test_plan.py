"""What metrics have in common is computed once, and only what they need is read."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")

from batchmill.aggregate import Aggregator
from batchmill.aggregate.plan import SourcePlan
from batchmill.oal import load


def plan(script: str) -> SourcePlan:
    """The plan of a script's one source."""
    metrics = load(script)
    ((source, own),) = metrics.by_source().items()
    return Aggregator(metrics.catalog.source(source), own).plan


def test_equal_states_are_computed_once() -> None:
    """cpm, average, percent and apdex of one source share one count; metrics share a percentile."""
    made = plan(
        """
        cpm = from(Endpoint.*).cpm();
        avg = from(Endpoint.latency).longAvg();
        sla = from(Endpoint.*).percent(status == true);
        apdex = from(Endpoint.latency).apdex(serviceName, status);
        p = from(Endpoint.latency).percentile2(10);
        old = from(Endpoint.latency).percentile(10);
        """
    )
    # One count, one sum, the matches of percent, two of apdex; one list of buckets.
    assert (len(made.totals), len(made.tallies)) == (5, 1)
    columns = {column for own in made.cells.values() for column in own}
    assert columns == {*made.totals, *made.tallies}


def test_tallies_of_one_value_share_its_buckets_where_these_fit() -> None:
    """Buckets of 10 fill those of 100; those of 15 are counted by themselves."""
    made = plan(
        """
        p = from(Endpoint.latency).percentile2(10);
        ok = from(Endpoint.latency).filter(status == true).percentile2(10);
        h = from(Endpoint.latency).histogram(100, 20);
        odd = from(Endpoint.latency).histogram(15, 20);
        """
    )
    assert sorted((tally.key.width, tally.coarser) for tally in made.tallies.values()) == [
        (10, 1),
        (10, 1),
        (10, 10),
        (15, 1),
    ]


def test_conditions_are_the_same_in_any_order() -> None:
    """Metrics with the same filters share a count."""
    made = plan(
        """
        a = from(Endpoint.*).filter(status == true).count();
        b = from(Endpoint.latency).filter(status == true).sum();
        c = from(Endpoint.*).filter(status == true).filter(latency > 5).count();
        d = from(Endpoint.*).filter(latency > 5).percent(status == true);
        """
    )
    # Of all that are slow, of the successful, of both; and the sum of the successful.
    assert len(made.totals) == 4


def test_only_the_columns_that_are_needed_are_read() -> None:
    """Those of its metrics, its entity, and those that every row must have."""
    made = plan("a = from(Endpoint.*).filter(status == true).count();")
    assert made.columns == {"status", "latency", "name", "serviceName", "serviceLayer"}
