"""The body of a remote write: ``prometheus.WriteRequest``, packed with snappy.

The message is described here, and not by a generated file: it has four types and eight fields.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from batchmill.export.prometheus.series import Labels

STALE: float = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
"""The one not-a-number that says: this series has no value any more."""

_FIELDS: dict[str, tuple[tuple[str, int, str], ...]] = {
    "Label": (("name", 1, "string"), ("value", 2, "string")),
    "Sample": (("value", 1, "double"), ("timestamp", 2, "int64")),
    "TimeSeries": (("labels", 1, "Label"), ("samples", 2, "Sample")),
    "WriteRequest": (("timeseries", 1, "TimeSeries"),),
}
_PLAIN = {
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "double": descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
}


@functools.cache
def write_request_class() -> Any:
    """The message class."""
    file = descriptor_pb2.FileDescriptorProto(
        name="batchmill/remote_write.proto", package="prometheus", syntax="proto3"
    )
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for name, number, kind in fields:
            one = descriptor_pb2.FieldDescriptorProto
            field = described.field.add(name=name, number=number, label=one.LABEL_OPTIONAL)
            if kind in _PLAIN:
                field.type = _PLAIN[kind]
            else:  # every message within another is one of many
                field.type, field.label = one.TYPE_MESSAGE, one.LABEL_REPEATED
                field.type_name = f".prometheus.{kind}"
    pool = descriptor_pool.DescriptorPool()  # of its own: others may know a file of that package
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("prometheus.WriteRequest"))


def series_labels(name: str, labels: Labels) -> Labels:
    """The labels as remote write wants them: with the name, in order, none of them empty."""
    return tuple(sorted((("__name__", name), *(each for each in labels if each[1]))))


def encode(samples: Iterable[tuple[Labels, float, int]]) -> bytes:
    """A packed request of samples: each its labels, its value, and its milliseconds since 1970."""
    request = write_request_class()()
    for labels, value, at_ms in samples:
        series = request.timeseries.add()
        for name, text in labels:
            series.labels.add(name=name, value=_whole(text))
        series.samples.add(value=value, timestamp=at_ms)
    packed: bytes = pa.Codec("snappy").compress(request.SerializeToString(), asbytes=True)
    return packed


def decode(body: bytes) -> list[tuple[dict[str, str], float, int]]:
    """What :func:`encode` packed; for receivers, and for tests."""
    size, shift = 0, 0
    for byte in body:  # a block begins with the length of what it holds
        size |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
    request = write_request_class()()
    request.ParseFromString(pa.Codec("snappy").decompress(body, size, asbytes=True))
    return [
        ({label.name: label.value for label in series.labels}, each.value, each.timestamp)
        for series in request.timeseries
        for each in series.samples
    ]


def _whole(text: str) -> str:
    """A text that UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode()
