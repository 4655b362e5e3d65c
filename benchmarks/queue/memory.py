"""Memory overhead of a queued item, with a million items in the queue.

Handlers block while the queue is filled. batchmill's queue is then drained and filled again: memory
that it keeps (free slots, grown lists) counts in the second filling. The peers use deques and the
like, which keep nothing.
"""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.kit.report import Table, said, say
from benchmarks.queue import peers, third_party
from benchmarks.queue.mill import MillPeer, roomy_config, tight_config
from benchmarks.queue.peers import JOIN_TIMEOUT_S, Handlers, Peer
from benchmarks.queue.third_party import MissingPeer
from benchmarks.queue.work import ITEM_CLASSES, Feed, Item, build_work

MILL_PREFIX = "batchmill"

BUILDS: dict[str, Callable[[Handlers, int], Peer]] = {
    f"{MILL_PREFIX}, adaptive partitions": lambda handlers, items: MillPeer(
        handlers, roomy_config(items), Feed.SINGLE
    ),
    f"{MILL_PREFIX}, two partitions": lambda handlers, items: MillPeer(
        handlers, tight_config(2 * items), Feed.SINGLE
    ),
    "queue.Queue": peers.plain_queue,
    "SimpleQueue + semaphore": peers.bounded_simple_queue,
    "deque + Condition": peers.DequePeer,
    "janus": third_party.janus_queue,
    "OpenTelemetry processor": third_party.OpenTelemetryPeer,
}


class Gate:
    """A handler that waits while the gate is shut, and counts what passes."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._lock = threading.Lock()
        self._passed = 0

    def consume(self, batch: list[Item]) -> None:
        """Hold the batch until the gate opens."""
        self._open.wait()
        with self._lock:
            self._passed += len(batch)

    def open(self) -> None:
        """Hold nothing back any more."""
        self._open.set()

    def let_pass(self, count: int) -> None:
        """Open, wait until ``count`` items in all have passed, and shut again."""
        self.open()
        give_up = time.monotonic() + JOIN_TIMEOUT_S
        while self._passed < count:
            if time.monotonic() > give_up:
                raise TimeoutError(f"{self._passed} of {count} items passed")
            time.sleep(0.005)
        self._open.clear()


@dataclass(frozen=True)
class Footprint:
    """Bytes a queued item, and bytes of the queue while it is empty."""

    empty: int
    first: float
    refilled: float | None = None

    @property
    def worst(self) -> float:
        """The higher of the two fillings."""
        return max(self.first, self.refilled or 0.0)


@dataclass(kw_only=True)
class Memory:
    """Footprints by contender."""

    items: int
    footprints: dict[str, Footprint] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def worst_of_mill(self) -> float:
        """The most that batchmill takes for an item, in any set-up measured."""
        return max(f.worst for name, f in self.footprints.items() if name.startswith(MILL_PREFIX))

    def tables(self) -> list[Table]:
        """One table."""
        rows = [
            [
                name,
                f"{f.first:.1f}",
                "-" if f.refilled is None else f"{f.refilled:.1f}",
                f"{f.empty / 1024:,.0f}",
            ]
            for name, f in self.footprints.items()
        ]
        rows += [[name, "missing", "-", "-"] for name in self.missing]
        return [
            Table(
                f"Memory per queued item with {self.items:,} items queued, bytes beyond the item",
                "As tracemalloc counts, the empty queue included, while handlers hold still;"
                " 'refilled' is after the queue was full and drained once. The items are of 100"
                f" classes and exist beforehand. {said(self.missing)}",
                ["contender", "first filling", "refilled", "empty queue, KiB"],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """Every footprint."""
        return {
            "items": self.items,
            "missing": self.missing,
            "bytes_per_item": {
                name: {"first": f.first, "refilled": f.refilled, "empty_queue_bytes": f.empty}
                for name, f in self.footprints.items()
            },
        }


def measure(*, items: int) -> Memory:
    """Fill each contender with ``items`` items, twice."""
    work = build_work(Feed.SINGLE, 1, items)
    result = Memory(items=work.items)
    gc.collect()
    gc.freeze()  # collections need not walk over the items
    try:
        for name, build in BUILDS.items():
            say(f"memory: {name}")
            try:
                again = name.startswith(MILL_PREFIX)
                result.footprints[name] = _footprint(build, work.helpings[0], refill=again)
            except MissingPeer as missing:
                result.missing[name] = str(missing)
    finally:
        gc.unfreeze()
    return result


def _footprint(
    build: Callable[[Handlers, int], Peer], items: Sequence[Item], *, refill: bool
) -> Footprint:
    warm_up = build(dict.fromkeys(ITEM_CLASSES, Gate()), 1)  # what is imported once is no footprint
    warm_up.finish()
    warm_up.close()
    gate = Gate()
    tracemalloc.start()
    start = _traced()
    # One place more: consumers are told through the queue that they may go.
    peer = build(dict.fromkeys(ITEM_CLASSES, gate), len(items) + 1)
    try:
        empty = _traced() - start
        first = (_fill(peer, items) - start) / len(items)
        refilled = None
        if refill:
            gate.let_pass(len(items))
            refilled = (_fill(peer, items) - start) / len(items)
    finally:
        tracemalloc.stop()
        gate.open()
        peer.finish()
        peer.close()
    return Footprint(empty, first, refilled)


def _fill(peer: Peer, items: Sequence[Item]) -> int:
    put = peer.put
    for item in items:
        put(item)
    return _traced()


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
