"""Several streams on one store: nobody retires, changes or overwrites what another computes."""

from __future__ import annotations

import pytest

from batchmill.oal import load
from batchmill.store import MetricConflictError, Store
from batchmill.store.sql import schema
from tests.kit.stores import (
    MINUTE,
    Backend,
    Measurement,
    Writer,
    all_states,
    expected_states,
    metrics,
)

A = "a = from(Endpoint.*).count();"
B = "b = from(Endpoint.latency).max();"
SHARED = "s = from(Endpoint.latency).min();"
OTHER = "a = from(Endpoint.latency).max();"
DAY = 10_000


def active(store: Store) -> list[str]:
    """The names of the metrics that are being computed."""
    return [each.name for each in store.metrics()]


def test_streams_keep_each_others_metrics(backend: Backend) -> None:
    """Each retires its own only, and what both compute goes with the last of them."""
    store = backend.open()
    one = Writer(store, stream="one", script=A + SHARED)
    two = Writer(store, stream="two", script=B + SHARED)
    assert active(store) == ["a", "b", "s"]
    one.write(Measurement(30))
    two.write(Measurement(50))
    assert [each.value for each in store.values("a")] == [1]
    assert [each.value for each in store.values("b")] == [50]
    assert [each.value for each in store.values("s")] == [30]
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
    assert [each.value for each in store.values("b")] == [2, 3]
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
    assert [(each.name, each.version) for each in store.metrics(True)] == [("a", 1)]
    writer.write(Measurement(30))
    # Its own stream may change it.
    store.register(load(OTHER), stream="one")
    assert [(each.name, each.version) for each in store.metrics()] == [("a", 2)]


def test_another_way_of_keeping_it_is_no_conflict(backend: Backend) -> None:
    """The same definition, kept in other cells by a newer batchmill, is a new version for all."""
    store = backend.open()
    for stream in ("one", "two"):
        store.register(load(A), stream=stream)
    older = """UPDATE metric SET plan = '{"function": "count", "args": [], "shapes": ["sum"]}'"""
    store._write(lambda session: session.run(older))
    for stream in ("one", "two"):
        store.register(load(A), stream=stream)
        assert [(each.name, each.version) for each in store.metrics()] == [("a", 2)]


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
    assert [each.version for each in store.metrics()] == [2]


def test_a_backfill_may_change_what_is_its_own(backend: Backend) -> None:
    """Repeated with another script, nobody else computing that metric."""
    store = backend.open()
    store.register(load(A), stream="fill", retire=False)
    store.register(load(OTHER), stream="fill", retire=False)
    assert [(each.name, each.version) for each in store.metrics()] == [("a", 2)]


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
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams own what is active, its entities were seen on the newest day."""
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        old = backend.open()
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
    store = backend.open()
    read = store._read
    owners = read(lambda session: session.rows("SELECT name, stream FROM metric_owner"))
    assert owners == [("m", "live")]
    days = read(lambda session: session.rows("SELECT last_day FROM entity"))
    assert days == [(MINUTE // DAY,)]
    writer = Writer(store)
    assert "m" not in active(store)
    writer.write(Measurement(30))
    assert all_states(store) == expected_states(metrics(), [Measurement(30)])
