"""Memory of the merged states of an entity in a minute, compared with the states' own bytes.

Calls of many minutes are merged and none is committed, so that all states wait in L2, which gets
every minute in six parts. What the process holds between two parts, beyond what it held before:

* *own*: the bytes of the arrays of the states, each pair of entity and minute once: numbers, keys
  and counts of tallies, and names.
* *held*: what Python and NumPy have allocated (``tracemalloc``) and what Arrow's memory pool has,
  the calls themselves being gone. The goal is about this, where it is most to the states' own.
* *peak*: the most of that at any time, with calls on their way and while states are merged.
* *resident*: how much the process has grown, from a second run without ``tracemalloc``: with what
  the allocators keep for later.

All but the worst ratio are taken at the end, by the number of entity-minutes. Each run has a
process of its own.
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchmill.aggregate import Deltas
from benchmarks.aggregate.data import make_calls
from benchmarks.aggregate.peers import MillMany
from benchmarks.kit.report import Table, say

CALLS_PER_STATE = 20
PARTS = 6
"""In how many parts a minute's calls reach L2."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the states of an entity in a minute."""

    states: int
    """How many there were."""
    own: float
    held: float
    peak: float
    resident: float
    worst: float
    """Held to own, where it was most."""

    def tables(self) -> list[Table]:
        """A line for each way to look at it."""
        lines = {
            "own: the states' arrays": self.own,
            "held: Python, NumPy, Arrow": self.held,
            "peak during the run": self.peak,
            "resident, with the allocators' own": self.resident,
        }
        return [
            Table(
                "Memory, bytes per entity and minute",
                f"Six metrics, {self.states:,} states of about {CALLS_PER_STATE} calls each, none"
                " committed yet; beyond what the process held before. Held to own was"
                f" {self.worst:.2f}x at most.",
                ["", "bytes", "to own"],
                [[name, f"{size:,.0f}", f"{size / self.own:.2f}x"] for name, size in lines.items()],
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return {**vars(self), "calls_per_state": CALLS_PER_STATE}


def measure(*, entities: int, minutes: int) -> Memory:
    """Merge calls of that many entities and minutes, twice."""
    sizes = []
    for traced in (True, False):
        say(f"aggregate: memory, {'traced' if traced else 'resident'}")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            sizes.append(pool.submit(_run, entities, minutes, traced).result())
    traced_run, plain_run = sizes
    states = traced_run.states
    return Memory(
        states=states,
        own=traced_run.own / states,
        held=traced_run.held / states,
        peak=traced_run.peak / states,
        resident=plain_run.held / states,
        worst=traced_run.worst,
    )


@dataclass(kw_only=True)
class _Run:
    """Bytes in all, at the end of a run."""

    states: int = 0
    own: int = 0
    held: int = 0
    peak: int = 0
    worst: float = 0.0


def _run(entities: int, minutes: int, traced: bool) -> _Run:
    mill = MillMany(committed=False)
    mill.feed(make_calls(1, entities=1, minutes=1, ago=minutes))  # what is made at first use
    mill.finish()
    result = _Run()
    if traced:
        tracemalloc.start()
    before = _bytes(traced)
    count = entities * CALLS_PER_STATE // PARTS
    for part in range(PARTS * minutes):
        ago = minutes - 1 - part // PARTS
        mill.feed(make_calls(count, entities=entities, minutes=1, ago=ago, seed=part))
        mill.finish()
        if traced:
            result.held = _bytes(traced) - before
            result.peak = max(result.peak, tracemalloc.get_traced_memory()[1] - before)
        deltas = _merged(mill)
        result.states, result.own = len(deltas), deltas.nbytes
        del deltas
        if traced:
            result.worst = max(result.worst, result.held / result.own)
            tracemalloc.reset_peak()
    result.held = _bytes(traced) - before
    tracemalloc.stop()
    mill.mill.close()
    return result


def _merged(mill: MillMany) -> Deltas:
    """The states that wait in L2, each pair of entity and minute once; L2 is left as it is."""
    (aggregator,) = mill.mill._aggregators.values()
    (buffer,) = mill.mill._committer._waiting.buffers.values()
    return aggregator.merge(list(buffer._parts))


def _bytes(traced: bool) -> int:
    gc.collect()
    if traced:
        return tracemalloc.get_traced_memory()[0] + int(pa.total_allocated_bytes())
    pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
