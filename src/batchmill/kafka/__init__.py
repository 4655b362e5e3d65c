"""Kafka in the spool's place: spans as protobuf messages in a topic.

Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill._lazy import lazy_names
from batchmill.kafka._address import KafkaAddress
from batchmill.kafka._columns import FOREIGN
from batchmill.kafka._errors import (
    KafkaAddressError,
    KafkaReadError,
    KafkaTopicError,
    KafkaWriteError,
    MessageTooLargeError,
    MissingKafkaError,
)
from batchmill.kafka._settings import KafkaSettings, read_options

if TYPE_CHECKING:
    from batchmill.kafka._encode import Message, decode, encode
    from batchmill.kafka._schema import DESCRIPTOR_SET, MESSAGE_NAME, Span, Spans
    from batchmill.kafka._sink import KafkaSink, KafkaStats
    from batchmill.kafka._table import span_rows
    from batchmill.kafka._topic import Behind, behind, check_readable

__all__ = [
    "Behind",
    "DESCRIPTOR_SET",
    "FOREIGN",
    "KafkaAddress",
    "KafkaAddressError",
    "KafkaReadError",
    "KafkaSettings",
    "KafkaSink",
    "KafkaStats",
    "KafkaTopicError",
    "KafkaWriteError",
    "MESSAGE_NAME",
    "Message",
    "MessageTooLargeError",
    "MissingKafkaError",
    "Span",
    "Spans",
    "behind",
    "check_readable",
    "decode",
    "encode",
    "read_options",
    "span_rows",
]

_MODULES = {
    "Behind": "_topic",
    "DESCRIPTOR_SET": "_schema",
    "KafkaSink": "_sink",
    "KafkaStats": "_sink",
    "MESSAGE_NAME": "_schema",
    "Message": "_encode",
    "Span": "_schema",
    "Spans": "_schema",
    "behind": "_topic",
    "check_readable": "_topic",
    "decode": "_encode",
    "encode": "_encode",
    "span_rows": "_table",
}

__getattr__ = lazy_names(__name__, _MODULES, MissingKafkaError)
