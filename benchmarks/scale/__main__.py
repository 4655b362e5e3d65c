"""Measure whether the pipeline scales: the driver's part of the work, and the work of executors.

    python -m benchmarks.scale [--quick] [--only driver,executors,tasks,store,shards]

Runs a standalone Spark cluster of one-core executors and PostgreSQL servers on the loopback, and
reads the processor time of each process: unlike seconds by the clock it hardly depends on how many
cores the machine has. ``driver``: the driver's time and memory against groups and metrics.
``executors``: the work of 1, 2 and 4 executors for the same events. ``tasks``: what more tasks
cost, as a larger cluster has them. ``store``: what PostgreSQL takes for new rows and for known
ones. ``shards``: the parts of a batch in two databases. A missed goal is reported; the exit code is
still 0. Needs Java and PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.kit.command import Benchmark
from benchmarks.kit.goals import Goal, at_most
from benchmarks.kit.report import Result, Table, spread
from benchmarks.scale import shards
from benchmarks.scale.batches import Case, Turns, run_case, warm_up
from benchmarks.scale.cluster import (
    DRIVER_COMPILER,
    DRIVER_JVM,
    DRIVER_PYTHON,
    EXECUTOR_COMPILERS,
    EXECUTORS,
    POSTGRES,
    servers,
    session,
)

MILLION = 1_000_000
COMPILERS = (
    "Without the time of the JVMs' compilers, which is spent once; with it the executors took"
    " {executors:.2f} and the driver {driver:.2f} s more."
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is done."""

    events: int
    groups: Sequence[int]
    """From few to many."""
    share_groups: int
    """At which the driver's part of all work is looked at, and the store's cost."""
    batches: int
    warm_ups: int
    executors: Sequence[int]
    spread_events: Sequence[int]
    """Events of a batch, where the number of executors is what is looked at; the last counts."""
    tasks: Sequence[int]


FULL = Size(
    events=MILLION,
    groups=(10_000, 100_000, 1_000_000),
    share_groups=500_000,
    batches=3,
    warm_ups=8,
    executors=(1, 2, 4),
    spread_events=(MILLION, 5 * MILLION),
    tasks=(16, 64, 128),
)
QUICK = Size(
    events=20_000,
    groups=(1_000, 20_000),
    share_groups=10_000,
    batches=1,
    warm_ups=1,
    executors=(1, 2),
    spread_events=(20_000,),
    tasks=(16, 24, 32),
)
TWO = 2
"""Executors, where their number is not what is looked at."""


