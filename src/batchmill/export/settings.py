"""Where an exporter sends to, and its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from batchmill.errors import ConfigError
from batchmill.export.http import check_headers
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
        for name in ("timeout_s", "initial_ms", "max_ms", "drain_s", "poll_s"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and value > 0 and math.isfinite(value)):
                raise ConfigError(name, value, "a number above 0")
        for name in ("buffer_size", "max_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, value, "a whole number, 1 or more")
        if not isinstance(self.strategy, BufferStrategy):
            raise ConfigError("strategy", self.strategy, "a BufferStrategy")
        check_headers(self.headers)
        check_options(self.kafka_options)
