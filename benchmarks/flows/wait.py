"""How long signals wait for their handler at low load, by the rule that assigns flows to workers.

All rules run in the same dispatcher on the same arrivals: Poisson, from a fixed seed. The handler
waits, as for a database, so the workers really overlap. A signal's wait is from its dispatch to the
moment the handler turns to it.

Flows of one signal show the rule alone. In longer flows the later signals have no choice: they wait
for their flow's worker, and for their own predecessors, whatever the rule; that is measured too.

A stall of the machine for a hundredth of a turn determines the p99 of that turn. So turns are short
and many; a run with a late producer is repeated a few times, and the least late one counts, for
every rule. Read the medians, and the ratios within a turn.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from batchmill.flows import Assignment, LeastLoaded, ShortestQueue
from benchmarks.flows.arrivals import SERVICE_S, WORKERS, Arrivals, Case, Turn, build_arrivals
from benchmarks.flows.peers import FlowSignal, MillFlows, RandomRule
from benchmarks.flows.simulated import simulate
from benchmarks.kit.report import Table, say, spread
from benchmarks.queue.work import SEED

OURS = "least load, in turn"
SEEDS = "seed: shortest queue, lowest index"
RANDOM = "any worker (as a hash would)"
GOAL_CASE = Case(0.3, 1)
SIMULATED_GOAL_CASE = Case(0.3, 3)
"""With flows of one signal our p99 is 0 there, and a ratio says nothing."""
CASES = (Case(0.1, 1), GOAL_CASE, SIMULATED_GOAL_CASE)
ATTEMPTS = 4
LATE_MS = 2.0

RULES: dict[str, Callable[[], Assignment]] = {
    OURS: LeastLoaded,
    SEEDS: ShortestQueue,
    RANDOM: lambda: RandomRule(random.Random(SEED).randrange),
}


@dataclass(kw_only=True)
class Waits:
    """All turns, by case and rule, and the same in simulated time."""

    seconds: float
    simulated_seconds: float
    turns: dict[Case, dict[str, list[Turn]]] = field(default_factory=dict)
    simulated: dict[Case, dict[str, Turn]] = field(default_factory=dict)

    def seed_to_ours(self, case: Case) -> float:
        """How many times as long the seed's p99 wait is: the median over the turns."""
        return median(self.ratios(case, SEEDS))

    def seed_to_ours_simulated(self, case: Case) -> float:
        """The same, of the simulation."""
        rules = self.simulated[case]
        return rules[SEEDS].p99_ms / rules[OURS].p99_ms

    def ratios(self, case: Case, rule: str) -> list[float]:
        """A rule's p99 over ours, turn by turn."""
        both = zip(self.turns[case][rule], self.turns[case][OURS], strict=True)
        return [theirs.p99_ms / ours.p99_ms for theirs, ours in both]

    def tables(self) -> list[Table]:
        """One table a case, and one of the simulation."""
        return [*(self._table(case) for case in self.turns), self._simulated_table()]

    def _table(self, case: Case) -> Table:
        rows = []
        for rule, turns in self.turns[case].items():
            ratios = [] if rule == OURS else self.ratios(case, rule)
            rows.append(
                [
                    rule,
                    f"{median(turn.p50_ms for turn in turns):.2f}",
                    f"{median(turn.p99_ms for turn in turns):.2f}",
                    spread(turn.p99_ms for turn in turns),
                    f"{median(ratios):.1f}x" if ratios else "",
                    spread(ratios, digits=1) if ratios else "",
                    f"{100 * median(turn.busiest_share for turn in turns):.0f} %",
                    f"{median(turn.late_ms for turn in turns):.1f}",
                ]
            )
        return Table(
            f"Wait for the handler at {case}, milliseconds",
            f"Medians over {len(self.turns[case][OURS])} interleaved turns of {self.seconds:g} s."
            f" {WORKERS} workers, a handler that waits {SERVICE_S * 1e3:g} ms per signal, one"
            " signal per call, the same Poisson arrivals for every rule of a turn. 'Longer' is the"
            " p99 to batchmill's, turn by turn; 'busiest' is the busiest worker's share;"
            " 'late' is the worst delay of the producer, which the machine adds to any wait."
            f" A run with a delay above {LATE_MS:g} ms was repeated, at most {ATTEMPTS} runs,"
            " and the one with the least delay counts.",
            ["rule", "p50", "p99", "p99 min..max", "longer", "min..max", "busiest", "late"],
            rows,
        )

    def _simulated_table(self) -> Table:
        rows = []
        for case, rules in self.simulated.items():
            ours = rules[OURS].p99_ms
            for rule, turn in rules.items():
                rows.append(
                    [
                        rule,
                        str(case),
                        f"{turn.p50_ms:.2f}",
                        f"{turn.p99_ms:.2f}",
                        "" if rule == OURS else f"{turn.p99_ms / ours:.1f}x" if ours else "> 99x",
                        f"{100 * turn.busiest_share:.0f} %",
                    ]
                )
        return Table(
            "The same in simulated time, milliseconds",
            f"The router's own code, {self.simulated_seconds:g} s of arrivals, without noise:"
            " the effect of the rule alone.",
            ["rule", "case", "p50", "p99", "longer", "busiest"],
            rows,
        )

    def as_json(self) -> dict[str, Any]:
        """Every turn."""
        return {
            "turns": {
                str(case): {rule: [vars(turn) for turn in turns] for rule, turns in rules.items()}
                for case, rules in self.turns.items()
            },
            "simulated": {
                str(case): {rule: vars(turn) for rule, turn in rules.items()}
                for case, rules in self.simulated.items()
            },
        }


