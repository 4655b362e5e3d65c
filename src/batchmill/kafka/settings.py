"""The settings of a Kafka sink: frozen, keyword-only, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from batchmill.errors import ConfigError, check_int, check_number
from batchmill.kafka.options import check_options

MIB = 1 << 20
COMPRESSIONS = ("zstd", "lz4", "snappy", "gzip", "none")
_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class KafkaSettings:
    """The settings of a :class:`KafkaSink`, which also takes each of them as an argument."""

    compression: str = "zstd"
    """How batches of messages are compressed on their way, and in the topic."""
    linger_s: float = 0.01
    """How long a message may wait for others."""
    capacity_rows: int = 200_000
    """Spans that may wait for the broker: half of it is WARNING, all of it CRITICAL."""
    capacity_bytes: int = 128 * MIB
    """Bytes of messages that may wait for the broker, in the same way."""
    max_message_bytes: int = 1_000_000
    """A larger trace is sent in several messages. A topic's lower ``max.message.bytes`` takes
    precedence."""
    delivery_timeout_s: float = 8.0
    """How long the broker may take to acknowledge a message. Most senders give up after ten
    seconds, and should get a 503 before that."""
    retry_after_s: float = 1.0
    """What a refused sender is told to wait."""
    close_timeout_s: float = 30.0
    """How long ``close()`` waits for the rest."""
    options: Mapping[str, str] = field(default_factory=lambda: _NO_OPTIONS, repr=False)
    """Settings of librdkafka by their names there: TLS, SASL and the like."""

    def __post_init__(self) -> None:
        for name in ("capacity_rows", "capacity_bytes"):
            check_int(name, getattr(self, name), 1)
        check_int("max_message_bytes", self.max_message_bytes, 2_000)
        for name in ("linger_s", "retry_after_s", "close_timeout_s"):
            check_number(name, getattr(self, name), 0)
        check_number("delivery_timeout_s", self.delivery_timeout_s, 0.1)
        if self.linger_s >= self.delivery_timeout_s:
            allowed = f"less than delivery_timeout_s, {self.delivery_timeout_s:g}"
            raise ConfigError("linger_s", self.linger_s, allowed)
        if self.compression not in COMPRESSIONS:
            raise ConfigError("compression", self.compression, f"one of {', '.join(COMPRESSIONS)}")
        check_options(self.options)
