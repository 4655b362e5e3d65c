"""What a soak does and when: the rate of spans and the disturbances, from a seed, and no processes.

The same seed and settings give the same schedule. When a process really dies, and what it was doing
then, is not repeatable: that is what a soak is for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SIDE = "side-"
"""So begin the names of what belongs to the side road, whose store is PostgreSQL."""
PIPELINES = ("pipeline", "side-pipeline")
SPARK = ("jvm", "daemon", "worker")
"""The processes below a pipeline: the daemon of Python forks the workers."""
VICTIMS = (
    *("supervisor", "guard", "ingest", "web", "export", "export-2", "alerts", "side-ingest"),
    *(name for own in PIPELINES for name in (own, *(f"{own}-{below}" for below in SPARK))),
)
"""Processes that are killed and stopped: all there are, see ``probes.Probes.unknown``.

``guard`` is that of any process below the supervisor: see ``batchmill/run/child.py``.
"""
GRPC_STRANGERS = ("silent calls", "idle gRPC connections", "gRPC noise")
STRANGERS = ("idle connections", "endless headers", "noise", *GRPC_STRANGERS)
LISTENERS = ("ingest", "side-ingest", "web")
"""What strangers attack; the web UI has no gRPC."""
KINDS = (
    *("kill", "stop", "postgres", "disk", "machine clock", "sender clock", "peer", "strangers"),
)


@dataclass(frozen=True)
class Disturbance:
    """Something that happens to a run from ``at_s`` on, for ``lasts_s``."""

    at_s: float
    kind: str
    target: str
    lasts_s: float = 0.0
    """0: it has no end, such as a kill."""

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.0f} s" if self.lasts_s else ""
        return f"{self.kind}: {self.target}{lasts}"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """How many spans are sent, and with how many new names."""

    spans_per_s: float = 2_000.0
    burst: float = 10.0
    """A burst has so many times as many."""
    burst_s: float = 60.0
    every_s: float = 300.0
    """A burst is at the end of each of these periods."""
    side_spans_per_s: float = 100.0
    """On the side road, whose store is PostgreSQL."""
    new_names: float = 0.1
    """The share of requests that are served at an endpoint that nobody has called before."""

    def rate(self, at_s: float) -> float:
        """Spans a second at a moment."""
        bursting = at_s % self.every_s >= self.every_s - self.burst_s
        return self.spans_per_s * (self.burst if bursting else 1.0)

    def bursting_s(self, seconds: float) -> float:
        """How long the bursts of so many seconds last together."""
        periods, rest = divmod(seconds, self.every_s)
        return periods * self.burst_s + max(0.0, rest - self.every_s + self.burst_s)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A soak: how long, how much, and what happens meanwhile."""

    seconds: float = 1_800.0
    seed: int = 1
    traffic: Traffic = field(default_factory=Traffic)
    without: frozenset[str] = frozenset()
    """Kinds of disturbances that are left out."""
    side_road: bool = True
    spacing_s: float = 20.0
    """From one disturbance to the next, on average."""
    calm_start_s: float = 90.0
    calm_end_s: float = 60.0
    """Nothing happens at the start and at the end."""
    warm_up_s: float = 600.0
    """Growth is judged from then on, if at least a third of the run is left for it."""
    longest_s: float = 25.0
    """The longest that anything is stopped, full or slow."""

    @property
    def judged_from_s(self) -> float:
        """When the warm-up is over; never in a run that is hardly longer."""
        return self.warm_up_s if self.seconds >= self.warm_up_s * 3 / 2 else math.inf

    def disturbances(self) -> list[Disturbance]:
        """All of them, in order; each kind with each target comes before any comes again."""
        rng = random.Random(f"soak {self.seed}")
        count = int((self.seconds - self.calm_start_s - self.calm_end_s) / self.spacing_s)
        pairs: list[tuple[str, str]] = []
        while len(pairs) < count:
            once_each = [pair for pair in _pairs() if self._has(*pair)]
            if not once_each:
                return []
            rng.shuffle(once_each)
            pairs += once_each
        moments = [
            self.calm_start_s + (number + rng.random() * 0.8) * self.spacing_s
            for number in range(count)
        ]
        return [
            Disturbance(at_s, kind, target, _lasts_s(kind, self.longest_s, rng))
            for at_s, (kind, target) in zip(moments, pairs, strict=False)
        ]

    def _has(self, kind: str, target: str) -> bool:
        """Whether a disturbance is part of it."""
        is_side = kind == "postgres" or target.rpartition(" at ")[2].startswith(SIDE)
        return kind not in self.without and (self.side_road or not is_side)


def _pairs() -> list[tuple[str, str]]:
    """Every kind of disturbance with each of its targets."""
    targets: dict[str, Sequence[str]] = {
        "kill": VICTIMS,
        "stop": VICTIMS,
        "postgres": ("restart", "crash"),
        "disk": ("full",),
        "machine clock": ("40 days ahead", "40 days behind"),
        "sender clock": ("40 days ahead", "40 days behind"),
        "peer": ("slow", "dead", "refuses"),
        "strangers": [
            f"{attack} at {listener}"
            for attack in STRANGERS
            for listener in LISTENERS
            if listener != "web" or attack not in GRPC_STRANGERS
        ],
    }
    return [(kind, target) for kind in KINDS for target in targets[kind]]


def _lasts_s(kind: str, longest_s: float, rng: random.Random) -> float:
    if kind == "kill":
        return 0.0
    if kind == "sender clock":
        return min(2.0, longest_s)
    if kind == "machine clock":
        return min(10.0, longest_s)
    if kind == "strangers":  # it takes some seconds until all of them are there
        return rng.uniform(longest_s * 3 / 5, longest_s)
    return rng.uniform(longest_s / 5, longest_s)


def unknown_kinds(names: Iterable[str]) -> list[str]:
    """Those that are no kinds of disturbances."""
    return sorted(set(names) - set(KINDS))
