"""Over how many connections the rows of a batch reach PostgreSQL, and from how many rows on."""

from __future__ import annotations

from dataclasses import dataclass

from batchmill.errors import ConfigError

MOST_WRITERS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterSettings:
    """How a batch's rows reach PostgreSQL.

    >>> WriterSettings(writers=1).writers
    1
    """

    writers: int = 4
    """Threads, and connections, that copy at once; 1: only the one connection that commits."""
    above_rows: int = 100_000
    """Batches of fewer delta rows than this go over the one connection.

    Up to 50,000 there was no difference on two cores; at 100,000 it was a sixth.
    """
    piece_rows: int = 20_000
    """Delta rows in a piece, about."""
    buffer_size: int = 10_000
    """Pieces that each writer's queue holds."""

    def __post_init__(self) -> None:
        for name in ("writers", "above_rows", "piece_rows", "buffer_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, value, "a whole number of at least 1")
        if self.writers > MOST_WRITERS:
            raise ConfigError("writers", self.writers, f"{MOST_WRITERS} at most")


def writer_settings(given: str | None) -> WriterSettings:
    """The settings of an address that says ``writers=…``, or nothing."""
    if given is None:
        return WriterSettings()
    if not (given.isascii() and given.isdigit() and 1 <= int(given) <= MOST_WRITERS):
        raise ConfigError("writers", given, f"a whole number from 1 to {MOST_WRITERS}")
    return WriterSettings(writers=int(given))