def measure(*, turns: int, seconds: float, simulated_seconds: float) -> Waits:
    """Let the rules take turns at each case; within a turn all see the same arrivals."""
    result = Waits(seconds=seconds, simulated_seconds=simulated_seconds)
    rng = random.Random(SEED)
    for case in CASES:
        say(f"flows: waits at {case}")
        per_rule: dict[str, list[Turn]] = {rule: [] for rule in RULES}
        for turn in range(turns):
            for rule in rng.sample(list(RULES), len(RULES)):
                arrivals = build_arrivals(case, seconds, SEED + turn)
                per_rule[rule].append(_least_late(RULES[rule], arrivals))
        result.turns[case] = per_rule
        result.simulated[case] = {
            rule: simulate(make(), case, simulated_seconds, SEED) for rule, make in RULES.items()
        }
    return result


def _least_late(make_rule: Callable[[], Assignment], arrivals: Arrivals) -> Turn:
    attempts: list[Turn] = []
    while len(attempts) < ATTEMPTS and all(turn.late_ms > LATE_MS for turn in attempts):
        attempts.append(_turn(make_rule(), arrivals))
    return min(attempts, key=lambda turn: turn.late_ms)


def _turn(rule: Assignment, arrivals: Arrivals) -> Turn:
    waits_s: list[float] = []

    def handle(batch: list[FlowSignal]) -> None:
        for signal in batch:
            waits_s.append(perf_counter() - signal.sent)
            time.sleep(SERVICE_S)

    gc.collect()
    peer = MillFlows(handle, WORKERS, batch_max=1, assignment=rule)
    start = perf_counter() + 0.05  # the workers come to rest first
    late_s = 0.0
    for at, signal in arrivals:
        ahead = start + at - perf_counter()
        if ahead > 0:
            time.sleep(ahead)
        signal.sent = perf_counter()
        late_s = max(late_s, signal.sent - start - at)
        peer.put(signal)
    peer.finish()
    if len(waits_s) != len(arrivals):
        raise RuntimeError(f"{len(waits_s)} signals arrived, {len(arrivals)} were dispatched")
    handled = [worker.handled for worker in peer.dispatcher.stats().workers]
    cuts = quantiles(waits_s, n=100)
    return Turn(
        p50_ms=cuts[49] * 1e3,
        p99_ms=cuts[98] * 1e3,
        busiest_share=max(handled) / sum(handled),
        late_ms=late_s * 1e3,
    )
