"""Kafka in the spool's place: spans as protobuf messages in a topic.

Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names
from batchmill.kafka.address import KafkaAddress
from batchmill.kafka.columns import FOREIGN
from batchmill.kafka.errors import (
    KafkaAddressError,
    KafkaLoginError,
    KafkaReadError,
    KafkaTopicError,
    KafkaWriteError,
    MessageTooLargeError,
)
from batchmill.kafka.java import JavaOptions, java_options
from batchmill.kafka.options import check_options, hide_secrets, read_options
from batchmill.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from batchmill.kafka.messages import Message, decode, encode
    from batchmill.kafka.schema import DESCRIPTOR_SET, MESSAGE_NAME, Span, Spans
    from batchmill.kafka.sink import KafkaSink, KafkaStats
    from batchmill.kafka.table import span_rows
    from batchmill.kafka.topic import Behind, behind, check_readable
    from batchmill.kafka.trouble import Trouble

__all__ = [
    "Behind",
    "DESCRIPTOR_SET",
    "FOREIGN",
    "JavaOptions",
    "KafkaAddress",
    "KafkaAddressError",
    "KafkaLoginError",
    "KafkaReadError",
    "KafkaSettings",
    "KafkaSink",
    "KafkaStats",
    "KafkaTopicError",
    "KafkaWriteError",
    "MESSAGE_NAME",
    "Message",
    "MessageTooLargeError",
    "Span",
    "Spans",
    "Trouble",
    "behind",
    "check_options",
    "check_readable",
    "decode",
    "encode",
    "hide_secrets",
    "java_options",
    "read_options",
    "span_rows",
]

_MODULES = {
    "Behind": "topic",
    "DESCRIPTOR_SET": "schema",
    "KafkaSink": "sink",
    "KafkaStats": "sink",
    "MESSAGE_NAME": "schema",
    "Message": "messages",
    "Span": "schema",
    "Spans": "schema",
    "Trouble": "trouble",
    "behind": "topic",
    "check_readable": "topic",
    "decode": "messages",
    "encode": "messages",
    "span_rows": "table",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="Kafka", extra="kafka")
