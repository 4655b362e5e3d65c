"""What can go wrong on the way to a topic."""

from __future__ import annotations

from batchmill.errors import BatchmillError

_LOOK = "look after the broker"
_ADVICE = {
    "_ALL_BROKERS_DOWN": "start the broker, or put its address right; where it asks for TLS or a "
    "login, say so in --kafka-config",
    "_AUTHENTICATION": "put the user and the password of --kafka-config right",
    "_MSG_TIMED_OUT": "see that the broker runs, can be reached and keeps up",
    "_RESOLVE": "put the broker's address right",
    "_SSL": "put the certificates of --kafka-config right",
    "_TRANSPORT": "see that the broker runs and can be reached; where it asks for TLS or a login, "
    "say so in --kafka-config",
    "_UNKNOWN_TOPIC": "make the topic",
    "CLUSTER_AUTHORIZATION_FAILED": "let this user write (IdempotentWrite on the cluster)",
    "MSG_SIZE_TOO_LARGE": "wait until the topic's max.message.bytes is known and kept to",
    "NOT_ENOUGH_REPLICAS": "start the replicas that are missing",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND": "start the replicas that are missing",
    "TOPIC_AUTHORIZATION_FAILED": "let this user write to the topic",
    "UNKNOWN_TOPIC_OR_PART": "make the topic",
}


class KafkaAddressError(BatchmillError, ValueError):
    """An address cannot be read; carries ``address`` and ``why``."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(address, why)
        self.address = address
        self.why = why

    def __str__(self) -> str:
        return (
            f"{self.address!r} is not the address of a topic: {self.why}; "
            "write kafka://host:port/topic, with a comma between several host:port"
        )


class KafkaWriteError(BatchmillError, OSError):
    """Spans did not get into the topic; carries ``address``, librdkafka's ``code``, ``detail``.

    Nothing of them was acknowledged. Whoever sent them may send them again: what did get through
    counts once all the same.
    """

    def __init__(self, address: str, code: str, detail: str) -> None:
        super().__init__(address, code, detail)
        self.address = address
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        advice = _ADVICE.get(self.code, _LOOK)
        return f"{self.address} does not take messages ({self.detail}): {advice}; then resend"


class KafkaReadError(BatchmillError, OSError):
    """A topic cannot be asked; carries ``address`` and ``detail``."""

    def __init__(self, address: str, detail: str) -> None:
        super().__init__(address, detail)
        self.address = address
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"{self.address} does not answer ({self.detail}): see that the broker runs and can be "
            "reached; where it asks for TLS or a login, say so in --kafka-config"
        )


class KafkaLoginError(BatchmillError, PermissionError):
    """The broker does not let this client in; carries ``address`` and ``detail``."""

    def __init__(self, address: str, detail: str) -> None:
        super().__init__(address, detail)
        self.address = address
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"{self.address} does not let batchmill in ({self.detail}): put the user, the password "
            "and the certificates of --kafka-config right"
        )


class KafkaTopicError(BatchmillError, LookupError):
    """There is no such topic; carries ``address``."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address

    def __str__(self) -> str:
        topic = self.address.rpartition("/")[2]
        return (
            f"there is no topic {topic} at {self.address}, and the broker does not make one by "
            f"itself: make it, for instance with kafka-topics.sh --create --topic {topic} "
            "--partitions 8 --bootstrap-server HOST:PORT"
        )


class MessageTooLargeError(BatchmillError, ValueError):
    """A span is larger than a message may be; carries ``bytes``, ``limit`` and ``topic``."""

    def __init__(self, bytes: int, limit: int, topic: str) -> None:  # noqa: A002
        super().__init__(bytes, limit, topic)
        self.bytes = bytes
        self.limit = limit
        self.topic = topic

    def __str__(self) -> str:
        return (
            f"a span takes {self.bytes:,} bytes, and a message of the topic {self.topic} at most "
            f"{self.limit:,}: send smaller spans, or raise the topic's max.message.bytes"
        )
