"""Measure the whole path of spans, from a request to the store: its cost, a flood, its latency.

    python -m benchmarks.road [--quick] [--only PART,…] [--spans N] [--batches N]

``cost``: processor seconds for a million spans of the receiver, of the pipeline and of both, and of
an OpenTelemetry Collector with spanmetrics that is sent the same requests. Processor time hardly
depends on what else the machine does; seconds do. ``flood``: how fast a pipeline reads a spool with
millions of spans. ``backlog``: the same beside live traffic, with a heap of 1 GiB, and how old the
newest data in the store is meanwhile; ``short_backlog``: with a million. ``latency``: 3,000 spans/s
in small requests to the real receiver, and the time from sent to committed. A missed goal is
reported; the exit code is still 0. Needs Java.

A full run writes ``results/road.json``; one of some parts leaves the others there as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks import RESULTS
from benchmarks.ingest import road as ingest_road
from benchmarks.ingest.road_result import Road
from benchmarks.ingest.senders import percentile
from benchmarks.kit.command import OtherParts
from benchmarks.kit.goals import Goal, at_least, at_most
from benchmarks.kit.machine import machine, machine_line
from benchmarks.kit.report import Result, Table, say, write_json
from benchmarks.road import backlog, cost, flood
from benchmarks.road.cost import REQUEST_SPANS

DEFAULT_JSON = RESULTS / "road.json"
LATENCY_RATE, LATENCY_SPANS = 3_000.0, 100
"""Spans a second, and in a request."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is done."""

    spans: int
    """Of a batch whose cost is measured."""
    batches: int
    flood_spans: int
    backlog_spans: int
    short_backlog_spans: int
    latency_s: float
    warm_up_s: float


FULL = Size(
    spans=1_000_000,
    batches=4,
    flood_spans=5_000_000,
    backlog_spans=10_000_000,
    short_backlog_spans=1_000_000,
    latency_s=120,
    warm_up_s=30,
)
"""A quarter of an hour."""
QUICK = Size(
    spans=50_000,
    batches=2,
    flood_spans=200_000,
    backlog_spans=1_000_000,
    short_backlog_spans=200_000,
    latency_s=15,
    warm_up_s=10,
)
"""Three minutes: to see that all runs, not to quote."""

PARTS: Mapping[str, Callable[[Size], Result]] = {
    "cost": lambda size: cost.measure(spans=size.spans, batches=size.batches),
    "flood": lambda size: flood.measure(spans=size.flood_spans),
    "backlog": lambda size: backlog.measure(spans=size.backlog_spans),
    "short_backlog": lambda size: backlog.measure(spans=size.short_backlog_spans),
    "latency": lambda size: ingest_road.measure(
        seconds=size.latency_s,
        warm_up_s=size.warm_up_s,
        step_s=0,
        steps=0,
        rate=LATENCY_RATE,
        spans=LATENCY_SPANS,
    ),
}


SIZES: Mapping[str, Sequence[str]] = {
    "cost": ("spans", "batches"),
    "flood": ("flood_spans",),
    "backlog": ("backlog_spans",),
    "short_backlog": ("short_backlog_spans",),
    "latency": ("latency_s", "warm_up_s"),
}
"""Which of the sizes are those of a part."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, print it, and write it to ``--json``."""
    options = _parser().parse_args(arguments)
    target = options.json
    if target is None and not (options.quick or options.spans or options.batches):
        target = DEFAULT_JSON
    others = OtherParts.of(target, options.only, PARTS, quick=options.quick)
    size = QUICK if options.quick else FULL
    size = replace(size, spans=options.spans or size.spans, batches=options.batches or size.batches)
    started = perf_counter()
    print(machine_line(), flush=True)
    results: dict[str, Result] = {}
    for name in options.only:
        results[name] = PARTS[name](size)
        for table in results[name].tables():
            print("\n" + table.render(), flush=True)
    goals = [goal for result in results.values() for goal in _goals(result)]
    caption = "On two cores. A missed goal does not fail the run."
    rows = [goal.row() for goal in goals]
    print("\n" + Table("Goals", caption, ["goal", "limit", "measured", ""], rows).render())
    if target:
        document = {
            "machine": machine(),
            "quick": options.quick,
            "size": {name: vars(size)[name] for part in options.only for name in SIZES[part]},
            "goals": [goal.as_json() for goal in goals],
            **{name: result.as_json() for name, result in results.items()},
        }
        write_json(target, others.with_results(document))
    say(f"took {perf_counter() - started:.0f} s")
    return 0


def _goals(result: Result) -> Iterator[Goal]:
    match result:
        case cost.Cost():
            warm = median(turn.pipeline for turn in result.warm)
            road = median(turn.road for turn in result.warm)
            yield at_most("pipeline, warm: processor seconds a million spans", warm, 20, " s")
            first = result.first.pipeline
            yield at_most("pipeline, first batch of a process: the same", first, 40, " s")
            yield at_most("receiver and pipeline, warm: the same", road, 27, " s")
        case flood.Flood():
            yield at_least("spans/s from a full spool", result.rate, 50_000, "")
        case backlog.Backlog():
            name = f"a backlog of {result.spans:,} spans"
            counted = result.counted / (result.spans + result.live)
            what = f"{name}: spans counted to those sent"
            yield at_least(what, counted, 1)
            yield at_most(what, counted, 1)
            what = f"{name}: starts of the pipeline"
            yield at_most(what, result.starts, 1, "")
            # The first batch compiles and loads what all others use.
            oldest = max(result.ages[1:], default=None)
            limit = backlog.TARGET_S + 5
            what = f"{name}: age of the newest data after the first batch"
            yield at_most(what, oldest, limit, " s")
        case Road():
            times = result.run.times()
            for name, share, limit in (("p50", 0.5, 2.0), ("p95", 0.95, 3.5)):
                value = percentile(times, share) if times else None
                what = f"sent to committed at 3,000 spans/s, {name}"
                yield at_most(what, value, limit, " s")


def _whole_requests(text: str) -> int:
    if not text.isdecimal() or not int(text) or int(text) % REQUEST_SPANS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of {REQUEST_SPANS}")
    return int(text)


def _batches(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not 2 or more: the first is not a warm one")
    return int(text)


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PARTS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.road",
        description="measure the whole path of spans, from a request to the store",
    )
    parser.add_argument("--quick", action="store_true", help="a run of minutes, not to quote")
    parser.add_argument(
        "--only",
        type=_names,
        default=list(PARTS),
        metavar="NAME,NAME",
        help=f"some of: {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--spans",
        type=_whole_requests,
        metavar="N",
        help=f"of a batch of the part cost, a multiple of {REQUEST_SPANS}; default {FULL.spans}",
    )
    parser.add_argument(
        "--batches", type=_batches, metavar="N", help=f"of the part cost; default {FULL.batches}"
    )
    parser.add_argument(
        "--json",
        type=Path,
        help=f"file for the results; default: {DEFAULT_JSON.name} in benchmarks/results, and none "
        "for a run with --quick, --spans or --batches",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
