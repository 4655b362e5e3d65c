"""The settings of a client that aggregates: frozen, keyword-only, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchmill.aggregate import SlowThresholds, TopNThresholds
from batchmill.errors import check_int, check_number

MIB = 1 << 20
STATEMENTS = "statements of databases and caches"
"""What they are submitted as, in place of an event type: no type has such a name."""


@dataclass(frozen=True, kw_only=True)
class EdgeSettings:
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
    apdex_ms: Mapping[str, int] = field(default_factory=dict)
    """The apdex threshold T by service name, as the pipeline has it."""
    max_ahead_s: float = 3600.0
    """How far ahead of the clock an event may start; a later one fails."""
    slow_database_ms: str = "default:200,mongodb:100"
    """Above how many milliseconds a database statement is slow, by system, as the pipeline has
    it."""
    slow_cache_ms: str = "default:20,redis:10"
    """Above how many milliseconds a cache command is slow, by system, likewise."""
    top_n: int = 50
    """How many of the slowest statements are kept for each entity and minute; as many as the
    pipeline keeps, or more."""

    def __post_init__(self) -> None:
        check_number("period_s", self.period_s, 0)
        for name in ("chunk_rows", "capacity_rows", "max_bytes", "max_calls"):
            check_int(name, getattr(self, name), 1)
        check_number("max_ahead_s", self.max_ahead_s, 0)
        check_int("top_n", self.top_n, 1)
        self.thresholds()
        for name, ms in self.apdex_ms.items():
            check_int(f"apdex_ms[{name!r}]", ms, 1)

    def thresholds(self) -> TopNThresholds:
        """Above how many milliseconds statements are slow."""
        return TopNThresholds(
            database=SlowThresholds.parse(self.slow_database_ms),
            cache=SlowThresholds.parse(self.slow_cache_ms),
        )
