"""The bytes of an OTLP request -> columns of spans. No network, no threads."""

from __future__ import annotations

from batchmill.ingest.decode.gzip import decompress
from batchmill.ingest.decode.json import read_json
from batchmill.ingest.decode.limits import BadRequest, Limits, TooLarge, Unsupported
from batchmill.ingest.decode.rows import Decoded, Rows

__all__ = [
    "BadRequest",
    "Decoded",
    "Limits",
    "TooLarge",
    "Unsupported",
    "decode_traces",
    "decompress",
]

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


def decode_traces(body: bytes, content_type: str, limits: Limits) -> Decoded:
    """The spans of an ExportTraceServiceRequest, in protobuf or in OTLP's JSON.

    Spans that cannot be used are left out one by one and counted. Raises `BadRequest` for a body
    that cannot be read, `TooLarge` for one past a limit, and nothing else.
    """
    if len(body) > limits.max_decompressed_bytes:
        raise TooLarge(
            f"the body has {len(body)} bytes, at most {limits.max_decompressed_bytes} are taken: "
            "send fewer spans in a request"
        )
    rows = Rows(limits)
    kind = content_type.partition(";")[0].strip().lower()
    if kind in (PROTOBUF, "application/protobuf"):
        from batchmill.ingest.decode.protobuf import read_proto

        read_proto(body, rows)
    elif kind == JSON:
        read_json(body, rows)
    else:
        raise Unsupported(f"the content type {content_type[:80]!r} is not {PROTOBUF} or {JSON}")
    return rows.decoded(len(body))
