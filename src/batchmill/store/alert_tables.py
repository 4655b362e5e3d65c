"""Reads and writes alerts: rules, states, episodes, and the queue of notifications."""

from __future__ import annotations

import json
from collections.abc import Sequence

from batchmill.store.alerts import (
    AlertBook,
    AlertChange,
    AlertChangeResult,
    AlertEpisode,
    AlertPhase,
    Notification,
    StoredAlert,
    StoredAlertRule,
)
from batchmill.store.sql.session import Condition, Row, Session, chunks, marks

TABLES = """
CREATE TABLE alert_rule (
    id {text} PRIMARY KEY, minute {whole} NOT NULL, definition {text} NOT NULL);
CREATE TABLE alert_state (
    rule {text} NOT NULL, entity_id {text} NOT NULL, entity_name {text} NOT NULL,
    phase {text} NOT NULL, since_s {whole} NOT NULL, notified_s {whole} NOT NULL,
    cleared {whole} NOT NULL, value {floating}, message {text} NOT NULL, labels {text} NOT NULL,
    PRIMARY KEY (rule, entity_id));
CREATE TABLE alert_episode (
    rule {text} NOT NULL, entity_id {text} NOT NULL, starts_s {whole} NOT NULL,
    ends_s {whole}, entity_name {text} NOT NULL, severity {text} NOT NULL, value {floating},
    message {text} NOT NULL, PRIMARY KEY (rule, entity_id, starts_s));
CREATE INDEX alert_episode_time ON alert_episode (starts_s);
CREATE TABLE alert_notification (
    seq {identity}, target {text} NOT NULL, content {text} NOT NULL)
"""
_STATE = "rule, entity_id, entity_name, phase, since_s, notified_s, cleared, value, message, labels"
_EPISODE = "rule, entity_id, entity_name, starts_s, ends_s, severity, value, message"


def create_tables(session: Session) -> None:
    """Create the tables; a step of the schema's migration."""
    dialect = session.dialect
    filled = TABLES.format(
        text=dialect.text,
        whole=dialect.whole,
        floating=dialect.floating,
        identity=dialect.identity,
    )
    for statement in filled.split(";"):
        session.run(statement)


def read_book(session: Session) -> AlertBook:
    """All rules and states."""
    rules = session.rows("SELECT id, minute, definition FROM alert_rule ORDER BY id")
    states = session.rows(f"SELECT {_STATE} FROM alert_state ORDER BY rule, entity_id")
    return AlertBook(
        {id_: StoredAlertRule(id_, minute, json.loads(text)) for id_, minute, text in rules},
        [_alert(row) for row in states],
    )


def _alert(row: Row) -> StoredAlert:
    rule, id_, name, phase, since_s, notified_s, cleared, value, message, labels = row
    return StoredAlert(
        rule=rule,
        entity_id=id_,
        entity_name=name,
        phase=AlertPhase(phase),
        since_s=since_s,
        notified_s=notified_s,
        cleared=cleared,
        value=value,
        message=message,
        labels=json.loads(labels),
    )


def read_episodes(
    session: Session,
    start_s: int,
    end_s: int,
    *,
    entity_ids: Sequence[str] | None = None,
    limit: int,
) -> list[AlertEpisode]:
    """The episodes that overlap a time, newest first; of some entities, or of all."""
    where = Condition("starts_s < ? AND (ends_s IS NULL OR ends_s >= ?)", (end_s, start_s))
    if entity_ids is not None:
        where &= Condition.one_of("entity_id", entity_ids)
    rows = session.rows(
        f"SELECT {_EPISODE} FROM alert_episode WHERE {where.sql} "
        "ORDER BY starts_s DESC, rule, entity_id LIMIT ?",
        [*where.params, limit],
    )
    return [
        AlertEpisode(
            rule=rule,
            entity_id=id_,
            entity_name=name,
            starts_s=starts_s,
            ends_s=ends_s,
            severity=severity,
            value=value,
            message=message,
        )
        for rule, id_, name, starts_s, ends_s, severity, value, message in rows
    ]


