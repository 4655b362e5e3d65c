"""The plots of whole runs: kept spans, names without end, checkpoints with a long past."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.plots.model import Bar, Bars, Curve, Curves, Plot, goal_of

OURS = "batchmill"


def traces(document: Mapping[str, Any]) -> Plot:
    """Queries of kept spans beside DuckDB, and what keeping costs."""
    panels: list[Bars | Curve | Curves] = []
    if "queries" in document:
        queries = document["queries"]
        spans = queries["kept"]["spans"]
        panels.append(
            Bars(
                title=f"Queries of {spans:,} kept spans of {queries['hours']:g} hours",
                unit="ms",
                groups={
                    query["name"].replace("search of the last hour", "search"): [
                        Bar(
                            name=OURS,
                            values=query["ms"],
                            ours=True,
                            goal=goal_of(document, f"{query['name']}, median"),
                        ),
                        Bar(name="DuckDB", values=query["duckdb_ms"]),
                    ]
                    for query in queries["queries"]
                },
                goal_text="marks: goals, at most",
                better="less",
                log=True,
            )
        )
    if "batch" in document:
        panels += _cost_of_keeping(document["batch"])
    return Plot(title="Kept spans: queries, and what keeping costs", panels=panels)


def _cost_of_keeping(batch: Mapping[str, Any]) -> list[Bars]:
    def values(name: str, figure: str) -> list[float]:
        return [turn[figure] for turn in batch[name]]

    off = Bar(name="", values=values("off", "seconds"))
    return [
        Bars(
            title=f"Time of the batches of {batch['spans']:,} spans",
            unit="s",
            groups={
                "": [
                    Bar(name="spans not kept", values=off.values),
                    Bar(
                        name="spans kept",
                        values=values("on", "seconds"),
                        ours=True,
                        goal=1.1 * off.middle,
                    ),
                ]
            },
            goal_text="mark: the goal, at most 1.1 times as long",
            better="less",
        ),
        Bars(
            title="Their processor time, and that of the thread that sorts",
            unit="s",
            groups={
                "": [
                    Bar(name="batches", values=values("off", "cpu_s")),
                    Bar(
                        name="sorting",
                        values=values("on", "sorting_s"),
                        ours=True,
                        goal=0.1 * Bar(name="", values=values("off", "cpu_s")).middle,
                    ),
                ]
            },
            goal_text="mark: the goal, at most a tenth of the batches",
            better="less",
        ),
    ]


def cardinality(document: Mapping[str, Any]) -> Plot:
    """A whole run with names without end: memory, store and pages over time."""
    samples = [*document["samples"], *document["afterwards"]]
    across = "seconds of the run"

    def line(figure: str, name: str | None = None) -> Sequence[tuple[float, float]]:
        return [
            (sample["at_s"], sample[figure] if name is None else sample[figure][name])
            for sample in samples
            if name is None or name in sample[figure]
        ]

    processes = sorted({name for sample in samples for name in sample["rss_mib"]})
    return Plot(
        title="Names without end",
        panels=[
            Curves(
                title="Memory of each process, MiB",
                across=across,
                unit="",
                lines={name: line("rss_mib", name) for name in processes},
            ),
            Curves(
                title="The store, MiB",
                across=across,
                unit="",
                lines={"store": line("store_mib")},
            ),
            Curves(
                title="Entities in the store",
                across=across,
                unit="",
                lines={"entities": line("entities")},
            ),
            Curves(
                title="Time of a page, s",
                across=across,
                unit="",
                lines={page: line("pages_s", page) for page in samples[0]["pages_s"]},
            ),
        ],
    )


def checkpoint(document: Mapping[str, Any]) -> Plot:
    """Starts with a new checkpoint, and with those that have a long past."""
    starts = document["starts"]
    new = starts[0]["checkpoint"]

    def bars(figure: str) -> dict[str, list[Bar]]:
        return {
            "": [
                Bar(
                    name=start["checkpoint"],
                    values=start[figure] if isinstance(start[figure], list) else [start[figure]],
                    ours=start["checkpoint"] != new,
                )
                for start in starts
            ]
        }

    limit = goal_of(document, f"{starts[1]['checkpoint']}: start to the first commit")
    return Plot(
        title=f"Checkpoints: a new one, and one of {document['names']:,} segments",
        panels=[
            Bars(
                title="From the start of the process to the first commit",
                unit="s",
                groups=bars("start_s"),
                goal=limit,
                goal_text="line: the goal, at most" if limit is not None else "",
                better="less",
            ),
            Bars(
                title="Peak memory of the driver's Python",
                unit="MiB",
                groups=bars("driver_mib"),
                better="less",
            ),
            Bars(title="Peak memory of the JVM", unit="MiB", groups=bars("jvm_mib"), better="less"),
            Bars(
                title="A batch, from a segment in the spool to its commit",
                unit="s",
                groups=bars("batches_s"),
                better="less",
            ),
        ],
    )
