"""What a Kafka client needs: the address of a topic, librdkafka's options, a sink's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Self

from batchmill.errors import ConfigError, check_int, check_number
from batchmill.kafka.errors import KafkaAddressError
from batchmill.spool import SinkSettings

SCHEME = "kafka://"

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
"""What Kafka accepts as a name."""
_BROKER = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/@\[\]?#]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class KafkaAddress:
    """A topic, and the brokers to ask first.

    >>> KafkaAddress.parse("kafka://one:9092,two:9092/spans").bootstrap
    'one:9092,two:9092'
    """

    brokers: tuple[str, ...]
    """Each as ``host:port``."""
    topic: str

    @classmethod
    def parse(cls, address: str) -> Self:
        """Parse an address; raises KafkaAddressError if it is not one."""
        if not address.startswith(SCHEME):
            raise KafkaAddressError(address, f"it does not begin with {SCHEME}")
        if "@" in address:  # not repeated in the message: there may be a password in it
            raise KafkaAddressError(f"{SCHEME}…", "user and password belong into --kafka-config")
        where, _, topic = address.removeprefix(SCHEME).partition("/")
        brokers = tuple(where.split(","))
        for broker in brokers:
            match = _BROKER.fullmatch(broker)
            if match is None or not 0 < int(match[2]) < 65_536:
                raise KafkaAddressError(address, f"{broker!r} is not host:port")
        if not topic:
            raise KafkaAddressError(address, "it names no topic")
        if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
            allowed = "up to 249 letters, digits, dots, underscores and hyphens"
            raise KafkaAddressError(address, f"the topic {topic!r} is not {allowed}")
        return cls(brokers, topic)

    @property
    def bootstrap(self) -> str:
        """The brokers, as Kafka's clients expect them (``bootstrap.servers``)."""
        return ",".join(self.brokers)

    def __str__(self) -> str:
        return f"{SCHEME}{self.bootstrap}/{self.topic}"


HIDDEN = "(hidden)"
_OURS = frozenset(
    {
        "acks",
        "batch.size",
        "bootstrap.servers",
        "compression.codec",
        "compression.type",
        "delivery.timeout.ms",
        "enable.auto.commit",
        "enable.idempotence",
        "group.id",
        "linger.ms",
        "message.max.bytes",
        "message.timeout.ms",
        "metadata.broker.list",
        "partitioner",
        "queue.buffering.max.kbytes",
        "queue.buffering.max.messages",
        "queue.buffering.max.ms",
        "request.required.acks",
        "transactional.id",
    }
)
"""Settings that the guarantees rest on, or that have a name of their own here."""
_SECRET = ("password", "secret", "token", "jaas", "oauthbearer.config", "key.pem")


def read_options(path: Path) -> dict[str, str]:
    """Settings of librdkafka from a file: a line ``name=value`` each, ``#`` for comments."""
    options: dict[str, str] = {}
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(str(path), "…", "text in UTF-8") from None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            # Without the line itself: it may be a secret.
            raise ConfigError(f"{path}, line {number}", "…", "name=value, or a comment after #")
        options[name.strip()] = value.strip()
    check_options(options)
    return options


def check_options(options: Mapping[str, str]) -> None:
    """Raise ConfigError for a setting that batchmill controls itself."""
    for name in options:
        if name in _OURS:
            raise ConfigError(f"options[{name!r}]", "…", "left out: batchmill sets it itself")


def hide_secrets(text: str, options: Mapping[str, str]) -> str:
    """A text without the passwords and keys among the options."""
    for name, value in options.items():
        if value and any(word in name for word in _SECRET):
            text = text.replace(value, HIDDEN)
    return text


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
