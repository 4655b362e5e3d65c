"""The settings of a client that aggregates: frozen, keyword-only, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

from batchmill.aggregate import AggregationSettings
from batchmill.errors import check_int, check_number

MIB = 1 << 20
STATEMENTS = "statements of databases and caches"
"""What they are submitted as, in place of an event type: no type has such a name."""


@dataclass(frozen=True, kw_only=True)
class EdgeSettings(AggregationSettings):
    """The settings of a client that aggregates its events.

    >>> EdgeSettings(period_s=1).period_s
    1
    """

    period_s: float = 60.0
    """How long events are merged before their deltas are written, and so acknowledged. Periods end
    at whole multiples of it by the clock. With a minute, an entity's minute is written once; with a
    second, sixty times."""
    chunk_rows: int = 8_192
    """How many events of a type are turned into deltas at once; fewer when the period is over."""
    capacity_rows: int = 100_000
    """Events that may wait to be turned into deltas; beyond it events are refused."""
    max_bytes: int = 16 * MIB
    """Bytes of deltas of a type that are written without waiting for the end of the period."""
    max_calls: int = 50_000
    """Calls of ``emit`` that wait for one segment; with more it is written before the period is
    over. Each costs memory until it is answered; ``emit_many`` counts once for each type."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("period_s", self.period_s, 0)
        for name in ("chunk_rows", "capacity_rows", "max_bytes", "max_calls"):
            check_int(name, getattr(self, name), 1)
