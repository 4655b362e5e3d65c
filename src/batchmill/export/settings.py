"""Where exporters send to: addresses, and the settings of an exporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from batchmill.errors import ConfigError, check_ints, check_positive
from batchmill.export.http import check_headers
from batchmill.extras import require_extra
from batchmill.kafka import check_options
from batchmill.queue import BufferStrategy

KAFKA = "kafka"
_PORTS = {"otlp+grpc": 4317, "otlp+grpcs": 4317, "otlp+http": 4318, "otlp+https": 4318}
_ALLOWED = (
    "otlp+grpc://host:port, otlp+grpcs://host:port, otlp+http://host:port, otlp+https://host:port "
    "or kafka://host:port/topic"
)


@dataclass(frozen=True)
class Target:
    """The address of a collector or of a Kafka topic."""

    scheme: str
    peers: tuple[str, ...]
    """Each ``host:port``; only Kafka has several."""
    path: str = ""
    """The topic, or the path of a request; empty: the usual one."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read an address; raises :class:`ConfigError`.

        >>> Target.parse("kafka://one:9092,two:9092/metrics").peers
        ('one:9092', 'two:9092')
        """
        scheme, _, rest = text.partition("://")
        hosts, _, path = rest.partition("/")
        if "@" in hosts or "?" in path or "#" in path:
            raise ConfigError("to", "…", f"{_ALLOWED}, without a password: give that as a header")
        if scheme == KAFKA and hosts and path and "/" not in path:
            return cls(scheme, tuple(_peer(text, host, 9092) for host in hosts.split(",")), path)
        if scheme in _PORTS and hosts and not (path and "http" not in scheme):
            return cls(scheme, (_peer(text, hosts, _PORTS[scheme]),), path and f"/{path}")
        raise ConfigError("to", text, _ALLOWED)

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme.endswith("s") and self.scheme != KAFKA

    def __str__(self) -> str:
        slash = "/" if self.path and not self.path.startswith("/") else ""
        return f"{self.scheme}://{','.join(self.peers)}{slash}{self.path}"


def _peer(text: str, host_and_port: str, default_port: int) -> str:
    try:
        parts = urlsplit(f"//{host_and_port}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise ConfigError("to", text, _ALLOWED)
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port or default_port}"


@dataclass(frozen=True, kw_only=True)
class ExporterSettings:
    """The settings of an exporter beyond where it sends. They check themselves."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What goes with every request, such as a token; not for Kafka."""
    kafka_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Settings of librdkafka by their names there, such as TLS and a login; only for Kafka."""
    timeout_s: float = 10.0
    """How long a peer may take to answer."""
    initial_ms: float = 100.0
    """How long to wait before the second try; each wait is twice as long as the one before."""
    max_ms: float = 15_000.0
    """How long to wait at most. There is no last try."""
    drain_s: float = 5.0
    """How long an exporter that is told to stop goes on with what it has in hand."""
    poll_s: float = 0.5
    """How often it looks for new files while there are none."""
    buffer_size: int = 20_000
    """How many values its queue holds."""
    max_batch: int = 2_000
    """How many values are sent at a time at most."""
    strategy: BufferStrategy = BufferStrategy.BLOCKING
    """When the queue is full: BLOCKING waits for the peer; IF_POSSIBLE drops values, counted."""

    def __post_init__(self) -> None:
        check_positive(self, "timeout_s", "initial_ms", "max_ms", "drain_s", "poll_s")
        check_ints(self, 1, "buffer_size", "max_batch")
        if not isinstance(self.strategy, BufferStrategy):
            raise ConfigError("strategy", self.strategy, "a BufferStrategy")
        check_headers(self.headers)
        check_options(self.kafka_options)


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
