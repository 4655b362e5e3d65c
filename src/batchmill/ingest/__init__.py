"""OTLP receivers: spans from OpenTelemetry clients into the spool.

Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchmill._errors import BatchmillError

if TYPE_CHECKING:
    from batchmill.ingest._auth import Access
    from batchmill.ingest._decode import Decoded, decode_traces
    from batchmill.ingest._gzip import decompress
    from batchmill.ingest._limits import BadRequest, Limits, TooLarge
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


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("batchmill"):
            raise
        raise MissingIngestError(f"{error.name} is not installed") from error
