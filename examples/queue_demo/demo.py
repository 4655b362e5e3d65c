"""Runs the four queues and their traffic, shows them live, and sums up at the end."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.live import Live

from examples.queue_demo import pressure, view
from examples.queue_demo.pipeline import BURST_FACTOR, Pipeline, Traffic
from examples.queue_demo.view import Meter, Snapshot, balances

REFRESH_S = 0.125
PLAIN_REFRESH_S = 1.0

Draw = Callable[[Meter], None]


@dataclass(frozen=True, slots=True)
class Script:
    """When the rebalance and the burst happen in a run of ``seconds``."""

    seconds: float

    @property
    def rebalance_s(self) -> float:
        """The rebalance interval: late enough to show the load before the first rebalance."""
        return min(4.0, self.seconds / 3)

    @property
    def burst_s(self) -> tuple[float, float]:
        """Start and end of the burst, after the loads of the rebalance were measured."""
        start_s = 0.58 * self.seconds
        return start_s, start_s + min(0.4, self.seconds / 20)

    def phase(self, meter: Meter) -> str:
        """One line on what is happening now."""
        now_s = meter.last.at_s
        start_s, end_s = self.burst_s
        if start_s <= now_s < end_s + 2:
            return f"A burst, {BURST_FACTOR} times the traffic: L1 drops what does not fit."
        if meter.last.stats[0].rebalances == 0:
            every = f"every {self.rebalance_s:.1f} s"
            return f"L1's threads got their partitions round robin. Balancer: {every}."
        if now_s < start_s:
            return "The balancer has moved partitions to even out the load of L1's threads."
        return "Steady again, after the burst."


class Interrupt:
    """While entered, the first Ctrl-C only sets ``received``; the next one interrupts as usual."""

    def __init__(self) -> None:
        self.received = False
        self._previous: Any = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(signal.SIGINT, self._previous)

    def __enter__(self) -> Self:
        self._previous = signal.getsignal(signal.SIGINT)
        if self._previous is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)


def run(seconds: float) -> int:
    """Run the demo; 0 if everything accepted was consumed, else 1."""
    script = Script(seconds)
    console = make_console()
    with Interrupt() as interrupt:
        with Pipeline(script.rebalance_s) as pipeline:
            meter = _watch(pipeline, script, console, interrupt)
        stats = pipeline.stats()
    if interrupt.received:
        console.print(f"Ended by Ctrl-C after {meter.last.at_s:.1f} s.\n")
    rows, samples = pipeline.database.rows, pipeline.database.samples
    console.print(
        view.summary(
            stats,
            rows=rows,
            samples=samples,
            before=meter.loads_before(),
            after=meter.loads_after(),
        )
    )
    console.print()
    pressure_ok = interrupt.received or pressure.run(console)
    balanced = all(map(balances, stats)) and samples == stats[0].consumed
    return 0 if balanced and pressure_ok else 1


def make_console() -> Console:
    """The console to draw on. A pipe or a file gets plain text, whatever FORCE_COLOR says."""
    if sys.stdout.isatty():
        return Console()
    return Console(force_terminal=False, color_system=None, force_interactive=False, width=80)


def _watch(pipeline: Pipeline, script: Script, console: Console, interrupt: Interrupt) -> Meter:
    """Run the traffic for the length of the script, and show the queues live."""
    if not console.is_terminal or console.is_dumb_terminal:
        console.print(view.EXPLANATION)
        meter = _run_traffic(pipeline, script, interrupt, PlainLines())
        console.print()
        return meter
    with Live(console=console, auto_refresh=False) as live:

        def draw(meter: Meter) -> None:
            live.update(
                view.frame(meter, seconds=script.seconds, phase=script.phase(meter)), refresh=True
            )

        return _run_traffic(pipeline, script, interrupt, draw)


def _run_traffic(pipeline: Pipeline, script: Script, interrupt: Interrupt, draw: Draw) -> Meter:
    started = time.monotonic()
    meter = Meter(Snapshot(0.0, pipeline.stats()))
    with Traffic(pipeline, script.burst_s):
        while meter.last.at_s < script.seconds and not interrupt.received:
            left_s = script.seconds - meter.last.at_s
            time.sleep(min(REFRESH_S, left_s))
            meter.add(Snapshot(time.monotonic() - started, pipeline.stats()))
            draw(meter)
    return meter


class PlainLines:
    """Prints a line a second."""

    def __init__(self) -> None:
        self._due_s = PLAIN_REFRESH_S

    def __call__(self, meter: Meter) -> None:
        """Print a line if the last one is a second old."""
        if meter.last.at_s >= self._due_s:
            self._due_s = meter.last.at_s // PLAIN_REFRESH_S * PLAIN_REFRESH_S + PLAIN_REFRESH_S
            print(view.plain_line(meter), flush=True)
