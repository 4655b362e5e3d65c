"""Hashes of texts: the same for ever, however an array holds the texts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.spans.ids import combine, hash64, part_of

TEXTS = st.lists(st.one_of(st.none(), st.text(max_size=40)), max_size=20)
ONE = 1 << 64


def mix(number: int) -> int:
    """The finaliser of SplitMix64."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % ONE
    number = (number ^ number >> 27) * 0x94D049BB133111EB % ONE
    return number ^ number >> 31


def key(seed: int, place: int) -> int:
    """What a word is mixed with."""
    return mix((seed + place * 0x9E3779B97F4A7C15) % ONE)


def reference(text: str | None, seed: int = 0) -> int:
    """The algorithm of the docstring, in Python's own numbers."""
    if text is None:
        return mix(key(seed, -1) ^ ONE - 1)
    data = text.encode()
    total = key(seed, -1) ^ len(data)
    for place, first in enumerate(range(0, len(data), 8), 1):
        total += mix(int.from_bytes(data[first : first + 8], "little") ^ key(seed, place))
    return mix(total % ONE)


PINNED = [
    (None, 0, 0xE67D5604028E83B9),
    (None, 1, 0x7552DD7DAA7BAC63),
    ("", 0, 0xDF02530490027738),
    ("", 1, 0x9C2943E88F3723CA),
    ("a", 0, 0x6DD88389BD5EF182),
    ("a", 1, 0x3229F90EF924D098),
    ("shop", 0, 0x5A8C30BF3252C4E8),
    ("shop", 1, 0x2989B4EBAA8CA2C9),
    ("12345678", 0, 0x1112FB307EA4ED97),
    ("12345678", 1, 0x3B812E2E606FC132),
    ("123456789", 0, 0x946873BC3D59A9B8),
    ("123456789", 1, 0x4F532103733242E8),
    ("4bf92f3577b34da6a3ce929d0e0e4736", 0, 0x4630546AA924693B),
    ("4bf92f3577b34da6a3ce929d0e0e4736", 1, 0x9E63D94999FCB548),
    ("00f067aa0ba902b7", 0, 0x5138EA8328AC804A),
    ("00f067aa0ba902b7", 1, 0xC8B61A9F9C69DCC4),
    ("zażółć gęślą jaźń", 0, 0x5A9A76D70153D753),
    ("zażółć gęślą jaźń", 1, 0xECBF72778D7FBD32),
]


@pytest.mark.parametrize(("text", "seed", "value"), PINNED)
def test_hashes_never_change(text: str | None, seed: int, value: int) -> None:
    """They are in files that other versions and machines wrote."""
    assert hash64(pa.array([text], pa.string()), seed).tolist() == [value]


@given(texts=TEXTS, seed=st.integers(0, ONE - 1))
def test_hashes_are_those_of_the_algorithm(texts: list[str | None], seed: int) -> None:
    """Texts of any lengths, and nulls."""
    hashes = hash64(pa.array(texts, pa.string()), seed)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == [reference(text, seed) for text in texts]


@given(
    texts=st.integers(0, 40).flatmap(
        lambda size: st.lists(st.text("0123456789abcdef", min_size=size, max_size=size))
    )
)
def test_texts_of_one_length(texts: list[str]) -> None:
    """Which take a way of their own."""
    assert hash64(pa.array(texts, pa.string())).tolist() == [reference(text) for text in texts]


