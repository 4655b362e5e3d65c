"""Four queues of a metrics pipeline at work: starts them and their traffic, and gives account."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live

from batchmill.cli.queues import pressure, view
from batchmill.cli.queues.meter import Look, Meter, balances
from batchmill.cli.queues.pipeline import Pipeline
from batchmill.cli.queues.traffic import BURST_FACTOR, Traffic

LOOK_PERIOD_S = 0.125
PLAIN_PERIOD_S = 1.0

Draw = Callable[[Meter], None]


@dataclass(frozen=True, slots=True)
class Script:
    """What happens when."""

    seconds: float

    @property
    def rebalance_s(self) -> float:
        """How often the balancer is asked; the first time, it finds the classes as dealt."""
        return min(4.0, self.seconds / 3)

    @property
    def burst_s(self) -> tuple[float, float]:
        """Begin and end of the burst: late enough to leave 'before' alone, and so is its end."""
        begins_s = 0.58 * self.seconds
        return begins_s, begins_s + min(0.4, self.seconds / 20)

    def phase(self, meter: Meter) -> str:
        """What there is to see now."""
        now_s = meter.last.at_s
        begins_s, ends_s = self.burst_s
        if begins_s <= now_s < ends_s + 2:
            return f"A burst, {BURST_FACTOR} times the traffic: L1 turns away what does not fit."
        if meter.last.stats[0].rebalances == 0:
            every = f"every {self.rebalance_s:.1f} s"
            return f"L1's threads were dealt their partitions in turn. Balancer: {every}."
        if now_s < begins_s:
            return "The balancer has moved partitions to even out the load of L1's threads."
        return "Steady again, after the burst."


class Interrupt:
    """While entered, the first Ctrl-C is noted; the next one interrupts as ever."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:  # a shell's background job is not to be stopped
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)


def run(seconds: float) -> int:
    """Show the demonstration; 0 when all that was accepted was consumed, else 1."""
    script = Script(seconds)
    console = make_console()
    with Interrupt() as interrupt:
        with Pipeline(script.rebalance_s) as pipeline:
            meter = _watch(pipeline, script, console, interrupt)
        stats = pipeline.stats()
    if interrupt.asked:
        console.print(f"Ended by Ctrl-C after {meter.last.at_s:.1f} s.\n")
    rows, samples = pipeline.database.rows, pipeline.database.samples
    console.print(
        view.closing(
            stats,
            rows=rows,
            samples=samples,
            before=meter.loads_before(),
            after=meter.loads_after(),
        )
    )
    console.print()
    under_pressure = interrupt.asked or pressure.run(console)
    whole = all(map(balances, stats)) and samples == stats[0].consumed
    return 0 if whole and under_pressure else 1


def make_console() -> Console:
    """Where to draw. A pipe or a file gets text alone, whatever FORCE_COLOR says."""
    if sys.stdout.isatty():
        return Console()
    return Console(force_terminal=False, color_system=None, force_interactive=False, width=80)


def _watch(pipeline: Pipeline, script: Script, console: Console, interrupt: Interrupt) -> Meter:
    """Run the traffic for as long as the script says, and show what the queues make of it."""
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
    meter = Meter(Look(0.0, pipeline.stats()))
    with Traffic(pipeline, script.burst_s):
        while meter.last.at_s < script.seconds and not interrupt.asked:
            left_s = script.seconds - meter.last.at_s
            time.sleep(min(LOOK_PERIOD_S, left_s))
            meter.add(Look(time.monotonic() - started, pipeline.stats()))
            draw(meter)
    return meter


class PlainLines:
    """Prints a line a second."""

    def __init__(self) -> None:
        self._due_s = PLAIN_PERIOD_S

    def __call__(self, meter: Meter) -> None:
        """Print one if it is time."""
        if meter.last.at_s >= self._due_s:
            self._due_s = meter.last.at_s // PLAIN_PERIOD_S * PLAIN_PERIOD_S + PLAIN_PERIOD_S
            print(view.plain_line(meter), flush=True)
