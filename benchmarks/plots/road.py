"""The plots of the pipeline's parts: receivers, Kafka, pipeline, store, exporters, queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.plots.model import Bar, Bars, Curve, Plot, goal_of, of_goals

OURS = "batchmill"
MANY = ", 20 batches"


def pipeline(document: Mapping[str, Any]) -> Plot:
    """The pipeline beside other ways to the same metrics, and how it grows."""
    panels = []
    if "versus" in document:
        panels += _versus(document)
    growth = [bar for name in ("events", "metrics", "entities") for bar in _grown(document, name)]
    if growth:
        panels.append(
            Bars(
                title="Time for ten times as many events, metrics or entities",
                unit="times the time",
                groups={"": growth},
                goal_text="marks: goals, at most",
                better="less",
            )
        )
    if "small" in document:
        panels.append(_small(document))
    return Plot(title="The metrics pipeline compared with its peers", panels=panels)


def _versus(document: Mapping[str, Any]) -> list[Bars]:
    seconds = document["versus"]["seconds"]
    panels = []
    for many in (False, True):
        names = [name for name in seconds if name.endswith(MANY) is many]
        peer = f"textbook job{MANY if many else ''}"
        ours = f"{OURS}{MANY if many else ''}"
        limit = goal_of(document, f"events/s of {ours} to {peer}")
        bars = [
            Bar(
                name=name.removesuffix(MANY),
                values=seconds[name],
                ours=name == ours,
                goal=Bar(name="", values=seconds[peer]).middle / limit
                if name == ours and limit is not None
                else None,
            )
            for name in names
        ]
        panels.append(
            Bars(
                title=f"{document['versus']['events']:,} events to metrics in a store, "
                + ("in 20 batches" if many else "in one batch"),
                unit="s",
                groups={"": bars},
                goal_text=f"mark: the goal, {limit:g} times as fast as the textbook job"
                if limit is not None
                else "",
                better="less",
            )
        )
    return panels


def _grown(document: Mapping[str, Any], name: str) -> list[Bar]:
    growth = document.get(name)
    if growth is None:
        return []
    bars = []
    for larger, smaller in growth["steps"].items():
        if "mild" in larger:  # for the record: more rows to store as well
            continue
        rounds = zip(growth["seconds"][larger], growth["seconds"][smaller], strict=True)
        bars.append(
            Bar(
                name=f"{smaller.partition(' ')[0]} to {larger}",
                values=[more / less for more, less in rounds],
                ours=True,
                goal=goal_of(document, f"time of {larger} to {smaller}"),
            )
        )
    return bars


def _small(document: Mapping[str, Any]) -> Bars:
    small = document["small"]
    limit = goal_of(document, f"{small['spans']:,} spans, visible to committed")
    whole = Bar(name="all of it", values=small["seconds"], ours=True, goal=limit)
    parts = [Bar(name=name, values=values) for name, values in small["parts"].items()]
    return Bars(
        title=f"A micro-batch of {small['spans']:,} spans, from visible to committed",
        unit="s",
        groups={"": [whole, *parts]},
        goal_text="mark: the goal, at most" if limit is not None else "",
        better="less",
    )


def ingest(document: Mapping[str, Any]) -> Plot:
    """The receivers beside an OpenTelemetry Collector, and the lag of the whole road."""
    panels: list[Bars | Curve] = []
    if "receive" in document:
        cases = document["receive"]["cases"]

        def bars(figure: str, scale: float) -> dict[str, list[Bar]]:
            return {
                case["case"]: [
                    Bar(
                        name=name,
                        values=[turn[figure] * scale for turn in case[name]],
                        ours=name == OURS,
                    )
                    for name in case
                    if name != "case"
                ]
                for case in cases
            }

        panels.append(
            Bars(
                title="Processor time of the receiver",
                unit="seconds a million spans",
                groups=bars("cpu_us", 1.0),
                goal=goal_of(document, "HTTP: processor-seconds a million spans"),
                goal_text="line: the goal for HTTP, at most",
                better="less",
            )
        )
        panels.append(
            Bars(
                title="Spans acknowledged",
                unit="thousand spans/s",
                groups=bars("rate", 1e-3),
                better="more",
            )
        )
    if "road" in document:
        run = document["road"]["run"]
        panels.append(
            Curve(
                title=f"Sender to store at {run['asked']:,.0f} spans/s: age of the oldest segment",
                across="seconds of the run",
                unit="s",
                points=[(lag["at_s"], lag["oldest_s"]) for lag in run["lags"]],
            )
        )
    return Plot(title="The receivers, and the path to the store", panels=panels)


def kafka(document: Mapping[str, Any]) -> Plot:
    """Kafka instead of the spool."""
    roads = document["roads"]

    def steady(what: str, share: str, scale: float) -> list[Bar]:
        return [
            Bar(name=road, values=[turn["steady"][what][share] * scale for turn in turns])
            for road, turns in roads.items()
        ]

    rate = document["size"]["rate"]
    return Plot(
        title="Kafka compared with the spool",
        panels=[
            Bars(
                title=f"Response time for a sender at {rate:,.0f} spans/s",
                unit="ms",
                groups={share: steady("answer", share, 1e3) for share in ("p50", "p95", "p99")},
                better="less",
            ),
            Bars(
                title="From sent to committed",
                unit="s",
                groups={
                    share: steady("sent_to_committed", share, 1.0)
                    for share in ("p50", "p95", "p99")
                },
                better="less",
            ),
            Bars(
                title="Throughput into the store at full load",
                unit="thousand spans/s",
                groups={
                    "full load": [
                        Bar(name=road, values=[turn["through"] / 1e3 for turn in turns])
                        for road, turns in roads.items()
                    ]
                },
                better="more",
            ),
        ],
    )


def export(document: Mapping[str, Any]) -> Plot:
    """The cost of exporters for a micro-batch."""
    cost = document["cost"]
    names = list(cost["seconds"])
    shares = {
        name: [
            100 * outbox / seconds
            for outbox, seconds in zip(cost["outbox"][name], cost["seconds"][name], strict=True)
        ]
        for name in names
    }
    return Plot(
        title="Cost of exporters for the pipeline",
        panels=[
            Bars(
                title=f"A micro-batch of {cost['spans']:,} spans",
                unit="s",
                groups={
                    "": [
                        Bar(name=name, values=cost["seconds"][name], ours=name != names[0])
                        for name in names
                    ]
                },
                better="less",
            ),
            Bars(
                title="Share of the outbox in that time",
                unit="%",
                groups={"": [Bar(name=name, values=shares[name], ours=True) for name in names[1:]]},
                goal=goal_of(document, f"share of a micro-batch, {names[1]}"),
                goal_text="line: the goal, at most",
                better="less",
            ),
        ],
    )


def commits(document: Mapping[str, Any]) -> Plot:
    """Commits by parts compared with commits of whole batches, and with the code before."""
    sizes = {f"{int(rows):,} rows": ways for rows, ways in document["commits"].items()}
    one, *others = (way for way in next(iter(sizes.values())) if not way.startswith("before"))
    panels = [
        Bars(
            title=f"Commit time with {', '.join(others)}, relative to a commit as a whole",
            unit="times the time",
            groups={
                "": [
                    Bar(name=size, values=ways[other]["ratios"], ours=True)
                    for size, ways in sizes.items()
                    for other in others
                ]
            },
            goal=1.0,
            goal_text=f"line: {one}",
            better="less",
        ),
        Bars(
            title="Commit time",
            unit="s",
            groups={
                size: [
                    Bar(name=way, values=timing["s"], ours=way in others)
                    for way, timing in ways.items()
                ]
                for size, ways in sizes.items()
            },
            better="less",
            log=True,
        ),
    ]
    if "rates_to_old" in document:
        panels.append(_rates_to_old(document))
    return Plot(title="Large batches into PostgreSQL", panels=panels)


def _rates_to_old(document: Mapping[str, Any]) -> Bars:
    goals = document["goals"]
    bars = []
    for rows, rates in document["rates_to_old"].items():
        size = f"{int(rows):,} "
        limits = [goal["limit"] for goal in goals if goal["what"].startswith(size)]
        bars.append(
            Bar(name=f"{size}rows", values=rates, ours=True, goal=limits[0] if limits else None)
        )
    return Bars(
        title="Rate of 2 tasks to that of the code before them",
        unit="times the rate",
        groups={"": bars},
        goal_text="mark: the goal, at least" if goals else "",
        better="more",
    )


def query(document: Mapping[str, Any]) -> Plot:
    """The query of the overview page, sent to the API and to DuckDB over the raw events."""
    title = "The query of the overview page"
    if "ms" not in document:
        return of_goals(title, document)
    limits = [float(goal["limit"]) for goal in document.get("goals", [])]
    bars = [
        Bar(name=name, values=values, ours="DuckDB" not in name)
        for name, values in document["ms"].items()
    ]
    panel = Bars(
        title="500 services over 24 hours, time to the complete response",
        unit="ms",
        groups={"": bars},
        goal=limits[0] if limits else None,
        goal_text="line: the goal, at most" if limits else "",
        better="less",
        log=max(bar.middle for bar in bars) > 20 * min(bar.middle for bar in bars),
    )
    return Plot(title=title, panels=[panel])
