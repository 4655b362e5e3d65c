"""OTLP receivers: take spans from OpenTelemetry clients into a spool, or a topic of Kafka.

`Receiver` serves HTTP and gRPC; `decode_traces`, `decompress` and `otlp_from_json` decode requests
without a network. `ParentLink`, `Place`, `check_shares`, `total_status` and `ended_status` are for
several processes that receive as one. Loads without its extra, so that it can say which one is
missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names
from batchmill.http import Access

if TYPE_CHECKING:
    from batchmill.ingest.decode import (
        BadRequest,
        Decoded,
        Limits,
        TooLarge,
        decode_traces,
        decompress,
        otlp_from_json,
    )
    from batchmill.ingest.intake import ReceiverSettings
    from batchmill.ingest.receiver import Receiver
    from batchmill.ingest.total import ended_status, total_status
    from batchmill.ingest.worker import ParentLink, Place, check_shares

__all__ = [
    "Access",
    "BadRequest",
    "Decoded",
    "Limits",
    "ParentLink",
    "Place",
    "Receiver",
    "ReceiverSettings",
    "TooLarge",
    "check_shares",
    "decode_traces",
    "decompress",
    "ended_status",
    "otlp_from_json",
    "total_status",
]

_MODULES = {
    "decode": "BadRequest Decoded Limits TooLarge decode_traces decompress otlp_from_json",
    "intake": "ReceiverSettings",
    "receiver": "Receiver",
    "total": "ended_status total_status",
    "worker": "ParentLink Place check_shares",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="receiving OpenTelemetry data", extra="otlp")
