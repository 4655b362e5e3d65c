"""The settings of a Kafka sink: frozen, keyword-only, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from batchmill.errors import ConfigError, check_int, check_number
from batchmill.kafka.options import check_options
from batchmill.spool import SinkSettings

COMPRESSIONS = ("zstd", "lz4", "snappy", "gzip", "none")
_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class KafkaSettings(SinkSettings):
    """The settings of a :class:`KafkaSink`, which also takes each of them as an argument."""

    compression: str = "zstd"
    """How batches of messages are compressed on their way, and in the topic."""
    linger_s: float = 0.01
    """How long a message may wait for others."""
    max_message_bytes: int = 1_000_000
    """A larger trace is sent in several messages. A topic's lower ``max.message.bytes`` takes
    precedence."""
    delivery_timeout_s: float = 8.0
    """How long the broker may take to acknowledge a message. Most senders give up after ten
    seconds, and should get a 503 before that."""
    options: Mapping[str, str] = field(default_factory=lambda: _NO_OPTIONS, repr=False)
    """Settings of librdkafka by their names there: TLS, SASL and the like."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("max_message_bytes", self.max_message_bytes, 2_000)
        check_number("linger_s", self.linger_s, 0)
        check_number("delivery_timeout_s", self.delivery_timeout_s, 0.1)
        if self.linger_s >= self.delivery_timeout_s:
            allowed = f"less than delivery_timeout_s, {self.delivery_timeout_s:g}"
            raise ConfigError("linger_s", self.linger_s, allowed)
        if self.compression not in COMPRESSIONS:
            raise ConfigError("compression", self.compression, f"one of {', '.join(COMPRESSIONS)}")
        check_options(self.options)