def apply_change(session: Session, change: AlertChange) -> AlertChangeResult:
    """Write what an evaluation changes, unless another process was quicker."""
    # Others that change alerts wait here until the end of the transaction.
    session.rows(f"SELECT value FROM meta WHERE key = 'alerts' {session.dialect.for_update}")
    if change.expected:
        positions: dict[str, int] = dict(session.rows("SELECT id, minute FROM alert_rule"))
        if any(positions.get(rule) != minute for rule, minute in change.expected.items()):
            return AlertChangeResult(applied=False)
    session.run_many("DELETE FROM alert_rule WHERE id = ?", [(rule,) for rule in change.removed])
    session.run_many("DELETE FROM alert_state WHERE rule = ?", [(rule,) for rule in change.removed])
    session.run_many(
        "INSERT INTO alert_rule (id, minute, definition) VALUES (?, ?, ?) ON CONFLICT (id) "
        "DO UPDATE SET minute = excluded.minute, definition = excluded.definition",
        [(rule.id, rule.minute, json.dumps(rule.definition)) for rule in change.rules],
    )
    session.run_many(
        "DELETE FROM alert_state WHERE rule = ? AND entity_id = ?",
        [*change.deleted, *((alert.rule, alert.entity_id) for alert in change.saved)],
    )
    session.run_many(
        f"INSERT INTO alert_state ({_STATE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                *(alert.rule, alert.entity_id, alert.entity_name, alert.phase.value),
                *(alert.since_s, alert.notified_s, alert.cleared, alert.value, alert.message),
                json.dumps(dict(alert.labels)),
            )
            for alert in change.saved
        ],
    )
    session.run_many(
        f"INSERT INTO alert_episode ({_EPISODE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (rule, entity_id, starts_s) DO UPDATE SET ends_s = excluded.ends_s",
        [
            (
                *(episode.rule, episode.entity_id, episode.entity_name, episode.starts_s),
                *(episode.ends_s, episode.severity, episode.value, episode.message),
            )
            for episode in change.episodes
        ],
    )
    if change.forget_before_s:
        session.run("DELETE FROM alert_episode WHERE ends_s < ?", (change.forget_before_s,))
    session.run_many(
        "INSERT INTO alert_notification (target, content) VALUES (?, ?)",
        [(new.target, json.dumps(new.content)) for new in change.notifications],
    )
    targets = sorted({new.target for new in change.notifications})
    return AlertChangeResult(True, _drop_oldest(session, targets, change.max_waiting))


def _drop_oldest(session: Session, targets: Sequence[str], most: int) -> dict[str, int]:
    dropped: dict[str, int] = {}
    for target in targets:
        rows = session.rows(
            "SELECT seq FROM alert_notification WHERE target = ? ORDER BY seq DESC "
            f"LIMIT {session.dialect.all_rows} OFFSET ?",
            (target, most),
        )
        if rows:
            dropped[target] = len(rows)
            settle(session, [seq for (seq,) in rows])
    return dropped


def read_notifications(session: Session, target: str, limit: int) -> list[Notification]:
    """What waits for a target, oldest first."""
    rows = session.rows(
        "SELECT seq, content FROM alert_notification WHERE target = ? ORDER BY seq LIMIT ?",
        (target, limit),
    )
    return [Notification(seq, target, json.loads(content)) for seq, content in rows]


def waiting(session: Session) -> dict[str, int]:
    """How many notifications wait, by target."""
    rows = session.rows("SELECT target, count(*) FROM alert_notification GROUP BY target")
    return {target: int(count) for target, count in rows}


def settle(session: Session, seqs: Sequence[int]) -> None:
    """Remove notifications that were sent, or given up."""
    for some in chunks(seqs):
        session.run(f"DELETE FROM alert_notification WHERE seq IN ({marks(some)})", some)


def drop_target(session: Session, target: str) -> int:
    """Remove what waits for a target that is gone; how many there were."""
    return session.run("DELETE FROM alert_notification WHERE target = ?", (target,))
