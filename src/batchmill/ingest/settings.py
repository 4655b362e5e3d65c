"""The settings of a receiver."""

from __future__ import annotations

from dataclasses import dataclass

from batchmill.errors import ConfigError
from batchmill.http import ServerSettings

GRPC_MESSAGE_BYTES = 4 * 2**20
"""The largest gRPC message: the default of gRPC servers."""


@dataclass(frozen=True, kw_only=True)
class ReceiverSettings(ServerSettings):
    """Where a receiver listens, for whom, and how much it takes at a time."""

    http_port: int = 4318
    """0: any free one."""
    grpc_port: int = 4317
    max_connections: int = 1000
    """Open at a time, for each protocol; one more is refused."""
    max_requests: int = 2000
    """In progress at a time; one more is answered 503."""
    max_bytes: int = 256 * 2**20
    """Of bodies in memory at a time; a sender that needs more is answered 503."""
    max_header_bytes: int = 16 * 2**10
    idle_s: float = 60.0
    """A connection without a request is closed after this."""
    store_s: float = 60.0
    """A request whose spans are not durable after this is answered 503."""
    decoders: int = 1
    """Threads that decode. Python runs one at a time, and switching between two costs a fifth."""
    drain_s: float = 10.0
    """How long requests in progress may take after ``stop()``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoders < 1:
            raise ConfigError("decoders", self.decoders, "above 0")
