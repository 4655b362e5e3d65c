"""How much of a request is taken in, and the two ways in which a request is refused."""

from __future__ import annotations

from dataclasses import dataclass, fields

from batchmill.errors import BatchmillError, ConfigError


class BadRequest(BatchmillError, ValueError):
    """The request cannot be read; its message says why. Sending it again does not help."""


class Unsupported(BadRequest):
    """The request has a content type or an encoding that is not taken."""


class TooLarge(BatchmillError, ValueError):
    """The request passes a limit; its message says which. Smaller requests help."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may hold. Lengths of text are in characters.

    A request past a limit on bytes, spans, all attributes or JSON values is refused as a whole
    (`TooLarge`), one nested past ``max_json_depth`` as unreadable (`BadRequest`). Past the other
    limits a span is rejected, or its text cut, or an attribute left out, and that is counted.

    >>> Limits(max_attributes=32).max_name_length
    1024
    """

    max_body_bytes: int = 16 * 2**20
    """Of a body as it was sent."""

    max_decompressed_bytes: int = 64 * 2**20
    """Of a body after decompression."""

    max_spans: int = 50_000
    """Spans in a request; and, counted apart, resources and scopes together."""

    max_span_bytes: int = 2 * 2**20
    """Of one span in protobuf: a larger one is rejected. A resource may be as large."""

    max_attributes: int = 128
    """Attributes of a span, or of a resource; those after them are left out."""

    max_attributes_in_all: int = 1_000_000
    """Attributes that are taken of one request: they are what takes memory."""

    max_attribute_length: int = 4096
    """Of an attribute's value as text; what is longer is cut."""

    max_key_length: int = 256
    """Of an attribute's key; an attribute with a longer one is left out."""

    max_name_length: int = 1024
    """Of a span's name; what is longer is cut."""

    max_value_depth: int = 16
    """Arrays and maps within one another in an attribute's value; a deeper one is left out."""

    max_json_depth: int = 128
    """Objects and arrays within one another in a body of JSON."""

    max_json_values: int = 2_000_000
    """Values in a body of JSON: each takes far more memory than it has bytes."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(each.name, value, "a whole number of at least 1")
        if self.max_value_depth > 24:
            # protobuf itself reads a hundred messages within one another, and no more.
            raise ConfigError("max_value_depth", self.max_value_depth, "at most 24")
        if self.max_json_depth > 512:
            # Python's own limit on recursion is not far above.
            raise ConfigError("max_json_depth", self.max_json_depth, "at most 512")
