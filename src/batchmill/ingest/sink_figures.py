"""What a receiver tells of its spool, or topic: the level in force, why, and what waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from batchmill.ingest.intake import SinkStats
from batchmill.spool import Judgement, Measure

QUEUE_ROWS = "queue rows"
"""The measure of what waits in memory."""
SPOOL_QUEUE = "spool-"
"""What the names of a spool's micro-batchers begin with."""


def thresholds(judged: Judgement, measures: Sequence[Measure], stats: SinkStats) -> dict[str, Any]:
    """The level in force and what makes it, for the status."""
    told = {"level": judged.level.name, "why": judged.why}
    free = getattr(stats, "free_bytes", None)  # a topic has no disk of its own
    if free is not None:
        told["free_bytes"] = free
    return told | {"measures": [asdict(each) for each in measures]}


def sink_queues(
    found: list[dict[str, Any]], measures: Sequence[Measure], stats: SinkStats
) -> list[dict[str, Any]]:
    """All queues of ingest, what waits for the sink first: counted in spans, as its bound is.

    The spool's micro-batcher counts requests, and brings the load of its threads; a topic has no
    queue of ours.
    """
    rows = next((each for each in measures if each.name == QUEUE_ROWS), None)
    if rows is None:
        return found
    own = [each for each in found if each["name"].startswith(SPOOL_QUEUE)]
    refused = {"pressure": stats.refused_rows, "not stored": stats.failed_rows}
    sink = {
        "name": "spool" if own else "topic",
        "kind": "batcher",
        "unit": "spans",
        "depth": rows.value,
        "capacity": rows.critical,
        "partitions": [{"depth": rows.value, "capacity": rows.critical}],
        "threads": [thread for each in own for thread in each["threads"]],
        "moves": 0,
        "last_moves": [],
        "accepted": stats.submitted_rows,
        "rejected": {reason: n for reason, n in refused.items() if n},
    }
    return [sink, *(each for each in found if each not in own)]
