"""Bodies of requests, decompressed within limits."""

from __future__ import annotations

import gzip
import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.ingest.decode import BadRequest, Limits, TooLarge, Unsupported, decompress
from tests.ingest.kit import LIMITS


def raw_deflate(body: bytes) -> bytes:
    """Deflate without zlib's header."""
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(body) + stream.flush()


def frame(body: bytes, codec: str) -> bytes:
    """One frame of zstd or lz4, written as a stream: it does not say how much it holds."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(body)
    return bytes(sink.getvalue().to_pybytes())


def snappy(body: bytes) -> bytes:
    """A block of snappy."""
    return bytes(pa.compress(body, "snappy", asbytes=True))


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zlib": zlib.compress,
    "zstd": lambda body: frame(body, "zstd"),
    "lz4": lambda body: frame(body, "lz4"),
    "snappy": snappy,
}
SKIPPABLE = b"\x50\x2a\x4d\x18" + struct.pack("<I", 3) + b"???"
"""A frame that a reader of zstd and lz4 passes over."""


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("", b"hello"),
        ("identity", b"hello"),
        ("gzip", gzip.compress(b"hello", mtime=0)),
        (
            " GZIP ",
            gzip.compress(b"hel", mtime=0)
            + gzip.compress(b"", mtime=0)
            + gzip.compress(b"lo", mtime=0),
        ),
        ("gzip", gzip.compress(b"hello", mtime=0) + bytes(70_000)),
        ("deflate", zlib.compress(b"hello")),
        ("deflate", raw_deflate(b"hello")),
        ("zlib", zlib.compress(b"hello")),
        ("zstd", frame(b"hello", "zstd")),
        ("Zstd", pa.compress(b"hello", "zstd", asbytes=True)),
        ("zstd", frame(b"hel", "zstd") + frame(b"", "zstd") + SKIPPABLE + frame(b"lo", "zstd")),
        ("lz4", frame(b"hello", "lz4")),
        ("lz4", frame(b"hel", "lz4") + SKIPPABLE + frame(b"lo", "lz4")),
        ("snappy", snappy(b"hello")),
    ],
)
def test_decompress(encoding: str, body: bytes) -> None:
    """Members and frames: one or several, padded or not; deflate with its header or without."""
    assert decompress(body, encoding, LIMITS) == b"hello"


@pytest.mark.parametrize(
    ("encoding", "body", "message"),
    [
        ("gzip", b"", "ends early"),
        ("gzip", gzip.compress(b"hello", mtime=0)[:-1], "ends early"),
        ("gzip", gzip.compress(b"hello", mtime=0) + b"x", "not valid gzip|ends early"),
        ("gzip", gzip.compress(b"hello", mtime=0)[:-8] + bytes(8), "not valid gzip"),
        ("gzip", gzip.compress(b"", mtime=0) * 1001, "more than 1000 members"),
        ("deflate", zlib.compress(b"hello") + b"x", "continues after its end"),
        ("zlib", raw_deflate(b"hello"), "not valid"),
        ("zstd", b"", "ends early"),
        ("zstd", frame(b"hello", "zstd") + frame(b"hello", "zstd")[:-2], "ends early"),
        ("zstd", frame(b"hello", "zstd") + b"x", "not valid zstd"),
        ("zstd", frame(b"hello", "zstd") + bytes(9), "not valid zstd"),
        ("zstd", b"\x28\xb5\x2f\xfd\x00\xf8" + bytes(9), "not valid zstd.*too much memory"),
        ("lz4", b"", "ends early"),
        ("lz4", frame(b"hello", "lz4") + b"12345678", "not valid lz4"),
        ("snappy", b"", "does not start with its size"),
        ("snappy", b"\xff" * 5, "does not start with its size"),
        ("snappy", snappy(b"hello") + b"x", "not valid snappy"),
        ("snappy", snappy(b"hello")[:-1], "not valid snappy"),
    ],
)
def test_bad_compression(encoding: str, body: bytes, message: str) -> None:
    """The answer says what is wrong with it."""
    with pytest.raises(BadRequest, match=message):
        decompress(body, encoding, LIMITS)


@given(data=st.data(), body=st.binary(max_size=200_000), encoding=st.sampled_from(list(PACK)))
def test_any_body_comes_back_and_a_part_of_it_does_not(
    data: st.DataObject, body: bytes, encoding: str
) -> None:
    """Whole in every encoding; a prefix of it is refused, however it was cut."""
    packed = PACK[encoding](body)
    assert decompress(packed, encoding, LIMITS) == body
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(BadRequest):
        decompress(packed[:cut], encoding, LIMITS)


@pytest.mark.parametrize("encoding", list(PACK))
@pytest.mark.parametrize("size", [99, 100, 101])
def test_the_limit_in_every_encoding(encoding: str, size: int) -> None:
    """It is exact."""
    limits, body = Limits(max_decompressed_bytes=100), PACK[encoding](os.urandom(size))
    if size <= 100:
        assert len(decompress(body, encoding, limits)) == size
    else:
        with pytest.raises(TooLarge, match="more than 100 bytes when decompressed"):
            decompress(body, encoding, limits)


@pytest.mark.parametrize("encoding", [name for name in PACK if name != "snappy"])
def test_a_bomb_takes_no_more_memory_than_the_limit(encoding: str) -> None:
    """A body that unpacks to 64 times the limit is refused after one limit of it."""
    bomb, limits = PACK[encoding](bytes(64 << 20)), Limits(max_decompressed_bytes=1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decompress(bomb, encoding, limits)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_block_of_snappy_that_claims_too_much() -> None:
    """Refused by its first bytes, before anything is allocated."""
    with pytest.raises(TooLarge):
        decompress(b"\xff\xff\xff\xff\x0f" + b"x" * 20, "snappy", LIMITS)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("br", b"x"), ("snappy", b"\xff\x06\x00\x00sNaPpY"), ("gzip, zstd", b"x")],
)
def test_an_encoding_that_is_not_supported(encoding: str, body: bytes) -> None:
    """The message names those that are."""
    with pytest.raises(Unsupported, match="gzip, zstd, deflate, zlib, lz4, snappy, identity"):
        decompress(body, encoding, LIMITS)


@pytest.mark.parametrize("size", [99, 100, 101])
def test_the_limit_on_decompressed_bytes(size: int) -> None:
    """It is exact, over all members."""
    body = gzip.compress(bytes(50)) + gzip.compress(bytes(size - 50))
    limits = Limits(max_decompressed_bytes=100)
    if size <= 100:
        assert decompress(body, "gzip", limits) == bytes(size)
    else:
        with pytest.raises(TooLarge, match="more than 100 bytes when decompressed"):
            decompress(body, "gzip", limits)


def test_the_limit_on_the_body_as_sent() -> None:
    """It holds before anything is inflated."""
    with pytest.raises(TooLarge, match="11 bytes, at most 10"):
        decompress(b"x" * 11, "gzip", Limits(max_body_bytes=10))
