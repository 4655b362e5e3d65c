"""Alerts: the rules, what fires or is pending, and what fired in a range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from batchmill.sources import bucket_end
from batchmill.store import AlertPhase, Snapshot
from batchmill.web.api.parameters import TimeRange, whole

PARAMS = ("from", "to", "grain", "entity", "limit")
MOST = 1_000
"""Episodes of the history."""


def alerts(snapshot: Snapshot, time_range: TimeRange, params: Mapping[str, str]) -> dict[str, Any]:
    """All alerts; with ``entity``, those of one entity."""
    book = snapshot.alerts()
    entity = params.get("entity")
    limit = whole(params, "limit", 200, 1, MOST)
    ids = None if entity is None else _ids(snapshot, entity)
    current = [
        alert
        for alert in book.alerts
        if alert.phase is not AlertPhase.SILENT and (ids is None or alert.entity_id in ids)
    ]
    episodes = snapshot.alert_episodes(
        time_range.start_s,
        time_range.end_s,
        entity_ids=None if ids is None else sorted(ids),
        limit=limit + 1,
    )
    shown = {alert.entity_id for alert in current} | {one.entity_id for one in episodes}
    kinds = _kinds(snapshot, shown)
    minutes = [rule.minute for rule in book.rules.values()]
    return {
        "from": time_range.start_s,
        "to": time_range.end_s,
        "evaluated_s": int(bucket_end(max(minutes)).timestamp()) if minutes else None,
        "rules": [
            {
                "id": rule.id,
                "condition": str(rule.definition.get("condition", "")),
                "severity": str(rule.definition.get("severity", "")),
                "metrics": list(rule.definition.get("metrics", ())),
                "firing": _count(book.alerts, rule.id, AlertPhase.FIRING),
                "pending": _count(book.alerts, rule.id, AlertPhase.PENDING),
            }
            for rule in book.rules.values()
        ],
        "alerts": [
            {
                **asdict(alert),
                **_entity(alert.entity_id, kinds),
                "phase": alert.phase.value,
                "severity": alert.labels.get("severity", ""),
                "is_notified": alert.is_notified,
            }
            for alert in sorted(current, key=lambda alert: (-alert.since_s, alert.rule))
        ],
        "history": [
            {**asdict(episode), **_entity(episode.entity_id, kinds)} for episode in episodes[:limit]
        ],
        "more": len(episodes) > limit,
    }


def _count(alerts: Any, rule: str, phase: AlertPhase) -> int:
    return sum(alert.rule == rule and alert.phase is phase for alert in alerts)


def _ids(snapshot: Snapshot, entity: str) -> set[str]:
    """The ids of an entity by id or name."""
    return {known.id for known in snapshot.find(id_or_name=entity)} or {entity}


def _kinds(snapshot: Snapshot, ids: set[str]) -> dict[str, str]:
    """The kind of each entity, by id; entities that are gone are left out."""
    kinds: dict[str, str] = {}
    for entity in snapshot.find(ids=sorted(ids)) if ids else ():
        if kinds.get(entity.id) in (None, "given"):  # an id of one's own may look like another's
            kinds[entity.id] = entity.kind
    return kinds


def _service(kind: str | None, id_: str) -> str | None:
    """The id of the service that an entity is, or belongs to."""
    if kind in ("service", "instance", "endpoint"):
        return id_.partition("_")[0]
    return id_.partition("-")[2] if kind == "service_relation" else None


def _entity(id_: str, kinds: Mapping[str, str]) -> dict[str, str | None]:
    """What only the store's entities tell: the kind, and the service."""
    kind = kinds.get(id_)
    return {"entity_kind": kind, "service_id": _service(kind, id_)}
