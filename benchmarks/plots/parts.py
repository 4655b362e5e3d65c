"""The plots of the in-process library: the queue, thresholds, flows, aggregation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.plots.model import Bar, Bars, Plot, goal_of, ranked

OURS = "batchmill"
PRODUCERS = 4
SEED = "seed: shortest queue, lowest index"
GOAL_CASE = "30% load, flows of 1 signal"


def queue(document: Mapping[str, Any]) -> Plot:
    """Throughput and the wait of an item beside other queues."""
    panels = []
    if "throughput" in document:
        panels += [_throughput(document["throughput"]), _ratios(document)]
    if "latency" in document:
        panels.append(_latency(document["latency"]))
    return Plot(title="The queue compared with its peers", panels=panels)


def _throughput(results: Mapping[str, Any]) -> Bars:
    rates: dict[str, list[float]] = {}
    for sample in results["samples"]:
        if sample["producers"] == PRODUCERS:
            rates.setdefault(sample["contender"], []).append(sample["million_items_per_s"])
    bars = [
        Bar(name=name, values=values, ours=name.startswith(OURS)) for name, values in rates.items()
    ]
    return Bars(
        title=f"Items through the queue, {PRODUCERS} producers",
        unit="million items/s",
        groups={"": ranked(bars)},
        better="more",
        log=True,
    )


def _ratios(document: Mapping[str, Any]) -> Bars:
    bars = [
        Bar(
            name=f"to {peer}",
            values=[ratio for producers, ratio in ratios.items() if producers != "median"],
            ours=True,
            goal=goal_of(document, f"{OURS} to {peer}"),
        )
        for peer, ratios in document["throughput"]["ratios"][OURS].items()
    ]
    return Bars(
        title="produce() of batchmill to each peer; 1, 4 and 16 producers",
        unit="times as many items/s",
        groups={"": ranked(bars)},
        goal_text="marks: goals, at least",
        better="more",
        log=True,
    )


def _latency(results: Mapping[str, Any]) -> Bars:
    cases = results["1000_items_per_s"]
    bars = [
        Bar(name=name, values=[turn["p99_us"] for turn in turns], ours=name.startswith(OURS))
        for name, turns in cases.items()
    ]
    (plain,) = [bar for bar in bars if bar.name == "queue.Queue"]
    return Bars(
        title="Latency from produce to handler, 99th percentile at 1,000 items/s",
        unit="µs",
        groups={"": ranked(bars, most_first=False)},
        goal=plain.middle,
        goal_text="line: the goal, queue.Queue's",
        better="less",
        log=True,
    )


def pressure(document: Mapping[str, Any]) -> Plot:
    """The micro-batcher beside its peers, and what thresholds cost."""
    panels = []
    for name, what in (("threads", "from threads"), ("asyncio", "from asyncio")):
        if name in document:
            panels.append(
                Bars(
                    title=f"The micro-batcher {what}",
                    unit="thousand items/s",
                    groups=_grouped(
                        document[name]["items_per_second"],
                        1e-3,
                        peers=("executor loop", "async-batcher"),
                    ),
                    goal_text="marks: goals, at least the executor loop"
                    + (" and async-batcher" if name == "asyncio" else ""),
                    better="more",
                )
            )
    if "cost" in document:
        panels.append(_cost(document))
    return Plot(title="Thresholds and the micro-batcher compared with their peers", panels=panels)


def _cost(document: Mapping[str, Any]) -> Bars:
    limit = goal_of(document, "submit with thresholds, below WARNING, to without")
    costs = {
        name: [nanoseconds / 1e3 for nanoseconds in values]
        for name, values in document["cost"]["nanoseconds"].items()
    }
    plain = Bar(name="", values=costs["no thresholds"]).middle
    bars = [
        Bar(
            name=name,
            values=values,
            ours=name != "no thresholds",
            goal=limit * plain if limit is not None and name == "below WARNING" else None,
        )
        for name, values in costs.items()
    ]
    return Bars(
        title="Cost of submit() with thresholds",
        unit="µs per call",
        groups={"": bars},
        goal_text="mark: the goal, 1.3 times the cost without" if limit is not None else "",
        better="less",
    )


def flows(document: Mapping[str, Any]) -> Plot:
    """Flow-ordered dispatch: throughput, and how long a signal waits."""
    panels = []
    if "throughput" in document:
        panels.append(
            Bars(
                title="Signals through the dispatcher",
                unit="thousand signals/s",
                groups=_grouped(
                    document["throughput"], 1e-3, peers=("executor per worker, by hash",)
                ),
                goal_text="marks: goals, at least the executors",
                better="more",
            )
        )
    if "wait" in document:
        waits = {
            case: {name: [turn["p99_ms"] for turn in turns] for name, turns in contestants.items()}
            for case, contestants in document["wait"]["turns"].items()
        }
        panels.append(
            Bars(
                title="How long a signal waits for its worker, 99th percentile",
                unit="ms",
                groups=_grouped(
                    waits, 1.0, ours="least load", peers=(SEED,), share=0.5, only=GOAL_CASE
                ),
                goal_text="mark: the goal, at most half of the shortest-queue rule",
                better="less",
                log=True,
            )
        )
    return Plot(title="Flow-ordered dispatch compared with its peers", panels=panels)


def aggregate(document: Mapping[str, Any]) -> Plot:
    """Aggregation in the process: throughput, and the growth with the metrics."""
    panels = []
    if "throughput" in document:
        rates = document["throughput"]["events_per_s"]
        bars = [
            Bar(
                name=name,
                values=[rate / 1e3 for rate in values],
                ours=name.startswith(OURS),
                goal=1e3 if name == f"{OURS} emit_many" else None,
            )
            for name, values in rates.items()
        ]
        panels.append(
            Bars(
                title="Events from produce to merged state, six metrics, 1,000 entities",
                unit="thousand events/s",
                groups={"": ranked(bars)},
                goal_text="mark: the goal, a million events/s",
                better="more",
                log=True,
            )
        )
        ours, peer = rates[f"{OURS} emit"], "prometheus_client"
        bars = [
            Bar(
                name=f"to {name}",
                values=[mine / theirs for mine, theirs in zip(ours, values, strict=True)],
                ours=True,
                goal=goal_of(document, f"emit to {peer}, per event") if name == peer else None,
            )
            for name, values in rates.items()
            if not name.startswith(OURS)
        ]
        panels.append(
            Bars(
                title="emit() of batchmill to each peer, within a repeat",
                unit="times as many events/s",
                groups={"": ranked(bars)},
                goal_text="mark: the goal, at least",
                better="more",
                log=True,
            )
        )
    if "growth" in document:
        bar = Bar(name="60 metrics to 6", values=document["growth"]["ratios"], ours=True, goal=4)
        panels.append(
            Bars(
                title="Time of ten times the metrics",
                unit="times the time",
                groups={"": [bar]},
                goal_text="mark: the goal, at most",
                better="less",
            )
        )
    return Plot(title="Aggregation in the process compared with its peers", panels=panels)


def _grouped(
    cases: Mapping[str, Mapping[str, list[float]]],
    scale: float,
    *,
    ours: str = OURS,
    peers: Sequence[str] = (),
    share: float = 1.0,
    only: str | None = None,
) -> dict[str, list[Bar]]:
    """A group for each case. The first of ours is to reach a share of the best of the peers."""
    groups: dict[str, list[Bar]] = {}
    for case, contestants in cases.items():
        reached = [median(contestants[peer]) for peer in peers if peer in contestants]
        goal = max(reached) * scale * share if reached and only in (None, case) else None
        bars = []
        for name, values in contestants.items():
            mine = name.startswith(ours)
            scaled = [value * scale for value in values]
            bars.append(Bar(name=name, values=scaled, ours=mine, goal=goal if mine else None))
            goal = None if mine else goal
        groups[case] = bars
    return groups
