"""Decodes one hostile request in a process that may take only so much memory; a test runs it."""

from __future__ import annotations

import gzip
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from batchmill.ingest.decode import BadRequest, Limits, TooLarge, decode_traces, decompress

M = 2**20
ROOM = 400 * M
PROTOBUF, JSON = "application/x-protobuf", "application/json"


def varint(n: int) -> bytes:
    """A number as protobuf writes it."""
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def field(number: int, content: bytes) -> bytes:
    """A field of bytes, or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def spans(content: bytes, n: int) -> bytes:
    """A request with ``n`` good spans, each with ``content`` too."""
    ids = field(1, b"a" * 16) + field(2, b"a" * 8)
    times = b"\x39" + b"a" * 8 + b"\x41" + b"b" * 8
    return field(1, field(2, field(2, ids + times + content) * n))


def array(items: bytes) -> bytes:
    """An attribute that is an array."""
    return field(9, field(1, b"a") + field(2, field(5, items)))


CASES: dict[str, Callable[[], tuple[bytes, str, str]]] = {
    "bomb": lambda: (gzip.compress(bytes(64 * M), 1) * 100, "gzip", PROTOBUF),
    "groups": lambda: (b"\x0a\x00" * (30 * M), "", PROTOBUF),
    "spans": lambda: (field(1, field(2, b"\x12\x00" * (30 * M))), "", PROTOBUF),
    "attributes": lambda: (spans(b"\x4a\x00" * (M - 99), 29), "", PROTOBUF),
    "array": lambda: (spans(array(b"\x0a\x00" * (M - 99)), 29), "", PROTOBUF),
    "objects": lambda: (b"[" + b'{"":0},' * (8 * M) + b"0]", "", JSON),
    "numbers": lambda: (b"[" + b"1.5," * (15 * M) + b"0]", "", JSON),
    "quotes": lambda: (b'{"a":"' + b'\\"' * (30 * M), "", JSON),
}


def main(case: str) -> None:
    """Print what comes of it."""
    body, encoding, content_type = CASES[case]()
    limits = Limits(max_body_bytes=64 * M)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
    try:
        result = decode_traces(decompress(body, encoding, limits), content_type, limits)
        answer = f"taken {len(result.batch)}"
    except (BadRequest, TooLarge) as error:
        answer = f"{type(error).__name__}: {error}"
    sys.stdout.write(answer)


if __name__ == "__main__":
    main(sys.argv[1])
