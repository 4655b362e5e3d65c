"""Components that count what a test tells them, and what a registry shows of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchmill.telemetry import (
    ComponentKind,
    Distribution,
    Registry,
    counter,
    default_registry,
    gauge,
    histogram,
    up_down,
)

NOTHING = Distribution((1, 10), (0, 0, 0), 0)


@dataclass
class ToolStats:
    made: int = 0
    broken: dict[str, int] = field(default_factory=dict)
    depth: int = 0
    level: int = 0
    times: Distribution = NOTHING


TOOL: ComponentKind[ToolStats] = ComponentKind(
    "tool",
    (
        counter("made_parts", "{part}", "Parts made.", lambda s: s.made),
        counter("broken_parts", "{part}", "Parts broken.", lambda s: s.broken, "reason"),
        up_down("depth", "{part}", "Parts waiting.", lambda s: s.depth),
        gauge("level", "{level}", "The level.", lambda s: s.level),
        histogram("work", "s", "Time.", lambda s: s.times),
    ),
    label="tool",
)


class Tool:
    """A component whose stats a test sets."""

    kind = TOOL

    def __init__(self, name: str = "drill", **stats: Any) -> None:
        self.name = name
        self.now = ToolStats(**stats)
        self.error: Exception | None = None

    def stats(self) -> ToolStats:
        if self.error is not None:
            raise self.error
        return self.now


def shown(registry: Registry = default_registry) -> dict[tuple[str, ...], Any]:
    """All values, by the instrument's name for OpenTelemetry and the values of its labels."""
    return {
        (family.kind.otel_name(family.instrument), *labels): value
        for family in registry.collect()
        for labels, value in family.values.items()
    }
