"""Entities: whatever their ids, for as long as there are rows of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from batchmill.sources import Grain
from batchmill.store import EntityRow, StatementRow, Store, TopNRow
from tests.kit.stores import MINUTE, Backend, Measurement, Writer, entity_row

DAY = 10_000
FIRST = 202403010000
ODD = ["nul\0l", "nul\ufffdl", "long" * 5000, "long" * 5000 + "!", "\0"]


def names(store: Store) -> list[str]:
    """Of all entities."""
    return [entity.name for entity in store.entities()]


def dangling(store: Store) -> list[Any]:
    """Keys in any table that no entity has."""
    tables = [f"{grain.value}_Endpoint" for grain in Grain] + ["topn", "statement", "entity_layer"]
    query = " UNION ALL ".join(
        f"SELECT '{table}', entity FROM \"{table}\" WHERE entity NOT IN (SELECT key FROM entity)"
        for table in tables
    )
    rows: list[Any] = store._read(lambda session: session.rows(query))
    return rows


def test_odd_ids_and_layers_are_kept_apart(backend: Backend) -> None:
    """A NUL, or more bytes than an index takes: each is its own, and is found by what it was."""
    store = backend.open()
    writer = Writer(store)
    rows = [Measurement(number, entity=f"e{number}") for number in range(len(ODD))]
    given = [EntityRow("given", id_, id_, frozenset([id_])) for id_ in ODD]
    for _ in range(2):
        writer.write(*rows, entities=given)
    assert len(store.entities()) == len(ODD)
    for number, id_ in enumerate(ODD):
        (value,) = store.values("slowest", entity=id_, layer=id_)
        assert value.value == number
        assert [entity.id for entity in store.entities(layer=id_)] == [value.entity_id]
        assert len(value.entity_id.encode()) <= 2000


def test_incompressible_ids_fit_too(backend: Backend) -> None:
    """PostgreSQL squeezes what repeats itself, so that alone says nothing of the limit."""
    store = backend.open()
    text = "".join(chr(0x4E00 + (number * 7919) % 20_000) for number in range(3000))
    Writer(store).write(
        Measurement(7), entities=[EntityRow("given", text, text, frozenset([text]))]
    )
    assert [value.value for value in store.values("slowest", entity=text, layer=text)] == [7]


def test_entities_go_with_their_last_row(backend: Backend) -> None:
    """Once all days that one was seen on are gone; its layers, too; and it may come back."""
    store = backend.open(ttl_days=1)
    writer = Writer(store)
    writer.write(Measurement(1, minute=FIRST, entity="gone"), Measurement(1, minute=FIRST))
    writer.write(Measurement(1, minute=FIRST + DAY))
    assert names(store) == ["gone", "one"]
    writer.write(Measurement(1, minute=FIRST + 2 * DAY, entity="new"))
    assert names(store) == ["new", "one"]
    assert dangling(store) == []
    writer.write(Measurement(5, minute=FIRST + 2 * DAY, entity="gone"))
    assert [value.value for value in store.values("slowest", entity="gone")] == [5]
    assert [entity.layers for entity in store.entities(name_like="gone")] == [{"GENERAL"}]


def test_a_late_row_does_not_make_an_entity_older(backend: Backend) -> None:
    """The last day is the greatest, in whichever order and from whichever writer it comes."""
    store = backend.open(ttl_days=1)
    writer = Writer(store)
    writer.write(Measurement(1, minute=FIRST + DAY))
    Writer(backend.open(ttl_days=1), stream="other").write(Measurement(1, minute=FIRST))
    writer.write(Measurement(1, minute=FIRST + 2 * DAY, entity="new"))
    assert names(store) == ["new", "one"]


def test_slow_calls_alone_keep_an_entity(backend: Backend) -> None:
    """Records and statements are rows of it like any others."""
    store = backend.open(ttl_days=1)
    writer = Writer(store)
    writer.write(Measurement(1, minute=FIRST))
    rows = [EntityRow("service", f"s{number}", f"s{number}") for number in range(2)]
    minute = FIRST + DAY
    writer.write(
        entities=rows,
        newest_minute=minute,
        topn=[TopNRow("db", 0, minute, 1, 1, "t", "s", "select", "select")],
        statements=[StatementRow("db", 1, minute, "select", 1, 1)],
    )
    writer.write(Measurement(1, minute=FIRST + 2 * DAY, entity="new"))
    assert names(store) == ["new", "s0", "s1"]
    assert dangling(store) == []


def test_entities_of_expired_rows_are_not_made(backend: Backend) -> None:
    """A row that came too late leaves nothing behind, not even a name."""
    store = backend.open(ttl_days=1)
    writer = Writer(store)
    writer.write(Measurement(1, minute=FIRST + 5 * DAY))
    late = [Measurement(1, minute=FIRST, entity="late"), Measurement(2, minute=FIRST + 5 * DAY)]
    batch = writer.batch(
        late,
        topn=[TopNRow("db", 0, FIRST, 9, 9, "t", "s", "select", "select")],
        statements=[StatementRow("db", 0, FIRST, "select", 1, 1)],
    )
    assert store.commit(batch).expired == 1
    assert names(store) == ["one"]
    assert dangling(store) == []


def test_a_removed_entity_comes_back_with_what_it_has_now(backend: Backend) -> None:
    """What was remembered of it from before, its layers say, does not count as being there."""
    store = backend.open(ttl_days=1)
    writer = Writer(store)
    for day, layers in enumerate((("GENERAL", "MESH"), (), ("GENERAL",), ("MESH",))):
        minute = FIRST + 2 * min(day, 2) * DAY
        row = Measurement(1, minute=minute, entity="x" if layers else "other")
        writer.write(row, entities=[entity_row(row.entity, layers)])
        seen = [entity.layers for entity in store.entities(name_like="x")]
        assert seen == [[{"GENERAL", "MESH"}], [], [{"GENERAL"}], [{"GENERAL", "MESH"}]][day]


def test_a_writer_that_keeps_more_days_has_no_keys_of_removed_ones(backend: Backend) -> None:
    """It may add to days that another one has removed, with the entities that went with them."""
    long = Writer(backend.open(ttl_days=30), stream="long", checkpoint="c1")
    short = Writer(backend.open(ttl_days=1), stream="short", checkpoint="c2")
    long.write(Measurement(1, minute=FIRST, entity="e"))
    short.write(Measurement(1, minute=FIRST + 9 * DAY, entity="other"))
    long.write(Measurement(5, minute=FIRST, entity="e"))
    assert dangling(long.store) == []
    assert [value.value for value in long.store.values("slowest", entity="e")] == [5]


@pytest.mark.parametrize("who", list(itertools.product((0, 1), repeat=3)))
def test_another_writer_may_have_removed_an_entity(backend: Backend, who: tuple[int, ...]) -> None:
    """Nobody goes on with a key that is gone, or that another entity has by now."""
    writers = [
        Writer(backend.open(ttl_days=1), stream=f"s{number}", checkpoint=f"c{number}")
        for number in range(2)
    ]
    for writer in writers:
        writer.write(Measurement(1, minute=MINUTE, entity="e"))
    for step, index in enumerate(who, start=1):
        writers[index].write(Measurement(2, minute=MINUTE + 2 * step * DAY, entity=f"new{step}"))
    last = MINUTE + 6 * DAY
    for writer in writers:
        writer.write(Measurement(7, minute=last, entity="e"))
    store = writers[0].store
    assert dangling(store) == []
    assert [value.value for value in store.values("calls", entity="e", start=last)] == [2]
    assert names(store) == ["e", "new3"]


def test_unknown_entities_are_looked_up_where_they_are_many(backend: Backend) -> None:
    """Few that this process has not met are taken for unknown; of more, the database is asked."""
    store = backend.open()
    Writer(store).write(*(Measurement(1, entity=f"e{number}") for number in range(3)))
    assert store.count_entities() == {"endpoint": 3}
    ids = [f"id-e{number}" for number in range(5)]
    assert store.unknown_entities("endpoint", ids) == {"id-e3", "id-e4"}
    assert store.unknown_entities("service", ids[:2]) == {"id-e0", "id-e1"}
    other = backend.open()
    assert other.unknown_entities("endpoint", ids, few=5) == set(ids)
    assert other.unknown_entities("endpoint", ids, few=4) == {"id-e3", "id-e4"}
    assert other.unknown_entities("endpoint", ODD) == set(ODD)
