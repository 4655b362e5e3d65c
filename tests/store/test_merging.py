"""Merging: any order and any grouping of deltas gives equal states."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchmill.oal import double_limbs, exact_double
from batchmill.sources import Grain
from batchmill.store import (
    MAX_LABELS,
    OVERFLOW_LABELS,
    Deltas,
    encode_label_sums,
    encode_labels,
    encode_numbers,
)
from batchmill.store.sql.session import COMPACT_ABOVE, COMPACT_EVERY
from batchmill.store.states import split
from tests.kit.servers.postgres import Postgres
from tests.kit.stores import (
    MINUTE,
    Backend,
    Measurement,
    Writer,
    all_states,
    entity_row,
    expected_states,
    metrics,
)

ROWS = st.lists(
    st.builds(
        Measurement,
        st.integers(0, 10**6),
        st.text(max_size=5),
        st.sampled_from([MINUTE, MINUTE + 1, MINUTE + 100, MINUTE + 10_000]),
        st.sampled_from(["one", "two", "three"]),
    ),
    min_size=1,
    max_size=30,
)


def check_grouping(url: str, rows: list[Measurement], data: st.DataObject) -> None:
    """Write rows in some order, cut into some batches, and compare."""
    shuffled = data.draw(st.permutations(rows))
    cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=6))
    bounds = [0, *sorted(cuts), len(rows)]
    backend = Backend(url)
    try:
        writer = Writer(backend.open())
        for start, stop in itertools.pairwise(bounds):
            writer.write(*shuffled[start:stop])
        assert all_states(writer.store) == expected_states(writer.metrics, rows)
    finally:
        backend.close()


@settings(max_examples=25, deadline=None)
@given(ROWS, st.data())
def test_sqlite_merges_in_any_order_and_grouping(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Measurement], data: st.DataObject
) -> None:
    """However rows are ordered and cut into batches, SQLite ends with the same states."""
    check_grouping(f"sqlite:///{tmp_path_factory.mktemp('store')}/s.db", rows, data)


@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(rows=ROWS, data=st.data())
def test_postgres_merges_in_any_order_and_grouping(
    postgres: Postgres, rows: list[Measurement], data: st.DataObject
) -> None:
    """However rows are ordered and cut into batches, PostgreSQL ends with the same states."""
    check_grouping(postgres.new_database(), rows, data)


def test_a_list_may_fill_several_columns(backend: Backend) -> None:
    """Metrics that share a state share its list, where some of its rows are too old as well."""
    writer = Writer(backend.open(ttl_days=1))
    rows = [Measurement(n, minute=MINUTE + 10_000 * n, entity=f"e{n % 2}") for n in range(4)]
    batch = writer.batch(rows)
    (calls,), (_, count) = writer.layout.columns["calls"], writer.layout.columns["avg"]
    for deltas in batch.deltas:
        assert deltas.cells.pop(count) == deltas.cells[calls]
        deltas.shared = {count: calls}
    assert writer.store.commit(batch).merged == 6
    assert all_states(writer.store) == expected_states(writer.metrics, rows[2:])


def test_compacting_keeps_the_states_and_bounds_the_text(backend: Backend) -> None:
    """Tallies that are appended to again and again stay short, and mean the same."""
    store = backend.open()
    writer = Writer(store)
    keys = range(40)
    numbers = encode_numbers(dict.fromkeys(keys, 2))
    labels = encode_labels({f'label "{key}\\': 2 for key in keys})
    sums = encode_label_sums({f"läbel\t{key}": (5, 2) for key in keys})
    batches = 3 * COMPACT_EVERY
    columns = {
        name: writer.layout.columns[name][0] for name in ("percentile", "statuses", "by_name")
    }
    for _ in range(batches):
        texts = {"percentile": [numbers], "statuses": [labels], "by_name": [sums]}
        cells = {columns[name]: values for name, values in texts.items()}
        writer.write(
            entities=[entity_row("one")],
            deltas=[Deltas("Endpoint", Grain.MINUTE, [MINUTE], [0], cells)],
        )
    n = 2 * batches
    (row,) = store.states("percentile")
    assert row.states == (dict.fromkeys(keys, n),)
    (row,) = store.states("statuses")
    assert row.states == ({f'label "{key}\\': n for key in keys},)
    (row,) = store.states("by_name")
    assert row.states == ({f"läbel\t{key}": (5 * batches, n) for key in keys},)
    read = store._read
    names = ", ".join(columns.values())
    ((*texts_now,),) = read(lambda session: session.rows(f'SELECT {names} FROM "minute_Endpoint"'))
    for text, piece in zip(texts_now, (numbers, labels, sums), strict=True):
        assert piece is not None
        assert len(text) <= (COMPACT_EVERY + 2) * len(piece) < batches * len(piece)


def test_labels_of_a_cell_are_bounded(backend: Backend) -> None:
    """The most frequent stay, ties by name; the rest is one label, and counted. No row is lost."""
    store = backend.open()
    writer = Writer(store)
    columns = {name: writer.layout.columns[name][0] for name in ("statuses", "by_name")}
    batches = 2 * COMPACT_EVERY
    for number in range(batches):
        labels = {f"é{key:04}": 1 for key in range(100 * number, 100 * number + 100)}
        labels |= {"often": 3, "overflow": 1}
        texts = {
            "statuses": encode_labels(labels),
            "by_name": encode_label_sums({label: (7 * n, n) for label, n in labels.items()}),
        }
        cells = {columns[name]: [text] for name, text in texts.items()}
        writer.write(
            entities=[entity_row("one")],
            deltas=[Deltas("Endpoint", Grain.MINUTE, [MINUTE], [0], cells)],
        )
    ((statuses,),) = (row.states for row in store.states("statuses"))
    ((by_name,),) = (row.states for row in store.states("by_name"))
    rows = 104 * batches
    assert sum(statuses.values()) == rows
    assert tuple(map(sum, zip(*by_name.values(), strict=True))) == (7 * rows, rows)
    assert statuses["often"] == 3 * batches
    assert statuses == {label: n for label, (_, n) in by_name.items()}
    assert len(statuses) <= MAX_LABELS + 1 + 100 * COMPACT_EVERY < 100 * batches
    assert all(f"é{key:04}" in statuses for key in range(MAX_LABELS - 1))
    moved = statuses["overflow"] - batches
    assert moved >= 100 * (batches - COMPACT_EVERY) - MAX_LABELS
    key = (OVERFLOW_LABELS, "Endpoint", "too many labels of an entity")
    assert store.counters()[key] == 2 * moved


def test_labels_that_postgres_cannot_hold_are_bounded_too(backend: Backend) -> None:
    """A NUL in a label leaves no way to make a cell that grows without end."""
    store = backend.open()
    writer = Writer(store)
    (column,) = writer.layout.columns["statuses"]
    for number in range(COMPACT_EVERY):
        labels = {f"\0{'x' * 200}{key}": 1 for key in range(300 * number, 300 * number + 300)}
        writer.write(
            entities=[entity_row("one")],
            deltas=[
                Deltas("Endpoint", Grain.MINUTE, [MINUTE], [0], {column: [encode_labels(labels)]})
            ],
        )
    (row,) = store.states("statuses")
    assert sum(row.states[0].values()) == 300 * COMPACT_EVERY
    assert len(row.states[0]) < 300 * COMPACT_EVERY


def test_a_label_that_postgres_cannot_hold_is_not_lost(backend: Backend) -> None:
    """A NUL in a label: a tally that cannot be compacted is left as it is, and still right."""
    store = backend.open()
    writer = Writer(store)
    name = "a\0" + "x" * COMPACT_ABOVE
    for _ in range(COMPACT_EVERY + 1):
        writer.write(Measurement(1, name=name))
    (row,) = store.states("statuses")
    assert row.states == ({name: COMPACT_EVERY + 1},)


def test_nothing_merged_with_something_is_that(backend: Backend) -> None:
    """A null on either side changes nothing, for every kind of cell."""
    store = backend.open()
    writer = Writer(store)
    row = Measurement(30)
    nothing = writer.batch([row])
    for deltas in nothing.deltas:
        deltas.cells = {name: [None] for name in deltas.cells}
    store.commit(nothing)
    writer.number += 1
    assert store.states("slowest") == []
    assert store.values("calls") == []
    writer.write(row)
    nothing.number = writer.number
    store.commit(nothing)
    assert all_states(store) == expected_states(metrics(), [row])


def limbs_of(value: float) -> list[int]:
    """The cells of one double."""
    whole, *fraction = double_limbs(value)
    return [*split(whole), *fraction]


def test_sums_may_outgrow_64_bits(backend: Backend) -> None:
    """Of longs and of doubles, up or down: nothing turns into a float, overflows or wraps."""
    script = """
        total = from(GenAIModelAccess.totalEstimatedCost).sum();
        mean = from(GenAIModelAccess.totalEstimatedCost).longAvg();
        above = from(ServiceInstanceJVMCPU.usePercent).sumDouble();
        by_name = from(GenAIModelAccess.*).labelAvg(modelName, totalEstimatedCost);
    """
    store = backend.open()
    writer = Writer(store, script=script)
    columns = writer.layout.columns
    greatest, least = 2**63 - 1, -(2**63)
    # As often as it takes for a tally to be summed up in the database.
    times = 3 * COMPACT_EVERY
    for value in [greatest] * times:
        tally = encode_label_sums({"x" * COMPACT_ABOVE: (value, 1)})
        longs: dict[str, list[Any]] = dict(
            zip(
                (*columns["total"], *columns["mean"], *columns["by_name"]),
                ([cell] for cell in (*split(value), *split(value), 1, tally)),
                strict=True,
            )
        )
        doubles: dict[str, list[Any]] = dict(
            zip(columns["above"], ([limb] for limb in limbs_of(2.0**62)), strict=True)
        )
        below = {name: [split(least)[i % 2]] for i, name in enumerate(columns["total"])}
        writer.write(
            entities=[entity_row("one")],
            deltas=[
                Deltas("GenAIModelAccess", Grain.MINUTE, [MINUTE], [0], longs),
                Deltas("GenAIModelAccess", Grain.HOUR, [MINUTE // 100], [0], below),
                Deltas("ServiceInstanceJVMCPU", Grain.MINUTE, [MINUTE], [0], doubles),
            ],
        )
    assert [value.value for value in store.values("total")] == [times * greatest]
    assert [value.value for value in store.values("total", grain=Grain.HOUR)] == [times * least]
    assert [value.value for value in store.values("mean")] == [greatest]
    assert [value.value for value in store.values("above")] == [times * 2.0**62]
    (labelled,) = store.states("by_name")
    assert labelled.states == ({"x" * COMPACT_ABOVE: (times * greatest, times)},)
    length = f'SELECT max(length({columns["by_name"][0]})) FROM "minute_GenAIModelAccess"'
    ((longest,),) = store._read(lambda session: session.rows(length))
    assert longest <= (COMPACT_EVERY + 2) * (COMPACT_ABOVE + 40)


def test_extremes_and_sums_of_doubles_merge(backend: Backend) -> None:
    """Sums of doubles are exact in any order; extremes of doubles and below zero are right."""
    script = """
        total = from(ServiceInstanceJVMCPU.usePercent).sumDouble();
        most = from(ServiceInstanceJVMCPU.usePercent).maxDouble();
        least = from(ServiceInstanceJVMCPU.usePercent).minDouble();
    """
    values = [0.1, 1e15, -3.25, 0.2, -1e15, 0.3]
    results = set()
    for number, order in enumerate((values, values[::-1], sorted(values))):
        store = backend.open()
        writer = Writer(store, script=script, stream=f"s{number}", checkpoint=str(number))
        for value in order:
            columns = writer.layout.columns
            cells: dict[str, list[Any]] = dict(
                zip(columns["total"], ([limb] for limb in limbs_of(value)), strict=True)
            )
            cells |= {columns["most"][0]: [value], columns["least"][0]: [value]}
            one = Deltas("ServiceInstanceJVMCPU", Grain.MINUTE, [MINUTE + number], [0], cells)
            writer.write(entities=[entity_row("one")], deltas=[one])
        (state,) = store.states("total", start=MINUTE + number)
        results.add(exact_double(state.states[0]))
        assert [value.value for value in store.values("most", start=MINUTE + number)] == [1e15]
        assert [value.value for value in store.values("least", start=MINUTE + number)] == [-1e15]
    assert results == {-2.65}


def test_values_are_selected(backend: Backend) -> None:
    """By entity id or name, first and last bucket of any grain, layer and limit; in order."""
    store = backend.open()
    writer = Writer(store)
    rows = [Measurement(1, minute=MINUTE + m, entity=e) for m in (0, 1, 100) for e in ("b", "a")]
    writer.write(*rows)
    writer.write(entities=[entity_row("a", ["MESH"])])

    def places(**wanted: object) -> list[tuple[int, str]]:
        values = store.values("calls", **wanted)  # type: ignore[arg-type]
        return [(result.bucket - MINUTE, result.entity_name) for result in values]

    assert places() == [(m, e) for m in (0, 1, 100) for e in ("a", "b")]
    assert places(entity="a") == places(entity="id-a") == places(layer="MESH")
    assert places(entity="a") == [(0, "a"), (1, "a"), (100, "a")]
    assert places(start=MINUTE + 1, end=MINUTE + 1) == [(1, "a"), (1, "b")]
    assert places(start=2024030112, end=2024030112, entity="a") == [(0, "a"), (1, "a")]
    assert places(limit=3) == [(1, "b"), (100, "a"), (100, "b")]
