"""Addresses of topics: ``kafka://host:port[,host:port]/topic``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from batchmill.kafka.errors import KafkaAddressError

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
