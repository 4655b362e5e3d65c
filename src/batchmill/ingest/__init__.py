"""OTLP receivers: spans from OpenTelemetry clients into the spool.

Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill._errors import BatchmillError
from batchmill._lazy import lazy_names

if TYPE_CHECKING:
    from batchmill.ingest._auth import Access
    from batchmill.ingest._decode import Decoded, decode_traces
    from batchmill.ingest._gzip import decompress
    from batchmill.ingest._limits import BadRequest, Limits, TooLarge
    from batchmill.ingest._otlp_from_json import otlp_from_json
    from batchmill.ingest._server import Receiver
    from batchmill.ingest._settings import ReceiverSettings

__all__ = [
    "Access",
    "BadRequest",
    "Decoded",
    "Limits",
    "MissingIngestError",
    "Receiver",
    "ReceiverSettings",
    "TooLarge",
    "decode_traces",
    "decompress",
    "otlp_from_json",
]

_MODULES = {
    "Access": "_auth",
    "BadRequest": "_limits",
    "Decoded": "_decode",
    "Limits": "_limits",
    "Receiver": "_server",
    "ReceiverSettings": "_settings",
    "TooLarge": "_limits",
    "decode_traces": "_decode",
    "decompress": "_gzip",
    "otlp_from_json": "_otlp_from_json",
}


class MissingIngestError(BatchmillError, ImportError):
    """What the receivers are built on is not installed; carries ``what``."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"receiving OpenTelemetry data needs packages that are missing ({self.what}): "
            "install them with: pip install 'batchmill[otlp]'"
        )


__getattr__ = lazy_names(__name__, _MODULES, MissingIngestError)
