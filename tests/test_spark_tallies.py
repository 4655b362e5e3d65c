"""Tallies: lists of keys as Spark collects them, and the text that the store keeps."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from batchmill.oal._numbers import truncated
from batchmill.spark._states import Listing, Tallied, When
from batchmill.spark._tallies import texts
from batchmill.store._tally import decode_label_sums, decode_labels, decode_numbers

NUMBERS = Listing("_k", "int")
LONGS = Listing("_k", "long")
LABELS = Listing("_k", "text")
SUMS = Listing("_k", "text", ("_high", "_low", "_count"))

THREE = {
    "all": Tallied(NUMBERS, ()),
    "a": Tallied(NUMBERS, ("a",)),
    "b": Tallied(NUMBERS, ("b",)),
}
"""A tally of everything, and of what meets one condition or the other."""

pairs = st.tuples(
    st.integers(-(2**31), 2**31 - 1) | st.integers(-30, 30), st.integers(1, 2**32 - 1)
)


def one(listing: Listing, lists: pa.Array, tally: Tallied | None = None) -> list[str | None]:
    """The text of each list."""
    table = pa.table({listing.name: pa.chunked_array([lists.slice(0, 1), lists.slice(1)])})
    made = texts(table, {"t": tally or Tallied(listing, ())}, {})
    answer: list[str | None] = made["t"].to_pylist()
    return answer


def packed(lists: list[list[tuple[int, int]]]) -> pa.Array:
    """Lists of keys and counts as Spark hands them over."""
    numbers = [[(key << 32) + n for key, n in each] for each in lists]
    return pa.array(numbers, pa.list_(pa.int64()))


@given(lists=st.lists(st.lists(pairs, max_size=6), min_size=1, max_size=6))
def test_a_tally_has_each_key_once(lists: list[list[tuple[int, int]]]) -> None:
    """Whatever the keys: what a list holds of one is added up; no entry is no text."""
    made = one(NUMBERS, packed(lists))
    for text, entries in zip(made, lists, strict=True):
        counted: Counter[int] = Counter()
        for key, n in entries:
            counted[key] += n
        if text is None:
            assert not entries
        else:
            assert decode_numbers(text) == counted
            assert len(text.split(",")) == len(counted)


def test_a_single_count_is_left_out_and_keys_are_in_order() -> None:
    """As the store writes it itself."""
    assert one(NUMBERS, packed([[(7, 1), (-2, 3), (7, 1)], []])) == ["-2:3,7:2", None]


@given(
    keys=st.lists(st.integers(-500, 500), max_size=8),
    coarser=st.integers(1, 12),
    last=st.none() | st.integers(0, 40),
)
def test_coarser_buckets_are_made_of_finer_ones(
    keys: list[int], coarser: int, last: int | None
) -> None:
    """Toward zero, and from the first bucket to the last."""
    (text,) = one(
        NUMBERS, packed([[(key, 1) for key in keys]]), Tallied(NUMBERS, (), coarser, last)
    )
    wanted = [truncated(key, coarser) for key in keys]
    if last is not None:
        wanted = [max(0, min(each, last)) for each in wanted]
    assert (decode_numbers(text) if text else {}) == Counter(wanted)


def test_a_tally_takes_only_what_meets_its_conditions() -> None:
    """Bits say what each entry meets; a tally without conditions takes all."""
    column = f"{NUMBERS.name}_0"
    table = pa.table(
        {
            NUMBERS.name: packed([[(1, 1), (1, 2), (2, 1)], [(3, 1)], []]),
            column: pa.array([[0b01, 0b10, 0b11], [0b00], []], pa.list_(pa.int64())),
        }
    )
    places: dict[str, dict[When, tuple[str, int]]] = {
        NUMBERS.name: {("a",): (column, 0), ("b",): (column, 1)}
    }
    made = {name: each.to_pylist() for name, each in texts(table, THREE, places).items()}
    assert made == {
        "all": ["1:3,2", "3", None],
        "a": ["1,2", None, None],
        "b": ["1:2,2", None, None],
    }


def test_bits_may_lie_between_key_and_count() -> None:
    """Where counts are small, a tally's conditions are part of the same number."""
    items = [(1, 0b01, 1), (1, 0b10, 2), (-2, 0b11, 2**24 - 1)]
    numbers = [(key << 32) + (bits << 24) + n for key, bits, n in items]
    table = pa.table({NUMBERS.name: pa.array([numbers, []], pa.list_(pa.int64()))})
    places: dict[str, dict[When, tuple[str, int]]] = {
        NUMBERS.name: {("a",): (NUMBERS.name, 24), ("b",): (NUMBERS.name, 25)}
    }
    made = {name: each.to_pylist() for name, each in texts(table, THREE, places).items()}
    assert made == {
        "all": ["-2:16777215,1:3", None],
        "a": ["-2:16777215,1", None],
        "b": ["-2:16777215,1:2", None],
    }


def test_keys_of_64_bits() -> None:
    """Those beyond 32 bits are kept apart."""
    kind = pa.list_(pa.struct({"k": pa.int64(), "n": pa.int64()}))
    lists = pa.array(
        [[{"k": 2**62, "n": 1}, {"k": 2**62 + 1, "n": 2}, {"k": -(2**63), "n": 1}], []], kind
    )
    assert one(LONGS, lists) == [f"{-(2**63)},{2**62},{2**62 + 1}:2", None]
    assert one(LONGS, lists, Tallied(LONGS, (), 3)) == [
        f"{truncated(-(2**63), 3)},{2**62 // 3}:3",
        None,
    ]


@given(st.lists(st.tuples(st.text(max_size=4), st.integers(1, 9)), max_size=6))
def test_labels_are_any_text(entries: list[tuple[str, int]]) -> None:
    """Quotes, commas, control characters and all."""
    kind = pa.list_(pa.struct({"k": pa.string(), "n": pa.int64()}))
    counted: Counter[str] = Counter()
    for label, n in entries:
        counted[label] += n
    (text,) = one(LABELS, pa.array([[{"k": label, "n": n} for label, n in entries]], kind))
    assert (decode_labels(text) if text else {}) == counted


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-(2**63), 2**63 - 1)), max_size=6))
def test_sums_by_label_are_exact(entries: list[tuple[str, int]]) -> None:
    """Also beyond 64 bits: values come in two halves."""
    kind = pa.list_(
        pa.struct({each: pa.string() if each == "k" else pa.int64() for each in _SUM_FIELDS})
    )
    items = [
        {"k": label, "n": 1, "m0": value >> 32, "m1": value & (2**32 - 1), "m2": 1}
        for label, value in entries
    ]
    wanted: dict[str, tuple[int, int]] = {}
    for label, value in entries:
        total, count = wanted.get(label, (0, 0))
        wanted[label] = (total + value, count + 1)
    (text,) = one(SUMS, pa.array([items], kind))
    assert (decode_label_sums(text) if text else {}) == wanted


_SUM_FIELDS = ("k", "n", "m0", "m1", "m2")


def test_no_rows_at_all() -> None:
    """A batch without deltas has no texts."""
    kind = pa.list_(pa.int64())
    table = pa.table({NUMBERS.name: pa.chunked_array([], kind)})
    assert texts(table, {"t": Tallied(NUMBERS, ())}, {})["t"].to_pylist() == []
