"""A body as it was sent -> the body, without ever holding more than the limit allows."""

from __future__ import annotations

import zlib

from batchmill.ingest.decode.limits import BadRequest, Limits, TooLarge, Unsupported

_STEP = 64 * 1024
"""Bytes of input that are inflated at a time."""

_MOST_MEMBERS = 1000
"""Parts of one gzip body. Each costs some setting up, however small it is."""

_GZIP, _ZLIB, _RAW = 31, 15, -15


def decompress(body: bytes, encoding: str, limits: Limits) -> bytes:
    """``body`` without its content ``encoding``: gzip, deflate or identity (also: none).

    Raises `TooLarge` as soon as the output passes the limit, and `BadRequest` for what cannot be
    inflated or goes on after its end.
    """
    if len(body) > limits.max_body_bytes:
        raise TooLarge(
            f"the body has {len(body)} bytes, at most {limits.max_body_bytes} are taken: "
            "send fewer spans in a request"
        )
    name = encoding.strip().lower()
    if name in ("", "identity"):
        if len(body) > limits.max_decompressed_bytes:
            raise _inflated_too_large(limits)
        return body
    if name in ("gzip", "x-gzip"):
        return _inflate(body, _GZIP, limits)
    if name == "deflate":
        return _inflate(body, _ZLIB if _has_zlib_header(body) else _RAW, limits)
    raise Unsupported(
        f"the content encoding {encoding[:40]!r} is not one of gzip, deflate, identity"
    )


def _has_zlib_header(body: bytes) -> bool:
    """Deflate means zlib's format, but some send the bare stream."""
    return len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0


def _inflate(body: bytes, window: int, limits: Limits) -> bytes:
    what = "gzip" if window == _GZIP else "deflate"
    view = memoryview(body)
    parts: list[bytes] = []
    room = limits.max_decompressed_bytes
    at = members = 0
    while True:
        members += 1
        if members > _MOST_MEMBERS:
            raise BadRequest(f"the {what} body has more than {_MOST_MEMBERS} members")
        stream = zlib.decompressobj(window)
        while not stream.eof:
            if at >= len(view):
                raise BadRequest(f"the {what} body ends early: it was cut off on its way")
            step = view[at : at + _STEP]
            try:
                part = stream.decompress(step, room + 1)
            except zlib.error as error:
                raise BadRequest(f"the body is not valid {what}: {error}") from error
            at += len(step) - len(stream.unconsumed_tail) - len(stream.unused_data)
            room -= len(part)
            if room < 0:
                raise _inflated_too_large(limits)
            if part:
                parts.append(part)
        if at == len(body) or (body[at] == 0 and not body[at:].strip(b"\0")):
            break  # gzip may be padded with zeros
        if window != _GZIP:
            raise BadRequest(f"the {what} body goes on after its end")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _inflated_too_large(limits: Limits) -> TooLarge:
    return TooLarge(
        f"the body has more than {limits.max_decompressed_bytes} bytes when decompressed: "
        "send fewer spans in a request"
    )
