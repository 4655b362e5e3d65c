"""Streams: who writes which, and how far each has come."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import UTC, datetime
from typing import Any

from batchmill.store.sql.checkpoint import Exempt, StreamState, check_claim
from batchmill.store.sql.session import Session
from batchmill.store.types import Carry, Claim
from batchmill.store.views import StreamInfo


def claim(
    session: Session,
    stream: str,
    checkpoint_id: str,
    *,
    fresh: bool,
    committed: int | None,
    planned: int | Exempt | None,
) -> Claim:
    """Begin a new epoch of a stream, whose lock is held; in the transaction that is open."""
    known = stream_state(session, stream)
    check_claim(stream, known, checkpoint_id, fresh=fresh, committed=committed, planned=planned)
    epoch = known.epoch + 1 if known else 1
    if known:
        session.run(
            "UPDATE stream SET epoch = ?, holder = ? WHERE name = ?", (epoch, _me(), stream)
        )
    else:
        session.run(
            "INSERT INTO stream (name, checkpoint_id, epoch, holder) VALUES (?, ?, ?, ?)",
            (stream, checkpoint_id, epoch, _me()),
        )
    carry = session.rows(
        "SELECT path, batch, arrived_ms, n_rows FROM carry WHERE stream = ? "
        "ORDER BY arrived_ms, path",
        (stream,),
    )
    last = known.last_batch if known else None
    return Claim(epoch, last, tuple(Carry(*row) for row in carry))


def stream_state(session: Session, stream: str) -> StreamState | None:
    """What is known of a stream."""
    rows = session.rows(
        "SELECT checkpoint_id, epoch, last_batch, token FROM stream WHERE name = ?", (stream,)
    )
    return StreamState(*rows[0]) if rows else None


def holder(session: Session, stream: str) -> dict[str, Any]:
    """Who claimed a stream last, as far as it is known."""
    rows = session.rows("SELECT holder FROM stream WHERE name = ?", (stream,))
    found: dict[str, Any] = json.loads(rows[0][0]) if rows and rows[0][0] else {}
    return found


def record(session: Session, stream: str, number: int | None, token: str) -> None:
    """Note a commit; ``number`` is None if it has none."""
    now_ms = time.time_ns() // 1_000_000
    if number is None:
        session.run(
            "UPDATE stream SET token = ?, committed_at = ? WHERE name = ?", (token, now_ms, stream)
        )
    else:
        session.run(
            "UPDATE stream SET token = ?, committed_at = ?, last_batch = ? WHERE name = ?",
            (token, now_ms, number, stream),
        )


def all_streams(session: Session) -> list[StreamInfo]:
    """How far each stream has come, by name."""
    rows = session.rows(
        "SELECT name, checkpoint_id, epoch, last_batch, committed_at FROM stream ORDER BY name"
    )
    return [StreamInfo(*row) for row in rows]


def _me() -> str:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since})
