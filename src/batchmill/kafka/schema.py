"""The messages of a topic, described once: what Python builds, and what Spark reads.

In the words of protobuf::

    syntax = "proto2";
    package batchmill;

    message Spans {
      repeated Span spans = 1;
    }

    message Span {
      optional int64 time = 1;       // microseconds since 1970, UTC
      optional int64 end_time = 2;
      optional bytes trace_id = 3;
      optional bytes span_id = 4;
      optional bytes parent_span_id = 5;
      optional string name = 6;
      optional string kind = 7;
      optional string status = 8;
      optional string service = 9;
      map<string, string> resource = 10;
      map<string, string> attributes = 11;
    }

Of the second edition, not the third: there an empty name would be no name, and 1970 no time.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

MESSAGE_NAME = "batchmill.Spans"
"""What Spark's ``from_protobuf`` is to be told, with the descriptors."""

_PACKAGE = "batchmill"
_Field = descriptor_pb2.FieldDescriptorProto
_FIELDS = {
    "time": _Field.TYPE_INT64,
    "end_time": _Field.TYPE_INT64,
    "trace_id": _Field.TYPE_BYTES,
    "span_id": _Field.TYPE_BYTES,
    "parent_span_id": _Field.TYPE_BYTES,
    "name": _Field.TYPE_STRING,
    "kind": _Field.TYPE_STRING,
    "status": _Field.TYPE_STRING,
    "service": _Field.TYPE_STRING,
}
_MAPS = {"resource": "ResourceEntry", "attributes": "AttributesEntry"}


def _describe() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="batchmill/spans.proto", package=_PACKAGE, syntax="proto2"
    )
    span = file.message_type.add(name="Span")
    for name, kind in _FIELDS.items():
        span.field.add(
            name=name, number=len(span.field) + 1, type=kind, label=_Field.LABEL_OPTIONAL
        )
    for name, entry in _MAPS.items():
        pair = span.nested_type.add(name=entry)
        pair.options.map_entry = True
        for number, part in enumerate(("key", "value"), 1):
            pair.field.add(
                name=part, number=number, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL
            )
        span.field.add(
            name=name,
            number=len(span.field) + 1,
            type=_Field.TYPE_MESSAGE,
            type_name=f".{_PACKAGE}.Span.{entry}",
            label=_Field.LABEL_REPEATED,
        )
    file.message_type.add(name="Spans").field.add(
        name="spans",
        number=1,
        type=_Field.TYPE_MESSAGE,
        type_name=f".{_PACKAGE}.Span",
        label=_Field.LABEL_REPEATED,
    )
    return file


_FILE = _describe()
# A pool of its own: protobuf's common one is everybody's, and knows a name only once.
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_FILE)

DESCRIPTOR_SET: bytes = descriptor_pb2.FileDescriptorSet(file=[_FILE]).SerializeToString()
"""The messages as protoc would describe them: ``binaryDescriptorSet`` of ``from_protobuf``."""

Span: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.Span"))
Spans: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(MESSAGE_NAME))
