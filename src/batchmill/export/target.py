"""Where to send, from an address; and whoever sends there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from batchmill.errors import ConfigError, MissingExtraError
from batchmill.export.settings import ExporterSettings
from batchmill.export.values import ExportedValue

ALLOWED = (
    "otlp+grpc://host:port, otlp+grpcs://host:port, otlp+http://host:port, otlp+https://host:port "
    "or kafka://host:port/topic"
)
_PORTS = {"otlp+grpc": 4317, "otlp+grpcs": 4317, "otlp+http": 4318, "otlp+https": 4318}
_KAFKA = "kafka"


class Sender(Protocol):
    """Sends values to a peer. Used by one thread at a time."""

    def send(self, values: Sequence[ExportedValue]) -> int:
        """Send, and return once the peer has taken them; how many data points it refused.

        Raises :class:`SendError`. Whether the peer has some of them is then not known.
        """
        ...

    def interrupt(self) -> None:
        """Have a send that waits for the peer fail soon, and no other begin; by any thread."""
        ...

    def close(self) -> None:
        """Let go of the connection; may be called twice."""
        ...


@dataclass(frozen=True)
class Target:
    """An address, taken apart."""

    scheme: str
    peers: tuple[str, ...]
    """Each ``host:port``; only Kafka has several."""
    path: str = ""
    """The topic, or the path of a request; empty: the usual one."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target of an address.

        >>> Target.parse("kafka://one:9092,two:9092/metrics").peers
        ('one:9092', 'two:9092')
        """
        scheme, _, rest = text.partition("://")
        place, _, path = rest.partition("/")
        if "@" in place or "?" in path or "#" in path:
            raise ConfigError("to", "…", f"{ALLOWED}, without a password: give that as a header")
        if scheme == _KAFKA and place and path and "/" not in path:
            peers = tuple(_peer(text, each, 9092) for each in place.split(","))
            return cls(scheme, peers, path)
        if scheme in _PORTS and place and not (path and "http" not in scheme):
            return cls(scheme, (_peer(text, place, _PORTS[scheme]),), path and f"/{path}")
        raise ConfigError("to", text, ALLOWED)

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme.endswith("s") and self.scheme != _KAFKA

    def __str__(self) -> str:
        slash = "/" if self.path and not self.path.startswith("/") else ""
        return f"{self.scheme}://{','.join(self.peers)}{slash}{self.path}"


def open_sender(target: Target, settings: ExporterSettings) -> Sender:
    """Whoever sends to a target; connects when it first sends."""
    try:
        if target.scheme == _KAFKA:
            from batchmill.export.senders.kafka import KafkaSender

            return KafkaSender(target, settings)
        if target.scheme.startswith("otlp+grpc"):
            from batchmill.export.senders.grpc import GrpcSender

            return GrpcSender(target, settings)
        from batchmill.export.senders.http import HttpSender

        return HttpSender(target, settings)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("batchmill"):
            raise
        raise MissingExtraError("exporting", "export", f"{error.name} is not installed") from error


def _peer(text: str, place: str, port: int) -> str:
    try:
        found = urlsplit(f"//{place}")
        host, given = found.hostname, found.port
    except ValueError:
        host, given = None, None
    if not host:
        raise ConfigError("to", text, ALLOWED)
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{given or port}"
