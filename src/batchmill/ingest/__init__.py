"""OTLP receivers: take spans from OpenTelemetry clients into a spool, or a topic of Kafka.

`Receiver` serves HTTP and gRPC; `decode_traces`, `decompress` and `otlp_from_json` decode requests
without a network. Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names
from batchmill.http import Access

if TYPE_CHECKING:
    from batchmill.ingest.decode.gzip import decompress
    from batchmill.ingest.decode.limits import BadRequest, Limits, TooLarge
    from batchmill.ingest.decode.request import Decoded, decode_traces
    from batchmill.ingest.decode.transcode import otlp_from_json
    from batchmill.ingest.receiver import Receiver
    from batchmill.ingest.settings import ReceiverSettings

__all__ = [
    "Access",
    "BadRequest",
    "Decoded",
    "Limits",
    "Receiver",
    "ReceiverSettings",
    "TooLarge",
    "decode_traces",
    "decompress",
    "otlp_from_json",
]

_MODULES = {
    "BadRequest": "decode.limits",
    "Decoded": "decode.request",
    "Limits": "decode.limits",
    "Receiver": "receiver",
    "ReceiverSettings": "settings",
    "TooLarge": "decode.limits",
    "decode_traces": "decode.request",
    "decompress": "decode.gzip",
    "otlp_from_json": "decode.transcode",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="receiving OpenTelemetry data", extra="otlp")
