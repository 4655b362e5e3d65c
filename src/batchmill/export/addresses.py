"""Addresses that ``batchmill export`` takes: peers of the outbox's exporter, and Prometheus."""

from __future__ import annotations

from urllib.parse import urlsplit

from batchmill.errors import ConfigError
from batchmill.export.settings import Target
from batchmill.extras import require_extra

PROMETHEUS_ADDRESSES = (
    "prometheus://host:port, remote+http://host:port/path or remote+https://host:port/path"
)
SCRAPED = "prometheus"
_REMOTE_WRITE = ("remote+http", "remote+https")
_NEEDS = {"kafka": "confluent_kafka", "otlp+grpc": "grpc", "otlp+grpcs": "grpc"}


def reads_store(to: str) -> bool:
    """Whether an exporter to this address reads the store, and needs no outbox."""
    return _scheme(to) in (SCRAPED, *_REMOTE_WRITE)


def is_scraped(to: str) -> bool:
    """Whether an address is that of a page for Prometheus to scrape."""
    return _scheme(to) == SCRAPED


def check_address(to: str) -> str:
    """The address in full, if an exporter takes it; raises :class:`ConfigError`."""
    if is_scraped(to):
        page_address(to)
    elif reads_store(to):
        from batchmill.export.remote_write.client import remote_address

        remote_address(to)
    else:
        return str(Target.parse(to))
    return to


def page_address(to: str) -> tuple[str, int | None]:
    """Host and port of a page for Prometheus; no port: the default one."""
    parts = urlsplit(to)
    try:
        port = parts.port
    except ValueError:
        port = -1
    other = parts.path not in ("", "/", "/metrics") or parts.query or "@" in parts.netloc
    if not parts.hostname or port == -1 or other:
        raise ConfigError("to", to, "such as prometheus://127.0.0.1:9464")
    return parts.hostname, port


def require_exporter(to: str) -> None:
    """Raise :class:`MissingExtraError` unless what an exporter to this address needs is there."""
    scheme = _scheme(to)
    if scheme in _REMOTE_WRITE:
        require_extra("remote write", "export", "pyarrow", "google.protobuf")
    elif scheme == SCRAPED:
        require_extra("the page for Prometheus", "export", "starlette", "uvicorn")
    else:
        sender = (_NEEDS[scheme],) if scheme in _NEEDS else ()
        require_extra(
            "exporting", "export", "pyarrow", "google.protobuf", "opentelemetry.proto", *sender
        )


def _scheme(to: str) -> str:
    return to.partition("://")[0]
