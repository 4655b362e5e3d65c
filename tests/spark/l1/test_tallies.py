"""Tallies and totals from lists of keys and of rows, as Spark collects them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from batchmill.aggregate import Tallies
from batchmill.spark.l1.aggregators import LISTED, BitPlaces, NumpyAggregator, listed_tallies
from batchmill.spark.l1.expressions import RowExpressions
from batchmill.spark.l1.plan import COUNT, ListedTally, Listing, Measure, Recipe, Total


def toward_zero(number: int, divisor: int) -> int:
    """The quotient without its fraction."""
    return number // divisor if number >= 0 else -(-number // divisor)


NUMBERS = Listing("_k", "int")
LONGS = Listing("_k", "long")
LABELS = Listing("_k", "text")
SUMS = Listing("_k", "text", ("_high", "_low", "_count"))

THREE = {
    "all": ListedTally(NUMBERS, ()),
    "a": ListedTally(NUMBERS, ("a",)),
    "b": ListedTally(NUMBERS, ("b",)),
}
"""A tally of everything, and of what meets one condition or the other."""

keys = st.integers(-(2**31), 2**31 - 1) | st.integers(-30, 30)


Tally = dict[Any, Any]
"""Key to count, or to the sum and count of a label."""


def one(listing: Listing, lists: pa.Array, tally: ListedTally | None = None) -> list[Tally]:
    """The tally of each list."""
    table = pa.table({listing.name: pa.chunked_array([lists.slice(0, 1), lists.slice(1)])})
    return tallied(table, {"t": tally or ListedTally(listing, ())}, {})["t"]


def tallied(
    table: pa.Table, tallies: dict[str, ListedTally], places: BitPlaces
) -> dict[str, list[Tally]]:
    """Each tally of each list."""
    made = listed_tallies(table, Recipe({}, tallies=tallies), places)
    return {name: plain(column) for name, column in made.items()}


def plain(tallies: Tallies) -> list[Tally]:
    """Tallies as dicts; keys are in order there, each once."""
    keys = tallies.keys.tolist()
    first, *rest = (amount.tolist() for amount in tallies.amounts)
    amounts = first
    if rest:
        lower, count = rest
        halves = zip(first, lower, count, strict=True)
        amounts = [((high << 32) + low, n) for high, low, n in halves]
    entries = list(zip(keys, amounts, strict=True))
    parts = [entries[start:end] for start, end in pairwise(tallies.offsets.tolist())]
    assert all(len(dict(part)) == len(part) for part in parts)
    return [dict(part) for part in parts]


def packed(lists: list[list[int]]) -> pa.Array:
    """Lists of keys, as Spark collects them."""
    return pa.array(
        [[(key << 32) | 1 for key in entries] for entries in lists], pa.list_(pa.int64())
    )


@given(lists=st.lists(st.lists(keys, max_size=6), min_size=1, max_size=6))
def test_a_tally_has_each_key_once(lists: list[list[int]]) -> None:
    """Whatever the keys: what a list holds of one is added up; keys are in order."""
    made = one(NUMBERS, packed(lists))
    assert made == [Counter(entries) for entries in lists]
    assert all(list(tally) == sorted(tally) for tally in made)


def test_an_item_may_stand_for_many_rows() -> None:
    """Up to what the bits below the conditions can hold."""
    numbers = [(-2 << 32) | 2**24 - 1, (7 << 32) | 2, (-2 << 32) | 1]
    lists = pa.array([numbers, []], pa.list_(pa.int64()))
    assert one(NUMBERS, lists) == [{-2: 2**24, 7: 2}, {}]


@given(
    keys=st.lists(st.integers(-500, 500), max_size=8),
    coarser=st.integers(1, 12),
    last=st.none() | st.integers(0, 40),
)
def test_coarser_buckets_are_made_of_finer_ones(
    keys: list[int], coarser: int, last: int | None
) -> None:
    """Toward zero, and from the first bucket to the last."""
    (tally,) = one(NUMBERS, packed([keys]), ListedTally(NUMBERS, (), coarser, last))
    wanted = [toward_zero(key, coarser) for key in keys]
    if last is not None:
        wanted = [max(0, min(key, last)) for key in wanted]
    assert tally == Counter(wanted)


def test_a_tally_takes_only_what_meets_its_conditions() -> None:
    """Bits say what each entry meets; a tally without conditions takes all. They lie in a list of
    their own, or between the key and the count."""
    column = f"{NUMBERS.name}_0"
    lists = [[(1, 0b01), (1, 0b10), (1, 0b10), (2, 0b11)], [(3, 0b00)], []]
    own = {
        NUMBERS.name: packed([[key for key, _ in pairs] for pairs in lists]),
        column: pa.array([[bits for _, bits in pairs] for pairs in lists], pa.list_(pa.int64())),
    }
    below = [[(key << 32) | bits << 24 | 1 for key, bits in pairs] for pairs in lists]
    both = {NUMBERS.name: pa.array(below, pa.list_(pa.int64()))}
    for columns, place, first in ((own, column, 0), (both, NUMBERS.name, 24)):
        places: BitPlaces = {NUMBERS.name: {("a",): (place, first), ("b",): (place, first + 1)}}
        assert tallied(pa.table(columns), THREE, places) == {
            "all": [{1: 3, 2: 1}, {3: 1}, {}],
            "a": [{1: 1, 2: 1}, {}, {}],
            "b": [{1: 2, 2: 1}, {}, {}],
        }


def test_keys_of_64_bits() -> None:
    """Those beyond 32 bits are kept apart."""
    lists = pa.array([[2**62, 2**62 + 1, -(2**63), 2**62 + 1], []], pa.list_(pa.int64()))
    assert one(LONGS, lists) == [{-(2**63): 1, 2**62: 1, 2**62 + 1: 2}, {}]
    assert one(LONGS, lists, ListedTally(LONGS, (), 3)) == [
        {toward_zero(-(2**63), 3): 1, 2**62 // 3: 3},
        {},
    ]


@given(st.lists(st.text(max_size=4), max_size=6))
def test_labels_are_any_text(labels: list[str]) -> None:
    """Quotes, commas, control characters and all."""
    (tally,) = one(LABELS, pa.array([labels], pa.list_(pa.string())))
    assert tally == Counter(labels)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-(2**63), 2**63 - 1)), max_size=6))
def test_sums_by_label_are_exact(entries: list[tuple[str, int]]) -> None:
    """Also beyond 64 bits: values come in two halves."""
    kind = pa.list_(
        pa.struct({field: pa.string() if field == "k" else pa.int64() for field in _SUM_FIELDS})
    )
    items = [
        {"k": label, "m0": value >> 32, "m1": value & (2**32 - 1), "m2": 1}
        for label, value in entries
    ]
    wanted: dict[str, tuple[int, int]] = {}
    for label, value in entries:
        total, count = wanted.get(label, (0, 0))
        wanted[label] = (total + value, count + 1)
    (tally,) = one(SUMS, pa.array([items], kind))
    assert tally == wanted


_SUM_FIELDS = ("k", "m0", "m1", "m2")


def test_no_rows_at_all() -> None:
    """A batch without deltas has no tallies."""
    table = pa.table({NUMBERS.name: pa.chunked_array([], pa.list_(pa.int64()))})
    assert tallied(table, {"t": ListedTally(NUMBERS, ())}, {}) == {"t": []}
    assert listed([]) == {name: [] for name in WANTED}


# Rows that stand for many.

BIG = 2**40
NEEDS = RowExpressions(
    conditions={f"c{n}": "" for n in range(70)},
    keys={"_k": "", "_label": ""},
    measures={
        "_sum": Measure("", "SUM"),
        "_max": Measure("", "MAX"),
        "_count": Measure("", "COUNT"),
    },
)
"""So many conditions that they take two words."""
WHENS = {"": (), "a": ("c0",), "z": ("c69",), "az": ("c0", "c69")}
WANTED: dict[str, Total | ListedTally] = {
    **{f"n{name}": Total("SUM", COUNT, when) for name, when in WHENS.items()},
    **{f"sum{name}": Total("SUM", "_sum", when) for name, when in WHENS.items()},
    **{f"max{name}": Total("MAX", "_max", when) for name, when in WHENS.items()},
    **{f"t{name}": ListedTally(NUMBERS, when) for name, when in WHENS.items()},
    "label": ListedTally(Listing("_label", "text"), ("c0",)),
    "labels": ListedTally(Listing("_label", "text", ("_sum", "_low", "_count")), ("c69",)),
}

items = st.fixed_dictionaries(
    {
        "_b0": st.integers(0, 1),
        "_b1": st.integers(0, 1).map(lambda bit: bit << 7),
        "_k": st.none() | st.integers(-3, 3),
        "_label": st.none() | st.sampled_from("xy"),
        COUNT: st.integers(1, BIG),
        "_sum": st.none() | st.integers(-BIG, BIG),
        "_max": st.none() | st.integers(-9, 9),
    }
)
Item = dict[str, Any]


def listed(lists: list[list[Item]]) -> dict[str, list[Any]]:
    """All states of lists of grouped rows, as Spark collects them."""
    whole = [[item | _halves(item) for item in items] for items in lists]
    kinds = {
        **{field: pa.int64() for field in ("_b0", "_b1", COUNT, "_sum", "_low", "_count")},
        "_k": pa.int32(),
        "_label": pa.string(),
        "_max": pa.int32(),
    }
    column = pa.array(whole, pa.list_(pa.struct(kinds)))
    chunks = [column.slice(0, 1), column.slice(1)] if lists else [column]
    recipe = Recipe({})
    for name, state in WANTED.items():
        if isinstance(state, Total):
            recipe.totals[name] = state
        else:
            recipe.tallies[name] = state
    made = NumpyAggregator().states(pa.table({LISTED: pa.chunked_array(chunks)}), recipe, NEEDS)
    assert made.rows.tolist() == [sum(item[COUNT] for item in items) for items in lists]
    totals = {name: column.tolist() for name, column in made.totals.items()}
    return totals | {name: plain(tallies) for name, tallies in made.tallies.items()}


def _halves(item: Item) -> Item:
    """The sum as an upper half, with nothing below it."""
    return {"_low": None if item["_sum"] is None else 0, "_count": int(item["_sum"] is not None)}


@given(st.lists(st.lists(items, min_size=1, max_size=5), min_size=1, max_size=4))
def test_states_of_rows_that_stand_for_many(lists: list[list[Item]]) -> None:
    """Counts, sums, greatest and tallies of those rows that meet the conditions, as plain Python
    has them."""
    made = listed(lists)
    for number, all_items in enumerate(lists):
        for name, when in WHENS.items():
            met = [item for item in all_items if _meets(item, when)]
            sums = [row["_sum"] for row in met if row["_sum"] is not None]
            most = [row["_max"] for row in met if row["_max"] is not None]
            assert made[f"n{name}"][number] == sum(row[COUNT] for row in met)
            assert made[f"sum{name}"][number] == (sum(sums) if sums else None)
            assert made[f"max{name}"][number] == max(most, default=None)
            assert made[f"t{name}"][number] == _counted(met, "_k")
        wanted = _counted([item for item in all_items if _meets(item, ("c0",))], "_label")
        assert made["label"][number] == wanted
        totals: dict[str, tuple[int, int]] = {}
        for item in all_items:
            if _meets(item, ("c69",)) and item["_label"] is not None and item["_sum"] is not None:
                total, count = totals.get(item["_label"], (0, 0))
                totals[item["_label"]] = (total + (item["_sum"] << 32), count + 1)
        assert made["labels"][number] == totals


def _meets(item: Item, when: tuple[str, ...]) -> bool:
    bits = {"c0": item["_b0"], "c69": item["_b1"]}
    return all(bits[condition] for condition in when)


def _counted(rows: list[Item], key: str) -> Counter[Any]:
    counted: Counter[Any] = Counter()
    for row in rows:
        if row[key] is not None:
            counted[row[key]] += row[COUNT]
    return counted
