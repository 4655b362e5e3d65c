"""Spans, however they were written, into columns: what is checked, cut and counted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchmill.ingest.decode.limits import Limits, TooLarge
from batchmill.spool import SpanBatch

Pairs = dict[str, str]

UNKNOWN_SERVICE = "unknown_service"

KINDS = ("INTERNAL", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
"""By OTLP's number. 0 is unspecified, which OpenTelemetry takes for INTERNAL."""

STATUSES = ("UNSET", "OK", "ERROR")

_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The spans of a request, and what of it was not taken."""

    batch: SpanBatch
    rejections: dict[str, int] = field(default_factory=dict)
    """Spans that were rejected, by reason."""
    cuts: dict[str, int] = field(default_factory=dict)
    """Texts that were cut and attributes that were left out of spans that were taken."""

    @property
    def rejected(self) -> int:
        """Spans that were rejected."""
        return sum(self.rejections.values())

    @property
    def reason(self) -> str:
        """Why spans were rejected, for the sender; empty if none was."""
        return ", ".join(f"{why} ({n})" for why, n in sorted(self.rejections.items()))


class Rows:
    """Columns being filled by one request."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rejections: dict[str, int] = {}
        self.cuts: dict[str, int] = {}
        self._batch = SpanBatch()
        columns = self._batch.columns
        self._trace_ids = columns["trace_id"]
        self._span_ids = columns["span_id"]
        self._parents = columns["parent_span_id"]
        self._names = columns["name"]
        self._kinds = columns["kind"]
        self._times = columns["time"]
        self._ends = columns["end_time"]
        self._statuses = columns["status"]
        self.attributes: list[Pairs] = columns["attributes"]
        """Takes the attributes of each span that was added."""
        self.keys: set[str] = set()
        """Keys of attributes that are known to be within the limits."""
        self._spans = 0
        self._groups = 0
        self._all_attributes = 0
        self._longest_name = limits.max_name_length

    def group(self) -> None:
        """Count a group of spans, by resource or by scope."""
        self._groups += 1
        if self._groups > self.limits.max_spans:
            raise TooLarge(
                f"the request has more than {self.limits.max_spans} groups of spans: "
                "send fewer in a request"
            )

    def span(self) -> None:
        """Count a span that is about to be read."""
        self._spans += 1
        if self._spans > self.limits.max_spans:
            raise TooLarge(
                f"the request has more than {self.limits.max_spans} spans: send fewer in a request"
            )

    def attribute_count(self, n: int) -> None:
        """Count attributes that are about to be read."""
        self._all_attributes += n
        if self._all_attributes > self.limits.max_attributes_in_all:
            raise TooLarge(
                f"the request has more than {self.limits.max_attributes_in_all} attributes: "
                "send fewer spans in a request"
            )

    @property
    def spans(self) -> int:
        """Spans counted so far: the number of the one being read."""
        return self._spans

    def add(
        self,
        trace_id: bytes,
        span_id: bytes,
        parent_id: bytes,
        name: str,
        kind: int,
        start_ns: int,
        end_ns: int,
        status: int,
    ) -> bool:
        """A span's row but for its attributes; False if it was rejected."""
        if len(trace_id) != 16 or trace_id == _NO_TRACE:
            return self.reject("trace_id is not 16 bytes, or all zero")
        if len(span_id) != 8 or span_id == _NO_SPAN:
            return self.reject("span_id is not 8 bytes, or all zero")
        if parent_id and len(parent_id) != 8:
            return self.reject("parent_span_id is not 8 bytes")
        if end_ns < start_ns or not start_ns:
            if not start_ns:
                return self.reject("no start time")
            return self.reject("end before start" if end_ns else "no end time")
        if len(name) > self._longest_name:
            name = name[: self._longest_name]
            self.cut("name too long")
        self._trace_ids.append(trace_id.hex())
        self._span_ids.append(span_id.hex())
        # Some write a root's parent as zeros.
        self._parents.append(parent_id.hex() if parent_id and parent_id != _NO_SPAN else None)
        self._names.append(name)
        self._kinds.append(KINDS[kind] if 0 <= kind < 6 else "INTERNAL")
        self._times.append(start_ns // 1000)
        self._ends.append(end_ns // 1000)
        self._statuses.append(STATUSES[status] if 0 <= status < 3 else "UNSET")
        return True

    def resource(self, pairs: Pairs) -> None:
        """What the spans added since the last call belong to."""
        columns = self._batch.columns
        new = len(self._trace_ids) - len(columns["resource"])
        service = pairs.get("service.name") or UNKNOWN_SERVICE
        columns["resource"] += [pairs] * new
        columns["service"] += [service] * new

    def reject(self, why: str) -> bool:
        """Count a rejected span."""
        self.rejections[why] = self.rejections.get(why, 0) + 1
        return False

    def cut(self, why: str, n: int = 1) -> None:
        """Count what was cut or left out."""
        self.cuts[why] = self.cuts.get(why, 0) + n

    def fitted(self, found: Sequence[Any]) -> Sequence[Any]:
        """As many attributes as are taken."""
        most = self.limits.max_attributes
        self.cut("too many attributes", len(found) - most)
        return found[:most]

    def keys_fit(self, keys: Collection[str]) -> bool:
        """Whether all of ``keys`` are within the limits."""
        if not all(0 < len(key) <= self.limits.max_key_length for key in keys):
            return False
        self.keys.update(keys)
        return True

    def fit(self, pairs: dict[str, str], key: str, text: str | None) -> None:
        """Put an attribute that may pass a limit; its text is None if it was nested too deep."""
        if not key:
            self.cut("attribute without key")
        elif len(key) > self.limits.max_key_length:
            self.cut("attribute key too long")
        elif text is None:
            self.cut("attribute nested too deep")
        else:
            if len(text) > self.limits.max_attribute_length:
                text = text[: self.limits.max_attribute_length]
                self.cut("attribute value too long")
            if key in pairs:
                self.cut("attribute key repeated")
            pairs[key] = text

    def decoded(self, body_bytes: int) -> Decoded:
        """All of it."""
        # Shared texts apart, decoded text takes about as much again in Python's objects.
        self._batch.approx_bytes = 2 * body_bytes
        return Decoded(self._batch, self.rejections, self.cuts)
