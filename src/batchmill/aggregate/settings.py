"""Settings of aggregation, wherever it runs: in the pipeline, in workers, in a client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchmill.aggregate.topn import SlowThresholds, TopNThresholds
from batchmill.errors import check_int, check_number


@dataclass(frozen=True, kw_only=True)
class AggregationSettings:
    """What decides how an event counts: the same for all that write to one store."""

    apdex_ms: Mapping[str, int] = field(default_factory=dict)
    """The apdex threshold T by service name; 500 ms for services that are not listed."""
    max_ahead_s: float = 3600.0
    """How far ahead of the clock an event may start; a later one is invalid."""
    slow_database_ms: str = "default:200,mongodb:100"
    """Above how many milliseconds a database statement is slow, by system."""
    slow_cache_ms: str = "default:20,redis:10"
    """Above how many milliseconds a cache command is slow, by system."""
    top_n: int = 50
    """How many of the slowest statements are kept for each entity and bucket."""

    def __post_init__(self) -> None:
        check_number("max_ahead_s", self.max_ahead_s, 0)
        check_int("top_n", self.top_n, 1)
        for name, ms in self.apdex_ms.items():
            check_int(f"apdex_ms[{name!r}]", ms, 1)
        self.thresholds()

    def thresholds(self) -> TopNThresholds:
        """Above how many milliseconds statements are slow."""
        return TopNThresholds(
            database=SlowThresholds.parse(self.slow_database_ms),
            cache=SlowThresholds.parse(self.slow_cache_ms),
        )
