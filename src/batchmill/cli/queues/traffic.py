"""Producers at a set pace: skewed rates, and one burst on the way."""

from __future__ import annotations

import random
import threading
import time
from types import TracebackType
from typing import Self

from batchmill.cli.queues.metrics import ENTITIES, METRIC_CLASSES, SLOW_CLASSES
from batchmill.cli.queues.pipeline import Pipeline

RECEIVERS = 2
SAMPLES_PER_S = 20_000
SLOW_PER_S = 300
BURST_FACTOR = 3
TICK_S = 0.01
_LONGEST_TICK_S = 0.1
"""A receiver that was held up makes up for this much, not for all: that would be a burst."""

_LATENCIES_MS = [random.Random(7).lognormvariate(3.5, 0.8) for _ in range(4096)]


def rates_per_s(total_per_s: float) -> list[float]:
    """The rate of each class: the k-th has 1/k of the first one's, as traffic tends to."""
    shares = [1 / rank for rank in range(1, len(METRIC_CLASSES) + 1)]
    return [total_per_s * share / sum(shares) for share in shares]


class Pace:
    """Turns a rate and the time that passed into whole items; fractions are kept for later."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._owed = 0.0

    def items(self, passed_s: float) -> int:
        """How many are due for the time that passed."""
        self._owed += self._per_s * passed_s
        whole = int(self._owed)
        self._owed -= whole
        return whole


class Traffic:
    """Receivers that feed a pipeline until :meth:`stop`; between two moments, far too quickly."""

    def __init__(self, pipeline: Pipeline, burst_s: tuple[float, float]) -> None:
        self._pipeline = pipeline
        self._burst_s = burst_s
        self._stop = threading.Event()
        self._started = time.monotonic()
        self._threads = [
            threading.Thread(target=self._receive, args=(index,), name=f"receiver-{index}")
            for index in range(RECEIVERS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the receivers, and wait until they have."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _receive(self, index: int) -> None:
        chance = random.Random(index)
        metrics = [
            (cls, Pace(rate))
            for cls, rate in zip(
                METRIC_CLASSES, rates_per_s(SAMPLES_PER_S / RECEIVERS), strict=True
            )
        ]
        slow = [(cls, Pace(SLOW_PER_S / RECEIVERS / len(SLOW_CLASSES))) for cls in SLOW_CLASSES]
        last = time.monotonic()
        while not self._stop.wait(TICK_S):
            now = time.monotonic()
            passed_s = min(now - last, _LONGEST_TICK_S)
            last = now
            for statement, pace in slow:
                for latency_ms in chance.choices(_LATENCIES_MS, k=pace.items(passed_s)):
                    name = f"statement {chance.randrange(100)}"
                    self._pipeline.topn.produce(statement(name, 10 * latency_ms))
            pressed_s = passed_s * (BURST_FACTOR if self._is_burst(now) else 1)
            for metric, pace in metrics:
                if count := pace.items(pressed_s):
                    entities = chance.choices(ENTITIES, k=count)
                    latencies = chance.choices(_LATENCIES_MS, k=count)
                    self._pipeline.l1.produce_many(
                        [metric(*it) for it in zip(entities, [1] * count, latencies, strict=True)]
                    )

    def _is_burst(self, now: float) -> bool:
        begins_s, ends_s = self._burst_s
        return begins_s <= now - self._started < ends_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
