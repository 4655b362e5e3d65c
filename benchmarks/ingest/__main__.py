"""Measure the OTLP receivers, and the whole path from a sender to the store.

    python -m benchmarks.ingest [--quick] [--only receive,road,...] [--seconds N] [--rate N]

Prints tables and the goals with the measured values, and writes all results as JSON. A missed goal
is reported; the exit code is still 0. ``road`` (the whole path)
needs Java, the other parts do not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks import RESULTS
from benchmarks.ingest import decode, flows, processes, receive, road, road_result
from benchmarks.ingest.receiver import PYTHON
from benchmarks.ingest.senders import JSON
from benchmarks.kit.goals import Goal, at_least, at_most
from benchmarks.kit.machine import machine, machine_line
from benchmarks.kit.report import Result, Table, say, write_json

DEFAULT_JSON = RESULTS / "ingest.json"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is done."""

    rounds: int
    turn_s: float
    memory_s: float
    half_s: float
    road_s: float
    warm_up_s: float
    step_s: float
    steps: int
    rate: float | None
    flows_s: float
    flows_rate: float
    flows_turn_s: float


FULL = Size(
    rounds=3, turn_s=8, memory_s=600, half_s=30, road_s=300, warm_up_s=60, step_s=45,
    steps=10, rate=None, flows_s=60, flows_rate=1_000, flows_turn_s=8,
)  # fmt: skip
"""Half an hour."""
QUICK = Size(
    rounds=1, turn_s=2, memory_s=9, half_s=4, road_s=30, warm_up_s=20, step_s=0,
    steps=0, rate=2_000, flows_s=10, flows_rate=1_000, flows_turn_s=3,
)  # fmt: skip
"""Minutes: to see that all runs, not to quote."""

PARTS: Mapping[str, Callable[[Size], Result]] = {
    "receive": lambda size: receive.measure(rounds=size.rounds, seconds=size.turn_s),
    "decode": lambda size: decode.measure(rounds=size.rounds),
    "processes": lambda size: processes.measure(rounds=size.rounds, seconds=size.turn_s),
    "steady": lambda size: receive.measure_steady(seconds=size.memory_s, half_s=size.half_s),
    "flows": lambda size: flows.measure(
        seconds=size.flows_s,
        rate=size.flows_rate,
        rounds=size.rounds,
        round_s=size.flows_turn_s,
    ),
    "road": lambda size: road.measure(
        seconds=size.road_s,
        warm_up_s=size.warm_up_s,
        step_s=size.step_s,
        steps=size.steps,
        rate=size.rate,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, print it, write it down."""
    options = _parser().parse_args(arguments)
    size = QUICK if options.quick else FULL
    if options.seconds:
        size = replace(size, road_s=options.seconds)
    if options.rate:
        size = replace(size, rate=options.rate)
    started = perf_counter()
    print(machine_line())
    results: dict[str, Result] = {}
    for name in options.only:
        results[name] = PARTS[name](size)
        for table in results[name].tables():
            print("\n" + table.render(), flush=True)
    goals = [goal for result in results.values() for goal in _goals(result)]
    caption = "Medians over the rounds. A missed goal does not fail the run."
    rows = [goal.row() for goal in goals]
    print("\n" + Table("Goals", caption, ["goal", "limit", "measured", ""], rows).render())
    document = {
        "machine": machine(),
        "quick": options.quick,
        "size": vars(size),
        "goals": [goal.as_json() for goal in goals],
        **{name: result.as_json() for name, result in results.items()},
    }
    write_json(options.json, document)
    say(f"took {perf_counter() - started:.0f} s; results are in {options.json}")
    return 0


def _goals(result: Result) -> Iterator[Goal]:
    match result:
        case receive.Receive():
            busy = receive.BUSY
            cost, rate = median(result.costs(busy)), median(result.rates(busy))
            yield at_most("HTTP: processor-seconds a million spans", cost, 7, " s")
            yield at_least("HTTP: acknowledged spans/s", rate, 150_000, "")
            json = median(result.gains((JSON, receive.MANY), PYTHON))
            yield at_least("HTTP with JSON: rate to that of decoding in Python", json, 3)
        case processes.Processes():
            for decoder in result.turns:
                what = f"two processes to one, {decoder} decoder"
                yield at_least(what, result.ratio(decoder), processes.GOAL)
        case receive.Steady():
            yield at_most("the receiver's memory, last third to middle", result.growth(), 1.05)
            linger = result.half.p99 / receive.LINGER_S
            yield at_most("p99 response to the linger, at half load", linger, 2)
        case flows.Flows():
            best = max(result.gains())
            yield at_least("flow order (stays out if it adds less)", best, 1, " points")
        case road_result.Road():
            run = result.run
            yield at_most("the lag, last third to middle", run.growth("oldest_s"), 1.25)
            yield at_most("unread bytes, last third to middle", run.growth("bytes"), 1.25)
            counted = result.counted / result.acknowledged
            yield at_least("spans counted to acknowledged", counted, 1)
            yield at_most("spans counted to acknowledged", counted, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ingest",
        description="measure the receivers, and the whole path to the store",
    )
    parser.add_argument("--quick", action="store_true", help="a run of minutes, too short to quote")
    parser.add_argument(
        "--only",
        type=_names,
        default=list(PARTS),
        metavar="NAME,NAME",
        help=f"some of: {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="length of the part road; default 300"
    )
    parser.add_argument(
        "--rate", type=float, metavar="N", help="spans per second of the part road; default: search"
    )
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="file for the results")
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
