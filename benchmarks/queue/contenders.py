"""The contenders of the throughput benchmark, and how each is set up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.queue import mill, peers, third_party
from benchmarks.queue.check import make_sinks
from benchmarks.queue.peers import BOUND, Handlers, Peer
from benchmarks.queue.work import ITEM_CLASSES, Feed

Build: TypeAlias = Callable[[Handlers, int], Peer]
"""Makes a running contender from the handlers and the number of items the run will put."""

QUEUE = "queue.Queue"
SIMPLE_QUEUE = "SimpleQueue, batched by hand"
SIMPLE_QUEUE_PLAIN = "SimpleQueue, one by one"
OPENTELEMETRY = "OpenTelemetry processor"
MILL = "batchmill"
MILL_TIGHT = "batchmill, tight"
MILL_BULK = "batchmill produce_many"
MILL_BULK_TIGHT = "batchmill produce_many, tight"
MILL_MIXED = "batchmill produce_many, mixed"
MILL_LOOP = "batchmill, a loop of produce over the same lists"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A named way to get items from producers to handlers."""

    name: str
    build: Build
    capacity: int | None
    """Items it holds at most; None where nothing holds a producer back."""
    feed: Feed = Feed.SINGLE

    @property
    def is_mill(self) -> bool:
        """Whether this is batchmill in one of its set-ups."""
        return self.name.startswith(MILL)


def all_contenders() -> list[Contender]:
    """Every contender, batchmill first."""
    roomy = mill.roomy_capacity(make_sinks(ITEM_CLASSES))
    return [*_mills(roomy), *_peers(roomy)]


def _mills(roomy: int) -> list[Contender]:
    return [
        _mill(MILL, roomy, Feed.SINGLE),
        _mill(MILL_TIGHT, BOUND, Feed.SINGLE),
        _mill(MILL_BULK, roomy, Feed.CHUNKS_OF_ONE_CLASS),
        _mill(MILL_BULK_TIGHT, BOUND, Feed.CHUNKS_OF_ONE_CLASS),
        _mill(MILL_MIXED, roomy, Feed.MIXED_CHUNKS),
        _mill(MILL_LOOP, roomy, Feed.MIXED_CHUNKS, loop=True),
    ]


def _mill(name: str, capacity: int, feed: Feed, loop: bool = False) -> Contender:
    make_config = mill.tight_config if capacity == BOUND else mill.roomy_config
    return Contender(
        name=name,
        build=lambda handlers, items: mill.MillPeer(handlers, make_config(), feed, loop),
        capacity=capacity,
        feed=feed,
    )


def _peers(roomy: int) -> list[Contender]:
    def bounded(make: Callable[[Handlers, int], Peer], capacity: int = BOUND) -> Build:
        return lambda handlers, items: make(handlers, capacity)

    return [
        Contender(name=QUEUE, build=bounded(peers.plain_queue), capacity=BOUND),
        Contender(name=f"{QUEUE}, roomy", build=bounded(peers.plain_queue, roomy), capacity=roomy),
        Contender(
            name=SIMPLE_QUEUE,
            build=lambda handlers, items: peers.simple_queue(handlers),
            capacity=None,
        ),
        Contender(
            name=SIMPLE_QUEUE_PLAIN,
            build=lambda handlers, items: peers.OneByOnePeer(handlers),
            capacity=None,
        ),
        Contender(
            name="SimpleQueue each, by hand",
            build=lambda handlers, items: peers.ByClassPeer(handlers),
            capacity=None,
        ),
        Contender(
            name="SimpleQueue + semaphore",
            build=bounded(peers.bounded_simple_queue),
            capacity=BOUND,
        ),
        Contender(name="deque + Condition", build=bounded(peers.DequePeer), capacity=BOUND),
        Contender(name="janus", build=bounded(third_party.janus_queue), capacity=BOUND),
        Contender(name="culsans", build=bounded(third_party.culsans_queue), capacity=BOUND),
        Contender(name=OPENTELEMETRY, build=third_party.OpenTelemetryPeer, capacity=None),
    ]
