"""The status of several receivers as if they were one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from batchmill.spool import Level

Status = Mapping[str, Any]

_COUNTERS = (
    *("received_spans", "acknowledged_spans", "unacknowledged_spans"),
    *("rejected", "cuts", "refused_requests", "discarded_requests", "requests"),
)
_IN_PROGRESS = ("requests_under_way", "bytes_under_way", "queue_rows")
_CONNECTIONS = ("connections", "grpc_connections")
_OF_THE_SPOOL = ("unread_bytes", "unread_segments")
"""Every receiver measures the same folder."""
_UNREAD = "unread bytes"
"""The name of the measure of the same."""
_DIED = "process died"


def total_status(statuses: Sequence[Status], past: Sequence[Status] = ()) -> dict[str, Any]:
    """The sum of the statuses of receivers that run, and of the counters of those that ended.

    ``past`` are results of :func:`ended_status`. The level is the highest of all: some senders meet
    it.
    """
    everyone = [*past, *statuses]
    result: dict[str, Any] = {name: _sum(everyone, name, 0) for name in _COUNTERS[:3]}
    result |= {name: _sum(everyone, name, {}) for name in _COUNTERS[3:]}
    none_open = {"open": 0, "accepted": 0, "refused": 0}
    result |= {name: _sum(everyone, name, none_open) for name in _CONNECTIONS}
    result |= {name: _sum(statuses, name, 0) for name in _IN_PROGRESS}
    for name in _OF_THE_SPOOL:
        measured = [status[name] for status in statuses if name in status]
        result |= {name: max(measured)} if measured else {}
    worst = max(statuses, key=lambda status: Level[status["level"]], default=None)
    result["level"] = "NORMAL" if worst is None else worst["level"]
    result["forwarded"] = _sum(everyone, "forwarded", {})
    if worst is not None:
        result["decoder"] = worst["decoder"]
        result["thresholds"] = {
            **worst["thresholds"],
            "measures": _by_name(
                (measure for status in statuses for measure in status["thresholds"]["measures"]),
                _add_measures,
            ),
        }
    for name, merge in (("queues", _add_queues), ("levels", _add_levels)):
        components = (part for status in statuses for part in status.get(name, ()))
        result[name] = _by_name(components, merge)
    return result


def ended_status(status: Status) -> dict[str, Any]:
    """The counters of a receiver that has ended, by its last status.

    What was in progress then was not acknowledged, as far as is known.
    """
    settled = status["acknowledged_spans"] + status["unacknowledged_spans"]
    in_progress = max(0, status["received_spans"] - settled)
    counters = {name: status[name] for name in _COUNTERS}
    counters["unacknowledged_spans"] += in_progress
    forwarded = {}
    for signal, stats in status["forwarded"].items():
        lost = {_DIED: stats["in_hand"]} if stats["in_hand"] else {}
        dropped = add(stats["dropped"], lost)
        forwarded[signal] = {**stats, "dropped": dropped, "in_hand": 0, "in_hand_bytes": 0}
    connections = {name: {**status[name], "open": 0} for name in _CONNECTIONS}
    return {**counters, **connections, "forwarded": forwarded}


def add(first: Any, *others: Any) -> Any:
    """Numbers added, objects key by key, lists joined; of texts the first."""
    result = first
    for other in others:
        if isinstance(result, Mapping):
            result = {
                key: add(*(part[key] for part in (result, other) if key in part))
                for key in (*result, *(key for key in other if key not in result))
            }
        elif isinstance(result, (int, float, list)):
            result = result + other
    return result


def _sum(statuses: Iterable[Status], name: str, start: Any) -> Any:
    return add(start, *(status[name] for status in statuses))


def _by_name(
    parts: Iterable[Mapping[str, Any]], merge: Callable[[Any, Any], dict[str, Any]]
) -> list[dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for part in parts:
        name = part["name"]
        merged[name] = merge(merged[name], part) if name in merged else dict(part)
    return list(merged.values())


def _add_measures(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    if one["name"] == _UNREAD:
        return max(one, other, key=lambda measure: int(measure["value"]))
    return {**add(one, other), "name": one["name"]}


def _add_queues(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {**add(one, other), "name": one["name"], "last_moves": []}


def _add_levels(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    worst = max(one["level"], other["level"], key=lambda level: Level[level])
    return {**add(one, other), "name": one["name"], "level": worst}
