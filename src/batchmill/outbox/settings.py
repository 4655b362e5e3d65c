"""How much an outbox may hold."""

from __future__ import annotations

from dataclasses import dataclass

from batchmill.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OutboxSettings:
    """The bound of an outbox: beyond it the oldest files go, and are counted."""

    max_bytes: int = 2**30
    max_files: int = 10_000

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_files"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, value, "a whole number, 1 or more")
