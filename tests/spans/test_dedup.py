"""A span that is delivered twice counts once: which one, and which are dropped."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.spans import dedup
from batchmill.spans.dedup import ID_SCHEMA, drop_duplicates, ids_of, merge_ids
from batchmill.spans.ids import combine, hash64
from tests.kit.spark import span
from tests.oracle.generate import random_spans
from tests.spans.tables import compacted, in_chunks, without_dictionaries

SCHEMA = compacted([]).schema
TEXTS = st.sampled_from([None, "", "a", "b", "é", "\U0001f600", "\uffff"])
VALUES = {
    "trace_id": st.sampled_from([None, "t1", "t2"]),
    "span_id": st.sampled_from([None, "s1", "s2"]),
    "time": st.integers(0, 2),
    "status": st.booleans(),
    "tags": st.none() | st.lists(TEXTS, max_size=2),
    "tag": st.none() | st.dictionaries(st.sampled_from("abc"), TEXTS, max_size=2),
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Spans, of which many differ in one column only."""
    base = {name: draw(value_of(name)) for name in SCHEMA.names}
    rows = []
    for _ in range(draw(st.integers(0, 8))):
        changed = draw(st.lists(st.sampled_from(SCHEMA.names), max_size=2))
        base |= {name: draw(value_of(name)) for name in ("trace_id", "span_id")}
        rows.append(base | {name: draw(value_of(name)) for name in changed})
    return table_of(rows)


def value_of(name: str) -> st.SearchStrategy[Any]:
    """Values of a column."""
    if name in VALUES:
        return VALUES[name]
    return TEXTS if is_text(SCHEMA.field(name).type) else st.none() | st.integers(0, 2)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column has texts."""
    return bool(pa.types.is_dictionary(kind) or pa.types.is_string(kind))


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as a table, a map as a dict or a list of entries."""
    entries = [
        row | {"tag": list(row["tag"].items()) if isinstance(row["tag"], dict) else row["tag"]}
        for row in rows
    ]
    return pa.Table.from_pylist(entries, schema=SCHEMA)


def order_of(row: dict[str, Any]) -> list[Any]:
    """Where a span is in the order of all columns: null first, texts by bytes, maps by entry."""
    return [
        sortable(sorted(row[name], key=sortable) if name == "tag" and row[name] else row[name])
        for name in SCHEMA.names
    ]


def sortable(value: Any) -> tuple[Any, ...]:
    """Null first, then by value."""
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return ([sortable(part) for part in value],)
    return (value.encode() if isinstance(value, str) else value,)


def id_of(row: dict[str, Any]) -> tuple[str, str] | None:
    """The id of a span; None if it lacks one of the two."""
    pair = (row["trace_id"], row["span_id"])
    return None if None in pair else pair


def counting(rows: list[dict[str, Any]], known: set[tuple[str, str]]) -> list[list[Any]]:
    """The spans that count, by the rules."""
    first: dict[tuple[str, str], dict[str, Any]] = {}
    counted = [row for row in rows if id_of(row) is None]
    for row in rows:
        pair = id_of(row)
        if (
            pair is not None
            and pair not in known
            and (pair not in first or order_of(row) < order_of(first[pair]))
        ):
            first[pair] = row
    return sorted(map(order_of, [*counted, *first.values()]))


@settings(max_examples=60)
@given(
    table=tables(),
    known=st.lists(
        st.sets(st.tuples(*[st.sampled_from(["t1", "s1", "t2", "s2"])] * 2)), max_size=3
    ),
    seed=st.integers(0, 99),
    cut=st.integers(0, 8),
)
def test_one_span_of_each_id_counts_unless_it_is_known(
    table: pa.Table, known: list[set[tuple[str, str]]], seed: int, cut: int
) -> None:
    """In any order of rows, of any dictionaries; the order of those that count stays."""
    index = [
        ids_of(pa.table([[pair[place] for pair in ids] for place in (0, 1)], _IDS)) for ids in known
    ]
    rows = table.to_pylist()
    expected = counting(rows, set().union(*known))
    order = random.Random(seed).sample(range(len(table)), len(table))
    shuffled = table.take(pa.array(order, pa.int64()))
    for given_ in (table, shuffled, without_dictionaries(shuffled), in_chunks(table, cut)):
        kept, dropped = drop_duplicates(given_, index)
        assert kept.schema == given_.schema
        assert sorted(map(order_of, kept.to_pylist())) == expected
        assert dropped == len(table) - len(kept)
    kept, _ = drop_duplicates(table, index)
    places = iter(rows)
    assert all(row in places for row in kept.to_pylist())


_IDS = pa.schema([("trace_id", pa.string()), ("span_id", pa.string())])


ASCENDING: dict[str, list[Any]] = {
    "text": [None, "", "B", "a", "aa", "\x7f", "é", "\uffff", "\U0001f600"],
    "number": [None, -5, 0, 7, 10],
    "bool": [False, True],
    "tags": [None, [], [None], [None, "a"], [""], ["a"], ["a", None], ["a", "a"], ["b"]],
    "tag": [
        None,
        [],
        [("a", None)],
        [("a", None), ("b", "x")],
        [("a", "")],
        [("a", "x")],
        [("b", "2"), ("a", "x")],
        [("a", "x"), ("b", "3")],
        [("a", "y")],
        [("c", "0"), ("b", "9")],
        [("b", "9"), ("d", "0")],
    ],
}


