"""Throughput from produce to consumed: every contender on the same work, in turn.

Repeats go round-robin over all contenders in shuffled order, so that a noisy minute affects
all equally, and a ratio is taken within a repeat before the median is taken over repeats.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from benchmarks.kit.report import say
from benchmarks.queue.check import check_arrival, make_sinks
from benchmarks.queue.contenders import Contender, all_contenders
from benchmarks.queue.peers import JOIN_TIMEOUT_S, Peer
from benchmarks.queue.standings import Sample, Throughput
from benchmarks.queue.third_party import MissingPeer
from benchmarks.queue.work import ITEM_CLASSES, PRODUCER_COUNTS, Feed, Work, build_work

MAX_ROUNDS = 100


def measure(*, repeats: int, seconds_per_run: float, seed: int) -> Throughput:
    """Run every contender ``repeats`` times with each number of producers."""
    result = Throughput(contenders=all_contenders(), repeats=repeats)
    work = {(feed, n): build_work(feed, n) for feed in Feed for n in PRODUCER_COUNTS}
    gc.collect()
    gc.freeze()  # the items are there for good: no collection during a run walks over them
    try:
        _measure(result, work, seconds_per_run, random.Random(seed))
    finally:
        gc.unfreeze()
    return result


def _measure(
    result: Throughput, work: dict[tuple[Feed, int], Work], seconds: float, rng: random.Random
) -> None:
    rounds: dict[tuple[str, int], int] = {}
    for contender in result.contenders:
        try:
            for producers in PRODUCER_COUNTS:
                own = work[contender.feed, producers]
                rounds[contender.name, producers] = _fitting_rounds(contender, own, seconds)
        except MissingPeer as missing:
            result.missing[contender.name] = str(missing)
    present = [c for c in result.contenders if c.name not in result.missing]
    for repeat in range(result.repeats):
        say(f"throughput: repeat {repeat + 1} of {result.repeats}")
        # What is compared runs close together: all contenders, then the next number of producers.
        turns = [
            (contender, producers)
            for producers in rng.sample(PRODUCER_COUNTS, len(PRODUCER_COUNTS))
            for contender in rng.sample(present, len(present))
        ]
        for contender, producers in turns:
            own, count = work[contender.feed, producers], rounds[contender.name, producers]
            elapsed, ordered = _run(contender, own, count)
            result.samples.append(
                Sample(
                    contender=contender.name,
                    producers=producers,
                    repeat=repeat,
                    items=own.items * count,
                    seconds=elapsed,
                    ordered=ordered,
                )
            )


def _fitting_rounds(contender: Contender, work: Work, seconds: float) -> int:
    """How often to repeat the work so that a run takes about ``seconds``. Warms up as well."""
    elapsed = _run(contender, work, rounds=1)[0]
    if elapsed < seconds / 8:
        elapsed = _run(contender, work, rounds=8)[0] / 8
    return max(1, min(MAX_ROUNDS, round(seconds / elapsed)))


def _run(contender: Contender, work: Work, rounds: int) -> tuple[float, bool]:
    sinks = make_sinks(ITEM_CLASSES)
    gc.collect()
    peer = contender.build(sinks, work.items * rounds)
    try:
        elapsed = _time(peer, work.helpings, rounds)
    finally:
        peer.close()
    return elapsed, check_arrival(sinks, work.expected, rounds)


def _time(peer: Peer, helpings: Sequence[Sequence[Any]], rounds: int) -> float:
    """Seconds from the moment all producers are let go until the last item was handled."""
    started = 0.0

    def start_clock() -> None:
        nonlocal started
        started = perf_counter()

    barrier = threading.Barrier(len(helpings), action=start_clock)

    def produce(mine: Sequence[Any]) -> None:
        put = peer.put
        barrier.wait()
        for _ in range(rounds):
            for helping in mine:
                put(helping)

    producers = [threading.Thread(target=produce, args=(mine,), daemon=True) for mine in helpings]
    for thread in producers:
        thread.start()
    for thread in producers:
        thread.join(JOIN_TIMEOUT_S)
        if thread.is_alive():
            raise TimeoutError(f"a producer did not finish in {JOIN_TIMEOUT_S:g} s")
    peer.finish()
    return perf_counter() - started
