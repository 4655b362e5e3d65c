"""Tallies as text: merged by putting a comma between two, read back by adding up what is double.

Three kinds: by number ``12:3,14,15:2`` (a count of 1 is left out), by label ``"GET":3,"POST":1``,
and sum and count by label ``"GET":[120,3]``; the latter two are a JSON object without its braces.
The order of the pieces means nothing. A text without pieces is no tally: it is None.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def encode_numbers(tally: Mapping[int, int]) -> str | None:
    """A tally by number as text.

    >>> encode_numbers({12: 3, 14: 1})
    '12:3,14'
    """
    pieces = (str(key) if n == 1 else f"{key}:{n}" for key, n in sorted(tally.items()))
    return ",".join(pieces) or None


def decode_numbers(text: str) -> dict[int, int]:
    """The tally by number that a text stands for.

    >>> decode_numbers("12:3,14,12")
    {12: 4, 14: 1}
    """
    if len(_PIECES) > _MOST_PIECES:
        _PIECES.clear()
    pieces = list(map(_PIECES.__getitem__, text.split(",")))
    tally = dict(pieces)
    if len(tally) < len(pieces):  # some numbers are there more than once
        tally = dict.fromkeys(tally, 0)
        for number, count in pieces:
            tally[number] += count
    return tally


class _Pieces(dict[str, tuple[int, int]]):
    """What a piece of a tally stands for; remembered, as most of them come again and again."""

    def __missing__(self, piece: str) -> tuple[int, int]:
        key, _, count = piece.partition(":")
        read = self[piece] = (int(key), int(count) if count else 1)
        return read


_PIECES = _Pieces()
_MOST_PIECES = 100_000


def compact_numbers(text: str) -> str | None:
    """The same tally with each number once."""
    return encode_numbers(decode_numbers(text))


def encode_labels(tally: Mapping[str, int]) -> str | None:
    """A tally by label as text.

    >>> encode_labels({"GET": 3})
    '"GET":3'
    """
    return _body(dict(sorted(tally.items())))


def decode_labels(text: str) -> dict[str, int]:
    """The tally by label that a text stands for."""
    tally: dict[str, int] = {}
    for label, count in _pairs(text):
        tally[label] = tally.get(label, 0) + count
    return tally


def compact_labels(text: str) -> str | None:
    """The same tally with each label once."""
    return encode_labels(decode_labels(text))


def encode_label_sums(sums: Mapping[str, tuple[int, int]]) -> str | None:
    """Sum and count by label, as text.

    >>> encode_label_sums({"GET": (120, 3)})
    '"GET":[120,3]'
    """
    return _body({label: list(both) for label, both in sorted(sums.items())})


def decode_label_sums(text: str) -> dict[str, tuple[int, int]]:
    """The sums and counts by label that a text stands for."""
    sums: dict[str, tuple[int, int]] = {}
    for label, (total, count) in _pairs(text):
        before = sums.get(label, (0, 0))
        sums[label] = (before[0] + total, before[1] + count)
    return sums


def compact_label_sums(text: str) -> str | None:
    """The same sums with each label once."""
    return encode_label_sums(decode_label_sums(text))


def _body(content: Mapping[str, Any]) -> str | None:
    return json.dumps(content, separators=(",", ":"))[1:-1] or None


def _pairs(text: str) -> Iterable[tuple[str, Any]]:
    # Python's json keeps the last of two equal keys unless it is told to hand out the pairs.
    pairs: list[tuple[str, Any]] = _DECODER.decode(f"{{{text}}}")
    return pairs


_DECODER = json.JSONDecoder(object_pairs_hook=list)
