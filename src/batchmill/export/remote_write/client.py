"""Requests of remote write 1.0: how samples are encoded and sent, and what an answer means."""

from __future__ import annotations

import base64
import enum
import functools
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from batchmill import __version__
from batchmill.errors import ConfigError
from batchmill.export.http import HttpAnswer, HttpClient, check_headers
from batchmill.export.prometheus.series import Labels

STALE: float = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
"""The one not-a-number that says: this series has no value any more."""

_SCHEMES = {"remote+http": False, "remote+https": True}
_HEADERS = {
    "Content-Encoding": "snappy",
    "Content-Type": "application/x-protobuf",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
    "User-Agent": f"batchmill/{__version__}",
}
_ALLOWED = "remote+http://host:port/path or remote+https://host:port/path"
_MAX_ANSWER_BYTES = 300
"""How much of an answer is kept for the log."""

OUT_OF_ORDER = "out of order"
ANOTHER_VALUE = "another value is there"
TOO_OLD = "too old"
_SAMPLE_ERRORS = {
    re.compile("out.of.order"): OUT_OF_ORDER,
    re.compile("duplicate"): ANOTHER_VALUE,
    re.compile("out.of.bounds|too.old"): TOO_OLD,
}
"""How Prometheus, and servers like it, say that it is the samples that they do not want."""
_OF_SOME = (400, 409, 413, 422)
"""Answers to a whole request because of some of its samples; 409 is Thanos's."""


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """Where to write: an address ``remote+http(s)://user:password@host:port/path``."""

    url: str
    """As it may be shown: without the password."""
    host: str
    port: int
    path: str
    tls: bool
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What goes with each request besides; never shown."""

    @classmethod
    def parse(
        cls, url: str, token: str | None = None, headers: Mapping[str, str] | None = None
    ) -> RemoteTarget:
        """Read an address; ``token`` is sent as a bearer token. Raises :class:`ConfigError`."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        if parts.scheme not in _SCHEMES or not parts.hostname or port == -1 or parts.fragment:
            raise ConfigError("to", shown, _ALLOWED)
        all_headers = dict(headers or {})
        if token is not None:
            all_headers["Authorization"] = f"Bearer {token}"
        elif parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            all_headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        check_headers(all_headers)
        tls = _SCHEMES[parts.scheme]
        path = (parts.path or "/api/v1/write") + (f"?{parts.query}" if parts.query else "")
        return cls(shown, parts.hostname, port or (443 if tls else 80), path, tls, all_headers)


def remote_address(to: str) -> str:
    """The address of a remote write receiver as it may be shown; raises if it is none."""
    return RemoteTarget.parse(to).url


@dataclass(frozen=True, slots=True)
class Sample:
    """What lies in the queue: one sample; or, without labels, the end of a minute.

    One class for both, as a queue keeps the order of one class.
    """

    minute: int
    at_ms: int = 0
    labels: Labels | None = None
    value: float = 0.0
    late: bool = False


class Outcome(enum.Enum):
    """The kind of answer to a request."""

    SENT = "sent"
    REFUSED = "refused"
    """For good: sending it again would not help."""
    FAILED = "failed"
    """It may succeed later."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The outcome of a request, and its reason."""

    outcome: Outcome
    answer: str
    """``HTTP 400``, ``unreachable`` and the like: what it is counted as."""
    text: str = ""
    """What the receiver said."""
    retry_after_s: float | None = None
    reason: str = ""
    """What refused samples are counted under."""
    of_some: bool = False
    """Whether it may be some of the samples that are refused, and the others would be taken."""


class RemoteWriteClient:
    """Sends requests to a receiver, one after the other."""

    def __init__(self, target: RemoteTarget, timeout_s: float) -> None:
        host = f"[{target.host}]" if ":" in target.host else target.host
        self._http = HttpClient(
            f"{host}:{target.port}",
            path=target.path,
            headers={**_HEADERS, **target.headers},
            tls=target.tls,
            timeout_s=timeout_s,
            max_answer_bytes=_MAX_ANSWER_BYTES,
        )
        self.close = self._http.close
        self.interrupt = self._http.interrupt

    def post(self, body: bytes) -> WriteResult:
        """Send a body; never raises for what the receiver or the network does."""
        try:
            return interpret(self._http.post(body))
        except TimeoutError as error:
            return WriteResult(Outcome.FAILED, "timed out", str(error))
        except OSError as error:
            return WriteResult(Outcome.FAILED, "unreachable", f"{type(error).__name__}: {error}")


def interpret(answer: HttpAnswer) -> WriteResult:
    """What an answer means, as the specification has it: 5xx and 429 are tried again.

    But for one: a Prometheus that takes samples out of order answers 500 to those that are too old
    even for that (2.42 does), and would do so for ever.
    """
    status, text = answer.status, answer.text
    name = f"HTTP {status}"
    if 200 <= status < 300:
        return WriteResult(Outcome.SENT, name)
    reason = next((why for pattern, why in _SAMPLE_ERRORS.items() if pattern.search(text)), "")
    too_old = status == 500 and reason == TOO_OLD
    if (status == 429 or status >= 500) and not too_old:
        return WriteResult(Outcome.FAILED, name, text, answer.retry_after_s)
    of_some = too_old or status in _OF_SOME
    return WriteResult(Outcome.REFUSED, name, text, reason=reason or name, of_some=of_some)


def series_labels(name: str, labels: Labels) -> Labels:
    """The labels as remote write wants them: with the name, in order, none of them empty."""
    return tuple(sorted((("__name__", name), *(label for label in labels if label[1]))))


def encode(samples: Iterable[Sample]) -> bytes:
    """A ``prometheus.WriteRequest`` of samples, compressed with snappy."""
    request = write_request_class()()
    for sample in samples:
        series = request.timeseries.add()
        for name, text in sample.labels or ():
            # What UTF-8 cannot hold, half of a surrogate pair, becomes a question mark.
            series.labels.add(name=name, value=text.encode("utf-8", "replace").decode())
        series.samples.add(value=sample.value, timestamp=sample.at_ms)
    packed: bytes = pa.Codec("snappy").compress(request.SerializeToString(), asbytes=True)
    return packed


# Described here, and not by a generated file: it has four types and eight fields.
_FIELDS: dict[str, dict[str, str]] = {
    "Label": {"name": "string", "value": "string"},
    "Sample": {"value": "double", "timestamp": "int64"},
    "TimeSeries": {"labels": "Label", "samples": "Sample"},
    "WriteRequest": {"timeseries": "TimeSeries"},
}
"""The type of each field, by message; numbered in this order from 1."""
_SCALARS = {
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "double": descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
}


@functools.cache
def write_request_class() -> Any:
    """The class of ``prometheus.WriteRequest`` messages."""
    file = descriptor_pb2.FileDescriptorProto(
        name="batchmill/remote_write.proto", package="prometheus", syntax="proto3"
    )
    proto = descriptor_pb2.FieldDescriptorProto
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for number, (name, kind) in enumerate(fields.items(), 1):
            declared = described.field.add(name=name, number=number, label=proto.LABEL_OPTIONAL)
            if kind in _SCALARS:
                declared.type = _SCALARS[kind]
            else:  # every message within another is one of many
                declared.type, declared.label = proto.TYPE_MESSAGE, proto.LABEL_REPEATED
                declared.type_name = f".prometheus.{kind}"
    pool = descriptor_pool.DescriptorPool()  # of its own: others may know a file of that package
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("prometheus.WriteRequest"))
