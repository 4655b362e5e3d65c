"""Items a second from asubmit to result, submitted by asyncio tasks."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from benchmarks.kit.report import say
from benchmarks.pressure.peers import (
    ASYNC_BATCHER,
    BATCH_SIZE,
    EXECUTOR_LOOP,
    LINGER_MS,
    MILL,
    AsyncBatcherTasks,
    Backend,
    ExecutorLoopTasks,
    MillTasks,
    TaskPeer,
    async_batcher_class,
)
from benchmarks.pressure.rates import Rates
from benchmarks.pressure.threads import BACKENDS, answer
from benchmarks.queue.third_party import MissingPeer
from benchmarks.queue.work import SEED

TASKS = 1_000
IN_FLIGHT = 4


async def aanswer(batch: list[int]) -> list[int]:
    """A coroutine that costs next to nothing."""
    return answer(batch)


async def aanswer_after_1_ms(batch: list[int]) -> list[int]:
    """The same, as from across a network."""
    await asyncio.sleep(0.001)
    return answer(batch)


PLAIN = "plain"
COROUTINE = "coroutine"

KINDS: dict[str, dict[str, Backend]] = {
    PLAIN: BACKENDS,
    COROUTINE: {"trivial": aanswer, "1 ms": aanswer_after_1_ms},
}

CONTENDERS: dict[str, Callable[[Backend, int], TaskPeer]] = {
    MILL: MillTasks,
    ASYNC_BATCHER: AsyncBatcherTasks,
    EXECUTOR_LOOP: ExecutorLoopTasks,
}


def measure(*, repeats: int, items_per_task: int) -> Rates:
    """Let the contenders take turns on the same items."""
    result = Rates(
        title="asyncio: thousand items/s from asubmit to result",
        caption=(
            f"{TASKS:,} tasks, each {items_per_task} items one after the other; batches of at most"
            f" {BATCH_SIZE}, linger {LINGER_MS} ms, {IN_FLIGHT} in flight. Median of {repeats}"
            " interleaved repeats; every result was checked. 'Ahead' is batchmill's ratio to the"
            " line, within a repeat. Plain backends run on threads in all; coroutines on the tasks'"
            " own loop, which the executor loop cannot do."
        ),
        columns=("backend", "kind"),
    )
    contenders = dict(CONTENDERS)
    try:
        async_batcher_class()
    except MissingPeer as missing:
        result.missing[ASYNC_BATCHER] = str(missing)
        del contenders[ASYNC_BATCHER]
    rng = random.Random(SEED)
    for kind, backends in KINDS.items():
        for backend_name, backend in backends.items():
            say(f"pressure: asyncio, {backend_name} {kind} backend")
            runs = {
                name: partial(_run, build, backend, items_per_task)
                for name, build in contenders.items()
                if not (kind == COROUTINE and name == EXECUTOR_LOOP)
            }
            result.take_turns((backend_name, kind), runs, repeats, rng)
    return result


def _run(build: Callable[[Backend, int], TaskPeer], backend: Backend, items_per_task: int) -> float:
    gc.collect()
    return asyncio.run(_ask_all(build, backend, items_per_task))


async def _ask_all(
    build: Callable[[Backend, int], TaskPeer], backend: Backend, items_per_task: int
) -> float:
    peer = build(backend, IN_FLIGHT)

    async def ask_some(first: int) -> list[Any]:
        return [await peer.ask(item) for item in range(first, first + items_per_task)]

    count = TASKS * items_per_task
    started = perf_counter()
    answers = await asyncio.gather(*map(ask_some, range(0, count, items_per_task)))
    seconds = perf_counter() - started
    await peer.close()
    if [value for values in answers for value in values] != answer(list(range(count))):
        raise RuntimeError("items were answered wrongly, or not at all")
    return count / seconds
