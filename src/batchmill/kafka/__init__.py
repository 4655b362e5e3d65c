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
    KafkaLoginError,
    KafkaReadError,
    KafkaTopicError,
    KafkaWriteError,
    MessageTooLargeError,
    MissingKafkaError,
)
from batchmill.kafka._java import JavaOptions, java_options
from batchmill.kafka._options import check_options, hide_secrets, read_options
from batchmill.kafka._settings import KafkaSettings

if TYPE_CHECKING:
    from batchmill.kafka._encode import Message, decode, encode
    from batchmill.kafka._schema import DESCRIPTOR_SET, MESSAGE_NAME, Span, Spans
    from batchmill.kafka._sink import KafkaSink, KafkaStats
    from batchmill.kafka._table import span_rows
    from batchmill.kafka._topic import Behind, behind, check_readable
    from batchmill.kafka._trouble import Trouble

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
    "MissingKafkaError",
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
    "Behind": "_topic",
    "DESCRIPTOR_SET": "_schema",
    "KafkaSink": "_sink",
    "KafkaStats": "_sink",
    "MESSAGE_NAME": "_schema",
    "Message": "_encode",
    "Span": "_schema",
    "Spans": "_schema",
    "Trouble": "_trouble",
    "behind": "_topic",
    "check_readable": "_topic",
    "decode": "_encode",
    "encode": "_encode",
    "span_rows": "_table",
}

__getattr__ = lazy_names(__name__, _MODULES, MissingKafkaError)
