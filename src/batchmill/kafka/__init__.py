"""Kafka in the spool's place: spans as protobuf messages in a topic.

Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchmill.kafka._address import KafkaAddress
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
    from batchmill.kafka._table import FOREIGN, span_rows
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
    "FOREIGN": "_table",
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


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("batchmill"):
            raise
        raise MissingKafkaError(f"{error.name} is not installed") from error
