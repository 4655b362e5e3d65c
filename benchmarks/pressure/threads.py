"""Items a second from submit to result, submitted by threads."""

from __future__ import annotations

import gc
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import perf_counter
from typing import Any

from batchmill.pressure import QueueThresholdSettings
from benchmarks.kit.report import say
from benchmarks.pressure.peers import (
    BATCH_SIZE,
    EXECUTOR_LOOP,
    LINGER_MS,
    MILL,
    MILL_THRESHOLDS,
    SIMPLE_LOOP,
    Backend,
    ExecutorLoop,
    MillThreads,
    ThreadPeer,
)
from benchmarks.pressure.rates import Rates
from benchmarks.queue.work import SEED

THREAD_COUNTS = (1, 4)
IN_FLIGHT = (1, 4)


def answer(batch: list[int]) -> list[int]:
    """A backend that costs next to nothing, and whose answers can be checked."""
    return [item + 1 for item in batch]


def answer_after_1_ms(batch: list[int]) -> list[int]:
    """The same, as from across a network."""
    time.sleep(0.001)
    return answer(batch)


BACKENDS: dict[str, Backend] = {"trivial": answer, "1 ms": answer_after_1_ms}

CONTENDERS: dict[str, Callable[[Backend, int], ThreadPeer]] = {
    MILL: MillThreads,
    MILL_THRESHOLDS: lambda backend, in_flight: MillThreads(
        backend, in_flight, QueueThresholdSettings(max_queue_size=1_000_000)
    ),
    EXECUTOR_LOOP: ExecutorLoop,
    SIMPLE_LOOP: lambda backend, in_flight: ExecutorLoop(backend, in_flight, queue.SimpleQueue),
}


def measure(*, repeats: int, items: int) -> Rates:
    """Let the contenders take turns on the same items."""
    result = Rates(
        title="Threads: thousand items/s from submit to result",
        caption=(
            f"{items:,} items, batches of at most {BATCH_SIZE}, linger {LINGER_MS} ms. Each thread"
            f" submits all its items, then reads all its results. Median of {repeats} interleaved"
            " repeats; every result was checked. 'Ahead' is batchmill's ratio to the line, within"
            " a repeat. The loops are the least that does the job: no bound, no cancelling, no"
            " counters."
        ),
        columns=("backend", "threads", "in flight"),
    )
    rng = random.Random(SEED)
    for backend_name, backend in BACKENDS.items():
        for threads in THREAD_COUNTS:
            for in_flight in IN_FLIGHT:
                say(f"pressure: {backend_name} backend, {threads} threads, {in_flight} in flight")
                runs = {
                    name: partial(_run, build, backend, in_flight, threads, items)
                    for name, build in CONTENDERS.items()
                }
                cell = (backend_name, str(threads), str(in_flight))
                result.take_turns(cell, runs, repeats, rng)
    return result


def _run(
    build: Callable[[Backend, int], ThreadPeer],
    backend: Backend,
    in_flight: int,
    thread_count: int,
    items: int,
) -> float:
    gc.collect()
    peer = build(backend, in_flight)
    shares = [range(items)[start::thread_count] for start in range(thread_count)]
    answers: list[list[Any]] = [[] for _ in shares]
    barrier = threading.Barrier(thread_count + 1)

    def submit_all(share: range, results: list[Any]) -> None:
        submit = peer.submit
        barrier.wait()
        futures: list[Future[Any]] = [submit(item) for item in share]
        results.extend(future.result(timeout=60) for future in futures)

    threads = [
        threading.Thread(target=submit_all, args=(share, results))
        for share, results in zip(shares, answers, strict=True)
    ]
    for thread in threads:
        thread.start()
    barrier.wait()
    started = perf_counter()
    for thread in threads:
        thread.join()
    seconds = perf_counter() - started
    peer.close()
    for share, results in zip(shares, answers, strict=True):
        if [peer.value(result) for result in results] != answer(list(share)):
            raise RuntimeError("items were answered wrongly, or not at all")
    return items / seconds
