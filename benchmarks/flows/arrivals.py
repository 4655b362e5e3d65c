"""Shared by the wait benchmarks: the load, the arrivals, and the result of a turn."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.flows.peers import FlowSignal

WORKERS = 8
SERVICE_S = 0.002
MEAN_GAP_S = 0.01
"""Between two signals of a flow."""

Arrivals: TypeAlias = list[tuple[float, FlowSignal]]


@dataclass(frozen=True)
class Case:
    """A load, and how many signals a flow has."""

    load: float
    flow_length: int

    def __str__(self) -> str:
        signals = "1 signal" if self.flow_length == 1 else f"{self.flow_length} signals"
        return f"{self.load:.0%} load, flows of {signals}"


@dataclass(frozen=True)
class Turn:
    """One run of one rule: waits in milliseconds, and how uneven the workers were used."""

    p50_ms: float
    p99_ms: float
    busiest_share: float
    late_ms: float = 0.0
    """How late the producer was at worst: how much the machine, not the rule, made signals wait."""


def build_arrivals(case: Case, seconds: float, seed: int) -> Arrivals:
    """Signals with their times, in order: the same for the same arguments."""
    rng = random.Random(seed)
    flows_per_s = case.load * WORKERS / SERVICE_S / case.flow_length
    arrivals: Arrivals = []
    now, flow = 0.0, 0
    while (now := now + rng.expovariate(flows_per_s)) < seconds:
        at = now
        for number in range(case.flow_length):
            arrivals.append((at, FlowSignal(flow, number, number + 1 == case.flow_length)))
            at += rng.expovariate(1 / MEAN_GAP_S)
        flow += 1
    arrivals.sort(key=lambda arrival: arrival[0])
    return arrivals
