"""Registering metrics: columns, versions, re-use, and several streams on one store."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchmill.oal import load
from batchmill.sources import UnknownNameError
from batchmill.store import (
    LayoutChangedError,
    MetricConflictError,
    NamesClashError,
    Store,
    TooManyColumnsError,
)
from batchmill.store.sql import schema
from batchmill.store.sql.registry import Registry, allot
from batchmill.store.sql.schema import check_source_name
from batchmill.store.sqlite import SQLITE
from tests.kit.exporters import Mill
from tests.kit.stores import (
    MINUTE,
    Backend,
    Measurement,
    Writer,
    all_states,
    downgrade,
    expected_states,
    metrics,
)

TWO = "a = from(Endpoint.*).count(); b = from(Endpoint.latency).max();"
DAY = 10_000
A = "a = from(Endpoint.*).count();"
B = "b = from(Endpoint.latency).max();"
SHARED = "s = from(Endpoint.latency).min();"
OTHER = "a = from(Endpoint.latency).max();"


def test_registering_again_changes_nothing(backend: Backend) -> None:
    """The same metrics get the same columns, in whatever order they are listed."""
    store = backend.open()
    layout = store.register(load(TWO))
    assert store.register(load(TWO)) == layout
    swapped = "b = from(Endpoint.latency).max(); a = from(Endpoint.*).count();"
    assert store.register(load(swapped)) == layout
    assert [metric.version for metric in store.metrics(include_retired=True)] == [1, 1]


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
    assert store.register(load(A), stream="live").columns.keys() == {"a"}
    assert [metric.name for metric in store.metrics()] == ["a"]
    assert {metric.name: metric.active for metric in store.metrics(True)} == {"a": True, "b": False}
    assert [value.value for value in store.values("b")] == [30]
    assert [value.value for value in store.values("a")] == [1]


def test_a_backfill_retires_nothing(backend: Backend) -> None:
    """With retire=False metrics are added, and the others stay active."""
    store = backend.open()
    layout = store.register(load(A))
    more = store.register(load("c = from(Endpoint.*).count();"), retire=False)
    assert [metric.name for metric in store.metrics()] == ["a", "c"]
    assert set(layout.columns["a"]).isdisjoint(more.columns["c"])


def test_an_added_metric_starts_afresh(backend: Backend) -> None:
    """Rows from before it came have no value of it; since when is known."""
    store = backend.open()
    Writer(store, script=A).write(Measurement(30))
    store.register(load(TWO))
    assert store.values("b") == []
    since = {metric.name: metric.since_minute for metric in store.metrics()}
    assert since == {"a": None, "b": MINUTE}


@pytest.mark.parametrize("between", ["b = from(Endpoint.latency).min();", A])
def test_a_changed_or_returning_metric_is_a_new_version(backend: Backend, between: str) -> None:
    """New columns, no values at first; the former version is read under its number."""
    store = backend.open()
    first = Writer(store, script=TWO)
    first.write(Measurement(30))
    store.register(load(between), stream="live")
    again = store.register(load(TWO), stream="live")
    assert set(again.columns["b"]).isdisjoint(first.layout.columns["b"])
    assert store.values("b") == []
    versions = {metric.version: metric for metric in store.metrics(True) if metric.name == "b"}
    assert [value.value for value in store.values(versions[1])] == [30]
    assert versions[max(versions)].active


def test_a_column_is_used_again_once_its_values_have_expired(backend: Backend) -> None:
    """Not a day earlier, only for the same kind of cell, and with nothing left in it."""
    store = backend.open(ttl_days=2)
    first = Writer(store, script=TWO)
    first.write(Measurement(30))
    (old,) = first.layout.columns["b"]
    (read,) = [metric for metric in store.metrics() if metric.name == "b"]
    other = backend.open(ttl_days=2)
    other.register(load(A), stream="live")
    # The writer still has the old layout, and writes the column of a metric that is gone.
    first.write(Measurement(1, minute=MINUTE + 2 * DAY))
    early = other.register(load(A + "c = from(Endpoint.latency).max();"), stream="live")
    assert old not in early.columns["c"]
    first.write(Measurement(99, minute=MINUTE + 3 * DAY))
    script = A + "c = from(Endpoint.latency).max(); d = from(Endpoint.latency).{}();"
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
    assert [value.value for value in store.values("d")] == [5]
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
    store.register(load(A))


def test_columns_are_allotted_without_a_store() -> None:
    """The decision is a pure function: new metrics are numbered on from the highest column."""
    result = allot(load(TWO), Registry(), cutoff=0, max_columns=10, retire=True)
    assert [metric.columns for metric in result.added] == [(1,), (2,)]
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


def active(store: Store) -> list[str]:
    """The names of the metrics that are being computed."""
    return [metric.name for metric in store.metrics()]


def test_streams_keep_each_others_metrics(backend: Backend) -> None:
    """Each retires its own only, and what both compute goes with the last of them."""
    store = backend.open()
    one = Writer(store, stream="one", script=A + SHARED)
    two = Writer(store, stream="two", script=B + SHARED)
    assert active(store) == ["a", "b", "s"]
    one.write(Measurement(30))
    two.write(Measurement(50))
    assert [value.value for value in store.values("a")] == [1]
    assert [value.value for value in store.values("b")] == [50]
    assert [value.value for value in store.values("s")] == [30]
    store.register(load(A), stream="one")
    assert active(store) == ["a", "b", "s"]
    store.register(load(B), stream="two")
    assert active(store) == ["a", "b"]
    store.register([], stream="one")
    assert active(store) == ["b"]


def test_a_live_column_is_never_given_away(backend: Backend) -> None:
    """However long the other stream's metric is not in this one's script."""
    store = backend.open(ttl_days=1)
    one = Writer(store, stream="one", script=B)
    two = Writer(store, stream="two", script=A)
    for day in range(4):
        one.write(Measurement(day, minute=MINUTE + day * DAY))
        new = f"m{day} = from(Endpoint.latency).max();"
        layout = store.register(load(A + new), stream="two")
        assert layout.columns[f"m{day}"] != one.layout.columns["b"]
    assert [value.value for value in store.values("b")] == [2, 3]
    assert two.layout.columns["a"] == layout.columns["a"]


@pytest.mark.parametrize("retire", [True, False])
def test_another_definition_is_refused(backend: Backend, retire: bool) -> None:
    """Of a metric that another stream computes: what to do is told, and nothing is changed."""
    store = backend.open()
    writer = Writer(store, stream="one", script=A)
    advice = "another name" if retire else "--oal"
    with pytest.raises(MetricConflictError, match=advice) as caught:
        store.register(load(OTHER + B), stream="two", retire=retire)
    assert (caught.value.metric, caught.value.streams) == ("a", ("one",))
    assert [(metric.name, metric.version) for metric in store.metrics(True)] == [("a", 1)]
    writer.write(Measurement(30))
    # Its own stream may change it.
    store.register(load(OTHER), stream="one")
    assert [(metric.name, metric.version) for metric in store.metrics()] == [("a", 2)]


def test_another_way_of_keeping_it_is_no_conflict(backend: Backend) -> None:
    """The same definition, kept in other cells by a newer batchmill, is a new version for all."""
    store = backend.open()
    for stream in ("one", "two"):
        store.register(load(A), stream=stream)
    older = """UPDATE metric SET plan = '{"function": "count", "args": [], "shapes": ["sum"]}'"""
    store._write(lambda session: session.run(older))
    for stream in ("one", "two"):
        store.register(load(A), stream=stream)
        assert [(metric.name, metric.version) for metric in store.metrics()] == [("a", 2)]


def test_a_backfill_counts_while_it_runs(backend: Backend) -> None:
    """What only a backfill computes stays until it has ended, and goes at the stream's start."""
    store, other = backend.open(), backend.open()
    Writer(store, stream="one", script=A)
    Writer(other, stream="fill", checkpoint="c2", script=A + B, retire=False)
    store.register(load(A), stream="one")
    assert active(store) == ["a", "b"]
    other.release("fill")
    store.register(load(SHARED), stream="one", retire=False)
    assert active(store) == ["a", "b", "s"]
    store.register(load(A), stream="one")
    assert active(store) == ["a"]
    # It let go of what it shared, too.
    store.register(load(OTHER), stream="one")
    assert [metric.version for metric in store.metrics()] == [2]


