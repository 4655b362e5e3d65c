"""The body of a request: its limits, the errors for a bad one, and decompression."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields

import pyarrow as pa

from batchmill.errors import BatchmillError, ConfigError, check_ints

_STEP = 64 * 1024
"""Bytes of input that are decompressed at a time."""
_MAX_MEMBERS = 1000
"""Members of one gzip body. Each takes time to set up, however small it is."""
_GZIP, _ZLIB, _RAW = 31, 15, -15
_SNAPPY_FRAMES = b"\xff\x06\x00\x00sNaPpY"
"""How snappy's framing format starts; its checksum is one that nothing here computes."""

ENCODINGS = ("gzip", "zstd", "deflate", "zlib", "lz4", "snappy", "identity")
"""The content encodings that `decompress` undoes; snappy is its block format."""


class BadRequest(BatchmillError, ValueError):
    """The request cannot be decoded; the message says why. Sending it again does not help."""


class Unsupported(BadRequest):
    """The content type or the encoding of the request is not supported."""


class TooLarge(BatchmillError, ValueError):
    """The request exceeds a limit; the message says which. Smaller requests help."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that one request may contain. Lengths of text are in characters.

    A request over a limit of bytes, spans, all attributes or JSON values is refused as a whole
    (`TooLarge`), one nested deeper than ``max_json_depth`` is a `BadRequest`. Over the other limits
    a span is rejected, a text is cut or an attribute is dropped, and that is counted.

    >>> Limits(max_attributes=32).max_name_length
    1024
    """

    max_body_bytes: int = 16 * 2**20
    """Of a body as sent."""

    max_decompressed_bytes: int = 64 * 2**20
    """Of a body after decompression; also at most 20 times as many as were sent, and 16 MiB."""

    max_spans: int = 50_000
    """Spans in a request; also the limit of its resources and scopes together."""

    max_span_bytes: int = 2 * 2**20
    """Of a span in protobuf; a larger one is rejected. Also the limit of a resource."""

    max_attributes: int = 128
    """Attributes of a span, or of a resource; more are dropped."""

    max_attributes_in_all: int = 1_000_000
    """Attributes of all spans and resources of a request: they take most of its memory."""

    max_expanded_bytes: int = 256 * 2**20
    """Of a request whose spans have a copy of their resource each, as readers of a segment may have
    them; every attribute counts for 64 bytes and its texts."""

    max_attribute_length: int = 4096
    """Of an attribute's value as text; a longer one is cut."""

    max_key_length: int = 256
    """Of an attribute's key; an attribute with a longer one is dropped."""

    max_name_length: int = 1024
    """Of a span's name; a longer one is cut."""

    max_value_depth: int = 16
    """Nesting of arrays and maps in an attribute's value; a deeper attribute is dropped."""

    max_json_depth: int = 128
    """Nesting of objects and arrays in a JSON body."""

    max_json_values: int = 2_000_000
    """Values in a JSON body: each takes far more memory than it has bytes."""

    def __post_init__(self) -> None:
        check_ints(self, 1, *(limit.name for limit in fields(self)))
        if self.max_value_depth > 24:
            # protobuf itself parses at most 100 nested messages.
            raise ConfigError("max_value_depth", self.max_value_depth, "at most 24")
        if self.max_json_depth > 512:
            # Python's recursion limit is not far above.
            raise ConfigError("max_json_depth", self.max_json_depth, "at most 512")


ATTRIBUTE_BYTES = 64
"""What an attribute takes beside its texts, where a table is written or read."""
_HELD_FACTOR, _HELD_MIB, _WRITTEN_MIB, _MESSAGES_MIB = 20, 1, 16, 64
"""The id of a span is 8 random bytes, which no sender can compress: 20 times that is more than the
132 bytes, at most, that a span takes without attributes. Its times and the ids of its trace and
parent add to that, so attributes that are alike in all spans have room, too. A body without its
compression has those for each span. Messages of Kafka have the resource for each span as well, and
a Collector sends 8192 spans at once, of Java with its command line in the resource."""


def check_held(held: int, written: int, sent: int, *, packed: bool = True) -> None:
    """Raise `TooLarge` for a request that takes far more memory than the bytes that were sent.

    ``held`` is what it takes until it is written, ``written`` while that happens: as the table of a
    segment or, if it is not ``packed``, as messages of Kafka.
    """
    written_mib = _WRITTEN_MIB if packed else _MESSAGES_MIB
    for size, mib, when in ((held, _HELD_MIB, "waits"), (written, written_mib, "is written")):
        most = _HELD_FACTOR * sent + mib * 2**20
        if size > most:
            raise TooLarge(
                f"the request of {sent} bytes takes {size} bytes of memory while it {when}, at "
                f"most {most} are allowed ({_HELD_FACTOR} times as many, and {mib} MiB): send "
                "fewer spans in a request"
            )