@dataclass
class Cases:
    """Batches of several kinds."""

    title: str
    caption: str
    by_name: dict[str, Turns] = field(default_factory=dict)

    def tables(self) -> list[Table]:
        """What to print."""
        lines = []
        compilers: dict[str, list[float]] = {DRIVER_COMPILER: [], EXECUTOR_COMPILERS: []}
        for name, turns in self.by_name.items():
            for role, values in compilers.items():
                values.append(turns.cpu(role))
            memory, work = turns.memory, [turns.cpu(role) for role in (EXECUTORS, POSTGRES)]
            lines.append(
                [
                    name,
                    *(f"{turns.cpu(role):.2f}" for role in (DRIVER_PYTHON, DRIVER_JVM)),
                    spread(turn.driver for turn in turns.turns),
                    *(f"{value:.2f}" for value in work),
                    f"{turns.turns[0].merged:,}",
                    f"{memory.python:.0f}, {memory.heap:.0f}, {memory.live:.0f}",
                ]
            )
        caption = COMPILERS.format(
            executors=median(compilers[EXECUTOR_COMPILERS]),
            driver=median(compilers[DRIVER_COMPILER]),
        )
        return [
            Table(
                self.title,
                f"{self.caption} Processor seconds of a warm batch, medians. {caption} MiB: the"
                " most that the driver's Python had, the most of its JVM's heap, and what of that"
                " was in use after the batch.",
                [
                    "batches",
                    "driver, Python",
                    "its JVM",
                    "both: range",
                    "executors",
                    "PostgreSQL",
                    "rows merged",
                    "driver's MiB",
                ],
                lines,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return {name: turns.as_json() for name, turns in self.by_name.items()}


class Growth(Cases):
    """What the driver takes."""


class Spread(Cases):
    """What executors take, by their number."""


class Tasks(Cases):
    """What more tasks take."""


class StoreCost(Cases):
    """What the store takes."""


def _run(result: Cases, cases: Mapping[str, Case], size: Size, executors: int = TWO) -> None:
    with servers(1) as (server,), session(executors, [server]) as running:
        warm_up(running, server.new_database(), batches=size.warm_ups)
        for name, case in cases.items():
            url = server.new_database()
            result.by_name[name] = run_case(running, url, case, batches=size.batches)


def measure_driver(size: Size) -> Growth:
    """Against groups, and against metrics."""
    result = Growth(
        "The driver's work and memory", f"{size.events:,} events a batch, {TWO} executors."
    )
    cases = [Case(size.events, groups) for groups in size.groups]
    cases.append(Case(size.events, size.groups[1], metrics=60))
    _run(result, {case.name: case for case in cases}, size)
    return result


def measure_executors(size: Size) -> Spread:
    """The same batches by several numbers of executors."""
    result = Spread("More executors", f"{size.groups[1]:,} groups, 6 metrics.")
    for count in size.executors:
        executors = f"{count} executor{'' if count == 1 else 's'}"
        cases = {
            f"{executors}, {events:,} events": Case(events, size.groups[1])
            for events in size.spread_events
        }
        _run(result, cases, size, count)
    return result


def measure_tasks(size: Size) -> Tasks:
    """The same batches in more tasks, as a cluster with so many cores would have them."""
    case = Case(size.events, size.groups[1], segments=max(size.tasks))
    result = Tasks(
        "More tasks",
        f"{size.events:,} events a batch, {case.name}, in {case.segments} segments; {TWO} executors"
        " that are given as many tasks as so many cores would be: for reading, and for committing.",
    )
    for count in size.tasks:
        conf = {"spark.default.parallelism": str(count)}
        with servers(1) as (server,), session(TWO, [server], conf) as running:
            warm_up(running, server.new_database(), batches=1)
            url = server.new_database()
            turns = run_case(running, url, case, batches=size.batches)
            result.by_name[f"{count} + {count} tasks"] = turns
    return result


def measure_store(size: Size) -> StoreCost:
    """Rows that are new, and rows that are there."""
    result = StoreCost(
        "PostgreSQL's work",
        f"{size.events:,} events a batch, {TWO} executors, no fsync. New: each batch has other"
        " minutes, so that only the rows of hours and days are known. Known: all are.",
    )
    cases = {
        "new rows": Case(size.events, size.share_groups),
        "known rows": Case(size.events, size.share_groups, again=True),
    }
    _run(result, cases, size)
    return result


def measure_shards(size: Size) -> shards.Sharded:
    """The parts of batches in one database, and in two."""
    with servers(2) as both, session(TWO, both) as running:
        one, two = both
        urls = [[one.new_database()], [one.new_database(), two.new_database()]]
        case = Case(size.events, size.groups[1])
        return shards.measure(running, urls, case, size.batches + 1)


def goals_of(results: Mapping[str, Result]) -> list[Goal]:
    """The goals that these results say something about."""
    goals: list[Goal] = []
    for result in results.values():
        match result:
            case Growth():
                goals += _growth_goals(list(result.by_name.values()))
            case Spread():
                goals.append(_spread_goal(result))
            case StoreCost():
                turns = result.by_name["new rows"]
                share = median(turn.share for turn in turns.turns) * 100
                what = f"driver's part of all work, {turns.case.groups:,} groups"
                goals.append(at_most(what, share, 5, " %"))
    return goals


def _spread_goal(result: Spread) -> Goal:
    """Most executors to fewest, in the largest batches."""
    largest = max(turns.case.events for turns in result.by_name.values())
    names = [name for name, turns in result.by_name.items() if turns.case.events == largest]
    fewest, most = names[0], names[-1]
    ratio = result.by_name[most].cpu(EXECUTORS) / result.by_name[fewest].cpu(EXECUTORS)
    what = f"executors' work, {most.split(',')[0]} to {fewest.split(',')[0]}, {largest:,} events"
    return at_most(what, ratio, 1.15)


def _growth_goals(all_turns: Sequence[Turns]) -> list[Goal]:
    *by_groups, sixty = all_turns
    fewest, most = by_groups[0], by_groups[-1]
    (six,) = (turns for turns in by_groups if turns.case.groups == sixty.case.groups)
    pairs = {
        f"{most.case.groups:,} groups to {fewest.case.groups:,}": (most, fewest),
        "60 metrics to 6": (sixty, six),
    }
    looks: Mapping[str, Callable[[Turns], float]] = {
        "driver's processor time": lambda turns: turns.driver,
        "the same, less what it takes when idle": lambda turns: turns.busy_driver,
        "peak memory of its Python": lambda turns: turns.memory.python,
        "peak of its JVM's heap": lambda turns: turns.memory.heap,
    }
    return [
        at_most(f"{what}, {pair}", look(larger) / look(smaller), 1.2)
        for pair, (larger, smaller) in pairs.items()
        for what, look in looks.items()
    ]


PARTS: Mapping[str, Callable[[Size], Result]] = {
    "driver": measure_driver,
    "executors": measure_executors,
    "tasks": measure_tasks,
    "store": measure_store,
    "shards": measure_shards,
}


def _parts_of(size: Size) -> dict[str, Callable[[], Result]]:
    def bound(measure: Callable[[Size], Result]) -> Callable[[], Result]:
        return lambda: measure(size)

    return {name: bound(measure) for name, measure in PARTS.items()}


BENCHMARK = Benchmark(
    name="scale",
    about="measure whether the pipeline scales with executors, and what the driver does",
    full=_parts_of(FULL),
    quick=_parts_of(QUICK),
    goals=goals_of,
    goals_caption="In processor time and memory. A missed goal does not fail the run.",
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.run())