@pytest.mark.parametrize("name", SCHEMA.names[2:])
def test_the_least_by_the_first_column_that_differs_counts(name: str) -> None:
    """Null first, texts by their bytes, lists by element, maps as sorted entries."""
    kind = SCHEMA.field(name).type
    types = {"bool": pa.types.is_boolean(kind), "text": is_text(kind), name: name in ASCENDING}
    values = ASCENDING[next((key for key, is_it in types.items() if is_it), "number")]
    if name == "time":
        values = values[1:]
    base = compacted([span("1")]).to_pylist()[0]
    later = SCHEMA.names[SCHEMA.names.index(name) + 1 :]
    # A column after it says the opposite.
    greatest = {column: 9 for column in later if column == "output_tokens"}
    for least, greater in itertools.pairwise(values):
        first = base | greatest | {name: least}
        second = base | dict.fromkeys(later) | {name: greater}
        for rows in ([first, second], [second, first, first, second]):
            table = table_of(rows)
            for spans in (table, without_dictionaries(table)):
                kept, dropped = drop_duplicates(spans, [])
                assert kept[name].to_pylist() == table_of([first])[name].to_pylist()
                assert dropped == len(rows) - 1


def test_of_spans_that_share_an_id_the_same_one_counts() -> None:
    """Whatever order they come in."""
    odd = [span("1", us=us * 1000, attributes={"n": str(us)}) for us in (7, 5, 9)]
    same = [span("2", us=3000, attributes={"n": text}) for text in "ba"]
    results = []
    for rows in ([*odd, *same], [*same[::-1], *odd[::-1]]):
        kept, dropped = drop_duplicates(compacted(rows), [])
        assert dropped == 3
        columns = (kept[name].to_pylist() for name in ("latency", "tags"))
        results.append(sorted(zip(*columns, strict=True)))
    assert results[0] == results[1] == [(3, ["n:a"]), (5, ["n:5"])]


def test_the_first_to_arrive_counts() -> None:
    """Across batches; and a span without ids is never a duplicate."""
    nobody = span("", trace_id="")
    index: list[pa.Table] = []
    counted = []
    for us in (9000, 5000):
        kept, dropped = drop_duplicates(compacted([span("1", us=us), nobody, nobody]), index)
        index.append(ids_of(kept))
        counted.append((len(kept), dropped))
    assert counted == [(3, 0), (2, 1)]
    assert [len(ids) for ids in index] == [1, 0]


@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("pieces", [1, 4])
def test_any_duplication_in_any_split_leaves_each_span_once(pieces: int, share: float) -> None:
    """Some or all spans up to three times more, shuffled, in batches."""
    rng = random.Random(pieces)
    spans = random_spans(5, 300)
    again = [row for row in spans if rng.random() < share for _ in range(rng.randint(1, 3))]
    rows = [*spans, *again]
    rng.shuffle(rows)
    index: list[pa.Table] = []
    kept, total = [], 0
    for piece in range(pieces):
        table, dropped = drop_duplicates(compacted(rows[piece::pieces]), index)
        index = [merge_ids([*index, ids_of(table)])] if piece == 1 else [*index, ids_of(table)]
        kept += table.to_pylist()
        total += dropped
    assert total == len(again)
    expected = compacted(spans).to_pylist()
    assert sorted(map(order_of, kept)) == sorted(map(order_of, expected))


def test_ids_are_sorted_hashes_with_two_seeds() -> None:
    """Of spans that have both; files of them are merged to a sorted one."""
    rows = [span(str(number), trace_id=f"t{number % 7}") for number in range(500)]
    table = compacted([*rows, span("", trace_id="t1"), span("1", trace_id="")])
    ids = ids_of(table)
    assert ids.schema == ID_SCHEMA
    halves = (
        combine(hash64(table["trace_id"], seed), hash64(table["span_id"], seed))[:500].tolist()
        for seed in (0, 1)
    )
    pairs = sorted(zip(*halves, strict=True))
    assert list(zip(*ids.to_pydict().values(), strict=True)) == pairs
    assert ids.equals(merge_ids([ids_of(table[:200]), ids_of(table[200:])]))
    assert merge_ids([]).equals(ID_SCHEMA.empty_table())
    known = pa.array([7, 7, 9], pa.uint64()), pa.array([3, 1, 2], pa.uint64())
    assert merge_ids([pa.table(known, schema=ID_SCHEMA)])["low"].to_pylist() == [1, 3, 2]


def test_ids_that_have_one_half_in_common_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch and in the index, where several have it: the other half decides."""
    real = dedup._half

    def alike(ids: pa.Table, seed: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        return real(ids, seed) // np.uint64(1 << 62 if seed == 0 else 1)

    monkeypatch.setattr(dedup, "_half", alike)
    first = compacted(span(str(number)) for number in range(50))
    assert len(set(ids_of(first)["high"].to_pylist())) == 4
    second = compacted(span(str(number)) for number in range(25, 100))
    assert drop_duplicates(first, []) == (first, 0)
    index = [ids_of(first[:20]), ids_of(first[20:])]
    kept, dropped = drop_duplicates(second, index)
    assert (kept["span_id"].to_pylist(), dropped) == ([str(n) for n in range(50, 100)], 25)


def test_a_batch_without_duplicates_is_returned_as_it_is() -> None:
    """Without a copy; an empty one, too."""
    table = compacted([span("1"), span("2"), span(None), span(None)])
    index = [ID_SCHEMA.empty_table(), ids_of(compacted([span("3")]))]
    for spans in (table, table[:0], compacted([])):
        kept, dropped = drop_duplicates(spans, index)
        assert kept is spans
        assert dropped == 0
