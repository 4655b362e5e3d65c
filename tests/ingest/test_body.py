"""Bodies of requests, decompressed within limits."""

from __future__ import annotations

import gzip
import zlib

import pytest

from batchmill.ingest.decode import BadRequest, Limits, TooLarge, decompress
from tests.ingest.kit import LIMITS


def raw_deflate(body: bytes) -> bytes:
    """Deflate without zlib's header."""
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(body) + stream.flush()


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
    ],
)
def test_decompress(encoding: str, body: bytes) -> None:
    """gzip in one member or several, padded or not, and deflate with its header or without."""
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
    ],
)
def test_bad_compression(encoding: str, body: bytes, message: str) -> None:
    """The answer says what is wrong with it."""
    with pytest.raises(BadRequest, match=message):
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