def test_a_backfill_may_change_what_is_its_own(backend: Backend) -> None:
    """Repeated with another script, nobody else computing that metric."""
    store = backend.open()
    store.register(load(A), stream="fill", retire=False)
    store.register(load(OTHER), stream="fill", retire=False)
    assert [(metric.name, metric.version) for metric in store.metrics()] == [("a", 2)]


def test_the_look_at_a_lock_keeps_nobody_out(backend: Backend) -> None:
    """A stream whose writer is looked for can be claimed right after."""
    store, other = backend.open(), backend.open()
    writer = Writer(store, stream="fill", script=A, retire=False)
    for number in range(3):
        store.release("fill")
        other.register(load(A), stream="one")
        claim = store.claim("fill", writer.checkpoint, fresh=False, committed=None)
        assert claim.epoch == number + 2


def test_a_store_of_the_first_schema_goes_on(
    empty_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams own what is active, its entities were seen on the newest day."""
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        old = empty_backend.open()
        run = old._write
        run(
            lambda session: session.run(
                "INSERT INTO stream (name, checkpoint_id, epoch) "
                "VALUES ('live', 'checkpoint-1', 1), ('backfill-x', 'c', 1)"
            )
        )
        run(
            lambda session: session.run(
                "INSERT INTO entity (kind, id, name, roles) VALUES ('endpoint', 'x', 'x', '{}')"
            )
        )
        run(
            lambda session: session.run(
                "INSERT INTO metric (name, version, source, definition, function, labelled, plan, "
                "cells, active) SELECT 'm', 1, 'Endpoint', 'gone', 'count', 0, "
                """'{"function": "count", "args": [], "shapes": ["count"]}', '[]', 1"""
            )
        )
        newest = f"UPDATE meta SET value = '{MINUTE}' WHERE key = 'newest_minute'"
        run(lambda session: session.run(newest))
        old.close()
    store = empty_backend.open()
    read = store._read
    owners = read(lambda session: session.rows("SELECT name, stream FROM metric_owner"))
    assert owners == [("m", "live")]
    days = read(lambda session: session.rows("SELECT last_day FROM entity"))
    assert days == [(MINUTE // DAY,)]
    writer = Writer(store)
    assert "m" not in active(store)
    writer.write(Measurement(30))
    assert all_states(store) == expected_states(metrics(), [Measurement(30)])


def test_a_store_of_the_second_schema_gets_an_outbox(backend: Backend, tmp_path: Path) -> None:
    """What it holds stays."""
    writer = Writer(backend.open())
    writer.write(Measurement(5))
    downgrade(writer.store, 2)
    backend.close()
    store: Store = backend.open()
    assert [value.value for value in store.values("calls")] == [1]
    one = Mill(store, tmp_path / "checkpoint", stream="other")
    one.commit(Measurement(7))
    assert one.named() == one.files()
