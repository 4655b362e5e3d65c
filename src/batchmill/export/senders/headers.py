"""Headers that go with every request."""

from __future__ import annotations

import re
from collections.abc import Mapping

from batchmill.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[ -~]*")
"""What both HTTP and gRPC take: with another header every request would fail, for ever."""


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError` unless all of them can be sent; values are not shown."""
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or name.lower().endswith("-bin"):
            raise ConfigError("headers", name, "a name of letters, digits and hyphens, not -bin")
        if not _VALUE.fullmatch(value):
            raise ConfigError(f"headers[{name!r}]", "…", "visible ASCII characters and spaces")