@given(texts=TEXTS, cut=st.integers(0, 10), data=st.data())
def test_it_does_not_matter_how_an_array_holds_texts(
    texts: list[str | None], cut: int, data: st.DataObject
) -> None:
    """Slices, chunks, dictionaries (with a text twice, with null as a text), wide offsets."""
    expected = [reference(text) for text in texts]
    plain = pa.array(["before", None, *texts, "after"], pa.string())[2:-1]
    assert hash64(plain).tolist() == expected
    assert hash64(plain.cast(pa.large_string())).tolist() == expected
    assert hash64(pa.chunked_array([plain[:cut], plain[cut:]])).tolist() == expected
    encoded = pa.chunked_array(
        [plain[:cut].dictionary_encode(), plain[cut:].dictionary_encode("encode")]
    )
    assert hash64(encoded).tolist() == expected
    double = pa.array([*texts, *texts, "never used"], pa.string())
    places = [number + len(texts) * data.draw(st.integers(0, 1)) for number in range(len(texts))]
    odd = pa.DictionaryArray.from_arrays(pa.array([None, *places], pa.int16()), double)
    assert hash64(odd).tolist() == [reference(None), *expected]


def test_many_texts_are_hashed_as_few() -> None:
    """More than a block of them: of one length, of several, and a very long one among them."""
    rng = random.Random(1)
    ids = [rng.randbytes(16).hex() for _ in range(20_000)]
    names = [text[: rng.randint(0, 32)] for text in ids]
    names[9000] = "é" * 100_001
    for texts in (ids, names):
        assert hash64(pa.array(texts)).tolist() == [reference(text) for text in texts]


def test_arrays_without_texts() -> None:
    """No rows, no chunks, nulls only; a null slot whose bytes are there; numbers are refused."""
    for empty in (pa.array([], pa.string()), pa.chunked_array([], pa.string())):
        assert hash64(empty).tolist() == []
        assert hash64(empty.dictionary_encode()).tolist() == []
    for kind in (pa.null(), pa.string(), pa.dictionary(pa.int32(), pa.string())):
        assert hash64(pa.nulls(3, kind), 5).tolist() == [reference(None, 5)] * 3
    offsets = pa.array([0, 2, 4], pa.int32()).buffers()[1]
    hidden = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"abcd"), pa.py_buffer(b"\x02"))
    assert hash64(hidden).tolist() == [reference(None), reference("cd")]
    with pytest.raises(TypeError, match="int64"):
        hash64(pa.array([1]))


def test_texts_that_are_much_alike_have_different_hashes() -> None:
    """Counted up, repeated, filled with zero bytes; also the halves of a hash differ."""
    texts = [f"{number:032x}" for number in range(50_000)]
    texts += [f"{number:x}" + "0" * 24 for number in range(50_000)]
    texts += ["\0" * number for number in range(100)] + ["ab" * number for number in range(1, 100)]
    hashes = hash64(pa.array(texts))
    assert len(set(hashes.tolist())) == len(set(texts))
    assert not set(hashes.tolist()) & set(hash64(pa.array(texts), 1).tolist())
    for half in (hashes >> np.uint64(32), hashes & np.uint64(0xFFFFFFFF)):
        assert len(np.unique(half)) > len(texts) - 10


def test_the_order_of_hashes_counts() -> None:
    """When they are combined; what is combined is not changed."""
    one, two, three = (hash64(pa.array(["a", "b", "c"]), seed) for seed in range(3))
    before = one.copy()
    arrays: list[Any] = [(one, two), (two, one), (one, two, three), (one, three, two), (one, one)]
    combined = [combine(*several).tolist() for several in arrays]
    assert len({number for numbers in combined for number in numbers}) == 15
    assert combined[0] == [
        mix((first * 0x9E3779B97F4A7C15 + second) % ONE)
        for first, second in zip(one.tolist(), two.tolist(), strict=True)
    ]
    assert combine(one).tolist() == one.tolist() == before.tolist()


@pytest.mark.parametrize("parts", [1, 2, 7, 64])
def test_partitions_are_even(parts: int) -> None:
    """Also with ids that are counted up."""
    hashes = hash64(pa.array([f"{number:032x}" for number in range(64_000)]))
    counts = np.bincount(part_of(hashes, parts), minlength=parts)
    assert len(counts) == parts
    assert abs(counts - 64_000 / parts).max() < 6 * (64_000 / parts) ** 0.5
    most = np.array([0, ONE - 1], np.uint64)
    assert part_of(most, parts).tolist() == [0, parts - 1]
