"""Errors of the Kafka sink and of reading its topic."""

from __future__ import annotations

from batchmill.errors import BatchmillError

_ADVICE = {
    "_ALL_BROKERS_DOWN": "start the broker, or correct its address; where it requires TLS or a "
    "login, configure it in --kafka-config",
    "_AUTHENTICATION": "correct the user and the password in --kafka-config",
    "_MSG_TIMED_OUT": "check that the broker runs, can be reached and keeps up",
    "_RESOLVE": "correct the broker's address",
    "_SSL": "correct the certificates in --kafka-config",
    "_TRANSPORT": "check that the broker runs and can be reached; where it requires TLS or a "
    "login, configure it in --kafka-config",
    "_UNKNOWN_TOPIC": "create the topic",
    "CLUSTER_AUTHORIZATION_FAILED": "let this user write (IdempotentWrite on the cluster)",
    "MSG_SIZE_TOO_LARGE": "wait until the topic's max.message.bytes is known and kept to",
    "NOT_ENOUGH_REPLICAS": "start the replicas that are missing",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND": "start the replicas that are missing",
    "TOPIC_AUTHORIZATION_FAILED": "let this user write to the topic",
    "UNKNOWN_TOPIC_OR_PART": "create the topic",
}


class KafkaAddressError(BatchmillError, ValueError):
    """An address is not of the form ``kafka://host:port/topic``."""

    address: str
    why: str
    template = (
        "{address!r} is not the address of a topic: {why}; "
        "write kafka://host:port/topic, with a comma between several host:port"
    )


class KafkaWriteError(BatchmillError, OSError):
    """Spans could not be written to the topic.

    None of them was acknowledged: their sender may send them again. What did get into the topic is
    counted once nevertheless.
    """

    address: str
    code: str
    """librdkafka's name for the reason."""
    detail: str

    def __str__(self) -> str:
        advice = _ADVICE.get(self.code, "check the broker")
        return f"{self.address} does not take messages ({self.detail}): {advice}; then resend"


class KafkaReadError(BatchmillError, OSError):
    """The broker does not answer questions about a topic."""

    address: str
    detail: str
    template = (
        "{address} does not answer ({detail}): check that the broker runs and can be reached; "
        "where it requires TLS or a login, configure it in --kafka-config"
    )


class KafkaLoginError(BatchmillError, PermissionError):
    """The broker refuses this client's login."""

    address: str
    detail: str
    template = (
        "{address} refuses the login ({detail}): correct the user, the password and the "
        "certificates in --kafka-config"
    )


class KafkaTopicError(BatchmillError, LookupError):
    """There is no such topic."""

    address: str

    def __str__(self) -> str:
        topic = self.address.rpartition("/")[2]
        return (
            f"there is no topic {topic} at {self.address}, and the broker does not create it: "
            f"create it, for instance with kafka-topics.sh --create --topic {topic} "
            "--partitions 8 --bootstrap-server HOST:PORT"
        )


class KafkaLostError(BatchmillError, LookupError):
    """The topic no longer has messages that were not read."""

    address: str
    detail: str
    template = (
        "{address} no longer has messages that were not read: its retention is shorter than the "
        "time that the pipeline was down, or the topic was created again. Spans that were "
        "acknowledged are lost. Give the topic a longer retention; to continue with what is "
        "there, start once with --skip-lost. In detail: {detail}"
    )


class MessageTooLargeError(BatchmillError, ValueError):
    """A span, or the delta of an entity's minute, is larger than a message of the topic may be."""

    bytes: int
    limit: int
    topic: str
    template = (
        "a span or delta takes {bytes:,} bytes, and a message of the topic {topic} at most "
        "{limit:,}: send smaller spans, or raise the topic's max.message.bytes"
    )
