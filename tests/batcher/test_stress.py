"""Many submitters at once, thread switches everywhere, and a close in the middle."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from batchmill.batcher import (
    AdaptiveConcurrency,
    BatcherSettings,
    ItemResult,
    MicroBatcher,
    RetryPolicy,
    bisect,
)
from batchmill.pressure import QueueThresholdSettings, strategies
from tests.kit.batchers import assert_balanced
from tests.kit.threads import WAIT_S

SUBMITTERS = 6
EACH = 800


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _payload(item: int) -> int:
    return item * 7 + 3


def _backend(batch: list[int]) -> list[Any]:
    if any(item % 97 == 0 for item in batch):
        raise ValueError("poison")
    return [ValueError(item) if item % 11 == 0 else _payload(item) for item in batch]


BY_PRIORITY = strategies.by_priority(
    lambda item: item % 4,
    {
        0: strategies.retry(initial_ms=0.1, max_ms=1, max_attempts=4),
        1: strategies.drop(),
        2: strategies.accept(),
    },
)
THRESHOLDS = QueueThresholdSettings(
    max_queue_size=40, warning_handler=BY_PRIORITY, critical_handler=BY_PRIORITY
)
VARIANTS = {
    "plain": (BatcherSettings(batch_size=16, linger_ms=0.1), None),
    "pressed": (
        BatcherSettings(batch_size=8, linger_ms=0.1, max_in_flight=3, on_batch_failure=bisect()),
        THRESHOLDS,
    ),
    "keyed": (
        BatcherSettings(
            batch_size=8,
            linger_ms=0.1,
            max_in_flight=2,
            key=lambda item: item % 50,
            max_weight=20,
            weigh=lambda item: item % 5,
            adaptive=AdaptiveConcurrency(),
            retry=RetryPolicy(max_attempts=2, initial_ms=0.01, max_ms=0.01),
        ),
        THRESHOLDS,
    ),
}


def _submit(batcher: MicroBatcher[int], start: int) -> list[tuple[int, Future[ItemResult[int]]]]:
    futures = []
    for item in range(start, start + EACH):
        timeout = 0.001 if item % 13 == 0 else None
        deadline_s = 0.0005 if item % 17 == 0 else None
        future = batcher.submit(item, timeout, deadline_s=deadline_s)
        if item % 19 == 0:
            future.cancel()
        futures.append((item, future))
    return futures


async def _asubmit(batcher: MicroBatcher[int], start: int) -> list[tuple[int, Any]]:
    items = range(start, start + EACH)
    return list(
        zip(items, await asyncio.gather(*(batcher.asubmit(item) for item in items)), strict=True)
    )


def _check(item: int, result: ItemResult[int], keyed: bool) -> str:
    """The outcome, after a look whether it is this item's own."""
    assert result.item == item
    if result.is_success:
        value = result.value
        assert value == _payload(item) or (keyed and (value - 3) // 7 % 50 == item % 50)
        return "succeeded"
    return "dropped" if result.is_dropped else "refused"


@pytest.mark.parametrize("close_in_the_middle", [False, True], ids=["to the end", "closed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_item_is_answered_once(variant: str, close_in_the_middle: bool) -> None:
    """Each with its own answer, and the counters are the sum of what the submitters saw."""
    config, thresholds = VARIANTS[variant]
    batcher: MicroBatcher[int] = MicroBatcher(_backend, config, thresholds)
    start = threading.Barrier(SUBMITTERS + 2)
    answers: Counter[str] = Counter()
    callbacks: Counter[int] = Counter()
    errors: list[BaseException] = []
    lock = threading.Lock()

    def count(item: int, _: object) -> None:
        with lock:
            callbacks[item] += 1

    def collect(number: int) -> None:
        start.wait(WAIT_S)
        mine = []
        for item, future in _submit(batcher, number * 10_000 + 1):
            future.add_done_callback(functools.partial(count, item))
            mine.append((item, future))
        for item, future in mine:
            outcome = "cancelled"
            if not future.cancelled():
                outcome = _check(item, future.result(WAIT_S), variant == "keyed")
            with lock:
                answers[outcome] += 1

    def collect_async(number: int) -> None:
        start.wait(WAIT_S)
        for item, result in asyncio.run(_asubmit(batcher, number * 10_000 + 1)):
            outcome = _check(item, result, variant == "keyed")
            with lock:
                answers[outcome] += 1

    def run(target: Any, number: int) -> None:
        try:
            target(number)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(collect, n)) for n in range(SUBMITTERS)]
    threads.append(threading.Thread(target=run, args=(collect_async, SUBMITTERS)))
    for thread in threads:
        thread.start()
    start.wait(WAIT_S)
    if close_in_the_middle:
        while batcher.stats().submitted < SUBMITTERS * EACH // 3:
            pass
        assert batcher.close(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)
    assert batcher.close(WAIT_S)
    assert errors == []
    stats = batcher.stats()
    assert_balanced(stats)
    assert (stats.submitted, stats.pending) == ((SUBMITTERS + 1) * EACH, 0)
    assert sum(answers.values()) == stats.submitted
    assert answers["dropped"] == stats.dropped
    assert answers["succeeded"] == stats.succeeded
    assert answers["refused"] + answers["cancelled"] == (
        stats.failed + stats.rejected + stats.expired + stats.cancelled
    )
    assert set(callbacks.values()) == {1}
    assert len(callbacks) == SUBMITTERS * EACH


def test_the_hard_capacity_holds_under_a_stampede() -> None:
    """However many submit at once, the depth never passes it."""
    thresholds = QueueThresholdSettings(max_queue_size=10, critical_handler=strategies.accept())
    deepest: list[int] = []

    def backend(batch: list[int]) -> list[int]:
        deepest.append(batcher.queue_depth)
        return batch

    batcher: MicroBatcher[int] = MicroBatcher(backend, BatcherSettings(batch_size=4), thresholds)
    start = threading.Barrier(SUBMITTERS)

    def submit() -> None:
        start.wait(WAIT_S)
        for item in range(EACH):
            batcher.submit(item)
            deepest.append(batcher.queue_depth)

    threads = [threading.Thread(target=submit) for _ in range(SUBMITTERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert batcher.close(WAIT_S)
    assert max(deepest) <= 20
    assert_balanced(batcher.stats())


def test_the_balance_holds_at_every_moment() -> None:
    """Not only when all is quiet: a reader never sees an item in no place, or in two."""
    config, thresholds = VARIANTS["keyed"]
    batcher: MicroBatcher[int] = MicroBatcher(_backend, config, thresholds)
    threads = [threading.Thread(target=_submit, args=(batcher, n * 10_000 + 1)) for n in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert_balanced(batcher.stats())
    for thread in threads:
        thread.join(WAIT_S)
    assert batcher.close(WAIT_S)
    assert_balanced(batcher.stats())