def expanded_too_large(limits: Limits) -> TooLarge:
    """The error for resources that are too large for the number of their spans."""
    return TooLarge(
        f"the request has more than {limits.max_expanded_bytes} bytes when each span has its "
        "resource: give resources fewer attributes, or send fewer spans in a request"
    )


def decompress(body: bytes, encoding: str, limits: Limits) -> bytes:
    """Undo the content ``encoding`` of ``body``: one of `ENCODINGS`, or empty for identity.

    Never holds more than the limits allow, of which one grows with ``body``: raises `TooLarge` as
    soon as the output exceeds them. Raises `BadRequest` for data that is invalid, incomplete, or
    continues after its end, and `Unsupported` for any other encoding.
    """
    if len(body) > limits.max_body_bytes:
        raise too_many_bytes(len(body), limits.max_body_bytes)
    most = min(limits.max_decompressed_bytes, _HELD_FACTOR * len(body) + _WRITTEN_MIB * 2**20)
    match encoding.strip().lower():
        case "" | "identity":
            if len(body) > most:
                raise _inflated_too_large(most)
            return body
        case "gzip" | "x-gzip":
            return _inflate(body, _GZIP, most, "gzip")
        case "deflate":
            return _inflate(body, _ZLIB if _has_zlib_header(body) else _RAW, most)
        case "zlib":
            return _inflate(body, _ZLIB, most, "zlib")
        case ("zstd" | "lz4") as codec:
            return _read_frames(body, codec, most)
        case "snappy" if not body.startswith(_SNAPPY_FRAMES):
            return _read_snappy(body, most)
    raise Unsupported(
        f"the content encoding {encoding[:40]!r} is not one of {', '.join(ENCODINGS)} "
        "(snappy without frames)"
    )


def _has_zlib_header(body: bytes) -> bool:
    """Deflate means zlib's format, but some senders send the bare stream."""
    return len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0


def _inflate(body: bytes, window: int, most: int, encoding: str = "deflate") -> bytes:
    view = memoryview(body)
    parts: list[bytes] = []
    room = most
    at = members = 0
    while True:
        members += 1
        if members > _MAX_MEMBERS:
            raise BadRequest(f"the {encoding} body has more than {_MAX_MEMBERS} members")
        stream = zlib.decompressobj(window)
        while not stream.eof:
            if at >= len(view):
                raise BadRequest(f"the {encoding} body ends early: it was truncated in transit")
            step = view[at : at + _STEP]
            try:
                part = stream.decompress(step, room + 1)
            except zlib.error as error:
                raise BadRequest(f"the body is not valid {encoding}: {error}") from error
            at += len(step) - len(stream.unconsumed_tail) - len(stream.unused_data)
            room -= len(part)
            if room < 0:
                raise _inflated_too_large(most)
            if part:
                parts.append(part)
        if at == len(body) or (body[at] == 0 and not body[at:].strip(b"\0")):
            break  # gzip allows zeros as padding
        if window != _GZIP:
            raise BadRequest(f"the {encoding} body continues after its end")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _read_frames(body: bytes, codec: str, most: int) -> bytes:
    """Decompress frames of zstd or lz4, one after the other, as both formats allow.

    A frame of zstd may name a window of up to 128 MiB, but only what it fills is memory, and that
    is not more than the output.
    """
    if not body:
        raise BadRequest(f"the {codec} body ends early: it was truncated in transit")
    parts: list[bytes] = []
    room = most
    step = max(_STEP, 8 * len(body))  # most bodies are read at once
    with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
        while True:
            try:
                part = stream.read(min(step, room + 1))
            except OSError as error:
                if "Truncated" in str(error):
                    raise BadRequest(
                        f"the {codec} body ends early: it was truncated in transit"
                    ) from error
                raise BadRequest(f"the body is not valid {codec}: {error}") from error
            room -= len(part)
            if room < 0:
                raise _inflated_too_large(most)
            if not part:
                return parts[0] if len(parts) == 1 else b"".join(parts)
            parts.append(part)


def _read_snappy(body: bytes, most: int) -> bytes:
    """Decompress a block of snappy, which starts with its size: a number of up to five bytes."""
    size = 0
    for at, byte in enumerate(body[:5]):
        size |= (byte & 127) << 7 * at
        if byte < 128:
            break
    else:
        raise BadRequest("the body is not valid snappy: it does not start with its size")
    if size > most:
        raise _inflated_too_large(most)
    try:
        return bytes(pa.decompress(body, size, "snappy", asbytes=True))
    except (OSError, ValueError) as error:
        raise BadRequest(f"the body is not valid snappy: {error}") from error


def _inflated_too_large(most: int) -> TooLarge:
    return TooLarge(
        f"the body has more than {most} bytes when decompressed: send fewer spans in a request"
    )


def too_many_bytes(size: int, limit: int) -> TooLarge:
    """The error for a body that is too large."""
    return TooLarge(
        f"the body has {size} bytes, at most {limit} are allowed: send fewer spans in a request"
    )
