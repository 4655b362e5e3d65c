"""Decodes OTLP requests to columns of spans; no network, no threads.

`decompress` undoes a body's encoding, `decode_traces` decodes it, both within `Limits`;
`otlp_from_json` converts a request in JSON to protobuf.
"""

from __future__ import annotations

from batchmill.ingest.decode import compiled
from batchmill.ingest.decode.body import (
    ENCODINGS,
    BadRequest,
    Limits,
    TooLarge,
    Unsupported,
    check_held,
    decompress,
    too_many_bytes,
)
from batchmill.ingest.decode.compiled import decoder_in_use
from batchmill.ingest.decode.json import otlp_from_json, read_json
from batchmill.ingest.decode.protobuf import read_proto
from batchmill.ingest.decode.rows import Decoded, Rows

__all__ = [
    "BadRequest",
    "Decoded",
    "ENCODINGS",
    "JSON",
    "Limits",
    "PROTOBUF",
    "TooLarge",
    "Unsupported",
    "check_held",
    "decode_traces",
    "decoder_in_use",
    "decompress",
    "otlp_from_json",
]

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


def decode_traces(
    body: bytes, content_type: str, limits: Limits, *, packed: bool = True
) -> Decoded:
    """Decode the spans of an ExportTraceServiceRequest, in protobuf or in OTLP's JSON.

    Invalid spans are left out one by one and counted. Raises `BadRequest` for a body that cannot be
    decoded, `TooLarge` for one over a limit, and nothing else. Without ``packed`` the spans come as
    lists, from the decoder in Python, to be written as messages of Kafka.
    """
    if len(body) > limits.max_decompressed_bytes:
        raise too_many_bytes(len(body), limits.max_decompressed_bytes)
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in (PROTOBUF, "application/protobuf"):
        form, read = compiled.PROTOBUF, read_proto
    elif media_type == JSON:
        form, read = compiled.JSON, read_json
    else:
        raise Unsupported(f"the content type {content_type[:80]!r} is not {PROTOBUF} or {JSON}")
    if packed:
        decoded = compiled.decode_compiled(body, form, limits)
        if decoded is not None:
            return decoded
    rows = Rows(limits)
    read(body, rows)
    return rows.decoded(packed=packed)
