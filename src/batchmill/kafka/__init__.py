"""Kafka in place of the spool: makes spans durable as protobuf messages in a topic.

Gives :class:`KafkaSink` for the receiver, what the pipeline needs to read the topic
(``message_range``, ``read_messages``, ``span_rows``, ``behind``), and the format of the messages
(``encode``, ``decode``). Loads without its extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names
from batchmill.kafka.errors import (
    KafkaAddressError,
    KafkaLoginError,
    KafkaLostError,
    KafkaReadError,
    KafkaTopicError,
    KafkaWriteError,
    MessageTooLargeError,
)
from batchmill.kafka.settings import (
    KafkaAddress,
    KafkaSettings,
    check_options,
    hide_secrets,
    read_options,
)

if TYPE_CHECKING:
    from batchmill.kafka.client import (
        Behind,
        ConnectionErrors,
        behind,
        check_readable,
        message_range,
    )
    from batchmill.kafka.messages import (
        DeltaFile,
        Message,
        Span,
        Spans,
        decode,
        deltas_in,
        encode,
        encode_deltas,
        span_rows,
    )
    from batchmill.kafka.reader import (
        KafkaMessage,
        MessageRange,
        check_accepted,
        divide,
        read_messages,
        with_certificates,
    )
    from batchmill.kafka.sink import KafkaSink, KafkaStats

__all__ = [
    "Behind",
    "ConnectionErrors",
    "DeltaFile",
    "KafkaAddress",
    "KafkaAddressError",
    "KafkaLoginError",
    "KafkaLostError",
    "KafkaMessage",
    "KafkaReadError",
    "KafkaSettings",
    "KafkaSink",
    "KafkaStats",
    "KafkaTopicError",
    "KafkaWriteError",
    "Message",
    "MessageRange",
    "MessageTooLargeError",
    "Span",
    "Spans",
    "behind",
    "check_accepted",
    "check_options",
    "check_readable",
    "decode",
    "deltas_in",
    "divide",
    "encode",
    "encode_deltas",
    "hide_secrets",
    "message_range",
    "read_messages",
    "read_options",
    "span_rows",
    "with_certificates",
]

_MODULES = {
    "client": "Behind ConnectionErrors behind check_readable message_range",
    "messages": "DeltaFile Message Span Spans decode deltas_in encode encode_deltas span_rows",
    "reader": "KafkaMessage MessageRange check_accepted divide read_messages with_certificates",
    "sink": "KafkaSink KafkaStats",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="Kafka", extra="kafka")
