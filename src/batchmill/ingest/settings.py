"""What a receiver may be told."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from batchmill.errors import ConfigError
from batchmill.http import Access

GRPC_MESSAGE_BYTES = 4 * 2**20
"""The largest gRPC message, which is what gRPC servers take by default."""


@dataclass(frozen=True, kw_only=True)
class ReceiverSettings:
    """Where a receiver listens, whom it lets in, and how much it takes at a time."""

    bind: str = "127.0.0.1"
    http_port: int = 4318
    """0: any free one."""
    grpc_port: int = 4317
    access: Access = field(default_factory=Access)
    insecure: bool = False
    """Listen beyond this machine without asking senders for anything."""

    max_connections: int = 1000
    """For each protocol; one more is turned away."""
    max_requests: int = 2000
    """Under way at a time; one more is answered 503."""
    max_bytes: int = 256 * 2**20
    """Of bodies in memory at a time; a sender that needs more is answered 503."""
    max_header_bytes: int = 16 * 2**10
    request_s: float = 30.0
    """From a request's first byte to its last. A sender that is slower is cut off."""
    idle_s: float = 60.0
    """A connection without a request is closed after this."""
    store_s: float = 60.0
    """A segment that takes longer than this to write is answered 503."""
    decoders: int = 1
    """Threads that decode. Python runs one at a time: two take turns, and that costs a fifth."""
    drain_s: float = 10.0
    """How long requests under way may take once the receiver is told to stop."""

    def __post_init__(self) -> None:
        for name in ("http_port", "grpc_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(name, getattr(self, name), "a port, 0 to 65535")
        for each in fields(self):
            value = getattr(self, each.name)
            limited = each.name.startswith("max_") or each.name.endswith("_s")
            if (limited or each.name == "decoders") and not 0 < value < float("inf"):
                raise ConfigError(each.name, value, "above 0")
        self.access.check_bind(self.bind, self.insecure)
