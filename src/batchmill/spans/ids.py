"""64-bit hashes of texts, which stay the same for ever: they are written to files.

The hash of a text depends on nothing but its UTF-8 bytes and the seed: not on the process, the
machine, the version of a library, or on how an array holds the text. All numbers are unsigned and
of 64 bits; sums and products wrap around::

    mix(x):     x ^= x >> 30;  x *= 0xbf58476d1ce4e5b9
                x ^= x >> 27;  x *= 0x94d049bb133111eb
                x ^= x >> 31                            (the finaliser of SplitMix64)
    G:          0x9e3779b97f4a7c15
    key(i):     mix(seed + i * G)
    word(i):    the bytes from 8 * (i - 1) on, the last ones filled up with zeros to 8, as a
                little-endian number; i starts with 1
    hash:       mix((key(-1) ^ length) + mix(word(1) ^ key(1)) + mix(word(2) ^ key(2)) + ...)
    null:       mix(key(-1) ^ (2 ** 64 - 1))

``length`` is the number of bytes. ``mix`` is a bijection, so that texts of one length that differ
in eight bytes only never share a hash; for others the chance is that of random numbers. Whoever
wants to can make texts with one hash: do not use it where that does harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Hashes: TypeAlias = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_NULL_LENGTH = _MASK
_BLOCK = 8192
"""Rows that are hashed at a time: few enough for the processor's cache."""


def hash64(texts: pa.Array | pa.ChunkedArray, seed: int = 0) -> Hashes:
    """The hash of each text; null has one of its own.

    Texts are ``string`` or ``large_string``, or a dictionary of them.
    """
    if isinstance(texts, pa.ChunkedArray):
        chunks = [hash64(chunk, seed) for chunk in texts.chunks]
        return np.concatenate(chunks) if chunks else np.empty(0, np.uint64)
    if pa.types.is_dictionary(texts.type):
        distinct = hash64(texts.dictionary, seed)
        return _with_nulls(texts.indices, seed, lambda kept: distinct[kept.to_numpy()])
    if pa.types.is_null(texts.type):
        return np.full(len(texts), _null_hash(seed))
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        raise TypeError(f"hash64 takes texts, not {texts.type}")
    return _with_nulls(texts, seed, lambda kept: _hash_plain(kept, seed))


def combine(*hashes: Hashes) -> Hashes:
    """One hash of several, in which their order counts: ``mix(first * G + second)``, and so on."""
    result = hashes[0]
    for other in hashes[1:]:
        result = result * np.uint64(_GOLDEN)
        result += other
        _mix(result)
    return result


def part_of(hashes: Hashes, parts: int) -> npt.NDArray[np.int64]:
    """Which of ``parts`` partitions each hash belongs to, by its upper half."""
    return ((hashes >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32)).astype(np.int64)


def _with_nulls(array: pa.Array, seed: int, hashed: Callable[[pa.Array], Hashes]) -> Hashes:
    """What ``hashed`` makes of the values of an array, and the hash of null in other places."""
    if not array.null_count:
        return hashed(array)
    result = np.full(len(array), _null_hash(seed))
    if array.null_count < len(array):
        result[array.is_valid().to_numpy(zero_copy_only=False)] = hashed(array.drop_null())
    return result


def _hash_plain(texts: pa.Array, seed: int) -> Hashes:
    """Hashes of an array of ``string`` or ``large_string`` without nulls, block by block."""
    rows = len(texts)
    result = np.empty(rows, np.uint64)
    if not rows:
        return result
    width = np.dtype(np.int32 if pa.types.is_string(texts.type) else np.int64)
    _, offsets_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offsets_buffer, width, rows + 1, texts.offset * width.itemsize)
    data = np.frombuffer(b"" if data_buffer is None else data_buffer, np.uint8)
    data = data[offsets[0] : offsets[-1]]
    lengths = np.diff(offsets)
    blocks = [slice(first, first + _BLOCK) for first in range(0, rows, _BLOCK)]
    if (lengths == lengths[0]).all():
        matrix = data.reshape(rows, int(lengths[0]))
        for block in blocks:
            _hash_matrix(matrix[block], seed, result[block])
        return result
    # Words are read from any byte on, and the last text may end with the data.
    data = np.concatenate((data, np.zeros(8, np.uint8)))
    starts = (offsets[:-1] - offsets[0]).astype(np.int64)
    lengths = lengths.astype(np.int64)
    keys = _keys(seed, (int(lengths.max()) + 7) >> 3)
    for block in blocks:
        result[block] = _hash_block(data, starts[block], lengths[block], seed, keys)
    return result


def _hash_matrix(matrix: npt.NDArray[np.uint8], seed: int, result: Hashes) -> None:
    """Hashes of texts of one length, whose bytes are the rows of a matrix."""
    rows, length = matrix.shape
    if length % 8:
        filled = np.zeros((rows, -(-length // 8) * 8), np.uint8)
        filled[:, :length] = matrix
        matrix = filled
    words = matrix.view("<u8")
    result.fill(_key(seed, -1) ^ length)
    room = np.empty(rows, np.uint64)
    shifted = np.empty(rows, np.uint64)
    for place, key in enumerate(_keys(seed, words.shape[1])):
        np.bitwise_xor(words[:, place], key, out=room)
        _mix(room, shifted)
        result += room
    _mix(result, shifted)


def _hash_block(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    seed: int,
    keys: Hashes,
) -> Hashes:
    """Hashes of texts of any lengths: all their words are mixed at once, then added up by text."""
    counts = (lengths + 7) >> 3
    ends = np.cumsum(counts)
    begins = ends - counts
    # The place of each word in its text.
    places = np.arange(ends[-1]) - np.repeat(begins, counts)
    positions = np.repeat(starts, counts) + (places << 3)
    windows: Hashes = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    words = windows[positions].astype(np.uint64)
    partial = np.flatnonzero(lengths & 7)
    beyond = (64 - ((lengths[partial] & 7) << 3)).astype(np.uint64)
    last = ends[partial] - 1
    words[last] = words[last] << beyond >> beyond
    words ^= keys[places]
    _mix(words)
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)))
    result: Hashes = lengths.astype(np.uint64) ^ np.uint64(_key(seed, -1))
    result += sums[ends] - sums[begins]
    _mix(result)
    return result


def _mix(numbers: Hashes, room: Hashes | None = None) -> None:
    """Mix the bits of each number, in place; ``room`` is overwritten."""
    room = np.empty_like(numbers) if room is None else room
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        np.right_shift(numbers, np.uint64(shift), out=room)
        np.bitwise_xor(numbers, room, out=numbers)
        if factor != 1:
            np.multiply(numbers, np.uint64(factor), out=numbers)


def _keys(seed: int, count: int) -> Hashes:
    """What the words of a text are mixed with, by their places."""
    keys = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    keys += np.uint64(seed & _MASK)
    _mix(keys)
    return keys


def _key(seed: int, place: int) -> int:
    """One of the keys."""
    key = np.array([(seed + place * _GOLDEN) & _MASK], np.uint64)
    _mix(key)
    return int(key[0])


def _null_hash(seed: int) -> np.uint64:
    result = np.array([_key(seed, -1) ^ _NULL_LENGTH], np.uint64)
    _mix(result)
    return result[0]  # type: ignore[no-any-return]
