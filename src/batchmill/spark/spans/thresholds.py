"""What is slow: thresholds in milliseconds by system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from batchmill.errors import ConfigError
from batchmill.spark.l1.sql import literal


@dataclass(frozen=True)
class SlowThresholds:
    """Above how many milliseconds a statement is slow, by database or cache system.

    >>> SlowThresholds.parse("default:200,mongodb:100").limit_ms("mongodb")
    100
    """

    default_ms: int
    systems: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, limit in (("default", self.default_ms), *self.systems.items()):
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
                raise ConfigError(
                    f"slow threshold of {name}", limit, "whole milliseconds, 0 or more"
                )
        object.__setattr__(self, "systems", MappingProxyType(dict(self.systems)))

    @classmethod
    def parse(cls, text: str) -> SlowThresholds:
        """Read ``system:ms`` pairs with commas between; ``default`` must be among them."""
        limits: dict[str, int] = {}
        for pair in text.split(","):
            system, colon, digits = (part.strip() for part in pair.rpartition(":"))
            if not (colon and system and digits.isascii() and digits.isdigit()):
                raise ConfigError(
                    "slow thresholds",
                    text,
                    f"pairs like default:200,mongodb:100, which {pair.strip()!r} is not",
                )
            if system in limits:
                raise ConfigError(
                    "slow thresholds", text, f"unambiguous: {system!r} is there twice"
                )
            limits[system] = int(digits)
        if "default" not in limits:
            raise ConfigError(
                "slow thresholds", text, "complete: it has no default, as in default:200"
            )
        return cls(limits.pop("default"), limits)

    def limit_ms(self, system: str | None) -> int:
        """The limit for a system."""
        return self.systems.get(system or "", self.default_ms)

    def __str__(self) -> str:
        pairs = {"default": self.default_ms, **self.systems}
        return ",".join(f"{system}:{limit}" for system, limit in pairs.items())

    def sql(self, system: str) -> str:
        """The limit for the system that the SQL text ``system`` gives, as SQL."""
        cases = "".join(
            f" WHEN {literal(name)} THEN {literal(limit)}" for name, limit in self.systems.items()
        )
        default = literal(self.default_ms)
        return f"CASE {system}{cases} ELSE {default} END" if cases else default


@dataclass(frozen=True, kw_only=True)
class TopNThresholds:
    """What is slow in a database, and what in a cache."""

    database: SlowThresholds = field(default_factory=lambda: SlowThresholds(200, {"mongodb": 100}))
    cache: SlowThresholds = field(default_factory=lambda: SlowThresholds(20, {"redis": 10}))
