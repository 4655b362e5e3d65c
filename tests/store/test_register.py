"""Registering metrics: columns of their own, versions, re-use."""

from __future__ import annotations

import pytest

from batchmill.oal import load
from batchmill.sources import UnknownNameError
from batchmill.store import LayoutChangedError, NamesClashError, TooManyColumnsError
from batchmill.store.sql.registry import Registry, allot
from batchmill.store.sql.schema import check_source_name
from batchmill.store.sqlite.store import SQLITE
from tests.kit.stores import MINUTE, Backend, Measurement, Writer

TWO = "a = from(Endpoint.*).count(); b = from(Endpoint.latency).max();"
ONE = "a = from(Endpoint.*).count();"
DAY = 10_000


def test_registering_again_changes_nothing(backend: Backend) -> None:
    """The same metrics get the same columns, in whatever order they are listed."""
    store = backend.open()
    layout = store.register(load(TWO))
    assert store.register(load(TWO)) == layout
    swapped = "b = from(Endpoint.latency).max(); a = from(Endpoint.*).count();"
    assert store.register(load(swapped)) == layout
    assert [each.version for each in store.metrics(include_retired=True)] == [1, 1]


def test_no_two_metrics_share_a_column(backend: Backend) -> None:
    """Even metrics with equal states are kept apart."""
    layout = backend.open().register(
        load("a = from(Endpoint.*).count(); b = from(Endpoint.*).count();")
    )
    assert layout.columns["a"] != layout.columns["b"]


def test_a_removed_metric_disturbs_no_other(backend: Backend) -> None:
    """It is retired, its history stays readable, and the others go on."""
    store = backend.open()
    Writer(store, script=TWO).write(Measurement(30))
    assert store.register(load(ONE), stream="live").columns.keys() == {"a"}
    assert [each.name for each in store.metrics()] == ["a"]
    assert {each.name: each.active for each in store.metrics(True)} == {"a": True, "b": False}
    assert [each.value for each in store.values("b")] == [30]
    assert [each.value for each in store.values("a")] == [1]


def test_a_backfill_retires_nothing(backend: Backend) -> None:
    """With retire=False metrics are added, and the others stay active."""
    store = backend.open()
    layout = store.register(load(ONE))
    more = store.register(load("c = from(Endpoint.*).count();"), retire=False)
    assert [each.name for each in store.metrics()] == ["a", "c"]
    assert set(layout.columns["a"]).isdisjoint(more.columns["c"])


def test_an_added_metric_starts_afresh(backend: Backend) -> None:
    """Rows from before it came have no value of it; since when is known."""
    store = backend.open()
    Writer(store, script=ONE).write(Measurement(30))
    store.register(load(TWO))
    assert store.values("b") == []
    since = {each.name: each.since_minute for each in store.metrics()}
    assert since == {"a": None, "b": MINUTE}


@pytest.mark.parametrize("between", ["b = from(Endpoint.latency).min();", ONE])
def test_a_changed_or_returning_metric_is_a_new_version(backend: Backend, between: str) -> None:
    """New columns, no values at first; the former version is read under its number."""
    store = backend.open()
    first = Writer(store, script=TWO)
    first.write(Measurement(30))
    store.register(load(between), stream="live")
    again = store.register(load(TWO), stream="live")
    assert set(again.columns["b"]).isdisjoint(first.layout.columns["b"])
    assert store.values("b") == []
    versions = {each.version: each for each in store.metrics(True) if each.name == "b"}
    assert [each.value for each in store.values(versions[1])] == [30]
    assert versions[max(versions)].active


def test_a_column_is_used_again_once_its_values_have_expired(backend: Backend) -> None:
    """Not a day earlier, only for the same kind of cell, and with nothing left in it."""
    store = backend.open(ttl_days=2)
    first = Writer(store, script=TWO)
    first.write(Measurement(30))
    (old,) = first.layout.columns["b"]
    (read,) = [each for each in store.metrics() if each.name == "b"]
    other = backend.open(ttl_days=2)
    other.register(load(ONE), stream="live")
    # The writer still has the old layout, and writes the column of a metric that is gone.
    first.write(Measurement(1, minute=MINUTE + 2 * DAY))
    early = other.register(load(ONE + "c = from(Endpoint.latency).max();"), stream="live")
    assert old not in early.columns["c"]
    first.write(Measurement(99, minute=MINUTE + 3 * DAY))
    script = ONE + "c = from(Endpoint.latency).max(); d = from(Endpoint.latency).{}();"
    assert old not in other.register(load(script.format("min")), stream="live").columns["d"]
    assert other.register(load(script.format("max")), stream="live").columns["d"] == (old,)
    assert store.values("d") == []
    with pytest.raises(UnknownNameError):
        store.values("b")
    with pytest.raises(LayoutChangedError, match=f"{old} of Endpoint belongs to the metric 'd'"):
        store.commit(first.batch([Measurement(1)]))
    assert store.values("d") == []
    first.metrics = load(script.format("max"))
    first.layout = store.register(first.metrics, stream="live")
    first.write(Measurement(5, minute=MINUTE + 3 * DAY))
    assert [each.value for each in store.values("d")] == [5]
    # What was known of the old one does not lead to the values of another.
    assert store.values(read) == []


def test_too_many_columns_are_refused(backend: Backend) -> None:
    """A clear error names source, need and limit, and nothing is registered."""
    store = backend.open()
    script = "".join(f"m{number} = from(Endpoint.latency).longAvg();" for number in range(1000))
    with pytest.raises(TooManyColumnsError, match="Endpoint take 2002 columns") as caught:
        store.register(load(script))
    assert caught.value.needed == 2002
    assert store.metrics(True) == []
    store.register(load(ONE))


def test_columns_are_allotted_without_a_store() -> None:
    """The decision is a pure function: new metrics are numbered on from the highest column."""
    result = allot(load(TWO), Registry(), cutoff=0, max_columns=10, retire=True)
    assert [each.columns for each in result.added] == [(1,), (2,)]
    assert result.retired == []
    with pytest.raises(TooManyColumnsError):
        allot(load(TWO), Registry(), cutoff=0, max_columns=3, retire=True)


def test_sources_whose_tables_would_be_one_are_refused() -> None:
    """SQLite does not tell names apart by case alone."""
    with pytest.raises(NamesClashError, match="case"):
        check_source_name(SQLITE, "Order", {"Order", "ORDER"})
    check_source_name(SQLITE, "Order", {"Order", "Orders"})


def test_an_unknown_metric_names_close_ones(backend: Backend) -> None:
    """Reading a metric that is not there says which one may be meant."""
    store = backend.open()
    store.register(load("endpoint_cpm = from(Endpoint.*).cpm();"))
    with pytest.raises(UnknownNameError, match="did you mean endpoint_cpm"):
        store.values("endpoint_cpn")
