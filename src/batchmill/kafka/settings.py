"""The settings of a sink: frozen, keyword-only, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from batchmill.errors import ConfigError
from batchmill.kafka.options import check_options

MIB = 1 << 20
COMPRESSIONS = ("zstd", "lz4", "snappy", "gzip", "none")
_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class KafkaSettings:
    """What a :class:`KafkaSink` can be told. The same names are arguments of its own."""

    compression: str = "zstd"
    """How batches of messages are compressed on their way, and in the topic."""
    linger_s: float = 0.01
    """How long a message may wait for company."""
    capacity_rows: int = 200_000
    """Spans that may wait for the broker: half of it is WARNING, all of it CRITICAL."""
    capacity_bytes: int = 128 * MIB
    """Bytes of messages that may wait for the broker, in the same way."""
    max_message_bytes: int = 1_000_000
    """A trace of more is sent in several messages. Where the topic's ``max.message.bytes`` is
    less, that counts."""
    delivery_timeout_s: float = 8.0
    """How long the broker may take to acknowledge a message. Most senders give up after ten
    seconds, and had better hear 503 before that."""
    retry_after_s: float = 1.0
    """What a refused sender is told to wait."""
    close_timeout_s: float = 30.0
    """How long ``close()`` waits for the rest."""
    options: Mapping[str, str] = field(default_factory=lambda: _NO_OPTIONS, repr=False)
    """Settings of librdkafka by their names there: TLS, SASL and the like."""

    def __post_init__(self) -> None:
        for name in ("capacity_rows", "capacity_bytes", "max_message_bytes"):
            _check(name, getattr(self, name), int, 1)
        for name in ("linger_s", "retry_after_s", "close_timeout_s"):
            _check(name, getattr(self, name), float, 0)
        _check("delivery_timeout_s", self.delivery_timeout_s, float, 0.1)
        _check("max_message_bytes", self.max_message_bytes, int, 2_000)
        if self.linger_s >= self.delivery_timeout_s:
            allowed = f"less than delivery_timeout_s, {self.delivery_timeout_s:g}"
            raise ConfigError("linger_s", self.linger_s, allowed)
        if self.compression not in COMPRESSIONS:
            raise ConfigError("compression", self.compression, f"one of {', '.join(COMPRESSIONS)}")
        check_options(self.options)


def _check(name: str, value: object, kind: type, least: float) -> None:
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(name, value, f"{what} of at least {least:,g}")
